"""The last position of each sequence, remembered while that is cheap."""

from __future__ import annotations

from collections.abc import Iterable

from policies.vocabulary import Chunk


class LastPositions(dict[int, int]):
    """Highest position of each sequence for which it is known; -1 for a sequence that is known to hold no cell."""

    def advance(self, chunks: Iterable[Chunk], steps: int = 1) -> None:
        """Note chunks that were written, and in each further step the same chunks one position later."""
        if self:
            for seq, start, n, also in chunks:
                end = start + n + steps - 2
                if seq in self and self[seq] < end:
                    self[seq] = end
                for each in also:
                    if self.get(each, end) < end:
                        self[each] = end

    def are_continued_by(self, chunks: Iterable[Chunk]) -> bool:
        """Whether each chunk has one sequence and begins where that is known to end."""
        get = self.get
        return not any(also or get(seq, start) != start - 1 for seq, start, _, also in chunks)
