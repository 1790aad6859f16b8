"""``kvsim memory``: where an engine's memory goes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_saved
from kvsim.cli.options import Json, KeyType, Out, ValueType, storage_type
from kvsim.cli.progress import RunProgress
from kvsim.results import writable

app = typer.Typer(add_completion=False)


@app.command()
def memory(
    model: Annotated[
        str,
        typer.Option(
            help="The model to load: small, tiny, smollm2, or a GGUF file.", autocompletion=completion.engine_models
        ),
    ] = "small",
    remedy: Annotated[
        list[str] | None,
        typer.Option(
            "--remedy",
            "-r",
            help="Can be given several times; by default all that the model allows.",
            autocompletion=completion.remedies,
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences at a time.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens that a slot can hold.")] = 2048,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens that each slot holds in the end.")] = 256,
    ubatch: Annotated[int, typer.Option(help="Most tokens in a forward pass.")] = 128,
    cache_type_k: KeyType = "f32",
    cache_type_v: ValueType = "f32",
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Measure where an engine's memory goes: a naive set-up, then one remedy after another."""
    from kvsim.advice.memory.set_ups import memory as measure

    target = out / f"memory-{Path(model).stem}"
    type_k, type_v = storage_type("--cache-type-k", cache_type_k), storage_type("--cache-type-v", cache_type_v)
    with RunProgress(f"measuring {model}", 100) as progress:
        report = measure(
            model,
            remedy,
            slots=slots,
            context=context,
            tokens=tokens,
            n_ubatch=ubatch,
            type_k=type_k,
            type_v=type_v,
            ready=None if as_json else partial(writable, target),
            progress=progress.share,
        )
    answer(report, as_json)
    if not as_json:
        print_saved(report.save(target), target)
