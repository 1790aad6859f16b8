"""Measures on this machine what holes, defragmentation and K-shifts cost in the real llama.cpp.

Each study runs llama.cpp in an isolated process (``benchmarks/llama_studies/timing.py``), so that one program can study
several versions: ``library`` names a folder with another llama-cpp-python than the installed one (``pip install
--target FOLDER llama-cpp-python==0.3.8``). Each round measures every case once; figures are medians over rounds, with
95 % intervals from 1,000 bootstrap resamples of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.llama_studies.results import Defragmentation, Holes, KShift
from benchmarks.llama_studies.timing import StudyKind, StudyRequest, StudyResult, run_study
from kvsim.errors import UserError
from kvsim.model.engine_shapes import gguf_path

SPANS = (256, 512, 1024, 2048, 4096)
PASSES = (
    (0, 0),
    *((1, cells) for cells in (1, 16, 64, 256, 512, 1024)),
    *((runs, 1) for runs in (2, 4, 8, 16, 24, 32, 40, 45)),
    *((runs, 16) for runs in (4, 16, 32)),
)
"""Runs, and cells in each; one pass moves at most 45 runs in a model of 30 layers."""
CACHES = (256, 1024, 4096)

_PAD = 256
_TOKENS = 128


def measure_holes(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    spans: Sequence[int] = SPANS,
    rounds: int = 20,
) -> Holes:
    """Measure how long a decode takes with the sequence's 128 tokens in the lowest cells, and at the top of each span.

    ``model``: ``smollm2`` or a GGUF file. ``library``: a folder with another llama-cpp-python than the installed one.
    ``spans`` in cells, multiples of 256. Each round times a low and a high decode for each span and kernel; 20 rounds
    of ``smollm2`` take ten seconds. Raises ``UserError`` where llama.cpp is missing or cannot do it.
    """
    for span in spans:
        if span < _PAD or span % _PAD:
            raise UserError(f"a span of {span} cells; multiples of {_PAD} are accepted")
    cases = tuple((span,) for span in dict.fromkeys(spans))
    found, samples = _run("holes", model, library, threads, rounds, cases)
    samples["flash_attention"] = samples["flash_attention"] == 1
    samples["place"] = np.where(samples.pop("high") == 1, "high", "low")
    return Holes(*_common(model, found, threads), samples, _TOKENS)


def measure_defragmentation(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    passes: Sequence[tuple[int, int]] = PASSES,
    rounds: int = 20,
) -> Defragmentation:
    """Measure how long one pass of defragmentation takes, for ``passes`` of (runs, cells in each run).

    (0, 0) moves nothing. At least three passes are needed, one of them with several runs, to separate the costs of runs
    and cells. Needs era A: without ``library``, llama-cpp-python 0.3.8 must be the installed one. Raises ``UserError``
    where llama.cpp is missing, has no defragmentation, or moves fewer runs in a pass (with L layers, (8192 - 2 L) / (6
    L)).
    """
    cases = tuple(dict.fromkeys((int(runs), int(cells)) for runs, cells in passes))
    for runs, cells in cases:
        if (runs < 1 or cells < 1) and (runs, cells) != (0, 0):
            raise UserError(f"a pass of {runs} runs of {cells} cells; 1 and more of both are accepted, or 0 and 0")
    if len({(runs, runs * cells) for runs, cells in cases}) < 3 or not any(runs > 1 for runs, _ in cases):
        raise UserError("passes: at least three are needed, one of them with several runs")
    found, samples = _run("defragmentation", model, library, threads, rounds, cases)
    return Defragmentation(*_common(model, found, threads), samples)


def measure_shift(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    cells: Sequence[int] = CACHES,
    rounds: int = 20,
) -> KShift:
    """Measure how long one K-shift of 128 tokens takes in caches of these ``cells``, multiples of 256.

    Raises ``UserError`` where llama.cpp is missing or cannot do it.
    """
    for size in cells:
        if size < _PAD or size % _PAD:
            raise UserError(f"a cache of {size} cells; multiples of {_PAD} are accepted")
    cases = tuple((size,) for size in dict.fromkeys(cells))
    found, samples = _run("shift", model, library, threads, rounds, cases)
    samples["shifts"] = samples["shifts"] == 1
    return KShift(*_common(model, found, threads), samples, _TOKENS)


def _run(
    study: StudyKind,
    model: str,
    library: str | Path | None,
    threads: int,
    rounds: int,
    cases: tuple[tuple[int, ...], ...],
) -> tuple[StudyResult, pd.DataFrame]:
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{name} is {value}; 1 and more are accepted")
    if not cases:
        raise UserError("nothing to measure is named")
    path = gguf_path(model)
    if path is None:
        raise UserError(f"model {model}: llama.cpp needs a GGUF file (FILE.gguf, or smollm2)")
    folder = None if library is None else str(library)
    found = run_study(StudyRequest(study, str(path), folder, threads, rounds, cases, _TOKENS))
    return found, pd.DataFrame(found.rows)


def _common(model: str, found: StudyResult, threads: int) -> tuple[str, str, str, int, int, float]:
    name = Path(model).name
    return name, found.library, found.era, found.layers, threads, found.cpu_share
