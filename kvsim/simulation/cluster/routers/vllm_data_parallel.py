"""How vLLM itself chooses among the engines of one server (``--data-parallel-size``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt, ServerLoad

_WAITING_WEIGHT = 6.0
_USAGE = 0.5


class VllmDataParallel(CountingRouter):
    """vLLM's own balancer, of a server with one front end (0.32 and 0.33, ``v1/engine/core_client.py``).

    The lowest score, which is the greater of the requests that it has in flight and those that the engine reported
    (waiting, with those sent since, and running); where some wait, each counts six times the share of the cache that
    is taken beyond one half. Engines report every 100 ms (``v1/engine/coordinator.py``). It begins to look one engine
    later each time, and takes the first of several.
    """

    polls_s: ClassVar[float] = 0.1

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._start = 0
        self._waiting = [0] * servers
        self._reported = [0] * servers
        """Waiting and running requests."""
        self._weights = [0.0] * servers
        """What each waiting request counts besides."""
        self._scores = [0.0] * servers

    def polled(self, loads: Sequence[ServerLoad], now: float) -> None:
        self._waiting = [load.waiting for load in loads]
        self._reported = [load.waiting + load.running for load in loads]
        self._weights = [_WAITING_WEIGHT * max(0.0, load.usage - _USAGE) for load in loads]
        for server in range(self.servers):
            self._note_score(server)

    def choose(self, prompt: Prompt, now: float) -> int:
        least = min(self._scores)
        try:
            server = self._scores.index(least, self._start)
        except ValueError:
            server = self._scores.index(least)
        self._start = (self._start + 1) % self.servers
        self._waiting[server] += 1
        self._reported[server] += 1
        return server

    def route(self, prompt: Prompt, now: float) -> int:
        server = super().route(prompt, now)
        self._note_score(server)
        return server

    def ended(self, server: int, prompt: Prompt, now: float) -> None:
        super().ended(server, prompt, now)
        self._note_score(server)

    def _note_score(self, server: int) -> None:
        """Note an engine's score after what it depends on has changed."""
        requests = max(self.in_flight[server], self._reported[server])
        self._scores[server] = requests + self._waiting[server] * self._weights[server]
