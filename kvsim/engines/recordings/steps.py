"""Recorded servers of which steps are known: what they did, how long they took, and the clients that asked."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import simpy

from kvsim.costs.pass_layout import SKIPPING, Sample, Work, regime_of, work_of
from kvsim.costs.profile import MachineInfo, Regime
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.recording_files import Record
from kvsim.engines.recordings.replay import Replay
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.arrivals import Inbox, Process
from kvsim.simulation.set_up import build_policy
from policies import Kernel
from workloads import Request, Workload


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a recorded server: what its passes did, and how long it took."""

    start_s: float
    """Since the start of the recording."""
    seconds: float
    """Until the next could begin: what the server does between two steps is part of it."""
    output_s: float
    """When its tokens were there, since the start of the recording."""
    works: tuple[Work, ...]
    """The passes, as our policy makes them of its tokens."""
    by_client: bool = False
    """Whether the seconds are those that a client waited, the network and the server's front end included."""

    @property
    def regime(self) -> Regime:
        """``mixed`` if one of its passes is more than a token of each sequence."""
        return "mixed" if any(regime_of(work) == "mixed" for work in self.works) else "decode"


@dataclass(frozen=True)
class SteppedServer(RecordedServer):
    """A recording with each step: besides what was asked, what the server was and did."""

    scenario: Scenario = field(kw_only=True)
    """The server, as ours is to be set up."""
    workload: InMemoryRequests = field(kw_only=True)
    """All requests, those that failed included."""
    clients: RecordedClients = field(kw_only=True)
    steps: tuple[MeasuredStep, ...] = field(kw_only=True)
    """In order of time."""
    seen: bool = field(kw_only=True)
    """Whether the steps are those that clients saw, and not all; else they are the server's own."""
    kernel: Kernel = field(kw_only=True)
    machine: MachineInfo = field(kw_only=True)
    same_costs: Hashable = field(kw_only=True)
    """Equal for recordings whose steps cost the same: engine, model, machine, and what of the settings matters."""
    same_server: Hashable = field(kw_only=True)
    """Equal for recordings of the same engine and model on the same machine, with whatever settings."""
    same_settings: Hashable = field(kw_only=True)
    """Equal for recordings with the same settings."""
    settings: str = field(kw_only=True)
    """The settings in words."""
    assumed: tuple[str, ...] = field(kw_only=True)

    @property
    def model(self) -> str:
        """The model by our name, where it has one; else as the recording names it."""
        own = self.scenario.model
        return own.name if "name" in own.model_fields_set else self.meta.model

    @property
    def skips(self) -> bool:
        """See ``Attention.skips``."""
        return self.kernel in SKIPPING

    @cached_property
    def samples(self) -> list[Sample]:
        """Its steps for a fit; ``SAMPLES_OF_ORIGIN`` consecutive steps have an origin."""
        return [
            Sample(
                **dict(step.works[0]),
                kernel=self.kernel,
                further=step.works[1:],
                seconds=step.seconds,
                origin=i // SAMPLES_OF_ORIGIN,
                mixed=True,
            )
            for i, step in enumerate(self.steps)
        ]

    def id_of(self, number: int) -> str:
        """The id of a simulated request."""
        return str(number)


def replayed(
    replay: Replay, scenario: Scenario, records: Iterable[Record]
) -> Iterator[tuple[Record, tuple[Work, ...]]]:
    """Replay records, and say with each step what its passes did, as our policy makes them; nothing with others."""
    policy = build_policy(scenario)
    (group,), kernel = policy.groups, policy.kernel
    for record in records:
        replay.perform(record)
        placed = replay.placed if record["type"] == "step" else ()
        yield record, tuple(work_of(kernel, batch, group, kernel in SKIPPING) for batch in placed)


def fitting_half(steps: Sequence[MeasuredStep]) -> list[bool]:
    """Which steps profile and pace may be fitted to: every other one of each regime. The others are for judging."""
    seen = {"decode": 0, "mixed": 0}
    found = []
    for step in steps:
        found.append(seen[step.regime] % 2 == 0)
        seen[step.regime] += 1
    return found


LONGEST_S = 1e6
"""Eleven days: no recording is longer."""

SAMPLES_OF_ORIGIN = 20
"""Steps that are held out, or drawn again, together: a machine is fast or slow for a while."""


