"""Blocks of observed texts: which follows which, and how many tokens there are up to the end of each."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple

from workloads.traces.bad_rows import FlawError

NONE = -1
"""No block, or no request."""

_FAR = 2**62


class Call(NamedTuple):
    """A request of observed traffic."""

    arrival_ns: int
    """Nanoseconds since 1970."""
    ended_ns: int
    """Later than its arrival."""
    prompt_tokens: int
    output_tokens: int
    by_token: bool
    """Whether units are token ids; else bytes."""
    block_units: int
    """Units in a block."""
    prompt_units: int
    answer_units: int
    last: int = NONE
    """The last full block of its prompt in the tree; ``NONE`` if there is none."""
    end: int = NONE
    """The last full block of prompt and answer; equal to ``last`` if the answer has none, or is not known."""

    @property
    def all_units(self) -> int:
        """Units of prompt and answer."""
        return self.prompt_units + self.answer_units

    @property
    def all_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.output_tokens


class BlockTree:
    """The blocks of all texts by their hashes, each with the one before it; about 150 bytes for each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._before = array("q")

    def __len__(self) -> int:
        return len(self._before)

    def before(self, block: int) -> int:
        """The block before this one; ``NONE`` for a first one."""
        return self._before[block]

    def add(self, hashes: Sequence[int]) -> list[int]:
        """The numbers of these successive blocks, from the first of a text on.

        Raises ``FlawError`` if a hash has another place elsewhere, and then changes nothing.
        """
        known = list(map(self._numbers.get, hashes))
        numbers = [number for number in known if number is not None]
        fresh = hashes[len(numbers) :]
        if [self._before[number] for number in numbers] != [NONE, *numbers[:-1]][: len(numbers)] or (
            fresh and (None in known[: len(numbers)] or len(set(fresh)) < len(fresh))
        ):
            raise FlawError("blocks: a hash stands in another place elsewhere; it stands for all text before it")
        before = numbers[-1] if numbers else NONE
        for digest in fresh:
            self._numbers[digest] = number = len(self._before)
            self._before.append(before)
            numbers.append(number)
            before = number
        return numbers

    def back(self, last: int, first: int = NONE) -> list[int]:
        """The blocks from ``last`` back to ``first``, which does not count."""
        found = []
        while last != first:
            found.append(last)
            last = self._before[last]
        return found


class Anchor(NamedTuple):
    """A place in a text whose tokens are known, since the server counted them."""

    units: int
    tokens: int


def places(
    tree: BlockTree, requests: Sequence[Call], anchors: Sequence[Anchor], unreturned: Container[int]
) -> Sequence[int]:
    """The tokens up to the end of each block, wherever it occurs.

    Tokens are known at the end of each prompt and of each answer; the answers of ``unreturned`` do not count. Between
    the end of the block before and the first known place after a block they are taken to be spread evenly over units.
    ``anchors``: for each request a known place in its prompt, which counts if it lies within a block.
    """
    nearest = _nearest(tree, requests, unreturned)
    depths, found = array("q", [0]) * len(tree), array("d", [0.0]) * len(tree)
    for block in range(len(tree)):
        before = tree.before(block)
        depth, tokens = (0, 0.0) if before == NONE else (depths[before], found[before])
        depths[block] = depth + 1
        number, answered = divmod(nearest[block], 2)
        request = requests[number]
        units, end = depth * request.block_units, (depth + 1) * request.block_units
        low_units, low_tokens = anchors[number]
        high_units, high_tokens = request.prompt_units, request.prompt_tokens
        if answered:
            low_units, low_tokens = high_units, high_tokens
            high_units, high_tokens = high_units + request.answer_units, high_tokens + request.output_tokens
        if units < low_units < end:
            units, tokens = low_units, low_tokens
        share = (end - units) / (high_units - units)
        found[block] = end if request.by_token else tokens + max(high_tokens - tokens, 0.0) * share
    return array("q", map(round, found))


def _nearest(tree: BlockTree, requests: Sequence[Call], unreturned: Container[int]) -> Sequence[int]:
    """For each block twice the number of the request whose prompt ends soonest after it, plus 1 if its answer does."""
    nearest, rests = array("q", [NONE]) * len(tree), array("q", [_FAR]) * len(tree)
    for number, request in enumerate(requests):
        blocks = tree.back(request.last)
        answer = [] if number in unreturned else tree.back(request.end, request.last)
        last = len(blocks) * request.block_units
        ways = (
            (blocks, request.prompt_units - last),
            (answer, request.all_units - last - len(answer) * request.block_units),
        )
        for answered, (path, rest) in enumerate(ways):
            for block in path:
                # Whoever is nearer to this block is nearer to those before it, too.
                if rest >= rests[block]:
                    break
                nearest[block], rests[block] = 2 * number + answered, rest
                rest += request.block_units
    return nearest
