"""``kvsim generate``: text from the NumPy engine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import print_json
from kvsim.cli.options import Json, KeyType, NumpyThreads, Plugins, ValueType, WeightType, load_plugins, storage_type

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="How the text begins.")],
    model: Annotated[str, typer.Option(help="A model with a vocabulary: smollm2, or a GGUF file.")] = "smollm2",
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The policy that allocates cells.", autocompletion=completion.policies)
    ] = "paged",
    plugin: Plugins = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Generate at most this many tokens.", min=1)] = 64,
    chat: Annotated[bool, typer.Option(help="Put the prompt as a question to an assistant.")] = False,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling, if the temperature is above 0.", min=0)] = 0,
    weights: WeightType = "f32",
    cells: Annotated[int | None, typer.Option(help="Cells in the cache; by default as many as needed.", min=2)] = None,
    cache_type_k: KeyType = "f32",
    cache_type_v: ValueType = "f32",
    threads: NumpyThreads = 1,
    as_json: Json = False,
) -> None:
    """Generate text with the NumPy engine, on a cache under any policy."""
    from real_engine.generate import answer

    load_plugins(plugin)
    done = answer(
        prompt,
        model,
        policy=policy,
        n=tokens,
        chat=chat,
        temperature=temperature,
        seed=seed,
        weights=weights,
        cells=cells,
        type_k=storage_type("--cache-type-k", cache_type_k),
        type_v=storage_type("--cache-type-v", cache_type_v),
        threads=threads,
        write=(lambda piece: None) if as_json else partial(typer.echo, nl=False),
    )
    if as_json:
        print_json(done.summary())
    else:
        typer.echo(f"\n\n{done.describe()}")
