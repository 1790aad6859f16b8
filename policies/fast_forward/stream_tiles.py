"""What the kernel ``tiled`` reads of several groups and streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.cells.stream_arenas import StreamArenas
from policies.fast_forward.forecast import StepReads
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.fast_forward.tiles import TileMap, TileSteps
from policies.fast_forward.window_path import WindowPath
from policies.fast_forward.window_tiles import WindowTileMap, WindowTileSteps
from policies.vocabulary import Chunk, IntArray, Reads


class StreamTiles:
    """A map of tiles for every stream of every group."""

    def __init__(self, streams: StreamArenas):
        self._streams = streams
        self._maps = [
            [TileMap(arena) if spec.window is None else WindowTileMap(arena) for arena in arenas]
            for spec, arenas in zip(streams.specs, streams.arenas, strict=True)
        ]

    def add(self, group: int, stream: int, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into ``cells``, in order."""
        self._maps[group][stream].add(chunks, cells)

    def lose(self, group: int, stream: int, seq: int, cells: IntArray) -> None:
        """Note that a sequence lost ``cells`` because the window has passed them."""
        tile_map = self._maps[group][stream]
        assert isinstance(tile_map, WindowTileMap), "there is a window"
        tile_map.lose(seq, cells)

    def map_of(self, group: int, stream: int = 0) -> TileMap:
        """The map of a stream in a group."""
        return self._maps[group][stream]

    def forget(self, seq: int = -1) -> None:
        """Note that a sequence gave up cells, or that its cells were moved; negative: any sequence."""
        for group in range(len(self._maps)):
            self.forget_in(group, seq)

    def forget_in(self, group: int, seq: int = -1) -> None:
        """``forget`` in one group."""
        maps = self._maps[group]
        for each in maps if seq < 0 else (maps[self._streams.stream_of(seq)],):
            each.forget(seq)

    def reads(self, group: int, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads for a micro-batch that has been placed, but for what a window hides."""
        maps = self._maps[group]
        tokens = np.array([chunk.n for chunk in chunks])
        counts = np.array([maps[self._streams.stream_of(chunk.seq)].counts(chunk.seq) for chunk in chunks])
        scanned = TILE * counts[:, 0]
        return Reads(tokens, scanned, counts[:, 1], counts[:, 2], int(scanned.sum()))

    def plan_steps(
        self, group: int, paths: Sequence[FreeCellPath], step: Sequence[Sequence[int]], n: int
    ) -> tuple[StepReads, list[TileSteps | WindowTileSteps]]:
        """What attention reads in a group in ``n`` decode steps along a path for each stream, of its sequences.

        Also the tiles that they enter, to be told how many steps were taken.
        """
        entered = [self.steps_along(group, path, seqs, n) for path, seqs in zip(paths, step, strict=True)]
        by_stream = [each.reads() for each in entered]
        if len(by_stream) == 1:
            return by_stream[0], entered
        scanned, useful, runs, span, most = (np.stack(column) for column in zip(*by_stream, strict=True))
        sums = [each.sum(axis=0) for each in (scanned, useful, runs, span)]
        return StepReads(sums[0], sums[1], sums[2], sums[3], most.max(axis=0)), entered

    def steps_along(self, group: int, path: FreeCellPath, seqs: Sequence[int], n: int) -> TileSteps | WindowTileSteps:
        """The tiles that ``n`` decode steps of sequences along a path enter in their stream of a group."""
        tile_map, window = self._maps[group][self._streams.stream_of(seqs[0])], self._streams.specs[group].window
        if isinstance(path, WindowPath) and isinstance(tile_map, WindowTileMap) and window is not None:
            return WindowTileSteps(tile_map, path, seqs, n, window)
        return TileSteps(tile_map, seqs, path.cells[: n * path.tokens])
