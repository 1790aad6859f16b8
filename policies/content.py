"""What sequences say, as far as a cache must know: which of them begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Piece = tuple[int, int, int]
"""``(source, start, n)``: n tokens of the text numbered ``source`` from its token ``start`` on. Equal pieces are equal
tokens; unequal ones differ."""

Key = int
"""Names a full block by its tokens and by all that come before it."""

ROOT: Key = 0
"""The parent of a first block."""


class Content:
    """The text of one sequence. It may grow at its end.

    A block's key is Python's hash of its parent's key and its pieces, chained as in vLLM (which hashes the tokens
    themselves); but where it goes on in the piece that the whole block before it lies in, it is that one's key and 1.
    Hashes have 61 good bits: of a million different stretches, of a hundred blocks each, two overlap with a probability
    of about 5e-5.
    """

    __slots__ = ("_at", "_block_size", "_follows", "_inside", "_keys", "_pieces", "n", "private")

    def __init__(self, pieces: Iterable[Piece] = ()):
        self.n = 0
        """Tokens."""
        self._pieces: list[Piece] = []
        self._block_size = 0
        self._keys: list[Key] = []
        self._at = self._inside = 0
        """Where the keys have come to: a piece, and how far into it."""
        self._follows = False
        """Whether the last of them is of a block that lies in that piece."""
        self.private = False
        """Whether it is known that nobody else says any of it."""
        for piece in pieces:
            self.extend(piece)

    @staticmethod
    def of_two(first: Piece, second: Piece) -> Content:
        """Of two pieces that are not empty, the second not the continuation of the first; what nobody else says."""
        content = Content()
        content._pieces += (first, second)
        content.n = first[2] + second[2]
        content.private = True
        return content

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def extend(self, piece: Piece) -> None:
        """Say more. A piece that goes on where the last one ended becomes part of it."""
        source, start, n = piece
        if n < 1:
            return
        if self._pieces:
            before, at, long = self._pieces[-1]
            if before == source and at + long == start:
                self._pieces[-1] = (source, at, long + n)
                self.n += n
                return
        self._pieces.append((source, start, n))
        self.n += n

    def head(self, n: int) -> Content:
        """Its first ``n`` tokens, or all of them."""
        return Content(self._cut(0, n))

    def without(self, start: int, stop: int) -> Content:
        """What is left when tokens ``[start, stop)`` are forgotten."""
        return Content([*self._cut(0, start), *self._cut(stop, self.n)])

    def common_prefix(self, other: Content) -> int:
        """Tokens that both begin with."""
        same = 0
        mine, theirs = iter(self._pieces), iter(other._pieces)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None and a[:2] == b[:2]:
            n = min(a[2], b[2])
            same += n
            a = (a[0], a[1] + n, a[2] - n) if a[2] > n else next(mine, None)
            b = (b[0], b[1] + n, b[2] - n) if b[2] > n else next(theirs, None)
        return same

    def keys(self, block_size: int, n: int) -> list[Key]:
        """The keys of the first ``n`` blocks, or of all full ones if there are fewer. Not to be changed."""
        if block_size != self._block_size:
            self._block_size, self._keys, self._at, self._inside = block_size, [], 0, 0
            self._follows = False
        keys = self._keys
        n = max(n, 0)
        wanted = min(n, self.n // block_size)
        while len(keys) < wanted:
            source, start, long = self._pieces[self._at]
            left = long - self._inside
            if left == 0:
                self._at, self._inside, self._follows = self._at + 1, 0, False
                continue
            parent, whole = keys[-1] if keys else ROOT, min(left // block_size, wanted - len(keys))
            if whole:
                first = parent + 1 if self._follows else hash((parent, source, start + self._inside))
                keys += range(first, first + whole)
                self._inside += whole * block_size
            else:
                keys.append(hash((parent, *self._across(block_size))))
            self._follows = whole > 0
        return keys if len(keys) == n else keys[:n]

    def _across(self, block_size: int) -> list[int]:
        """A block of several pieces, as numbers; moves on to its end."""
        numbers: list[int] = []
        need = block_size
        while need:
            source, start, long = self._pieces[self._at]
            n = min(long - self._inside, need)
            if n:
                numbers += (source, start + self._inside, n)
            need -= n
            self._inside += n
            if need:
                self._at += 1
                self._inside = 0
        return numbers

    def _cut(self, start: int, stop: int) -> Iterator[Piece]:
        at = 0
        for source, first, n in self._pieces:
            low, high = max(start - at, 0), min(stop - at, n)
            if low < high:
                yield source, first + low, high - low
            at += n


NOTHING = Content()
"""Says nothing."""
