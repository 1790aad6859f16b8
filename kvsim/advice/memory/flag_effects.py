"""What each option of an engine does to memory, in a phrase, with bytes where the model's shape gives them.

Sizes are those of the memory plan (``kvsim.costs.memory_plan``); those of buffers are its estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvsim.advice.memory.engine_flags import Flags
from kvsim.costs.memory_plan import Plan
from kvsim.costs.memory_settings import Engine
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.errors import counted
from kvsim.model.storage_types import format_size

MIB = 1 << 20

_WITHOUT_MEMORY = {
    "--spec-draft-n-max": "so many tokens are drafted at most",
    "--kv-unified": "one cache for all slots, of which a request may take any share",
    "--batch-size": "the most tokens in a step, computed --ubatch-size at a time",
    "--threads": "threads that compute; the times were measured with so many",
    "--defrag-thold": "cells are moved together when more than this share of them is holes",
    "--cache-reuse": "runs of at least so many tokens behind the common prefix are moved and used again",
    "--checkpoint-min-step": "tokens between two checkpoints of a slot",
    "--slot-prompt-similarity": "a prompt goes to the slot that holds more than this share of it",
    "--keep": "the first tokens that a context shift keeps",
    "--no-cache-idle-slots": "what idle slots hold stays in its cells until they are needed",
    "--no-cache-prompt": "nothing that a slot held is used again",
    "--context-shift": "a full slot discards tokens and goes on",
    "--max-num-seqs": "the most requests at once, which share the blocks",
    "--enable-prefix-caching": "full blocks stay until others need them",
    "--no-enable-prefix-caching": "blocks are free as soon as their request has ended",
    "--enable-chunked-prefill": "a long prompt is computed in several steps",
    "--no-enable-chunked-prefill": "a prompt is computed in one step, which must have room for it",
}
"""What options do that take no memory of their own."""


class Effect(NamedTuple):
    """What an option, or a variable of the environment, does to memory."""

    name: str
    value: str
    """As it is typed; empty for a switch."""
    does: str
    """A phrase."""
    bytes: int | None = None
    """What it takes, or saves if negative; None where that is unknown, or belongs to no single option."""

    @property
    def typed(self) -> str:
        """The option, or the variable, as it is typed."""
        return f"{self.name} {self.value}".strip() if self.name.startswith("-") else f"{self.name}={self.value}"

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; bytes None where unknown."""
        return {"option": self.name, "value": self.value or True, "does": self.does, "bytes": self.bytes}


def effect_lines(effects: Sequence[Effect]) -> list[str]:
    """A line for each, the phrases below each other."""
    width = max((len(each.typed) for each in effects), default=0)
    return [f"{each.typed:{width}}  {each.does}" for each in effects]


def effects(engine: Engine, flags: Flags, made: Plan) -> tuple[Effect, ...]:
    """What each option does; ``made`` is the plan of the same settings under the engine."""
    tell = _vllm if engine == "vllm" else _llamacpp
    return tuple(
        Effect(name, value, f"no memory: {_WITHOUT_MEMORY[name]}", 0)
        if name in _WITHOUT_MEMORY
        else Effect(name, value, *tell(name, value, made))
        for name, value in flags
    )


def kv_bytes(made: Plan) -> int:
    """Bytes of llama.cpp's K and V, without a drafter's."""
    own = (part for part in made.parts if part.engine == "llamacpp" and not part.of_drafter)
    return sum(part.bytes for part in own if part.kind == "kv")


def _drafter(value: str, made: Plan) -> tuple[str, int | None]:
    """What a drafter takes; vLLM keeps its K and V in the model's blocks. ``value``: of the option that names it."""
    if "ngram" in value:
        return "no memory: n-grams of the text so far are drafted", 0
    if not made.settings.drafter:
        return "the drafter's memory is not counted, since no model is named (speculation.model)", None
    size = sum(part.bytes for part in made.parts if part.of_drafter)
    return f"the drafter takes ≈ {format_size(size)}, and cells of its own", size


def cell_size(made: Plan) -> str:
    """The size of a token's K and V, in words."""
    return format_size(made.shape.cell_bytes(made.settings.type_k, made.settings.type_v))


def flash_attention(made: Plan, *, on: bool) -> tuple[str, int]:
    """What llama.cpp's flash attention does to its buffers, and the bytes that it saves, or that it would save."""
    totals = [_with(made, flash_attn=flash).total("llamacpp") for flash in (False, True)]
    saved = totals[0] - totals[1]
    what = "scores are never stored" if on else "scores are stored"
    if not saved:
        return f"{what}; buffers for other work are larger here", 0
    return f"{what}: ≈ {format_size(saved)} {'less' if on else 'more'} of compute buffers", -saved if on else saved


