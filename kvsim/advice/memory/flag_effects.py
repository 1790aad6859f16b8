"""What each option of an engine does to memory, in a phrase, with bytes where the model's shape gives them.

Sizes are those of the memory plan (``kvsim.costs.memory_plan``); those of buffers are its estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvsim.advice.memory.engine_flags import Flags
from kvsim.costs.memory_plan import Plan
from kvsim.costs.memory_settings import Engine
from kvsim.costs.vllm_memory import BlockGroups
from kvsim.errors import counted
from kvsim.model.storage_types import format_size

MIB = 1 << 20


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


Teller = Callable[[str, Plan], tuple[str, int | None]]
"""Makes the phrase and the bytes of an option's value, given the plan that it belongs to."""


def effects(engine: Engine, flags: Flags, made: Plan) -> tuple[Effect, ...]:
    """What each option does; ``made`` is the plan of the same settings under the engine."""
    tell = _VLLM if engine == "vllm" else _LLAMACPP
    return tuple(Effect(name, value, *tell[name](value, made)) for name, value in flags)


def kv_bytes(made: Plan) -> int:
    """Bytes of llama.cpp's K and V."""
    return sum(part.bytes for part in made.parts if part.engine == "llamacpp" and part.kind == "kv")


def cell_size(made: Plan) -> str:
    """The size of a token's K and V, in words."""
    return format_size(made.shape.cell_bytes(made.settings.type_k, made.settings.type_v))


def flash_attention(made: Plan, *, on: bool) -> tuple[str, int]:
    """What llama.cpp's flash attention does to its buffers, and the bytes that it saves, or that it would save."""
    totals = [
        replace(made, settings=replace(made.settings, flash_attn=flash)).total("llamacpp") for flash in (False, True)
    ]
    saved = totals[0] - totals[1]
    what = "scores are never stored" if on else "scores are stored"
    if not saved:
        return f"{what}; buffers for other work are larger here", 0
    return f"{what}: ≈ {format_size(saved)} {'less' if on else 'more'} of compute buffers", -saved if on else saved


def _buffers(made: Plan, *names: str) -> int:
    return sum(part.bytes for part in made.parts if part.kind == "buffers" and (not names or part.name in names))


def _nothing(does: str) -> Teller:
    """A teller of an option that takes no memory of its own."""
    return lambda value, made: (f"no memory: {does}", 0)


# llama-server


def _context(value: str, made: Plan) -> tuple[str, int]:
    size, windows = kv_bytes(made), ""
    if len([part for part in made.parts if part.kind == "kv"]) > 1 and not made.settings.swa_full:
        windows = ", fewer in layers with a window"
    return f"KV cache {format_size(size)}: {int(value):,} cells of {cell_size(made)}{windows}", size


def _slots(value: str, made: Plan) -> tuple[str, int]:
    n, size = int(value), _buffers(made, "output buffer")
    if made.settings.kv_unified:
        share = f"{counted(n, 'slot')} in the same cells"
    else:
        share = f"{counted(n, 'slot')} of {made.settings.ctx:,} cells each, a cache for each"
    return f"{share}; output buffer {format_size(size)}", size


def _micro_batch(value: str, made: Plan) -> tuple[str, int]:
    size = _buffers(made, "compute buffer", "input buffer")
    return f"compute buffers ≈ {format_size(size)}, for {int(value):,} tokens in a pass", size


def _flash(value: str, made: Plan) -> tuple[str, int]:
    return flash_attention(made, on=value != "off")


def _whole_windows(value: str, made: Plan) -> tuple[str, int]:
    small = replace(made, settings=replace(made.settings, swa_full=False))
    more = kv_bytes(made) - kv_bytes(small)
    return f"layers with a window keep every token: {format_size(more)} more", more


def _keys(value: str, made: Plan) -> tuple[str, None]:
    return f"K: {format_size(made.shape.key_bytes(value))} of each cell", None


def _values(value: str, made: Plan) -> tuple[str, None]:
    return f"V: {format_size(made.shape.value_bytes(value))} of each cell", None


