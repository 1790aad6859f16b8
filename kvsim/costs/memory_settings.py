"""Settings of engines that determine their memory, and the parts that memory is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvsim.errors import UserError, no_such
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_versions import PRESENT
from kvsim.model.gguf_quantization import gguf_types
from kvsim.model.storage_types import (
    CACHE_TYPES,
    GGUF_BLOCKS,
    GGUF_ONLY,
    MAMBA_CACHE_TYPES,
    SERVED_TYPES,
    WEIGHT_TYPES,
    WHOLE_TYPES,
    weight_bytes,
)

Engine = Literal["llamacpp", "vllm"]
PLAN_ENGINES: tuple[Engine, ...] = ("llamacpp", "vllm")
ENGINE_TITLES: dict[str, str] = {"llamacpp": "llama.cpp", "vllm": "vLLM"}
"""The engines' own names, for people."""

_LLAMACPP = PRESENT["llama.cpp"]
"""Where both engines have a setting, their defaults are the same."""
CONTEXT_UNIT: dict[Engine, int] = {"llamacpp": 256, "vllm": 1}
"""Tokens of which a context is a multiple; llama.cpp rounds a cache up."""
MOST_CONTEXT = 1 << 30
"""Longest context tried; a model that keeps only windows has no largest context."""
MOST_PARALLEL: dict[Engine, int] = {"llamacpp": 256, "vllm": 1 << 16}
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
    gpu_memory_utilization: float = 0.92
    """vLLM: share of the memory that it may use; the default is its own."""
    weights: str | None = None
    """Storage type of the weights, if a config.json does not state it."""
    tensor_parallel: int = 1
    """vLLM: number of GPUs over which each layer is divided (``--tensor-parallel-size``); memory is that of one."""
    vllm_version: str = PRESENT["vLLM"].version
    """The version whose profile of memory is followed."""
    n_gpu_layers: int | None = None
    """llama.cpp: layers on the device, the head counting as one; the others are in the computer's memory. None: all."""
    n_cpu_moe: int = 0
    """llama.cpp: layers whose experts are in the computer's memory."""
    first_start: bool = False
    """vLLM: nothing is compiled yet, so that compiling counts as activations."""
    expert_parallel: int = 1
    """vLLM: servers that divide the experts, and nothing else; memory is that of one."""
    prefix_caching: bool = True
    """vLLM: whether full blocks are kept for others, for which a request holds a state more."""
    mamba_cache_dtype: str = "auto"
    """vLLM: type of states, a key of ``MAMBA_CACHE_TYPES``."""
    mamba_ssm_cache_dtype: str = "auto"
    """vLLM: type of recurrent states, if not that of the others."""
    drafter: str = ""
    """What drafts beside the model: another model, or ``head`` for one layer more, as EAGLE and MTP have."""
    draft_tokens: int = 3
    """llama.cpp: how many a ``head`` drafts (``--spec-draft-n-max``): a sequence may have a state more for each."""


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
    low: int | None = None
    """Fewest bytes, where a range is known."""
    high: int | None = None
    """Most bytes, where a range is known."""
    source: str = ""
    """Where an estimate comes from."""

    @property
    def of_drafter(self) -> bool:
        """Whether it belongs to what drafts beside the model."""
        return self.name.startswith("drafter: ")


