"""What a step costs, in seconds: the model, its fit, and the machine profile that carries it.

A forward pass of ``n`` tokens costs

    base(kernel) + matmul(n) + attention(kernel, reads) + moves

where ``matmul`` is piecewise linear and never falls (a batched matrix product is not linear in its batch). Attention
costs, for each cell that is scanned, what the tokens cost that scan it together, again by a piecewise linear table that
never falls, and something for each chunk and for each run. Moves are charged by run first and by cell second. Every
coefficient is non-negative: no cost can be bought back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvsim.errors import UserError
from kvsim.model.engine_shapes import SHAPES, Storage
from policies import FastForward, Group, Kernel, MicroBatch, Moves, RelativeCosts, Shift, Transfer
from policies.fast_forward.lockstep import NextStepReads, PassSummary, ReadForecast

FORMAT = 3
"""Version of the profile file."""

FloatArray = NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)
"""Batch sizes in tokens between which ``matmul`` is linear; it is 0 for one token, and the last slope goes on."""

ATTENTION_KNOTS = (1, 2, 4, 8, 16, 64, 512)
"""Numbers of tokens that scan the same cells together, between which the cost of a cell is linear."""

_TOGETHER = 64
"""Neighbouring entries of a table that are computed together, which costs little more than one."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Record(BaseModel):
    """A part of a profile or of what it was fitted to: immutable, every key checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Coefficient(Record):
    """A fitted number of seconds and its 95 % bootstrap interval."""

    value: Seconds
    low: Seconds
    high: Seconds


class Attention(Record):
    """What one kernel costs."""

    base_s: Coefficient
    """A forward pass of one token, but for what it reads."""
    per_cell_s: Coefficient
    """A cell that one token scans."""
    further_token_s: tuple[Coefficient, ...]
    """What the cell costs more for each further token that scans it together with the first, in each segment between
    knots."""
    per_chunk_s: Coefficient
    per_run_s: Coefficient
    """Each contiguous piece that is read; 0 for kernels that read one for each chunk."""
    skips: bool = False
    """Whether cells that a sequence may not see are skipped one by one, so that only useful ones cost: llama.cpp's
    flash attention on a CPU does, while those that skip whole tiles scan the rest of a tile."""


NOTHING_S = Coefficient(value=0.0, low=0.0, high=0.0)


class CopyCost(Record):
    """What a compaction costs."""

    per_pass_s: Coefficient = NOTHING_S
    """Each compaction, whatever it moves."""
    per_run_s: Coefficient
    per_cell_s: Coefficient


class MachineInfo(Record):
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


class Range(Record):
    """The smallest and the largest value that was measured."""

    low: int
    high: int


class Fit(Record):
    """What is computed from the measurements: the costs, and how well they predict what was held out."""

    matmul_slopes_s: tuple[Coefficient, ...]
    """Seconds per further token in each segment between knots."""
    kernels: dict[Kernel, Attention]
    moves: CopyCost | None
    """None: the engine never moves a cell."""
    shift_per_cell_s: Coefficient
    """To rotate the key of one cell in all layers (K-shift)."""
    held_out_samples: int
    held_out_error_median: float
    """Median relative error over the passes that were not used in the fit."""
    held_out_error_p95: float


NUMPY = "numpy"
"""Our own engine, in profiles and commands."""

ENGINES = (NUMPY, "llamacpp")
"""Those that can be measured."""

USUAL_MODEL = {NUMPY: "tiny", "llamacpp": "smollm2"}
"""What each is measured with where no model is named."""


def is_llamacpp(engine: str) -> bool:
    """Whether the engine that was named is llama.cpp, and not ours. Raises ``UserError`` where it is neither."""
    if engine not in ENGINES:
        raise UserError(f"engine: there is no {engine!r}; there are {', '.join(ENGINES)}")
    return engine != NUMPY


class Profile(Fit):
    """A machine profile: the fitted costs of one model on one machine."""

    format: int = FORMAT
    name: str
    engine: str = NUMPY
    """What was measured: our own engine, or which llama.cpp."""
    shifts_all: bool = False
    """Whether a K-shift rotates every cell of the cache, as llama.cpp does, or only those whose position changed."""
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
    attention_knots: tuple[int, ...]
    """Tokens that scan a cell together, between which its cost is linear."""
    tokens: Range
    """Tokens in a forward pass that were measured."""
    cells: Range
    """Cells that one token was scored against, as far as was measured."""
    reference_passes_s: tuple[Seconds, ...] = Field(validation_alias=AliasChoices("reference_passes_s", "yardstick_s"))
    """Of a few passes that are always the same: by them, the machine's pace at another time is told."""
    samples: int
    digest: str
    """SHA-256 of the raw measurements."""

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        for name, knots in (("matmul_knots", self.matmul_knots), ("attention_knots", self.attention_knots)):
            if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)) or knots[0] < 1 or knots[-1] > 2**20:
                raise ValueError(f"{name} must be two or more numbers of tokens, rising, from 1 to 2**20")
        if len(self.matmul_slopes_s) != len(self.matmul_knots) - 1:
            expected = len(self.matmul_knots) - 1
            raise ValueError(f"matmul_slopes_s must be {expected}, one between each two of matmul_knots")
        for kernel, attention in self.kernels.items():
            if len(attention.further_token_s) != len(self.attention_knots) - 1:
                expected = len(self.attention_knots) - 1
                raise ValueError(
                    f"kernels.{kernel}.further_token_s must be {expected}, one between each two of attention_knots"
                )
        return self

    def describe(self) -> str:
        """One line for reports: which profile, of which machine."""
        m = self.machine
        return (
            f"profile {self.name}: model {self.model}, K in {self.type_k}, V in {self.type_v}, "
            f"measured {self.measured} on {m.processor}, "
            f"{m.threads} of {m.cores} cores, {m.blas if self.engine == NUMPY else self.engine}"
        )

    @property
    def command(self) -> str:
        """How one like it is made."""
        return "kvsim calibrate" if self.engine == NUMPY else "kvsim calibrate --engine llamacpp"

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def is_shipped(name: str) -> bool:
    """Whether a profile of that name ships with the package; it comes before any file of that name."""
    return (
        "/" not in name
        and "\0" not in name
        and (resources.files("kvsim.costs") / "profiles" / f"{name}.json").is_file()
    )


