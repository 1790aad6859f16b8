"""Replay published points: one closed loop each, in worker processes, behind what clients see beside a server's own
time: HTTP and the network, and one tokenizer that takes prompts in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from kvsim.engines.published.points import Point
from kvsim.engines.published.servers import FRONT_END, flags_of, scenario_of, why_not
from kvsim.errors import UserError
from kvsim.experiments.workers import map_unordered
from kvsim.simulation.arrivals import Inbox, Process, send
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.cluster.run import run_cluster
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy, cost_model, profile_of
from workloads import Request, Workload, WorkloadError


class Prediction(NamedTuple):
    """What was predicted for a point; times in seconds."""

    ttft_s: float
    """Mean over the requests, as clients see it."""
    tpot_s: float
    """Mean over the requests."""
    front_end_s: float
    """What of the TTFT passes before the engine has the request."""
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
    flags = flags_of(point)
    front_end = FrontEndClients(*FRONT_END) if flags.front_end else None
    try:
        scenario, blocks = scenario_of(point, flags)
        if point.apart:
            result = run_cluster(scenario, detail="requests", clients=front_end or send)
        else:
            costs = cost_model(scenario, profile_of(scenario))
            policy = build_policy(scenario, None, costs)
            backend = SimulatedBackend(costs, policy.kernel, policy.groups)
            recorder = Recorder(detail="requests")
            result, _ = drive(scenario, policy, backend, recorder, costs.profile, clients=front_end or send)
    except (UserError, WorkloadError) as e:
        return Outcome(point, None, str(e).splitlines()[0].removeprefix("published: "))
    summary, block = result.summary, scenario.cache.block_size
    around_s = 0.0 if front_end is None else front_end.mean_s
    if summary["failed"]:
        return Outcome(point, None, f"{summary['failures'][0]['reason']}")
    return Outcome(
        point,
        Prediction(
            summary["ttft_s"]["mean"] + around_s,
            summary["tpot_s"]["mean"],
            around_s,
            blocks,
            point.concurrency * -(-(point.isl + point.osl) // block),
            summary["preemptions"],
            summary["profile"],
            summary["basis"],
        ),
    )


@dataclass
class FrontEndClients:
    """Clients of a closed loop behind a front end: ``clients`` of one run (``drive``)."""

    around_s: float
    """Seconds around each request: network, HTTP, the client."""
    token_s: float
    """Seconds per token of a prompt in the tokenizer."""
    waits_s: list[float] = field(default_factory=list)
    """What each request waited before the engine had it, seconds."""

    def __call__(self, env: simpy.Environment, inbox: Inbox, workload: Workload) -> Process:
        """Send the requests of a workload, and close the inbox behind the last one."""
        requests, tokenizer = iter(workload), simpy.Resource(env)
        yield env.all_of([env.process(self._user(env, inbox, requests, tokenizer)) for _ in range(workload.users or 1)])
        inbox.close()

    def _user(
        self, env: simpy.Environment, inbox: Inbox, requests: Iterator[Request], tokenizer: simpy.Resource
    ) -> Process:
        for request in requests:
            asked_s = env.now
            yield env.timeout(self.around_s)
            with tokenizer.request() as turn:
                yield turn
                yield env.timeout(self.token_s * request.prompt_tokens)
            self.waits_s.append(env.now - asked_s)
            answer = inbox.submit(request, notify=True).done
            assert answer is not None
            yield answer

    @property
    def mean_s(self) -> float:
        """The mean of the waits; 0 before there are any."""
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else 0.0
