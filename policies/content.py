"""What sequences say, as far as a cache must know: which of them begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

TextSegment = tuple[int, int, int]
"""``(source, start, n)``: ``n`` tokens of the text numbered ``source``, from its token ``start`` on. Equal segments are
equal tokens; unequal ones differ."""

Key = int
"""Identifies a full block by its tokens and by all tokens before it."""

ROOT: Key = 0
"""The parent of a first block."""


class Content:
    """The text of one sequence. It may grow at its end.

    A block's key is Python's hash of its parent's key and its segments, chained as in vLLM (which hashes the tokens
    themselves); only where a block lies in the same segment as the whole block before it, it is that one's key plus 1.
    Hashes have 61 good bits: of a million different texts of a hundred blocks each, two share a key with a probability
    of about 5e-5.
    """

    __slots__ = ("_asked", "_follows", "_keys", "_offset", "_segment", "_segments", "n", "private")

    def __init__(self, segments: Iterable[TextSegment] = ()):
        self.n = 0
        """Length in tokens."""
        self._segments: list[TextSegment] = []
        self._asked = (0, 0)
        """Block size and lookahead of the keys."""
        self._keys: list[Key] = []
        self._segment = self._offset = 0
        """Where the next key begins: the index of a segment, and tokens into it."""
        self._follows = False
        """Whether the block of the last key lies in that segment as a whole."""
        self.private = False
        """Whether it is known that no other sequence says any of it."""
        for segment in segments:
            self.extend(segment)

    @staticmethod
    def of_two(first: TextSegment, second: TextSegment) -> Content:
        """Make a private text of two segments that are not empty; the second must not continue the first."""
        content = Content()
        content._segments += (first, second)
        content.n = first[2] + second[2]
        content.private = True
        return content

    def __iter__(self) -> Iterator[TextSegment]:
        return iter(self._segments)

    def extend(self, segment: TextSegment) -> None:
        """Append a segment; one that continues the last segment is merged with it."""
        source, start, n = segment
        if n < 1:
            return
        if self._segments:
            last_source, last_start, last_n = self._segments[-1]
            if last_source == source and last_start + last_n == start:
                self._segments[-1] = (source, last_start, last_n + n)
                self.n += n
                return
        self._segments.append((source, start, n))
        self.n += n

    def head(self, n: int) -> Content:
        """Copy the first ``n`` tokens, or all of them if there are fewer."""
        copy = Content()
        copy.private = self.private
        copy.n = n = min(n, self.n)
        for segment in self._segments:
            source, start, length = segment
            if n <= length:
                if n > 0:
                    copy._segments.append(segment if n == length else (source, start, n))
                break
            copy._segments.append(segment)
            n -= length
        return copy

    def without(self, start: int, stop: int) -> Content:
        """Copy all tokens but those in ``[start, stop)``."""
        return Content([*self._cut(0, start), *self._cut(stop, self.n)])

    def common_prefix(self, other: Content) -> int:
        """Number of tokens that both texts begin with."""
        same = 0
        mine, theirs = iter(self._segments), iter(other._segments)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None and a[:2] == b[:2]:
            n = min(a[2], b[2])
            same += n
            a = (a[0], a[1] + n, a[2] - n) if a[2] > n else next(mine, None)
            b = (b[0], b[1] + n, b[2] - n) if b[2] > n else next(theirs, None)
        return same

    def tokens(self) -> NDArray[np.int64]:
        """Shape (n, 2): the source and the place in it of each token; equal rows are equal tokens."""
        if not self._segments:
            return np.zeros((0, 2), dtype=np.int64)
        sources, starts, lengths = np.array(self._segments, dtype=np.int64).T
        begins = np.cumsum(lengths) - lengths
        places = np.arange(self.n) - np.repeat(begins - starts, lengths)
        return np.stack((np.repeat(sources, lengths), places), axis=1)

    def longest_common_run(self, other: Content) -> int:
        """Length of the longest run of tokens that both texts hold, wherever it begins in each."""
        theirs: dict[int, list[tuple[int, int, int]]] = {}
        at = 0
        for source, start, n in other._segments:
            theirs.setdefault(source, []).append((at, start, n))
            at += n
        # Runs that begin equally far apart in both texts and adjoin are one.
        runs: list[tuple[int, int, int]] = []
        at = 0
        for source, start, n in self._segments:
            for other_at, other_start, other_n in theirs.get(source, ()):
                first = max(start, other_start)
                length = min(start + n, other_start + other_n) - first
                if length > 0:
                    mine = at + first - start
                    runs.append((mine - (other_at + first - other_start), mine, length))
            at += n
        longest, length, end = 0, 0, (0, -1)
        for apart, begin, n in sorted(runs):
            length = length + n if (apart, begin) == end else n
            end = (apart, begin + n)
            longest = max(longest, length)
        return longest

    def keys(self, block_size: int, n: int, lookahead: int = 0) -> list[Key]:
        """The keys of the first ``n`` blocks, or of all full blocks if there are fewer. The list is not to be changed.

        ``lookahead``: tokens behind a block that its key covers too; a block at the end of the text has none then.
        Keys are kept for the block size and the lookahead that were asked for last.
        """
        if (block_size, lookahead) != self._asked:
            self._asked, self._keys, self._segment, self._offset = (block_size, lookahead), [], 0, 0
            self._follows = False
        keys = self._keys
        n = max(n, 0)
        wanted = min(n, (self.n - lookahead) // block_size)
        if lookahead and not keys and wanted > 0:  # A chained key covers all tokens before those that it adds.
            keys.append(hash((ROOT, *self._across(block_size + lookahead))))
        while len(keys) < wanted:
            source, start, length = self._segments[self._segment]
            left = length - self._offset
            if left == 0:
                self._segment, self._offset, self._follows = self._segment + 1, 0, False
                continue
            parent, whole = keys[-1] if keys else ROOT, min(left // block_size, wanted - len(keys))
            if whole:
                first = parent + 1 if self._follows else hash((parent, source, start + self._offset))
                keys += range(first, first + whole)
                self._offset += whole * block_size
            else:
                keys.append(hash((parent, *self._across(block_size))))
            self._follows = whole > 0
        return keys if len(keys) == n else keys[:n]

    def lookup_keys(self, block_size: int, tokens: int) -> list[Key]:
        """The keys that a sequence looks up when ``tokens`` tokens of it are known. The list is not to be changed.

        These are its full blocks, except that the last token is always computed, for what it gives: the next token.
        """
        return self.keys(block_size, (tokens - 1) // block_size)

    def _across(self, block_size: int) -> list[int]:
        """The numbers of a block that lies in several segments, three for each; moves on to the block's end."""
        numbers: list[int] = []
        missing = block_size
        while missing:
            source, start, length = self._segments[self._segment]
            n = min(length - self._offset, missing)
            if n:
                numbers += (source, start + self._offset, n)
            missing -= n
            self._offset += n
            if missing:
                self._segment += 1
                self._offset = 0
        return numbers

    def _cut(self, start: int, stop: int) -> Iterator[TextSegment]:
        """The segments of tokens ``[start, stop)``."""
        at = 0
        for source, first, n in self._segments:
            low, high = max(start - at, 0), min(stop - at, n)
            if low < high:
                yield source, first + low, high - low
            at += n


NOTHING = Content()
"""The text of a sequence that says nothing."""
