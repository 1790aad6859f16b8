"""Profiles: the fitted costs of one model on one machine or device, and the JSON files that carry them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from kvsim.costs.efficiency import Errors
from kvsim.costs.pass_tables import PassTables
from kvsim.costs.records import Record, Seconds
from kvsim.costs.under_load import Host, Sustained, host_share, sustained
from kvsim.errors import UserError, counted, no_such
from kvsim.model.engine_shapes import SHAPES, Storage, file_name, is_engine_model
from kvsim.model.memory_shapes import shape_name
from policies import Kernel, engine_of

FORMAT = 3
"""Version of the profile file."""


class Coefficient(Record):
    """A fitted number of seconds and its 95 % bootstrap interval."""

    value: Seconds
    low: Seconds
    high: Seconds


Regime = Literal["decode", "mixed"]
"""Kinds of passes: every chunk is one token, or some chunk has more."""

NOTHING_S = Coefficient(value=0.0, low=0.0, high=0.0)


def exactly(seconds: float) -> Coefficient:
    """A coefficient that was computed, so that it has no interval."""
    return Coefficient(value=seconds, low=seconds, high=seconds)


class Attention(Record):
    """The costs of one attention kernel."""

    base_s: Coefficient
    """A forward pass of one token, apart from what it reads."""
    per_cell_s: Coefficient
    """Each cell that one token scans."""
    further_token_s: tuple[Coefficient, ...]
    """What a cell costs more for each further token that scans it together with the first; one for each segment between
    knots."""
    per_chunk_s: Coefficient
    per_run_s: Coefficient
    """Each contiguous run of cells that is read; 0 for kernels that read one run for each chunk."""
    skips: bool = False
    """Whether cells that a sequence may not see are skipped one by one, so that only useful ones cost: llama.cpp's
    flash attention on a CPU does, while those that skip whole tiles scan the rest of a tile."""
    tiles_from: Annotated[int, Field(ge=0)] = 0
    """Tokens of a chunk from which on it attends by another, tiled kernel, whose costs are the next two; 0: never.
    llama.cpp's flash attention on a CPU does from 64 on (``ggml_fa_tile_config::Q`` in ``ggml-cpu/ops.cpp``)."""
    tiled_cell_s: Coefficient = NOTHING_S
    """Each cell that such a chunk scans."""
    tiled_token_s: Coefficient = NOTHING_S
    """What that cell costs more for each further token of the chunk."""
    causal: bool = False
    """Whether a token of a chunk does not read the cells of the tokens behind it: a chunk of n tokens then reads
    (n - 1) / 2 cells fewer, as with flash attention on GPUs."""


class CopyCost(Record):
    """The costs of a compaction."""

    per_pass_s: Coefficient = NOTHING_S
    """Each compaction, whatever it moves."""
    per_run_s: Coefficient
    per_cell_s: Coefficient


class HostCopyCost(Record):
    """The costs of copying the state of a whole sequence to host memory and back."""

    out_per_copy_s: Coefficient = NOTHING_S
    """Each copy to the host, whatever its size."""
    out_per_run_s: Coefficient = NOTHING_S
    """Each run of cells that rises with the positions; 0 where runs were not told apart."""
    out_per_cell_s: Coefficient
    in_per_copy_s: Coefficient = NOTHING_S
    """Each copy back."""
    in_per_run_s: Coefficient = NOTHING_S
    in_per_cell_s: Coefficient

    def seconds(self, runs: int, cells: int, *, out: bool) -> float:
        """What a copy of ``cells`` cells in ``runs`` runs takes, out to the host or back."""
        if out:
            each, per_run, per_cell = self.out_per_copy_s, self.out_per_run_s, self.out_per_cell_s
        else:
            each, per_run, per_cell = self.in_per_copy_s, self.in_per_run_s, self.in_per_cell_s
        return each.value + runs * per_run.value + cells * per_cell.value


class MachineInfo(Record):
    """The machine on which a profile was measured, and how busy it was."""

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
    """Processor seconds per wall second during the measurement; below 1, other processes had the core."""


class Range(Record):
    """The smallest and the largest value that was measured."""

    low: int
    high: int


class Pace(Record):
    """How the machine's pace varied during the measurement: seconds of the reference passes over their median."""

    p5: float
    p50: float
    p95: float
    window_s: float
    """Standard deviation, in seconds, of the window over which the pace was smoothed."""

    @property
    def spread(self) -> float:
        """The slow end over the fast one."""
        return self.p95 / self.p5


