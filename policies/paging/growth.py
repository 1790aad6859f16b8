"""How many blocks a sequence needs, and how many its window leaves behind; a block holds ``size`` tokens."""

from __future__ import annotations

from policies.vocabulary import IntArray


def blocks_for(tokens: int, size: int) -> int:
    """Number of blocks that ``tokens`` tokens fill, the last perhaps in part."""
    return -(-tokens // size)


def blocks_for_each(tokens: IntArray, size: int) -> IntArray:
    """``blocks_for`` of each of many numbers of tokens; same shape."""
    return -(-tokens // size)


def blocks_behind(position: int, window: int, size: int) -> int:
    """A sequence's first blocks that no token from ``position`` on sees through the window."""
    return max(position - window + 1, 0) // size


def blocks_in_sight(window: int, size: int) -> int:
    """Full blocks that the first token behind them needs to see."""
    return blocks_for(window - 1, size)


def most_blocks_in_window(window: int, n_ubatch: int, size: int) -> int:
    """The most blocks that a sequence holds at once if those behind the window are given up."""
    return blocks_for(window - 1 + n_ubatch, size) + 1
