"""Prefetching: bringing prefixes back from the host tier while other steps run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import simpy

from kvsim.simulation.arrivals import Process
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from policies import Content, Policy
from policies.content import Key

Mode = Literal["none", "on-resume", "predictive"]

_EARLY = 0.25
"""Quantile of the pauses between an answer and the next message at which that message is expected: most come later."""
_PAUSES = 200
"""Number of recent pauses that are remembered."""
_AHEAD = 8
"""Number of waiting requests that are prefetched for; those further back would only evict one another's prefixes."""


class Prefetcher:
    """Makes copies over a channel of its own, one at a time; a step waits for those that its new requests need.

    ``on-resume``: for requests that wait. ``predictive``: also for the next turn of each session, at the time when it
    is expected by the pauses seen so far.
    """

    def __init__(self, env: simpy.Environment, mode: Mode, policy: Policy, backend: Backend, recorder: Recorder):
        self._env = env
        self._mode = mode
        self.off = mode == "none"
        """Whether prefetching is switched off."""
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._channel_free_s = 0.0
        self._on_the_way: list[tuple[float, frozenset[Key]]] = []
        """For each fetch under way: when it arrives, and the keys of what it brings."""
        self._looked_after: set[int] = set()
        """Requests whose prefixes have been asked for."""
        self._answered: dict[int, float] = {}
        """For each session that is between two turns: when its last turn ended."""
        self._pauses: list[float] = []

    def arrived(self, job: Job) -> None:
        """A request has come; if it continues a session, the length of the pause is now known."""
        session = job.request.session
        if self._mode != "predictive" or session is None:
            return
        answered = self._answered.pop(session, None)
        if answered is not None:
            self._pauses = [*self._pauses[1 - _PAUSES :], job.arrival_s - answered]

    def ended(self, job: Job) -> None:
        """A request has ended; its session's next turn may begin with its prompt and output."""
        self._looked_after.discard(job.request.id)
        session = job.request.session
        if self._mode == "predictive" and session is not None:
            self._answered[session] = self._env.now
            if self._pauses:
                pause = float(np.quantile(self._pauses, _EARLY))
                self._env.process(self._expect(session, job.content, self._env.now, pause))

    def look_after(self, waiting: Iterable[Job]) -> None:
        """Fetch what the first waiting requests will need."""
        if self._mode == "none":
            return
        for _, job in zip(range(_AHEAD), waiting, strict=False):
            if job.request.id not in self._looked_after and job.exported is None:
                self._looked_after.add(job.request.id)
                self._fetch(job.content, job.tokens)

    def wait_s(self, started: Iterable[Job]) -> float:
        """Seconds until every prefetched block that these jobs have found has arrived."""
        now, size = self._env.now, self._policy.block_size
        self._on_the_way = [(ready, keys) for ready, keys in self._on_the_way if ready > now]
        if not self._on_the_way:
            return 0.0
        found: set[Key] = set()
        for job in started:
            found.update(job.content.keys(size, job.computed // size))
        return max([0.0, *(ready - now for ready, keys in self._on_the_way if keys & found)])

    def _expect(self, session: int, content: Content, answered_s: float, pause_s: float) -> Process:
        yield self._env.timeout(pause_s)
        if self._answered.get(session) == answered_s:
            # The next prompt has at least one token more than was said.
            self._fetch(content, content.n + 1)

    def _fetch(self, content: Content, tokens: int) -> None:
        brought = self._policy.fetch(content, tokens)
        if not brought:
            return
        transfers = self._policy.settle_transfers()
        seconds = self._backend.transfer(transfers)
        self._recorder.counts.host.transferred(transfers, ahead=True)
        self._channel_free_s = max(self._channel_free_s, self._env.now) + seconds
        self._on_the_way.append((self._channel_free_s, frozenset(brought)))
