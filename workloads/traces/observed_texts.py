"""What observed requests say, from the hashes of their blocks: who quotes whom, and which are turns of one session.

A prompt quotes the beginning of one earlier request, prompt and answer, and adds a text of its own. What it quotes is
found in a tree of blocks: each hash stands for all text up to the end of its block, so the deepest block that is known
already says where a prompt leaves what was said before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workloads.request import Segment
from workloads.traces.bad_rows import FlawError

NONE = -1
"""No block, or no request."""

_MOST_SEGMENTS = 2000
"""A prompt that would have more quotes nothing, since memory grows with the square of a session's turns."""


class Placed(NamedTuple):
    """A request whose blocks are in the tree."""

    arrival_ns: int
    ended_ns: int
    prompt_tokens: int
    output_tokens: int
    by_token: bool
    """Whether units are token ids; else bytes."""
    block_units: int
    """Units in a block."""
    prompt_units: int
    answer_units: int
    last: int
    """The last full block of its prompt; ``NONE`` if there is none."""
    end: int
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


class Texts:
    """Finds out, in order of time, what each prompt quotes; about 500 bytes for each request.

    A request that begins with all of an earlier one and with some of its answer is the next turn of its session: after
    the one that it shares most with, of those the one that ended last; each has one next turn at most. It quotes the
    whole answer, though the end of it lies in a block with what follows; but only the prompt where much of the answer
    did not come back, as reasoning does not. Any other quotes the latest text that has the same blocks.
    """

    def __init__(self, tree: BlockTree, requests: Sequence[Placed]):
        """``requests``: in order of arrival."""
        self._tree, self._requests = tree, requests
        self.before = [NONE] * len(requests)
        """The turn before each request; ``NONE`` for the first of a session."""
        self.shortened = 0
        """Turns in which much of the answer before them did not come back."""
        self._quoted = [NONE] * len(requests)
        """The request that each one quotes."""
        self._cuts = [0] * len(requests)
        """How many tokens of that one it quotes: its own text begins there."""
        self._segments = [0] * len(requests)
        """At most so many segments has its prompt with its answer."""
        self._owners = array("q", [NONE]) * len(tree)
        """The latest request that said each block first, or gave it as an answer."""
        self._places = array("q", [0]) * len(tree)
        """Tokens of that request up to the end of the block."""
        self._open: dict[int, list[int]] = {}
        """Requests that no turn follows yet, by their last block."""
        ends = sorted(range(len(requests)), key=lambda number: requests[number].ended_ns)
        ended = 0
        for number, request in enumerate(requests):
            while requests[ends[ended]].ended_ns <= request.arrival_ns:
                self._end(ends[ended])
                ended += 1
            self._begin(number)

    def sessions(self) -> Iterator[list[int]]:
        """The requests of each session, in order of the first; one that stands alone is a session."""
        after = [NONE] * len(self.before)
        for number, before in enumerate(self.before):
            if before != NONE:
                after[before] = number
        for number, before in enumerate(self.before):
            if before == NONE:
                turns = [number]
                while after[turns[-1]] != NONE:
                    turns.append(after[turns[-1]])
                yield turns

    def content(self, number: int) -> tuple[Segment, ...]:
        """The prompt of a request. Its own text comes last, even if it is empty.

        The source of request k's own text is 2 k, and that of its answer 2 k + 1.
        """
        pieces, stop = [], self._requests[number].prompt_tokens
        while number != NONE:
            start, prompt = self._cuts[number], self._requests[number].prompt_tokens
            if stop > prompt:
                pieces.append(Segment(2 * number + 1, 0, stop - prompt))
            if not pieces or prompt > start:
                pieces.append(Segment(2 * number, 0, min(stop, prompt) - start))
            stop, number = start, self._quoted[number]
        return tuple(reversed(pieces))

    def _begin(self, number: int) -> None:
        """A request arrives: find what it quotes, and remember the blocks that it says first."""
        request = self._requests[number]
        path = self._tree.back(request.last)
        quoted, tokens, units = self._next_turn(number, path) or self._known(request, path)
        # What is not quoted has a token, unless there is nothing.
        tokens = min(tokens, request.prompt_tokens - (request.prompt_units > units))
        while quoted != NONE and tokens <= self._cuts[quoted]:
            quoted = self._quoted[quoted]
        segments = 2 + (0 if quoted == NONE else self._segments[quoted])
        if segments > _MOST_SEGMENTS:
            quoted, tokens, units, segments = NONE, 0, 0, 2
        self._quoted[number], self._cuts[number], self._segments[number] = quoted, tokens, segments
        for block, end in zip(path, range(len(path) * request.block_units, 0, -request.block_units), strict=True):
            if end <= units:
                break
            own = request.prompt_tokens - tokens, request.prompt_units - units
            self._owners[block], self._places[block] = number, tokens + _share(end - units, *own, request.by_token)

    def _next_turn(self, number: int, path: Sequence[int]) -> tuple[int, int, int] | None:
        """The request that this one is the next turn after, and how much of it it quotes, in tokens and in units."""
        request = self._requests[number]
        for steps, block in enumerate(path):
            if block in self._open:
                before = self._open[block].pop()
                if not self._open[block]:
                    del self._open[block]
                self.before[number] = before
                last = self._requests[before]
                if _is_shortened(last, request):
                    self.shortened += 1
                    return before, last.prompt_tokens, last.prompt_units
                if last.all_units <= request.prompt_units:
                    return before, last.all_tokens, last.all_units
                units = (len(path) - steps) * request.block_units
                return before, last.prompt_tokens + _of_answer(last, units), units
        return None

    def _known(self, request: Placed, path: Sequence[int]) -> tuple[int, int, int]:
        """The request that said the deepest block which is known, and how much up to there, in tokens and in units."""
        for steps, block in enumerate(path):
            if self._owners[block] != NONE:
                return self._owners[block], self._places[block], (len(path) - steps) * request.block_units
        return NONE, 0, 0

    def _end(self, number: int) -> None:
        """A request has ended: remember its answer."""
        request = self._requests[number]
        answer = self._tree.back(request.end, request.last)
        if not answer:
            return
        # Where answers are known, all full blocks of the prompt are.
        end = (request.prompt_units // request.block_units + len(answer)) * request.block_units
        for block in answer:
            self._owners[block] = number
            self._places[block] = request.prompt_tokens + _of_answer(request, end)
            end -= request.block_units
        self._open.setdefault(request.end, []).append(number)


def _is_shortened(last: Placed, request: Placed) -> bool:
    """Whether the request, a turn after ``last``, repeats less than half of the tokens of its answer.

    It is so if they cannot all be in its prompt; or if the answer has too few bytes for its tokens, by what tokens have
    in the prompt, and also the prompt has grown by less than they and the bytes that are new would make it.
    """
    if last.all_tokens > request.prompt_tokens:
        return True
    tokens_per_unit = request.prompt_tokens / request.prompt_units
    new = max(request.prompt_units - last.all_units, 0) * tokens_per_unit
    repeated = request.prompt_tokens - last.prompt_tokens - new
    return 2 * max(repeated, last.answer_units * tokens_per_unit) < last.output_tokens


def _of_answer(request: Placed, end: int) -> int:
    """Tokens of the answer up to this unit of prompt and answer."""
    units = max(min(end, request.all_units) - request.prompt_units, 0)
    return _share(units, request.output_tokens, request.answer_units, request.by_token)


def _share(units: int, tokens: int, all_units: int, by_token: bool) -> int:
    """The tokens that so many units have, of all ``tokens`` in ``all_units``; at most all of them."""
    if by_token:
        return min(units, tokens)
    return (2 * tokens * units + all_units) // (2 * all_units)
