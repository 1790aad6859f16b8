"""Replay published points: one closed loop each, in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from kvsim.engines.published.points import Point
from kvsim.engines.published.servers import flags_of, scenario_of, why_not
from kvsim.errors import UserError
from kvsim.experiments.workers import map_unordered
from kvsim.simulation.run import run
from workloads import WorkloadError


class Prediction(NamedTuple):
    """What was predicted for a point; times in seconds."""

    ttft_s: float
    tpot_s: float
    """Means over the requests, as the two above."""
    ttft_p50_s: float
    tpot_p50_s: float
    blocks: int
    """Blocks of the cache, the null block included."""
    needed_blocks: int
    """Blocks of all clients together where each holds its longest request."""
    preemptions: int
    profile: str
    """The name of the profile whose times these are."""
    basis: str
    """What the profile says of its source and its error."""


@dataclass(frozen=True)
class Outcome:
    """A point, and its prediction or why there is none."""

    point: Point
    prediction: Prediction | None
    reason: str = ""
    """Why it was not replayed; empty if it was."""
    tried: bool = True
    """Whether it was to be replayed: no point is that can be told beforehand to be none of a server of this kind."""


def replay(points: Sequence[Point], workers: int | None, done: Callable[[int, int], object]) -> list[Outcome]:
    """Replay points in so many processes (one for each processor); outcomes in the order of the points.

    ``done`` is called with the number of points that are done and that of all. The result is the same with any number
    of processes.
    """
    outcomes: dict[int, Outcome] = {}
    # Those that take longest first, so that no process is left with one of them at the end.
    jobs = sorted(enumerate(points), key=lambda job: -job[1].concurrency * job[1].osl)
    with closing(map_unordered(_numbered, jobs, workers)) as found:
        for number, outcome in found:
            outcomes[number] = outcome
            done(len(outcomes), len(points))
    return [outcomes[number] for number in range(len(points))]


def _numbered(job: tuple[int, Point]) -> tuple[int, Outcome]:
    return job[0], replay_point(job[1])


def replay_point(point: Point) -> Outcome:
    """Simulate the closed loop of one point."""
    if reason := why_not(point):
        return Outcome(point, None, reason)
    try:
        scenario = scenario_of(point, flags_of(point))
        summary = run(scenario, detail="requests").summary
    except (UserError, WorkloadError) as e:
        return Outcome(point, None, str(e).splitlines()[0].removeprefix("published: "))
    block = scenario.cache.block_size
    if summary["failed"]:
        return Outcome(point, None, f"{summary['failures'][0]['reason']}")
    return Outcome(
        point,
        Prediction(
            summary["ttft_s"]["mean"],
            summary["tpot_s"]["mean"],
            summary["ttft_s"]["p50"],
            summary["tpot_s"]["p50"],
            scenario.cache.cells // block,
            point.concurrency * -(-(point.isl + point.osl) // block),
            summary["preemptions"],
            summary["profile"],
            summary["basis"],
        ),
    )
