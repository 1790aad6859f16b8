"""The reports about memory: what an engine's took (``kvsim memory``), and what a model's will (``kvsim plan``)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.advice.memory.engine_flags import largest_fit_flags
from kvsim.advice.memory.ollama import ollama_settings
from kvsim.costs.memory_settings import ENGINE_TITLES, MOST_CONTEXT
from kvsim.model.storage_types import format_size
from kvsim.reports.formats import size, whole
from kvsim.reports.report import Cell, Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.advice.memory.set_ups import MemoryReport
    from kvsim.costs.memory_plan import Plan
    from kvsim.costs.memory_settings import Engine
    from kvsim.model.cache_groups import MemoryShape


def memory_report(report: MemoryReport) -> Report:
    """What each part of each set-up takes beside what it needs; then what the columns mean."""
    parts = ("weights", "cache", "work")
    columns = [
        Column("set-up", "setup"),
        *(Column(f"{part} / needed", partial(_of_needed, part=part)) for part in parts),
        *(Column(key, key, size) for key in ("runtime", "resident", "peak")),
        Column("measured / needed", "ratio", "{:.2f}x".format),
        Column("with runtime", "ratio_with_runtime", "{:.2f}x".format),
    ]
    first, *_, last = report.table["ratio"]
    one = report.setups["naive"]
    about = (
        f"{report.model}: {one.slots} slots of {one.context:,} tokens, {one.tokens:,} held in each; "
        f"from {first:.2f}x to {last:.2f}x of what is needed"
    )
    notes = [
        "needed: weights once, K and V of the tokens held, activations of the largest pass. measured / needed leaves "
        "the runtime out;",
        "with runtime: all resident memory over the same need. resident: at the peak of the run. "
        "peak: loading included.",
    ]
    rows = report.table.reset_index().to_dict("records")
    return Report(sections=[Section(tables=[Table("Memory", columns, rows)], notes=notes)], conclusions=[about])


def _of_needed(row: dict[str, Any], part: str) -> Cell:
    return Cell(f"{size(row[part])} / {size(row[f'needed_{part}'])}", float(row[part]))


def models_report(shapes: dict[str, MemoryShape]) -> Report:
    """The models that are known by name."""
    columns = [
        Column("model", lambda item: item[0]),
        Column("parameters", lambda item: item[1].n_parameters, whole),
        Column("layers", lambda item: "; ".join(item[1].titles)),
    ]
    return Report(sections=[Section(tables=[Table("Models", columns, list(shapes.items()))])])


def plan_report(made: Plan) -> Report:
    """The memory of each part under each engine, and what fits."""
    shape, s = made.shape, made.settings
    sequences = "one sequence" if s.parallel == 1 else f"{s.parallel:,} sequences"
    lines = []
    for engine in made.engines:
        details = dict.fromkeys(p.detail for p in made.parts if p.engine == engine and p.kind == "kv" and p.detail)
        lines.append(f"{ENGINE_TITLES[engine]}: {_options(made, engine)}: {'; '.join(details)}")
        lines += [made.defaults(engine)] if made.defaults(engine) else []
        if engine == "llamacpp":
            lines.append(f"Ollama: {ollama_settings(largest_fit_flags(engine, s), made, s.ctx).typed}")
    lines += _what_is_reserved(made) + [f"note: {note}" for note in made.notes]
    fits = [] if made.memory is None else [_what_fits(made, engine, made.memory) for engine in made.engines]
    return Report(
        f"{shape.name}, {sequences} of {s.ctx:,} tokens, K and V as {types_of(made)}",
        conclusions=fits,
        sections=[
            Section("Memory", tables=[parts_table(made)], notes=_what_is_estimated(made)),
            Section("Settings", lines),
        ],
    )


def types_of(made: Plan) -> str:
    """The types of K and V, in words."""
    s = made.settings
    return s.type_k if s.type_k == s.type_v else f"{s.type_k} and {s.type_v}"


def _what_is_reserved(made: Plan) -> list[str]:
    """What of the memory is left to others, and how to say otherwise."""
    if made.memory is None or made.reserved is not None or not made.reserve.words("llamacpp"):
        return []
    engine: Engine = "llamacpp" if "llamacpp" in made.engines else "vllm"
    whose = "a card with a desktop" if made.device is None else made.device
    return [f"left to others, as is usual on {whose}: {made.reserve.words(engine)}; --reserve says otherwise"]


def parts_table(made: Plan, *, blocks: bool = False) -> Table:
    """A row for each part of the memory, and one for the total; without K and V where these fill vLLM's ``blocks``."""
    parts = [part for part in made.parts if not (blocks and part.kind == "kv")]
    sizes = {(part.name, part.engine): part for part in parts}
    order = {kind: i for i, kind in enumerate(("weights", "kv", "buffers"))}
    names = sorted({part.name: order[part.kind] for part in parts}.items(), key=lambda item: item[1])

    def taken(name: str, engine: Engine) -> Cell | None:
        if name == "total":
            size = sum(part.bytes for part in parts if part.engine == engine)
            return Cell(f"≈ {format_size(size)}", float(size))
        part = sizes.get((name, engine))
        return None if part is None else Cell(f"{'≈ ' * part.estimate}{format_size(part.bytes)}", float(part.bytes))

    engines = [Column(ENGINE_TITLES[e], partial(taken, engine=e)) for e in made.engines]
    return Table("Memory by part", [Column("", str), *engines], [*(name for name, _ in names), "total"])


def _what_is_estimated(made: Plan) -> list[str]:
    """What the mark means, and the ranges of estimates that have one."""
    lines = ["≈ marks estimates; all else is exact"]
    for part in made.parts:
        if part.low is not None and part.high is not None and part.low < part.high:
            lines.append(f"{part.name}: {format_size(part.low)} to {format_size(part.high)} ({part.source})")
    return lines


def _options(made: Plan, engine: Engine) -> str:
    s = made.settings
    if engine == "vllm":
        ranks = f" --tensor-parallel-size {s.tensor_parallel}" if s.tensor_parallel > 1 else ""
        return f"--max-model-len {s.ctx} --max-num-seqs {s.parallel}{ranks}"
    layers = "" if s.n_gpu_layers is None else f" -ngl {s.n_gpu_layers}"
    experts = f" --n-cpu-moe {s.n_cpu_moe}" if s.n_cpu_moe else ""
    return f"-c {s.ctx * s.parallel} -np {s.parallel}{layers}{experts}"


def _what_fits(made: Plan, engine: Engine, memory: int) -> str:
    budget = made.budget(engine, memory)
    context, parallel = made.largest_context(memory, engine), made.largest_parallel(memory, engine)
    s = made.settings
    share = f"{format_size(budget)} of {format_size(memory)}" if budget != memory else format_size(memory)
    fits = made.fits(engine, memory)
    line = f"{ENGINE_TITLES[engine]}: {'fits' if fits else 'does not fit'} in {share}"
    if engine == "llamacpp":
        over = made.total(engine) - budget
        left = made.reserve.margin - over
        line += "" if fits or left < 0 else f" (only without its margin, of which {format_size(left)} would be left)"
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
