"""Prompt and output lengths that depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sin, sqrt

import numpy as np

from workloads.generators.lengths import IntArray, Lengths

_LAST = 1.0 - 2.0**-53
"""The largest float below 1; quantiles of 1 may be infinite."""
_FIRST = 2.0**-1022
"""The smallest normal float above 0."""


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """Output lengths whose distribution depends on the length of the prompt.

    ``tables[i]`` applies to prompts of ``edges[i - 1]`` to ``edges[i] - 1`` tokens, the first table to all shorter
    ones and the last table to all longer ones. Each output takes one random number, whichever table applies. Raises
    ``ValueError`` unless the edges increase and there is one more table than edges.
    """

    edges: Sequence[int]
    tables: Sequence[Lengths]

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.edges) + 1:
            raise ValueError(
                f"{len(self.tables)} tables for {len(self.edges)} edges; one more table than edges is needed"
            )
        if (np.diff(self.edges) <= 0).any():
            raise ValueError("the edges do not increase")

    def draw(self, rng: np.random.Generator, prompts: IntArray) -> IntArray:
        """Draw an output length for each prompt length; both have shape (n,) and type int64."""
        shares = np.maximum(rng.random(len(prompts)), _FIRST)
        which = np.searchsorted(np.array(self.edges, dtype=np.int64), prompts, side="right")
        outputs = np.empty(len(prompts), dtype=np.int64)
        for i in np.unique(which).tolist():
            outputs[which == i] = self.tables[i].at(shares[which == i])
        return outputs


def draw_pairs(
    prompt_tokens: Lengths,
    output_tokens: Lengths | GivenPrompt,
    correlation: float,
    prompts: np.random.Generator,
    outputs: np.random.Generator,
    n: int,
) -> tuple[IntArray, IntArray]:
    """Draw the prompt and output lengths of ``n`` requests, each of shape (n,), int64.

    ``correlation``: Spearman's rank correlation, by a Gaussian copula: normal pairs with Pearson's correlation
    ``2 sin(pi / 6 * correlation)`` (Kruskal 1958) are mapped through the quantiles of each distribution, which keeps
    both distributions. Where many lengths are equal, the correlation is slightly lower. With 0, the two are drawn
    independently. Splitting a call in two gives the same lengths.
    """
    if isinstance(output_tokens, GivenPrompt):
        lengths = prompt_tokens.draw(prompts, n)
        return lengths, output_tokens.draw(outputs, lengths)
    if correlation == 0:
        return prompt_tokens.draw(prompts, n), output_tokens.draw(outputs, n)
    # Imported here because SciPy takes long to load; see lengths.py.
    from scipy.special import ndtr

    pearson = 2.0 * sin(pi / 6 * correlation)
    x = prompts.standard_normal(n)
    y = pearson * x + sqrt(max(0.0, 1.0 - pearson**2)) * outputs.standard_normal(n)
    u, v = np.clip(ndtr(x), _FIRST, _LAST), np.clip(ndtr(y), _FIRST, _LAST)
    return prompt_tokens.at(u), output_tokens.at(v)
