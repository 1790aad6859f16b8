"""The server: a SimPy process that takes what has arrived, runs a step, and asks a backend how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

import simpy

from kvsim.backend import Backend
from kvsim.job import Job
from kvsim.metrics import Recorder
from kvsim.scheduler import Scheduler
from policies import Chunk, NoSlot, Policy
from workloads import Request, Workload

Process = Generator[simpy.Event, None, None]


class Server:
    """One turn after another until nothing more can arrive and nothing is left to do.

    ``admissions``, if given, says how many requests to take in at each turn, instead of all that have arrived by
    then: so a run can be held to the schedule of another whose steps took other times.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        policy: Policy,
        backend: Backend,
        recorder: Recorder,
        admissions: Sequence[int] | None = None,
    ):
        self._env = env
        self._scheduler = scheduler
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._script: Iterator[int] | None = None if admissions is None else iter(admissions)
        self._inbox: deque[Job] = deque()
        self._closed = False
        self._busy = False
        self._news = env.event()

    def submit(self, request: Request, *, notify: bool = False) -> Job:
        """A request arrives now. With ``notify``, its ``done`` event will be triggered when it has ended."""
        job = Job(request, self._env.now, self._env.event() if notify else None)
        self._inbox.append(job)
        self._wake()
        return job

    def close(self) -> None:
        """Nothing more will arrive."""
        self._closed = True
        self._wake()

    def run(self) -> Process:
        """The server's turns."""
        while True:
            taken = yield from self._arrivals()
            if taken is None:
                return
            self._recorder.admissions.append(taken)
            for _ in range(taken):
                self._scheduler.submit(self._inbox.popleft(), self._env.now)
            step = self._scheduler.compose(self._env.now)
            self._busy = bool(step)
            if step:
                yield from self._step(step)
            self._recorder.cache(self._env.now, self._policy.usage())

    def _step(self, step: Sequence[Chunk]) -> Process:
        """Place the step, run it, let the time pass, and tell the scheduler how it went."""
        env, recorder, backend = self._env, self._recorder, self._backend
        refusal: NoSlot | None = None
        try:
            batches = self._policy.allocate(step, views=backend.wants_views)
        except NoSlot as reason:
            refusal, batches = reason, reason.done
        seconds = 0.0
        for batch in batches:
            took = backend.forward(batch)
            recorder.forward(env.now + seconds, took, batch)
            seconds += took
        if seconds > 0:
            recorder.cache(env.now, self._policy.usage())
            yield env.timeout(seconds)
        if refusal is None:
            self._scheduler.commit(step, env.now)
        else:
            self._scheduler.no_slot(refusal, env.now)

    def _arrivals(self) -> Generator[simpy.Event, None, int | None]:
        """How many requests to take in now; waits while there is nothing to do. None: it is over."""
        if self._script is not None:
            want = next(self._script, None)
            while want is not None and len(self._inbox) < want:
                yield self._news
            return want
        while not self._busy and not self._inbox:
            if self._closed:
                return None
            yield self._news
        return len(self._inbox)

    def _wake(self) -> None:
        news, self._news = self._news, self._env.event()
        news.succeed()


def send(env: simpy.Environment, server: Server, workload: Workload) -> Process:
    """Clients: every request at its arrival time, or in a closed loop whenever one of the users is ready."""
    if workload.users is None:
        for request in workload:
            wait = request.arrival_s - env.now
            if wait > 0:
                yield env.timeout(wait)
            server.submit(request)
    else:
        requests = iter(workload)
        users = [env.process(_user(env, server, requests)) for _ in range(workload.users)]
        yield env.all_of(users)
    server.close()


def _user(env: simpy.Environment, server: Server, requests: Iterator[Request]) -> Process:
    for request in requests:
        if request.think_s > 0:
            yield env.timeout(request.think_s)
        answer = server.submit(request, notify=True).done
        assert answer is not None
        yield answer