def check_settings(s: PlanSettings, ubatch: int) -> None:
    """Refuse values out of range and unknown types; ``ubatch`` as given, before it was limited by the batch."""
    for name, value, most in (
        ("--ctx", s.ctx, MOST_CONTEXT),
        ("--parallel", s.parallel, max(MOST_PARALLEL.values())),
        ("--ubatch", ubatch, 1 << 20),
        ("--batch", s.batch, 1 << 20),
        ("--block-size", s.block_size, 1 << 16),
        ("--tp", s.tensor_parallel, 1 << 10),
        ("--ngl", s.n_gpu_layers or 0, 1 << 20),
        ("--n-cpu-moe", s.n_cpu_moe, 1 << 20),
    ):
        least = 0 if name in ("--ngl", "--n-cpu-moe") else 1
        if not least <= value <= most:
            raise UserError(f"{name} is {value}; a whole number from {least} to {most} is accepted")
    if not 0 < s.gpu_memory_utilization <= 1:
        raise UserError(
            f"--gpu-memory-utilization is {s.gpu_memory_utilization}; a number above 0 and up to 1 is accepted"
        )
    for name, kind, known in (
        ("--cache-type-k", s.type_k, tuple(CACHE_TYPES)),
        ("--cache-type-v", s.type_v, tuple(CACHE_TYPES)),
        ("--weights", s.weights or "f16", WEIGHT_TYPES),
        ("--mamba-cache-dtype", s.mamba_cache_dtype, tuple(MAMBA_CACHE_TYPES)),
        ("--mamba-ssm-cache-dtype", s.mamba_ssm_cache_dtype, tuple(MAMBA_CACHE_TYPES)),
    ):
        if kind not in known:
            raise UserError(f"{name}: {no_such('type', kind, known)}")


def check_weights(shape: MemoryShape, weights: str | None) -> None:
    """Refuse a type of weights that contradicts the model's file, and its absence where the file does not tell."""
    if shape.stored and weights is not None:
        raise UserError(f"{shape.source}: --weights: the file states the types of its weights; leave the option out")
    if not shape.stored and weights is None and shape.default_type not in WEIGHT_TYPES:
        raise UserError(
            f"{shape.source}: {shape.default_type} is not known here; give --weights, one of {', '.join(WEIGHT_TYPES)}"
        )


def weight_parts(engine: Engine, shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """A part for each storage type, exact where a file states its tensors or llama-quantize would choose their types.

    Otherwise all weights are assumed to have one type, and embeddings and head that of the model.
    """
    ranks = s.tensor_parallel if engine == "vllm" else 1
    if quantised := gguf_weights(engine, shape, s):
        asked, sizes = s.weights or shape.default_type, dict[str, int]()
        kept = {tensor.stored for tensor in shape.tensors}
        for stored, (_, size) in quantised.items():
            own = stored if stored in kept else asked
            sizes[own] = sizes.get(own, 0) + size
        return [Part(engine, "weights", f"weights, {own}", size // ranks, False) for own, size in sizes.items()]
    parts = [Part(engine, "weights", f"weights, {kind}", size // ranks, False) for kind, size in shape.stored.items()]
    by_type: dict[str, int] = {}
    share, experts = (s.expert_parallel if engine == "vllm" else 1), shape.experts
    if share > 1:
        experts = replace(experts, numbers=experts.numbers // share, kept=experts.kept // share)
    for kind, numbers in shape.parameters.items():
        if kind == experts.kind:
            numbers -= shape.experts.numbers - experts.numbers
        # A type that is given applies to all weights, in engines for GPUs to all but embeddings and head, and to no
        # others where the model itself is published so.
        own = s.weights or (shape.default_type if kind == "default" else kind)
        if kind == "default" and engine == "vllm" and own in SERVED_TYPES:
            narrowed = (shape.matrices, experts)
            layers = 0 if own in shape.parameters else sum(p.numbers - p.kept for p in narrowed if p.kind == "default")
            by_type["bf16"] = by_type.get("bf16", 0) + numbers - layers
            numbers = layers
        by_type[own] = by_type.get(own, 0) + numbers
    for kind, numbers in by_type.items():
        exact = kind in WHOLE_TYPES
        size = weight_bytes(kind, numbers) // ranks
        parts += (
            [Part(engine, "weights", f"weights, {kind}", size, not exact, f"{numbers:,} numbers")] if numbers else []
        )
    return parts


def gguf_weights(engine: Engine, shape: MemoryShape, s: PlanSettings) -> dict[str, tuple[int, int]]:
    """Matrices and bytes by storage type of the weights as a GGUF file has them; empty if they come from none, or from
    one whose own types are known."""
    kind = s.weights or shape.default_type
    loaded = kind in GGUF_ONLY if engine == "vllm" else kind in (*GGUF_ONLY, *WHOLE_TYPES, "mxfp4")
    if not loaded or (s.weights is None and set(shape.parameters) - {"default", *GGUF_BLOCKS}):
        return {}
    return gguf_types(shape, kind) if shape.tensors else {}
