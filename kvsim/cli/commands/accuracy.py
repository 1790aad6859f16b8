"""``kvsim accuracy``: what narrower K and V cost."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, print_json
from kvsim.cli.options import Json, NumpyThreads, WeightType, storage_type
from kvsim.cli.progress import RunProgress
from kvsim.model.engine_shapes import STORAGES

app = typer.Typer(add_completion=False)


@app.command()
def accuracy(
    model: Annotated[
        str,
        typer.Option(help="The model: smollm2, tiny, small, or a GGUF file.", autocompletion=completion.engine_models),
    ] = "smollm2",
    cache_type_k: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Storage type of keys: {', '.join(STORAGES)}; can be given several times.",
            autocompletion=completion.storages,
        ),
    ] = None,
    cache_type_v: Annotated[
        list[str] | None,
        typer.Option(help="Storage type of values; can be given several times.", autocompletion=completion.storages),
    ] = None,
    weights: WeightType = "f32",
    tokens: Annotated[int | None, typer.Option(help="Read at most this many tokens of the text.", min=2)] = None,
    threads: NumpyThreads = 1,
    as_json: Json = False,
) -> None:
    """Measure how much accuracy narrower K and V cost.

    Compares logits, likeliest tokens and perplexity with those of f32. Given several types, tries all combinations.
    """
    from real_engine.accuracy import accuracy as measure

    types_k = [storage_type("--cache-type-k", name) for name in cache_type_k or ()]
    types_v = [storage_type("--cache-type-v", name) for name in cache_type_v or ()]
    with RunProgress(f"reading with {model}", 100) as progress:
        found = measure(
            model, types_k, types_v, weights=weights, tokens=tokens, threads=threads, progress=progress.share
        )
    if as_json:
        print_json(found.to_dict())
    else:
        from kvsim.cli.tables.accuracy import show_accuracy

        show_accuracy(console(), found)
