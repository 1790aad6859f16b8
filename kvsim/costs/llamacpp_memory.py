"""The memory that llama.cpp allocates for a model, part by part.

Sources. ``llama-context.cpp`` (padding of the context; PR 17046), ``llama-kv-cache.cpp`` (a tensor of K and one of V
for each layer, ``n_embd_gqa * kv_size * n_stream``; of latents no V), ``llama-kv-cache-iswa.cpp`` (cache of a window;
PR 13194).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvsim.costs.drafter import HEAD, drafter_parts
from kvsim.costs.memory_settings import CONTEXT_UNIT, MOST_PARALLEL, Part, PlanSettings, weight_parts
from kvsim.model.cache_groups import CacheGroup, MemoryShape, State
from kvsim.model.storage_types import CACHE_TYPES, GGUF_ONLY, LLAMACPP_CACHE_TYPES, SERVED_TYPES, format_size, row_bytes

if TYPE_CHECKING:
    from kvsim.costs.cpu_layers import OnCpu


def _cells(group: CacheGroup, shape: MemoryShape, s: PlanSettings) -> tuple[int, int]:
    """Cells per stream, and number of streams, of llama.cpp's cache for a group of layers.

    The context is rounded up to 256 cells (``llama-context.cpp``), in total if unified, else per sequence; layers with
    a window have ``pad(min(context, window * sequences + ubatch), 256)`` (``llama-kv-cache-iswa.cpp``).
    """
    streams = 1 if s.kv_unified else s.parallel
    cells = _ceil(s.ctx * s.parallel // streams, CONTEXT_UNIT["llamacpp"])
    if group.kind in ("window", "chunked") and group.window is not None and shape.llamacpp_windows and not s.swa_full:
        cells = _ceil(min(cells, group.window * (s.parallel // streams) + s.ubatch), CONTEXT_UNIT["llamacpp"])
    return cells, streams


def parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """Everything that llama.cpp keeps in memory; sizes in bytes."""
    found, on_cpu = weight_parts("llamacpp", shape, s), _on_cpu(shape, s)
    if on_cpu is not None:
        found = [_on_device(found, on_cpu, shape, s)]
    for group, title in zip(shape.groups, shape.titles, strict=True):
        if group.state is not None:
            n = s.parallel * (1 + s.draft_tokens if s.drafter == HEAD and shape.takes_back else 1)
            found.append(_states(group, group.state, title, n, 0.0 if on_cpu is None else on_cpu.layers))
            continue
        cells, streams = _cells(group, shape, s)
        row = row_bytes(s.type_k, group.k_row) + row_bytes(s.type_v, group.v_row)
        detail = f"{cells:,} cells" + (f" x {streams} streams" if streams > 1 else "")
        size = group.layers * cells * streams * row
        if on_cpu is not None and on_cpu.layers:
            size, title = round((1 - on_cpu.layers) * size), f"{title}, those on the device"
        found.append(Part("llamacpp", "kv", f"KV, {title}", size, False, detail))
    # One row of logits for each sequence (output_reserve in llama-context.cpp).
    found.append(Part("llamacpp", "buffers", "output buffer", 4 * s.parallel * shape.vocabulary, False))
    compute, inputs = _buffers(shape, s)
    found.append(Part("llamacpp", "buffers", "compute buffer", compute, True, f"{s.ubatch} tokens in a pass"))
    found.append(Part("llamacpp", "buffers", "input buffer", inputs, True, "embeddings and masks"))
    if on_cpu is not None and (copied := _copied(shape, s, on_cpu)):
        found.append(
            Part("llamacpp", "buffers", "copied weights", copied, True, "the largest matrix of the CPU's layers")
        )
    return found + drafter_parts(parts, shape, s)


def _states(group: CacheGroup, state: State, title: str, n: int, on_cpu: float) -> Part:
    """The states of some layers, in f32: one for each sequence that there may be, and where they can be taken back for
    each token that a head drafts for it (``llama-memory-recurrent.cpp``)."""
    one = 4 * group.layers * sum(state.numbers())
    detail = f"{n} x a state of {format_size(one)}, whatever the length"
    size = round((1 - on_cpu) * one * n)
    return Part("llamacpp", "kv", f"state, {title}{', those on the device' if on_cpu else ''}", size, False, detail)


def _on_cpu(shape: MemoryShape, s: PlanSettings) -> OnCpu | None:
    """What the settings leave on the CPU; None if they do not speak of it."""
    if s.n_gpu_layers is None and not s.n_cpu_moe:
        return None
    from kvsim.costs.cpu_layers import OnCpu  # It loads NumPy.

    return OnCpu.of(shape, s.n_gpu_layers, s.n_cpu_moe)


def _on_device(weights: list[Part], on_cpu: OnCpu, shape: MemoryShape, s: PlanSettings) -> Part:
    """The weights on the device: those of its layers and the head, of which one that is the table of embeddings is a
    copy. That table is always in the computer's memory (``dev_input`` in ``llama-model.cpp``)."""
    kind = s.weights or shape.default_type
    computed = sum(part.bytes(kind) for part in (shape.matrices, shape.experts, shape.head))
    size = min(computed, sum(part.bytes for part in weights)) - on_cpu.weight_bytes(shape, kind)
    layers = shape.n_layers - round(on_cpu.layers * shape.n_layers)
    title = f"weights, {layers} of {shape.n_layers} layers{'' if on_cpu.head else ' and the head'}"
    return Part("llamacpp", "weights", title, size, True)


