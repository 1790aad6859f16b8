"""Where a prompt's beginning went before, unless loads differ too much: the rule of vllm-router and sglang-router."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt
from kvsim.simulation.cluster.routers.prefix_tree import Found, PrefixTree

CHARACTERS_PER_TOKEN = 4
"""Characters of a token, to compare the limits of trees of characters with tokens: the rule of thumb for English text
that smg (``CHARS_PER_TOKEN``) and llm-d (``averageCharactersPerToken``) go by too."""


class TreeRouter(CountingRouter):
    """Remembers in a tree what went where, and from time to time forgets what is oldest."""

    cache_threshold: ClassVar[float] = 0.3
    """Share of a prompt that must have gone to a server before, for the next to go there too."""
    balance_abs_threshold: ClassVar[int] = 64
    balance_rel_threshold: ClassVar[float] = 1.5
    eviction_interval_s: ClassVar[float]
    max_tree_size: ClassVar[int]
    """Characters of the tree that are kept."""
    together: ClassVar[bool] = False
    """Whether ``max_tree_size`` is that of all servers in sum, and not of each."""

    characters_per_token: ClassVar[int] = CHARACTERS_PER_TOKEN

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self.tree = PrefixTree(servers)
        self._evicts_at = self.eviction_interval_s

    def forget(self) -> None:
        """Forget what was used longest ago, beyond the limit."""
        self.tree.evict(int(self.max_tree_size // self.characters_per_token), together=self.together)

    def find(self, prompt: Prompt, now: float) -> tuple[Found, bool]:
        """How far a prompt is in the tree, after what it has forgotten until now, and whether that is far enough."""
        if now >= self._evicts_at:
            self._evicts_at = (now // self.eviction_interval_s + 1) * self.eviction_interval_s
            self.forget()
        found = self.tree.find(prompt.text)
        return found, prompt.tokens > 0 and found.matched / prompt.tokens > self.cache_threshold


class CacheAware(TreeRouter):
    """A server that got the beginning of a prompt before; the least loaded if none did, or if loads differ too much.

    Loads differ too much if the most exceeds the least by more than ``balance_abs_threshold`` and by more than
    ``balance_rel_threshold`` times.
    """

    def choose(self, prompt: Prompt, now: float) -> int:
        found, known = self.find(prompt, now)
        least, most = min(self.in_flight), max(self.in_flight)
        if most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least:
            server = self.in_flight.index(least)
        else:
            owner = self.owner(found)  # Looked up in any case: for sglang-router, that is a use.
            server = owner if known else self.in_flight.index(least)
        self.tree.insert(found, server)
        return server

    def owner(self, found: Found) -> int:
        """The server that the match is of."""
        return self.tree.owner(found)


class VllmRouter(CacheAware):
    """``cache_aware`` of vllm-router 0.1.17 (``src/policies/cache_aware.rs``, ``select_prepared``).

    It has its workers make tokens of the prompt (``/v1/completions/render``, as vLLM 0.32 does), and of the servers
    that got the longest beginning takes the least loaded, the first of several. Where workers make no tokens, it is
    ``least-load``. Its tree has eight characters for each token, whatever they say.
    """

    eviction_interval_s: ClassVar[float] = 120.0
    max_tree_size: ClassVar[int] = 2**25
    characters_per_token: ClassVar[int] = 8

    def owner(self, found: Found) -> int:
        loads = self.in_flight
        least = min([loads[server] for server in found.node.used])
        return min([server for server in found.node.used if loads[server] == least])


class SglangRouter(CacheAware):
    """``cache_aware`` of sglang-router 0.3.2 (``src/policies/cache_aware.rs``, ``select_worker``).

    Of the servers that got the longest beginning it takes the one that got it first.
    """

    eviction_interval_s: ClassVar[float] = 60.0
    max_tree_size: ClassVar[int] = 2**26
