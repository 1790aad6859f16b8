"""Routers that look at no prompt: in turn, at random, or by what servers have in flight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt, Router


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


class LeastLoad(CountingRouter):
    """The server with the fewest requests in flight, the first of several.

    So vllm-router 0.1.17 and sglang-router 0.3.2 choose where a prompt is new to them, or loads differ too much.
    """

    def choose(self, prompt: Prompt, now: float) -> int:
        return self.least_loaded()


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
