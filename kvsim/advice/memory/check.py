"""What a command line of a server will do: what fits, what each user gets, what is misleading in it, what to change.

Sources. llama.cpp of November 2026: ``tools/server/server-context.cpp`` (a slot's context is capped at the model's),
``src/llama-context.cpp`` (a quantised V needs flash attention), ``ggml/src/ggml-cuda/fattn.cu`` (kernels for K and V of
one type, f16, bf16, q8_0 or q4_0; others are computed by the CPU; pull requests 27150 and 28456). vLLM:
``v1/core/kv_cache_utils.py`` (no start unless one request of full length fits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsim.advice.memory.command_line import PROGRAM_TITLES, ServerLine, read_command, titled_model, whole
from kvsim.advice.memory.engine_flags import padded
from kvsim.advice.memory.flag_effects import MIB
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import Plan, largest, plan
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.errors import UserError, counted
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import CACHE_TYPES, WEIGHT_TYPES, format_size, parse_size
from kvsim.scenario.serving_sections import ServerSection

_CUDA_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types of K and V for which CUDA has attention in llama.cpp as it is built by default."""


@dataclass(frozen=True)
class Check:
    """What a command line will do."""

    line: ServerLine
    made: Plan
    gives: tuple[str, ...]
    """What fits, and what each user gets, in sentences."""
    misleading: tuple[str, ...]
    changes: tuple[str, ...]
    assumed: tuple[str, ...]
    starts: bool

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; sizes in bytes."""
        return {
            "program": self.line.program,
            "flags": dict(self.line.flags),
            "variables": dict(self.line.variables),
            "starts": self.starts,
            "gives": list(self.gives),
            "misleading": list(self.misleading),
            "changes": list(self.changes),
            "assumed": list(self.assumed),
            "plan": self.made.to_dict(),
        }


def check(
    command: str,
    *,
    model: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    memory: int | str | None = None,
    reserve: int | str | None = None,
    users: int | None = None,
    tokens: int | None = None,
) -> Check:
    """Say what a command line of llama-server, ``vllm serve`` or ``ollama serve`` will do.

    ``model``, ``weights``: where the command does not say them; ``device``, ``memory``, ``reserve``: as for
    ``kvsim.plan``. ``users``: how many there are. ``tokens``: prompt and answer of their longest request together.
    Raises ``UserError``.
    """
    line = read_command(command)
    if device is None and memory is None:
        raise UserError(
            "--device or --memory: how much memory is there? A GPU such as rtx4090, or a size such as 24GiB"
        )
    shape, kind, assumed = _model(line, model, weights)
    size = device_named(device).memory_bytes if device else parse_size(memory) if isinstance(memory, str) else memory
    asked = {"weights": kind, **line.plan_arguments(shape.context, size, device)}
    fault = ""
    if not asked.get("flash_attn", True) and CACHE_TYPES.get(asked.get("type_v", "f16"), (1, 2))[0] > 1:
        fault = f"it does not start: a V in {asked['type_v']} needs flash attention, which is off"
        asked["flash_attn"] = True
    if (asked.get("n_gpu_layers") or 0) > shape.n_layers:
        del asked["n_gpu_layers"]  # All of them.
    made = plan(shape, memory=memory, device=device, reserve=reserve, **asked)
    if _fits_itself(line):
        made = _fitted(made)
    of = _Vllm if line.engine == "vllm" else _LlamaServer
    found = of(line, made, users, tokens, fault)
    return Check(
        line,
        made,
        tuple(found.gives()),
        (*found.misleading(), *line.remarks),
        tuple(found.changes()),
        assumed,
        found.starts,
    )


def _fits_itself(line: ServerLine) -> bool:
    """Whether llama-server is free to choose a context that fits (``--fit``, which is on by default)."""
    typed = line.flags.get("--ctx-size", "0") != "0" or line.flags.get("--fit", "on") == "off"
    return line.program == "llamacpp" and not typed


def _fitted(made: Plan) -> Plan:
    """The plan with as much of the model's context as fits, 4,096 tokens at least (``common/fit.cpp``)."""
    longest = min(made.settings.ctx, made.largest_context(made.memory or 0))
    least = -(-4096 // made.settings.parallel)
    return dataclasses.replace(made, settings=dataclasses.replace(made.settings, ctx=max(longest, least)))


def _model(line: ServerLine, model: str | None, weights: str | None) -> tuple[MemoryShape, str | None, tuple[str, ...]]:
    """The model, the type of its weights, and what was assumed of them. Raises ``UserError``."""
    title = model or line.title
    if title is None:
        raise UserError(
            f"--model: {PROGRAM_TITLES[line.program]} is not told one there; a name of kvsim plan --list, or a file"
        )
    named, kind = titled_model(title)
    shape = memory_shape(named or title)
    if kind is None and line.engine == "llamacpp" and not shape.stored:
        kind = "q4_k_m"
    if weights or kind is None or kind in WEIGHT_TYPES:
        said = [] if weights or kind is None else [f"weights in {kind}"]
    else:
        said, kind = [f"{kind} is not known here: weights in q4_k_m"], "q4_k_m"
    taken = [] if named == title else [f"{title} is taken for {shape.name}"]
    told = ("; ".join([*taken, *said]) + " (--model, --weights)",) if taken or said else ()
    return shape, weights or kind, told


@dataclass(frozen=True)
class _LlamaServer:
    line: ServerLine
    made: Plan
    users: int | None
    tokens: int | None
    fault: str

    @property
    def memory(self) -> int:
        return self.made.memory or 0

    @property
    def fits(self) -> bool:
        return self.made.fits("llamacpp", self.memory)

    @property
    def starts(self) -> bool:
        """Whether it starts: without llama.cpp's margin it still does."""
        need = self.made.total("llamacpp")
        return not self.fault and need <= self.made.budget("llamacpp", self.memory) + self.made.reserve.margin

    @property
    def slot(self) -> int:
        """Tokens that a request can have."""
        s = self.made.settings
        cells = padded(s.ctx * s.parallel) if s.kv_unified else s.ctx
        return min(cells, self.made.shape.context or cells)

    def gives(self) -> Iterator[str]:
        made, s = self.made, self.made.settings
        if self.fault:
            yield self.fault
        need, budget = made.total("llamacpp"), made.budget("llamacpp", self.memory)
        of = f"{format_size(need)} of the {format_size(budget)} that are left of {format_size(self.memory)}"
        left = budget + made.reserve.margin - need
        if self.fits:
            yield f"its memory fits: {of} ({made.reserve.words('llamacpp') or 'nothing'})"
        elif left >= 0:
            yield f"its memory leaves {format_size(left)} free, less than llama.cpp's own margin of 1 GiB: {of}"
        else:
            yield f"its memory does not fit: {of}; llama.cpp leaves layers to the CPU, or fails"
        many = counted(s.parallel, "slot")
        share = f"of one cache of {padded(s.ctx * s.parallel):,}" if s.kv_unified else "of its own"
        yield f"{many}; a request, prompt and answer together, has up to {self.slot:,} tokens {share}"
        if _fits_itself(self.line):
            yield f"without -c it takes what fits of the model's {made.shape.context or 4096:,} tokens (--fit)"
        if self.users is not None and self.users > s.parallel:
            yield f"{self.users:,} users, {counted(s.parallel, 'slot')}: whoever finds none free waits"
        if s.kv_unified and s.parallel > 1:
            each = padded(s.ctx * s.parallel) // min(self.users or s.parallel, s.parallel)
            yield f"if all slots are busy, each has {each:,} tokens on average"
        if self.tokens is not None and self.tokens > self.slot:
            yield f"a request of {self.tokens:,} tokens does not fit: HTTP 400 for its prompt, or an answer cut short"

    def misleading(self) -> Iterator[str]:
        made, s, flags = self.made, self.made.settings, self.line.flags
        context = made.shape.context
        if self.line.program == "ollama":
            if s.parallel > 1:
                yield (
                    f"OLLAMA_CONTEXT_LENGTH is for each request: with OLLAMA_NUM_PARALLEL={s.parallel} the cache has "
                    f"{s.ctx * s.parallel:,} cells, {s.parallel} times as much memory"
                )
        elif s.parallel > 1 and not s.kv_unified:
            typed = flags.get("--ctx-size", "0")
            what = f"-c {typed}" if typed != "0" else f"without -c the model's {context or 4096:,}"
            yield f"{what} is the total of {s.parallel} slots, not what each has: {s.ctx:,} tokens"
        if context is not None and s.ctx > context:
            yield f"{s.ctx:,} tokens for a slot: the model has {context:,}, where it is capped; the memory is taken"
        if s.kv_unified and self.tokens is not None and self.tokens <= self.slot:
            cells, busy = padded(s.ctx * s.parallel), min(self.users or s.parallel, s.parallel)
            if cells < busy * self.tokens:
                yield (
                    f"one cache of {cells:,} cells holds {counted(cells // self.tokens, 'request')} of {self.tokens:,} "
                    f"tokens, not {busy}: once it is full, llama-server ends all that run (context exceeded)"
                )
        yield from self._types()
        if "--ubatch-size" in flags and "--batch-size" in flags and s.ubatch < int(flags["--ubatch-size"]):
            yield f"-ub {flags['--ubatch-size']} is more than -b {s.batch}, which limits it"
        yield from self._host_cache()

    def _types(self) -> Iterator[str]:
        s = self.made.settings
        if self.fault:
            yield f"a quantised V ({s.type_v}) without flash attention: llama.cpp refuses it"
        kind = None if self.made.device is None else device_named(self.made.device).kind
        if kind not in (None, "consumer", "datacentre") or not s.flash_attn:
            return
        if s.type_k != s.type_v or s.type_k not in _CUDA_TYPES:
            yield (
                f"K in {s.type_k} and V in {s.type_v}: without GGML_CUDA_FA_ALL_QUANTS at its build llama.cpp has no "
                "flash attention on CUDA for this pair; it runs on the CPU, many times slower, or not at all"
            )

    def _host_cache(self) -> Iterator[str]:
        shape, s = self.made.shape, self.made.settings
        limit = whole(self.line.flags, "--cache-ram", ServerSection().cache_ram)
        held = min(self.tokens or self.slot, self.slot)
        size = held * shape.cell_bytes(s.type_k, s.type_v)
        if 0 < limit * MIB < size:
            yield (
                f"--cache-ram {limit} cannot hold one prompt of {held:,} tokens ({format_size(size)}): what a slot "
                "loses is computed again"
            )

    def changes(self) -> Iterator[str]:
        made, s = self.made, self.made.settings
        ollama = self.line.program == "ollama"
        if self.fault:
            yield "OLLAMA_FLASH_ATTENTION=1" if ollama else "-fa on"
        if not self.fits:
            longest = made.largest_context(self.memory) // 256 * 256
            if longest:
                told = f"OLLAMA_CONTEXT_LENGTH={longest}" if ollama else f"-c {longest * s.parallel}"
                yield f"{told}: {counted(s.parallel, 'slot')} of {longest:,} tokens fit"
            if s.type_k == "f16":
                narrow = dataclasses.replace(
                    made, settings=dataclasses.replace(s, type_k="q8_0", type_v="q8_0", flash_attn=True)
                )
                if narrow.fits("llamacpp", self.memory):
                    told = "OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1" if ollama else "-ctk q8_0 -ctv q8_0"
                    yield f"{told}: K and V take half, and all of it fits"
            if not longest:
                yield f"a smaller model or narrower weights: {made.what_would_fit('llamacpp') or 'not one token fits'}"
        if s.type_k != s.type_v and not self.fault:
            yield f"-ctk {s.type_k} -ctv {s.type_k}: both alike"
        if self.tokens is not None and self.tokens > self.slot:
            yield from self._room(ollama)
        if self.users is not None and self.users != s.parallel:
            yield from self._slots_for(self.users, ollama)

    def _slots_for(self, users: int, ollama: bool) -> Iterator[str]:
        made, s = self.made, self.made.settings
        wanted = padded(max(s.ctx, self.tokens or 1))
        other = dataclasses.replace(made, settings=dataclasses.replace(s, parallel=users, kv_unified=False))
        tokens = min(wanted, other.largest_context(self.memory) // 256 * 256)
        if tokens < (self.tokens or 1):
            need = f" of {self.tokens:,} tokens" if self.tokens else ""
            yield f"{users:,} requests{need} at once do not fit: a smaller model, narrower weights, or narrower K and V"
        else:
            told = f"OLLAMA_NUM_PARALLEL={users} OLLAMA_CONTEXT_LENGTH={tokens}"
            told = told if ollama else f"-np {users} -c {users * tokens}"
            yield f"{told}: a slot of {tokens:,} tokens for each of {counted(users, 'user')}"

    def _room(self, ollama: bool) -> Iterator[str]:
        made, s, room = self.made, self.made.settings, padded(self.tokens or 1)
        if made.shape.context is not None and (self.tokens or 1) > made.shape.context:
            yield f"another model: {made.shape.name} has {made.shape.context:,} tokens"
            return
        told = f"OLLAMA_CONTEXT_LENGTH={room}" if ollama else f"-c {room * s.parallel}"
        holds = dataclasses.replace(made, settings=dataclasses.replace(s, ctx=room)).fits("llamacpp", self.memory)
        yield f"{told}: {room:,} tokens for each slot, which {'fits' if holds else 'does not fit with as many slots'}"


class _Vllm(_LlamaServer):
    @property
    def blocks(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return max(self.made.vllm_blocks(self.memory) - 1, 0)

    @property
    def at_once(self) -> float:
        """Requests of full length that the blocks hold."""
        return self.blocks / self._blocks_of(self.made.settings.ctx)

    def _blocks_of(self, tokens: int) -> int:
        """Blocks of a request of that length."""
        groups = BlockGroups.of(self.made.shape, dataclasses.replace(self.made.settings, ctx=tokens))
        return sum(tables * blocks for tables, blocks in zip(groups.tables, groups.blocks, strict=True))

    @property
    def starts(self) -> bool:
        """Whether one request of full length fits, and vLLM's share is free."""
        return self.at_once >= 1 and self.made.memory is not None and not self._refused

    @property
    def _refused(self) -> bool:
        share = self.made.settings.gpu_memory_utilization
        return self.made.budget("vllm", self.memory) < int(self.memory * share)

    def gives(self) -> Iterator[str]:
        made, s = self.made, self.made.settings
        size = f"{format_size(made.budget('vllm', self.memory))} of {format_size(self.memory)}"
        if self._refused:
            share = f"--gpu-memory-utilization {s.gpu_memory_utilization:g}"
            yield f"it does not start: driver and desktop leave {size}, less than {share}"
        if self.at_once < 1:
            yield (
                f"it does not start: its share, {size}, makes {self.blocks:,} blocks, fewer than one request of "
                f"{s.ctx:,} tokens needs"
            )
            return
        held = f"{self.at_once:.1f} requests of {s.ctx:,} tokens at once"
        of = BlockGroups.of(made.shape, s).block_size
        yield f"its share, {size}, makes {self.blocks:,} blocks of {of}: {held}"
        many = min(self.users or s.parallel, s.parallel)
        tokens = int(self.at_once * s.ctx / many)
        each = f"{counted(many, 'request')} at once have {min(tokens, s.ctx):,} each on average"
        yield f"a request has up to {s.ctx:,} tokens; {each}"
        if self.users is not None and self.users > s.parallel:
            yield f"{self.users:,} users, {s.parallel:,} requests at once: whoever comes later waits"
        if self.tokens is not None and self.tokens > s.ctx:
            yield f"a request of {self.tokens:,} tokens is refused (HTTP 400)"

    def misleading(self) -> Iterator[str]:
        s, flags, context = self.made.settings, self.line.flags, self.made.shape.context
        if self.at_once >= 1 and s.parallel > self.at_once:
            what = f"--max-num-seqs {s.parallel:,}" + ("" if "--max-num-seqs" in flags else " (its default)")
            yield (
                f"{what} is no promise: blocks hold {self.at_once:.1f} requests of full length; further ones are "
                "preempted and computed again"
            )
        if context is not None and s.ctx > context:
            yield f"--max-model-len {s.ctx:,} is more than the model's {context:,}: vLLM refuses it"
        if "--no-enable-chunked-prefill" in flags and s.batch < s.ctx:
            yield f"--max-num-batched-tokens {s.batch:,} without chunked prefill: fewer than --max-model-len is refused"

    def changes(self) -> Iterator[str]:
        made, s = self.made, self.made.settings
        if self._refused:
            yield f"--gpu-memory-utilization {made.budget('vllm', self.memory) * 100 // self.memory / 100:g}"
        if self.at_once < 1:
            longest = largest(lambda tokens: self._blocks_of(tokens) <= self.blocks, s.ctx)
            if longest:
                yield f"--max-model-len {longest}: the longest of which one request fits"
            else:
                yield f"a larger device or narrower weights: {made.what_would_fit('vllm') or 'not one token fits'}"
            if s.type_k == "f16":
                yield "--kv-cache-dtype fp8: K and V take half"
        elif self.tokens is not None and self.tokens > s.ctx:
            yield f"--max-model-len {self.tokens}"
