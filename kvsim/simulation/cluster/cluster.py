"""A cluster: its servers, and the router that says which of them gets a request.

SimPy's clock is that of the clients and the router. Each server has a clock of its own. It may run ahead as far as
nothing can reach the server from outside, and lag behind as long as no one looks at the server: what it does between
two requests of its own depends on nothing else. Before anything happens on the clients' clock, those servers are run
that could have ended a request by then which a client waits for, or the router counts. How soon that can be is known
from below, by the output tokens that a server's requests lack and its shortest step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import simpy

from kvsim.simulation.arrivals import Clients, Inbox
from kvsim.simulation.cluster.replica import Replica, call_at
from kvsim.simulation.cluster.routers import Router
from kvsim.simulation.cluster.routers.clairvoyant import Truth
from kvsim.simulation.cluster.routing import Routing
from kvsim.simulation.job import Job
from kvsim.simulation.request_log import QueueMonitor, RequestLog
from policies.compiled import mypyc_attr
from workloads import Request, Workload


@mypyc_attr(allow_interpreted_subclasses=True)
class Cluster(Inbox):
    """Takes the clients' requests, and gives each to the server that the router chooses."""

    def __init__(
        self,
        env: simpy.Environment,
        router: Callable[[Truth], Router],
        log: RequestLog,
        queue: QueueMonitor,
    ):
        """``env``: the clients' clock; ``router`` makes one, which may look at what servers really hold; ``log`` hears
        of all requests that end, ``queue`` of all that arrive."""
        super().__init__(env, keeps_script=False)
        self.replicas: Sequence[Replica] = ()
        self._routing = Routing(env, router, self._look)
        self._log = log
        self._queue = queue
        self._awaited: dict[int, simpy.Event] = {}
        """What tells the client of a request that it has ended, by the request's number."""
        self._next_ends: list[tuple[float, int]] = []
        """When a server's next request can end at the earliest, and which server; a heap, with outdated entries."""
        self._known: list[float] = []
        """The entry of each server that counts."""
        self.waits: list[tuple[int, float, float]] = []
        """Of each request that has started: its server, its arrival and its start, seconds."""

    @property
    def admitted(self) -> int:
        """Number of requests that wait no more: they have started, or were refused."""
        return sum([replica.recorder.queue.admitted for replica in self.replicas])

    def submit(self, request: Request, *, notify: bool = False) -> Job:
        """A request arrives now: the router chooses its server."""
        now = self._env.now
        self._routing.tell_ends()
        if self._queue.samples_next:
            self._advance_all(now)
            self._queue.admitted = self.admitted
        self._queue.arrive(self._log.latencies.ended)
        chosen = self._routing.choose(request)
        done = self._env.event() if notify else None
        if done is not None:
            self._awaited[request.id] = done
        job = self._give(chosen, request)
        self._routing.poll_soon()
        return job if done is None else Job(request, now, done)  # The client's: the server waits for no client.

    def _give(self, chosen: int, request: Request) -> Job:
        """Give a request that arrives now to the server that was chosen; what the server has of it."""
        job = Job(request, self._env.now)
        self.give(chosen, job)
        return job

    def give(self, number: int, job: Job) -> None:
        """Let a job come to a server at its arrival time, which is now."""
        replica = self.replicas[number]
        replica.clock.advance(self._env.now)
        replica.receive(job)
        self._note_next_end(number)

    def close(self) -> None:
        """No more requests will arrive."""
        for number, replica in enumerate(self.replicas):
            replica.clock.advance(self._env.now)
            replica.close(self._env.now)
            self._note_next_end(number)

    def ended(self, number: int, job: Job) -> None:
        """A request has ended at a server, whose clock may be ahead."""
        self._leaves(number, number, job, self._routing)
        self._answered(number, job)

    def _leaves(self, number: int, chosen: int, job: Job, routing: Routing) -> None:
        """A request has ended at a server, which is one of those of a router."""
        self.replicas[number].in_flight -= 1
        if job.started_s == job.started_s:
            self.waits.append((number, job.arrival_s, job.started_s))
        routing.ended(chosen, job.request.id, job.finished_s)

    def _answered(self, number: int, job: Job) -> None:
        """A request has ended: its client will hear of it then."""
        self._log.finish(job)
        done = self._awaited.pop(job.request.id, None)
        if done is not None:
            self.replicas[number].clock.stop_at(job.finished_s)
            call_at(self._env, job.finished_s, done.succeed)

    def run(self, clients: Clients, workload: Workload) -> None:
        """Serve a workload to its end."""
        env = self._env
        self._known = [math.inf] * len(self.replicas)
        env.process(clients(env, self, workload))
        while True:
            until_s: float = env.peek()
            if self._run_next(until_s):
                continue
            if until_s == math.inf:
                break
            env.step()
        self._advance_all(math.inf)

    def _run_next(self, until_s: float) -> bool:
        """Run the server of which a request can end first; False if none can before ``until_s``."""
        while self._next_ends and self._next_ends[0][0] < until_s:
            at_s, number = heappop(self._next_ends)
            if at_s == self._known[number]:
                self.replicas[number].clock.advance(until_s)
                self._note_next_end(number)
                return True
        return False

    def _note_next_end(self, number: int) -> None:
        """Note when a request of a server can end, if that is of interest to anyone."""
        if not (self._routing.sees_ends or self._awaited):
            self._known[number] = math.inf
            return
        self._known[number] = at_s = self.replicas[number].next_end_s
        if at_s < math.inf:
            heappush(self._next_ends, (at_s, number))
            if len(self._next_ends) > 64 * len(self.replicas):
                self._next_ends = [(at_s, number) for number, at_s in enumerate(self._known) if at_s < math.inf]
                heapify(self._next_ends)

    def _look(self) -> Sequence[Replica]:
        """Bring all servers up to now, and give those among which the router chooses."""
        self._advance_all(self._env.now)
        return self.replicas

    def _advance_all(self, until_s: float) -> None:
        for number, replica in enumerate(self.replicas):
            replica.clock.advance(until_s)
            self._note_next_end(number)
