"""The server with the fewest requests."""

from __future__ import annotations

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt


class LeastLoad(CountingRouter):
    """The server with the fewest requests in flight, the first of several.

    So vllm-router 0.1.17 and sglang-router 0.3.2 choose where a prompt is new to them, or loads differ too much.
    """

    def choose(self, prompt: Prompt, now: float) -> int:
        return self.least_loaded()
