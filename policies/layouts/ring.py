"""A ring of cells for each sequence: the oldest tokens are overwritten, the first ones, the sinks, stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policies.cells.region_search import region_search
from policies.fast_forward.region_lockstep import Region
from policies.layouts.region_table import TokenOrder
from policies.layouts.sequence_regions import SequenceRegionPolicy
from policies.policy import CacheConfig, Unsupported
from policies.vocabulary import NO_SHIFT, Chunk, IntArray, SequencePlan, Shift, View


class RingOrder(TokenOrder):
    """Token ``i`` lies in cell ``i``, or once the region is full in cell ``sinks + (i - sinks) mod (window - sinks)``.

    Rotary positions go on until they reach the most that the sequence may hold; then they wrap: the window's tokens
    are renumbered to follow the sinks directly, and their keys rotated back by as much.
    """

    max_held: int

    def __init__(self, window: int, sinks: int, max_position: int):
        """``max_position``: the rotary position that no token may reach."""
        self.max_held = self.window = window
        self.sinks = sinks
        self._max_position = max_position
        self._position_offsets: dict[int, int] = {}
        """How far each sequence's rotary positions in the window lie below its tokens' numbers."""
        self._rotations: list[tuple[IntArray, int]] = []
        """Cells, and how far to rotate their keys, that no micro-batch has reported yet."""

    def held(self, region: Region) -> int:
        """At most the window."""
        return min(region.length, self.window)

    def least_size(self, tokens: int) -> int:
        """At most the window."""
        return min(tokens, self.window)

    def room(self, seq: int, region: Region) -> int:
        """Tokens up to the next renumbering."""
        if self._rotations or region.size < self.window:
            return 0
        return self._max_position + self._position_offsets.get(seq, 0) - region.length

    def append(self, chunk: Chunk, region: Region) -> int:
        """Renumber first where the last token's position would be too large."""
        end = chunk.start + chunk.n
        if end - 1 - self._position_offsets.get(chunk.seq, 0) >= self._max_position:
            self._wrap(chunk.seq, region, chunk.start, end - 1)
        region.length = end
        return min(end, self.window)

    def _wrap(self, seq: int, region: Region, start: int, last: int) -> None:
        """Renumber so that token ``last`` gets position ``window - 1``; rotate what will be left from before."""
        offset = last - (self.window - 1)
        oldest = max(self.sinks, last + 1 - (self.window - self.sinks))
        remaining = np.arange(oldest, start)
        if len(remaining):
            delta = self._position_offsets.get(seq, 0) - offset
            self._rotations.append((region.start + self.offsets(remaining), delta))
        self._position_offsets[seq] = offset

    def offsets(self, numbers: IntArray) -> IntArray:
        """Round and round behind the sinks."""
        around = self.sinks + (numbers - self.sinks) % (self.window - self.sinks)
        return np.asarray(np.where(numbers < self.window, numbers, around))

    def cells(self, region: Region) -> IntArray:
        """The sinks, then the newest tokens."""
        return region.start + self.offsets(self._numbers(region.length))

    def view(self, seq: int, region: Region) -> View:
        """The sinks, then the newest tokens, by their renumbered positions."""
        numbers = self._numbers(region.length)
        positions = np.where(numbers < self.sinks, numbers, numbers - self._position_offsets.get(seq, 0))
        return View(region.start + self.offsets(numbers), positions)

    def _numbers(self, length: int) -> IntArray:
        """The numbers of the tokens still held, ascending."""
        if length <= self.window:
            return np.arange(length)
        return np.concatenate((np.arange(self.sinks), np.arange(length - (self.window - self.sinks), length)))

    def forget(self, seq: int) -> None:
        """Drop the sequence's renumbering."""
        self._position_offsets.pop(seq, None)

    def settle_rotations(self) -> Shift:
        """Rotations for the renumberings since the last micro-batch, which are then settled."""
        if not self._rotations:
            return NO_SHIFT
        rotations, self._rotations = self._rotations, []
        deltas = [np.full(len(cells), delta, dtype=np.int64) for cells, delta in rotations]
        return Shift(np.concatenate([cells for cells, _ in rotations]), np.concatenate(deltas))


class RingPolicy(SequenceRegionPolicy):
    """A window of cells for each sequence, the oldest overwritten; the first tokens, the sinks, stay.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). A micro-batch of several
    tokens is written before it is attended to: its tokens see the sinks and what the window then holds, up to
    themselves.
    """

    unbounded = True
    forgets = True
    can_fast_forward = True

    def __init__(self, name: str, config: CacheConfig):
        most = region_search(config.search or self.default_search, config.cells).most
        self.window = min(config.window, config.max_tokens, most)
        self.sinks = min(config.sinks, self.window - 1)
        order = RingOrder(self.window, self.sinks, max(config.max_tokens, self.window))
        config = replace(config, n_ubatch=min(config.n_ubatch, self.window - self.sinks))
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
