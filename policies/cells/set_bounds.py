"""Where the cells of each set of sequences may be, so that few need to be searched."""

from __future__ import annotations


class SetBounds:
    """For each set, by its index, bounds of its cells."""

    __slots__ = ("high", "low", "size")

    def __init__(self, size: int):
        self.size = size
        self.low: list[int] = []
        """No cell of the set is below this one."""
        self.high: list[int] = []
        """All cells of the set are below this one; it has none where this is not above ``low``."""

    def reset(self) -> None:
        """Forget all sets."""
        self.low.clear()
        self.high.clear()

    def add_set(self) -> None:
        """Add the next set, which has no cells yet."""
        self.low.append(self.size)
        self.high.append(0)

    def may_have_cells(self, index: int) -> bool:
        """Whether a set may have cells: certain if False."""
        return self.low[index] < self.high[index]

    def set_empty(self, index: int) -> None:
        """Note that a set has no cells any more."""
        self.low[index], self.high[index] = self.size, 0

    def widen(self, index: int, low: int, high: int) -> None:
        """Note that a set may have cells in ``[low, high)`` too."""
        if low < self.low[index]:
            self.low[index] = low
        if high > self.high[index]:
            self.high[index] = high

    def widen_to_all_cells(self) -> None:
        """Note that any set that has cells may have them anywhere now."""
        for index in range(1, len(self.low)):
            if self.low[index] < self.high[index]:
                self.low[index], self.high[index] = 0, self.size
