"""The server with the fewest tokens."""

from __future__ import annotations

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router


class LeastTokens(Router):
    """The server whose requests in flight have the fewest prompt tokens, the first of several; a rule of our own."""

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._tokens = [0] * servers

    def route(self, prompt: Prompt, now: float) -> int:
        server = self._tokens.index(min(self._tokens))
        self._tokens[server] += prompt.tokens
        return server

    def ended(self, server: int, prompt: Prompt, now: float) -> None:
        self._tokens[server] -= prompt.tokens
