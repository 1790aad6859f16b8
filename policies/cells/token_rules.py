"""Which tokens a sequence gives up to stay within its budget: StreamingLLM, H2O, SnapKV, and H2O by whole blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policies.vocabulary import FloatArray, IntArray

Scores = Callable[[IntArray], FloatArray]
"""The attention that the tokens at some positions have received; shape as its argument."""

OBSERVED = 32
"""Last tokens of a prompt whose attention SnapKV ranks by, and which it keeps."""
KERNEL = 7
"""Neighbours of a token, itself included, the highest of whose scores is its own for SnapKV."""
ENDLESS = 1 << 60
"""More tokens than are ever held."""

_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenRule(ABC):
    """Names the tokens to evict once a pass has run; it sees positions and scores, never cells."""

    budget: int
    """Tokens that a sequence keeps in each group of layers."""

    @abstractmethod
    def evicted(self, positions: IntArray, prompt_tokens: int, scores: Scores) -> IntArray:
        """Indices into ``positions``, those of the tokens held, ascending: the tokens to evict, ascending."""

    def next_due(self, end: int, prompt_tokens: int) -> int:
        """Tokens held from which on the next is to be evicted, once ``evicted`` has been asked and tokens only follow.

        ``end``: the position behind the last token. 0: it must be asked again.
        """
        return self.budget + 1

    @property
    def queries(self) -> int | None:
        """Latest query tokens whose attention an engine is to sum up for the ranking; None: all."""
        return None

    def most_held(self, prompt: int, final: int, n_ubatch: int) -> int:
        """The most tokens held at once of a sequence with ``prompt`` tokens in its prompt and ``final`` in all.

        ``n_ubatch``: the most tokens of a pass, which are all placed before any is evicted.
        """
        return min(final, self.budget + n_ubatch)


@dataclass(frozen=True, slots=True)
class SinksAndRecent(TokenRule):
    """Keeps the first ``sinks`` tokens and the most recent ones.

    StreamingLLM: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).
    """

    sinks: int

    def evicted(self, positions: IntArray, prompt_tokens: int, scores: Scores) -> IntArray:
        """The oldest behind the sinks."""
        return np.arange(self.sinks, self.sinks + max(len(positions) - self.budget, 0))


@dataclass(frozen=True, slots=True)
class HeavyHitters(TokenRule):
    """Keeps the most recent tokens, half of the budget, and of the others those with the most attention.

    H2O: Zhang et al., "Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv
    2306.14048), where a cache of 20 % is one half recent and one half heavy.
    """

    def evicted(self, positions: IntArray, prompt_tokens: int, scores: Scores) -> IntArray:
        """The lightest tokens beyond the budget: while decoding, one for each new one."""
        excess = len(positions) - self.budget
        if excess <= 0:
            return _NONE
        return _lightest(scores(positions)[: len(positions) - self.budget // 2], excess)


@dataclass(frozen=True, slots=True)
class PromptHeavy(TokenRule):
    """Evicts once, behind the prompt: keeps its last tokens, its heaviest, and all of the answer.

    SnapKV: Li et al., "LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). A token counts as much
    as the heaviest of its neighbours, so that heavy tokens stay in clusters (its LongBench runs: 32, 7, maxpool).
    """

    def evicted(self, positions: IntArray, prompt_tokens: int, scores: Scores) -> IntArray:
        """None until the prompt is complete, and none of the answer."""
        held = int(positions.searchsorted(prompt_tokens))
        excess = held - self.budget
        if excess <= 0 or positions[-1] + 1 < prompt_tokens:
            return _NONE
        weights = scores(positions[: held - min(OBSERVED, self.budget)])
        around = np.pad(weights, KERNEL // 2, mode="edge")
        return _lightest(np.lib.stride_tricks.sliding_window_view(around, KERNEL).max(axis=1), excess)

    def next_due(self, end: int, prompt_tokens: int) -> int:
        """Never, once the prompt is complete."""
        return ENDLESS if end >= prompt_tokens else 0

    @property
    def queries(self) -> int | None:
        """Count the last queries of the prompt only."""
        return OBSERVED

    def most_held(self, prompt: int, final: int, n_ubatch: int) -> int:
        """The prompt is held whole."""
        return max(prompt, min(prompt, self.budget) + final - prompt)


@dataclass(frozen=True, slots=True)
class HeavyBlocks(TokenRule):
    """Evicts whole blocks of neighbours, by their mean attention, so that no hole is left.

    OpenVINO GenAI's cache eviction, which lets a sequence keep up to a block less one token beyond its budget;
    PagedEviction (arXiv 2509.04377) does so while decoding, by norms of keys and values.
    """

    block_size: int

    def evicted(self, positions: IntArray, prompt_tokens: int, scores: Scores) -> IntArray:
        """Blocks that end before the recent half of the budget."""
        size = self.block_size
        excess = (len(positions) - self.budget) // size
        candidates = (len(positions) - self.budget // 2) // size
        if excess <= 0 or candidates <= 0:
            return _NONE
        means = scores(positions)[: candidates * size].reshape(candidates, size).mean(axis=1)
        return (_lightest(means, min(excess, candidates))[:, None] * size + np.arange(size)).reshape(-1)

    def next_due(self, end: int, prompt_tokens: int) -> int:
        """A whole block beyond the budget."""
        return self.budget + self.block_size

    def most_held(self, prompt: int, final: int, n_ubatch: int) -> int:
        """Up to a block less one token more than the budget, and a pass."""
        return min(final, self.budget + self.block_size - 1 + n_ubatch)


def _lightest(weights: FloatArray, n: int) -> IntArray:
    """Indices of the ``n`` smallest weights, ascending; of equal ones the first."""
    if n == 1:
        return np.array([weights.argmin()])
    return np.sort(weights.argsort(kind="stable")[:n])
