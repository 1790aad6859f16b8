"""The simulator's speed, and how it scales: ``python -m benchmarks.scale [--requests SHARE] [--rounds R] [...]``.

Request lengths are drawn from the quantiles of the Azure conversation trace of 2023 or, with ``--trace``, are the
trace's own; arrivals are a Poisson process. Each preset gets 0.7 of the rate at which it completes requests that all
arrive at once, or three times that rate in the overloaded runs. Each run is an isolated process on one core and records
what ``kvsim.run(..., detail="requests")`` does; its clock starts after the imports. The runs are interleaved; a figure
is the median over the rounds. A ratio is one of medians, with a 95 % bootstrap interval from 2,000 resamples of whole
rounds. Bare SimPy is one process with repeated timeouts; *times the floor* is the run's time over that of bare SimPy
for as many events.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from rich.console import Console
from rich.table import Table

from benchmarks.speed import Task, import_s, run_isolated
from benchmarks.vidur import Vidur, VidurError
from kvsim.errors import UserError
from kvsim.machine import BUSY_BELOW, processor
from kvsim.results import writable
from policies import available

NORMAL, OVERLOAD = 0.7, 3.0
"""Arrival rates over the service rate, the rate of completion when all requests arrive at once."""

BLOCKS = ("paged", "vllm", "chunked", "paged-window", "hf-reserved", "growing", "ring", "oracle")
"""Presets of blocks and regions, which get many requests; all others are arenas."""
STEP_BY_STEP = ("paged-window",)
"""Presets of blocks without fast-forwards, which get as few requests as the arenas."""
MANY, FEW = 10_000, 2_000
CACHED = "paged, prefix cache on"

FLOOR = ("paged", "oracle")
"""Presets compared with bare SimPy."""
OVERLOADED = ("paged", "llama.cpp-b6975")
GROWN = ("paged", "hf-reserved", "growing", "oracle")
"""Presets for the growth with the number of requests; without ``--million`` only the first."""

BARE = 500_000
DRAWS = 2000
NO_VIDUR = "Vidur: not compared with; name a checkout with --vidur."


@dataclass
class Run:
    """A task and the results of its rounds."""

    label: str
    task: Task
    load: float
    found: list[dict[str, Any]] = field(default_factory=list)

    def take(self) -> None:
        """Run one round."""
        self.found.append(run_isolated(self.task))

    @property
    def wall_s(self) -> list[float]:
        """Seconds of each round."""
        return [each["wall_s"] for each in self.found]

    @property
    def median_s(self) -> float:
        """Median seconds over the rounds."""
        return statistics.median(self.wall_s)

    @property
    def us(self) -> float:
        """Microseconds per request."""
        return 1e6 * self.median_s / self.task.requests

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary, equal in every round."""
        summary: dict[str, Any] = self.found[0]["summary"]
        return summary

    @property
    def peak_mb(self) -> float:
        """Median peak MB of the process, including Python and libraries."""
        return float(statistics.median(each["peak_mb"] for each in self.found))

    @property
    def disturbed(self) -> bool:
        """Whether other processes took a tenth of the core or more in some round."""
        return any(each["cpu_s"] < BUSY_BELOW * each["wall_s"] for each in self.found)

    def row(self) -> dict[str, Any]:
        """The run's row in the report."""
        summary, seconds = self.summary, self.median_s
        tokens = summary["prompt_tokens"] + summary["output_tokens"]
        rates = [self.task.requests / each for each in self.wall_s]
        return {
            "policy": self.task.policy,
            "label": self.label,
            "load": self.load,
            "arrivals_per_s": self.task.rate,
            "requests": self.task.requests,
            "completed": summary["completed"],
            "failed": summary["failed"],
            "truncated": summary["truncated"],
            "preemptions": summary["preemptions"],
            "unstable": summary["queue"]["unstable"],
            "queue": summary["queue"],
            "us_per_request": self.us,
            "requests_per_s": self.task.requests / seconds,
            "requests_per_s_range": [min(rates), max(rates)],
            "tokens_per_s": tokens / seconds,
            "forward_passes": summary["forward_passes"],
            "forward_passes_per_s": summary["forward_passes"] / seconds,
            "peak_mb": self.peak_mb,
            "start_mb": statistics.median(each["before_mb"] for each in self.found),
            "wall_s": self.wall_s,
            "cpu_s": [each["cpu_s"] for each in self.found],
        }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Ratio of medians with a 95 % interval; both are resampled by the same rounds."""
    over, under = np.array(above), np.array(below)
    drawn = np.random.default_rng(1).integers(len(over), size=(DRAWS, len(over)))
    ratios = np.median(over[drawn], axis=1) / np.median(under[drawn], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {"ratio": float(np.median(over) / np.median(under)), "low": float(low), "high": float(high)}


def task(policy: str, requests: int, trace: str | None) -> Task:
    """A task with all requests at once, whose cache is large enough that slots are the bottleneck."""
    if policy in BLOCKS:
        cells = 256 * (16384 if policy == "hf-reserved" else 4096)
        return Task(policy, requests, None, 256, 8192, cells, 16384, trace=trace)
    cells = 32 * 16384 if policy == "streams" else 1 << 16
    return Task(policy, requests, None, 32, 2048, cells, 16384, trace=trace)


class ScaleBenchmark:
    """All runs of all parts; a run that several parts share is made once in each round."""

    def __init__(self, policies: Sequence[str], share: float, trace: str | None, *, million: bool):
        self.policies = policies
        self._share = share
        self._trace = trace
        self.million = million
        self._rates: dict[str, float] = {}
        self.runs: dict[tuple[str, int, float], Run] = {}
        self.bare: list[float] = []
        self.imports: list[float] = []
        self.events: dict[str, int] = {}

    def run_all(self, rounds: int) -> Iterator[str]:
        """Make all runs; yields a line of progress before each."""
        for name in self.find_rates():
            yield f"service rate: {name}"
        self.plan()
        for number in range(rounds):
            for name in self.turn():
                yield f"round {number + 1} of {rounds}: {name}"
        yield "counting events"
        self.count()

    def find_rates(self) -> Iterator[str]:
        """Find the service rate of each policy, untimed; yields each policy's name before its run."""
        for policy in self.policies:
            yield policy
            self.rate(policy)

    def rate(self, policy: str) -> float:
        """Requests per second that the policy completes when all arrive at once."""
        if policy not in self._rates:
            given = task(policy, 1, self._trace)
            requests = max(4, min(4 * given.slots, self.scaled(MANY)))
            summary = run_isolated(replace(given, requests=requests))["summary"]
            self._rates[policy] = summary["completed"] / summary["makespan_s"]
        return self._rates[policy]

    def plan(self) -> None:
        """Define all runs, from the service rates."""
        for policy in self.policies:
            self.want(policy, self.usual(policy))
            if policy == "paged":
                self.want(policy, self.usual(policy), label=CACHED)
        for policy in (p for p in OVERLOADED if p in self.policies):
            self.want(policy, self.usual(policy), OVERLOAD)
        for policy, requests in self.growth():
            self.want(policy, requests)

    def growth(self) -> list[tuple[str, int]]:
        """Policies and request numbers of the runs that show growth."""
        grown = [policy for policy in GROWN if policy in self.policies]
        some = [] if not grown else grown if self.million else [p for p in grown if p == GROWN[0]]
        sizes = (10**4, 10**5, 10**6) if self.million else (10**4, 10**5)
        return [(policy, self.scaled(size)) for policy in some for size in sizes]

    def want(self, policy: str, requests: int, load: float = NORMAL, label: str | None = None) -> Run:
        """The run with these parameters, added if new."""
        key = label or policy, requests, load
        if key not in self.runs:
            given = task(policy, requests, self._trace)
            given = replace(given, rate=load * self.rate(policy), prefix_cache=label == CACHED or policy == "vllm")
            self.runs[key] = Run(key[0], given, load)
        return self.runs[key]

    def scaled(self, requests: int) -> int:
        """Requests times the share asked for, at least 4."""
        return max(4, round(requests * self._share))

    def usual(self, policy: str) -> int:
        """Number of requests for a preset."""
        return self.scaled(MANY if policy in BLOCKS and policy not in STEP_BY_STEP else FEW)

    def turn(self) -> Iterator[str]:
        """Make one round of all runs; yields each run's name before it."""
        self.bare.append(run_isolated(Task(bare=BARE))["events_per_s"])
        self.imports.append(import_s())
        for run in self.runs.values():
            yield f"{run.label}, {run.task.requests:,} requests"
            run.take()

    def count(self) -> None:
        """Count the events of the runs that are compared with bare SimPy, untimed."""
        for policy in (p for p in FLOOR if p in self.policies):
            counted = run_isolated(replace(self.want(policy, self.usual(policy)).task, count=True))
            self.events[policy] = counted["events"]

    def presets(self) -> list[Run]:
        """The runs of the first table, in order."""
        named: list[tuple[str, str | None]] = [(policy, None) for policy in self.policies]
        at = next((i for i, (policy, _) in enumerate(named) if policy == "paged"), None)
        if at is not None:
            named.insert(at + 1, ("paged", CACHED))
        return [self.want(policy, self.usual(policy), label=label) for policy, label in named]

    def floors(self) -> list[dict[str, Any]]:
        """Rows comparing runs with bare SimPy."""
        rows = []
        for policy, events in self.events.items():
            run = self.want(policy, self.usual(policy))
            least = [events / rate for rate in self.bare]
            per_request = events / run.task.requests
            rows.append({"policy": policy, "events_per_request": per_request, **ratio(run.wall_s, least)})
        return rows

    def overloads(self) -> list[dict[str, Any]]:
        """Rows comparing three times the service rate with 0.7 of it, for the same requests."""
        rows = []
        for policy in (p for p in OVERLOADED if p in self.policies):
            usual, heavy = (self.want(policy, self.usual(policy), load) for load in (NORMAL, OVERLOAD))
            said = {"unstable": heavy.summary["queue"]["unstable"], "unstable_normal": usual.row()["unstable"]}
            us = {"us_normal": usual.us, "us_overload": heavy.us}
            rows.append({"policy": policy, **us, **ratio(heavy.wall_s, usual.wall_s), **said})
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