class HeldOut(Record):
    """How well a fit predicts passes that were held out of it."""

    samples: int
    error_median: float
    """Median relative error, without its sign."""
    error_p95: float
    error_most: float


class Source(Record):
    """Where the times of a device come from, if they were not measured here."""

    title: str
    """What it is, and by whom."""
    url: str
    licence: str
    version: str
    """Its version or commit."""
    notes: tuple[str, ...] = ()
    """What the reader of a result should know of it, one sentence each."""


class Corrected(Record):
    """How benchmark results corrected the tables of a device, with the errors on results left out in turn."""

    by: str
    """The tools and files."""
    rows: Annotated[int, Field(ge=1)]
    error_median: float | None = None
    """Relative, without its sign; None where all rows tell the same, so that none could be left out."""
    error_p90: float | None = None


_GONE = ("sequence_knots", "sequence_slopes_s", "chunk_knots", "long_context")


class PassCosts(Record):
    """The fitted costs of forward passes; all empty where a profile has tables instead."""

    matmul_knots: tuple[int, ...] = ()
    """Batch sizes in tokens between which the cost of matrix work is linear."""
    attention_knots: tuple[int, ...] = ()
    """Tokens that scan a cell together, between which its cost is linear."""
    matmul_slopes_s: tuple[Coefficient, ...] = ()
    """Seconds per further token in each segment between knots."""
    kernels: dict[Kernel, Attention] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_gone(cls, data: Any) -> Any:
        """Profiles of machines once had keys that only those of devices filled."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if key not in _GONE or (value and key != "long_context")}
        if isinstance(kernels := data.get("kernels"), dict):
            gone = ("cell_by_chunks_s", "long_cell_by_chunks_s")
            data["kernels"] = {
                name: {key: value for key, value in each.items() if key not in gone or value}
                if isinstance(each, dict)
                else each
                for name, each in kernels.items()
            }
        return data

    @model_validator(mode="after")
    def _slopes_fit_knots(self) -> Self:
        if not (self.kernels or self.matmul_knots or self.attention_knots):
            return self
        for name, knots in (("matmul_knots", self.matmul_knots), ("attention_knots", self.attention_knots)):
            if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)) or knots[0] < 1 or knots[-1] > 2**20:
                raise ValueError(f"{name} must be two or more numbers, rising, from 1 to 2**20")
        slopes = [("matmul_slopes_s", self.matmul_slopes_s, "matmul_knots", self.matmul_knots)]
        for kernel, attention in self.kernels.items():
            name = f"kernels.{kernel}.further_token_s"
            slopes.append((name, attention.further_token_s, "attention_knots", self.attention_knots))
        for name, values, of_knots, knots in slopes:
            if len(values) != len(knots) - 1:
                raise ValueError(f"{name} must be {len(knots) - 1}, one between each two of {of_knots}")
        return self


class Fit(PassCosts):
    """Fitted costs, and how well they predict passes that were held out.

    The costs of passes are those of all passes, or of decode-only ones where there are others of ``mixed`` ones.
    """

    mixed: PassCosts | None = None
    """The costs of passes in which a chunk has more than one token; None: as those of all others."""
    moves: CopyCost | None
    """None: the engine never moves a cell."""
    shift_per_cell_s: Coefficient
    """To rotate the key of one cell in all layers (K-shift)."""
    host_copies: HostCopyCost | None = None
    """To copy sequences to host memory and back; None where that was not measured."""
    held_out_samples: int = 0
    """0: there were none, as of an estimate."""
    held_out_error_median: float = 0.0
    """Median relative error over the passes that were not used in the fit."""
    held_out_error_p95: float = 0.0
    held_out: dict[Regime, HeldOut] = Field(default_factory=dict)
    """Errors on held-out passes by regime; empty in profiles with one."""
    held_out_error_median_without_pace: float | None = None
    """The median if measurements were not divided by the machine's pace; None in older profiles."""

    @property
    def decode(self) -> PassCosts:
        """The costs of decode-only passes."""
        return self


NUMPY = "numpy"
"""The name of kvsim's own NumPy engine in profiles and commands."""

ENGINES = (NUMPY, "llamacpp")
"""Engines that can be calibrated."""