def load_profile(name: str, folder: Path = Path()) -> Profile:
    """A shipped profile by name, or one from a file. Raises ``UserError``."""
    shipped = resources.files("kvsim.costs") / "profiles" / f"{name}.json"
    try:
        if is_shipped(name):
            text = shipped.read_text(encoding="utf-8")
        else:
            text = (folder / Path(name).expanduser()).read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError):
        known = sorted(
            p.name.removesuffix(".json")
            for p in (resources.files("kvsim.costs") / "profiles").iterdir()
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


def same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model: of files it is the name that counts, wherever they lie."""
    both = [Path(name).name if name.endswith(".gguf") else name for name in (one, other)]
    return both[0] == both[1]


def scans_together(kernel: Kernel, group: Group) -> bool:
    """Whether all tokens of a pass scan the same cells; otherwise each chunk scans its own."""
    return kernel == "masked" and group.streams == 1


def segments(tokens: ArrayLike, knots: Sequence[int]) -> FloatArray:
    """How many of ``tokens`` fall into each segment between knots, the last of which goes on for ever; shape
    (len(tokens), len(knots) - 1)."""
    given = np.asarray(tokens)
    bounds = [(low, high) for low, high in pairwise(knots)]
    bounds[-1] = (bounds[-1][0], np.iinfo(np.int64).max)
    return np.stack([np.clip(given, low, high) - low for low, high in bounds], axis=-1).astype(float)


class _Table(dict[int, float]):
    """Seconds by number of tokens: linear between knots, from 1 token on. Entries are computed when they are wanted."""

    def __init__(self, first_s: float, slopes_s: Sequence[Coefficient], knots: Sequence[int]):
        super().__init__()
        self._first = first_s
        self._slopes = np.array([slope.value for slope in slopes_s])
        self._knots = knots

    def __missing__(self, tokens: int) -> float:
        first = tokens - tokens % _TOGETHER
        for n, row in enumerate(segments(range(first, first + _TOGETHER), self._knots), first):
            self[n] = self._first + float(row @ self._slopes)
        return self[tokens]


@dataclass(frozen=True, slots=True)
class HostLink:
    """The way between the cache and the host tier, where it is given rather than measured."""

    bytes_per_s: float
    latency_s: float
    """Of each run of cells."""
    cell_bytes: float
    """K and V of one token in all layers."""


class Rates(NamedTuple):
    """A profile's terms under one kernel, for those who look into a prediction; seconds before ``pace``."""

    pace: float
    matmul: Callable[[int], float]
    """Of matrix work, for so many tokens."""
    cell: Callable[[int], float]
    """Of a cell that so many tokens scan together."""
    base_s: float
    per_chunk_s: float
    per_run_s: float
    skips: bool
    """As ``Attention.skips``."""


class CostModel:
    """Predicts seconds from a profile, and remembers when it was asked beyond what was measured.

    Without a ``link``, a copy to or from the host tier costs what the profile measured for one inside the cache.
    """

    def __init__(self, profile: Profile, link: HostLink | None = None, pace: float = 1.0):
        """``pace``: how long things take, over how long they took when the profile was measured."""
        self.profile = profile
        self._link = link
        self._pace = pace
        self._forward = _Table(0.0, profile.matmul_slopes_s, profile.matmul_knots)
        self._attention = {
            kernel: (
                _Table(a.per_cell_s.value, a.further_token_s, profile.attention_knots),
                a.base_s.value,
                a.per_chunk_s.value,
                a.per_run_s.value,
                a.skips,
            )
            for kernel, a in profile.kernels.items()
        }
        self.most_tokens = 0
        self.most_cells = 0

    def forward(self, batch: MicroBatch, kernel: Kernel, groups: Sequence[Group] = (Group(0),)) -> float:
        """Seconds of one forward pass, moves and rotations not included."""
        n = batch.n_tokens
        self.most_tokens = max(self.most_tokens, n)
        cell, base, chunk, run, skips = self._attention[kernel]
        seconds = self._forward[n]
        for place, group in zip(batch.places, groups, strict=True):
            reads = place.reads
            each = reads.useful if skips else reads.scanned
            self.most_cells = max(self.most_cells, int(each.max()))
            if scans_together(kernel, group):
                attention = cell[n] * reads.span
            else:
                attention = sum(map(operator.mul, map(cell.__getitem__, reads.tokens.tolist()), each.tolist()))
            pieces = chunk * len(reads.tokens) + run * int(reads.runs.sum())
            seconds += group.share * (base + attention + pieces)
        return self._pace * seconds

    def fast_forward(self, fast_forward: FastForward, kernel: Kernel, groups: Sequence[Group]) -> list[FloatArray]:
        """Seconds of each pass of a step, in each of the steps; arrays of shape (steps,)."""
        cell, base, chunk, run, skips = self._attention[kernel]
        found = []
        for each in fast_forward.passes:
            seconds: FloatArray | float = self._forward[each.tokens]
            for sums, group in zip(each.groups, groups, strict=True):
                if scans_together(kernel, group):
                    attention = cell[each.tokens] * sums.span
                else:
                    attention = cell[1] * (sums.useful if skips else sums.scanned)
                pieces = chunk * each.tokens + run * sums.runs
                seconds = seconds + group.share * (base + attention + pieces)
            found.append(np.asarray(self._pace * seconds))
        return found

    def mixed_step(
        self, tokens: int, next_step_reads: NextStepReads, summary: PassSummary, kernel: Kernel, group: Group
    ) -> float:
        """Seconds of one forward pass in which a lockstep batch of so many gets its tokens beside some chunks, for a
        model with that cache group alone and a kernel that scans each chunk's own cells."""
        n = tokens + summary.tokens
        if n > self.most_tokens:
            self.most_tokens = n
        cell, base, chunk, run, _ = self._attention[kernel]
        attention, runs, longest = (
            cell[1] * next_step_reads.scanned,
            next_step_reads.runs,
            next_step_reads.max_scanned_per_token,
        )
        for each, scanned, pieces in summary.chunk_reads:
            attention += cell[each] * scanned
            runs += pieces
            if scanned > longest:
                longest = scanned
        if longest > self.most_cells:
            self.most_cells = longest
        rest = chunk * (tokens + len(summary.chunk_reads)) + run * runs
        return self._pace * (self._forward[n] + group.share * (base + attention + rest))

    def lasting(self, members: int, forecast: ReadForecast, kernel: Kernel, group: Group) -> Callable[[int], float]:
        """The seconds that the first so many steps of a lockstep batch take together, for such a model and such a
        kernel."""
        cell, base, chunk, run, _ = self._attention[kernel]
        scan, piece = self._pace * group.share * cell[1], self._pace * group.share * run
        fixed = self._pace * (self._forward[members] + group.share * (base + chunk * members))

        def seconds(steps: int) -> float:
            found = steps * fixed + scan * forecast.total_scanned(steps)
            if piece:
                found += piece * forecast.total_runs(steps)
            for after, cells in forecast.region_copies:
                if after < steps:
                    found += group.share * self._moving(1, cells)
            return found

        return seconds

    def reached(self, tokens: int, cells: int) -> None:
        """A pass had so many tokens, one of them scored against so many cells: it counts for what is warned of."""
        if tokens > self.most_tokens:
            self.most_tokens = tokens
        if cells > self.most_cells:
            self.most_cells = cells

    def went(self, fast_forward: FastForward) -> None:
        """These steps were run: they count for what is warned of."""
        for each in fast_forward.passes:
            self.most_tokens = max(self.most_tokens, each.tokens)
            self.most_cells = max(self.most_cells, *(int(sums.max_scanned_per_token.max()) for sums in each.groups))

    def moves(self, moves: Moves) -> float:
        """Seconds to carry out a compaction."""
        if moves.n_runs == 0:
            return 0.0
        return self._moving(moves.n_runs, moves.n_cells)

    def shift(self, shift: Shift, group: Group) -> float:
        """Seconds to rotate keys in a cache group."""
        cells = group.cells if self.profile.shifts_all and len(shift.cells) else len(shift.cells)
        return self._pace * self.profile.shift_per_cell_s.value * cells

    def transfers(self, transfers: Sequence[Transfer]) -> float:
        """Seconds to copy runs of cells between the cache and the host tier, one after another."""
        if not transfers:
            return 0.0
        cells = sum(transfer.n for transfer in transfers)
        if self._link is not None:
            return self._link.latency_s * len(transfers) + cells * self._link.cell_bytes / self._link.bytes_per_s
        return self._moving(len(transfers), cells)

    def _moving(self, runs: int, cells: int) -> float:
        cost = self.profile.moves
        if cost is None:
            raise UserError(f"profile {self.profile.name} knows no cost of moving cells: {self._still}")
        each = cost.per_run_s.value * runs + cost.per_cell_s.value * cells
        return self._pace * (cost.per_pass_s.value + each)

    def relative(self, kernel: Kernel) -> RelativeCosts | None:
        """What an adaptive trigger weighs, in seconds; None if the profile does not know the kernel, or no moves."""
        moves = self.profile.moves
        if kernel not in self._attention or moves is None:
            return None
        return RelativeCosts(self._attention[kernel][0][1], moves.per_run_s.value, moves.per_cell_s.value)

    def rates(self, kernel: Kernel) -> Rates:
        """What ``forward`` adds up."""
        cell, base, chunk, run, skips = self._attention[kernel]
        return Rates(self._pace, self._forward.__getitem__, cell.__getitem__, base, chunk, run, skips)

    def check(self, model: str, kernel: Kernel, type_k: Storage = "f32", type_v: Storage = "f32") -> None:
        """Raise ``UserError`` unless the profile speaks of this model, kernel and cache."""
        if not same_model(model, self.profile.model):
            how = f"measure one with: kvsim calibrate --model {model}"
            if model in SHAPES and self.profile.engine != NUMPY:
                how = f"name the model in the scenario: model.name = '{self.profile.model}'"
            elif self.profile.engine != NUMPY:
                how = f"measure one with: {self.profile.command} --model {model}"
            raise UserError(
                f"profile {self.profile.name} was measured on model {self.profile.model!r}, the scenario serves "
                f"{model!r}; {how}"
            )
        kept = (self.profile.type_k, self.profile.type_v)
        if (type_k, type_v) != kept:
            raise UserError(
                f"profile {self.profile.name} was measured with K in {kept[0]} and V in {kept[1]}; measure one with: "
                f"{self.profile.command} --model {model} --cache-type-k {type_k} --cache-type-v {type_v}"
            )
        if kernel not in self._attention:
            known = ", ".join(self._attention)
            raise UserError(f"profile {self.profile.name} has no kernel {kernel!r}; it has {known}")

    def check_moves(self, policy: str) -> None:
        """Raise ``UserError`` where the profile does not know what a policy's moves cost."""
        if self.profile.moves is None:
            raise UserError(f"profile {self.profile.name} knows no cost of {policy}'s moves: {self._still}")

    @property
    def _still(self) -> str:
        return f"{self.profile.engine} never moves any cells"

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