_GROWTH = ("policy", "requests", "us_per_request", "requests_per_s", "peak_mb", "start_mb", "wall_s")


def compare_with_vidur(vidur: Vidur, bench: ScaleBenchmark, rounds: int, trace: str | None) -> dict[str, Any]:
    """Compare with Vidur on equally many and long requests, alternately, after a run in which Vidur fits and caches its
    predictor. Raises ``VidurError``."""
    given = replace(task("paged", bench.scaled(MANY), trace), rate=NORMAL * bench.rate("paged"))
    ours = Run("paged", given, NORMAL)
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
        "ours_requests_per_s": requests / ours.median_s,
        **ratio(theirs, ours.wall_s),
    }


def _table(*heads: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    return table


def _medians(report: dict[str, Any]) -> str:
    return "one round" if report["rounds"] == 1 else f"medians of {report['rounds']} rounds"


def _interval(row: dict[str, float]) -> str:
    known = row["low"] < row["high"]
    return f"{row['ratio']:.2f}" + (f" ({row['low']:.2f} to {row['high']:.2f})" if known else "")


def show(console: Console, bench: ScaleBenchmark, report: dict[str, Any]) -> None:
    """Print the report."""
    table = _table("policy", "requests", "arrivals/s", "requests/s", "range", "tokens/s", "passes/s", "peak MB")
    for row in report["presets"]:
        low, high = row["requests_per_s_range"]
        table.add_row(
            row["label"],
            f"{row['requests']:,}",
            f"{row['arrivals_per_s']:.3g}",
            f"{row['requests_per_s']:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['forward_passes_per_s']:,.0f}",
            f"{row['peak_mb']:,.0f}",
        )
    console.print(table)
    start, imports = report["presets"][0]["start_mb"], statistics.median(bench.imports)
    console.print(f"At the start of a run {start:,.0f} MB; imports, not counted above, {imports:.2f} s.\n")
    for row in report["floor"]:
        console.print(
            f"{row['policy']}: {row['events_per_request']:.2f} events per request, {_interval(row)} times the floor of "
            f"{statistics.median(bench.bare):,.0f} bare SimPy events/s"
        )
    if report["growth"]:
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
                _interval(row["against_size_before"]) if "against_size_before" in row else "",
            )
        console.print("", table)
    if report["overload"]:
        table = _table(
            "\noverload", f"us per request,\n{NORMAL:g} of service", f"\n{OVERLOAD:g} times", "\nratio", "\nsays"
        )
        for row in report["overload"]:
            table.add_row(
                row["policy"],
                f"{row['us_normal']:,.1f}",
                f"{row['us_overload']:,.1f}",
                _interval(row),
                "unstable" if row["unstable"] else "stable",
            )
        console.print("", table)
    brackets = "; in brackets 95 % by bootstrap over rounds" if report["rounds"] > 1 else ""
    console.print(f"\n{_medians(report).capitalize()}{brackets}.")
    if lossy := [row["label"] for row in report["presets"] if row["failed"] or row["truncated"]]:
        console.print(f"Requests failed or were cut short under {', '.join(lossy)}.")
    if disturbed := sorted({run.label for run in bench.runs.values() if run.disturbed}):
        console.print(f"Others had the core for more than a tenth of a run of {', '.join(disturbed)}.")


