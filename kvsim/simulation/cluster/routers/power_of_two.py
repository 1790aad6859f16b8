"""The better of two servers."""

from __future__ import annotations

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt


class PowerOfTwo(CountingRouter):
    """Two servers are drawn, and the one with fewer requests in flight is taken; of equals the one drawn first.

    As ``power_of_two`` of vllm-router 0.1.17 (``src/policies/power_of_two.rs``) and smg 1.13.0 where servers do not
    answer ``/get_load`` or report loads, which vLLM does not for the former.
    """

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._all = range(servers)

    def choose(self, prompt: Prompt, now: float) -> int:
        first = self.draw(self._all)
        if self.servers == 1:
            return first
        second = self.draw([*self._all[:first], *self._all[first + 1 :]])
        return first if self.in_flight[first] <= self.in_flight[second] else second
