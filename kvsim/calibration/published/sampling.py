"""Passes of a device: which to price, drawn over the range that servers need, most of them where servers live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsim.costs.pass_layout import Sample
from policies import Kernel

KERNEL: Kernel = "gather"
"""The kernel of paged attention, which reads just a sequence's cells, through a table of blocks."""

PASSES = 1_000
"""Passes with which a profile's tables are compared; a package takes some 50 µs for each."""
_DECODE_SHARE = 0.4
_USUAL_SHARE = 0.7
"""Share of passes with at most 256 decodes and, if they are decode-only, 128 to 8,192 tokens of context each."""
_FULL_SHARE = 0.4
"""Share of the mixed passes that use up a usual limit of tokens in a pass."""
_LIMITS = (512, 1_024, 2_048, 4_096, 8_192)
"""Usual limits of tokens in a pass (vLLM's ``max_num_batched_tokens``)."""
_LEAST_TOKENS = 16
"""Tokens of the shortest piece of a prompt: a package that prices a piece by its share of the whole prompt leaves out
that all cached tokens are read, which counts most for the shortest ones."""
_MOST_TOKENS = 8_192
_MOST_SEQUENCES = 1_024
"""What vLLM lets run at a time on the largest devices unless it is told otherwise (``max_num_seqs``)."""
_USUAL_SEQUENCES = 256
_MOST_CACHED = 32_768
_PROMPTS = (1, 1, 1, 1, 2, 2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far passes may go."""

    context: int
    """Tokens of one sequence."""
    cells: int
    """Tokens of all sequences of a pass together."""


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass in which prompts are alike, and so are decodes; linear costs lose nothing by that."""

    prompts: int
    tokens: int
    """New tokens of each prompt."""
    cached: int
    """Tokens of each prompt that were computed before."""
    decodes: int
    context: int
    """Tokens that each decode sees, its own included."""

    @property
    def cells(self) -> int:
        """Cells that the pass's sequences hold together at its end."""
        return self.prompts * (self.cached + self.tokens) + self.decodes * self.context

    def sample(self, seconds: float, origin: int, *, mixed: bool = False) -> Sample:
        """The pass as a measurement; ``mixed`` as in ``Sample``."""
        prompts = ((self.tokens, self.cached + self.tokens),) * self.prompts
        # A decode's cost is linear in its cells: one scan of the sum stands for one scan each.
        decodes = ((1, self.decodes * self.context),) if self.decodes else ()
        return Sample(
            tokens=self.prompts * self.tokens + self.decodes,
            scans=prompts + decodes,
            chunks=self.prompts + self.decodes,
            runs=0,
            kernel=KERNEL,
            seconds=seconds,
            origin=origin,
            mixed=mixed,
        )


def plan_passes(reach: Reach, rng: np.random.Generator, n: int = PASSES) -> Iterator[PlannedPass]:
    """Draw ``n`` passes: the decode-only ones first, then those with prompts."""
    n_decode = round(n * _DECODE_SHARE)
    for _ in range(n_decode):
        yield _decode_pass(reach, rng)
    for _ in range(n - n_decode):
        yield _mixed_pass(reach, rng)


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, each size of number as likely as any other."""
    if high <= low:
        return max(high, 1)
    return int(np.clip(np.rint(np.exp(rng.uniform(np.log(low), np.log(high)))), low, high))


def _sequences(rng: np.random.Generator) -> int:
    """Sequences that decode beside prompts."""
    return _between(rng, 1, _USUAL_SEQUENCES if rng.random() < _USUAL_SHARE else _MOST_SEQUENCES)


def _decode_pass(reach: Reach, rng: np.random.Generator) -> PlannedPass:
    usual = rng.random() < _USUAL_SHARE
    low, high = (128, 8_192) if usual else (16, reach.context)
    decodes = _between(rng, 1, _USUAL_SEQUENCES if usual else _MOST_SEQUENCES)
    decodes = min(decodes, max(reach.cells // low, 1))
    return PlannedPass(0, 0, 0, decodes, _between(rng, low, min(high, reach.context, reach.cells // decodes)))


def _mixed_pass(reach: Reach, rng: np.random.Generator) -> PlannedPass:
    prompts = int(rng.choice(_PROMPTS))
    decodes = 0 if rng.random() < 0.3 else _sequences(rng)
    if rng.random() < _FULL_SHARE:
        tokens = (int(rng.choice(_LIMITS)) - decodes) // prompts
    else:
        tokens = _between(rng, _LEAST_TOKENS, _MOST_TOKENS // prompts)
    tokens = max(min(tokens, reach.context, reach.cells // (2 * prompts)), _LEAST_TOKENS)
    room = min(_MOST_CACHED, reach.context - tokens, reach.cells // (2 * prompts) - tokens)
    cached = 0 if room < 16 or rng.random() < 0.5 else _between(rng, 16, room)
    context = 0
    if decodes:
        left = (reach.cells - prompts * (tokens + cached)) // decodes
        context = _between(rng, 128, min(8_192, reach.context, left))
    return PlannedPass(prompts, tokens, cached, decodes, context)
