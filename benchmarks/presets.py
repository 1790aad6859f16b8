"""The simulator's speed under every preset: ``python -m benchmarks.presets [--requests SHARE] [--rounds R] [...]``.

Every preset runs under every scheduler asked for, at three loads, without and with the cache watched. Request lengths
are drawn from the quantiles of the Azure conversation trace of 2023; arrivals are a Poisson process at 0.3 (light), 0.7
and 1.3 (overload) of the rate at which that preset completes, under that scheduler, requests that all arrive at once.

Each run is an isolated process on one core; its clock starts after the imports and a run of 4 requests. Rounds are
interleaved: each makes every run once, and bare SimPy's timeouts once for each preset. A figure is the median over the
rounds, a ratio one of medians, with a 95 % bootstrap interval from 2,000 resamples of whole rounds. Beside the table
stand figures of other simulators, which are not run here but scaled by a measured ratio of two machines
(``benchmarks.preset_tables``).

With ``--million`` it makes the runs of ``benchmarks.million`` instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from benchmarks import million as millions
from benchmarks.preset_tables import Part, in_console, in_markdown, million_parts, preset_parts
from benchmarks.runs import (
    LIGHT,
    NORMAL,
    OVERLOAD,
    Run,
    bare_timeouts,
    circumstances,
    follow,
    ratio,
    service_rate,
    task,
    usual,
)
from kvsim.errors import UserError, no_such
from kvsim.results import writable
from kvsim.simulation.recorder import Detail
from kvsim.simulation.schedulers import SCHEDULERS
from policies import available

LOADS = (LIGHT, NORMAL, OVERLOAD)
DETAILS: tuple[Detail, ...] = ("requests", "cache")
USUAL = ("vllm", "llama-server")
"""Schedulers of the table unless others are asked for."""


class Key(NamedTuple):
    """What tells the runs of the table apart."""

    policy: str
    scheduler: str
    load: float
    detail: Detail


class PresetBenchmark:
    """All runs of the table; those of one preset follow each other in every round."""

    def __init__(self, policies: Sequence[str], schedulers: Sequence[str], details: Sequence[Detail], share: float):
        self.policies = policies
        self.schedulers = schedulers
        self.details = details
        self._share = share
        self.rates: dict[tuple[str, str], float] = {}
        self.runs: dict[Key, Run] = {}
        self.refused: dict[str, str] = {}
        """What could not be run, with a line that says why."""
        self.bare: list[float] = []

    def run_all(self, rounds: int) -> Iterator[str]:
        """Make all runs; yields a line of progress before each."""
        for policy in self.policies:
            for scheduler in self.schedulers:
                yield f"rate of service: {policy} under {scheduler}"
                self.plan(policy, scheduler)
        for number in range(rounds):
            for name in self.turn():
                yield f"round {number + 1} of {rounds}: {name}"

    def plan(self, policy: str, scheduler: str) -> None:
        """Find the rate of service, and define the runs at shares of it."""
        given = task(policy, usual(policy, self._share), scheduler=scheduler)
        try:
            rate = self.rates[policy, scheduler] = service_rate(given, self._share)
        except RuntimeError as e:
            self.refused[f"{policy} under {scheduler}"] = str(e)
            return
        for load in LOADS:
            for detail in self.details:
                wanted = replace(given, rate=load * rate, detail=detail)
                self.runs[Key(policy, scheduler, load, detail)] = Run(wanted, load)

    def turn(self) -> Iterator[str]:
        """Make one round of all runs; yields each run's name before it."""
        last = None
        for key, run in [*self.runs.items()]:
            yield run.label
            if key.policy != last:
                self.bare.append(bare_timeouts())
                last = key.policy
            try:
                run.take()
            except RuntimeError as e:
                # One that ends badly must not cost the hour that the others took.
                self.refused[run.label] = str(e)
                del self.runs[key]

    def ratios(self) -> list[dict[str, Any]]:
        """Overload over the usual load for each detail, and cache over requests for each load, where both were run."""
        pairs = [(key, key._replace(load=NORMAL)) for key in self.runs if key.load == OVERLOAD]
        pairs += [(key, key._replace(detail="requests")) for key in self.runs if key.detail == "cache"]
        return [
            {
                "policy": above.policy,
                "scheduler": above.scheduler,
                "above": {"load": above.load, "detail": above.detail},
                "below": {"load": below.load, "detail": below.detail},
                **ratio(self.runs[above].wall_s, self.runs[below].wall_s),
            }
            for above, below in pairs
            if below in self.runs
        ]

    def report(self, rounds: int) -> dict[str, Any]:
        """The figures as they are saved."""
        return {
            **circumstances(self._share, rounds, self.bare),
            "lengths": "quantiles of the Azure 2023 conversation trace",
            "interval": "95 %, bootstrap over rounds",
            "service_rates_per_s": [
                {"policy": policy, "scheduler": scheduler, "rate": rate}
                for (policy, scheduler), rate in self.rates.items()
            ],
            "runs": [run.row() for run in self.runs.values()],
            "ratios": self.ratios(),
            "refused": self.refused,
        }


def _named(asked: Sequence[str] | None, known: Sequence[str], usual: Sequence[str], what: str) -> list[str]:
    """The names asked for, or the usual ones. Raises ``UserError``."""
    if wrong := [name for name in asked or () if name not in known]:
        raise UserError(no_such(what, wrong[0], known))
    return [*dict.fromkeys(asked or usual)]


def _save(out: Path, markdown: Path, report: dict[str, Any], parts: Sequence[Part]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    markdown.write_text(in_markdown(parts), encoding="utf-8")


def main(
    requests: Annotated[float, typer.Option(help="How many, as a share of the usual.", min=1e-6, max=100)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns of every run.", min=1)] = 3,
    only: Annotated[list[str] | None, typer.Option(help="These presets instead of all.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help=f"These instead of {' and '.join(USUAL)}.")] = None,
    detail: Annotated[list[str] | None, typer.Option(help=f"One of {' and '.join(DETAILS)} instead of both.")] = None,
    million: Annotated[bool, typer.Option("--million", help="A million requests, as typed, instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the figures go; by default below results/.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Where the page's tables go; by default beside them.")] = None,
) -> None:
    """The simulator's speed under every preset, scheduler and load."""
    console = Console(width=160)
    out = out or Path("results/presets") / ("million.json" if million else "presets.json")
    markdown = markdown or out.with_suffix(".md")
    try:
        names = [*available()]
        policies = _named(only, names, names, "policy")
        schedulers = _named(scheduler, [*SCHEDULERS], USUAL, "scheduler")
        details: list[Any] = _named(detail, DETAILS, DETAILS, "detail")
        for path in (out, markdown):
            writable(path.parent)
    except UserError as e:
        console.print(str(e), markup=False)
        raise typer.Exit(2) from None
    bench = millions.MillionBenchmark(requests) if million else PresetBenchmark(policies, schedulers, details, requests)
    follow(console, bench.run_all(rounds))
    report = bench.report(rounds)
    parts = million_parts(report) if million else preset_parts(report)
    _save(out, markdown, report, parts)
    in_console(console, parts)
    console.print(f"{out}, {markdown}", soft_wrap=True)
    raise typer.Exit(1 if report.get("refused") else 0)


if __name__ == "__main__":
    typer.run(main)
