"""How a sequence's blocks grow: how many it needs, when it takes the next one, and when its window leaves one behind.

A sequence of ``length`` tokens writes position ``length`` in its next decode step (step 0), and one position more in
each further step. A block holds ``size`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.vocabulary import IntArray


def blocks_for(tokens: int, size: int) -> int:
    """Number of blocks that ``tokens`` tokens fill, the last perhaps in part."""
    return -(-tokens // size)


def blocks_for_each(tokens: IntArray, size: int) -> IntArray:
    """``blocks_for`` of each of many numbers of tokens; same shape."""
    return -(-tokens // size)


def next_block_step(length: int, n_blocks: int, size: int) -> int:
    """The first decode step for which a sequence with ``n_blocks`` blocks needs another one; then every ``size`` steps.

    In the step before, it fills its last block.
    """
    return n_blocks * size - length


def steps_covered(takes: Sequence[tuple[int, int]], free: int, size: int) -> int:
    """Decode steps that ``free`` blocks suffice for, if each sequence takes a block every ``size`` steps.

    ``takes``: pairs (step, sequences that take their first block in it), ascending, all within ``size`` steps.
    """
    rounds, left = divmod(free, sum([n for _, n in takes]))
    for step, n in takes:
        left -= n
        if left < 0:
            return rounds * size + step
    raise AssertionError("a round takes more blocks than are left over")


def blocks_behind(position: int, window: int, size: int) -> int:
    """A sequence's first blocks that no token from ``position`` on sees through the window."""
    return max(position - window + 1, 0) // size


def first_block_behind_step(length: int, window: int, size: int) -> int:
    """The first decode step whose token does not see a sequence's first block; then one more every ``size`` steps."""
    return window + size - 1 - length


def blocks_in_sight(window: int, size: int) -> int:
    """Full blocks that the first token behind them needs to see."""
    return blocks_for(window - 1, size)


def most_blocks_in_window(window: int, n_ubatch: int, size: int) -> int:
    """The most blocks that a sequence holds at once if those behind the window are given up."""
    return blocks_for(window - 1 + n_ubatch, size) + 1
