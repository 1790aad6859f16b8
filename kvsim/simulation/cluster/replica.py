"""One server of a cluster: what a server is alone, on a clock of its own that the cluster lets run."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.arrivals import Inbox
from kvsim.simulation.backend import Backend
from kvsim.simulation.cluster.routers.base import ServerLoad
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import Make
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.set_up import server_of
from kvsim.simulation.step_loop import delays_until
from policies import Content, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PassReads


def call_at(env: simpy.Environment, at_s: float, call: Callable[[], object]) -> None:
    """Have something called when a clock shows ``at_s`` seconds, to the last bit; now, if that has passed."""
    first, *rest = delays_until(env.now, at_s) if at_s > env.now else (0,)

    def reached(_: simpy.Event) -> None:
        call()

    def nearly_reached(_: simpy.Event) -> None:
        env.timeout(rest[0]).callbacks.append(reached)

    env.timeout(first).callbacks.append(nearly_reached if rest else reached)


class LocalClock:
    """The clock of one server, or of several that depend on each other, which may run as far as ``until_s``."""

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.until_s = 0.0
        """Before this time nothing comes that the servers were not told of, seconds."""

    def advance(self, until_s: float) -> None:
        """Let all happen that happens before ``until_s``, or before the end of a request that someone waits for."""
        self.until_s = until_s
        while self.env.peek() < self.until_s:
            self.env.step()

    def stop_at(self, at_s: float) -> None:
        """Someone waits for what happens then: run no further for now."""
        self.until_s = min(self.until_s, at_s)


@mypyc_attr(allow_interpreted_subclasses=True)
class LocalInbox(Inbox):
    """Arrivals at one of several servers."""

    def __init__(self, clock: LocalClock):
        super().__init__(clock.env, keeps_script=False)
        self.clock = clock
        self._on_the_way = 0

    @property
    def has_news(self) -> bool:
        """Whether there is a request that the server has not taken in."""
        return bool(self._jobs or self._on_the_way)

    def horizon_s(self) -> float:
        """The next event of its own clock, or the end of what the cluster lets it run."""
        return min(self.clock.until_s, super().horizon_s())

    def announce(self, job: Job) -> None:
        """A request comes at its arrival time, up to which the clock has run."""
        self._on_the_way += 1
        call_at(self._env, job.arrival_s, lambda: self._receive(job))

    def _receive(self, job: Job) -> None:
        self._on_the_way -= 1
        self._jobs.append(job)
        self._wake()


class Replica:
    """A server with its policy, its recorder, and its clock."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        recorder: Recorder,
        backend: Backend,
        least_step_s: float,
        *,
        most_steps: int = ENDLESS,
        inbox: LocalInbox | None = None,
        make: Make | None = None,
    ):
        """``least_step_s``: as ``least_step_s`` finds it for servers like this one; ``most_steps``: as in ``run``;
        ``inbox``: with the clock of servers that depend on each other, by default one with a clock of its own;
        ``make``: as in ``server_of``."""
        self.scenario = scenario
        self.policy = policy
        self.recorder = recorder
        self.inbox = LocalInbox(LocalClock()) if inbox is None else inbox
        self.clock = self.inbox.clock
        self.env = self.clock.env
        self.server = server_of(
            scenario, self.env, self.inbox, policy, backend, recorder, most_steps=most_steps, make=make
        )
        self.env.process(self.server.run())
        self.in_flight = 0
        """Requests that have come and not ended."""
        self._least_step_s = least_step_s

    def receive(self, job: Job) -> None:
        """A request comes at its arrival time, up to which the server has run."""
        self.in_flight += 1
        self.inbox.announce(job)

    def close(self, at_s: float) -> None:
        """No more requests come from ``at_s`` on."""
        call_at(self.env, at_s, self.inbox.close)

    @property
    def load(self) -> ServerLoad:
        """What it says of itself."""
        waiting, usage = self.recorder.queue.waiting, self.policy.usage()
        return ServerLoad(self.in_flight - waiting, waiting, 1 - usage.free / usage.capacity)

    def truth(self, content: Content, tokens: int) -> tuple[int, int]:
        """Tokens of a prompt that its cache holds for any sequence, and tokens of the requests that wait."""
        held = self.policy.cached_tokens(content, tokens)
        return held, self.server.queued_tokens

    @property
    def next_end_s(self) -> float:
        """A time before which none of its requests can end, as far as it has run; infinity if it has none."""
        next_event: float = self.env.peek()
        if next_event == math.inf or self.inbox.has_news:
            return next_event
        return next_event + self._least_step_s * self.server.steps_to_next_end()


def least_step_s(backend: Backend, policy: Policy, slots: int) -> float:
    """Less than any step takes: the shortest in which up to so many sequences decode their first token; seconds."""
    price = backend.price
    if price is None:
        return 0.0
    least, work = math.inf, PassReads(len(policy.groups))
    for n in range(1, slots + 1):
        work.tokens = work.chunks = n
        for group in work.groups:
            group.add_chunk(1, 1, 1, 0)
            group.span = 1
        least = min(least, price.seconds(work))
    return least
