"""The server that a session's hash belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router
from kvsim.simulation.cluster.routers.hash_ring import HashRing, server_names

_MARKS = 160
_REMEMBERED = 1 << 16
"""Keys whose servers are kept, so that they are not hashed again."""


class ConsistentHash(Router):
    """The server that the hash of a session belongs to, on a ring with 160 marks for each server.

    As ``consistent_hash`` of vllm-router 0.1.17 (``src/policies/consistent_hash.rs``, ``hash_key.rs``) by the header
    ``x-session-id``. Requests without a session go by the hash of their text, as there, though not to the same server.
    """

    sees_ends: ClassVar[bool] = False

    def __init__(self, servers: int, rng: np.random.Generator, *, names: Sequence[str] | None = None):
        """``names``: of the servers as the router knows them, such as ``http://10.0.0.1:8000``."""
        super().__init__(servers, rng)
        self._server = lru_cache(_REMEMBERED)(HashRing(names or server_names(servers), _MARKS).server)

    def route(self, prompt: Prompt, now: float) -> int:
        text = f"request:{prompt.text}" if prompt.session is None else f"header:x-session-id:{prompt.session}"
        return self._server(text)
