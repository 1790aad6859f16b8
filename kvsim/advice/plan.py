"""How much memory a model needs, part by part, as allocated by llama.cpp and vLLM, and what fits into a given memory.

Sizes of K and V are exact, by the engines' own formulas. Buffers are estimates and marked as such, because their size
depends on the device and on the layout of its graph. The engine itself, its libraries and CUDA graphs are not counted.

Sources. llama.cpp: ``llama-context.cpp`` (padding of the context; PR 17046), ``llama-kv-cache.cpp`` (a tensor of K and
one of V for each layer, ``n_embd_gqa * kv_size * n_stream``; of latents no V), ``llama-kv-cache-iswa.cpp`` (cache of a
window; PR 13194). vLLM 0.33: ``v1/kv_cache_interface.py`` (bytes of a page, blocks of a request),
``v1/core/kv_cache_utils.py`` (groups of the hybrid KV cache manager, number of blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvsim.errors import UserError, counted, no_such
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import AttentionGroup, MemoryShape, memory_shape
from kvsim.model.storage_types import (
    CACHE_TYPES,
    LLAMACPP_CACHE_TYPES,
    VLLM_CACHE_TYPES,
    WEIGHT_TYPES,
    binary_reading,
    decimal_hint,
    is_mixture,
    parse_size,
    row_bytes,
    weight_bytes,
)

if TYPE_CHECKING:
    import pandas as pd

Engine = Literal["llamacpp", "vllm"]
PLAN_ENGINES: tuple[Engine, ...] = ("llamacpp", "vllm")
ENGINE_TITLES: dict[str, str] = {"llamacpp": "llama.cpp", "vllm": "vLLM"}
"""The engines' own names, for people."""

_LLAMACPP = PRESENT["llama.cpp"]
"""Where both engines have a setting, their defaults are the same."""
CONTEXT_UNIT: dict[Engine, int] = {"llamacpp": 256, "vllm": 1}
"""Tokens of which a context is a multiple; llama.cpp rounds a cache up."""
_PAD = CONTEXT_UNIT["llamacpp"]
MOST_CONTEXT = 1 << 30
"""Longest context tried; a model that keeps only windows has no largest context."""
_LARGE_DEVICE, _LARGE_DEVICE_BATCH = 70 << 30, 8192
"""Bytes from which ``vllm serve`` takes more tokens in a step, and how many (``EngineArgs.get_batch_defaults``)."""
_LEAST_MEMORY = 1 << 20
"""Bytes below which the unit was probably forgotten."""
_MOST_PARALLEL: dict[Engine, int] = {"llamacpp": 256, "vllm": 1 << 16}
"""Maximum number of concurrent sequences: llama.cpp's ``LLAMA_MAX_SEQ``; vLLM has no such bound."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of the engines that determine their memory."""

    ctx: int = 8192
    """Maximum tokens per sequence: llama.cpp's ``-c`` is this times ``parallel``, vLLM's ``--max-model-len`` is
    this."""
    parallel: int = 1
    """Number of concurrent sequences of that length: llama.cpp's ``-np``, vLLM's ``--max-num-seqs``."""
    type_k: str = "f16"
    type_v: str = "f16"
    ubatch: int = _LLAMACPP.n_ubatch
    """llama.cpp: maximum tokens in a forward pass."""
    batch: int = _LLAMACPP.n_batch
    """Maximum tokens in a batch; vLLM's ``--max-num-batched-tokens``."""
    kv_unified: bool = _LLAMACPP.unified
    """llama.cpp: keep all sequences in one stream of cells instead of one stream each."""
    swa_full: bool = False
    """llama.cpp: keep all tokens in layers with a sliding window, too."""
    flash_attn: bool = _LLAMACPP.flash_attention
    """llama.cpp: use flash attention, which never stores the scores."""
    block_size: int = PRESENT["vLLM"].block_size
    """vLLM: tokens in a block."""
    gpu_memory_utilization: float = 0.9
    """vLLM: share of the memory that it may use."""
    weights: str | None = None
    """Storage type of the weights, if a config.json does not state it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One item that takes memory."""

    engine: Engine
    kind: Literal["weights", "kv", "buffers"]
    name: str
    bytes: int
    estimate: bool
    detail: str = ""
    """Its size in the engine's own terms."""


