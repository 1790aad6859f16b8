"""The rules of smg: the least expected wait, among servers that got a prompt's beginning before or among all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import ceil, sqrt
from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt, ServerLoad
from kvsim.simulation.cluster.routers.cache_aware import TreeRouter
from kvsim.simulation.cluster.routers.prefix_tree import MOST_HOLDERS

_TIE_S = 1e-6
_PROMPT_TOKENS = 1024
"""Tokens that a prompt is taken to have: over HTTP, its length is not known."""
_TOKENS_PER_S = 2000.0
"""Tokens that a server is taken to compute per second: vLLM's metrics do not say it."""
_USAGE_S = 0.15
_MOST_USAGE = 0.999
_OVERLOAD_WAITING = 8
_OVERLOAD_USAGE = 0.8
_MARGIN = 4.0
"""Requests by which a server may always exceed the mean."""


class SmgLeastLoad(CountingRouter):
    """``least_load`` of smg 1.13.0 (``model_gateway/src/policies/least_load.rs``): the least expected wait.

    That is its requests, reported ones and those sent since, at 1,024 tokens each and 2,000 tokens per second, and
    0.15 s × k / (1 − k) for a share k of its cache that is taken. Before servers report, it is the requests in flight.
    One of several within a microsecond is drawn. A server that reports 8 requests waiting or 80 % of its cache taken is
    left out (``worker/overload.rs``); if all do, one of those with the fewest requests in flight is drawn.
    """

    polls_s: ClassVar[float] = 10.0

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self.free: list[int] = list(range(servers))
        """The servers that are not overloaded."""
        self._reports = False
        """Whether servers have reported."""
        self._known = [0] * servers
        """Requests that a server has reported, and those that it was sent since."""
        self._penalties = [0.0] * servers
        """Seconds for a full cache."""
        self._waits: list[float] = [0.0] * servers
        """Seconds until a server has computed what it has; requests in flight before servers report."""

    def polled(self, loads: Sequence[ServerLoad], now: float) -> None:
        self._reports = True
        self._known = [load.running + load.waiting for load in loads]
        usages = [min(max(load.usage, 0.0), _MOST_USAGE) for load in loads]
        self._penalties = [_USAGE_S * usage / (1.0 - usage) for usage in usages]
        overloaded = [load.waiting >= _OVERLOAD_WAITING or load.usage >= _OVERLOAD_USAGE for load in loads]
        self.free = [server for server in range(self.servers) if not overloaded[server]]
        for server in range(self.servers):
            self._note_wait(server)

    def choose(self, prompt: Prompt, now: float) -> int:
        return self.least_wait(self.free)

    def route(self, prompt: Prompt, now: float) -> int:
        if self.free:
            server = super().route(prompt, now)
            self._known[server] += 1
        else:
            least = min(self.in_flight)
            server = self.draw([server for server, sent in enumerate(self.in_flight) if sent == least])
            self.in_flight[server] += 1
        self._note_wait(server)
        return server

    def ended(self, server: int, prompt: Prompt, now: float) -> None:
        super().ended(server, prompt, now)
        self._note_wait(server)

    def least_wait(self, among: Sequence[int]) -> int:
        """The one of several servers where a request is expected to wait least."""
        waits = self._waits
        most = min([waits[server] for server in among]) + _TIE_S
        return self.draw([server for server in among if waits[server] <= most])

    def _note_wait(self, server: int) -> None:
        """Note how long a request is expected to wait at a server, after its load has changed."""
        requests: float = self.in_flight[server]
        if self._reports:
            requests = max(requests, self._known[server]) * _PROMPT_TOKENS / _TOKENS_PER_S + self._penalties[server]
        self._waits[server] = requests


class SmgCacheAware(SmgLeastLoad, TreeRouter):
    """``cache_aware`` of smg 1.13.0 over HTTP (``model_gateway/src/policies/cache_aware.rs``).

    Among the servers that got the beginning of a prompt before, or among all if it is new, that with the least expected
    wait; but none whose requests in flight exceed the mean by half and by a margin, which is twice the mean's root, at
    least 4 and at most 64.
    """

    eviction_interval_s: ClassVar[float] = 60.0
    max_tree_size: ClassVar[int] = 2**26
    together: ClassVar[bool] = True

    def choose(self, prompt: Prompt, now: float) -> int:
        found, known = self.find(prompt, now)
        self.tree.owner(found)  # Which counts as a use.
        holders = list(islice(found.node.used, MOST_HOLDERS)) if known else []
        server = self.least_wait(self._calm(holders) or self.free)
        self.tree.insert(found, server)
        return server

    def _calm(self, holders: Sequence[int]) -> Sequence[int]:
        """The holders that are not overloaded; if all of them are, all servers that are not."""
        free = self.free
        sent = sum(self.in_flight)
        if len(free) < self.servers:
            holders = [server for server in holders if server in free]
            sent = sum([self.in_flight[server] for server in free])
        if not holders:
            return holders
        mean = sent / len(free)
        margin = min(self.balance_abs_threshold, max(ceil(2.0 * sqrt(mean)), _MARGIN))
        most = max(self.balance_rel_threshold * mean, mean + margin)
        calm = [server for server in holders if self.in_flight[server] <= most]
        return calm or [server for server in free if self.in_flight[server] <= most]
