"""Memory footprint of one set-up of the engine, measured in an isolated process.

``measure`` starts ``python -m real_engine.footprint``, which reads a ``SetUp`` as JSON from its input, builds it,
serves with it, and writes a ``Footprint`` as JSON to its output; memory of the caller or of earlier set-ups is thus not
counted. Needs Linux, since figures come from ``/proc/self``.

Every set-up does the same work through the real engine and a real policy: the prompts of all slots in passes of at most
``n_ubatch`` tokens, then decodes of one token for each slot. Requests are token ids; a tokeniser is not included.
Before each reading Python collects garbage and the C library returns freed memory (``malloc_trim``, where available),
so that what is resident is in use.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvsim.errors import UserError
from kvsim.model.engine_shapes import ModelShape, Storage, gguf_path
from kvsim.model.gguf_file import read_header
from policies import CacheConfig, Chunk, MicroBatch, Policy, SequencePlan, available
from policies.layouts.sequence_regions import GrowingPolicy
from real_engine.arrays import FloatArray
from real_engine.engine import Engine
from real_engine.isolated import answer, ask_isolated
from real_engine.kernels import BLOCK
from real_engine.loading import load_model
from real_engine.model import Transformer
from real_engine.weights import WEIGHT_BYTES, WeightForm
from workloads import Request

CacheForm = Literal["reserved", "growing", "paged"]
"""``reserved``: every slot's whole context, filled with zeros at the start. ``growing``, ``paged``: as the policies of
these names place tokens; a page of memory becomes resident when a token is first written to it, or when the C library
clears it for reuse."""
Buffers = Literal["repeated", "merged"]
"""``repeated``: work buffers for each layer, large enough for scores against a slot's whole context. ``merged``:
buffers that exist only during a pass and that all layers share."""

DECODES = 8
"""Most tokens that each slot generates: the last ones of those that it holds."""
_POLICIES: dict[CacheForm, str] = {"reserved": "hf-reserved", "growing": "growing", "paged": "paged"}
_BLOCK_SIZE = 16
_MINIATURE = ModelShape(n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, d_head=64, d_ff=64, vocabulary=64)
_PR_SET_THP_DISABLE = 41
"""Option of Linux's ``prctl``."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """An engine and its load."""

    model: str
    weights: WeightForm = "f32"
    twice: bool = False
    """Whether the float32 numbers from which the weights were made stay in memory; no effect if mapped."""
    cache: CacheForm = "paged"
    buffers: Buffers = "merged"
    huge_pages: bool = False
    """Whether NumPy's arrays of 4 MB and more use pages of 2 MB, as NumPy requests by default: writing one cell then
    makes 2 MB resident. Otherwise pages have 4 kB."""
    type_k: Storage = "f32"
    type_v: Storage = "f32"
    slots: int = 4
    context: int = 2048
    """Capacity of a slot in tokens."""
    tokens: int = 256
    """Tokens that each slot holds at the end."""
    n_ubatch: int = 128
    """Most tokens in a forward pass."""
    seed: int = 0

    @property
    def decodes(self) -> int:
        """Tokens that each slot generates and keeps."""
        return min(DECODES, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of the process at the end of a stage, in bytes."""

    stage: str
    """``runtime``: Python, NumPy and the engine are imported, and a miniature has run once. ``weights``: loaded, once
    or twice. ``buffers``: repeated work buffers are allocated. ``cache``: the engine is built. ``run``: all requests
    are served."""
    resident: int
    anonymous: int
    """Resident bytes that are not pages of files."""
    model_file: int
    """Resident bytes of the mapped model file."""
    peak: int
    """Most bytes resident since the previous stage, or since the process began where that cannot be reset. Counts the
    pages of a model file while it is read, which Linux reclaims when it needs them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes by purpose."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.weights + self.cache + self.work


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a set-up took, and the theoretical need."""

    readings: tuple[MemoryReading, ...]
    """One for each stage, in order."""
    needed: Parts
    """Theoretical need. Weights: once, in the set-up's form (mapped: as in the file). Cache: K and V of the tokens
    held. Work: ``activations`` of the largest pass."""
    arrays: Parts
    """NumPy arrays allocated: all copies of the weights; K and V of all cells, written to or not; repeated buffers."""
    generated: tuple[tuple[int, ...], ...]
    """Tokens that each slot generated, equal for every form of cache and number of copies."""

    @property
    def runtime(self) -> int:
        """Resident bytes of Python, NumPy and the engine's code."""
        return self._at("runtime").resident

    @property
    def measured(self) -> Parts:
        """Resident bytes at the peak of the run, without the runtime.

        Weights: bytes added by loading, and the pages of a mapped file whenever they were read. Cache: bytes added
        since the engine was built that stayed. Work: repeated buffers, and bytes that passes allocated and freed.
        """
        runtime, weights, buffers, run = map(self._at, ("runtime", "weights", "buffers", "run"))
        loaded = weights.resident - runtime.resident
        paged_in = run.model_file - weights.model_file
        filled = run.resident - buffers.resident - paged_in
        return Parts(loaded + paged_in, filled, buffers.resident - weights.resident + run.peak - run.resident)

    @property
    def resident(self) -> int:
        """Bytes at the peak of the run: the runtime and all parts."""
        return self._at("run").peak

    @property
    def peak(self) -> int:
        """Most bytes resident at any time, while loading or running."""
        return max(reading.peak for reading in self.readings)

    @property
    def ratio(self) -> float:
        """Measured over needed bytes, without the runtime."""
        return self.measured.total / self.needed.total

    @property
    def ratio_with_runtime(self) -> float:
        """All resident bytes, including the runtime, over the need without a runtime."""
        return self.resident / self.needed.total

    def _at(self, stage: str) -> MemoryReading:
        return next(reading for reading in self.readings if reading.stage == stage)


def activations(shape: ModelShape, tokens: int, outputs: int, seen: int) -> int:
    """Bytes of a pass's float32 activations, counted once since all layers can share them.

    For each token: the residual stream and its norm (d_model each), queries, keys and values, the attention output, the
    gate and up projections and their product (d_ff each), and the scores of all heads against ``seen`` cells. For each
    of the ``outputs``: logits.
    """
    s = shape
    heads = (2 * s.n_heads + 2 * s.n_kv_heads) * s.d_head
    return 4 * (tokens * (2 * s.d_model + heads + 3 * s.d_ff + s.n_heads * seen) + outputs * s.vocabulary)


def estimate(setup: SetUp, shape: ModelShape) -> int:
    """Rough upper estimate of a set-up's bytes, to check beforehand whether it fits."""
    s = shape
    layer = s.d_model * (2 * s.n_heads + 2 * s.n_kv_heads) * s.d_head + 3 * s.d_model * s.d_ff
    numbers = s.n_layers * layer + 2 * s.vocabulary * s.d_model
    path = gguf_path(setup.model)
    if setup.weights == "mapped" and path is not None:
        weights = path.stat().st_size
    else:
        weights = numbers * (WEIGHT_BYTES[setup.weights] + 4 * setup.twice)
    # With huge pages the whole cache may become resident.
    whole = setup.cache == "reserved" or setup.huge_pages
    held = setup.slots * (setup.context if whole else 2 * setup.tokens)
    work = activations(s, setup.n_ubatch, setup.slots, min(setup.context, BLOCK))
    if setup.buffers == "repeated":
        work += s.n_layers * activations(s, setup.n_ubatch, 0, setup.context)
    return int(weights + held * s.cell_bytes(setup.type_k, setup.type_v) + 2 * work)


def available_bytes() -> int:
    """Bytes available on this machine without swapping. Raises ``UserError`` if the system does not report them."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise UserError("memory is read from /proc, which this system does not have; Linux does") from None


def measure(setup: SetUp) -> Footprint:
    """Build the set-up in an isolated process, serve with it, and return its footprint. Raises ``UserError``."""
    available_bytes()
    # One BLAS thread, since each has its own buffers.
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    huge = {"NUMPY_MADVISE_HUGEPAGE": str(int(setup.huge_pages))}
    found = ask_isolated(
        "real_engine.footprint",
        asdict(setup),
        f"model {setup.model}: the process that was to be measured failed",
        killed=", as Linux does when memory runs out",
        environment=one | huge,
    )
    return Footprint(
        readings=tuple(MemoryReading(**reading) for reading in found["readings"]),
        needed=Parts(**found["needed"]),
        arrays=Parts(**found["arrays"]),
        generated=tuple(map(tuple, found["generated"])),
    )


class _MemoryGauge:
    """Reads this process's memory at the end of each stage."""

    def __init__(self, model_file: Path | None):
        self.readings: list[MemoryReading] = []
        self._file = None if model_file is None else str(model_file.resolve())
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """None if the C library is not glibc."""

    def read(self, stage: str) -> None:
        """Record the memory at the end of a stage; bytes freed within it count only in its peak."""
        peak = _field("/proc/self/status", "VmHWM")
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        resident = _field("/proc/self/smaps_rollup", "Rss")
        anonymous = _field("/proc/self/smaps_rollup", "Anonymous")
        # Linux's peak is inexact by some pages.
        self.readings.append(MemoryReading(stage, resident, anonymous, self._mapped(), max(peak, resident)))
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        except OSError:
            return  # Peaks are then those since the process began.

    def _mapped(self) -> int:
        """Resident bytes of the model's file."""
        if self._file is None:
            return 0
        total, ours = 0, False
        with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                name, *rest = line.split(maxsplit=5)
                if not name.endswith(":"):
                    ours = len(rest) == 5 and rest[4].rstrip("\n") == self._file
                elif ours and name == "Rss:":
                    total += 1024 * int(rest[0])
        return total


def _field(path: str, name: str) -> int:
    """A size in bytes that Linux reports in kB."""
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(f"{name}:"):
                    return 1024 * int(line.split()[1])
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    raise UserError(f"{path} does not say {name}; Linux 4.14 or newer does")


class _MeasuredEngine(Engine):
    """An engine that records the activations of its largest pass."""

    needed = 0
    """Bytes of the largest pass's ``activations``."""

    def run(self, tokens: Any, batch: MicroBatch) -> FloatArray:
        """Run the pass, and update ``needed``."""
        longest = max(len(view.cells) for view in batch.views)
        taken = activations(self.model.shape, len(tokens), len(batch.chunks), min(longest, BLOCK))
        self.needed = max(self.needed, taken)
        return super().run(tokens, batch)


def _build(setup: SetUp) -> Footprint:
    """Build the set-up in this process, and serve with it."""
    path = gguf_path(setup.model)
    if path is not None:
        # Modules for reading files count as runtime.
        import real_engine.gguf_model  # noqa: F401
    gauge = _MemoryGauge(path)
    _warm_up(setup)
    gauge.read("runtime")
    source = _load(setup, path, "f32") if setup.twice and setup.weights != "mapped" else None
    model = _load(setup, path, setup.weights)
    shape = model.shape
    gauge.read("weights")
    repeated: list[FloatArray] = []
    if setup.buffers == "repeated":
        each = activations(shape, setup.n_ubatch, 0, setup.context) // 4
        repeated = [np.full(each, 0, dtype=np.float32) for _ in range(shape.n_layers)]
    gauge.read("buffers")
    policy, engine = _engine(setup, model)
    kept = [array for store in (*engine.keys, *engine.values) for array in store.arrays]
    if setup.cache == "reserved":
        for array in kept:
            array.fill(0)
    gauge.read("cache")
    generated = _serve(setup, policy, engine)
    gauge.read("run")
    held = setup.slots * setup.tokens * shape.cell_bytes(setup.type_k, setup.type_v)
    return Footprint(
        readings=tuple(gauge.readings),
        needed=Parts(model.nbytes, int(held), engine.needed),
        arrays=Parts(
            model.nbytes + (0 if source is None else source.nbytes),
            sum(array.nbytes for array in kept),
            sum(buffer.nbytes for buffer in repeated),
        ),
        generated=generated,
    )


def _warm_up(setup: SetUp) -> None:
    """Run everything once on a miniature: code and tables loaded at their first use count as runtime."""
    # The BLAS allocates its buffers at the first large product.
    square = np.ones((1024, 1024), dtype=np.float32)
    square @ square
    small = replace(setup, slots=2, context=32, tokens=16, n_ubatch=8)
    form = "f32" if setup.weights == "mapped" else setup.weights
    policy, engine = _engine(small, Transformer.random(_MINIATURE, 0, form))
    _serve(small, policy, engine)


def _load(setup: SetUp, path: Path | None, form: WeightForm) -> Transformer:
    if path is None:
        return load_model(setup.model, setup.seed, form).transformer
    from real_engine.gguf_model import load_transformer

    return load_transformer(read_header(path, vocabulary=False), form)


def _engine(setup: SetUp, model: Transformer) -> tuple[Policy, _MeasuredEngine]:
    """A policy and the engine over its cells, with room for all slots.

    Reserved: the whole context of each slot. Growing: powers of two, and room for all slots to double in one step.
    Paged: just enough blocks, and the one that is never handed out.
    """
    cells = {
        "reserved": setup.slots * setup.context,
        "growing": 3 * setup.slots * max(1 << (setup.context - 1).bit_length(), GrowingPolicy.least) // 2,
        "paged": (setup.slots * -(-setup.tokens // _BLOCK_SIZE) + 1) * _BLOCK_SIZE,
    }[setup.cache]
    config = CacheConfig(
        cells=cells,
        n_ubatch=setup.n_ubatch,
        sequences=setup.slots,
        max_tokens=setup.context,
        block_size=_BLOCK_SIZE,
        n_layers=model.shape.n_layers,
        for_any_layout=True,
    )
    policy = available()[_POLICIES[setup.cache]](config)
    groups, kernel = policy.groups, policy.kernel
    return policy, _MeasuredEngine(model, groups, kernel, setup.seed, type_k=setup.type_k, type_v=setup.type_v)


def _serve(setup: SetUp, policy: Policy, engine: Engine) -> tuple[tuple[int, ...], ...]:
    """Run all prompts, then the decodes, and return each slot's generated tokens."""
    prompt = setup.tokens - setup.decodes
    slots = range(setup.slots)
    for slot in slots:
        policy.open(slot, SequencePlan(prompt, setup.context, setup.tokens))
        engine.begin(slot, Request(slot, 0.0, prompt, setup.decodes + 1))
    steps = [[Chunk(slot, 0, prompt) for slot in slots]]
    steps += [[Chunk(slot, at, 1) for slot in slots] for at in range(prompt, setup.tokens)]
    for step in steps:
        for batch in policy.allocate(step, views=True):
            engine.forward(batch)
    return tuple(tuple(engine.tokens[slot][prompt:]) for slot in slots)


def _measure_here(asked: dict[str, Any]) -> Footprint:
    """The footprint of the set-up that was asked for. Raises ``UserError``."""
    setup = SetUp(**asked)
    if not setup.huge_pages:
        # NumPy obeys its environment variable; this is for systems that use huge pages unasked.
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        return _build(setup)
    except MemoryError:
        raise UserError(f"model {setup.model}: the set-up does not fit into this machine's memory") from None


if __name__ == "__main__":
    sys.exit(answer(_measure_here))
