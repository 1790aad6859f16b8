"""Decode steps at once in several groups and streams: each goes along the free cells that its next searches find."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.reads import padded_spans
from policies.cells.split_batch import split_by_stream
from policies.cells.stream_arenas import StreamArenas
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, Usages
from policies.fast_forward.free_cell_path import FreeCellPath, masked_step_reads
from policies.fast_forward.stream_tiles import StreamTiles
from policies.fast_forward.tiles import TileSteps
from policies.fast_forward.window_path import WindowPath
from policies.fast_forward.window_tiles import WindowTileSteps
from policies.vocabulary import Chunk, IntArray


def plan_steps(
    streams: StreamArenas,
    step: Sequence[Chunk],
    n: int,
    n_ubatch: int,
    *,
    contiguous: bool,
    tiles: StreamTiles | None = None,
) -> FastForward | None:
    """At most ``n`` decode steps of sequences none of which are coupled.

    They read under the kernel ``tiled`` if there are ``tiles``, else under ``masked``. ``contiguous``: the cells of a
    micro-batch in a stream must lie in a row.
    """
    apart = streams.n_streams > 1
    if (len(step) > n_ubatch and not apart) or streams.specs[0].window is not None:
        return None
    steps = min(n, MAX_STEPS)
    parts: list[Sequence[Chunk]] = [step]
    if apart:
        parts = list(split_by_stream(step, n_ubatch, sequential=True))
    by_part = [[[chunk] for chunk in part] if apart else [part] for part in parts]
    paths: list[list[list[FreeCellPath]]] = []
    """A path for each stream, by pass and group."""
    for by_stream in by_part:
        paths.append([])
        for group in range(len(streams.specs)):
            paths[-1].append([])
            for chunks in by_stream:
                path = path_of(streams, group, [chunk.seq for chunk in chunks], steps, contiguous=contiguous)
                steps = min(steps, path.steps)
                if steps < 2:
                    return None
                paths[-1][-1].append(path)
    spans = [[_spans(streams, g, found, steps) for g, found in enumerate(groups)] for groups in paths]

    def take_steps(k: int, look: bool) -> Usages | None:
        usages = _usages(streams, paths, by_part, k, contiguous) if look else None
        for groups, by_stream in zip(paths, by_part, strict=True):
            for found in groups:
                for path, chunks in zip(found, by_stream, strict=True):
                    if isinstance(path, WindowPath):
                        path.overwrite(k)
                    path.arena.take_steps(path.cells[: k * path.tokens], chunks, k)
                    path.arena.head = path.head_after(k)
        for each in entered:
            each.take(k)
        streams.attended = {int(span[k - 1]) for groups in spans for span in groups}
        return usages

    passes, entered = [], list[TileSteps | WindowTileSteps]()
    for part, by_stream, groups, found in zip(parts, by_part, spans, paths, strict=True):
        n_streams = len(part) if apart else 1
        if tiles is None:
            pairs = zip(streams.specs, groups, strict=True)
            reads = tuple(masked_step_reads(part, span, spec.window, n_streams) for spec, span in pairs)
        else:
            seqs = [[chunk.seq for chunk in chunks] for chunks in by_stream]
            planned = [tiles.plan_steps(group, each, seqs, steps) for group, each in enumerate(found)]
            reads = tuple(sums for sums, _ in planned)
            for _, new in planned:
                entered += new
        passes.append(DecodePass(len(part), reads))
    return FastForward(tuple(passes), take_steps)


def path_of(streams: StreamArenas, group: int, seqs: Sequence[int], steps: int, *, contiguous: bool) -> FreeCellPath:
    """Where the tokens of sequences of one stream go in a group."""
    spec = streams.specs[group]
    arena = streams.arenas[group][streams.stream_of(seqs[0])]
    if spec.window is None:
        return FreeCellPath(arena, len(seqs), steps, spec.pad, anywhere=not contiguous)
    return WindowPath(arena, seqs, steps, spec.pad, spec.window)


def _spans(streams: StreamArenas, group: int, paths: Sequence[FreeCellPath], steps: int) -> IntArray:
    """Cells that a pass reads of each of its streams in each step; shape (steps,)."""
    if len(paths) == 1:
        return paths[0].spans()[:steps]
    spec = streams.specs[group]
    tops = np.full(steps, max([path.arena.top for path in paths]))
    in_a_row = [path.cells.start for path in paths if isinstance(path.cells, range)]
    if in_a_row:
        tokens = paths[0].tokens
        np.maximum(tops, max(in_a_row) + tokens * np.arange(1, steps + 1), out=tops)
    if len(in_a_row) < len(paths):
        for path in paths:
            if not isinstance(path.cells, range):
                np.maximum(tops, path.heads[:steps], out=tops)
    return padded_spans(tops, spec.pad, spec.size)


def _usages(
    streams: StreamArenas,
    paths: Sequence[Sequence[Sequence[FreeCellPath]]],
    by_part: Sequence[Sequence[Sequence[Chunk]]],
    k: int,
    contiguous: bool,
) -> Usages:
    """How full the first group will be after each of the first ``k`` steps; paths by pass, group and stream."""
    if streams.n_streams == 1:
        return paths[0][0][0].usages(k)
    size = streams.specs[0].size
    growing = {
        streams.stream_of(chunks[0].seq): path.usages(k)
        for groups, by_stream in zip(paths, by_part, strict=True)
        for path, chunks in zip(groups[0], by_stream, strict=True)
    }
    used, runs, largest, room, top = (np.zeros(k, dtype=np.int64) for _ in range(5))
    for i, arena in enumerate(streams.arenas[0]):
        if i in growing:
            continue
        used += arena.used
        runs += len(arena.free)
        np.maximum(largest, arena.free.largest, out=largest)
        np.maximum(room, arena.free.total, out=room)
        np.maximum(top, i * size + arena.top if arena.used else 0, out=top)
    for i, each in growing.items():
        used += each.stored
        runs += each.free_extents
        np.maximum(largest, each.largest_free_extent, out=largest)
        np.maximum(room, size - each.stored, out=room)
        np.maximum(top, i * size + each.span, out=top)
    placeable = largest if contiguous else room
    return Usages(used, used, placeable, runs, largest, top, np.zeros(k, dtype=np.int64))
