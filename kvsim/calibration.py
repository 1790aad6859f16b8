"""Measuring the real engine, and fitting a machine profile to what was measured."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from kvsim import machine
from kvsim.costs import KNOTS, MachineInfo, MoveSample, Profile, Range, Sample, ShiftSample, digest, fit
from kvsim.model import Storage
from policies import Chunk, Group, Kernel, MicroBatch, Moves, Place, Shift, View
from policies.reads import reads_of
from real_engine import Engine, load_model
from workloads import stream

Report = Callable[[float], None]
"""Called with the share of the work that is done."""

_CELLS = 4096
"""Cells of the cache measured on."""
_RUN_LENGTHS = (1, 4, 16, 64)
"""Cells that lie together, of sequences read by ``gather``."""
_CONFIGURATIONS = (40, 200)
"""The fewest and the most forward passes of different sizes, for each kernel; as many as 8 a second."""
_DECODES = (0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 12, 16)
"""Sequences that generate, in a random pass."""
_MOVES = 40
_SHIFTS = 12
_MOST_ROUNDS = 40
"""The most times that each is measured."""


@dataclass(slots=True)
class _Trial:
    run: Callable[[], float]
    seconds: list[float]
    before: Callable[[], float] | None = None
    """What runs first, so that the caches are as a server finds them; None: itself, twice."""


def calibrate(
    model: str = "tiny",
    *,
    seconds: float = 20.0,
    name: str = "calibrated",
    type_k: Storage = "f32",
    type_v: Storage = "f32",
    report: Report | None = None,
) -> Profile:
    """Measure the real engine for about ``seconds`` and fit a profile for K and V kept as these types.

    Forward passes of random sizes under each kernel, and copies of random runs, are measured by turns, round
    after round, so that a slow moment of the machine falls on all alike; the median over the rounds counts.
    """
    rng = stream(0, "calibration")
    weights = load_model(model).transformer
    passes: list[tuple[Kernel, MicroBatch, _Trial]] = []
    for kernel in get_args(Kernel):
        engine = Engine(weights, (Group(_CELLS),), kernel, seed=0, type_k=type_k, type_v=type_v)
        first = len(passes)
        for _ in range(min(max(int(8 * seconds), _CONFIGURATIONS[0]), _CONFIGURATIONS[1])):
            batch = _random_pass(kernel, rng)
            passes.append((kernel, batch, _Trial(_timed_pass(engine, batch), [])))
        decodes = [trial.run for _, batch, trial in passes[first:] if batch.n_tokens == len(batch.chunks)]
        for _, batch, trial in passes[first:]:
            if batch.n_tokens > len(batch.chunks):
                # Prompts come between decodes, which have taken the caches for themselves.
                trial.before = decodes[int(rng.integers(len(decodes)))]
    moves: list[tuple[Moves, _Trial]] = []
    for _ in range(_MOVES):
        runs = _random_moves(rng)
        moves.append((runs, _Trial(_timed_moves(engine, runs), [])))

    shifts: list[tuple[int, _Trial]] = []
    for n in np.unique((2 ** rng.uniform(0, 11, _SHIFTS)).astype(int)).tolist():
        shifts.append((n, _Trial(_timed_shift(engine, n), [])))

    load_before = machine.load()
    trials = [trial for _, _, trial in passes] + [trial for _, trial in moves] + [trial for _, trial in shifts]
    with machine.measuring() as watch:
        _measure(trials, seconds, rng, report)
    samples = [_sample(kernel, batch, float(np.median(t.seconds))) for kernel, batch, t in passes]
    move_samples = [MoveSample(runs=m.n_runs, cells=m.n_cells, seconds=float(np.median(t.seconds))) for m, t in moves]
    scanned = [int(batch.reads.scanned.max()) for _, batch, _ in passes]
    shift_samples = [ShiftSample(cells=n, seconds=float(np.median(t.seconds))) for n, t in shifts]
    fitted = fit(samples, move_samples, shift_samples, stream(0, "calibration fit"))
    return Profile(
        name=name,
        model=model,
        type_k=type_k,
        type_v=type_v,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=MachineInfo(
            processor=machine.processor(),
            cores=os.cpu_count() or 1,
            blas=machine.blas(),
            threads=1,
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            numpy=np.__version__,
            load_before=load_before,
            load_after=machine.load(),
            cpu_share=watch.cpu_share,
        ),
        matmul_knots=KNOTS,
        tokens=Range(low=min(s.tokens for s in samples), high=max(s.tokens for s in samples)),
        cells=Range(low=min(scanned), high=max(scanned)),
        samples=len(trials),
        digest=digest(samples, move_samples, shift_samples),
        **dict(fitted),
    )


def _measure(trials: list[_Trial], seconds: float, rng: np.random.Generator, report: Report | None) -> None:
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        share = (time.perf_counter() - began) / seconds
        if done > 0 and share >= 1:
            return
        for index in rng.permutation(len(trials)):
            trial = trials[index]
            if trial.before is not None:
                trial.before()
                trial.seconds.append(trial.run())
                continue
            # In a server, decodes mostly follow one much like them.
            trial.run()
            trial.run()
            trial.seconds += (trial.run(), trial.run())
        if report is not None:
            report(min(max(share, done / _MOST_ROUNDS), 1.0))


def _random_pass(kernel: Kernel, rng: np.random.Generator) -> MicroBatch:
    """A forward pass like those that servers run: decodes, prompt chunks, or both."""
    decodes = int(rng.choice(_DECODES))
    lengths = [1] * decodes
    if decodes == 0 or rng.random() < 0.3:
        lengths += [max(2, round(2 ** rng.uniform(1, 8))) for _ in range(rng.integers(1, 4))]
    while sum(lengths) > 512:
        lengths.pop()
    span = _CELLS if rng.random() < 0.1 else round(2 ** rng.uniform(5, 12))
    top = -(-max(span, sum(lengths)) // 64) * 64
    shares = rng.dirichlet(np.ones(len(lengths))) * (top - sum(lengths))
    run_length = int(rng.choice(_RUN_LENGTHS))
    cells = _blockwise(rng, top, run_length)
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


def _blockwise(rng: np.random.Generator, n: int, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Cells ``[0, n)`` with their blocks in random order; ``block`` divides ``n``."""
    return (rng.permutation(n // block)[:, None] * block + np.arange(block)).reshape(-1)


def _random_moves(rng: np.random.Generator) -> Moves:
    runs, length = int(2 ** rng.uniform(0, 7)), int(2 ** rng.uniform(0, 6))
    length = max(1, min(length, _CELLS // (2 * runs)))
    src = np.sort(rng.choice(_CELLS // (2 * length), runs, replace=False)) * length + _CELLS // 2
    return Moves(src, np.arange(runs) * length, np.full(runs, length))


def _timed_pass(engine: Engine, batch: MicroBatch) -> Callable[[], float]:
    # One token more than the chunk reaches, so that nothing is appended and every repeat is alike.
    texts = {c.seq: [7] * (c.start + c.n + 1) for c in batch.chunks}

    def run() -> float:
        engine.tokens = texts
        return engine.forward(batch)

    return run


def _timed_moves(engine: Engine, moves: Moves) -> Callable[[], float]:
    return lambda: engine.move(moves)


def _timed_shift(engine: Engine, n: int) -> Callable[[], float]:
    return lambda: engine.rotate(Shift(np.arange(n), np.ones(n, dtype=np.int64)))


def _sample(kernel: Kernel, batch: MicroBatch, seconds: float) -> Sample:
    reads = batch.reads
    return Sample(
        kernel=kernel,
        tokens=batch.n_tokens,
        token_cells=int(reads.tokens @ reads.scanned),
        cells=reads.span,
        chunks=len(batch.chunks),
        runs=int(reads.runs.sum()),
        seconds=seconds,
    )
