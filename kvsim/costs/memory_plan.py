"""How much memory a model needs, part by part, as allocated by llama.cpp and vLLM, and what fits into a given memory.

Sizes of K and V are exact, by the engines' own formulas. Buffers are estimates and marked as such, because their size
depends on the device and on the layout of its graph; what vLLM takes besides tensors is a range. What the driver and a
desktop take is no part of an engine's, but it can have only what these leave (``kvsim.costs.reserve``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvsim.costs import llamacpp_memory, vllm_memory
from kvsim.costs.devices import device_named, devices
from kvsim.costs.memory_settings import (
    ENGINE_TITLES,
    MOST_CONTEXT,
    MOST_PARALLEL,
    PLAN_ENGINES,
    Engine,
    Part,
    PlanSettings,
    check_settings,
    check_weights,
    gguf_weights,
)
from kvsim.costs.reserve import Reserve, reserve_of
from kvsim.costs.served import Served
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.costs.vllm_profile import profile_run, serve_defaults
from kvsim.errors import UserError, no_such
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape, own_type
from kvsim.model.storage_types import binary_reading, decimal_hint, format_size, parse_size

if TYPE_CHECKING:
    import pandas as pd

_LLAMACPP = PRESENT["llama.cpp"]
"""Where both engines have a setting, their defaults are the same."""
_FEW = 3
"""Devices that are named as larger ones; there are dozens."""
_LEAST_MEMORY = 1 << 20
"""Bytes below which the unit was probably forgotten."""


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
    device: str | None = None
    """The device whose memory that is, if named."""
    reserved: int | None = None
    """Bytes that are left to others, where the user says how many; None: as ``kvsim.costs.reserve`` has it."""

    @property
    def reserve(self) -> Reserve:
        """What is left to the driver, a desktop and chance."""
        if self.reserved is not None:
            return Reserve(self.reserved, 0, 0)
        return reserve_of(None if self.device is None else device_named(self.device))

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
        name = f"vLLM {s.vllm_version}" if engine == "vllm" else str(version)
        return f"defaults of {name}: {', '.join(words)}" if words else ""

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
        """Return how many of the given bytes the engine may use: what is not left to others; of that, vLLM's share."""
        free = memory - self.reserve.taken
        if engine == "vllm":
            return max(0, min(int(memory * self.settings.gpu_memory_utilization), free))
        return max(0, free - self.reserve.margin)

    def vllm_blocks(self, memory: int) -> int:
        """Return the number of blocks vLLM allocates in a memory, null block included; 0 if the weights do not fit."""
        return self._blocks(memory, lambda part: part.bytes)

    def vllm_blocks_range(self, memory: int) -> tuple[int, int]:
        """Return the fewest and the most blocks, by the ranges of the parts."""
        fewest = self._blocks(memory, lambda part: part.bytes if part.high is None else part.high)
        return fewest, self._blocks(memory, lambda part: part.bytes if part.low is None else part.low)

    def concurrency(self, memory: int) -> float:
        """Return how many requests of ``ctx`` tokens vLLM counts on ("maximum concurrency" in its log)."""
        return self.vllm_blocks(memory) / BlockGroups.of(self.shape, self.settings).of_request

    def _blocks(self, memory: int, size: Callable[[Part], int]) -> int:
        others = sum(size(part) for part in vllm_memory.parts(self.shape, self.settings) if part.kind != "kv")
        left = self.budget("vllm", memory) - others
        return max(0, left) // BlockGroups.of(self.shape, self.settings).block_bytes

    def what_would_fit(self, engine: Engine) -> str:
        """Changes with which a model too large for its device would fit it, in words; empty if it fits or no device is
        named, and "nothing known here" if none does."""
        if self.device is None or self.memory is None or self._holds(engine, self.settings, self.memory):
            return ""
        found = []
        if not self.shape.stored:
            for kind in _NARROWER[engine]:
                if self._holds(engine, replace(self.settings, weights=kind), self.memory):
                    found.append(f"--weights {kind}")
                    break
        if engine == "llamacpp":
            found += self._fitting_layers(self.memory)
        if engine == "vllm":
            for ranks in (2, 4, 8, 16):
                divided = replace(self.settings, tensor_parallel=ranks)
                if not _WHY_NOT[engine](self.shape, divided) and self._holds(engine, divided, self.memory):
                    found.append(f"--tp {ranks}")
                    break
        ready = [device for device in devices().values() if engine == "llamacpp" or device.kind != "apple"]
        by_memory = sorted(ready, key=lambda device: device.memory_bytes)
        on = (replace(self, device=device.name, memory=device.memory_bytes) for device in by_memory)
        larger = [made.device for made in on if made._holds(engine, made.settings, made.memory or 0)]
        found += [f"--device {' or '.join(map(str, larger[:_FEW]))}"] if larger else []
        return ", or ".join(found) or "nothing known here"

    def _fitting_layers(self, memory: int) -> list[str]:
        """The options that keep as few layers, or their experts, on the CPU as leave room for the context."""
        n, ctx = self.shape.n_layers, min(self.settings.ctx, self.shape.context or self.settings.ctx)

        def fit(**placed: Any) -> bool:
            return replace(self, settings=replace(self.settings, ctx=ctx, **placed)).fits("llamacpp", memory)

        if self.device is not None and device_named(self.device).kind == "apple":
            return []
        experts = next((k for k in range(n + 1) if fit(n_cpu_moe=k)), None) if self.shape.n_experts else None
        layers = next((k for k in range(n, -1, -1) if fit(n_gpu_layers=k)), None)
        found = {"--n-cpu-moe": experts, "--ngl": layers}
        return [f"{option} {number}" for option, number in found.items() if number is not None]

    def _holds(self, engine: Engine, settings: PlanSettings, memory: int) -> bool:
        """Whether weights and buffers leave room for a token."""
        other = replace(self, settings=settings)
        if engine == "vllm":
            return other.vllm_blocks(memory) > 1  # One is the null block.
        return replace(other, settings=replace(settings, ctx=1)).fits(engine, memory)

    def largest_context(self, memory: int | str, engine: Engine = "llamacpp") -> int:
        """Return the longest context, in tokens, for each of the ``parallel`` sequences; 0 if nothing fits.

        ``memory``: bytes, or a size such as 24GB. The search goes up to the context that the model states; the need
        never falls as the context grows. ``MOST_CONTEXT`` if the model states none and every context fits.
        """
        size = _bytes(memory)
        return largest(
            lambda n: replace(self, settings=replace(self.settings, ctx=n)).fits(engine, size),
            min(self.shape.context or MOST_CONTEXT, MOST_CONTEXT),
        )

    def largest_parallel(self, memory: int | str, engine: Engine = "llamacpp") -> int:
        """Return the largest number of concurrent sequences of ``ctx`` tokens; 0 if none fits.

        ``memory``: bytes, or a size such as 24GB.
        """
        size = _bytes(memory)
        return largest(
            lambda n: replace(self, settings=replace(self.settings, parallel=n)).fits(engine, size),
            MOST_PARALLEL[engine],
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
            if engine == "vllm":
                engines[engine] |= _blocks_of(BlockGroups.of(self.shape, self.settings))
            if self.memory is not None:
                engines[engine] |= {
                    "budget": self.budget(engine, self.memory),
                    "reserve": asdict(self.reserve),
                    "fits": self.fits(engine, self.memory),
                    "largest_context": self.largest_context(self.memory, engine),
                    "largest_parallel": self.largest_parallel(self.memory, engine),
                }
                if engine == "vllm":
                    engines[engine]["concurrency"] = self.concurrency(self.memory)
                    engines[engine]["blocks"] = self.vllm_blocks(self.memory)
                    engines[engine]["blocks_range"] = list(self.vllm_blocks_range(self.memory))
                if self.device is not None:
                    engines[engine]["would_fit"] = self.what_would_fit(engine)
        return {
            "model": self.shape.name,
            "source": self.shape.source,
            "parameters": self.shape.n_parameters,
            "context": self.shape.context,
            "groups": [asdict(group) for group in self.shape.groups],
            "settings": asdict(self.settings),
            "memory": self.memory,
            "device": self.device,
            "engines": engines,
            "notes": list(self.notes),
        }


def plan(
    model: str | MemoryShape,
    *,
    engine: str | None = None,
    batch: int | None = None,
    gpu_memory_utilization: float | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    reserve: int | str | None = None,
    **settings: Any,
) -> Plan:
    """Plan the memory of a model, given as a shipped name, a config.json, or a GGUF file.

    ``engine``: ``llamacpp`` or ``vllm``; by default both. ``memory``: bytes, or a text such as 8GiB; or ``device``, a
    name of ``devices.toml``. ``reserve``: what of it driver and others keep, in the same form; by default as usual on
    such a device. ``batch`` and ``gpu_memory_utilization``: by default the engine's. ``settings``: the other fields of
    ``PlanSettings``, among them ``ctx``, the maximum tokens of each of ``parallel`` sequences. Raises ``UserError``.
    """
    available = _available(memory, device)
    if batch is None:
        batch = _LLAMACPP.n_batch if device is None else serve_defaults(available, device)[0]
    given = PlanSettings(batch=batch, **settings)
    if gpu_memory_utilization is None:
        gpu_memory_utilization = profile_run(given.vllm_version).utilization
    s = replace(
        given,
        type_k=given.type_k.lower(),
        type_v=given.type_v.lower(),
        ubatch=min(given.ubatch, batch),  # As in llama.cpp.
        weights=given.weights and given.weights.lower(),
        gpu_memory_utilization=gpu_memory_utilization,
    )
    check_settings(s, given.ubatch)
    shape = memory_shape(model) if isinstance(model, str) else model
    if s.weights is None and shape.default_type != own_type(shape):
        s = replace(s, weights=shape.default_type)
    check_weights(shape, s.weights)
    chosen, notes = _choose_engines(shape, s, engine)
    reserved = parse_size(reserve, "--reserve") if isinstance(reserve, str) else reserve
    made = Plan(shape, s, chosen, (*notes, *_notes(shape, s, chosen)), available, device, reserved)
    return replace(
        made,
        notes=(*made.notes, *_share_note(made), *_states_note(made), *_sequences_note(made), *_unit_note(made, memory)),
    )


def _blocks_of(made: BlockGroups) -> dict[str, Any]:
    """What ``--json`` says of vLLM's blocks."""
    sizes = {"block_size": made.block_size, "block_bytes": made.block_bytes}
    return sizes | {"blocks_of_request": made.of_request, "least_blocks": made.least}


def _share_note(made: Plan) -> list[str]:
    """Whether driver and desktop leave vLLM its share, without which it does not start (``request_memory``)."""
    if made.memory is None or "vllm" not in made.engines:
        return []
    asked, budget = made.settings.gpu_memory_utilization, made.budget("vllm", made.memory)
    if budget >= int(made.memory * asked):
        return []
    return [
        f"vLLM refuses to start with --gpu-memory-utilization {asked:g} where driver and desktop have taken "
        f"{format_size(made.reserve.taken)}; at most {budget * 100 // made.memory / 100:g} is left"
    ]


def _states_note(made: Plan) -> list[str]:
    """How many sequences vLLM can have at once where each needs blocks for its states."""
    if made.memory is None or "vllm" not in made.engines or not made.shape.states:
        return []
    blocks, groups = made.vllm_blocks(made.memory), BlockGroups.of(made.shape, made.settings)
    if not blocks:
        return []
    few = f"vLLM: {blocks:,} blocks hold {max(0, blocks - 1) // groups.least:,} of the shortest sequences at once"
    asked = made.settings.parallel
    if asked > blocks:
        few += f"; it refuses to start with --max-num-seqs {asked} (max_num_seqs exceeds available Mamba cache blocks)"
    return [few]


def _sequences_note(made: Plan) -> list[str]:
    """How many blocks a vLLM server has that is not told the number of sequences, which the plan is."""
    if made.device is None or made.memory is None or "vllm" not in made.engines:
        return []
    usual = serve_defaults(made.memory, made.device)[1]
    if made.settings.parallel == usual:
        return []
    blocks = replace(made, settings=replace(made.settings, parallel=usual)).vllm_blocks(made.memory)
    return [f"vLLM: without --max-num-seqs it takes {usual:,} sequences at once, which leaves {blocks:,} blocks"]


def _available(memory: int | str | None, device: str | None) -> int | None:
    """The bytes that there are, given as such or by the name of a device."""
    if device is not None:
        if memory is not None:
            raise UserError("--device and --memory: both say how much memory there is; give one of them")
        return device_named(device).memory_bytes
    available = None if memory is None else _bytes(memory)
    if available is not None and available < _LEAST_MEMORY:
        raise UserError(f"--memory is {available} bytes; at least 1 MiB is expected, such as 8GB, 8GiB or 512MiB")
    return available


def _choose_engines(
    shape: MemoryShape, settings: PlanSettings, engine: str | None
) -> tuple[tuple[Engine, ...], list[str]]:
    """The engines that are planned for, and notes about those left out. Raises ``UserError`` if there are none."""
    if engine is not None and engine not in PLAN_ENGINES:
        raise UserError(f"--engine: {no_such('engine', engine, PLAN_ENGINES)}")
    reasons = {
        name: _WHY_NOT[name](shape, settings)
        if shape.only in ("", name)
        else f"{shape.name}: {ENGINE_TITLES[name]} is not known here to run this architecture"
        for name in PLAN_ENGINES
    }
    if engine is not None and (reason := reasons[engine]):
        raise UserError(reason)
    chosen = tuple(name for name in PLAN_ENGINES if name == (engine or name) and not reasons[name])
    if not chosen:
        raise UserError("; ".join(filter(None, reasons.values())))
    return chosen, [f"left out: {reason}" for name, reason in reasons.items() if reason and engine is None]


def _unit_note(made: Plan, memory: int | str | None) -> list[str]:
    """What a memory in GB is in GiB, and whether that decides."""
    if not isinstance(memory, str) or not (hint := decimal_hint(memory)):
        return []
    meant = binary_reading(memory)
    decides = any(made.fits(engine, meant) and not made.fits(engine, memory) for engine in made.engines)
    return [hint + (f", into which this fits: --memory {meant}" if decides else "")]


def default_cells(
    model: str,
    device: str,
    *,
    tp: int = 1,
    ep: int = 1,
    weights: str | None = None,
    batch: int | None = None,
    sequences: int | None = None,
    type_k: str = "f16",
    block_size: int = PRESENT["vLLM"].block_size,
    vllm_version: str = PRESENT["vLLM"].version,
    prefix_caching: bool = True,
    drafter: str = "",
) -> int:
    """Return the tokens that the KV cache of a vLLM server holds on a device: its blocks times their size.

    ``model``: a shipped name, a config.json or a GGUF file; ``device``: a name of ``devices.toml``; ``tp``: GPUs over
    which each layer is divided; ``ep``: servers that divide the experts; ``batch``, ``sequences``: by default what
    ``vllm serve`` takes on that device; ``drafter``: as in ``PlanSettings``. vLLM counts
    the null block among its blocks, and so does this, although no request can have it. Raises ``UserError``, with what
    would fit, if the weights do not.
    """
    memory = device_named(device).memory_bytes
    made = plan(
        model,
        ctx=block_size,
        parallel=sequences or serve_defaults(memory, device)[1],
        type_k=type_k,
        type_v=type_k,
        engine="vllm",
        batch=batch,
        block_size=block_size,
        weights=weights,
        tensor_parallel=tp,
        expert_parallel=ep,
        vllm_version=vllm_version,
        prefix_caching=prefix_caching,
        drafter=drafter,
        device=device,
    )
    _refuse_too_large(made, "vllm", device, memory)
    return made.vllm_blocks(memory) * BlockGroups.of(made.shape, made.settings).block_size


def llamacpp_cells(of: Served, *, most: int | None = None, drafter: str = "", draft_tokens: int = 3) -> int:
    """Return the cells of a llama-server that is not told its context: the model's, or what of it the device holds.

    ``most``: count on up to so many cells, whatever the model's context is; others as in ``PlanSettings``. Raises as
    ``default_cells``.
    """
    memory = device_named(of.device).memory_bytes
    made = plan(
        of.model,
        engine="llamacpp",
        kv_unified=True,
        device=of.device,
        weights=of.weights,
        tensor_parallel=of.tp,
        type_k=of.type_k,
        type_v=of.type_v,
        flash_attn=of.flash_attn,
        n_gpu_layers=of.n_gpu_layers,
        n_cpu_moe=of.n_cpu_moe,
        drafter=drafter,
        draft_tokens=draft_tokens,
    )
    _refuse_too_large(made, "llamacpp", of.device, memory)
    if most is not None:
        made = replace(made, shape=replace(made.shape, context=most))
    return made.largest_context(memory)


class TooLargeError(UserError):
    """A device does not hold a model; the message says what would fit."""


def _refuse_too_large(made: Plan, engine: Engine, device: str, memory: int) -> None:
    """Raise ``TooLargeError``, with what would fit, if a device does not hold the model."""
    if fitting := made.what_would_fit(engine):
        others = sum(part.bytes for part in made.parts if part.kind != "kv")
        raise TooLargeError(
            f"{made.shape.name} does not fit on {device}: weights and buffers take {format_size(others)}, "
            f"{ENGINE_TITLES[engine]} may use {format_size(made.budget(engine, memory))} of {format_size(memory)}; "
            f"what would fit: {fitting}"
        )


def default_batch(engine: Engine, memory: int | None, device: str | None = None) -> int:
    """Tokens in a step that an engine takes by default, which in vLLM depends on the device and its memory in bytes."""
    return _LLAMACPP.n_batch if engine == "llamacpp" else serve_defaults(memory, device)[0]


def _bytes(memory: int | str) -> int:
    return parse_size(memory) if isinstance(memory, str) else memory


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 if 1 does not. Whatever is below a number that fits, fits too."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


_PARTS: dict[Engine, Callable[[MemoryShape, PlanSettings], list[Part]]] = {
    "llamacpp": llamacpp_memory.parts,
    "vllm": vllm_memory.parts,
}
_NARROWER: dict[Engine, tuple[str, ...]] = {"llamacpp": ("q8_0", "q4_k_m"), "vllm": ("fp8", "mxfp4")}
"""Types of weights in which a model that is too large is tried, widest first."""
_WHY_NOT: dict[Engine, Callable[[MemoryShape, PlanSettings], str | None]] = {
    "llamacpp": llamacpp_memory.why_not,
    "vllm": vllm_memory.why_not,
}


def _notes(shape: MemoryShape, s: PlanSettings, engines: tuple[Engine, ...]) -> list[str]:
    notes = llamacpp_memory.notes(shape, s) if "llamacpp" in engines else []
    notes += vllm_memory.notes(shape, s) if "vllm" in engines else []
    if shape.context is not None and s.ctx > shape.context:
        notes.append(f"the model states a context of {shape.context:,} tokens, less than --ctx {s.ctx:,}")
    if s.weights is not None and (made := gguf_weights(engines[0], shape, s)):
        tensors = ", ".join(f"{n} in {kind}" for kind, (n, _) in made.items() if n)
        notes.append(
            f"{s.weights}: {tensors}, vectors in f32, as llama-quantize makes it; publishers may choose otherwise"
        )
    return notes