USUAL_MODEL = {NUMPY: "tiny", "llamacpp": "smollm2"}
"""The model that each engine is calibrated with by default."""


def is_llamacpp(engine: str) -> bool:
    """Whether an engine's name means llama.cpp rather than the NumPy engine. Raises ``UserError`` if it is neither."""
    if engine not in ENGINES:
        raise UserError(no_such("engine", engine, ENGINES))
    return engine != NUMPY


INFERRED_ATTENTION = "as the engine's own attention over the cells that are read"
INFERRED_MOVES = "as copies at the data sheet's memory bandwidth"
"""How a device's profile prices what its engine does not do."""


class Profile(Fit):
    """A profile: the fitted costs of one model on one machine or device under one engine."""

    format: int = FORMAT
    name: str
    engine: str = NUMPY
    """The engine that was measured, with its version."""
    shifts_all: bool = False
    """Whether a K-shift rotates every cell of the cache, as llama.cpp does, or only those whose position changed."""
    model: str
    """Name of the model's shape."""
    served_as: tuple[str, ...] = ()
    """What the server that was measured calls the model: its file, and the name that it answers to."""
    type_k: Storage = "f32"
    type_v: Storage = "f32"
    """Storage type of K and V during the measurement; f16 also stands for bfloat16, which takes as many bytes."""
    measured: str
    """Date, ISO 8601."""
    machine: MachineInfo | None = None
    """None where the times are those of a device."""
    tokens: Range
    """Measured range of tokens in a forward pass."""
    cells: Range
    """Measured range of cells that one token is scored against."""
    sequences: Annotated[int, Field(ge=1)] | None = None
    """The most sequences in a pass that were measured on a device."""
    reference_passes_s: tuple[Seconds, ...] = Field(
        default=(), validation_alias=AliasChoices("reference_passes_s", "yardstick_s")
    )
    """Seconds of the reference passes, which are always the same: they tell the machine's pace at another time. None
    of a device."""
    pace: Pace | None = None
    """None in older profiles, which were measured without looking at it."""
    refused: str | None = None
    """Why the calibration itself would not trust the profile; None if it does."""
    samples: int
    digest: str
    """SHA-256 of the raw measurements."""
    device: str | None = None
    """Name of the device; None for a machine that was measured here."""
    tables: PassTables | None = None
    """What the parts of a pass take on the device."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices that share the model (``--tensor-parallel-size``)."""
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Servers that divide the experts (``--enable-expert-parallel`` of vLLM), of each of which the times are."""
    weights: str | None = None
    """Storage type of the weights on a device."""
    flash_attention: bool = True
    """Whether llama.cpp uses flash attention on the device."""
    source: Source | None = None
    """Where the times of a device come from."""
    estimated: Errors | None = None
    """The errors of an estimate; None: the profile is of measurements."""
    corrected: Corrected | None = None
    """None: the profile was not corrected by results of benchmarks."""
    host: Host | None = None
    """What the host adds to each step, if that was given; see ``host_share``."""
    front_end_s: Coefficient | None = None
    """What the network, HTTP and the server's front end add to a request, of a server that was asked over HTTP."""
    assumed: tuple[str, ...] = ()
    """What a server that was asked over HTTP did not say of itself and had to be assumed, one line each."""

    @model_validator(mode="after")
    def _of_a_machine_or_a_device(self) -> Profile:
        if (self.machine is None) == (self.device is None):
            raise ValueError("machine: a profile is of a machine or of a device, so it has one of the two")
        if (self.device is None) != (self.tables is None) or (self.device is not None and self.source is None):
            raise ValueError("tables and source are those of a device, which has no fitted costs")
        if self.tables is None and not self.kernels:
            raise ValueError("kernels, matmul_knots: fields required where there are no tables")
        if self.mixed is not None and set(self.mixed.kernels) != set(self.kernels):
            raise ValueError("mixed.kernels must be those of kernels")
        return self

    @property
    def measured_on(self) -> MachineInfo:
        """The machine. Raises ``UserError`` if the times are those of a device, which cannot be run here."""
        if self.machine is None:
            raise UserError(
                f"profile {self.name} is of the device {self.device}, not of a machine that kvsim can measure; "
                "kvsim validate --recorded compares its times with recorded servers"
            )
        return self.machine

    def inferred(self, kernel: Kernel, moves: bool) -> dict[str, str]:
        """What the profile of a device prices without a measurement, and as what, under a policy; empty of a machine.

        ``kernel``: the policy's; ``moves``: whether it moves cells.
        """
        if self.device is None:
            return {}
        found = {} if self.measured_kernel(kernel) else {"attention": INFERRED_ATTENTION}
        return found | ({"moves": INFERRED_MOVES} if moves else {})

    @property
    def host_share(self) -> Host | None:
        """What the host adds to each step, as given or as the engine's version does on a device; None where that is
        part of what was measured."""
        return host_share(self.engine) if self.host is None and self.device is not None else self.host

    def composing(self, *, ahead: bool) -> Profile:
        """The profile where steps are composed while the one before runs, or after it: what the host adds to each
        depends on it, unless that was given or is part of what was measured."""
        if self.device is None or self.host is not None:
            return self
        return self.model_copy(update={"host": host_share(self.engine, ahead)})

    @property
    def sustained(self) -> Sustained | None:
        """How much longer matrices take under load than in the tables; None: as long."""
        if self.source is None or self.estimated is not None:  # What was fitted to many devices has no such edge.
            return None
        return sustained(self.device, self.source.title)

    def measured_kernel(self, kernel: Kernel) -> bool:
        """Whether attention was measured with this kernel."""
        return kernel in self.kernels if self.tables is None else kernel == self.own_kernel

    def kernel_costs(self, costs: PassCosts, kernel: Kernel) -> Attention:
        """The fitted costs of a kernel in one regime. Raises ``UserError`` if the profile has none."""
        if kernel not in costs.kernels:
            known = ", ".join(self.kernels)
            raise UserError(f"profile {self.name} has no kernel {kernel!r}; it has {known}")
        return costs.kernels[kernel]

    @property
    def own_kernel(self) -> Kernel:
        """The kernel of the engine on a device; all others are priced as it is."""
        if not self.engine.startswith("llama.cpp"):
            return "gather"
        return "tiled" if self.flash_attention else "masked"

    def describe(self) -> str:
        """One line for reports that names the profile, and the machine or the device."""
        kept = f"K in {self.type_k}, V in {self.type_v}"
        m = self.machine
        if m is not None:
            return (
                f"profile {self.name}: model {self.model}, {kept}, measured {self.measured} on {m.processor}, "
                f"{m.threads} of {m.cores} cores, {m.blas if self.engine == NUMPY else self.engine}"
            )
        assert self.source is not None
        weights = f", weights in {self.weights}" if self.weights else ""
        return (
            f"profile {self.name}: model {self.model} on {self._devices} under {self.engine}{weights}, {kept}, from "
            f"{self.source.title} {self.source.version}".rstrip()
        )

    @property
    def _devices(self) -> str:
        """The device, or so many of them."""
        divided = f", one of {self.expert_parallel} that divide the experts," if self.expert_parallel > 1 else ""
        return (f"{self.tensor_parallel} x " if self.tensor_parallel > 1 else "") + f"{self.device}{divided}"

    @property
    def basis(self) -> str:
        """One line for the head of results: whose times these are, and how well the profile fits."""
        kernels = ": its own kernels, not those of llama.cpp or vLLM" if self.engine == NUMPY else ""
        under_load = "".join([f" {each}" for each in (self.sustained, self.host_share) if each is not None])
        if self.estimated is not None:
            return f"Times are estimated: {self._estimate(self.estimated)}{under_load}"
        if self.corrected is not None:
            errors = self._correction(self.corrected)
        elif self.tables is not None:
            errors = (
                f"it predicts passes that are not in its tables within {self.held_out_error_median:.1%} (median) and "
                f"{self.held_out_error_p95:.1%} (P95)."
            )
        else:
            errors = (
                f"on passes held out of its fit the profile has a median error of {self.held_out_error_median:.1%} and "
                f"a P95 error of {self.held_out_error_p95:.1%}."
            )
        return f"Times are those of {self.describe()}{kernels}; {errors}{under_load}"

    @staticmethod
    def _correction(corrected: Corrected) -> str:
        """By what tables were corrected, and the errors on rows that were left out, in words."""
        found = f"corrected by {counted(corrected.rows, 'row')} of {corrected.by}"
        if corrected.error_median is None or corrected.error_p90 is None:
            return f"{found}, of which none could be left out to find an error."
        return (
            f"{found}; each left out in turn, it is predicted within ±{corrected.error_median:.1%} (median) and "
            f"±{corrected.error_p90:.1%} (P90)."
        )

    def _estimate(self, errors: Errors) -> str:
        """What an estimate rests on, and its errors, in words."""
        assert self.source is not None
        engine = "vLLM" if self.engine == "vllm" else self.engine
        weights = f"weights in {self.weights}, " if self.weights else ""
        kept = f"K and V in {self.type_k}" if self.type_k == self.type_v else f"K in {self.type_k}, V in {self.type_v}"
        found = (
            f"on devices and models left out of the fit, decode steps are within "
            f"±{errors.decode_median:.0%} (median) and ±{errors.decode_p90:.0%} (P90), prompts within "
            f"±{errors.prompt_median:.0%} and ±{errors.prompt_p90:.0%}."
            if errors.passes
            else "no measured server of this kind: no error is known."
        )
        of = f"{self.model} on {self._devices} under {engine}, {weights}{kept}, by {self.source.title}; {found}"
        return " ".join([of, *self.source.notes])

    def why_no_times(self, model: str, type_k: Storage, type_v: Storage, policy: str = "") -> str | None:
        """Why the profile says nothing about a model with K and V of these types, and what would; None if it does.

        ``policy``: whose engine is to be measured, where it stands for one.
        """
        same = same_model(model, self.model) if self.device is None else shape_name(model) == self.model
        if not same:
            return (
                f"no times for {model}: profile {self.name} was measured on {self.model}; "
                f"{how_to_get_times(model, self, policy)}"
            )
        if (type_k, type_v) != (self.type_k, self.type_v):
            how = f"measure one with: {self.command} --model {model} --cache-type-k {type_k} --cache-type-v {type_v}"
            if self.device is not None:
                how = "leave cache.type_k and cache.type_v out"
            elif self.of_server:
                how = f"start the server so, and measure it with: {self.command}"
            return (
                f"no times for K in {type_k} and V in {type_v}: profile {self.name} was measured with K in "
                f"{self.type_k} and V in {self.type_v}; {how}"
            )
        return None

    @property
    def of_server(self) -> bool:
        """Whether it was measured on a server that was asked over HTTP."""
        return self.front_end_s is not None

    @property
    def command(self) -> str:
        """The command that makes such a profile."""
        if self.device is not None:
            return f"kvsim profile make --device {self.device}"
        if self.of_server:
            return "kvsim calibrate --url URL"
        return "kvsim calibrate" if self.engine == NUMPY else "kvsim calibrate --engine llamacpp"

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        text = re.sub(r"\[\s+([^][{}]*?)\s+\]", _on_one_line, self.model_dump_json(indent=1))
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)


