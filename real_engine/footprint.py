"""How much memory one set-up of the engine takes, measured in a process of its own.

``measure`` starts ``python -m real_engine.footprint``, which reads a ``SetUp`` as JSON from its input, builds it,
serves with it, and writes a ``Footprint`` as JSON to its output; so nothing counts that a caller or an earlier set-up
left behind. Needs Linux: figures come from ``/proc/self``.

Every set-up does the same work through the real engine and a real policy: the prompts of all slots in passes of at most
``n_ubatch`` tokens, then some decodes of a token for each slot. It is given token ids; a tokeniser is no part of it.
Before memory is read, Python collects its garbage and the C library gives freed memory back (``malloc_trim``, where it
has that): what is resident then is held.
"""

from __future__ import annotations

import ctypes
import gc
import json
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
from real_engine.isolated import ask_isolated
from real_engine.kernels import BLOCK
from real_engine.loading import load_model
from real_engine.model import Transformer
from real_engine.weights import WeightForm
from workloads import Request

CacheForm = Literal["reserved", "growing", "paged"]
"""``reserved``: every slot's whole context, filled with zeros at the start. ``growing``, ``paged``: as the policies of
these names place tokens; a page of memory becomes resident when a token is first written to it, or when the C library
has to clear it since it held something else before."""
Buffers = Literal["repeated", "merged"]
"""``repeated``: work buffers for each layer, large enough for scores against a slot's whole context. ``merged``: what a
pass takes while it runs, used again by every layer."""

DECODES = 8
"""Tokens that each slot generates, where it holds so many: the last of those that it holds."""
_POLICIES: dict[CacheForm, str] = {"reserved": "hf-reserved", "growing": "growing", "paged": "paged"}
_BLOCK_SIZE = 16
_MINIATURE = ModelShape(n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, d_head=64, d_ff=64, vocabulary=64)
_PR_SET_THP_DISABLE = 41
"""Of Linux's ``prctl``."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """An engine, and what it serves."""

    model: str
    weights: WeightForm = "f32"
    twice: bool = False
    """Beside the weights, the float32 numbers that they were made from stay in memory; mapped ones are not made."""
    cache: CacheForm = "paged"
    buffers: Buffers = "merged"
    huge_pages: bool = False
    """NumPy's arrays of 4 MB and more in pages of 2 MB, as it asks for by default: writing one cell then makes 2 MB
    resident. Otherwise pages are 4 kB."""
    type_k: Storage = "f32"
    type_v: Storage = "f32"
    slots: int = 4
    context: int = 2048
    """Tokens that a slot could hold."""
    tokens: int = 256
    """Tokens that each slot holds in the end."""
    n_ubatch: int = 128
    """The most tokens in a forward pass."""
    seed: int = 0

    @property
    def decodes(self) -> int:
        """Tokens that each slot generates and keeps."""
        return min(DECODES, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of the process at the end of a stage, in bytes."""

    stage: str
    """``runtime``: Python, NumPy and the engine are imported, and a miniature has run once. ``weights``: they are
    loaded, once or twice. ``buffers``: repeated work buffers are made. ``cache``: the engine is made. ``run``: it has
    served."""
    resident: int
    anonymous: int
    """Of what is resident: the process's own, not read from files."""
    model_file: int
    """Of what is resident: the mapped model file."""
    peak: int
    """The most that was resident since the stage before (where that cannot be reset: since the process began). Counts
    the pages of a model file while it is read, which Linux takes back when it needs them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes by what they are for."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        """Of all parts."""
        return self.weights + self.cache + self.work


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a set-up took, and what it should take."""

    readings: tuple[MemoryReading, ...]
    """In the order of the stages."""
    needed: Parts
    """The theoretical need. Weights: once, in the set-up's form (mapped: as in the file). Cache: K and V of the tokens
    really held. Work: ``activations`` of the largest pass."""
    arrays: Parts
    """What was asked of NumPy: weights, both copies; K and V of all cells, written to or not; repeated buffers."""
    generated: tuple[tuple[int, ...], ...]
    """Tokens that each slot generated: the same for every cache and number of copies."""

    @property
    def runtime(self) -> int:
        """Resident bytes of Python, NumPy and the engine's code."""
        return self._at("runtime").resident

    @property
    def measured(self) -> Parts:
        """Resident bytes at the peak of the run, but for the runtime.

        Weights: what was added by loading, and the pages of a mapped file however late they were read. Cache: what was
        added by making the engine, and since, and stayed. Work: repeated buffers, and what the passes took and gave
        back.
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
        """The most bytes that were ever resident, while loading or running."""
        return max(reading.peak for reading in self.readings)

    @property
    def ratio(self) -> float:
        """Measured over needed, the runtime left out of both."""
        return self.measured.total / self.needed.total

    @property
    def ratio_with_runtime(self) -> float:
        """Everything that is resident, the runtime too, over what is needed without one."""
        return self.resident / self.needed.total

    def _at(self, stage: str) -> MemoryReading:
        return next(reading for reading in self.readings if reading.stage == stage)


def activations(shape: ModelShape, tokens: int, outputs: int, seen: int) -> int:
    """Bytes of a pass's activations in float32, each kind once, as all layers can share them.

    For each token: the residual stream and its norm (d_model each), queries, keys and values, what heads attend to, the
    gate, what passes it and their product (d_ff each), and the scores of all heads against ``seen`` cells. For each of
    the ``outputs``: logits.
    """
    s = shape
    heads = (2 * s.n_heads + 2 * s.n_kv_heads) * s.d_head
    return 4 * (tokens * (2 * s.d_model + heads + 3 * s.d_ff + s.n_heads * seen) + outputs * s.vocabulary)


def estimate(setup: SetUp, shape: ModelShape) -> int:
    """Bytes that a set-up will take at most, more or less; to tell beforehand whether it can be held."""
    s = shape
    layer = s.d_model * (2 * s.n_heads + 2 * s.n_kv_heads) * s.d_head + 3 * s.d_model * s.d_ff
    numbers = s.n_layers * layer + 2 * s.vocabulary * s.d_model
    path = gguf_path(setup.model)
    if setup.weights == "mapped" and path is not None:
        weights = path.stat().st_size
    else:
        weights = numbers * ({"f32": 4, "f16": 2, "int8": 1, "mapped": 0}[setup.weights] + 4 * setup.twice)
    # A cache in huge pages may become resident whole.
    whole = setup.cache == "reserved" or setup.huge_pages
    held = setup.slots * (setup.context if whole else 2 * setup.tokens)
    work = activations(s, setup.n_ubatch, setup.slots, min(setup.context, BLOCK))
    if setup.buffers == "repeated":
        work += s.n_layers * activations(s, setup.n_ubatch, 0, setup.context)
    return int(weights + held * s.cell_bytes(setup.type_k, setup.type_v) + 2 * work)


def available_bytes() -> int:
    """Memory that this machine can give without swapping. Raises ``UserError`` where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise UserError("memory is read from /proc, which this system does not have; Linux does") from None


