"""How much attention each token of a sequence has received: what token eviction ranks tokens by."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.vocabulary import FloatArray, IntArray

_Hashes = NDArray[np.uint64]

_SINKS = 4
"""First tokens that attention sinks in (Xiao et al., arXiv 2309.17453)."""
_SINK_WEIGHT = 1e9
"""Attention on a sink, beside which that on any other token is little."""
_FIRST_TOKENS, _FURTHER_TOKENS = 1024, 512
"""Positions that are drawn at least, and behind the last one that is held."""


class AttentionReceived(Protocol):
    """How much attention the held tokens of a sequence have received so far."""

    def scores(self, group: int, seq: int, positions: IntArray) -> FloatArray:
        """Shape (n,), for each of these ascending positions; the larger, the more important is the token."""
        ...

    def forget(self, seq: int) -> None:
        """The sequence has ended; another one may get its number."""
        ...


class DrawnAttention:
    """Attention that is drawn, where no model runs: the same for the same seed and order of sequences.

    Tokens fall into runs whose lengths are geometric with a mean of ``run_length``. Each run has a lognormal weight
    with the parameter ``sigma``, one for each group of layers. A token's score is its run's weight times its distance
    from the end to the power of ``age_exponent``. The first tokens, the sinks, outweigh all others.
    """

    def __init__(self, seed: int, *, run_length: float, sigma: float, age_exponent: float):
        if run_length < 1:
            raise ValueError(f"runs of tokens have a mean length of at least 1, not {run_length}")
        self._seed = seed
        self._starts_run = int(2.0**53 / run_length)
        """A token begins a run if 53 bits of its hash are less."""
        self._sigma = sigma
        self._age_exponent = age_exponent
        self._by_distance = np.ones(1)
        self._numbers: dict[int, int] = {}
        """Which sequence of all each open one is, from 0."""
        self._n_sequences = 0
        self._drawn: dict[tuple[int, int], FloatArray] = {}
        """By group and sequence the weights of the first positions."""

    @staticmethod
    def by_all_queries(seed: int) -> DrawnAttention:
        """Draw attention as H2O sums it up, over all tokens behind.

        Set by SmolLM2-135M reading passages of 1,024 tokens: of the attention that a token gets from each query, the
        correlation of neighbours is 0.15, and the standard deviation of the logarithm 0.50 beside a fall with age to
        the power of 0.72; the sum grows by what is left of 1 (docs/reproduced.md).
        """
        return DrawnAttention(seed, run_length=1.16, sigma=0.5, age_exponent=1 - 0.72)

    @staticmethod
    def by_last_queries(seed: int) -> DrawnAttention:
        """Draw attention as SnapKV sums it up, over the last tokens of the prompt.

        Set by the same passages: the standard deviation is 0.74, and runs are as long as it takes for survivors, by the
        highest of 7 neighbours, to come in runs of the length that they have there (docs/reproduced.md).
        """
        return DrawnAttention(seed, run_length=3.0, sigma=0.74, age_exponent=0.0)

    def scores(self, group: int, seq: int, positions: IntArray) -> FloatArray:
        """The weights of these positions by their distance from the last of them."""
        if not len(positions):
            return np.zeros(0)
        last = int(positions[-1])
        scores = self.weights(group, seq, last)[positions]
        scores *= self.by_distance(last)[last - positions]
        return scores

    def weights(self, group: int, seq: int, last: int) -> FloatArray:
        """What is drawn for the tokens of a sequence, at least up to position ``last``."""
        drawn = self._drawn.get((group, seq))
        if drawn is None or last >= len(drawn):
            drawn = self._drawn[group, seq] = self._draw(group, seq, max(last + _FURTHER_TOKENS, _FIRST_TOKENS))
        return drawn

    def by_distance(self, most: int) -> FloatArray:
        """The factor of each distance from the end, which never falls, from 0 to at least ``most``."""
        if most >= len(self._by_distance):
            self._by_distance = np.arange(1.0, 2 * most + 2) ** self._age_exponent
        return self._by_distance

    def forget(self, seq: int) -> None:
        """The next sequence of this number is another one."""
        self._numbers.pop(seq, None)
        for key in [key for key in self._drawn if key[1] == seq]:
            del self._drawn[key]

    def _draw(self, group: int, seq: int, n: int) -> FloatArray:
        if seq not in self._numbers:
            self._numbers[seq] = self._n_sequences
            self._n_sequences += 1
        key = np.array([self._seed, self._numbers[seq], group], dtype=np.uint64)
        for at in (1, 2):
            key[at] ^= _hashes(key[at - 1 : at])[0]
        # Four numbers for each position; those of a run are the ones of its first position.
        numbers = [_hashes(np.arange(n, dtype=np.uint64) * np.uint64(4) + np.uint64(i) ^ key[2]) for i in range(4)]
        begins = (numbers[0] >> np.uint64(11)) < self._starts_run
        begins[0] = True
        first = np.maximum.accumulate(np.where(begins, np.arange(n), 0))
        radius = np.sqrt(-2.0 * np.log(1.0 - _uniform(numbers[1])))
        normal = (radius * np.cos(2.0 * np.pi * _uniform(numbers[2])))[first]
        # Tokens of a run differ a little, so that the order is never in doubt.
        weights: FloatArray = np.exp(self._sigma * normal) * (1.0 - 0.01 * _uniform(numbers[3]))
        weights[:_SINKS] = _SINK_WEIGHT
        return weights


def _hashes(numbers: _Hashes) -> _Hashes:
    """A hash of each number, by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); the same shape."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _uniform(hashes: _Hashes) -> FloatArray:
    """Numbers from 0 to less than 1; the same shape."""
    return (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
