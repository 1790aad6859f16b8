"""The server that has a session; for a new one, the server that has the fewest."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import Prompt, Router

_EXPIRES_S = 7200.0
_SWEEP_S = 60.0


class StickyLeastLoaded(Router):
    """The server that has a session; for a new one, the server that has the fewest.

    As ``sticky_least_loaded`` of vllm-router 0.1.17 (``src/policies/sticky_least_loaded.rs``): a session that sends
    nothing for two hours is forgotten; a request without a session goes where the fewest are and is not remembered. Of
    several servers one is drawn, where the real one takes the highest hash of the session's and the server's names.
    """

    sees_ends: ClassVar[bool] = False

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._sessions: dict[int, tuple[int, float]] = {}
        """The server of each, and when it was last asked; the longest ago first."""
        self._counts = [0] * servers
        self._swept_s = 0.0

    def route(self, prompt: Prompt, now: float) -> int:
        if now - self._swept_s >= _SWEEP_S:
            self._swept_s = now
            for session, (server, last) in list(self._sessions.items()):
                if now - last < _EXPIRES_S:
                    break
                self._forget(session, server)
        if prompt.session is None:
            return self._least()
        server, last = self._sessions.pop(prompt.session, (-1, now))
        if server >= 0 and now - last >= _EXPIRES_S:
            self._counts[server] -= 1
            server = -1
        if server < 0:
            server = self._least()
            self._counts[server] += 1
        self._sessions[prompt.session] = server, now
        return server

    def _least(self) -> int:
        """A server that has the fewest sessions."""
        least = min(self._counts)
        return self.draw([server for server, count in enumerate(self._counts) if count == least])

    def _forget(self, session: int, server: int) -> None:
        del self._sessions[session]
        self._counts[server] -= 1