def picture(report: dict[str, Any]) -> Figure:
    """Requests per second by preset; seconds and memory over size; normal load against overload."""
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(15, 9), layout="constrained")
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.15, 1))[0]
        _speeds(left.subplots(), report["presets"])
        seconds, memory, loads = right.subplots(3, 1, height_ratios=(1.5, 1, 0.9))
        _grow(seconds, memory, report["growth"])
        _overload(loads, report["overload"])
        floor = "; ".join(
            f"{row['policy']}: {row['events_per_request']:.1f} SimPy events a request, "
            f"{row['ratio']:.1f} times as long as bare SimPy takes for them"
            for row in report["floor"]
        )
        figure.suptitle(f"kvsim at scale, one core, {_medians(report)} ({report['processor']})")
        if floor:
            figure.supxlabel(floor, fontsize=11, color="0.35")
    return figure


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _speeds(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: row["requests_per_s"])
    palette = sns.color_palette("colorblind")
    top = max(row["requests_per_s_range"][1] for row in rows)
    for at, row in enumerate(rows):
        colour = palette[0] if row["policy"] in BLOCKS else palette[1]
        axis.plot(row["requests_per_s_range"], [at, at], color=colour, linewidth=3, alpha=0.5, solid_capstyle="butt")
        axis.scatter(row["requests_per_s"], at, color=colour, s=50, zorder=3)
        note = f"{_plain(row['requests_per_s'])} · {_short(row['tokens_per_s'])} tokens/s"
        axis.annotate(
            note, (row["requests_per_s_range"][1], at), (10, 0), textcoords="offset points", va="center", fontsize=9.5
        )
    for name, colour in (("blocks and regions, 256 slots", palette[0]), ("arenas, 32 slots", palette[1])):
        axis.scatter([], [], color=colour, s=50, label=name)
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.set(xscale="log", ylim=(-0.7, len(rows) - 0.3), xlabel="requests simulated per second of wall time")
    axis.set_xlim(min(row["requests_per_s_range"][0] for row in rows) / 1.5, top * 14)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_plain))
    axis.grid(axis="y", color="0.93")
    axis.set_title(f"Each preset at {NORMAL:g} of its service rate (dot: median, bar: range)")
    axis.legend(loc="lower right", frameon=True)


