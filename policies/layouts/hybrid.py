"""The caches of llama.cpp for models of which a part cannot be rolled back: sliding windows and states.

A window has overwritten what earlier tokens would see, and a state knows its last token alone. What either holds can be
saved as a checkpoint, from which the sequence can go on later (``llama_memory_hybrid``, ``llama_memory_hybrid_iswa``,
``llama_kv_cache_iswa``; ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import FOREVER
from policies.cells.host_copies import transfers_of
from policies.cells.states import StateMemory
from policies.cells.stream_arenas import CacheSpec
from policies.layouts.multi_stream import MultiStreamPolicy
from policies.layouts.stream_plans import StepPlanner
from policies.placement.streams import StreamRule
from policies.policy import CacheConfig, Kernel
from policies.vocabulary import Cells, Checkpoint, Chunk, Exported, HostCopy, MicroBatch, Unsupported


class EqualPartsRule(StreamRule):
    """Leaves steps with chunks beside the rows to ``allocate``, which makes micro-batches of equal parts."""

    def _is_certain(self, chunks: Sequence[Chunk]) -> bool:
        return not chunks and super()._is_certain(chunks)


class HybridPolicy(MultiStreamPolicy):
    """Adds checkpoints, and a state for each sequence if the model has such layers.

    With states every micro-batch has equally many tokens of each of its sequences, also where these share a cache.
    """

    has_placement_rule = True
    saves_checkpoints = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        caches: Sequence[CacheSpec],
        *,
        n_streams: int = 1,
        snapshots: int | None = None,
        kernel: Kernel = "tiled",
    ):
        """``snapshots``: last tokens that a state can take back (``n_rs_seq``); None: the model has no states."""
        super().__init__(name, config, caches, n_streams=n_streams, kernel=kernel)
        self.states = None if snapshots is None else StateMemory(config.sequences, snapshots)
        if snapshots is not None:
            tail = snapshots + 1 if snapshots else 0
            self._planner = StepPlanner(self._streams, config.n_ubatch, contiguous=False, equal=True, tail=tail)
            rule = EqualPartsRule if n_streams == 1 else StreamRule
            self._rule = rule(self, self._streams, config.n_ubatch, contiguous=False, compacts=False)
        self._has_rows = False
        """Whether sequences may be rows, whose tokens their states are told of when it matters."""
        self.holds_states = snapshots is not None
        self._ends = self.ends

    def ends(self, seq: int) -> tuple[int, int]:
        """The latest of the first positions in windows and state, and the earliest of the last ones; -1 for none.

        (llama.cpp's ``seq_pos_min`` and ``seq_pos_max``, which of windows and full attention ask the windows.)
        """
        first, last = self._streams.ends(seq)
        if self.states is None:
            return first, last
        state = self._state_of(seq)
        return max(first, state), min(last, state)

    def _state_of(self, seq: int) -> int:
        """The last position that a sequence's state has seen, with what it was given as a row; -1 if it has none."""
        assert self.states is not None, "the model has states"
        if self._has_rows:
            self.states.see(seq, self._streams.ends(seq)[1])
        return self.states.last_position(seq)

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place a step; the states see each micro-batch."""
        batches = super().allocate(step, views=views)
        if self.states is not None:
            for batch in batches:
                self.states.place(batch.chunks)
        return batches

    # Giving up

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Take positions from all caches, or from none: raises ``Unsupported`` where a state has seen them."""
        if self.states is not None:
            if seq >= 0:
                self._state_of(seq)
            if not self.states.remove(seq, max(start, 0), FOREVER if stop is None else stop):
                raise Unsupported(
                    f"{self.name}: a state cannot be taken back to before token {start} of sequence {seq}"
                )
        super().free(seq, start, stop)

    def can_truncate(self, seq: int, n: int) -> int:
        """Any beginning that windows still hold, and all that a state has seen."""
        if self.states is not None and self._state_of(seq) >= n:
            return 0
        return super().can_truncate(seq, n)

    def keep(self, seq: int) -> None:
        """Give up all other sequences."""
        super().keep(seq)
        if self.states is not None:
            self.states.keep(seq)

    def clear(self) -> None:
        """Empty every cache."""
        super().clear()
        if self.states is not None:
            self.states.clear()

    # Checkpoints and the host tier

    def save_checkpoint(self, seq: int, host: Cells) -> Checkpoint:
        """What windows and state hold now."""
        windows, copies = {}, [HostCopy(())] * len(self.caches)
        for group, spec in enumerate(self.caches):
            if spec.window is not None:
                saved = self._seen(group, seq)
                windows[group] = saved.by_cell()
                transfers = transfers_of(np.sort(saved.cells), host[: len(saved.cells)], to_host=True)
                copies[group] = HostCopy(transfers, *self._streams.settle(group))
        first, last = self.ends(seq)
        held = max(map(len, windows.values()), default=0)
        state = -1 if self.states is None else self._state_of(seq)
        return Checkpoint(first, last, held, tuple(copies), (windows, host, state))

    def restore_checkpoint(self, seq: int, checkpoint: Checkpoint) -> tuple[HostCopy, ...]:
        """Put back what windows and state held; what was placed since goes from the other caches."""
        self._end_row(seq)
        windows, host, state = checkpoint.state
        copies = [HostCopy(())] * len(self.caches)
        for group, positions in windows.items():
            self._streams.remove(seq, 0, FOREVER, group)
            cells = self._cells_for(group, seq, positions)
            assert cells is not None, "the window held as much before"
            transfers = transfers_of(cells, host[: len(positions)], to_host=False)
            copies[group] = HostCopy(transfers, *self._streams.settle(group))
        self._streams.remove(seq, checkpoint.last + 1, FOREVER)
        if self.states is not None:
            self.states.restore(seq, state)
        return tuple(copies)

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """All that attention may still see of a sequence, and its state."""
        exported = super().export(seq, host)
        if exported is None or self.states is None:
            return exported
        return exported._replace(state=(exported.state, self._state_of(seq)))

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Find cells for all of it, in every cache or in none."""
        if self.states is None:
            return super().import_(seq, exported, upto=upto, waits=waits)
        cells, state = exported.state
        copies = super().import_(seq, exported._replace(state=cells), upto=upto, waits=waits)
        self.states.restore(seq, state)
        return copies

    # Sharing and shifting

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share cells, and the whole state, whatever part of the sequence is asked for (as ``seq_cp``)."""
        super().copy(src, dst, start, stop)
        if self.states is not None:
            self._state_of(src)
            self.states.copy(src, dst)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions, that of the state among them."""
        if self.states is not None:
            self._state_of(seq)
            self.states.shift(seq, start, FOREVER if stop is None else stop, delta)
        super().shift(seq, start, stop, delta)

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide the positions, that of the state among them."""
        if self.states is not None:
            self._state_of(seq)
            self.states.divide(seq, start, FOREVER if stop is None else stop, divisor)
        super().divide(seq, start, stop, divisor)

    def placement_rule(self) -> StreamRule | None:
        """Give the rule of the cells; states see what rows were given when it matters."""
        self._has_rows = True
        return super().placement_rule()