def measure(setup: SetUp) -> Footprint:
    """Build the set-up in a new process, serve with it, and return what it took. Raises ``UserError``."""
    available_bytes()
    # One BLAS thread: each further one would have buffers of its own.
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    huge = {"NUMPY_MADVISE_HUGEPAGE": str(int(setup.huge_pages))}
    answer = ask_isolated(
        "real_engine.footprint",
        asdict(setup),
        f"model {setup.model}: the process that was to be measured failed",
        killed=", as Linux does where memory runs out",
        environment=one | huge,
    )
    return Footprint(
        readings=tuple(MemoryReading(**reading) for reading in answer["readings"]),
        needed=Parts(**answer["needed"]),
        arrays=Parts(**answer["arrays"]),
        generated=tuple(map(tuple, answer["generated"])),
    )


class _MemoryGauge:
    """Reads the memory of this process, stage by stage."""

    def __init__(self, model_file: Path | None):
        self.readings: list[MemoryReading] = []
        self._file = None if model_file is None else str(model_file.resolve())
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """None where the C library is not glibc."""

    def read(self, stage: str) -> None:
        """The stage has ended; what it took and gave back shows in its peak alone."""
        peak = _field("/proc/self/status", "VmHWM")
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        resident = _field("/proc/self/smaps_rollup", "Rss")
        anonymous = _field("/proc/self/smaps_rollup", "Anonymous")
        # Linux counts the peak roughly, by some pages.
        self.readings.append(MemoryReading(stage, resident, anonymous, self._mapped(), max(peak, resident)))
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        except OSError:
            return  # Then peaks are those since the process began.

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
    """A size that Linux gives in kB, in bytes."""
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(f"{name}:"):
                    return 1024 * int(line.split()[1])
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    raise UserError(f"{path} does not say {name}; Linux 4.14 or newer does")


class _MeasuredEngine(Engine):
    """An engine that keeps the size of its largest pass."""

    needed = 0
    """Bytes of ``activations``."""

    def run(self, tokens: Any, batch: MicroBatch) -> FloatArray:
        """As ever."""
        longest = max(len(view.cells) for view in batch.views)
        taken = activations(self.model.shape, len(tokens), len(batch.chunks), min(longest, BLOCK))
        self.needed = max(self.needed, taken)
        return super().run(tokens, batch)


def _build(setup: SetUp) -> Footprint:
    """Build the set-up in this process, and serve with it."""
    path = gguf_path(setup.model)
    if path is not None:
        # What reading a file needs belongs to the runtime.
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
    """Run everything once on a miniature: code and tables that are read at their first use belong to the runtime."""
    # The BLAS makes its buffers at the first large product.
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
    """A policy and the engine over its cells.

    There are cells for all slots: as many as are reserved; for growing, powers of two, and room for all
    to be doubled in one step; for paged, just enough blocks, and the one that is never handed out.
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
    )
    policy = available()[_POLICIES[setup.cache]](config)
    groups, kernel = policy.groups, policy.kernel
    return policy, _MeasuredEngine(model, groups, kernel, setup.seed, type_k=setup.type_k, type_v=setup.type_v)


def _serve(setup: SetUp, policy: Policy, engine: Engine) -> tuple[tuple[int, ...], ...]:
    """All prompts, then decodes; what each slot said."""
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


def _main() -> int:
    """Answer on the output, whatever happens."""
    asked = json.load(sys.stdin)
    try:
        setup = SetUp(**asked)
        if not setup.huge_pages:
            # NumPy has been told by its environment; this is for systems that use huge pages unasked.
            prctl = getattr(ctypes.CDLL(None), "prctl", None)
            if prctl is not None:
                prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
        print(json.dumps(asdict(_build(setup))))
    except UserError as e:
        print(json.dumps({"error": str(e)}))
        return 2
    except MemoryError:
        print(json.dumps({"error": f"model {asked['model']}: the set-up does not fit into this machine's memory"}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
