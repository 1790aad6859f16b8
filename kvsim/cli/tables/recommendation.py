"""What ``kvsim recommend`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsim.advice.memory.engine_flags import COMMANDS, command_line
from kvsim.advice.memory.flag_effects import Effect, effect_lines
from kvsim.advice.memory.ollama import OllamaSettings
from kvsim.advice.recommend.candidates import REASONS
from kvsim.advice.recommend.finalists import RULE
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.recommendation import Recommendation, spoken
from kvsim.cli.tables.formats import new_table, show_basis
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import plus_minus
from kvsim.model.storage_types import format_size
from policies import available


def show_recommendation(console: Console, found: Recommendation, folder: Path) -> None:
    """Print what the times rest on, the conclusion, the best settings, what to type, and what was ruled out.

    ``folder``: where the results are saved.
    """
    show_basis(console, found.basis)
    console.print(f"[bold]{found.conclusion}[/]", highlight=False, soft_wrap=True)
    if found.compared:
        console.print(found.compared, highlight=False, soft_wrap=True)
    if found.best:
        console.print()
        console.print(_best(found))
        console.print(f"{RULE}; ± is half of a 95 % interval", style="dim", highlight=False, soft_wrap=True)
    said = set[str]()
    for place, f in enumerate(found.best, 1):
        c = f.candidate
        console.print(f"\n[bold]{place}.[/] {c.label}", highlight=False, soft_wrap=True)
        if c.flags:
            typed = f"{c.command} {command_line(c.flags)}"
            _show_typed(console, typed, found.effects(f), found.ollama(f), said)
        console.print(f"   to repeat: kvsim run {folder / f'best-{place}.toml'}", highlight=False, soft_wrap=True)
    _show_ruled_out(console, found)
    for line in (*found.notes, *found.limits):
        console.print(f"note: {line}", style="dim", highlight=False, soft_wrap=True)


def show_memory_answer(console: Console, found: MemoryAnswer) -> None:
    """Print that there are no times and how to get them, then what memory says."""
    console.print(f"N{found.no_times[1:]}.", highlight=False, soft_wrap=True)
    console.print(f"[bold]{found.conclusion}[/]", highlight=False, soft_wrap=True)
    if found.fits:
        console.print()
        console.print(_fits(found))
    shown = set()
    for fit in found.fits:
        if fit.flags and fit.engine not in shown:
            shown.add(fit.engine)
            typed = f"{COMMANDS[fit.engine]} {command_line(fit.flags)}"
            console.print(f"fits at most, with K and V in {fit.type_k}:", highlight=False, soft_wrap=True)
            _show_typed(console, typed, found.effects(fit), found.ollama(fit), set())
    for line in found.limits:
        console.print(f"note: {line}", style="dim", highlight=False, soft_wrap=True)


def _show_typed(
    console: Console, typed: str, effects: Sequence[Effect], ollama: OllamaSettings | None, said: set[str]
) -> None:
    """Print what to type, what each option does to memory, and the same of Ollama's variables.

    Lines that are in ``said`` are not repeated; what is printed is added to it.
    """
    console.print(f"   {typed}", highlight=False, markup=False, soft_wrap=True)
    _show_new(console, effect_lines(effects), said)
    if ollama is not None:
        console.print(f"   {ollama.typed}", highlight=False, markup=False, soft_wrap=True)
        _show_new(console, (*effect_lines(ollama.effects), *ollama.missing_lines), said)


def _show_new(console: Console, lines: Iterable[str], said: set[str]) -> None:
    for line in lines:
        if line not in said:
            console.print(f"      {line}", style="dim", highlight=False, markup=False, soft_wrap=True)
        said.add(line)


def _fits(found: MemoryAnswer) -> Table:
    summary = found.traffic.summary
    heads = [f"{summary.longest:,} tokens\n(longest)", f"{summary.p95:,}\n(P95)", f"{summary.mean:,.0f}\n(mean)"]
    # Without a memory the rows tell what some numbers of the longest requests need.
    heads = heads if found.memory is not None else heads[:1]
    heads = [f"at once, of\n{heads[0]}", *(f"\n{head}" for head in heads[1:])]
    table = new_table("engine", "K/V", *heads, "memory with\nthe longest", left=("engine", "K/V"))
    for fit in found.fits:
        types = fit.type_k if fit.type_k == fit.type_v else f"{fit.type_k}/{fit.type_v}"
        counts = [f"{n:,}" for n in (fit.longest, fit.p95, fit.mean)][: len(heads)]
        table.add_row(ENGINE_TITLES[fit.engine], types, *counts, f"≈ {format_size(fit.memory_bytes)}")
    return table


def _show_ruled_out(console: Console, found: Recommendation) -> None:
    n = len(found.space.candidates)
    console.print(
        f"\nOf {n:,} settings, {found.tried:,} were tried in {counted(found.runs, 'run')}; ruled out:", highlight=False
    )
    for reason, count in found.reasons.items():
        by = found.missed_by if reason == "slo" else None
        much = f", by a factor of {by[0]:.3g} to {by[1]:.3g}" if by else ""
        console.print(f"   {count:>5,}  {REASONS[reason]}{much}", highlight=False)
    papers = {preset.name for preset in available().values() if preset.group == "papers"}
    for reason in ("engine", "forgets"):
        names = [name for name, (why, _) in found.space.policies_left_out.items() if why == reason]
        ideas = [name for name in names if name in papers]
        said = [name for name in names if name not in ideas]
        said += [f"{counted(len(ideas), 'idea')} from papers (kvsim compare --group papers)"] if ideas else []
        if said:
            console.print(f"   {REASONS[reason]}: {', '.join(said)}", highlight=False, soft_wrap=True)


def _best(found: Recommendation) -> Table:
    bounds = found.slo.asked
    heads = ("policy", "cells", "slots", "batch", "K/V", "memory", *(bound.text for bound in bounds))
    table = new_table("", *heads, "sustains", "met", left=("policy", "met"))
    table.columns[0].justify = "right"
    for place, f in enumerate(found.best, 1):
        c, server, cache = f.candidate, f.candidate.scenario.server, f.candidate.scenario.cache
        batch = str(c.scenario.n_batch) if c.engine == "vllm" else f"{c.scenario.n_batch}/{c.scenario.n_ubatch}"
        types = cache.type_k if cache.type_k == cache.type_v else f"{cache.type_k}/{cache.type_v}"
        figures = [short(f.measures.get(bound.measure), bound.is_share) for bound in bounds]
        sustains = "–"
        if f.sustained is not None:
            sustains = f"{'≥ ' * f.at_least}{plus_minus(f.sustained, unit=' x')}"
        row = [str(place), c.family, f"{cache.cells:,}", str(server.slots), batch, types, format_size(c.memory_bytes)]
        table.add_row(*row, *figures, sustains, f.verdict)
    return table


def short(interval: Interval | None, share: bool) -> str:
    """A measure with its interval, as short as it goes."""
    if interval is None or share:
        return spoken(interval, share)
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    return plus_minus(interval, scale, f" {unit}")
