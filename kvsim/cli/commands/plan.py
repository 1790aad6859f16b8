"""``kvsim plan``: what a model takes of memory, and what fits."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvsim.advice.plan import MOST_CONTEXT, PLAN_ENGINES, Engine, Plan
from kvsim.advice.plan import plan as make_plan
from kvsim.cli.console import console, print_json
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape, model_names
from kvsim.model.storage_types import CACHE_TYPES, format_size

_NAMES: dict[Engine, str] = {"llamacpp": "llama.cpp", "vllm": "vLLM"}


def plan(
    model: Annotated[str | None, typer.Option(help="A well-known model, a config.json, or FILE.gguf.")] = None,
    ctx: Annotated[int, typer.Option(help="Tokens that each sequence may have.")] = 8192,
    parallel: Annotated[int, typer.Option(help="Sequences of that length at once.")] = 1,
    cache_type_k: Annotated[str, typer.Option(help=f"How keys are kept: {', '.join(CACHE_TYPES)}.")] = "f16",
    cache_type_v: Annotated[str, typer.Option(help="How values are kept.")] = "f16",
    engine: Annotated[str | None, typer.Option(help=f"{' or '.join(PLAN_ENGINES)}; by default both.")] = None,
    ubatch: Annotated[int, typer.Option(help="llama.cpp: tokens in a forward pass.")] = 512,
    batch: Annotated[int, typer.Option(help="Tokens in a batch; vLLM's --max-num-batched-tokens.")] = 2048,
    kv_unified: Annotated[bool, typer.Option(help="llama.cpp: one stream of cells for all sequences.")] = False,
    swa_full: Annotated[bool, typer.Option("--swa-full", help="llama.cpp: windows keep everything, too.")] = False,
    flash_attn: Annotated[bool, typer.Option(help="llama.cpp: flash attention.")] = True,
    block_size: Annotated[int, typer.Option(help="vLLM: tokens in a block.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM: share of the memory that it may take.")] = 0.9,
    weights: Annotated[
        str | None, typer.Option(help="Type of the weights, such as q4_K_M; by default what the config.json says.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What there is: 8GB, 8GiB, 512MiB or bytes.")] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the well-known models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """What a model takes of memory, part by part, under llama.cpp and under vLLM; and what fits."""
    if list_models:
        _list_models(as_json)
        return
    if model is None:
        raise UserError("--model: a name (kvsim plan --list), a config.json or FILE.gguf is expected")
    made = make_plan(
        model,
        ctx=ctx,
        parallel=parallel,
        type_k=cache_type_k,
        type_v=cache_type_v,
        engine=engine,
        ubatch=ubatch,
        batch=batch,
        kv_unified=kv_unified,
        swa_full=swa_full,
        flash_attn=flash_attn,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        weights=weights,
        memory=memory,
    )
    if as_json:
        print_json(made.to_dict())
    else:
        _show(console(), made)


def _list_models(as_json: bool) -> None:
    shapes = {name: memory_shape(name) for name in model_names()}
    if as_json:
        print_json({name: {"parameters": s.n_parameters, "source": s.source} for name, s in shapes.items()})
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head, justify in (("model", "left"), ("parameters", "right"), ("layers", "left")):
        table.add_column(head, justify="right" if justify == "right" else "left")
    for name, shape in shapes.items():
        table.add_row(name, f"{shape.n_parameters:,}", "; ".join(shape.titles))
    console().print(table)


def _show(out: Console, made: Plan) -> None:
    shape, s = made.shape, made.settings
    sequences = "one sequence" if s.parallel == 1 else f"{s.parallel:,} sequences"
    types = s.type_k if s.type_k == s.type_v else f"{s.type_k} and {s.type_v}"
    out.print(f"[bold]{shape.name}[/], {sequences} of {s.ctx:,} tokens, K and V as {types}", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for engine in made.engines:
        table.add_column(_NAMES[engine], justify="right")
    sizes = {(part.name, part.engine): part for part in made.parts}
    order = {kind: i for i, kind in enumerate(("weights", "kv", "buffers"))}
    names = sorted({part.name: order[part.kind] for part in made.parts}.items(), key=lambda item: item[1])
    for name, _ in names:
        row = [sizes.get((name, engine)) for engine in made.engines]
        table.add_row(name, *(f"{'≈ ' * part.estimate}{format_size(part.bytes)}" if part else "–" for part in row))
    table.add_row("total", *(f"≈ {format_size(made.total(engine))}" for engine in made.engines), style="bold")
    out.print(table)
    out.print("≈ is estimated, all else is exact; the engine itself and its libraries are not counted", style="dim")
    for engine in made.engines:
        details = dict.fromkeys(p.detail for p in made.parts if p.engine == engine and p.kind == "kv" and p.detail)
        out.print(f"{_NAMES[engine]}: {_options(made, engine)}: {'; '.join(details)}", highlight=False, soft_wrap=True)
    for note in made.notes:
        out.print(f"note: {note}", highlight=False, soft_wrap=True)
    if made.memory is not None:
        for engine in made.engines:
            out.print(_fit(made, engine, made.memory), highlight=False, soft_wrap=True)


def _options(made: Plan, engine: Engine) -> str:
    s = made.settings
    if engine == "vllm":
        return f"--max-model-len {s.ctx} --max-num-seqs {s.parallel}"
    return f"-c {s.ctx * s.parallel} -np {s.parallel}"


def _fit(made: Plan, engine: Engine, memory: int) -> str:
    budget = made.budget(engine, memory)
    context, parallel = made.largest_context(memory, engine), made.largest_parallel(memory, engine)
    s = made.settings
    share = f"{format_size(budget)} of {format_size(memory)}" if budget != memory else format_size(memory)
    verb = "fits" if made.fits(engine, memory) else "does not fit"
    said = f"{_NAMES[engine]}: {verb} in {share}"
    if engine == "vllm":
        said += f", which makes {made.vllm_blocks(memory):,} blocks"
    if not context:
        return f"{said}; not even one token does"
    longest = "any context" if context == MOST_CONTEXT else f"{context:,} tokens"
    if context == made.shape.context:
        longest += " (the model's own limit)"
    each = "" if s.parallel == 1 else f" for each of {s.parallel:,} sequences"
    several = f", or {parallel:,} sequence{'s' * (parallel > 1)} of {s.ctx:,}" if parallel else ""
    return f"{said}; at most {longest}{each}{several}"
