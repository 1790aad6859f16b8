"""What observed requests say, from the hashes of their blocks: who quotes whom, and which are turns of one session.

A prompt quotes the beginning of one earlier request, prompt and answer, and adds a text of its own. What it quotes is
found in a tree of blocks: each hash stands for all text up to the end of its block, so the deepest block that is known
already says where a prompt leaves what was said before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from workloads.request import Segment
from workloads.traces.observed_blocks import NONE, Anchor, BlockTree, Call, places

_MOST_SEGMENTS = 2000
"""A prompt that would have more quotes nothing, since memory grows with the square of a session's turns."""


class Texts:
    """Finds out what each prompt quotes, in order of time; about 500 bytes for each request.

    A request that begins with all of an earlier one and with some of its answer is the next turn of its session: after
    the one that it shares most with, of those the one that ended last; each has one next turn at most. It quotes the
    whole answer, though the end of it lies in a block with what follows; but only the prompt where much of the answer
    did not come back, as reasoning does not. Any other quotes the latest text that has the same blocks.
    """

    def __init__(self, tree: BlockTree, requests: Sequence[Call], *, only_sessions: bool = False):
        """``requests``: in order of arrival. ``only_sessions``: spare the work for ``content``, which is then wrong."""
        self._tree, self._requests = tree, requests
        self.before = [NONE] * len(requests)
        """The turn before each request; ``NONE`` for the first of a session."""
        self.unreturned: set[int] = set()
        """Requests of whose answers the next turn repeats little."""
        self._quoted = [NONE] * len(requests)
        """The request that each one quotes."""
        self._cuts = [0] * len(requests)
        """How many tokens of that one it quotes, at most until ``_cut`` is done: its own text begins there."""
        self._upto = [NONE] * len(requests)
        """The last block that it quotes; ``NONE`` if it quotes all that there is."""
        self._owners = array("q", [NONE]) * len(tree)
        """The latest request that said each block first, or gave it as an answer."""
        self._open: dict[int, list[int]] = {}
        """Requests that no turn follows yet, by their last block."""
        anchors: list[Anchor] = []
        ends = sorted(range(len(requests)), key=lambda number: requests[number].ended_ns)
        ended = 0
        for number, request in enumerate(requests):
            while requests[ends[ended]].ended_ns <= request.arrival_ns:
                self._end(ends[ended])
                ended += 1
            anchors.append(self._begin(number))
        if not only_sessions:
            self._cut(places(tree, requests, anchors, self.unreturned))

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

    def _begin(self, number: int) -> Anchor:
        """A request arrives: find what it quotes, and remember the blocks that it says first.

        Returns up to where its tokens are known from the turn before it.
        """
        path = self._tree.back(self._requests[number].last)
        steps = next((steps for steps, block in enumerate(path) if block in self._open), None)
        if steps is None:
            anchor, said = Anchor(0, 0), self._quote_known(number, path)
        else:
            anchor, said = self._quote_turn(number, path[steps], len(path) - steps)
        for block in path:
            if block == said:
                break
            self._owners[block] = number
        return anchor

    def _quote_turn(self, number: int, end: int, blocks: int) -> tuple[Anchor, int]:
        """Make a request the next turn after one whose last block is ``end``; returns also the last block quoted."""
        before = self._open[end].pop()
        if not self._open[end]:
            del self._open[end]
        self.before[number] = before
        request, last = self._requests[number], self._requests[before]
        if _is_shortened(last, request):
            self.unreturned.add(before)
            self._quote(number, before, last.prompt_tokens, last.prompt_units)
            return Anchor(last.prompt_units, last.prompt_tokens), last.last
        if last.all_units <= request.prompt_units:
            self._quote(number, before, last.all_tokens, last.all_units)
            return Anchor(last.all_units, last.all_tokens), end
        self._upto[number] = end
        self._quote(number, before, last.all_tokens, blocks * request.block_units)
        return Anchor(0, 0), end

    def _quote_known(self, number: int, path: Sequence[int]) -> int:
        """Have a request quote the one that said the deepest block which is known; returns that block."""
        steps = next((steps for steps, block in enumerate(path) if self._owners[block] != NONE), None)
        if steps is None:
            return NONE
        block, units = path[steps], (len(path) - steps) * self._requests[number].block_units
        owner = self._owners[block]
        other = self._requests[owner]
        self._upto[number] = block
        self._quote(number, owner, other.prompt_tokens if units <= other.prompt_units else other.all_tokens, units)
        return block

    def _quote(self, number: int, quoted: int, most: int, units: int) -> None:
        """Have a request quote another: so many units of its own, and at most ``most`` tokens of the other."""
        request = self._requests[number]
        # What is not quoted has a token, unless there is nothing.
        rest = 1 if request.prompt_units > units else 0
        self._quoted[number], self._cuts[number] = quoted, min(most, request.prompt_tokens - rest)

    def _end(self, number: int) -> None:
        """A request has ended: remember its answer."""
        request = self._requests[number]
        if request.end != request.last:
            for block in self._tree.back(request.end, request.last):
                self._owners[block] = number
            self._open.setdefault(request.end, []).append(number)

    def _cut(self, places: Sequence[int]) -> None:
        """Find out how many tokens each request quotes; ``places``: tokens up to the end of each block."""
        segments = [0] * len(self._requests)
        for number, upto in enumerate(self._upto):
            quoted, tokens = self._quoted[number], self._cuts[number]
            if upto != NONE:
                tokens = min(tokens, places[upto])
            while quoted != NONE and tokens <= self._cuts[quoted]:
                quoted = self._quoted[quoted]
            segments[number] = 2 + (0 if quoted == NONE else segments[quoted])
            if quoted == NONE or segments[number] > _MOST_SEGMENTS:
                quoted, tokens, segments[number] = NONE, 0, 2
            self._quoted[number], self._cuts[number] = quoted, tokens


def _is_shortened(last: Call, request: Call) -> bool:
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