def _copied(shape: MemoryShape, s: PlanSettings, on_cpu: OnCpu) -> int:
    """Bytes of the largest matrix that passes copy to the device: one of the feed-forward network, of all experts."""
    kind = s.weights or shape.default_type
    if on_cpu.experts:
        return shape.experts.bytes(kind) // (3 * shape.n_layers)
    share = shape.d_model * shape.d_ff / shape.matrices.numbers if shape.matrices.numbers else 0.0
    return round(share * shape.matrices.bytes(kind)) if on_cpu.layers else 0


def _buffers(shape: MemoryShape, s: PlanSettings) -> tuple[int, int]:
    """Estimated bytes of the compute buffer and of the inputs, in f32 as ggml computes.

    The phases of the graph reuse the same memory, so the largest phase counts. Logits: a row of logits and one of
    activations per token of a pass (512 tokens: Llama 3 8B 258.50 MiB, gpt-oss-20b 398.38 MiB, as logged). Attention
    without flash attention: scores and mask for all cells, and four rows of activations (Llama 3 8B, 8,192 cells:
    560.00 MiB, as logged). Feed-forward: two rows between the matrices, four of activations. Inputs: embeddings, and a
    mask per cache (24.01 MiB in the same log, with 0.01 for positions).
    """
    cells = [_cells(group, shape, s)[0] for group in shape.cells]
    logits = s.ubatch * (shape.vocabulary + shape.d_model)
    mask = s.ubatch * sum({group.kind: n for group, n in zip(shape.cells, cells, strict=True)}.values())
    scores = 0 if s.flash_attn else s.ubatch * shape.n_heads * max(cells, default=0)
    attention = scores + mask + 4 * s.ubatch * shape.d_model
    feed_forward = s.ubatch * (2 * shape.d_ff + 4 * shape.d_model)
    return 4 * max(logits, attention, feed_forward), 4 * (s.ubatch * shape.d_model + mask)


def why_not(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why llama.cpp would refuse the settings; None if it would not."""
    if s.tensor_parallel > 1:
        return "--tp: the memory of llama.cpp is planned for one device"
    if s.parallel > MOST_PARALLEL["llamacpp"]:
        return f"--parallel: llama.cpp has {MOST_PARALLEL['llamacpp']} sequences at most (LLAMA_MAX_SEQ)"
    if s.weights in SERVED_TYPES and s.weights != "mxfp4":
        return f"--weights: llama.cpp has no {s.weights}; it has f16, bf16, f32, mxfp4, {', '.join(sorted(GGUF_ONLY))}"
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in LLAMACPP_CACHE_TYPES:
            return f"{option}: llama.cpp has no {kind}; it has {', '.join(LLAMACPP_CACHE_TYPES)}"
    if not s.flash_attn and CACHE_TYPES[s.type_v][0] > 1:
        return f"--cache-type-v: llama.cpp stores V as {s.type_v} only with flash attention"
    for group in shape.cells:
        for option, kind, head in (
            ("--cache-type-k", s.type_k, group.k_head),
            ("--cache-type-v", s.type_v, group.v_head),
        ):
            if head % CACHE_TYPES[kind][0]:
                return f"{option}: {kind} has blocks of {CACHE_TYPES[kind][0]}, which do not divide heads of {head}"
    return None


def notes(shape: MemoryShape, s: PlanSettings) -> list[str]:
    """Behaviour of llama.cpp with this model that may be unexpected."""
    found = []
    if _on_cpu(shape, s) is not None:
        whole = parts(shape, replace(s, n_gpu_layers=None, n_cpu_moe=0))
        weights, kv = (
            sum(p.bytes for p in whole if p.kind == kind) - sum(p.bytes for p in parts(shape, s) if p.kind == kind)
            for kind in ("weights", "kv")
        )
        found.append(
            f"llama.cpp: in the computer's memory ≈ {format_size(weights)} of weights, the table of embeddings "
            f"included, and {format_size(kv)} of K and V"
        )
    if any(group.kind in ("window", "chunked") for group in shape.groups) and not shape.llamacpp_windows:
        found.append("llama.cpp runs this architecture without its window: those layers keep all tokens")
    if shape.states:
        one = sum(4 * group.layers * sum(group.state.numbers()) for group in shape.states if group.state)
        found.append(
            f"llama.cpp: a state of {format_size(one)} a sequence, whatever its length, in f32; it keeps one for each "
            "of -np from the start"
        )
    return found


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit
