"""Finding cells for all micro-batches of a step before any is placed, in every group and stream, as llama.cpp does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.cells.arena import Arena
from policies.cells.search import cells_array, find_contiguous, find_scattered, start_of_search
from policies.cells.sequence_sets import SetIndices
from policies.cells.split_batch import split_by_stream, split_keeping_tails
from policies.cells.stream_arenas import StreamArenas
from policies.cells.window import usable_extents
from policies.layouts.unified import cut
from policies.vocabulary import Cells, Chunk, IntArray, OutOfCells, split_batch


@dataclass(frozen=True, slots=True)
class SavedCells:
    """What some cells of an arena held when they were saved; arrays of shape (n,)."""

    arena: Arena
    cells: IntArray
    position: IntArray
    owner: SetIndices
    rotations: IntArray
    """By how many positions each cell's key had still to be rotated."""

    @staticmethod
    def of(arena: Arena, cells: IntArray) -> SavedCells:
        """Save ``cells``, which are distinct."""
        rotations = arena.pending.rotations_of(cells)
        return SavedCells(arena, cells, arena.position[cells], arena.owner[cells], rotations)

    def restore(self) -> None:
        """Make the cells what they were; to be called once, in reverse order where several were saved."""
        arena, cells = self.arena, self.cells
        arena.restore(cells, self.position, self.owner)
        if arena.pending.rotations is not None:
            arena.pending.rotations[cells] = self.rotations


class Rejected(ValueError):
    """The batch itself is invalid: positions that do not continue a sequence, or sequences that do not agree."""


Slot = tuple[int, tuple[Chunk, ...], Cells]
"""A stream, the chunks of a micro-batch that go there, and a cell for each of their tokens."""

Planned = tuple[tuple[Chunk, ...], list[list[Slot]]]
"""A micro-batch, and its slots in every group."""


def check_step(step: Sequence[Chunk], ends: Callable[[int], tuple[int, int]], *, apart: bool) -> None:
    """Raise ``Rejected`` unless every sequence continues where it ends and coupled sequences agree.

    ``ends``: first and last position of a sequence, -1 if it holds none. ``apart``: each sequence has a stream of its
    own. As ``llama_batch_allocr::init``; ``OutOfCells`` where coupled sequences would lie in different streams.
    """
    next_position: dict[int, int] = {}
    for chunk in step:
        for seq in chunk.seqs if chunk.also else (chunk.seq,):
            expected = next_position.get(seq)
            if expected is None:
                held = ends(seq)[1]
                expected = held + 1 if held >= 0 else chunk.start
            if chunk.start != expected:
                raise Rejected(f"sequence {seq} ends at {expected - 1}, its next chunk starts at {chunk.start}")
            next_position[seq] = chunk.start + chunk.n
        for seq in chunk.also:
            if ends(chunk.seq) != ends(seq):
                raise Rejected(f"sequence {chunk.seq} is coupled to {seq}, but they have diverged")
    if apart and any(chunk.also for chunk in step):
        # Not a fault of the batch, in the original's eyes: it only finds no way to split it.
        raise OutOfCells("coupled sequences need a unified cache")


