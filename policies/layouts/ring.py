"""A ring of cells for each sequence: the oldest tokens are overwritten, the first ones, the sinks, stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from policies.cells.region_search import region_search
from policies.layouts.sequence_regions import RegionOptions, SequenceRegionPolicy
from policies.placement.regions import Region, TokenOrder
from policies.policy import CacheConfig
from policies.vocabulary import NO_SHIFT, IntArray, SequencePlan, Shift, Unsupported


class RingOrder(TokenOrder):
    """Token ``i`` lies in cell ``i``, or once the region is full in cell ``sinks + (i - sinks) mod (window - sinks)``.

    Rotary positions go on until they reach the most that the sequence may hold; then they wrap: the window's tokens
    are renumbered to follow the sinks directly, and their keys rotated back by as much.
    """

    def __init__(self, window: int, sinks: int, max_position: int):
        """``max_position``: the rotary position that no token may reach."""
        super().__init__(window)
        self.window = window
        self.sinks = sinks
        self._max_position = max_position
        self._rotations: list[tuple[IntArray, int]] = []
        """Cells, and how far to rotate their keys, that no pass has reported yet."""

    def limit(self, region: Region) -> int:
        """Tokens up to the first renumbering."""
        return self._max_position

    def renumber(self, region: Region, tokens: int) -> None:
        """Renumber so that the last token gets position ``window - 1``; rotate what will be left from before."""
        oldest = max(self.sinks, tokens - (self.window - self.sinks))
        remaining = np.arange(oldest, region.length)
        lag = tokens - self.window
        if len(remaining):
            self._rotations.append((region.start + self.offsets(remaining), self._lag(region) - lag))
        region.limit = self._max_position + lag

    def _lag(self, region: Region) -> int:
        """How far a sequence's rotary positions in the window lie below its tokens' numbers."""
        return region.limit - self._max_position

    def offsets(self, numbers: IntArray) -> IntArray:
        """Round and round behind the sinks."""
        around = self.sinks + (numbers - self.sinks) % (self.window - self.sinks)
        return np.asarray(np.where(numbers < self.window, numbers, around))

    def numbers(self, length: int) -> IntArray:
        """The sinks, then the newest tokens."""
        if length <= self.window:
            return np.arange(length)
        return np.concatenate((np.arange(self.sinks), np.arange(length - (self.window - self.sinks), length)))

    def positions(self, region: Region, numbers: IntArray) -> IntArray:
        """Rotary positions, int64 of shape (n,): those of the sinks stay, others lag behind their numbers."""
        return np.where(numbers < self.sinks, numbers, numbers - self._lag(region))

    def settle_rotations(self) -> Shift:
        """Rotations for the renumberings since the last pass, which are then settled."""
        if not self._rotations:
            return NO_SHIFT
        rotations, self._rotations = self._rotations, []
        deltas = [np.full(len(cells), delta, dtype=np.int64) for cells, delta in rotations]
        return Shift(np.concatenate([cells for cells, _ in rotations]), np.concatenate(deltas))


@dataclass(frozen=True, slots=True)
class RingOptions(RegionOptions):
    """Options of this layout."""

    window: int = 256
    """Tokens that each sequence keeps."""
    sinks: int = 4
    """First tokens of each sequence that are never overwritten."""


class RingPolicy(SequenceRegionPolicy):
    """A window of cells for each sequence, the oldest overwritten; the first tokens, the sinks, stay.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). A micro-batch of several
    tokens is written before it is attended to: its tokens see the sinks and what the window then holds, up to
    themselves.
    """

    unbounded = True
    forgets = True
    has_placement_rule = True

    def __init__(self, name: str, config: CacheConfig):
        options = config.read(RingOptions)
        most = region_search(options.search or self.default_search, config.cells).most
        self.window = min(options.window, config.max_tokens, most)
        self.sinks = min(options.sinks, self.window - 1)
        order = RingOrder(self.window, self.sinks, max(config.max_tokens, self.window))
        most_at_once = min(config.n_ubatch, self.window - self.sinks)
        config = replace(config, n_ubatch=most_at_once, options={"search": options.search})
        super().__init__(name, config, order=order)

    def size_at_start(self, plan: SequencePlan) -> int:
        """The window, also for a sequence that cannot fill it."""
        return self.window

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """All of a sequence; its tail only while nothing has been overwritten."""
        region = self._regions.get(seq)
        if region is not None and 0 < start < region.length > self.window:
            raise Unsupported(f"{self.name}: the oldest tokens are overwritten, so [{start}, end) cannot be given up")
        super().free(seq, start, stop)
