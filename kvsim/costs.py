"""What a step costs, in seconds: the model, its fit, and the machine profile that carries it.

A forward pass of ``n`` tokens costs

    base + matmul(n) + attention(kernel, reads) + moves

where ``matmul`` is piecewise linear and never falls (a batched matrix product is not linear in its batch),
attention is linear in what the kernel reads, and moves are charged by run first and by cell second. Every
coefficient is non-negative: no cost can be bought back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from scipy.optimize import nnls

from kvsim.errors import UserError
from kvsim.model import Storage
from policies import Group, Kernel, MicroBatch, Moves, RelativeCosts, Shift, Transfer

FORMAT = 2
"""Version of the profile file."""

FloatArray = NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)
"""Batch sizes in tokens between which ``matmul`` is linear; it is 0 for one token, and the last slope goes on."""

ATTENTION_TERMS = ("per_token_cell_s", "per_cell_s", "per_chunk_s", "per_run_s")
"""Seconds for each: score (token times cell scanned), cell read, chunk, and contiguous run read."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Coefficient(_Record):
    """A fitted number of seconds and its 95 % bootstrap interval."""

    value: Seconds
    low: Seconds
    high: Seconds


class Attention(_Record):
    """What one kernel costs; names as in ``ATTENTION_TERMS``."""

    per_token_cell_s: Coefficient
    per_cell_s: Coefficient
    per_chunk_s: Coefficient
    per_run_s: Coefficient


class CopyCost(_Record):
    """What a compaction costs."""

    per_run_s: Coefficient
    per_cell_s: Coefficient


class MachineInfo(_Record):
    """Where and how a profile was measured."""

    processor: str
    cores: int
    blas: str
    threads: int
    system: str
    python: str
    numpy: str
    load_before: float
    """Runnable processes, averaged over a minute, just before the measurement."""
    load_after: float
    cpu_share: float
    """Processor seconds per wall second during the measurement: below 1, others had the core."""


class Range(_Record):
    """The smallest and the largest value that was measured."""

    low: int
    high: int


class Fit(_Record):
    """What is computed from the measurements: the costs, and how well they predict what was held out."""

    base_s: Coefficient
    """A forward pass of one token, but for its attention."""
    matmul_slopes_s: tuple[Coefficient, ...]
    """Seconds per further token in each segment between knots."""
    kernels: dict[Kernel, Attention]
    moves: CopyCost
    shift_per_cell_s: Coefficient
    """To rotate the key of one cell in all layers (K-shift)."""
    held_out_samples: int
    held_out_error_median: float
    """Median relative error over the samples that were not used in the fit."""
    held_out_error_p95: float


class Profile(Fit):
    """A machine profile: the fitted costs of one model on one machine."""

    format: int = FORMAT
    name: str
    model: str
    """Name of the model's shape."""
    type_k: Storage = "f32"
    type_v: Storage = "f32"
    """How K and V were kept while it was measured."""
    measured: str
    """Date, ISO 8601."""
    machine: MachineInfo
    matmul_knots: tuple[int, ...]
    """Batch sizes in tokens between which the cost of matrix work is linear."""
    tokens: Range
    """Tokens in a forward pass that were measured."""
    cells: Range
    """Cells that one token was scored against, as far as was measured."""
    samples: int
    digest: str
    """SHA-256 of the raw measurements."""

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        knots = self.matmul_knots
        if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)) or knots[0] < 1 or knots[-1] > 2**20:
            raise ValueError("matmul_knots must be two or more batch sizes, rising, from 1 to 2**20")
        if len(self.matmul_slopes_s) != len(knots) - 1:
            raise ValueError(f"matmul_slopes_s must be {len(knots) - 1}, one between each two of matmul_knots")
        return self

    def describe(self) -> str:
        """One line for reports: which profile, of which machine."""
        m = self.machine
        return (
            f"profile {self.name}: model {self.model}, K in {self.type_k}, V in {self.type_v}, "
            f"measured {self.measured} on {m.processor}, "
            f"{m.threads} of {m.cores} cores, {m.blas}"
        )

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def is_shipped(name: str) -> bool:
    """Whether a profile of that name ships with the package; it comes before any file of that name."""
    return "/" not in name and "\0" not in name and (resources.files("kvsim") / "profiles" / f"{name}.json").is_file()


def load_profile(name: str, folder: Path = Path()) -> Profile:
    """A shipped profile by name, or one from a file. Raises ``UserError``."""
    shipped = resources.files("kvsim") / "profiles" / f"{name}.json"
    try:
        if is_shipped(name):
            text = shipped.read_text(encoding="utf-8")
        else:
            text = (folder / Path(name).expanduser()).read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError):
        known = sorted(
            p.name.removesuffix(".json")
            for p in (resources.files("kvsim") / "profiles").iterdir()
            if p.name.endswith(".json")
        )
        raise UserError(f"{name}: no profile file there, and none shipped of that name ({', '.join(known)})") from None
    try:
        profile = Profile.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            said = f"{where or 'file'}: {said.lower()}"
        raise UserError(f"{name}: not a machine profile: {said}") from None
    if profile.format != FORMAT:
        raise UserError(f"{name}: profile format {profile.format}; this version reads format {FORMAT}")
    return profile


