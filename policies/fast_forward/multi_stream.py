"""Decode steps at once in several caches and streams: each goes along the free cells that its next searches find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from policies.cells.reads import padded_spans
from policies.cells.split_batch import split_by_stream
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, Usages
from policies.fast_forward.free_cell_path import FreeCellPath, masked_step_reads
from policies.fast_forward.window_path import WindowPath
from policies.vocabulary import Chunk, IntArray

if TYPE_CHECKING:
    from policies.layouts.multi_stream import MultiStreamPolicy


def plan_steps(policy: MultiStreamPolicy, step: Sequence[Chunk], n: int) -> FastForward | None:
    """What at most ``n`` steps would read and take under the kernel ``masked``, none of whose chunks is coupled."""
    streams = policy.n_streams > 1
    if (len(step) > policy.n_ubatch and not streams) or policy.caches[0].window is not None:
        return None
    steps = min(n, MAX_STEPS)
    parts: list[Sequence[Chunk]] = [step]
    if streams:
        parts = list(split_by_stream(step, policy.n_ubatch, sequential=True))
    ways: list[list[list[FreeCellPath]]] = []
    """Of each pass, in each group: a way for each stream."""
    for part in parts:
        lanes = [[chunk] for chunk in part] if streams else [part]
        ways.append([])
        for group in range(len(policy.caches)):
            ways[-1].append([])
            for lane in lanes:
                found = _way(policy, group, lane, steps)
                steps = min(steps, found.steps)
                if steps < 2:
                    return None
                ways[-1][-1].append(found)
    spans = [[_spans(policy, g, found, steps) for g, found in enumerate(groups)] for groups in ways]

    def take(k: int, look: bool) -> Usages | None:
        first = [found for groups in ways for found in groups[0]]
        usages = _usages(policy, first, k) if look else None
        for groups in ways:
            for lanes in groups:
                for found in lanes:
                    found.take(k, look=False)
                    found.arena.head = found.head_after(k)
        policy.attended = {int(span[k - 1]) for groups in spans for span in groups}
        return usages

    passes = []
    for part, groups in zip(parts, spans, strict=True):
        n_streams = len(part) if streams else 1
        pairs = zip(policy.caches, groups, strict=True)
        sums = tuple(masked_step_reads(part, span, spec.window, n_streams) for spec, span in pairs)
        passes.append(DecodePass(len(part), sums))
    return FastForward(tuple(passes), take)


def _way(policy: MultiStreamPolicy, group: int, lane: Sequence[Chunk], steps: int) -> FreeCellPath:
    """Where the tokens of a stream, or of all, go in a group."""
    spec = policy.caches[group]
    arena = policy.arenas[group][policy.stream_of(lane[0].seq)]
    if spec.window is None:
        return FreeCellPath(arena, lane, steps, spec.pad, anywhere=not policy.contiguous)
    return WindowPath(arena, lane, steps, spec.pad, spec.window)


def _spans(policy: MultiStreamPolicy, group: int, lanes: Sequence[FreeCellPath], steps: int) -> IntArray:
    """What a pass reads of each of its streams; shape (steps,)."""
    if len(lanes) == 1:
        return lanes[0].spans()[:steps]
    spec = policy.caches[group]
    tops = np.full(steps, max([lane.arena.top for lane in lanes]))
    in_a_row = [lane.cells.start for lane in lanes if isinstance(lane.cells, range)]
    if in_a_row:
        tokens = len(lanes[0].step)
        np.maximum(tops, max(in_a_row) + tokens * np.arange(1, steps + 1), out=tops)
    if len(in_a_row) < len(lanes):
        for lane in lanes:
            if not isinstance(lane.cells, range):
                np.maximum(tops, lane.heads[:steps], out=tops)
    return padded_spans(tops, spec.pad, spec.size)


def _usages(policy: MultiStreamPolicy, ways: Sequence[FreeCellPath], k: int) -> Usages:
    """How full the first group will be after each of the first ``k`` steps."""
    if policy.n_streams == 1:
        return ways[0].usages(k)
    size = policy.caches[0].size
    going = {policy.stream_of(way.step[0].seq): way.usages(k) for way in ways}
    still = [(i, arena) for i, arena in enumerate(policy.arenas[0]) if i not in going]
    used, runs, largest, room, top = (np.zeros(k, dtype=np.int64) for _ in range(5))
    for i, arena in still:
        used += arena.used
        runs += len(arena.free)
        np.maximum(largest, arena.free.largest, out=largest)
        np.maximum(room, arena.free.total, out=room)
        np.maximum(top, i * size + arena.top if arena.used else 0, out=top)
    for i, each in going.items():
        used += each.stored
        runs += each.free_extents
        np.maximum(largest, each.largest_free_extent, out=largest)
        np.maximum(room, size - each.stored, out=room)
        np.maximum(top, i * size + each.span, out=top)
    placeable = largest if policy.contiguous else room
    return Usages(used, used, placeable, runs, largest, top, np.zeros(k, dtype=np.int64))
