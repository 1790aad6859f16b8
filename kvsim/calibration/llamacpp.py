"""Measure the real llama.cpp: prompts by batch size, decodes by batch and attended span, defragmentation, K-shift, and
copies of sequences to the host and back.

Without flash attention a pass costs the same whatever its sequences hold: every token is scored against all cells up to
the padded span. A pass of any shape is therefore measured on a cache that one long sequence fills up to some cell: each
of the pass's own sequences shares an extent of it, and their tokens follow it. With flash attention only these extents
are scored.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvsim.calibration.llamacpp_session import LlamaCppSession, absolute_model_path
from kvsim.calibration.pace import DECODE_TOKENS, PROMPT_TOKENS
from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import ReferencePasses
from kvsim.calibration.serving import USERS, SamplingBackend, closed_loop
from kvsim.calibration.subject import passes_in, runs_in
from kvsim.calibration.trials import CELLS, Measurable, Trial, host_copy_sizes, random_lengths
from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample
from kvsim.costs.pass_layout import SKIPPING, sample_of
from kvsim.model.engine_shapes import Storage
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from policies import CacheConfig, Chunk, Group, Kernel, MicroBatch, Place
from policies.cells.reads import padded_span, reads_of
from policies.layouts.llamacpp import early_2025
from real_engine.llama_library import BatchRow, Context, ContextSettings

_FILLED = 3520
"""Most cells of the long sequence, so that the longest pass fits after it."""
_LONGEST = 512
"""Most tokens in a pass; the first one of each kernel has as many."""
_COMPUTED = 256
"""Tokens of the long sequence that are computed; the other cells get copies of them, since what is in a cell does not
change the time."""
_MOVES = 24
_HOST_COPIES = 6
"""Copies of sequences out to the host, and as many back."""
_SHIFTED = (512, 1024, 2048, CELLS)
"""Cells of the caches in which keys are rotated."""
_REFERENCE_CELLS = 960
"""Cells filled during the reference passes."""
_SEQUENCES = 24
"""More than a pass ever has chunks."""
_PASSES, _SERVED = 40, 500
"""Approximate lengths of a trial and of a server run, in decodes."""
_REQUESTS = 4
"""Requests of a server run beyond one for each user."""
_SLOT = 768
"""Cells of each stream in server runs."""


class LlamaSubject:
    """The real llama.cpp with a model, without and with flash attention."""

    shifts_all = True
    skipping = SKIPPING

    def __init__(
        self,
        model: str = "smollm2",
        type_k: Storage = "f16",
        type_v: Storage = "f16",
        *,
        threads: int = 1,
        library: Path | str | None = None,
    ):
        """Raises ``UserError`` if llama.cpp or the model is missing, or does not support these types."""
        self.model, self.type_k, self.type_v, self.threads = absolute_model_path(model), type_k, type_v, threads
        self._session = LlamaCppSession(self._scenario("idle", 1, 1, 0), model=model, library=library, threads=threads)
        self.engine = self._session.library.name
        self._era = self._session.library.era
        kernels = _kernels(type_v)
        self._wall = self._cpu = 0.0
        """Seconds spent in contexts that are closed."""
        self._prefilled = {kernel: PrefilledContext(self._context(kernel, CELLS), kernel) for kernel in kernels}
        self._served = [(kernel, policy) for kernel in kernels for policy in self._session.policies]
        self._reference_context = _reference_context(self._context(kernels[0], CELLS), kernels[0])
        self.reference_passes = self._reference_context.reference_passes()
        self._others: list[Context] = []

    @property
    def kinds(self) -> int:
        """One for each kernel and each policy that describes this version."""
        return len(self._served)

    def sizes(self, seconds: float) -> tuple[int, int]:
        """Sizes from the time of one decode."""
        decode = self._reference_context.timed([1], _REFERENCE_CELLS)
        decodes = seconds / 2 / min(Trial(ShiftSample(cells=1, seconds=0.0), decode).measure())
        each, runs = decodes / len(self._prefilled) / _PASSES, decodes / len(self._served) / _SERVED
        return passes_in(each), runs_in(runs)

    def draw(self, each: int, rng: np.random.Generator) -> list[Trial]:
        """Draw passes on caches filled up to some cell, defragmentations in era A, and K-shifts."""
        trials: list[Trial] = []
        for kernel, prefilled in self._prefilled.items():
            for i in range(each):
                lengths = [_LONGEST] if i == 0 else random_lengths(rng)
                filled = _FILLED if rng.random() < 0.1 else min(round(2 ** rng.uniform(5, 12)), _FILLED)
                run = prefilled.timed(lengths, filled)
                before = prefilled.timed([1], filled) if max(lengths) > 1 else None
                batch = [prefilled.pass_of(lengths, filled)]
                skips = kernel in SKIPPING
                sample = sample_of(kernel, batch, Group(CELLS), 0.0, len(trials), mixed=False, skips=skips)
                trials.append(prefilled.trial(sample, run, before, filled))
        if self._era == "A":
            (prefilled, *_) = self._prefilled.values()
            for _ in range(_MOVES):
                trials.append(prefilled.defragmentation(self._session.model.n_layers, rng))
        for cells in _SHIFTED:
            context = self._context(next(iter(self._prefilled)), cells)
            self._others.append(context)
            trials.append(Trial(ShiftSample(cells=cells, seconds=0.0), _timed_shift(context, cells)))
        # With flash attention, as the server has it by default; without, V is transposed, and copied row by row.
        prefilled = self._prefilled["tiled"]
        for n in host_copy_sizes(rng, _HOST_COPIES):
            for out in (True, False):
                trials.append(prefilled.host_copy(n, out=out))
        return trials

    def serve(self, kind: int, turn: int, origin: int, rng: np.random.Generator, recorder: PieceRecorder) -> None:
        """Serve under the ``kind``-th pair of kernel and policy."""
        kernel, policy = self._served[kind]
        users = USERS[turn % len(USERS)]
        scenario = self._scenario(policy, users, int(rng.integers(1 << 31)), turn, kernel, int(rng.choice([64, 128])))
        session = self._session.for_scenario(scenario)
        backend = session.backend(policy)
        backend.checks = False
        sampling = SamplingBackend(
            backend, recorder, kernel, backend.policy.groups[0], origin, per_pass=False, skips=kernel in SKIPPING
        )
        with backend.context as context:
            self._others.append(context)
            try:
                drive(session.scenario, backend.policy, sampling, Recorder(), None)
            finally:
                self._others.remove(context)
                self._wall += context.wall_s
                self._cpu += context.cpu_s

    def spent(self) -> tuple[float, float]:
        """Seconds in ``llama_decode``."""
        contexts = self._contexts
        wall = self._wall + sum(context.wall_s for context in contexts)
        return wall * self.threads, self._cpu + sum(context.cpu_s for context in contexts)

    @property
    def _contexts(self) -> list[Context]:
        return [prefilled.context for prefilled in (*self._prefilled.values(), self._reference_context)] + self._others

    def close(self) -> None:
        """Close every context and the model."""
        for context in self._contexts:
            context.close()
        self._session.close()

    def _scenario(
        self, policy: str, users: int, seed: int, turn: int, kernel: Kernel = "masked", n_ubatch: int = 128
    ) -> Scenario:
        """Random requests of ``users`` users in a closed loop."""
        streams = policy == "streams"
        return closed_loop(
            turn,
            seed,
            self.model,
            users,
            users + _REQUESTS,
            server={"n_batch": 256, "n_ubatch": n_ubatch},
            cache={
                "cells": users * _SLOT if streams else CELLS,
                "kernel": kernel,
                "unified": not streams,
                "type_k": self.type_k,
                "type_v": self.type_v,
                "threshold": 0.0,
            },
        )

    def _context(self, kernel: Kernel, cells: int) -> Context:
        return _context(self._session, kernel, cells, self.type_k, self.type_v)


def llama_reference_passes(session: LlamaCppSession) -> tuple[ReferencePasses, Context]:
    """Reference passes of llama.cpp, and their context, whose cells are filled once."""
    cache = session.scenario.cache
    kernel = _kernels(cache.type_v)[0]
    context = _context(session, kernel, CELLS, cache.type_k, cache.type_v)
    return _reference_context(context, kernel).reference_passes(), context


def _kernels(type_v: Storage) -> tuple[Kernel, ...]:
    """Supported kernels: V in q8_0 or q4_0 needs flash attention."""
    return ("tiled",) if type_v in ("q8_0", "q4_0") else ("masked", "tiled")


def _reference_context(context: Context, kernel: Kernel) -> PrefilledContext:
    fill_cheaply(context, _REFERENCE_CELLS)
    return PrefilledContext(context, kernel, filled=_REFERENCE_CELLS)


def _context(session: LlamaCppSession, kernel: Kernel, cells: int, type_k: Storage, type_v: Storage) -> Context:
    settings = ContextSettings(
        cells=cells,
        n_batch=_LONGEST,
        n_ubatch=_LONGEST,
        sequences=_SEQUENCES,
        threads=session.threads,
        flash_attention=kernel == "tiled",
        type_k=type_k,
        type_v=type_v,
    )
    return Context(session.model, settings)


def fill(context: Context, cells: int, seq: int = 0) -> None:
    """Fill the first ``cells`` cells of an empty cache with one sequence."""
    for start in range(0, cells, _LONGEST):
        rows: list[BatchRow] = [(7, at, False, (seq,)) for at in range(start, min(start + _LONGEST, cells))]
        rows[-1] = (*rows[-1][:2], True, (seq,))
        returned, _ = context.decode(rows)
        assert returned == 0, "an empty cache had no room"


def fill_cheaply(context: Context, cells: int) -> None:
    """Like ``fill``, with copies of what was computed for the first cells."""
    # Shifting quantised keys has crashed llama.cpp (0.3.36, with the tiny model of the tests).
    quantised = context.settings.type_k in ("q8_0", "q4_0")
    computed = cells if quantised else min(cells, _COMPUTED)
    fill(context, computed)
    state = context.state_of(0)
    for start in range(computed, cells, computed):
        if not context.put(1, state):
            raise RuntimeError("an empty cache had no room")
        context.remove(1, cells - start, -1)
        context.shift(1, 0, -1, start)
        context.copy(1, 0, -1, -1)
        context.remove(1, -1, -1)
    if cells > computed:
        # The shift is carried out before the next pass.
        context.decode([(7, cells, True, (0,))])
        context.remove(0, cells, -1)


class PrefilledContext:
    """A context prefilled by one long sequence, number 0; timed passes use sequences 1, 2, ...."""

    def __init__(self, context: Context, kernel: Kernel, filled: int = 0):
        self.context = context
        self._kernel = kernel
        self._pad = 256 if context.era == "B" or kernel == "tiled" else 32
        self._filled = filled
        """Cells filled at present."""
        self._full = None
        if not filled:
            fill_cheaply(context, _FILLED)
            self._full = context.state()
            self._filled = _FILLED

    def set_filled(self, filled: int) -> None:
        """Restore or truncate the long sequence to exactly ``filled`` cells."""
        if self._filled < filled:
            assert self._full is not None, "a context that was filled once cannot be filled further"
            self.context.clear()
            self.context.restore(self._full)
            self._filled = _FILLED
        if self._filled > filled:
            self.context.remove(0, filled, -1)
            self._filled = filled

    def chunks(self, lengths: list[int], filled: int) -> list[Chunk]:
        """Chunks of a pass: each sequence continues an extent of its own within the filled cells."""
        share = filled // len(lengths)
        return [Chunk(1 + i, (i + 1) * share, n) for i, n in enumerate(lengths)]

    def pass_of(self, lengths: list[int], filled: int) -> MicroBatch:
        """The pass as a micro-batch, with its reads."""
        chunks = self.chunks(lengths, filled)
        top = filled + sum(lengths)
        span, own, at, share = padded_span(top, self._pad, CELLS), {}, filled, filled // len(lengths)
        for chunk in chunks:
            extent = np.arange(chunk.start - share, chunk.start)
            own[chunk.seq] = np.concatenate([extent, np.arange(at, at + chunk.n)])
            at += chunk.n
        reads = reads_of(self._kernel, chunks, own.__getitem__, span)
        return MicroBatch(tuple(chunks), (Place(np.arange(filled, top), reads),))

    def timed(self, lengths: list[int], filled: int) -> Callable[[], float]:
        """A function that runs the pass after ``filled`` cells, repeatably, and returns its seconds."""
        chunks = self.chunks(lengths, filled)
        rows: list[BatchRow] = [
            (7 + at % 31, start + at, at == n - 1, (seq,)) for seq, start, n, _ in chunks for at in range(n)
        ]
        last = [int(end) - 1 for end in np.cumsum(lengths)]

        def run() -> float:
            context = self.context
            for chunk in chunks:
                context.copy(0, chunk.seq, chunk.start - filled // len(lengths), chunk.start)
            returned, seconds = context.decode(rows)
            assert returned == 0, "a pass found no room after the filled cells"
            began = perf_counter()
            for row in last:
                context.best(row)
            seconds += perf_counter() - began
            for chunk in chunks:
                context.remove(chunk.seq, -1, -1)
            return seconds

        return run

    def trial(
        self, sample: Measurable, run: Callable[[], float], before: Callable[[], float] | None, filled: int
    ) -> Trial:
        """A trial of ``run`` with exactly ``filled`` cells filled."""

        def ready(then: Callable[[], float]) -> Callable[[], float]:
            def go() -> float:
                self.set_filled(filled)
                return then()

            return go

        return Trial(sample, ready(run), None if before is None else ready(before))

    def host_copy(self, filled: int, *, out: bool) -> Trial:
        """A copy of a sequence of ``filled`` tokens to memory that is newly allocated, as the server does, or back.

        A decode before it takes the processor's caches, as the requests of a server do.
        """
        decode = self.timed([1], filled)
        saved: list[NDArray[np.uint8]] = []

        def save() -> float:
            began = perf_counter()
            saved[:] = [self.context.state_of(0, _new_memory)]
            return perf_counter() - began

        def load() -> float:
            began = perf_counter()
            found = self.context.put(1, saved[0])
            seconds = perf_counter() - began
            assert found, "there was no room behind the filled cells"
            self.context.remove(1, -1, -1)
            saved.clear()
            return seconds

        def prepare_load() -> float:
            save()
            return decode()

        sample = HostCopySample(out=out, runs=1, cells=filled, seconds=0.0)
        return self.trial(sample, save, decode, filled) if out else self.trial(sample, load, prepare_load, filled)

    def reference_passes(self) -> ReferencePasses:
        """Reference passes on the cells filled at present."""
        decode, prompt = self.timed([1] * DECODE_TOKENS, self._filled), self.timed([PROMPT_TOKENS], self._filled)
        return ReferencePasses(decode, prompt)

    def defragmentation(self, n_layers: int, rng: np.random.Generator) -> Trial:
        """A defragmentation pass over random holes; some passes have nothing to move."""
        runs, length = int(rng.integers(0, 33)), int(2 ** rng.uniform(0, 6))
        length = max(1, min(length, _FILLED // (4 * max(runs, 1))))
        holes = [(i * 2 * length + 1, i * 2 * length + 1 + length) for i in range(runs)]
        # llama.cpp will make the moves that the policy describing it plans.
        config = CacheConfig(cells=CELLS, n_ubatch=CELLS, sequences=2, n_layers=n_layers)
        policy = early_2025("llama.cpp", config, threshold=0.0)
        policy.allocate([Chunk(0, 0, _FILLED)])
        for start, stop in holes:
            policy.free(0, start, stop)
        moves = policy.compact()

        def run() -> float:
            context = self.context
            self._filled = 0
            self.set_filled(_FILLED)
            for start, stop in holes:
                context.remove(0, start, stop)
            context.defragment()
            seconds = context.update()
            self._filled = 0  # The cells have changed, so refill them next time.
            return seconds

        return Trial(MoveSample(runs=moves.n_runs, cells=moves.n_cells, seconds=0.0), run, before=lambda: 0.0)


def _new_memory(size: int) -> NDArray[np.uint8]:
    """Memory of so many bytes that was never used, filled with zeros as a ``std::vector`` is; shape (bytes,)."""
    memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    memory[:] = 0
    return memory


def _timed_shift(context: Context, cells: int) -> Callable[[], float]:
    """A function that times a K-shift: a pass that carries one out first, less the same pass without."""
    at = 64

    def decode(position: int) -> float:
        returned, seconds = context.decode([(7, position, True, (0,))])
        assert returned == 0, "a cache of little use had no room"
        return seconds

    def run() -> float:
        context.clear()
        fill(context, at)
        plain = min(decode(at), decode(at + 1))
        context.shift(0, 0, -1, 1)
        if context.era == "A":
            return context.update()
        # A shift too fast to measure still costs something.
        return max(decode(at + 3) - plain, 0.02 * plain)

    return run
