"""Measure our own engine: random passes under all four kernels, compactions, key rotations and copies to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np

from kvsim import machine
from kvsim.calibration.pace import DECODE_TOKENS, PROMPT_TOKENS
from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import ReferencePasses
from kvsim.calibration.serving import USERS, SamplingBackend, closed_loop
from kvsim.calibration.subject import passes_in, runs_in
from kvsim.calibration.trials import CELLS, Trial, host_copy_sizes, random_lengths
from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample
from kvsim.costs.pass_layout import sample_of
from kvsim.costs.profile import NUMPY
from kvsim.model.engine_shapes import Storage
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies import Chunk, Group, HostCopy, Kernel, MicroBatch, Moves, Place, Shift, View
from policies.cells.host_copies import transfers_of
from policies.cells.reads import reads_of
from real_engine import Engine, Transformer, load_model
from workloads import named_rng

POLICIES: dict[Kernel, str] = {
    "masked": "contiguous",
    "gather": "paged",
    "sliced": "oracle",
    "tiled": "prompt-decode-regions",
}
"""A policy for each kernel that uses it."""

_PASSES, _SERVED = 18, 160
"""Approximate lengths of a trial with its warm-up, and of a server run, in decodes."""
_REQUESTS = 3
"""Requests of each user of a server run; each run has two more."""
_RUN_LENGTHS = (1, 4, 16, 64)
"""Contiguous cells in a sequence's random placement."""
_LONGEST = 512
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
_DECODE_CELLS, _PROMPT_CELLS = 1536, 512
"""Cells of the reference passes."""


class NumpySubject:
    """Our own engine, under all four kernels, on one thread."""

    engine = NUMPY
    threads = 1
    shifts_all = False
    skipping: tuple[Kernel, ...] = ()

    def __init__(self, model: str, type_k: Storage, type_v: Storage):
        """Raises ``UserError`` if there is no such model."""
        self.model, self.type_k, self.type_v = model, type_k, type_v
        transformer = load_model(model).transformer
        self.engines: dict[Kernel, Engine] = {
            kernel: Engine(transformer, (Group(CELLS),), kernel, seed=0, type_k=type_k, type_v=type_v)
            for kernel in get_args(Kernel)
        }
        for engine in self.engines.values():
            engine.fill()
        self.reference_passes = numpy_reference_passes(transformer, type_k, type_v)

    @property
    def kinds(self) -> int:
        """One for each kernel."""
        return len(self.engines)

    def sizes(self, seconds: float) -> tuple[int, int]:
        """Sizes from the time of one decode."""
        engine = self.engines["sliced"]
        batch = random_pass("sliced", named_rng(0, "calibration size"), [1])
        with machine.measuring():
            decode_s = min(pass_trial(engine, batch, 0).measure())
        decodes = seconds / 2 / len(self.engines) / decode_s
        return passes_in(decodes / _PASSES), runs_in(decodes / _SERVED)

    def draw(self, each: int, rng: np.random.Generator) -> list[Trial]:
        """Draw trials on the engines."""
        return draw_trials(self.engines, each, rng)

    def serve(self, kind: int, turn: int, origin: int, rng: np.random.Generator, recorder: PieceRecorder) -> None:
        """Serve under the policy of the ``kind``-th kernel."""
        engine = list(self.engines.values())[kind]
        serve(engine, traffic(self.model, self.type_k, self.type_v, turn, rng), origin, recorder)

    def spent(self) -> tuple[float, float]:
        """Seconds of the whole process, which does nothing else."""
        return time.perf_counter(), time.process_time()

    def close(self) -> None:
        """Do nothing: Python frees the memory."""


def numpy_reference_passes(transformer: Transformer, type_k: Storage, type_v: Storage) -> ReferencePasses:
    """Reference passes of our own engine."""
    engine = Engine(transformer, (Group(CELLS),), "sliced", seed=0, type_k=type_k, type_v=type_v)
    engine.fill()
    return reference_passes_on(engine)


def reference_passes_on(engine: Engine) -> ReferencePasses:
    """Reference passes on a filled engine under ``sliced``."""
    return ReferencePasses(
        timed_pass(engine, whole_pass(DECODE_TOKENS, _DECODE_CELLS, prompt=False)),
        timed_pass(engine, whole_pass(PROMPT_TOKENS, _PROMPT_CELLS, prompt=True)),
    )


def serve(engine: Engine, scenario: Scenario, origin: int, recorder: PieceRecorder) -> None:
    """Run a scenario on an engine under its kernel's policy, and record its passes. Raises ``TimeOver``."""
    engine.tokens = {}  # Left over from an earlier run.
    sampling = SamplingBackend(engine, recorder, engine.kernel, engine.groups[0], origin)
    drive(scenario, build_policy(scenario, POLICIES[engine.kernel]), sampling, Recorder(), None)


def traffic(model: str, type_k: Storage, type_v: Storage, turn: int, rng: np.random.Generator) -> Scenario:
    """A scenario of random requests in a closed loop; ``turn`` selects the number of users."""
    users = USERS[turn % len(USERS)]
    seed = int(rng.integers(1 << 31))
    return closed_loop(
        turn,
        seed,
        model,
        users,
        _REQUESTS * users + 2,
        server={"n_batch": 512, "n_ubatch": int(rng.choice([64, 128, 256, 512]))},
        cache={"cells": CELLS, "type_k": type_k, "type_v": type_v},
    )


def draw_trials(engines: dict[Kernel, Engine], each: int, rng: np.random.Generator) -> list[Trial]:
    """Draw ``each`` forward passes for every kernel's engine; moves, rotations and host copies on the last engine."""
    trials: list[Trial] = []
    for kernel, engine in engines.items():
        large = [[_large(rng, i)] for i in range(max(each // _LARGE_SHARE - 1, 1 if each < _FEW else len(_LARGE)))]
        drawn = [random_pass(kernel, rng, lengths) for lengths in large]
        drawn += [random_pass(kernel, rng) for _ in range(each - len(large))]
        decodes = [timed_pass(engine, batch) for batch in drawn if _generates(batch)]
        decodes = decodes or [timed_pass(engine, random_pass(kernel, rng, [1]))]
        for batch in drawn:
            # In a server, prompts follow decodes, whose data fill the processor's caches.
            before = None if _generates(batch) else decodes[int(rng.integers(len(decodes)))]
            trials.append(pass_trial(engine, batch, len(trials), before))
    for _ in range(_MOVES):
        moves = _random_moves(rng)
        sample = MoveSample(runs=moves.n_runs, cells=moves.n_cells, seconds=0.0)
        trials.append(Trial(sample, partial(engine.move, moves)))
    for n in np.unique((2 ** rng.uniform(0, 11, _SHIFTS)).astype(int)).tolist():
        shift = Shift(np.arange(n), np.ones(n, dtype=np.int64))
        trials.append(Trial(ShiftSample(cells=n, seconds=0.0), partial(engine.rotate, shift)))
    for n in host_copy_sizes(rng, _HOST_COPIES):
        for out in (True, False):
            copy = _random_host_copy(rng, n, out=out)
            copied = HostCopySample(out=out, runs=len(copy.transfers), cells=n, seconds=0.0)
            trials.append(Trial(copied, partial(engine.copy, (copy,))))
    return trials


def pass_trial(engine: Engine, batch: MicroBatch, origin: int, before: Callable[[], float] | None = None) -> Trial:
    """A trial of a pass on an engine."""
    sample = sample_of(engine.kernel, [batch], engine.groups[0], 0.0, origin, mixed=False)
    return Trial(sample, timed_pass(engine, batch), before)


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