@dataclass(frozen=True)
class Plan:
    """The memory that a model needs with given settings."""

    shape: MemoryShape
    settings: PlanSettings
    engines: tuple[Engine, ...]
    notes: tuple[str, ...] = ()
    """Behaviour of an engine that may be unexpected."""
    memory: int | None = None
    """Available bytes, if given."""

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All items that take memory, engine by engine."""
        return tuple(part for engine in self.engines for part in _PARTS[engine](self.shape, self.settings))

    def defaults(self, engine: Engine) -> str:
        """The settings that are those of the engine's present version, in words, in one line."""
        version, s = PRESENT["vLLM" if engine == "vllm" else "llama.cpp"], self.settings
        if engine == "vllm":
            at_default = {"n_batch": s.batch == version.n_batch, "block_size": s.block_size == version.block_size}
        else:
            at_default = {
                "flash_attention": s.flash_attn == version.flash_attention,
                "unified": s.kv_unified == version.unified,
                "batch": (s.batch, s.ubatch) == (version.n_batch, version.n_ubatch),
            }
        words = [version.defaults[setting] for setting, holds in at_default.items() if holds]
        return f"defaults of {version}: {', '.join(words)}" if words else ""

    def total(self, engine: Engine) -> int:
        """Return the total bytes of an engine's parts."""
        return sum(part.bytes for part in self.parts if part.engine == engine)

    @property
    def table(self) -> pd.DataFrame:
        """One row per part: ``engine``, ``kind``, ``name``, ``bytes``, ``estimate``, ``detail``."""
        import pandas as pd

        return pd.DataFrame([asdict(part) for part in self.parts])

    def fits(self, engine: Engine, memory: int | str) -> bool:
        """Whether all parts fit into a memory, given in bytes or as a size such as 24GB; for vLLM, into its share."""
        parts = _PARTS[engine](self.shape, self.settings)
        return sum(part.bytes for part in parts) <= self.budget(engine, _bytes(memory))

    def budget(self, engine: Engine, memory: int) -> int:
        """Return how many of the given bytes the engine may use."""
        return int(memory * self.settings.gpu_memory_utilization) if engine == "vllm" else memory

    def vllm_blocks(self, memory: int) -> int:
        """Return the number of blocks vLLM allocates in a memory, null block included; 0 if the weights do not fit."""
        left = self.budget("vllm", memory) - sum(
            part.bytes for part in _vllm_parts(self.shape, self.settings) if part.kind != "kv"
        )
        return max(0, left) // _VllmGroups.of(self.shape, self.settings).block_bytes

    def largest_context(self, memory: int | str, engine: Engine = "llamacpp") -> int:
        """Return the longest context, in tokens, for each of the ``parallel`` sequences; 0 if nothing fits.

        ``memory``: bytes, or a size such as 24GB. The search goes up to the context that the model states; the need
        never falls as the context grows. ``MOST_CONTEXT`` if the model states none and every context fits.
        """
        size = _bytes(memory)
        return _largest(
            lambda n: replace(self, settings=replace(self.settings, ctx=n)).fits(engine, size),
            min(self.shape.context or MOST_CONTEXT, MOST_CONTEXT),
        )

    def largest_parallel(self, memory: int | str, engine: Engine = "llamacpp") -> int:
        """Return the largest number of concurrent sequences of ``ctx`` tokens; 0 if none fits.

        ``memory``: bytes, or a size such as 24GB.
        """
        size = _bytes(memory)
        return _largest(
            lambda n: replace(self, settings=replace(self.settings, parallel=n)).fits(engine, size),
            _MOST_PARALLEL[engine],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; sizes in bytes."""
        engines: dict[str, Any] = {}
        for engine in self.engines:
            parts = [
                {key: value for key, value in asdict(p).items() if key != "engine"}
                for p in self.parts
                if p.engine == engine
            ]
            engines[engine] = {"parts": parts, "total": self.total(engine), "defaults": self.defaults(engine)}
            if self.memory is not None:
                engines[engine] |= {
                    "budget": self.budget(engine, self.memory),
                    "fits": self.fits(engine, self.memory),
                    "largest_context": self.largest_context(self.memory, engine),
                    "largest_parallel": self.largest_parallel(self.memory, engine),
                }
                if engine == "vllm":
                    engines[engine]["blocks"] = self.vllm_blocks(self.memory)
        return {
            "model": self.shape.name,
            "source": self.shape.source,
            "parameters": self.shape.n_parameters,
            "context": self.shape.context,
            "groups": [asdict(group) for group in self.shape.groups],
            "settings": asdict(self.settings),
            "memory": self.memory,
            "engines": engines,
            "notes": list(self.notes),
        }


def plan(
    model: str | MemoryShape,
    *,
    ctx: int = 8192,
    parallel: int = 1,
    type_k: str = "f16",
    type_v: str = "f16",
    engine: str | None = None,
    ubatch: int = _LLAMACPP.n_ubatch,
    batch: int = _LLAMACPP.n_batch,
    kv_unified: bool = _LLAMACPP.unified,
    swa_full: bool = False,
    flash_attn: bool = _LLAMACPP.flash_attention,
    block_size: int = PRESENT["vLLM"].block_size,
    gpu_memory_utilization: float = 0.9,
    weights: str | None = None,
    memory: int | str | None = None,
) -> Plan:
    """Plan the memory of a model, given as a shipped name, a config.json, or a GGUF file.

    ``ctx``: maximum tokens of each of ``parallel`` sequences. ``engine``: ``llamacpp`` or ``vllm``; by default both.
    ``memory``: bytes, or a text such as 8GiB. The other arguments are those of ``PlanSettings``. Raises ``UserError``.
    """
    if engine is not None and engine not in PLAN_ENGINES:
        raise UserError(f"--engine: {no_such('engine', engine, PLAN_ENGINES)}")
    settings = PlanSettings(
        ctx,
        parallel,
        type_k.lower(),
        type_v.lower(),
        min(ubatch, batch),  # As in llama.cpp.
        batch,
        kv_unified,
        swa_full,
        flash_attn,
        block_size,
        gpu_memory_utilization,
        weights and weights.lower(),
    )
    _check_settings(settings, ubatch)
    available = None if memory is None else _bytes(memory)
    if available is not None and available < _LEAST_MEMORY:
        raise UserError(f"--memory is {available} bytes; at least 1 MiB is expected, such as 8GB, 8GiB or 512MiB")
    shape = memory_shape(model) if isinstance(model, str) else model
    _check_weights(shape, settings.weights)
    reasons = {name: _WHY_NOT[name](shape, settings) for name in PLAN_ENGINES}
    if engine is not None and (reason := reasons[engine]):
        raise UserError(reason)
    chosen = tuple(name for name in PLAN_ENGINES if name == (engine or name) and not reasons[name])
    if not chosen:
        raise UserError("; ".join(filter(None, reasons.values())))
    notes = [f"left out: {reason}" for name, reason in reasons.items() if reason and engine is None]
    made = Plan(shape, settings, chosen, (*notes, *_notes(shape, settings, chosen)), available)
    return replace(made, notes=(*made.notes, *_unit_note(made, memory)))


def _unit_note(made: Plan, memory: int | str | None) -> list[str]:
    """What a memory in GB is in GiB, and whether that decides."""
    if not isinstance(memory, str) or not (hint := decimal_hint(memory)):
        return []
    meant = binary_reading(memory)
    decides = any(made.fits(engine, meant) and not made.fits(engine, memory) for engine in made.engines)
    return [hint + (f", into which this fits: --memory {meant}" if decides else "")]


def default_batch(engine: Engine, memory: int | None) -> int:
    """Tokens in a step that an engine takes by default: ``vllm serve`` takes more on a device of 70 GiB or more."""
    if engine == "vllm" and memory is not None and memory >= _LARGE_DEVICE:
        return _LARGE_DEVICE_BATCH
    return _LLAMACPP.n_batch if engine == "llamacpp" else PRESENT["vLLM"].n_batch


def _check_settings(s: PlanSettings, ubatch: int) -> None:
    """Refuse values out of range and unknown types; ``ubatch`` as given, before it was limited by the batch."""
    for name, value, most in (
        ("--ctx", s.ctx, MOST_CONTEXT),
        ("--parallel", s.parallel, max(_MOST_PARALLEL.values())),
        ("--ubatch", ubatch, 1 << 20),
        ("--batch", s.batch, 1 << 20),
        ("--block-size", s.block_size, 1 << 16),
    ):
        if not 1 <= value <= most:
            raise UserError(f"{name} is {value}; a whole number from 1 to {most} is accepted")
    if not 0 < s.gpu_memory_utilization <= 1:
        raise UserError(
            f"--gpu-memory-utilization is {s.gpu_memory_utilization}; a number above 0 and up to 1 is accepted"
        )
    for name, kind, known in (
        ("--cache-type-k", s.type_k, tuple(CACHE_TYPES)),
        ("--cache-type-v", s.type_v, tuple(CACHE_TYPES)),
        ("--weights", s.weights or "f16", WEIGHT_TYPES),
    ):
        if kind not in known:
            raise UserError(f"{name}: {no_such('type', kind, known)}")


def _check_weights(shape: MemoryShape, weights: str | None) -> None:
    """Refuse a type of weights that contradicts the model's file, and its absence where the file does not tell."""
    if shape.stored and weights is not None:
        raise UserError(f"{shape.source}: --weights: the file states the types of its weights; leave the option out")
    if not shape.stored and weights is None and shape.default_type not in WEIGHT_TYPES:
        raise UserError(
            f"{shape.source}: {shape.default_type} is not known here; give --weights, one of {', '.join(WEIGHT_TYPES)}"
        )


def _bytes(memory: int | str) -> int:
    return parse_size(memory) if isinstance(memory, str) else memory


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 if 1 does not. Whatever is below a number that fits, fits too."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _weight_parts(engine: Engine, shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """One part per storage type; exact if a file states its tensors.

    Otherwise all weights are assumed to have one type. This is an estimate, since a GGUF file stores vectors (norms,
    biases) as f32 in any case, and the bits per weight of a mixture are an average.
    """
    parts = [Part(engine, "weights", f"weights, {kind}", size, False) for kind, size in shape.stored.items()]
    by_type: dict[str, int] = {}
    for kind, numbers in shape.parameters.items():
        # A type that is given applies to all weights.
        kind = s.weights or (shape.default_type if kind == "default" else kind)
        by_type[kind] = by_type.get(kind, 0) + numbers
    for kind, numbers in by_type.items():
        exact = kind == "f32" or (kind in ("f16", "bf16") and engine == "vllm")
        detail = f"{numbers:,} numbers"
        parts.append(Part(engine, "weights", f"weights, {kind}", weight_bytes(kind, numbers), not exact, detail))
    return parts


# llama.cpp


def _cells(group: AttentionGroup, shape: MemoryShape, s: PlanSettings) -> tuple[int, int]:
    """Cells per stream, and number of streams, of llama.cpp's cache for a group of layers.

    The context is rounded up to 256 cells (``llama-context.cpp``), in total if unified, else per sequence; layers with
    a window have ``pad(min(context, window * sequences + ubatch), 256)`` (``llama-kv-cache-iswa.cpp``).
    """
    streams = 1 if s.kv_unified else s.parallel
    cells = _ceil(s.ctx * s.parallel // streams, _PAD)
    if group.kind == "window" and group.window is not None and shape.llamacpp_windows and not s.swa_full:
        cells = _ceil(min(cells, group.window * (s.parallel // streams) + s.ubatch), _PAD)
    return cells, streams


def _llamacpp_parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    parts = _weight_parts("llamacpp", shape, s)
    for group, title in zip(shape.groups, shape.titles, strict=True):
        cells, streams = _cells(group, shape, s)
        row = row_bytes(s.type_k, group.k_row) + row_bytes(s.type_v, group.v_row)
        detail = f"{cells:,} cells" + (f" x {streams} streams" if streams > 1 else "")
        size = group.layers * cells * streams * row
        parts.append(Part("llamacpp", "kv", f"KV, {title}", size, False, detail))
    # One row of logits for each sequence (output_reserve in llama-context.cpp).
    parts.append(Part("llamacpp", "buffers", "output buffer", 4 * s.parallel * shape.vocabulary, False))
    compute, inputs = _llamacpp_buffers(shape, s)
    parts.append(Part("llamacpp", "buffers", "compute buffer", compute, True, f"{s.ubatch} tokens in a pass"))
    parts.append(Part("llamacpp", "buffers", "input buffer", inputs, True, "embeddings and masks"))
    return parts


def _llamacpp_buffers(shape: MemoryShape, s: PlanSettings) -> tuple[int, int]:
    """Estimated bytes of the compute buffer and of the inputs, in f32 as ggml computes.

    The phases of the graph reuse the same memory, so the largest phase counts. Logits: a row of logits and one of
    activations per token of a pass (512 tokens: Llama 3 8B 258.50 MiB, gpt-oss-20b 398.38 MiB, as logged). Attention
    without flash attention: scores and mask for all cells, and four rows of activations (Llama 3 8B, 8,192 cells:
    560.00 MiB, as logged). Feed-forward: two rows between the matrices, four of activations. Inputs: embeddings, and a
    mask per cache (24.01 MiB in the same log, with 0.01 for positions).
    """
    cells = [_cells(group, shape, s)[0] for group in shape.groups]
    logits = s.ubatch * (shape.vocabulary + shape.d_model)
    mask = s.ubatch * sum({group.kind: n for group, n in zip(shape.groups, cells, strict=True)}.values())
    scores = 0 if s.flash_attn else s.ubatch * shape.n_heads * max(cells)
    attention = scores + mask + 4 * s.ubatch * shape.d_model
    feed_forward = s.ubatch * (2 * shape.d_ff + 4 * shape.d_model)
    return 4 * max(logits, attention, feed_forward), 4 * (s.ubatch * shape.d_model + mask)


def _why_not_llamacpp(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why llama.cpp would refuse the settings; None if it would not."""
    if s.parallel > _MOST_PARALLEL["llamacpp"]:
        return f"--parallel: llama.cpp has {_MOST_PARALLEL['llamacpp']} sequences at most (LLAMA_MAX_SEQ)"
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in LLAMACPP_CACHE_TYPES:
            return f"{option}: llama.cpp has no {kind}; it has {', '.join(LLAMACPP_CACHE_TYPES)}"
    if not s.flash_attn and CACHE_TYPES[s.type_v][0] > 1:
        return f"--cache-type-v: llama.cpp stores V as {s.type_v} only with flash attention"
    for group in shape.groups:
        for option, kind, head in (
            ("--cache-type-k", s.type_k, group.k_head),
            ("--cache-type-v", s.type_v, group.v_head),
        ):
            if head % CACHE_TYPES[kind][0]:
                return f"{option}: {kind} has blocks of {CACHE_TYPES[kind][0]}, which do not divide heads of {head}"
    return None


# vLLM


@dataclass(frozen=True, slots=True)
class _VllmGroups:
    """How vLLM's hybrid KV cache manager groups layers so that blocks of all groups have the same size."""

    block_bytes: int
    """Bytes of a block: one page for each layer of a group, padding layers included."""
    tables: tuple[int, ...]
    """Number of block tables for each of the model's groups, each for one group of layers."""
    blocks: tuple[int, ...]
    """Maximum number of blocks per table for a request of ``ctx`` tokens, for each of the model's groups."""

    @staticmethod
    def of(shape: MemoryShape, s: PlanSettings) -> _VllmGroups:
        """Group the layers as ``_get_kv_cache_groups_uniform_page_size`` and ``max_memory_usage_bytes`` do."""
        layers = [group.layers for group in shape.groups]
        size = max(layers) if max(layers) < 1.5 * min(layers) else min(layers)
        return _VllmGroups(
            _page_bytes(shape.groups[0], s) * size,
            tuple(-(-n // size) for n in layers),
            tuple(_request_blocks(group, s) for group in shape.groups),
        )


def _page_bytes(group: AttentionGroup, s: PlanSettings) -> int:
    """Bytes of a block in one layer (``AttentionSpec.page_size_bytes``)."""
    return s.block_size * (row_bytes(s.type_k, group.k_row) + row_bytes(s.type_k, group.v_row))


def _request_blocks(group: AttentionGroup, s: PlanSettings) -> int:
    """Maximum number of blocks in a table of one request (``max_memory_usage_bytes`` of its spec).

    With a window: blocks for ``window - 1`` tokens plus a batch, and one more, since a window may begin within a block.
    """
    if group.kind != "window" or group.window is None:
        return -(-s.ctx // s.block_size)
    return -(-min(group.window - 1 + s.batch, s.ctx) // s.block_size) + 1


def _vllm_parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    parts = _weight_parts("vllm", shape, s)
    groups = _VllmGroups.of(shape, s)
    for title, tables, blocks in zip(shape.titles, groups.tables, groups.blocks, strict=True):
        n = s.parallel * tables * blocks
        detail = f"{n:,} blocks of {groups.block_bytes:,} bytes"
        parts.append(Part("vllm", "kv", f"KV, {title}", n * groups.block_bytes, False, detail))
    parts.append(Part("vllm", "kv", "KV, the null block", groups.block_bytes, False))
    detail = f"{s.batch:,} tokens in a pass"
    parts.append(Part("vllm", "buffers", "activation peak", _vllm_peak(shape, s), True, detail))
    return parts


def _vllm_peak(shape: MemoryShape, s: PlanSettings) -> int:
    """Estimated bytes of activations at the peak of vLLM's profile run, with 2 bytes per number.

    For each token of the largest batch: both inputs of the gate and its output, and the residual, its norm and the
    layer's input; or, if that is more, the logits of all sequences in 2 and in 4 bytes. Llama 3.1 8B with batches of
    20,000 and 29,000 tokens took 2.07 and 2.99 GiB (vLLM issue 10517); the estimates are 2.06 and 2.99.
    """
    return max(2 * s.batch * 3 * (shape.d_ff + shape.d_model), 6 * s.parallel * shape.vocabulary)


def _why_not_vllm(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why vLLM would refuse the settings; None if it would not."""
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in VLLM_CACHE_TYPES:
            return f"{option}: vLLM has no {kind} cache; it has {', '.join(VLLM_CACHE_TYPES)}"
    if s.type_k != s.type_v:
        return f"--cache-type-v: vLLM stores K and V in one type, not in {s.type_k} and {s.type_v}"
    if len({_page_bytes(group, s) for group in shape.groups}) > 1:
        return f"{shape.source}: layers of different widths cannot be planned for vLLM"
    return None


_PARTS: dict[Engine, Callable[[MemoryShape, PlanSettings], list[Part]]] = {
    "llamacpp": _llamacpp_parts,
    "vllm": _vllm_parts,
}
_WHY_NOT: dict[Engine, Callable[[MemoryShape, PlanSettings], str | None]] = {
    "llamacpp": _why_not_llamacpp,
    "vllm": _why_not_vllm,
}


def _notes(shape: MemoryShape, s: PlanSettings, engines: tuple[Engine, ...]) -> list[str]:
    notes = []
    windows = [group for group in shape.groups if group.kind == "window"]
    if "llamacpp" in engines and windows and not shape.llamacpp_windows:
        notes.append("llama.cpp runs this architecture without its window: those layers keep all tokens")
    if "vllm" in engines and len(shape.groups) > 1:
        groups = _VllmGroups.of(shape, s)
        size = max(1, groups.block_bytes // _page_bytes(shape.groups[0], s))
        padding = sum(groups.tables) * size - sum(group.layers for group in shape.groups)
        padded = f", with {counted(padding, 'layer')} of padding" if padding else ""
        notes.append(
            f"vLLM's hybrid KV cache manager divides the layers into {sum(groups.tables)} groups of {size}{padded}; "
            "each has its own block table, and all take blocks from one pool"
        )
    if shape.context is not None and s.ctx > shape.context:
        notes.append(f"the model states a context of {shape.context:,} tokens, less than --ctx {s.ctx:,}")
    if s.weights is not None and is_mixture(s.weights):
        notes.append(f"{s.weights}: bits per weight as measured with llama-quantize on Llama 3.1 8B")
    return notes
