"""Any server."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router


class RandomChoice(Router):
    """Any server, each as likely, as ``random`` of vllm-router 0.1.17, smg 1.13.0 and sglang-router 0.3.2.

    So does ``power_of_two`` of sglang-router 0.3.2 where its workers report no loads: it counts requests in flight for
    ``cache_aware`` and ``manual`` alone (``src/routers/http/router.rs``), so that two drawn servers are always equal.
    """

    sees_ends: ClassVar[bool] = False

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._all = range(servers)

    def route(self, prompt: Prompt, now: float) -> int:
        return self.draw(self._all)
