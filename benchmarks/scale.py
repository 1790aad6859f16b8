"""How the simulator's speed grows with the number of requests, how far it is from the floor, and Vidur:
``python -m benchmarks.scale [--requests SHARE] [--rounds R] [...]``.

Request lengths are drawn from the quantiles of the Azure conversation trace of 2023 or, with ``--trace``, are the
trace's own; arrivals are a Poisson process at 0.7 of the rate at which the preset completes requests that all arrive at
once. Each run is an isolated process on one core and records what ``kvsim.run(..., detail="requests")`` does; its clock
starts after the imports and a run of 4 requests. The runs are interleaved; a figure is the median over the rounds. A
ratio is one of medians, with a 95 % bootstrap interval from 2,000 resamples of whole rounds. Bare SimPy is one process
with repeated timeouts; *times the floor* is the run's time over that of bare SimPy for as many events.
``benchmarks.presets`` compares all presets, schedulers and loads.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import seaborn as sns
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from rich.console import Console
from rich.table import Table

from benchmarks.runs import (
    MANY,
    NORMAL,
    Run,
    bare_timeouts,
    circumstances,
    follow,
    interval,
    medians,
    ratio,
    scaled,
    service_rate,
    task,
    usual,
)
from benchmarks.speed import import_s, run_isolated
from benchmarks.vidur import Vidur, VidurError
from kvsim.errors import UserError
from kvsim.results import writable

FLOOR = ("paged", "oracle")
"""Presets compared with bare SimPy."""
GROWN = ("paged", "hf-reserved", "growing", "oracle")
"""Presets for the growth with the number of requests; without ``--million`` only the first."""

NO_VIDUR = "Vidur: not compared with; name a checkout with --vidur."
_GROWTH = ("policy", "requests", "us_per_request", "requests_per_s", "peak_mb", "before_mb", "wall_s")


class ScaleBenchmark:
    """The runs of both parts; one that both share is made once in each round."""

    def __init__(self, share: float, trace: str | None, *, million: bool):
        self._share = share
        self._trace = trace
        self.million = million
        self._rates: dict[str, float] = {}
        self.runs: dict[tuple[str, int], Run] = {}
        self.bare: list[float] = []
        self.imports: list[float] = []
        self.events: dict[str, int] = {}

    def run_all(self, rounds: int) -> Iterator[str]:
        """Make all runs; yields a line of progress before each."""
        for policy in dict.fromkeys((*FLOOR, *(name for name, _ in self.growth()))):
            yield f"service rate: {policy}"
            self.rate(policy)
        self.plan()
        for number in range(rounds):
            for name in self.turn():
                yield f"round {number + 1} of {rounds}: {name}"
        yield "counting events"
        self.count()

    def rate(self, policy: str) -> float:
        """Requests per second that the policy completes when all arrive at once."""
        if policy not in self._rates:
            self._rates[policy] = service_rate(task(policy, 1, self._trace), self._share)
        return self._rates[policy]

    def plan(self) -> None:
        """Define all runs, from the service rates."""
        for policy in FLOOR:
            self.want(policy, usual(policy, self._share))
        for policy, requests in self.growth():
            self.want(policy, requests)

    def growth(self) -> list[tuple[str, int]]:
        """Policies and request numbers of the runs that show growth."""
        sizes = (10**4, 10**5, 10**6) if self.million else (10**4, 10**5)
        return [
            (policy, scaled(size, self._share)) for policy in (GROWN if self.million else GROWN[:1]) for size in sizes
        ]

    def want(self, policy: str, requests: int) -> Run:
        """The run with these parameters, added if new."""
        if (policy, requests) not in self.runs:
            given = replace(task(policy, requests, self._trace), rate=NORMAL * self.rate(policy))
            self.runs[policy, requests] = Run(given, NORMAL)
        return self.runs[policy, requests]

    def turn(self) -> Iterator[str]:
        """Make one round of all runs; yields each run's name before it."""
        self.bare.append(bare_timeouts())
        self.imports.append(import_s())
        for run in self.runs.values():
            yield run.label
            run.take()

    def count(self) -> None:
        """Count the events of the runs that are compared with bare SimPy, untimed."""
        for policy in FLOOR:
            counted = run_isolated(replace(self.want(policy, usual(policy, self._share)).task, count=True))
            self.events[policy] = counted["events"]

    def floors(self) -> list[dict[str, Any]]:
        """Rows comparing runs with bare SimPy."""
        rows = []
        for policy, events in self.events.items():
            run = self.want(policy, usual(policy, self._share))
            least = [events / rate for rate in self.bare]
            per_request = events / run.task.requests
            rows.append({"policy": policy, "events_per_request": per_request, **ratio(run.wall_s, least)})
        return rows

    def growths(self) -> list[dict[str, Any]]:
        """Rows for each size, with microseconds per request over those of the size before."""
        rows: list[dict[str, Any]] = []
        last: Run | None = None
        for policy, requests in self.growth():
            run = self.want(policy, requests)
            row = {key: value for key, value in run.row().items() if key in _GROWTH}
            if last is not None and last.task.policy == policy:
                before = [each / last.task.requests for each in last.wall_s]
                row["against_size_before"] = ratio([each / requests for each in run.wall_s], before)
            rows.append(row)
            last = run
        return rows