def _short(value: float) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"


def _grow(seconds: Axes, memory: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for name, colour, marker in zip(names, sns.color_palette("colorblind"), "osD^", strict=False):
        mine = [row for row in rows if row["policy"] == name]
        sizes = [row["requests"] for row in mine]
        style: dict[str, Any] = {"color": colour, "marker": marker, "label": name, "linewidth": 1.8}
        seconds.plot(sizes, [statistics.median(row["wall_s"]) for row in mine], **style)
        memory.plot(sizes, [row["peak_mb"] for row in mine], **style)
    if rows:
        sizes = sorted({row["requests"] for row in rows})
        first = min(statistics.median(row["wall_s"]) for row in rows if row["requests"] == sizes[0])
        line = [0.7 * first * size / sizes[0] for size in sizes]
        seconds.plot(sizes, line, color="0.6", linestyle="--", linewidth=1.2, label="slope of 1")
        seconds.legend(frameon=True, fontsize=10)
        memory.set_ylim(0, 1.3 * max(row["peak_mb"] for row in rows))
        memory.axhline(rows[0]["start_mb"], color="0.6", linestyle="--", linewidth=1.2)
        memory.annotate(
            "before the run",
            (0.99, rows[0]["start_mb"]),
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
    else:
        for axis in (seconds, memory):
            _empty(axis)
    seconds.set(ylabel="seconds", title="Growth with the number of requests")
    memory.set(xlabel="requests in the run", ylabel="peak MB")


def _overload(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    palette = sns.color_palette("colorblind")
    if not rows:
        _empty(axis)
    for at, row in enumerate(rows):
        ends = row["us_normal"], row["us_overload"]
        axis.plot(ends, [at, at], color="0.7", linewidth=2, zorder=1)
        for value, colour in zip(ends, (palette[2], palette[3]), strict=True):
            axis.scatter(value, at, color=colour, s=60, zorder=2)
        axis.annotate(
            f"x {_interval(row)}", (sum(ends) / 2, at), (0, 8), textcoords="offset points", ha="center", fontsize=10
        )
    for name, colour in ((f"{NORMAL:g} of the service rate", palette[2]), (f"{OVERLOAD:g} times", palette[3])):
        axis.scatter([], [], color=colour, s=60, label=name)
    axis.set_yticks(range(len(rows)), [row["policy"] for row in rows])
    axis.set(ylim=(-0.6, max(len(rows), 1) - 0.2), xlabel="microseconds per request", title="Overload")
    axis.set_xlim(0, 1.15 * max((max(row["us_normal"], row["us_overload"]) for row in rows), default=1.0))
    axis.legend(loc="lower right", frameon=True, fontsize=10)


def _empty(axis: Axes) -> None:
    axis.set_axis_off()
    axis.annotate("not run", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.5")


def report_of(bench: ScaleBenchmark, requests: float, rounds: int, trace: Path | None) -> dict[str, Any]:
    """The figures of all parts but Vidur, as they are saved."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("kvsim", "numpy", "simpy")},
        "lengths": "quantiles of the Azure 2023 conversation trace" if trace is None else trace.name,
        "share": requests,
        "rounds": rounds,
        "interval": "95 %, bootstrap over rounds",
        "service_rates_per_s": {name: bench.rate(name) for name in bench.policies},
        "bare_events_per_s": bench.bare,
        "import_s": bench.imports,
        "presets": [run.row() for run in bench.presets()],
        "floor": bench.floors(),
        "growth": bench.growths(),
        "overload": bench.overloads(),
        "vidur": None,
    }


def main(
    requests: Annotated[float, typer.Option(help="How many, as a share of the usual.", min=1e-4, max=100)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns of every run.", min=1)] = 3,
    only: Annotated[list[str] | None, typer.Option(help="These presets instead of all.")] = None,
    trace: Annotated[Path | None, typer.Option(help="An Azure file, for the lengths.", exists=True)] = None,
    million: Annotated[bool, typer.Option("--million", help="Growth up to a million requests, four presets.")] = False,
    vidur: Annotated[Path | None, typer.Option(help="A checkout of Vidur to compare with.")] = None,
    vidur_python: Annotated[Path | None, typer.Option(help="Its Python; by default the checkout's .venv.")] = None,
    vidur_qps: Annotated[float, typer.Option(help="Its arrivals per second; by default the trace's own rate.")] = 5.53,
    vidur_options: Annotated[str, typer.Option(help="Further options for it, in one string.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("results/scale/scale.json"),
    image: Annotated[Path, typer.Option("--picture", help="Where the picture goes.")] = Path("results/scale/scale.png"),
) -> None:
    """The simulator's speed, and how it scales."""
    console = Console(width=120)
    known = list(available())
    if unknown := [name for name in only or [] if name not in known]:
        console.print(f"no policy called {unknown[0]!r}; there are {', '.join(known)}")
        raise typer.Exit(2)
    try:
        for path in (out, image):
            writable(path.parent)
    except UserError as e:
        console.print(str(e))
        raise typer.Exit(2) from None
    lengths = None if trace is None else str(trace.resolve())
    bench = ScaleBenchmark([name for name in known if not only or name in only], requests, lengths, million=million)
    try:
        with console.status("") as status:
            for line in bench.run_all(rounds):
                status.update(line)
    except RuntimeError as e:
        console.print(str(e), markup=False)
        raise typer.Exit(1) from None
    report = report_of(bench, requests, rounds, trace)
    show(console, bench, report)
    if vidur is None:
        console.print(NO_VIDUR)
    else:
        python = (vidur_python or vidur / ".venv" / "bin" / "python").absolute()
        other = Vidur(vidur.absolute(), python, vidur_qps, vidur_options.split())
        try:
            found = report["vidur"] = compare_with_vidur(other, bench, rounds, lengths)
        except VidurError as e:
            report["vidur"] = {"error": str(e)}
            console.print(f"Vidur: failed: {e}", markup=False)
        else:
            console.print(
                f"{found['requests']:,} requests of the same lengths, each on a server and a model of its own: paged "
                f"{found['ours_requests_per_s']:,.0f} requests/s, Vidur {found['requests_per_s']:,.0f}; its seconds "
                f"over ours {_interval(found)}"
            )
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    picture(report).savefig(image, dpi=110)
    console.print(f"{out}, {image}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
