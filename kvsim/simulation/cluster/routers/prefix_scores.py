"""Routers that weigh how much of a prompt each server has had against its load."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt, ServerLoad
from kvsim.simulation.cluster.routers.prefix_tree import PrefixTree
from policies.content import Content, TextSegment

_SLACK = 1.25
"""How much more than its limit a server's share of the tree may hold before the oldest is removed."""
_BLOCK_TOKENS = 16
_MOST_BLOCKS = 256
_BLOCKS_PER_SERVER = 31_250
_QUEUE, _USAGE, _PREFIX = 2.0, 2.0, 3.0
_BETA = 1.0


class ScoringRouter(CountingRouter):
    """Remembers what went where, up to a number of tokens of each server."""

    tokens_per_server: ClassVar[int] = _BLOCKS_PER_SERVER * _BLOCK_TOKENS

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self.tree = PrefixTree(servers)

    def choose(self, prompt: Prompt, now: float) -> int:
        found = self.tree.find(self.remembered(prompt))
        server = self.best(prompt, self.tree.matches(found))
        self.tree.insert(found, server)
        if self.tree.sizes[server] > _SLACK * self.tokens_per_server:
            self.tree.evict(self.tokens_per_server)
        return server

    def remembered(self, prompt: Prompt) -> Sequence[TextSegment]:
        """The part of a prompt that is looked up."""
        return prompt.text

    @abstractmethod
    def best(self, prompt: Prompt, matched: Sequence[int]) -> int:
        """The server with the highest score; ``matched``: tokens of the prompt that each has had before."""


class ProductionStack(ScoringRouter):
    """The share of a prompt that a server has had, less its requests in flight relative to the mean.

    The score of ``loadaware`` of vLLM's production-stack (its pull request 1035, ``routing_logic.py``): matched of all
    tokens − 1.0 × (requests − mean) / max(1, mean), the first of several. It asks LMCache's controller what the servers
    hold; here it goes by what it has sent to each, as ``prefixaware`` of the same router does.
    """

    def best(self, prompt: Prompt, matched: Sequence[int]) -> int:
        mean = sum(self.in_flight) / self.servers
        per_request = _BETA / max(1.0, mean)
        per_token = 1.0 / max(prompt.tokens, 1)
        pairs = zip(matched, self.in_flight, strict=True)
        scores = [tokens * per_token - (sent - mean) * per_request for tokens, sent in pairs]
        return scores.index(max(scores))


class LlmD(ScoringRouter):
    """llm-d's default scorers: 2 × queue + 2 × free cache + 3 × share of the prompt that a server has had.

    As of llm-d-inference-scheduler 520af478 (``pkg/epp/config/loader/defaults.go`` and ``plugins/scheduling/scorer``):
    the queue's score is 1 for the shortest and 0 for the longest; the prompt is compared by blocks of 16 tokens, 256 at
    most, with the last 31,250 blocks that a server got (here prompts are forgotten from their ends, there from their
    beginnings); of several one is drawn. Servers report every 50 ms; what it has sent since does not count.
    """

    polls_s: ClassVar[float] = 0.05

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self._scores = [_QUEUE + _USAGE] * servers
        """Of the queue and the cache."""

    def polled(self, loads: Sequence[ServerLoad], now: float) -> None:
        longest, shortest = max(load.waiting for load in loads), min(load.waiting for load in loads)
        spread = max(longest - shortest, 1)
        queues = [(longest - load.waiting) / spread if longest > shortest else 1.0 for load in loads]
        self._scores = [_QUEUE * queue + _USAGE * (1.0 - load.usage) for queue, load in zip(queues, loads, strict=True)]

    def remembered(self, prompt: Prompt) -> Sequence[TextSegment]:
        most = _MOST_BLOCKS * _BLOCK_TOKENS
        return prompt.text if prompt.tokens <= most else list(Content(prompt.text).head(most))

    def best(self, prompt: Prompt, matched: Sequence[int]) -> int:
        tokens = min(prompt.tokens, _MOST_BLOCKS * _BLOCK_TOKENS)
        blocks = -(-tokens // _BLOCK_TOKENS)
        if tokens < _BLOCK_TOKENS:  # Such a prompt is not compared.
            scores = self._scores
        else:
            known = [n // _BLOCK_TOKENS if n < tokens else blocks for n in matched]
            scores = [score + _PREFIX * n / blocks for score, n in zip(self._scores, known, strict=True)]
        most = max(scores)
        return self.draw([server for server, score in enumerate(scores) if score == most])