class StepPlanner:
    """Finds the cells that a step's micro-batches will take, and takes them."""

    def __init__(self, streams: StreamArenas, n_ubatch: int, *, contiguous: bool, equal: bool = False, tail: int = 0):
        """``contiguous``: a micro-batch's cells in a stream must lie in a row. ``equal``: it has equally many tokens of
        each sequence, with one stream too. ``tail``: so many last tokens of a sequence are never divided."""
        self._streams = streams
        self._n_ubatch = n_ubatch
        self._contiguous = contiguous
        self._equal = equal or streams.n_streams > 1
        self._tail = tail

    def find_at_once(self, step: Sequence[Chunk]) -> Iterable[Planned] | None:
        """A plan made while it is carried out, where that is certain to succeed; otherwise None.

        Each micro-batch is found when the one before it has been placed, and none sees what a later one takes.
        """
        streams, n_ubatch = self._streams, self._n_ubatch
        tokens = sum([chunk.n for chunk in step])
        if not self._equal and tokens <= n_ubatch:
            batches = cut(step, tokens, n_ubatch)
            by_group = [self._find(group, chunks) for chunks in batches for group in range(len(streams.specs))]
            slots = [found for found in by_group if found is not None]
            return [(batches[0], slots)] if 0 < len(slots) == len(by_group) else None
        if self._contiguous or any(spec.window is not None for spec in streams.specs):
            return None
        need: dict[int, int] = {}
        for chunk in step:
            stream = streams.stream_of(chunk.seq)
            need[stream] = need.get(stream, 0) + chunk.n
        if any(arenas[stream].free.total < n for arenas in streams.arenas for stream, n in need.items()):
            return None
        return self._one_by_one(self._split_equally(step) if self._equal else split_batch(step, n_ubatch))

    def _split_equally(self, step: Sequence[Chunk]) -> list[tuple[Chunk, ...]]:
        sequential = self._streams.n_streams > 1
        if self._tail:
            return split_keeping_tails(step, self._n_ubatch, self._tail, sequential=sequential)
        return split_by_stream(step, self._n_ubatch, sequential=sequential)

    def _one_by_one(self, batches: Iterable[tuple[Chunk, ...]]) -> Iterator[Planned]:
        for batch in batches:
            by_group = [self._find(group, batch) for group in range(len(self._streams.specs))]
            yield batch, [slots for slots in by_group if slots is not None]

    def find_one(self, group: int, chunks: Sequence[Chunk]) -> Slot | None:
        """Cells for any number of tokens of one sequence in one group; None if there are too few."""
        slots = self._find(group, chunks)
        return None if slots is None else slots[0]

    def plan(self, step: Sequence[Chunk]) -> list[Planned] | None:
        """Micro-batches with their slots in every group; None if they do not fit."""
        streams, attempts = self._streams, []
        if not self._equal:
            attempts.append(split_batch(step, self._n_ubatch))
        if self._equal or len(streams.specs) > 1:
            attempts.append(self._split_equally(step))
        for batches in attempts:
            by_group = []
            for group in range(len(streams.specs)):
                slots = self._prepare(group, batches)
                if slots is None:
                    break
                by_group.append(slots)
            else:
                return [(batch, [slots[i] for slots in by_group]) for i, batch in enumerate(batches)]
        return None

    def take(self, group: int, slot: Slot) -> None:
        """Put the tokens into the cells that were found (``apply_ubatch``).

        Where a cell that left the window is overwritten, all that its sequence holds up to that position goes too,
        so that what is left has no gap. As in the original, a plan that fails does not bring that back.
        """
        stream, chunks, cells = slot
        arena, windows = self._streams.arenas[group][stream], self._streams.windows[group]
        if windows is None:
            arena.take(cells, chunks)
        else:
            windows[stream].take(cells)
            arena.write(cells_array(cells), chunks)
            windows[stream].note_chunks(chunks, cells)
        arena.head = int(cells[-1]) + 1

    def _prepare(self, group: int, batches: Sequence[tuple[Chunk, ...]]) -> list[list[Slot]] | None:
        """Find and take slots for all micro-batches in order, then undo it all (``prepare``)."""
        arenas = self._streams.arenas[group]
        found: list[list[Slot]] = []
        undo = []
        for batch in batches:
            slots = self._find(group, batch)
            if slots is None:
                break
            heads = [arena.head for arena in arenas]
            undo.append(
                (slots, heads, [SavedCells.of(arenas[stream], cells_array(cells)) for stream, _, cells in slots])
            )
            found.append(slots)
            for slot in slots:
                self.take(group, slot)
        for slots, heads, saved in reversed(undo):
            _undo(arenas, slots, heads, saved)
        if undo:
            self._streams.forget(group)
        return found if len(found) == len(batches) else None

    def _find(self, group: int, batch: Sequence[Chunk]) -> list[Slot] | None:
        """Slots for a micro-batch in the streams of its sequences; None where one has no room."""
        streams = self._streams
        by_stream: dict[int, Sequence[Chunk]] = {0: batch}
        if streams.n_streams > 1:
            chunks_of: dict[int, list[Chunk]] = {}
            for chunk in batch:
                chunks_of.setdefault(streams.stream_of(chunk.seq), []).append(chunk)
            by_stream = dict(chunks_of)
        slots: list[Slot] = []
        for stream, chunks in by_stream.items():
            cells = self.find_cells(group, stream, sum([chunk.n for chunk in chunks]))
            if cells is None:
                return None
            slots.append((stream, tuple(chunks), cells))
        return slots

    def find_cells(self, group: int, stream: int, n: int) -> Cells | None:
        """Cells for ``n`` tokens of a micro-batch in a stream of a group; None if there are too few."""
        arena, windows = self._streams.arenas[group][stream], self._streams.windows[group]
        head = start_of_search(arena.head, arena.used, n)
        if self._contiguous:
            window = self._streams.specs[group].window
            usable = arena.free if window is None else usable_extents(arena, window)
            first, _ = find_contiguous(usable, head, n)
            return None if first is None else range(first, first + n)
        return find_scattered(arena.free, head, n) if windows is None else windows[stream].find(head, n)


def _undo(arenas: Sequence[Arena], slots: Sequence[Slot], heads: Sequence[int], saved: Sequence[SavedCells]) -> None:
    """Give back what a micro-batch took.

    As in the original, the head is restored by the k-th stream of the micro-batch, not by stream number.
    """
    for k, (stream, _, _) in enumerate(slots):
        saved[k].restore()
        arenas[stream].head = heads[k]