def _with(made: Plan, **changes: Any) -> Plan:
    """The plan with other settings."""
    return replace(made, settings=replace(made.settings, **changes))


def _buffers(made: Plan, *names: str) -> int:
    return sum(part.bytes for part in made.parts if part.kind == "buffers" and (not names or part.name in names))


def _llamacpp(name: str, value: str, made: Plan) -> tuple[str, int | None]:
    """The phrase and the bytes of an option of ``llama-server``."""
    settings, shape = made.settings, made.shape
    match name:
        case "--ctx-size":
            size = kv_bytes(made)
            several = len([part for part in made.parts if part.kind == "kv"]) > 1
            windows = ", fewer in layers with a window" if several and not settings.swa_full else ""
            return f"KV cache {format_size(size)}: {int(value):,} cells of {cell_size(made)}{windows}", size
        case "--parallel":
            slots, size = counted(int(value), "slot"), _buffers(made, "output buffer")
            own = f"{slots} of {settings.ctx:,} cells each, a cache for each"
            share = f"{slots} in the same cells" if settings.kv_unified else own
            return f"{share}; output buffer {format_size(size)}", size
        case "--ubatch-size":
            size = _buffers(made, "compute buffer", "input buffer")
            return f"compute buffers ≈ {format_size(size)}, for {int(value):,} tokens in a pass", size
        case "--flash-attn":
            return flash_attention(made, on=value != "off")
        case "--n-gpu-layers" | "--n-cpu-moe":
            layers = name == "--n-gpu-layers"
            whole = _with(made, n_gpu_layers=None) if layers else _with(made, n_cpu_moe=0)
            less = whole.total("llamacpp") - made.total("llamacpp")
            what = "other layers" if layers else "the experts of the first layers"
            return f"{what} in the computer's memory: ≈ {format_size(less)} less", -less
        case "--spec-type":
            return _drafter(value, made)
        case "--swa-full":
            more = kv_bytes(made) - kv_bytes(_with(made, swa_full=False))
            return f"layers with a window keep every token: {format_size(more)} more", more
        case "--cache-type-k":
            return f"K: {format_size(shape.key_bytes(value))} of each cell", None
        case "--cache-type-v":
            return f"V: {format_size(shape.value_bytes(value))} of each cell", None
        case "--cache-ram" if int(value) < 0:
            return "host memory without a limit in bytes: what slots held, as many tokens as the context has", None
        case "--cache-ram" if int(value) == 0:
            return "no host memory: what a slot held is computed again once its cells were taken", 0
        case "--cache-ram":
            size = int(value) * MIB
            tokens = size // max(shape.cell_bytes(settings.type_k, settings.type_v), 1)
            return f"up to {format_size(size)} of host memory besides: what slots held, about {tokens:,} tokens", size
    raise KeyError(name)


def _vllm(name: str, value: str, made: Plan) -> tuple[str, int | None]:
    """The phrase and the bytes of an option of ``vllm serve``."""
    block = BlockGroups.of(made.shape, made.settings).block_bytes
    match name:
        case "--max-model-len":
            groups = BlockGroups.of(made.shape, replace(made.settings, ctx=int(value)))
            size = groups.block_bytes * sum(t * n for t, n in zip(groups.tables, groups.blocks, strict=True))
            return f"a request takes up to {format_size(size)} of K and V", size
        case "--max-num-batched-tokens":
            # vLLM sets aside what a step of this size takes before it counts blocks.
            size = _buffers(_with(made, batch=int(value)))
            return f"activations and buffers ≈ {format_size(size)}, for {int(value):,} tokens in a step", size
        case "--speculative-config":
            return _drafter(value, made)
        case "--block-size":
            return f"blocks of {int(value)} tokens, {format_size(block)} each; a request wastes less than one", block
        case "--num-gpu-blocks-override":
            size = int(value) * block
            return f"KV cache {format_size(size)}: {int(value):,} blocks of {format_size(block)}", size
        case "--gpu-memory-utilization":
            share = f"{float(value):.0%} of the GPU's memory"
            rest = "what weights and activations leave of it is KV cache"
            if made.memory is None:
                return f"{share}: {rest}", None
            size = int(made.memory * float(value))
            return f"{share}, {format_size(size)}: {rest}", size
        case "--tensor-parallel-size" if value == "1":
            return "one GPU has all of the weights and of the KV cache", None
        case "--tensor-parallel-size":
            return f"each of {value} GPUs has 1/{value} of the weights and of the KV cache", None
        case "--kv-cache-dtype":
            return f"K and V: {cell_size(made)} a token", None
    raise KeyError(name)
