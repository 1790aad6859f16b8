"""Each cost alone: passes of random sizes, compactions, key rotations and copies to the host, timed repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample
from kvsim.costs.pass_layout import Sample, sample_of
from policies import Chunk, Group, HostCopy, Kernel, MicroBatch, Moves, Place, Shift, View
from policies.cells.host_copies import transfers_of
from policies.cells.reads import reads_of
from real_engine import Engine

CELLS = 4096
"""Cells of the measured caches."""

_RUN_LENGTHS = (1, 4, 16, 64)
"""Contiguous cells in a sequence's random placement."""
_DECODES = (0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of decoding sequences in a random pass, drawn uniformly."""
_LONGEST = 512
"""Most tokens of an ordinary pass."""
_LARGE = (512, 2048)
"""Tokens of the first large passes, as many as the default micro-batch of llama-server and batch of vLLM, so that a
profile reaches as far; others are random."""
_FEW = 28
"""Fewer passes than this have only the first large one, since the second takes as long as a dozen others."""
_LARGE_SHARE = 24
"""One in so many passes is a large one."""
_MOVES = 40
_SHIFTS = 12
_HOST_COPIES = 10
"""Copies of sequences out to the host, and as many back."""
_WARM_S = 0.004
"""Warm-up of a decode: in a server it follows other decodes, but not always equal ones."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Work to time."""

    run: Callable[[], float]
    before: Callable[[], float] | None = None
    """Work to run first, so that the processor's caches are as in a server; None: the same work, as a warm-up."""

    def measure(self) -> tuple[float, ...]:
        """Seconds of the work: once, or twice after a warm-up."""
        if self.before is not None:
            self.before()
            return (self.run(),)
        warm_s = self.run()
        while warm_s < _WARM_S:
            warm_s += self.run()
        return self.run(), self.run()


def half_width(seconds: Sequence[float]) -> float:
    """Half-width of the median's 95 % interval over the median, from the spread as if normal."""
    return float(1.96 * 1.2533 * scatter(seconds) / len(seconds) ** 0.5)


def scatter(seconds: Sequence[float]) -> float:
    """Standard deviation over the median, from the median absolute deviation as if normal."""
    middle = float(np.median(seconds))
    return float(1.4826 * np.median(np.abs(np.array(seconds) - middle)) / middle)


class HostCopyWork(NamedTuple):
    """A copy of a sequence to host memory, or back."""

    out: bool
    runs: int
    cells: int


class MeasuredTrials(NamedTuple):
    """What was measured of all trials."""

    passes: list[Sample]
    moves: list[MoveSample]
    shifts: list[ShiftSample]
    host_copies: list[HostCopySample]


@dataclass(slots=True)
class Trials:
    """All trials of a calibration; equal generators draw equal trials."""

    passes: list[tuple[Kernel, MicroBatch, Trial]] = field(default_factory=list)
    moves: list[tuple[Moves, Trial]] = field(default_factory=list)
    shifts: list[tuple[int, Trial]] = field(default_factory=list)
    host_copies: list[tuple[HostCopyWork, Trial]] = field(default_factory=list)
    groups: dict[Kernel, Group] = field(default_factory=dict)
    """Cache group on which each kernel was measured."""
    skipping: tuple[Kernel, ...] = ()
    """Kernels that skip masked cells one by one."""

    def all(self) -> list[Trial]:
        """All trials in the order in which they were drawn."""
        others = (*self.moves, *self.shifts, *self.host_copies)
        return [t for *_, t in self.passes] + [t for _, t in others]

    def tokens(self) -> list[int]:
        """Tokens of each trial's pass, in the same order; 1 for all others, which are bound by memory."""
        others = len(self.moves) + len(self.shifts) + len(self.host_copies)
        return [batch.n_tokens for _, batch, _ in self.passes] + [1] * others

    def samples(self, seconds: Sequence[Sequence[float]]) -> MeasuredTrials:
        """Median of each trial's ``seconds``, in the same order, where there are any.

        Each pass is its own origin, counted from 0.
        """
        medians = [float(np.median(each)) if len(each) else None for each in seconds]
        passes, rest = medians[: len(self.passes)], medians[len(self.passes) :]
        moves, rest = rest[: len(self.moves)], rest[len(self.moves) :]
        shifts, copies = rest[: len(self.shifts)], rest[len(self.shifts) :]
        return MeasuredTrials(
            [
                sample_of(kernel, [batch], self.groups[kernel], took, origin, False, kernel in self.skipping)
                for origin, ((kernel, batch, _), took) in enumerate(zip(self.passes, passes, strict=True))
                if took is not None
            ],
            [
                MoveSample(runs=m.n_runs, cells=m.n_cells, seconds=took)
                for (m, _), took in zip(self.moves, moves, strict=True)
                if took is not None
            ],
            [
                ShiftSample(cells=n, seconds=took)
                for (n, _), took in zip(self.shifts, shifts, strict=True)
                if took is not None
            ],
            [
                HostCopySample(**work._asdict(), seconds=took)
                for (work, _), took in zip(self.host_copies, copies, strict=True)
                if took is not None
            ],
        )


def draw_trials(engines: dict[Kernel, Engine], each: int, rng: np.random.Generator) -> Trials:
    """Draw ``each`` forward passes for every kernel's engine; moves, rotations and host copies on the last engine."""
    trials = Trials(groups={kernel: engine.groups[0] for kernel, engine in engines.items()})
    for kernel, engine in engines.items():
        large = [[_large(rng, i)] for i in range(max(each // _LARGE_SHARE - 1, 1 if each < _FEW else len(_LARGE)))]
        drawn = [random_pass(kernel, rng, lengths) for lengths in large]
        drawn += [random_pass(kernel, rng) for _ in range(each - len(large))]
        decodes = [timed_pass(engine, batch) for batch in drawn if _generates(batch)]
        decodes = decodes or [timed_pass(engine, random_pass(kernel, rng, [1]))]
        for batch in drawn:
            # In a server, prompts follow decodes, whose data fill the processor's caches.
            before = None if _generates(batch) else decodes[int(rng.integers(len(decodes)))]
            trials.passes.append((kernel, batch, Trial(timed_pass(engine, batch), before)))
    for _ in range(_MOVES):
        moves = _random_moves(rng)
        trials.moves.append((moves, Trial(_timed_moves(engine, moves))))
    for n in np.unique((2 ** rng.uniform(0, 11, _SHIFTS)).astype(int)).tolist():
        trials.shifts.append((n, Trial(_timed_shift(engine, n))))
    for n in host_copy_sizes(rng, _HOST_COPIES):
        for out in (True, False):
            copy = _random_host_copy(rng, n, out=out)
            work = HostCopyWork(out, len(copy.transfers), n)
            trials.host_copies.append((work, Trial(_timed_host_copy(engine, copy))))
    return trials


def host_copy_sizes(rng: np.random.Generator, many: int) -> list[int]:
    """Tokens of the sequences that are copied to the host and back, from 16 to half of the cells."""
    most = int(np.log2(CELLS)) - 1
    sizes: list[int] = np.unique((2 ** rng.uniform(4, most, many)).astype(int)).tolist()
    return sizes


def random_pass(kernel: Kernel, rng: np.random.Generator, lengths: list[int] | None = None) -> MicroBatch:
    """A random forward pass with chunks of these lengths; by default as in a server: decodes, prompts, or both."""
    lengths = lengths or random_lengths(rng)
    span = CELLS if rng.random() < 0.1 else round(2 ** rng.uniform(5, 12))
    top = -(-max(span, sum(lengths)) // 64) * 64
    shares = rng.dirichlet(np.ones(len(lengths))) * (top - sum(lengths))
    cells = _blockwise(rng, top, int(rng.choice(_RUN_LENGTHS)))
    views: list[View] = []
    chunks: list[Chunk] = []
    at = 0
    for seq, (n, share) in enumerate(zip(lengths, shares.tolist(), strict=True)):
        size = n + int(share)
        views.append(View(cells[at : at + size], np.arange(size)))
        chunks.append(Chunk(seq, size - n, n))
        at += size
    placed = np.concatenate([view.cells[-n:] for view, n in zip(views, lengths, strict=True)])
    reads = reads_of(kernel, chunks, lambda seq: views[seq].cells, top)
    return MicroBatch(tuple(chunks), (Place(placed, reads, views=tuple(views)),))


def random_lengths(rng: np.random.Generator) -> list[int]:
    """Tokens of each chunk of a random pass, at most 512 in all."""
    decodes = int(rng.choice(_DECODES))
    lengths = [1] * decodes
    if decodes == 0 or rng.random() < 0.3:
        most = 3 if rng.random() < 0.3 else 8
        lengths += [max(2, round(2 ** rng.uniform(1, most))) for _ in range(rng.integers(1, 4))]
    while sum(lengths) > _LONGEST:
        lengths.pop()
    return lengths


def _large(rng: np.random.Generator, i: int) -> int:
    """Tokens of the ``i``-th large pass."""
    return _LARGE[i] if i < len(_LARGE) else round(_LONGEST * 2 ** rng.uniform(-1, 2))


def whole_pass(tokens: int, cells: int, prompt: bool) -> MicroBatch:
    """A pass under ``sliced`` over the first ``cells``: a prompt's end, or decodes of equally long sequences."""
    chunks: list[Chunk] = []
    views: list[View] = []
    for seq in range(1 if prompt else tokens):
        size = cells if prompt else cells // tokens
        n = tokens if prompt else 1
        chunks.append(Chunk(seq, size - n, n))
        views.append(View(np.arange(seq * size, (seq + 1) * size), np.arange(size)))
    placed = np.concatenate([view.cells[-chunk.n :] for view, chunk in zip(views, chunks, strict=True)])
    reads = reads_of("sliced", chunks, lambda seq: views[seq].cells, cells)
    return MicroBatch(tuple(chunks), (Place(placed, reads, views=tuple(views)),))


def _generates(batch: MicroBatch) -> bool:
    return batch.n_tokens == len(batch.chunks)


def _blockwise(rng: np.random.Generator, n: int, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Cells ``[0, n)`` with their blocks in random order; ``block`` divides ``n``."""
    return (rng.permutation(n // block)[:, None] * block + np.arange(block)).reshape(-1)


def _random_moves(rng: np.random.Generator) -> Moves:
    runs, length = int(2 ** rng.uniform(0, 7)), int(2 ** rng.uniform(0, 6))
    length = max(1, min(length, CELLS // (2 * runs)))
    src = np.sort(rng.choice(CELLS // (2 * length), runs, replace=False)) * length + CELLS // 2
    return Moves(src, np.arange(runs) * length, np.full(runs, length))


def _random_host_copy(rng: np.random.Generator, n: int, *, out: bool) -> HostCopy:
    """A copy of a sequence of ``n`` tokens, whose cells lie together or in blocks here and there."""
    block = int(rng.choice([*_RUN_LENGTHS, CELLS]))
    return HostCopy(transfers_of(_blockwise(rng, CELLS, block)[:n], np.arange(n), to_host=out))


def timed_pass(engine: Engine, batch: MicroBatch) -> Callable[[], float]:
    """A function that runs the pass on the engine, repeatably, and returns its seconds."""
    # One token beyond the chunk, so that nothing is appended and every repetition is equal.
    texts = {c.seq: [7] * (c.start + c.n + 1) for c in batch.chunks}

    def run() -> float:
        engine.tokens = texts
        return engine.forward(batch)

    return run


def _timed_moves(engine: Engine, moves: Moves) -> Callable[[], float]:
    return lambda: engine.move(moves)


def _timed_shift(engine: Engine, n: int) -> Callable[[], float]:
    return lambda: engine.rotate(Shift(np.arange(n), np.ones(n, dtype=np.int64)))


def _timed_host_copy(engine: Engine, copy: HostCopy) -> Callable[[], float]:
    return lambda: engine.copy((copy,))