def compare_with_vidur(
    vidur: Vidur, bench: ScaleBenchmark, share: float, rounds: int, trace: str | None
) -> dict[str, Any]:
    """Compare with Vidur on equally many and long requests, alternately, after a run in which Vidur fits and caches its
    predictor. Raises ``VidurError``."""
    given = replace(task("paged", scaled(MANY, share), trace), rate=NORMAL * bench.rate("paged"))
    ours = Run(given, NORMAL)
    vidur.run(ours.task)
    theirs = []
    for _ in range(rounds):
        ours.take()
        theirs.append(vidur.run(ours.task))
    requests = ours.task.requests
    return {
        **vidur.facts(),
        "requests": requests,
        "wall_s": theirs,
        "ours_wall_s": ours.wall_s,
        "requests_per_s": requests / statistics.median(theirs),
        "ours_requests_per_s": requests / statistics.median(ours.wall_s),
        **ratio(theirs, ours.wall_s),
    }


def _table(*heads: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    return table


def show(console: Console, bench: ScaleBenchmark, report: dict[str, Any]) -> None:
    """Print the report."""
    start, imports = report["growth"][0]["before_mb"], statistics.median(bench.imports)
    console.print(f"At the start of a run {start:,.0f} MB; imports, not counted below, {imports:.2f} s.\n")
    for row in report["floor"]:
        console.print(
            f"{row['policy']}: {row['events_per_request']:.2f} events per request, {interval(row)} times the floor of "
            f"{statistics.median(bench.bare):,.0f} bare SimPy events/s"
        )
    table = _table(
        "\ngrowth", "\nrequests", "\nseconds", "us per\nrequest", "\npeak MB", "us per request,\nover size before"
    )
    for row in report["growth"]:
        table.add_row(
            row["policy"],
            f"{row['requests']:,}",
            f"{statistics.median(row['wall_s']):,.2f}",
            f"{row['us_per_request']:,.1f}",
            f"{row['peak_mb']:,.0f}",
            interval(row["against_size_before"]) if "against_size_before" in row else "",
        )
    console.print("", table)
    brackets = "; in brackets 95 % by bootstrap over rounds" if report["rounds"] > 1 else ""
    console.print(f"\n{medians(report['rounds']).capitalize()}{brackets}.")
    if disturbed := sorted({run.label for run in bench.runs.values() if run.disturbed}):
        console.print(f"Others had the core for more than a tenth of a run of {'; '.join(disturbed)}.")


def picture(report: dict[str, Any]) -> Figure:
    """Seconds and memory over the number of requests."""
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(8, 8), layout="constrained")
        seconds, memory = figure.subplots(2, 1, height_ratios=(1.5, 1))
        _grow(seconds, memory, report["growth"])
        floor = "\n".join(
            f"{row['policy']}: {row['events_per_request']:.1f} SimPy events a request, "
            f"{row['ratio']:.1f} times as long as bare SimPy takes for them"
            for row in report["floor"]
        )
        figure.suptitle(f"kvsim at scale, one core, {medians(report['rounds'])}\n({report['processor']})")
        figure.supxlabel(floor, fontsize=11, color="0.35")
    return figure


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _grow(seconds: Axes, memory: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for name, colour, marker in zip(names, sns.color_palette("colorblind"), "osD^", strict=False):
        mine = [row for row in rows if row["policy"] == name]
        sizes = [row["requests"] for row in mine]
        style: dict[str, Any] = {"color": colour, "marker": marker, "label": name, "linewidth": 1.8}
        seconds.plot(sizes, [statistics.median(row["wall_s"]) for row in mine], **style)
        memory.plot(sizes, [row["peak_mb"] for row in mine], **style)
    sizes = sorted({row["requests"] for row in rows})
    first = min(statistics.median(row["wall_s"]) for row in rows if row["requests"] == sizes[0])
    line = [0.7 * first * size / sizes[0] for size in sizes]
    seconds.plot(sizes, line, color="0.6", linestyle="--", linewidth=1.2, label="slope of 1")
    seconds.legend(frameon=True, fontsize=10)
    memory.set_ylim(0, 1.3 * max(row["peak_mb"] for row in rows))
    memory.axhline(rows[0]["before_mb"], color="0.6", linestyle="--", linewidth=1.2)
    memory.annotate(
        "before the run",
        (0.99, rows[0]["before_mb"]),
        (0, -5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=10,
        color="0.4",
    )
    for axis in (seconds, memory):
        axis.set(xscale="log", xlim=(sizes[0] / 1.3, sizes[-1] * 1.3))
        axis.xaxis.set_major_locator(FixedLocator(sizes))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(_plain))
    seconds.set_yscale("log")
    seconds.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    seconds.yaxis.set_minor_locator(NullLocator())
    seconds.yaxis.set_major_formatter(FuncFormatter(_plain))
    seconds.set(ylabel="seconds", title="Growth with the number of requests")
    memory.set(xlabel="requests in the run", ylabel="peak MB")


def report_of(bench: ScaleBenchmark, share: float, rounds: int, trace: Path | None) -> dict[str, Any]:
    """The figures of all parts but Vidur, as they are saved."""
    return {
        **circumstances(share, rounds, bench.bare),
        "lengths": "quantiles of the Azure 2023 conversation trace" if trace is None else trace.name,
        "interval": "95 %, bootstrap over rounds",
        "import_s": bench.imports,
        "runs": [run.row() for run in bench.runs.values()],
        "floor": bench.floors(),
        "growth": bench.growths(),
        "vidur": None,
    }


def main(
    requests: Annotated[float, typer.Option(help="How many, as a share of the usual.", min=1e-4, max=100)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns of every run.", min=1)] = 3,
    trace: Annotated[Path | None, typer.Option(help="An Azure file, for the lengths.", exists=True)] = None,
    million: Annotated[bool, typer.Option("--million", help="Growth up to a million requests, four presets.")] = False,
    vidur: Annotated[Path | None, typer.Option(help="A checkout of Vidur to compare with.")] = None,
    vidur_python: Annotated[Path | None, typer.Option(help="Its Python; by default the checkout's .venv.")] = None,
    vidur_qps: Annotated[float, typer.Option(help="Its arrivals per second; by default the trace's own rate.")] = 5.53,
    vidur_options: Annotated[str, typer.Option(help="Further options for it, in one string.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("results/scale/scale.json"),
    image: Annotated[Path, typer.Option("--picture", help="Where the picture goes.")] = Path("results/scale/scale.png"),
) -> None:
    """How the simulator's speed scales, the floor, and Vidur."""
    console = Console(width=120)
    try:
        for path in (out, image):
            writable(path.parent)
    except UserError as e:
        console.print(str(e))
        raise typer.Exit(2) from None
    lengths = None if trace is None else str(trace.resolve())
    bench = ScaleBenchmark(requests, lengths, million=million)
    follow(console, bench.run_all(rounds))
    report = report_of(bench, requests, rounds, trace)
    show(console, bench, report)
    if vidur is None:
        console.print(NO_VIDUR)
    else:
        python = (vidur_python or vidur / ".venv" / "bin" / "python").absolute()
        other = Vidur(vidur.absolute(), python, vidur_qps, vidur_options.split())
        try:
            found = report["vidur"] = compare_with_vidur(other, bench, requests, rounds, lengths)
        except VidurError as e:
            report["vidur"] = {"error": str(e)}
            console.print(f"Vidur: failed: {e}", markup=False)
        else:
            console.print(
                f"{found['requests']:,} requests of the same lengths, each on a server and a model of its own: paged "
                f"{found['ours_requests_per_s']:,.0f} requests/s, Vidur {found['requests_per_s']:,.0f}; its seconds "
                f"over ours {interval(found)}"
            )
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    picture(report).savefig(image, dpi=110)
    console.print(f"{out}, {image}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
