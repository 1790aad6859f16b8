"""Times holes, defragmentation and K-shifts in the real llama.cpp, in an isolated process.

A process can load only one version of llama.cpp, so ``run_study`` starts this module in one of its own, which
reads a ``StudyRequest`` as JSON from its input, measures, and writes a ``StudyResult`` as JSON to its output. One
program can thus study several versions in turn.

- ``holes``: one decode after the same tokens in the lowest cells, and at the top of a span whose other cells are empty,
  alternately.
- ``defragmentation`` (era A): one pass over a cache laid out so that it moves a given number of runs, each of a given
  number of cells; the moves are verified from the cells before and after.
- ``shift``: positions are changed, and the rotation of the keys is timed. Era A carries it out on request, era B at the
  next decode, so that decodes with and without a shift alternate.

Caches are filled cheaply: a few tokens are computed once, and the saved state of their sequence is loaded under as many
other sequence numbers as needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kvsim.errors import UserError
from policies.layouts.llamacpp import run_limit
from real_engine.arrays import IntArray
from real_engine.isolated import answer, ask_isolated
from real_engine.llama_cells import StreamCells, sequence_offset
from real_engine.llama_library import Context, ContextSettings, Library, LlamaModel

StudyKind = Literal["holes", "defragmentation", "shift"]
Row = dict[str, float]
"""A measurement by column."""

_PAD = 256
"""Cells of which every version and kernel accepts multiples."""
_MAX_NODES = 8192
"""Nodes in the graph of copies of one pass; more in models of more than 1,638 tensors."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """A study, its model and its cases."""

    study: StudyKind
    path: str
    """Path of a GGUF file."""
    library: str | None
    """Folder with another llama-cpp-python than the installed one."""
    threads: int
    rounds: int
    """Times that every case is measured; a round measures all cases once."""
    cases: tuple[tuple[int, ...], ...]
    """Holes: ``(span,)`` in cells, multiples of 256. Defragmentation: ``(runs, cells in each)``, or ``(0, 0)`` for
    nothing to move. Shift: ``(cells of the cache,)``, multiples of 256."""
    tokens: int = 128
    """Tokens that are computed, and that a sequence holds."""


@dataclass(frozen=True, slots=True)
class StudyResult:
    """Measurements of a study."""

    library: str
    """Name and version."""
    era: str
    layers: int
    """Layers of the model."""
    cpu_share: float
    """Share of ``threads`` cores that llama.cpp got while it was timed; well below 1 if the machine was busy."""
    rows: tuple[Row, ...]
    """All have ``round`` and ``seconds``. Holes: ``flash_attention`` and ``high`` (0 or 1), ``span``, ``n_kv`` (cells
    attended to). Defragmentation: ``runs`` and ``cells`` moved. Shift: ``cells`` of the cache, ``shifts`` (0 or 1)."""


def run_study(request: StudyRequest) -> StudyResult:
    """Measure in an isolated process. Raises ``UserError``."""
    failed = f"{request.path}: the process that ran llama.cpp failed"
    measure = ask_isolated("benchmarks.llama_studies.timing", asdict(request), failed)
    return StudyResult(**{**measure, "rows": tuple(measure["rows"])})


def most_runs(layers: int) -> int:
    """Most runs that one pass of defragmentation moves in a model of ``layers`` layers (b4666 to b4880)."""
    return run_limit(_MAX_NODES, layers)


class MoveCount(NamedTuple):
    """Runs and cells that a pass of defragmentation moved."""

    runs: int
    """Runs of cells that were contiguous before and after."""
    cells: int


def count_moves(before: StreamCells, after: StreamCells) -> MoveCount:
    """Count moves between two dumps of a cache in which no two cells hold the same token of a sequence."""
    was, now = _identities(before), _identities(after)
    assert sorted(was[was >= 0]) == sorted(now[now >= 0]), "a pass of defragmentation lost tokens"
    there = {token: cell for cell, token in enumerate(was.tolist()) if token >= 0}
    target = np.flatnonzero((now >= 0) & (now != was))
    source = np.array([there[token] for token in now[target].tolist()], dtype=np.int64)
    if not len(target):
        return MoveCount(0, 0)
    breaks = np.count_nonzero((np.diff(source) != 1) | (np.diff(target) != 1))
    return MoveCount(int(breaks) + 1, len(target))


def _identities(cells: StreamCells) -> IntArray:
    """A number for each sequence and position, -1 where a cell is empty; shape (n,)."""
    most = int(cells.position.max()) + 1
    return np.where(cells.owner >= 0, cells.owner * most + cells.position, -1)


class _CallTimer:
    """Times single calls by the clock and by the processor."""

    def __init__(self, threads: int):
        self._threads = threads
        self._wall = self._cpu = 0.0

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        cpu, began = time.process_time(), time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        self._wall += seconds
        self._cpu += time.process_time() - cpu
        return seconds

    @property
    def cpu_share(self) -> float:
        """Processor seconds over seconds of all cores asked for."""
        return self._cpu / (self._wall * self._threads)


class _StudyModel:
    """A model in one version of llama.cpp, with the operations that all studies need."""

    def __init__(self, request: StudyRequest):
        self.request = request
        self.library = Library(request.library)
        self.model = LlamaModel(self.library, request.path)
        self.timer = _CallTimer(request.threads)
        self.rng = np.random.default_rng(_SEED)
        self.era = self.library.era

    def context(self, cells: int, *, sequences: int, flash_attention: bool = False, show: bool = False) -> Context:
        """Make an empty context."""
        q = self.request
        return Context(
            self.model,
            ContextSettings(
                cells=cells,
                n_batch=q.tokens,
                n_ubatch=q.tokens,
                sequences=sequences,
                threads=q.threads,
                flash_attention=flash_attention,
                show_cells=show and self.era == "B",
            ),
        )

    def compute(self, context: Context, seq: int) -> None:
        """Compute the tokens from position 0 on as sequence ``seq``."""
        n = self.request.tokens
        drawn = np.random.default_rng(_SEED).integers(0, self.model.vocabulary, n).tolist()
        returned, _ = context.decode([(token, at, at == n - 1, (seq,)) for at, token in enumerate(drawn)])
        assert returned == 0, "an empty cache has room"

    def decode(self, context: Context, seq: int) -> float:
        """Seconds of a decode of one further token, which is removed afterwards."""
        n = self.request.tokens
        seconds = self.timer.time(lambda: context.decode([(1, n, True, (seq,))]))
        context.remove(seq, n, -1)
        return seconds


def _holes(study_model: _StudyModel) -> Iterator[Row]:
    q = study_model.request
    spans = [span for (span,) in q.cases]
    fillers = max(spans) // q.tokens - 1
    first = sequence_offset(fillers + 1, study_model.era)
    """The sequence that is timed; fillers have higher numbers."""
    for flash in (False, True):

        def make(show: bool, flash: bool = flash) -> Context:
            return study_model.context(max(spans), sequences=first + fillers + 1, flash_attention=flash, show=show)

        pad = 32 if study_model.era == "A" and not flash else _PAD
        with make(False) as low:
            study_model.compute(low, first)
            state = low.state_of(first)
            _check_placement(study_model, make, state, 0, first)
            for span in spans:
                _check_placement(study_model, make, state, span, first)
                with make(False) as high:
                    _place_high(high, state, span, q.tokens, first)
                    places = (low, -(-(q.tokens + 1) // pad) * pad), (high, span)
                    for context, _ in places:
                        context.decode([(1, q.tokens, True, (first,))])
                        context.remove(first, q.tokens, -1)
                    for turn in range(q.rounds):
                        # Alternate which one goes first.
                        for context, n_kv in places[:: 1 if turn % 2 == 0 else -1]:
                            yield {
                                "round": turn,
                                "flash_attention": int(flash),
                                "span": span,
                                "high": int(context is high),
                                "n_kv": n_kv,
                                "seconds": study_model.decode(context, first),
                            }


def _place_high(context: Context, state: Any, span: int, tokens: int, first: int) -> None:
    """Put the tokens into the last cells of the span, with empty cells below; for span 0, into the lowest cells."""
    fillers = range(first + 1, first + max(span // tokens, 1))
    for seq in (*fillers, first):
        if not context.put(seq, state):
            raise RuntimeError("llama.cpp did not take back its own state")
    for seq in fillers:
        context.remove(seq, -1, -1)


def _check_placement(
    study_model: _StudyModel, make: Callable[[bool], Context], state: Any, span: int, first: int
) -> None:
    """Verify in a separate context that the tokens are in the intended cells, and the next in the first free cell.

    A separate one, since era B shows its cells only while it looks for slots, which takes time.
    """
    n = study_model.request.tokens
    with make(True) as context:
        _place_high(context, state, span, n, first)
        context.cells()
        context.decode([(1, n, True, (first,))])
        seen = context.cells()[0]
        used = np.flatnonzero(seen.owner >= 0)
        start = max(span - n, 0)
        expected = np.arange(start, start + n)
        if study_model.era == "A":  # Era A shows the cells after the decode.
            expected = np.sort(np.append(expected, 0 if span > n else n))
        if not np.array_equal(used, expected):
            raise RuntimeError(f"cells {used.min()} to {used.max()} are used, not {expected.min()} to {expected.max()}")


def _defragmentation(study_model: _StudyModel) -> Iterator[Row]:
    q = study_model.request
    if study_model.era != "A":
        raise UserError(
            f"{study_model.library.name}: it moves nothing, defragmentation was taken out; "
            "0.3.8 has it (library=FOLDER)"
        )
    most = most_runs(study_model.model.n_layers)
    runs = max(runs for runs, _ in q.cases)
    if runs > most:
        raise UserError(f"a pass of {runs} runs; with {study_model.model.n_layers} layers one moves at most {most}")
    # Sequences of the whole length, and of a power of two for each binary digit of the rest.
    needed = max(2 * runs * (cells + 1) for runs, cells in q.cases) + q.tokens
    cells = -(-needed // _PAD) * _PAD
    sequences = cells // q.tokens + q.tokens.bit_length() + 1
    with study_model.context(cells, sequences=sequences) as context:
        study_model.compute(context, 0)
        pieces = {q.tokens: context.state_of(0)}
        for power in range(q.tokens.bit_length()):
            if (size := 1 << power) < q.tokens:
                context.copy(0, 1, 0, size)
                pieces[size] = context.state_of(1)
                context.remove(1, -1, -1)
        for turn in range(-1, q.rounds):
            for runs, each in q.cases:
                _place_runs(context, pieces, runs, each)
                before = context.cells()[0]
                context.defragment()
                seconds = study_model.timer.time(context.update)
                done = count_moves(before, context.cells()[0])
                if done != (runs, runs * each):
                    raise RuntimeError(f"a pass count_moves {done.runs} runs, {done.cells} cells, not {runs} of {each}")
                if turn >= 0:  # The first round is a warm-up.
                    yield {"round": turn, "runs": done.runs, "cells": done.cells, "seconds": seconds}


def _place_runs(context: Context, pieces: dict[int, Any], runs: int, each: int) -> None:
    """Lay out holes of ``each`` cells, each followed by a used cell, then as many used cells as all holes have.

    One pass then fills each hole with a separate run, taken from the end of the used cells.
    """
    context.clear()
    holes = runs * (each + 1)
    left = holes + runs * each or max(pieces)
    where: list[tuple[int, int]] = []
    """Sequence and position of each cell."""
    seq = 0
    for size in sorted(pieces, reverse=True):
        while left >= size:
            if not context.put(seq, pieces[size]):
                raise RuntimeError("llama.cpp did not take back its own state")
            where += [(seq, at) for at in range(size)]
            seq, left = seq + 1, left - size
    for hole in range(0, holes, each + 1):
        start = hole
        while start < hole + each:  # One sequence at a time.
            owner, at = where[start]
            n = 1
            while start + n < hole + each and where[start + n][0] == owner:
                n += 1
            context.remove(owner, at, at + n)
            start += n


def _shift(study_model: _StudyModel) -> Iterator[Row]:
    q = study_model.request
    contexts = [(cells, study_model.context(cells, sequences=2)) for (cells,) in q.cases]
    for _, context in contexts:
        study_model.compute(context, 0)
    for turn in range(-1, q.rounds):
        for cells, context in contexts:
            for shifts in (0, 1):
                if shifts:
                    # Up, and down again in the next round, so that positions stay within the model's context.
                    context.shift(0, 0, -1, 1 if turn % 2 else -1)
                seconds = _carry_out(study_model, context)
                if turn >= 0:  # The first round is a warm-up.
                    yield {"round": turn, "cells": cells, "shifts": shifts, "seconds": seconds}
    for _, context in contexts:
        context.close()


def _carry_out(study_model: _StudyModel, context: Context) -> float:
    """Seconds of pending updates; era B carries them out only with a batch, here of one token."""
    if study_model.era == "A":
        return study_model.timer.time(context.update)
    seconds = study_model.timer.time(lambda: context.decode([(1, 0, True, (1,))]))
    context.remove(1, -1, -1)
    return seconds


_STUDIES: dict[StudyKind, Callable[[_StudyModel], Iterator[Row]]] = {
    "holes": _holes,
    "defragmentation": _defragmentation,
    "shift": _shift,
}


def measure(request: StudyRequest) -> StudyResult:
    """Measure in this process. Raises ``UserError``."""
    study_model = _StudyModel(request)
    rows = tuple(_STUDIES[request.study](study_model))
    return StudyResult(
        study_model.library.name, study_model.era, study_model.model.n_layers, study_model.timer.cpu_share, rows
    )


def _measure_asked(asked: dict[str, Any]) -> StudyResult:
    return measure(StudyRequest(**{**asked, "cases": tuple(map(tuple, asked["cases"]))}))


if __name__ == "__main__":
    sys.exit(answer(_measure_asked))