@dataclass(frozen=True, slots=True)
class HostLink:
    """The way between the cache and the host tier, where it is given rather than measured."""

    bytes_per_s: float
    latency_s: float
    """Of each run of cells."""
    cell_bytes: float
    """K and V of one token in all layers."""


class CostModel:
    """Predicts seconds from a profile, and remembers when it was asked beyond what was measured.

    Without a ``link``, a copy to or from the host tier costs what the profile measured for one inside the cache.
    """

    def __init__(self, profile: Profile, link: HostLink | None = None):
        self.profile = profile
        self._link = link
        knots = profile.matmul_knots
        slopes = [c.value for c in profile.matmul_slopes_s]
        most = 1 + 2 * max(knots)
        self._forward = profile.base_s.value + _segments(np.arange(most), knots) @ np.array(slopes)
        self._tail_slope = slopes[-1]
        self._attention = {
            kernel: tuple(getattr(a, term).value for term in ATTENTION_TERMS) for kernel, a in profile.kernels.items()
        }
        self.most_tokens = 0
        self.most_cells = 0

    def forward(self, batch: MicroBatch, kernel: Kernel, groups: Sequence[Group] = (Group(0),)) -> float:
        """Seconds of one forward pass, moves and rotations not included."""
        n = batch.n_tokens
        self.most_tokens = max(self.most_tokens, n)
        score, cell, chunk, run = self._attention[kernel]
        most = len(self._forward) - 1
        seconds = self._forward[min(n, most)] + self._tail_slope * max(n - most, 0)
        for place, group in zip(batch.places, groups, strict=True):
            reads = place.reads
            self.most_cells = max(self.most_cells, int(reads.scanned.max()))
            seconds += group.share * (
                score * int(reads.tokens @ reads.scanned)
                + cell * reads.span
                + chunk * len(reads.tokens)
                + run * int(reads.runs.sum())
            )
        return float(seconds)

    def moves(self, moves: Moves) -> float:
        """Seconds to carry out a compaction."""
        if moves.n_runs == 0:
            return 0.0
        cost = self.profile.moves
        return cost.per_run_s.value * moves.n_runs + cost.per_cell_s.value * moves.n_cells

    def shift(self, shift: Shift) -> float:
        """Seconds to rotate keys."""
        return self.profile.shift_per_cell_s.value * len(shift.cells)

    def transfers(self, transfers: Sequence[Transfer]) -> float:
        """Seconds to copy runs of cells between the cache and the host tier, one after another."""
        cells = sum(transfer.n for transfer in transfers)
        if self._link is not None:
            return self._link.latency_s * len(transfers) + cells * self._link.cell_bytes / self._link.bytes_per_s
        cost = self.profile.moves
        return cost.per_run_s.value * len(transfers) + cost.per_cell_s.value * cells

    def relative(self, kernel: Kernel) -> RelativeCosts | None:
        """What an adaptive trigger weighs, in seconds; None if the profile does not know the kernel."""
        if kernel not in self._attention:
            return None
        moves = self.profile.moves
        return RelativeCosts(self._attention[kernel][0], moves.per_run_s.value, moves.per_cell_s.value)

    def check(self, model: str, kernel: Kernel, type_k: Storage = "f32", type_v: Storage = "f32") -> None:
        """Raise ``UserError`` unless the profile speaks of this model, kernel and cache."""
        if model != self.profile.model:
            raise UserError(
                f"profile {self.profile.name} was measured on model {self.profile.model!r}, the scenario serves "
                f"{model!r}; measure one with: kvsim calibrate --model {model}"
            )
        kept = (self.profile.type_k, self.profile.type_v)
        if (type_k, type_v) != kept:
            raise UserError(
                f"profile {self.profile.name} was measured with K in {kept[0]} and V in {kept[1]}; measure one with: "
                f"kvsim calibrate --model {model} --cache-type-k {type_k} --cache-type-v {type_v}"
            )
        if kernel not in self._attention:
            known = ", ".join(self._attention)
            raise UserError(f"profile {self.profile.name} has no kernel {kernel!r}; it has {known}")

    def warnings(self) -> list[str]:
        """A line for each way in which the run went beyond what the profile measured."""
        p, found = self.profile, []
        if self.most_tokens > p.tokens.high:
            found.append(
                f"a forward pass had {self.most_tokens} tokens; the profile was measured up to {p.tokens.high}"
            )
        if self.most_cells > p.cells.high:
            found.append(
                f"tokens were scored against {self.most_cells} cells; the profile was measured up to {p.cells.high}"
            )
        return found