def one_after_another(steps: Sequence[MeasuredStep], idle_after: Sequence[bool]) -> tuple[MeasuredStep, ...]:
    """Steps that last until the next could begin, made of steps with their own seconds.

    After a step behind which the server fell idle, what comes between two steps is taken to be as long as it is in the
    median elsewhere.
    """
    gaps = [after.start_s - step.start_s for step, after in pairwise(steps)]
    between = [
        max(0.0, gap - step.seconds) for step, gap, idle in zip(steps, gaps, idle_after, strict=False) if not idle
    ]
    usual = sorted(between)[len(between) // 2] if between else 0.0
    found = []
    for i, (step, idle) in enumerate(zip(steps, idle_after, strict=True)):
        last = idle or i + 1 == len(steps)
        found.append(replace(step, seconds=step.seconds + usual if last else max(step.seconds, gaps[i])))
    return tuple(found)


def overlapping(steps: Iterable[MeasuredStep]) -> tuple[MeasuredStep, ...]:
    """Steps of which one is scheduled while another runs: a step lasts from the output before it to its own."""
    found = []
    before_s = 0.0
    for step in steps:
        began_s = max(before_s, step.start_s)
        found.append(replace(step, start_s=began_s, seconds=step.output_s - began_s))
        before_s = step.output_s
    return tuple(found)


def since_last(at_s: float, steps: Sequence[MeasuredStep]) -> float:
    """Seconds from the end of the last step that ended before ``at_s``; 0 if none did."""
    at = bisect_right(steps, at_s, key=lambda step: step.output_s) - 1
    return at_s - steps[at].output_s if at >= 0 else 0.0


class SentAfter(NamedTuple):
    """What a request waited for before it was sent."""

    requests: tuple[int, ...]
    """Requests that had to end first."""
    think_s: float
    """Seconds from the end of the last of them until it was sent."""


class FrontEnd(NamedTuple):
    """Seconds between a client and a server's scheduler: the network, HTTP, tokenisation."""

    there_s: float
    """From sending a request until the scheduler knows of it."""
    back_s: float
    """From the end of a step until the client has its token."""

    @property
    def both_s(self) -> float:
        """Seconds that both ways together add to a time to first token."""
        return self.there_s + self.back_s


@dataclass(frozen=True)
class RecordedClients:
    """Sends requests as the clients of a recording did: at a time, or some time after others had ended."""

    after: Mapping[int, SentAfter]
    """By request; all others come at their times."""
    front_end: FrontEnd
    """What lies between clients and scheduler. A client that waits for an answer sends its next request later by both
    delays; often the next step has begun by then."""
    there_s: Mapping[int, float] = field(default_factory=dict)
    """By request, where it was otherwise: an idle server takes a while to begin, and who comes meanwhile is in time."""

    def there(self, request: int) -> float:
        """Seconds from sending a request until the scheduler knows of it."""
        return self.there_s.get(request, self.front_end.there_s)

    def __call__(self, env: simpy.Environment, inbox: Inbox, workload: Workload) -> Process:
        """The process of all clients."""
        ended = {request.id: env.event() for request in workload}
        yield env.all_of([env.process(self._send(env, inbox, request, ended)) for request in workload])
        inbox.close()

    def _send(
        self, env: simpy.Environment, inbox: Inbox, request: Request, ended: Mapping[int, simpy.Event]
    ) -> Process:
        waits = self.after.get(request.id)
        if waits is not None:
            yield env.all_of([ended[number] for number in waits.requests])
        think = request.arrival_s if waits is None else self.front_end.back_s + waits.think_s
        yield env.timeout(think + self.there(request.id))
        done = inbox.submit(request, notify=True).done
        assert done is not None
        yield done
        ended[request.id].succeed()


def as_json_key(*values: Any) -> str:
    """A text that is equal for equal JSON values."""
    return json.dumps(values, sort_keys=True)


def machine_of(
    processor: object, cores: object, threads: int, own_s: float, other_s: float, **known: Any
) -> MachineInfo:
    """The machine of a recorded server; ``own_s``, ``other_s``: processor seconds of the recording and of others."""
    usual = {"blas": "", "system": "", "python": "", "numpy": "", "load_before": 0.0, "load_after": 0.0}
    share = own_s / (own_s + other_s) if own_s + other_s > 0 else 1.0
    told = {"processor": str(processor), "cores": int(str(cores)), "threads": threads, "cpu_share": share}
    return MachineInfo(**{**usual, **known, **told})