def _host_cache(value: str, made: Plan) -> tuple[str, int | None]:
    limit = int(value)
    if limit < 0:
        return "host memory without a limit in bytes: what slots held, as many tokens as the context has", None
    if limit == 0:
        return "no host memory: what a slot held is computed again once its cells were taken", 0
    size = limit * MIB
    tokens = size // max(made.shape.cell_bytes(made.settings.type_k, made.settings.type_v), 1)
    return f"up to {format_size(size)} of host memory besides: what slots held, about {tokens:,} tokens", size


_LLAMACPP: Mapping[str, Teller] = {
    "--ctx-size": _context,
    "--parallel": _slots,
    "--kv-unified": _nothing("one cache for all slots, of which a request may take any share"),
    "--batch-size": _nothing("the most tokens in a step, which go in passes of --ubatch-size"),
    "--ubatch-size": _micro_batch,
    "--cache-type-k": _keys,
    "--cache-type-v": _values,
    "--flash-attn": _flash,
    "--swa-full": _whole_windows,
    "--defrag-thold": _nothing("cells are moved together when more than this share of them is holes"),
    "--cache-ram": _host_cache,
    "--cache-reuse": _nothing("runs of at least so many tokens behind the common prefix are moved and used again"),
    "--slot-prompt-similarity": _nothing("a prompt goes to the slot that holds more than this share of it"),
    "--keep": _nothing("the first tokens that a context shift keeps"),
    "--no-cache-idle-slots": _nothing("what idle slots hold stays in its cells until they are needed"),
    "--no-cache-prompt": _nothing("nothing that a slot held is used again"),
    "--context-shift": _nothing("a full slot discards tokens and goes on"),
}


# vllm serve


def _block_groups(made: Plan) -> BlockGroups:
    return BlockGroups.of(made.shape, made.settings)


def _longest(value: str, made: Plan) -> tuple[str, int]:
    groups = BlockGroups.of(made.shape, replace(made.settings, ctx=int(value)))
    size = groups.block_bytes * sum(t * n for t, n in zip(groups.tables, groups.blocks, strict=True))
    return f"a request takes up to {format_size(size)} of K and V", size


def _step_tokens(value: str, made: Plan) -> tuple[str, int]:
    # vLLM sets aside what a step of this size takes before it counts blocks.
    size = _buffers(replace(made, settings=replace(made.settings, batch=int(value))))
    return f"activations and buffers ≈ {format_size(size)}, for {int(value):,} tokens in a step", size


def _block_size(value: str, made: Plan) -> tuple[str, int]:
    size = _block_groups(made).block_bytes
    return f"blocks of {int(value)} tokens, {format_size(size)} each; a request wastes less than one", size


def _blocks(value: str, made: Plan) -> tuple[str, int]:
    each = _block_groups(made).block_bytes
    return f"KV cache {format_size(int(value) * each)}: {int(value):,} blocks of {format_size(each)}", int(value) * each


def _utilization(value: str, made: Plan) -> tuple[str, int | None]:
    share = f"{float(value):.0%} of the GPU's memory"
    if made.memory is None:
        return f"{share}: what weights and activations leave of it is KV cache", None
    size = int(made.memory * float(value))
    return f"{share}, {format_size(size)}: what weights and activations leave of it is KV cache", size


def _ranks(value: str, made: Plan) -> tuple[str, None]:
    if value == "1":
        return "one GPU has all of the weights and of the KV cache", None
    return f"each of {value} GPUs has 1/{value} of the weights and of the KV cache", None


_VLLM: Mapping[str, Teller] = {
    "--max-model-len": _longest,
    "--max-num-seqs": _nothing("the most requests at once, which share the blocks"),
    "--max-num-batched-tokens": _step_tokens,
    "--block-size": _block_size,
    "--num-gpu-blocks-override": _blocks,
    "--gpu-memory-utilization": _utilization,
    "--tensor-parallel-size": _ranks,
    "--kv-cache-dtype": lambda value, made: (f"K and V: {cell_size(made)} a token", None),
    "--enable-prefix-caching": _nothing("full blocks stay until others need them"),
    "--no-enable-prefix-caching": _nothing("blocks are free as soon as their request has ended"),
    "--enable-chunked-prefill": _nothing("a long prompt is computed in several steps"),
    "--no-enable-chunked-prefill": _nothing("a prompt is computed in one step, which has to have room for it"),
}
