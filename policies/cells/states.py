"""States of a fixed size, one for each sequence: of layers with Mamba, linear attention or short convolutions.

A cell here holds the state of a whole sequence after its last token. Nothing of it is known for earlier tokens, unless
snapshots were kept of the last few. Source: llama.cpp of 2026, ``src/llama-memory-recurrent.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cells.arena import FOREVER
from policies.vocabulary import Chunk


class StateMemory:
    """The states of all sequences: which cell holds whose, and after which position (``llama_memory_recurrent``).

    Sequences that were copied share a cell until one of them goes on.
    """

    def __init__(self, sequences: int, snapshots: int = 0):
        """``snapshots``: last tokens of each sequence that can be taken back (``n_rs_seq``)."""
        self.snapshots = snapshots
        self.position = [-1] * sequences
        """By cell, the last position that its state has seen; -1 where it holds none."""
        self.seqs: list[set[int]] = [set() for _ in range(sequences)]
        """By cell, the sequences whose state it holds."""
        self._cell_of = [-1] * sequences
        """By sequence, its cell; -1 if it has no state."""
        self._taken_back = [0] * sequences
        """By sequence, tokens that were taken back since it last went on; once only."""
        self.head = 0
        """Where the search for an empty cell begins."""

    @property
    def used(self) -> int:
        """Cells that hold a state."""
        return sum([bool(seqs) for seqs in self.seqs])

    def last_position(self, seq: int) -> int:
        """The last position that a sequence's state has seen, which is also its first; -1 if it has none."""
        cell = self._cell_of[seq]
        return self.position[cell] if cell >= 0 else -1

    def place(self, chunks: Sequence[Chunk]) -> None:
        """Let the states of a micro-batch see its tokens, equally many of each sequence (``find_slot``).

        Its states are put into consecutive cells, in the order of the chunks; others give way. Where several sequences
        see the same tokens, the state of the last goes on (llama.cpp hands them on as an unordered set).
        """
        n, owners = len(chunks), [chunk.seqs[-1] for chunk in chunks]
        if self.head > self.used + 2 * n:
            self.head = 0
        for chunk in chunks:
            for seq in chunk.seqs[:-1]:
                self._leave(seq)
        empty = self._next_empty(self.head)
        for at, seq in enumerate(owners):
            cell = self._cell_of[seq]
            if cell < 0 or len(self.seqs[cell]) > 1:
                if cell >= 0:
                    self.position[empty] = self.position[cell]
                    self.seqs[cell].remove(seq)
                    self.seqs[empty].add(seq)
                self._cell_of[seq] = empty
                if at + 1 < n:
                    empty = self._next_empty(empty + 1)
        first = min(self._cell_of[seq] for seq in owners)
        last = max(self._cell_of[seq] for seq in owners)
        for at, seq in enumerate(owners):
            self._swap(first + at, self._cell_of[seq])
        for at, chunk in enumerate(chunks):
            self.position[first + at] = chunk.start + chunk.n - 1
            self.seqs[first + at] = set(chunk.seqs)
            for seq in chunk.seqs:
                self._cell_of[seq] = first + at
        self.head = first
        for seqs in self.seqs[first : last + 1]:
            # The pass copies all states in this range from where they were; those taken back, from a snapshot.
            if seqs:
                self._taken_back[min(seqs)] = 0

    def see(self, seq: int, position: int) -> None:
        """Let a sequence's state see its tokens up to a position, if there are any that it has not seen."""
        if position > self.last_position(seq):
            self.place([Chunk(seq, position, 1)])

    def remove(self, seq: int, start: int, stop: int) -> bool:
        """Take positions ``[start, stop)`` from a sequence; False, and nothing changes, where its state has seen them.

        A state can be given up whole, be left as it is, or go back to a snapshot (``seq_rm``).
        """
        if seq < 0:
            return False
        if start <= 0 and stop == FOREVER:
            self._taken_back[seq] = 0
        cell = self._cell_of[seq]
        last = self.last_position(seq)
        if 0 < start <= last < stop:
            back = last - start + 1
            if self._taken_back[seq] or back > self.snapshots:
                return False
            self._taken_back[seq], self.position[cell] = back, start - 1
            return True
        if cell >= 0 and start <= last < stop:
            self._leave(seq)
            if not self.seqs[cell]:
                self.head = min(self.head, cell)
        return True

    def copy(self, src: int, dst: int) -> None:
        """Let ``dst`` share the state of ``src``, whole (``seq_cp``)."""
        if src == dst:
            return
        self._leave(dst)
        cell = self._cell_of[src]
        if cell >= 0:
            self.seqs[cell].add(dst)
            self._cell_of[dst] = cell

    def keep(self, seq: int) -> None:
        """Give up all other states (``seq_keep``)."""
        for cell, seqs in enumerate(self.seqs):
            if seq in seqs:
                self.seqs[cell] = {seq}
            else:
                self.position[cell] = -1
                self.seqs[cell] = set()
                self.head = min(self.head, cell)
        self._cell_of = [cell if at == seq else -1 for at, cell in enumerate(self._cell_of)]

    def clear(self) -> None:
        """Give up all states."""
        self.keep(-1)
        self._taken_back = [0] * len(self.position)

    def shift(self, seq: int, start: int, stop: int, delta: int) -> None:
        """Add to the position of a state that lies in ``[start, stop)`` (``seq_add``)."""
        if start <= self.last_position(seq) < stop:
            self.position[self._cell_of[seq]] += delta

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> None:
        """Divide the position of a state that lies in ``[start, stop)`` (``seq_div``)."""
        if start <= self.last_position(seq) < stop:
            self.position[self._cell_of[seq]] //= divisor

    def restore(self, seq: int, position: int) -> None:
        """Give a sequence a state that was saved after ``position`` (``state_read``); none if that is negative."""
        self.remove(seq, 0, FOREVER)
        if position >= 0:
            self.place([Chunk(seq, position, 1)])

    def _leave(self, seq: int) -> None:
        """Take a sequence out of its cell, which is empty then unless others share it."""
        cell, self._cell_of[seq] = self._cell_of[seq], -1
        if cell >= 0:
            self.seqs[cell].remove(seq)
            if not self.seqs[cell]:
                self.position[cell] = -1

    def _next_empty(self, start: int) -> int:
        """The first empty cell from ``start`` on, once round."""
        n = len(self.seqs)
        return next((cell % n for cell in range(start, start + n) if not self.seqs[cell % n]), start % n)

    def _swap(self, a: int, b: int) -> None:
        """Let two cells change places."""
        if a == b:
            return
        self.position[a], self.position[b] = self.position[b], self.position[a]
        self.seqs[a], self.seqs[b] = self.seqs[b], self.seqs[a]
        self._cell_of = [b if cell == a else a if cell == b else cell for cell in self._cell_of]
