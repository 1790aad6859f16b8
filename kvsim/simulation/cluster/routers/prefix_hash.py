"""The server that the hash of a prompt's beginning belongs to."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt
from kvsim.simulation.cluster.routers.hash_ring import HashRing, server_names
from policies.content import Content, TextSegment

_PREFIX_TOKENS = 256
_LOAD_FACTOR = 1.25
_BALANCE_ABS_THRESHOLD = 10
_MARKS = 150
_REMEMBERED = 1 << 16
"""Beginnings whose servers are kept, so that they are not hashed again."""


class PrefixHash(CountingRouter):
    """The server that the hash of a prompt's first 256 tokens belongs to, unless it is loaded too much.

    As ``prefix_hash`` of smg 1.13.0 (``model_gateway/src/policies/prefix_hash.rs``): a server whose requests exceed the
    mean by a quarter and by 10 gives way to the least loaded. The hash is another than theirs (xxh3, on a ring of
    blake3), so that which server a beginning belongs to differs, and how many do not.
    """

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        ring = HashRing(server_names(servers), _MARKS)
        self._by_hash = lru_cache(_REMEMBERED)(lambda beginning: ring.server(str(beginning)))

    def home(self, beginning: tuple[TextSegment, ...]) -> int:
        """The server that the beginning of a prompt belongs to."""
        return self._by_hash(beginning)

    def choose(self, prompt: Prompt, now: float) -> int:
        server = self.home(tuple(Content(prompt.text).head(_PREFIX_TOKENS)))
        mean = (sum(self.in_flight) + 1) / self.servers
        most = max(mean * _LOAD_FACTOR, mean + _BALANCE_ABS_THRESHOLD)
        # The least loaded is never loaded too much: it has the mean at most.
        return server if self.in_flight[server] <= most else self.least_loaded()
