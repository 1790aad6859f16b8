"""What ``kvsim plan`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import new_table
from kvsim.costs.memory_plan import Plan
from kvsim.costs.memory_settings import ENGINE_TITLES, MOST_CONTEXT, Engine
from kvsim.model.attention_groups import MemoryShape
from kvsim.model.storage_types import format_size


def show_models(console: Console, shapes: dict[str, MemoryShape]) -> None:
    """Print the models that are known by name."""
    table = new_table("model", "parameters", "layers", left=("layers",))
    for name, shape in shapes.items():
        table.add_row(name, f"{shape.n_parameters:,}", "; ".join(shape.titles))
    console.print(table)


def show_plan(console: Console, made: Plan) -> None:
    """Print the memory of each part under each engine, and what fits."""
    shape, s = made.shape, made.settings
    sequences = "one sequence" if s.parallel == 1 else f"{s.parallel:,} sequences"
    types = s.type_k if s.type_k == s.type_v else f"{s.type_k} and {s.type_v}"
    console.print(f"[bold]{shape.name}[/], {sequences} of {s.ctx:,} tokens, K and V as {types}", highlight=False)
    table = new_table("", *(ENGINE_TITLES[engine] for engine in made.engines))
    sizes = {(part.name, part.engine): part for part in made.parts}
    order = {kind: i for i, kind in enumerate(("weights", "kv", "buffers"))}
    names = sorted({part.name: order[part.kind] for part in made.parts}.items(), key=lambda item: item[1])
    for name, _ in names:
        row = [sizes.get((name, engine)) for engine in made.engines]
        table.add_row(name, *(f"{'≈ ' * part.estimate}{format_size(part.bytes)}" if part else "–" for part in row))
    table.add_row("total", *(f"≈ {format_size(made.total(engine))}" for engine in made.engines), style="bold")
    console.print(table)
    console.print(_what_is_estimated(made), style="dim", highlight=False, soft_wrap=True)
    for engine in made.engines:
        details = dict.fromkeys(p.detail for p in made.parts if p.engine == engine and p.kind == "kv" and p.detail)
        line = f"{ENGINE_TITLES[engine]}: {_options(made, engine)}: {'; '.join(details)}"
        console.print(line, highlight=False, soft_wrap=True)
        if defaults := made.defaults(engine):
            console.print(defaults, style="dim", highlight=False, soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if made.memory is not None:
        for engine in made.engines:
            console.print(_what_fits(made, engine, made.memory), highlight=False, soft_wrap=True)


def _what_is_estimated(made: Plan) -> str:
    """What the mark means, and the ranges of estimates that have one."""
    counted = "" if made.engines == ("vllm",) else "; llama.cpp itself and its libraries are not counted"
    lines = [f"≈ marks estimates; all else is exact{counted}"]
    for part in made.parts:
        if part.low is not None and part.high is not None and part.low < part.high:
            reach = f"{format_size(part.low)} to {format_size(part.high)}"
            lines.append(f"{part.name}: {reach} ({part.source})")
    return "\n".join(lines)


def _options(made: Plan, engine: Engine) -> str:
    s = made.settings
    if engine == "vllm":
        ranks = f" --tensor-parallel-size {s.tensor_parallel}" if s.tensor_parallel > 1 else ""
        return f"--max-model-len {s.ctx} --max-num-seqs {s.parallel}{ranks}"
    return f"-c {s.ctx * s.parallel} -np {s.parallel}"


def _what_fits(made: Plan, engine: Engine, memory: int) -> str:
    budget = made.budget(engine, memory)
    context, parallel = made.largest_context(memory, engine), made.largest_parallel(memory, engine)
    s = made.settings
    share = f"{format_size(budget)} of {format_size(memory)}" if budget != memory else format_size(memory)
    verb = "fits" if made.fits(engine, memory) else "does not fit"
    line = f"{ENGINE_TITLES[engine]}: {verb} in {share}"
    if engine == "vllm":
        fewest, most = made.vllm_blocks_range(memory)
        line += f", which makes {made.vllm_blocks(memory):,} blocks ({fewest:,} to {most:,})"
    if fitting := made.what_would_fit(engine):
        return f"{line}; what would fit: {fitting}"
    if not context:
        return f"{line}; not even one token does"
    longest = "any context" if context == MOST_CONTEXT else f"{context:,} tokens"
    if context == made.shape.context:
        longest += " (the model's own limit)"
    each = "" if s.parallel == 1 else f" for each of {s.parallel:,} sequences"
    several = f", or {parallel:,} sequence{'s' * (parallel > 1)} of {s.ctx:,}" if parallel else ""
    return f"{line}; at most {longest}{each}{several}"
