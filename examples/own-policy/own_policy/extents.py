"""Free extents: free cells next to each other."""

from bisect import bisect_right


class FreeExtents:
    """The free extents of a cache, lowest first: there are few of them, however many cells there are."""

    def __init__(self, cells: int):
        self.firsts = [0]
        """The first cell of each extent."""
        self.ends = [cells]
        """The cell behind each extent."""

    @property
    def lengths(self) -> list[int]:
        """Cells of each extent."""
        return [end - first for first, end in zip(self.firsts, self.ends, strict=True)]

    def take(self, n: int) -> int | None:
        """Take ``n`` cells of the smallest extent that holds them, the lowest of several; the first, None if none."""
        fitting = [(length, i) for i, length in enumerate(self.lengths) if length >= n]
        if not fitting:
            return None
        length, i = min(fitting)
        first = self.firsts[i]
        self.firsts[i] += n
        if length == n:
            del self.firsts[i], self.ends[i]
        return first

    def release(self, first: int, n: int) -> None:
        """Give ``n`` cells back, joined with the extents beside them."""
        i, end = bisect_right(self.firsts, first), first + n
        if i < len(self.firsts) and self.firsts[i] == end:
            end = self.ends[i]
            del self.firsts[i], self.ends[i]
        if i and self.ends[i - 1] == first:
            self.ends[i - 1] = end
        else:
            self.firsts.insert(i, first)
            self.ends.insert(i, end)
