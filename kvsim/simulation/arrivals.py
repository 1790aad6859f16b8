"""How requests reach the server: live from clients, or by the script of an earlier run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import simpy

from kvsim.simulation.job import Job
from policies.compiled import mypyc_attr
from workloads import Request, Workload
from workloads.request import conversations

Process = Generator[simpy.Event, None, None]
Wait = Generator[simpy.Event, None, Sequence[Job] | None]
IdleWork = Callable[[], float]
"""Does a slice of what can be done while nothing else is to be done; its seconds, 0 when there is none."""


class Turn(NamedTuple):
    """What one turn of the server took in, relative to the steps around it rather than to the clock."""

    slices: int
    """Slices of idle work that the server did before, having nothing else to do."""
    idle_s: float
    """Seconds that it then waited with nothing to do at all."""
    arrived: tuple[tuple[Request, float], ...]
    """The requests, and how much of the last step or slice had passed when each arrived, between 0 and 1."""


class Arrivals(Protocol):
    """Where the server gets its requests."""

    def ready(self) -> Sequence[Job] | None:
        """What has arrived for a server that is busy anyway; None if ``next`` must be asked."""
        ...

    def horizon_s(self) -> float:
        """The time before which certainly nothing arrives, as far as is known now, seconds."""
        ...

    def next(self, busy: bool, began_s: float, idle: IdleWork) -> Wait:
        """Wait while there is nothing to do, and return the jobs for the next turn; None if no more will come.

        ``busy``: the last turn ran a step, begun at ``began_s``, and there may be more to do.
        """
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Inbox:
    """Live arrivals."""

    def __init__(self, env: simpy.Environment, *, keeps_script: bool = True):
        """``keeps_script``: write down what each turn took in, so that it can be replayed."""
        self._env = env
        self.keeps_script = keeps_script
        self._jobs: deque[Job] = deque()
        self._closed = False
        self._waits = False
        """Whether the server waits for an arrival."""
        self._called = False
        """Whether it shall look again although nothing has arrived."""
        self._news = env.event()
        self.script: list[Turn] = []

    def submit(self, request: Request, *, notify: bool = False) -> Job:
        """A request arrives now. ``notify``: its ``done`` event will be triggered when it has ended."""
        job = Job(request, self._env.now, self._env.event() if notify else None)
        self._jobs.append(job)
        self._wake()
        return job

    def close(self) -> None:
        """No more requests will arrive."""
        self._closed = True
        self._wake()

    def call(self) -> None:
        """Something has happened that a server without work must see."""
        self._called = True
        self._wake()

    def next(self, busy: bool, began_s: float, idle: IdleWork) -> Wait:
        """All that has arrived by now; until something has, do one slice of idle work after another."""
        env, slices = self._env, 0
        while not busy and not self._jobs:
            began = env.now
            seconds = 0.0 if self._closed else idle()
            if seconds <= 0:
                break
            slices, began_s = slices + 1, began
            yield env.timeout(seconds)
        since = env.now
        while not busy and not self._jobs and not self._called:
            if self._closed:
                return None
            self._waits, self._news = True, env.event()
            yield self._news
        if not self.keeps_script:
            return self.take()
        took = since - began_s
        jobs = self.take()
        shares = [min(job.arrival_s - began_s, took) / took if took > 0 else 1.0 for job in jobs]
        arrived = tuple((job.request, share) for job, share in zip(jobs, shares, strict=True))
        self.script.append(Turn(slices, env.now - since, arrived))
        return jobs

    def ready(self) -> Sequence[Job] | None:
        """All that has arrived by now; None while a script is kept, which ``next`` writes."""
        if self.keeps_script:
            return None
        return self.take() if self._jobs else ()

    def horizon_s(self) -> float:
        """The time of the next event, whosever it is: it may be that of a client."""
        next_event: float = self._env.peek()
        return next_event

    def take(self) -> Sequence[Job]:
        """All that has arrived by now."""
        self._called = False
        if not self._jobs:
            return ()
        jobs, self._jobs = self._jobs, deque()
        return jobs

    def _wake(self) -> None:
        if self._waits:
            self._waits = False
            self._news.succeed()


class Script:
    """Replays the turns of an earlier run, whose steps may have taken other times.

    A request arrives when the same share of the same step has passed, so each takes part in the same steps, and
    what one step took longer or shorter is not charged to requests that came after it.
    """

    def __init__(self, env: simpy.Environment, turns: Iterable[Turn]):
        self._env = env
        self._turns = iter(turns)

    def ready(self) -> Sequence[Job] | None:
        """None: each turn is scripted."""
        return None

    def horizon_s(self) -> float:
        """Now: a turn may follow any step."""
        return float(self._env.now)

    def next(self, busy: bool, began_s: float, idle: IdleWork) -> Wait:
        """The jobs that the scripted turn took in, after as many slices of idle work as it did."""
        env, turn = self._env, next(self._turns, None)
        if turn is None:
            return None
        for _ in range(turn.slices):
            began_s = env.now
            yield env.timeout(idle())
        ended_s = env.now
        if turn.idle_s > 0:
            yield env.timeout(turn.idle_s)
        jobs = []
        for request, share in turn.arrived:
            during = began_s + share * (ended_s - began_s)
            jobs.append(Job(request, during if share < 1 else env.now))
        return jobs


Clients = Callable[[simpy.Environment, Inbox, Workload], Process]
"""Sends the requests of a workload, and closes the inbox behind the last one."""


def send(env: simpy.Environment, inbox: Inbox, workload: Workload) -> Process:
    """Clients: every request at its arrival time, or in a closed loop whenever one of the users is ready.

    Of a session, the first turn comes at its arrival time, the others when their user has read and thought; in a closed
    loop, a user who is ready has the next session to himself.
    """
    if workload.users is None:
        talks, requests = _Talks(env), iter(workload)
        request = next(requests, None)
        while request is not None:
            wait = request.arrival_s - env.now
            if wait > 0:
                yield env.timeout(wait)
            first, request = request, next(requests, None)
            if first.session is None:
                inbox.submit(first)
                continue
            later = []
            while request is not None and request.session == first.session:
                later.append(request)
                request = next(requests, None)
            talks.begin(_talk(env, inbox, _asked(inbox, first), later))
        yield from talks.last()
    else:
        groups = conversations(workload)
        users = [env.process(_user(env, inbox, chain.from_iterable(groups))) for _ in range(workload.users)]
        yield env.all_of(users)
    inbox.close()


class _Talks:
    """Sessions that are under way."""

    def __init__(self, env: simpy.Environment):
        self._env = env
        self._open = 0
        self._over: simpy.Event | None = None

    def begin(self, talk: Process) -> None:
        """One more."""
        self._open += 1
        self._env.process(self._until_it_ends(talk))

    def last(self) -> Process:
        """Waits until none is left."""
        if self._open:
            self._over = self._env.event()
            yield self._over

    def _until_it_ends(self, talk: Process) -> Process:
        yield from talk
        self._open -= 1
        if self._over is not None and not self._open:
            self._over.succeed()


def _talk(env: simpy.Environment, inbox: Inbox, answer: simpy.Event, later: Sequence[Request]) -> Process:
    """The rest of a session: each turn ``think_s`` after the one before it has ended, well or not."""
    yield answer
    yield from _user(env, inbox, iter(later))


def _user(env: simpy.Environment, inbox: Inbox, requests: Iterator[Request]) -> Process:
    for request in requests:
        if request.think_s > 0:
            yield env.timeout(request.think_s)
        yield _asked(inbox, request)


def _asked(inbox: Inbox, request: Request) -> simpy.Event:
    """Submits the request; what is triggered when it has ended."""
    answer = inbox.submit(request, notify=True).done
    assert answer is not None
    return answer
