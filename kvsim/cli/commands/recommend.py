"""``kvsim recommend``: which policy and settings serve this traffic on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvsim.advice.candidates import ENGINES, REASONS
from kvsim.advice.recommendation import RULE, Recommendation, spoken
from kvsim.cli.console import console, print_json
from kvsim.cli.progress import SweepBar
from kvsim.errors import UserError
from kvsim.experiments.estimates import Interval
from kvsim.model.storage_types import format_size
from kvsim.results import writable


def recommend(
    slo: Annotated[str | None, typer.Option(help='What is to be met, such as "ttft_p95<1s,tpot_p95<80ms".')] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file; its kind is found by how it begins.")] = None,
    scenario: Annotated[str | None, typer.Option(help="A built-in scenario or a TOML file.")] = None,
    profile: Annotated[str | None, typer.Option(help="A shipped machine profile or a profile file.")] = None,
    memory: Annotated[str | None, typer.Option(help="What there is for weights, cache and buffers: 8GB, 8GiB.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose memory is reckoned (kvsim plan --list, a config.json, FILE.gguf).")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Type of that model's weights, such as q4_K_M.")] = None,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES[:-1])}, or {ENGINES[-1]}.")] = "both",
    load: Annotated[float, typer.Option(help="Times the workload's own.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.", min=0)] = None,
    requests: Annotated[
        int | None, typer.Option(help="In the longest runs (of sessions: conversations); by default at most 400.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; by default results/recommend-NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Recommend a policy and its settings for traffic, a service level and a memory, with what to type.

    With --json nothing is written, unless --out says where. The exit code is 0 also where nothing meets the service
    level; the output says so.
    """
    from kvsim.advice.recommend import recommend as search

    if slo is None:
        raise UserError('--slo: what is to be met is missing; such as --slo "ttft_p95<1s,tpot_p95<80ms" is accepted')
    if (trace is None) == (scenario is None):
        both = "not both" if trace is not None else "one of them is needed"
        raise UserError(f"--trace, --scenario: {both}; a trace file or a scenario is accepted")
    if out is not None:
        writable(out)
    title = str(scenario or trace)
    with SweepBar(title) as bar:
        found = search(
            scenario,
            slo=slo,
            trace=trace,
            profile=profile,
            memory=memory,
            model=model,
            weights=weights,
            engine=engine,
            load=load,
            seed=seed,
            requests=requests,
            workers=workers,
            progress=bar,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        show(console(), found)
    if out is not None or not as_json:
        target = out or Path("results") / f"recommend-{found.scenario.name}"
        written = found.save(target)
        if not as_json:
            typer.echo(f"\nSaved {', '.join(path.name for path in written)} in {target}/")


def show(out: Console, found: Recommendation) -> None:
    """All of it, for people: the sentence, the best few, what to type, what was ruled out, what is not said."""
    out.print(f"[bold]{found.conclusion}[/]", highlight=False, soft_wrap=True)
    if found.compared:
        out.print(found.compared, highlight=False, soft_wrap=True)
    if found.best:
        out.print()
        out.print(_table(found))
        out.print(f"{RULE}; ± is half of a 95 % interval", style="dim", highlight=False, soft_wrap=True)
    for place, f in enumerate(found.best, 1):
        c = f.candidate
        out.print(f"\n[bold]{place}.[/] {c.label}", highlight=False, soft_wrap=True)
        if c.flags:
            out.print(f"   {c.command} {' '.join(_flag(*flag) for flag in c.flags)}", highlight=False, soft_wrap=True)
        out.print(f"   again: kvsim run best-{place}.toml", highlight=False, soft_wrap=True)
        for note in c.notes(found.profile):
            out.print(f"   note: {note}", style="dim", highlight=False, soft_wrap=True)
    n = len(found.space.candidates)
    out.print(f"\nOf {n:,} settings {found.tried:,} were tried in {found.runs:,} runs; ruled out:", highlight=False)
    for reason, count in found.reasons.items():
        by = found.missed_by if reason == "slo" else None
        much = f", by {by[0]:.3g} x to {by[1]:.3g} x" if by else ""
        out.print(f"   {count:>5,}  {REASONS[reason]}{much}", highlight=False)
    for reason in ("engine", "forgets"):
        names = [name for name, (why, _) in found.space.policies_left_out.items() if why == reason]
        if names:
            out.print(f"   {REASONS[reason]}: {', '.join(names)}", highlight=False, soft_wrap=True)
    for line in found.limits:
        out.print(f"note: {line}", style="dim", highlight=False, soft_wrap=True)


def _flag(name: str, value: str) -> str:
    return f"{name} {value}".strip()


def _table(found: Recommendation) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("", "policy", "cells", "slots", "batch", "K/V", "memory"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for bound in found.slo.asked:
        table.add_column(bound.text, justify="right")
    table.add_column("sustains", justify="right")
    table.add_column("met")
    for place, f in enumerate(found.best, 1):
        c, server, cache = f.candidate, f.candidate.scenario.server, f.candidate.scenario.cache
        batch = str(server.n_batch) if c.engine == "vllm" else f"{server.n_batch}/{server.n_ubatch}"
        types = c.type_k if c.type_k == c.type_v else f"{c.type_k}/{c.type_v}"
        figures = [_short(f.measures.get(bound.measure), bound.is_share) for bound in found.slo.asked]
        reach = "–" if f.sustained is None else f"{'≥ ' * f.at_least}{f.sustained.value:.3g} x{_half(f.sustained, 2)}"
        row = [str(place), c.family, f"{cache.cells:,}", str(server.slots), batch, types, format_size(c.memory_bytes)]
        table.add_row(*row, *figures, reach, f.verdict)
    return table


def _short(interval: Interval | None, share: bool) -> str:
    if interval is None or share:
        return spoken(interval, share)
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    return f"{interval.value * scale:.3g} {unit}{_half(interval, 2, scale)}"


def _half(interval: Interval, digits: int, scale: float = 1.0) -> str:
    return f" ±{interval.half_width * scale:.{digits}g}" if math.isfinite(interval.half_width) else ""
