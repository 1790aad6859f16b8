"""The memory of llama.cpp for models without any attention: states of a fixed size, one for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from policies.cells.arena import FOREVER
from policies.cells.split_batch import split_by_stream, split_keeping_tails
from policies.cells.states import StateMemory
from policies.layouts.stream_plans import check_step
from policies.vocabulary import Chunk, Unsupported


class RecurrentMemory:
    """Places steps as ``llama_memory_recurrent``: each micro-batch has equally many tokens of consecutive sequences.

    It has no cells for tokens, so it is no ``Policy``; its operations have the same names.
    """

    def __init__(self, sequences: int, n_ubatch: int, snapshots: int = 0):
        """``snapshots``: last tokens that a state can take back."""
        self.states = StateMemory(sequences, snapshots)
        self._n_ubatch = n_ubatch

    def allocate(self, step: Sequence[Chunk]) -> None:
        """Let the states see a step. Raises ``Rejected`` and ``OutOfCells`` as other caches of llama.cpp."""
        check_step(step, self.ends, apart=True)
        snapshots, most = self.states.snapshots, self._n_ubatch
        if snapshots:
            batches = split_keeping_tails(step, most, snapshots + 1, sequential=True)
        else:
            batches = split_by_stream(step, most, sequential=True)
        for batch in batches:
            self.states.place(batch)

    def ends(self, seq: int) -> tuple[int, int]:
        """The only position that a sequence's state stands for, twice; -1 if it has none."""
        position = self.states.last_position(seq)
        return position, position

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Give up a state, or take it back. Raises ``Unsupported`` where that is not known."""
        if not self.states.remove(seq, start, FOREVER if stop is None else stop):
            raise Unsupported(f"a state cannot be taken back to before token {start} of sequence {seq}")

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share a state, whole."""
        self.states.copy(src, dst)

    def keep(self, seq: int) -> None:
        """Give up all other states."""
        self.states.keep(seq)

    def clear(self) -> None:
        """Give up all states."""
        self.states.clear()

    def update(self, tokens: int = 0) -> None:
        """Do nothing: no state is ever moved for its own sake."""

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the position of a state."""
        self.states.shift(seq, start, FOREVER if stop is None else stop, delta)

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide the position of a state."""
        self.states.divide(seq, start, FOREVER if stop is None else stop, divisor)
