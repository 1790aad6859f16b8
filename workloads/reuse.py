"""How much of a workload's prompts is there already when they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Reuse(NamedTuple):
    """Prefix hits of a workload's prompts in a cache that never evicts."""

    block_size: int
    """Tokens in a block."""
    blocks: int
    """Blocks that the prompts look up."""
    distinct: int
    """Different ones among them."""
    tokens: int
    """Prompt tokens that are looked up."""
    found: int
    """Tokens that are found, in full blocks."""
    hit_rate: float | None
    """Share of the tokens looked up that are found; None if there are none."""


class LoggedHits(NamedTuple):
    """Prefix hits in the cache of the server that was logged, as it counted them itself."""

    tokens: int
    """Tokens of all prompts."""
    found: int
    """Tokens that it found."""
    shared: int
    """Tokens that 95 % of the requests that found any found at least; 0 if none did."""
    sharing: float
    """Share of all requests that found so many."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were found."""
        return self.found / self.tokens

    @classmethod
    def of(cls, prompts: Sequence[int], found: Sequence[int]) -> LoggedHits | None:
        """Sum up requests by the tokens of their prompts and those found of them; None without any."""
        if not prompts:
            return None
        some = sorted(n for n in found if n > 0)
        shared = some[len(some) // 20] if some else 0
        sharing = sum(n >= shared for n in some) / len(prompts)
        return cls(sum(prompts), sum(found), shared, sharing)