class Sample(_Record):
    """One measured forward pass: what it did and its median seconds."""

    kernel: Kernel
    tokens: int
    token_cells: int
    """Scores computed: tokens times cells scanned, summed over chunks."""
    cells: int
    chunks: int
    runs: int
    seconds: float


class MoveSample(_Record):
    """One measured compaction."""

    runs: int
    cells: int
    seconds: float


class ShiftSample(_Record):
    """One measured rotation of keys."""

    cells: int
    seconds: float


def fit(
    samples: Sequence[Sample],
    moves: Sequence[MoveSample],
    shifts: Sequence[ShiftSample],
    rng: np.random.Generator,
) -> Fit:
    """Fit all coefficients with non-negative least squares on relative errors.

    A third of the samples is held out to report the error; the coefficients then come from all of them, and
    their intervals from 200 bootstrap resamples.
    """
    kernels = tuple(sorted({s.kernel for s in samples}))
    design, seconds = _design(samples, kernels), np.array([s.seconds for s in samples])
    order = rng.permutation(len(samples))
    held, kept = order[: len(order) // 3], order[len(order) // 3 :]
    predicted = design[held] @ _solve(design[kept], seconds[kept])
    error = np.abs(predicted - seconds[held]) / seconds[held]

    value, low, high = _with_intervals(design, seconds, rng)
    coefficients = [
        Coefficient(value=v, low=lo, high=hi)
        for v, lo, hi in zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
    ]
    n_slopes, n_terms = len(KNOTS) - 1, len(ATTENTION_TERMS)
    attention = {}
    for i, kernel in enumerate(kernels):
        first = 1 + n_slopes + i * n_terms
        attention[kernel] = Attention(**dict(zip(ATTENTION_TERMS, coefficients[first : first + n_terms], strict=True)))
    move_design = np.array([[m.runs, m.cells] for m in moves], dtype=float)
    mv, ml, mh = _with_intervals(move_design, np.array([m.seconds for m in moves]), rng)
    per_run, per_cell = (Coefficient(value=mv[i], low=ml[i], high=mh[i]) for i in (0, 1))
    shift_design = np.array([[s.cells] for s in shifts], dtype=float)
    sv, sl, sh = _with_intervals(shift_design, np.array([s.seconds for s in shifts]), rng)
    return Fit(
        base_s=coefficients[0],
        matmul_slopes_s=tuple(coefficients[1 : 1 + n_slopes]),
        kernels=attention,
        moves=CopyCost(per_run_s=per_run, per_cell_s=per_cell),
        shift_per_cell_s=Coefficient(value=sv[0], low=sl[0], high=sh[0]),
        held_out_samples=len(held),
        held_out_error_median=float(np.median(error)),
        held_out_error_p95=float(np.quantile(error, 0.95)),
    )


def digest(samples: Sequence[Sample], moves: Sequence[MoveSample], shifts: Sequence[ShiftSample]) -> str:
    """SHA-256 of the raw measurements."""
    raw = json.dumps([s.model_dump() for s in (*samples, *moves, *shifts)], sort_keys=True)
    return hashlib.sha256(raw.encode()).hexdigest()


def _segments(tokens: NDArray[np.int64], knots: Sequence[int]) -> FloatArray:
    """How many of ``tokens`` fall into each segment between knots; shape (len(tokens), len(knots) - 1)."""
    bounds = [(low, high) for low, high in pairwise(knots)]
    bounds[-1] = (bounds[-1][0], np.iinfo(np.int64).max)
    columns = [np.clip(tokens, low, high) - low for low, high in bounds]
    return np.stack(columns, axis=1).astype(float)


def _design(samples: Sequence[Sample], kernels: Sequence[Kernel]) -> FloatArray:
    ones = np.ones((len(samples), 1))
    matmul = _segments(np.array([s.tokens for s in samples]), KNOTS)
    blocks = []
    for kernel in kernels:
        rows = [[s.token_cells, s.cells, s.chunks, s.runs] if s.kernel == kernel else [0, 0, 0, 0] for s in samples]
        blocks.append(np.array(rows, dtype=float))
    return np.hstack([ones, matmul, *blocks])


def _solve(design: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative least squares on relative errors, columns scaled to the same size."""
    weighted = design / seconds[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return np.asarray(solution / scale)


def _with_intervals(
    design: FloatArray, seconds: FloatArray, rng: np.random.Generator, resamples: int = 200
) -> tuple[FloatArray, FloatArray, FloatArray]:
    value = _solve(design, seconds)
    picks = rng.integers(0, len(seconds), (resamples, len(seconds)))
    others = np.array([_solve(design[pick], seconds[pick]) for pick in picks])
    low, high = np.quantile(others, [0.025, 0.975], axis=0)
    return value, np.minimum(low, value), np.maximum(high, value)
