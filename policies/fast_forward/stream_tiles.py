"""What the kernel ``tiled`` reads of several groups and streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.cells.stream_arenas import StreamArenas
from policies.fast_forward.forecast import StepReads
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.fast_forward.tiles import TileMap, TileSteps
from policies.fast_forward.window_path import WindowPath
from policies.vocabulary import Chunk, IntArray, Reads


class StreamTiles:
    """A map of tiles for every stream of the groups without a window, kept while sequences only grow.

    Where a window overwrites cells, they are counted anew each time: sequences are short there.
    """

    def __init__(self, streams: StreamArenas):
        self._streams = streams
        self._maps = [
            [TileMap(arena) for arena in arenas] if spec.window is None else None
            for spec, arenas in zip(streams.specs, streams.arenas, strict=True)
        ]

    def add(self, group: int, stream: int, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into ``cells``, in order."""
        maps = self._maps[group]
        if maps is not None:
            maps[stream].add(chunks, cells)

    def map_of(self, group: int, stream: int = 0) -> TileMap:
        """The map of a stream in a group without a window."""
        maps = self._maps[group]
        assert maps is not None, "a group without a window has a map"
        return maps[stream]

    def forget(self, seq: int = -1) -> None:
        """Note that a sequence gave up cells, or that its cells were moved; negative: any sequence."""
        for maps in self._maps:
            if maps is not None:
                for each in maps if seq < 0 else (maps[self._streams.stream_of(seq)],):
                    each.forget(seq)

    def reads(self, group: int, chunks: Sequence[Chunk]) -> Reads | None:
        """What attention reads for a micro-batch that has been placed; None for a group with a window."""
        maps = self._maps[group]
        if maps is None:
            return None
        tokens = np.array([chunk.n for chunk in chunks])
        counts = np.array([maps[self._streams.stream_of(chunk.seq)].counts(chunk.seq) for chunk in chunks])
        scanned = TILE * counts[:, 0]
        return Reads(tokens, scanned, counts[:, 1], counts[:, 2], int(scanned.sum()))

    def plan_steps(
        self, group: int, paths: Sequence[FreeCellPath], step: Sequence[Sequence[int]], n: int
    ) -> tuple[StepReads, list[TileSteps]]:
        """What attention reads in a group in ``n`` decode steps along a path for each stream, of its sequences.

        Also the tiles that they enter, to be told how many steps were taken.
        """
        maps, window = self._maps[group], self._streams.specs[group].window
        by_stream, entered = [], list[TileSteps]()
        for path, seqs in zip(paths, step, strict=True):
            if maps is not None:
                entered.append(TileSteps(maps[self._streams.stream_of(seqs[0])], seqs, path.cells[: n * path.tokens]))
                found = entered[-1].reads()
            else:
                assert window is not None, "a group without a map has a window"
                assert isinstance(path, WindowPath), "so its paths are those of a window"
                found = _window_steps(path, seqs, n, window)
            by_stream.append(found)
        if len(by_stream) == 1:
            return by_stream[0], entered
        scanned, useful, runs, span, most = (np.stack(column) for column in zip(*by_stream, strict=True))
        sums = [each.sum(axis=0) for each in (scanned, useful, runs, span)]
        return StepReads(sums[0], sums[1], sums[2], sums[3], most.max(axis=0)), entered


def _window_steps(path: WindowPath, seqs: Sequence[int], steps: int, window: int) -> StepReads:
    """``plan_steps`` for one stream with a window, whose sequences lose cells as they are overwritten."""
    table, lost = path.table(steps), path.positions_lost(steps)
    own = [_window_tiles(path.arena, seq, table[:, i], lost.get(seq)) for i, seq in enumerate(seqs)]
    tiles, runs, held = (np.stack(column) for column in zip(*own, strict=True))
    scanned = TILE * tiles.sum(axis=0)
    useful = np.minimum(held, window).sum(axis=0)
    return StepReads(scanned, useful, runs.sum(axis=0), scanned, TILE * tiles.max(axis=0))


def _window_tiles(
    arena: Arena, seq: int, taken: IntArray, lost: IntArray | None
) -> tuple[IntArray, IntArray, IntArray]:
    """Tiles, runs of tiles and cells of a sequence after each step; shape (steps,) each.

    ``taken``: the cell that it takes in each step. ``lost``: the last position that it has lost by then.
    """
    cells, positions = arena.cells_of(seq)
    steps = np.arange(len(taken))
    lost = np.full(len(taken), -1) if lost is None else lost
    held = len(cells) - np.searchsorted(positions, lost, side="right") + steps + 1
    # A tile is held until its last position is lost, and again from the step that takes a cell in it; -1 where never.
    most = max(int(cells.max(initial=0)), int(taken.max())) // TILE + 1
    last, entered = np.full((2, most), -1)
    last[cells // TILE] = positions
    entered[taken[::-1] // TILE] = steps[::-1]
    tiles = ((last >= 0) | (entered >= 0)).nonzero()[0]
    last, enters = last[tiles], entered[tiles]
    leaves = np.where(last < 0, 0, np.searchsorted(lost, last))
    enters[enters < 0] = len(taken)
    holds = (steps < leaves[:, None]) | (steps >= enters[:, None])
    begins = holds.copy()
    begins[1:] &= ~(holds[:-1] & (np.diff(tiles) == 1)[:, None])
    return holds.sum(axis=0), begins.sum(axis=0), held
