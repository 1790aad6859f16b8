"""One server after the other."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router


class RoundRobin(Router):
    """One server after the other, as ``round_robin`` of vllm-router 0.1.17, smg 1.13.0 and sglang-router 0.3.2.

    Theirs begin with any server and go on in the order of a hash table, which is the same as long as they run.
    """

    sees_ends: ClassVar[bool] = False

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._next = 0

    def route(self, prompt: Prompt, now: float) -> int:
        server = self._next
        self._next = (server + 1) % self.servers
        return server
