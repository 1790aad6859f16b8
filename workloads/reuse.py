"""How much of a workload's prompts is there already when they come."""

from __future__ import annotations

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