def _on_one_line(found: re.Match[str]) -> str:
    """A list of numbers, which tables have thousands of."""
    return f"[{' '.join(found[1].split())}]"


def how_to_get_times(model: str, profile: Profile, policy: str = "") -> str:
    """What to do where a profile says nothing about a model, in words and commands."""
    if profile.device is not None:
        return f"let --device {profile.device} --model {model} find its own"
    if not is_engine_model(model):
        return (
            "to get those of a GPU, name it with --device (kvsim profile list says which there are), correct them by "
            "what llama-bench or vllm bench measured there (kvsim calibrate --from FILE), or measure the server that "
            "runs on it (kvsim calibrate --url URL --out mine.json); to get those of llama.cpp on "
            "processors, measure its GGUF file there (kvsim calibrate --engine llamacpp --model FILE.gguf --out "
            "mine.json); then give --profile mine.json"
        )
    if model in SHAPES and profile.engine != NUMPY:
        return f"name the model in the scenario: model.name = '{profile.model}'"
    if model not in SHAPES and profile.engine == NUMPY:
        llamacpp = f"measure one with: kvsim calibrate --engine llamacpp --model {model}"
        if engine_of(policy).startswith("llama.cpp"):
            return llamacpp
        return (
            f"{llamacpp} for the policies of llama.cpp, or kvsim calibrate --model {model} for all policies on kvsim's "
            "own engine"
        )
    return f"measure one with: {profile.command} --model {model}"


def same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model; of files, only the file name counts."""
    return file_name(one) == file_name(other)
