"""A cluster with servers that prefill and servers that decode: each request visits one of both.

As vLLM's proxy for its ``NixlConnector`` does it (``tests/v1/kv_connector/nixl_integration/toy_proxy_server.py``): a
prefill server is asked for one token, which is thrown away; with its answer, which says where the blocks are, the same
prompt goes to a decode server, whose answer is the client's from the first token on. Each kind has its router.

All servers are on one clock, so that none is ever ahead of another: a decode server begins a read whenever it has room,
and a prefill server gives up the blocks when it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from kvsim.simulation.arrivals import Clients
from kvsim.simulation.cluster.cluster import Cluster
from kvsim.simulation.cluster.exchange import Exchange
from kvsim.simulation.cluster.replica import Replica, call_at
from kvsim.simulation.cluster.routers import Router
from kvsim.simulation.cluster.routers.clairvoyant import Truth
from kvsim.simulation.cluster.routing import Routing
from kvsim.simulation.job import Job
from kvsim.simulation.request_log import QueueMonitor, RequestLog
from workloads import Request, Workload


class ApartCluster(Cluster):
    """Gives each request to a prefill server, and when that is done, to a decode server."""

    def __init__(
        self,
        env: simpy.Environment,
        routers: tuple[Callable[[Truth], Router], Callable[[Truth], Router]],
        log: RequestLog,
        queue: QueueMonitor,
        prefills: Sequence[bool],
        exchange: Exchange,
    ):
        """``routers`` make those of prefill and of decode servers; ``prefills``: of each server, whether it is one of
        the former; others as for any cluster."""
        super().__init__(env, routers[0], log, queue)
        self._prefill = [number for number, prefills_ in enumerate(prefills) if prefills_]
        self._decode = [number for number, prefills_ in enumerate(prefills) if not prefills_]
        self._decode_routing = Routing(env, routers[1], lambda: self._up_to_now(self._decode))
        self._exchange = exchange
        self._asked: dict[int, Request] = {}
        """Requests at prefill servers, by number."""
        self._prefilled: dict[int, Job] = {}
        """What prefill servers had of requests that are at decode servers, by number."""
        self._refused = 0
        """Requests that have failed before they came to a decode server."""
        self._closing = False
        """Whether no more requests will arrive."""

    @property
    def admitted(self) -> int:
        """Number of requests that wait no more: they have started to decode, or were refused."""
        return self._refused + sum([self.replicas[number].recorder.queue.admitted for number in self._decode])

    def _give(self, chosen: int, request: Request) -> Job:
        job = Job(request._replace(output_tokens=1, max_output_tokens=1), self._env.now, prefill_only=True)
        self._asked[request.id] = request
        self.give(self._prefill[chosen], job)
        return job

    def _hand_over(self, number: int, job: Job) -> None:
        """A prefill server has answered, now: the request goes to a decode server."""
        request = self._asked.pop(job.request.id)
        self._decode_routing.tell_ends()
        chosen = self._decode_routing.choose(request)
        self._exchange.hold(job, number)
        self._prefilled[request.id] = job
        self.give(self._decode[chosen], Job(request, self._env.now, source=job))
        self._decode_routing.poll_soon()

    def close(self) -> None:
        """No more requests will arrive: the servers may end with the last of those that have."""
        self._closing = True
        self._close_behind_last(self._env.now)

    def ended(self, number: int, job: Job) -> None:
        """A request has ended at a server, whose clock may be ahead."""
        clock = self.replicas[number].clock
        if not job.prefill_only:
            self._leaves(number, self._decode.index(number), job, self._decode_routing)
            if job.source is not None:
                self._exchange.release(job.source, job.finished_s)
            _make_the_clients(job, self._prefilled.pop(job.request.id))
        else:
            self._leaves(number, self._prefill.index(number), job, self._routing)
            if job.status == "completed":
                clock.stop_at(job.finished_s)
                call_at(self._env, job.finished_s, partial(self._hand_over, number, job))
                return
            del self._asked[job.request.id]
            self._refused += 1
        self._answered(number, job)
        if self._closing:
            clock.stop_at(job.finished_s)
            self._close_behind_last(job.finished_s)

    def run(self, clients: Clients, workload: Workload) -> None:
        """Serve a workload to its end."""
        super().run(clients, workload)
        assert not self._asked, "requests are left at prefill servers"
        assert not self._prefilled, "requests are left at decode servers"

    def _close_behind_last(self, at_s: float) -> None:
        if not (self._asked or self._prefilled):
            call_at(self._env, at_s, super().close)

    def _run_next(self, until_s: float) -> bool:
        """Run all servers; False if nothing is left to do before ``until_s``."""
        clock = self.replicas[0].clock
        if clock.env.peek() >= until_s:
            return False
        clock.advance(until_s)
        return True

    def _note_next_end(self, number: int) -> None:
        """All run together."""

    def _look(self) -> Sequence[Replica]:
        return self._up_to_now(self._prefill)

    def _up_to_now(self, numbers: Sequence[int]) -> list[Replica]:
        self._advance_all(self._env.now)
        return [self.replicas[number] for number in numbers]


def _make_the_clients(job: Job, prefilled: Job) -> None:
    """Let what a decode server had of a request, now that it has ended, say how its client fared."""
    job.arrival_s = prefilled.arrival_s
    if not math.isnan(prefilled.started_s):
        job.started_s = prefilled.started_s
    job.preemptions += prefilled.preemptions
    job.cached = prefilled.cached
