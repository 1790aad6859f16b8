"""How much memory a model needs, part by part, as allocated by llama.cpp and vLLM, and what fits into a given memory.

Sizes of K and V are exact, by the engines' own formulas. Buffers are estimates and marked as such, because their size
depends on the device and on the layout of its graph. The engine itself, its libraries and CUDA graphs are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvsim.costs import llamacpp_memory, vllm_memory
from kvsim.costs.devices import device_named
from kvsim.costs.memory_settings import (
    MOST_CONTEXT,
    MOST_PARALLEL,
    PLAN_ENGINES,
    Engine,
    Part,
    PlanSettings,
    check_settings,
    check_weights,
)
from kvsim.errors import UserError, no_such
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import MemoryShape, memory_shape
from kvsim.model.storage_types import binary_reading, decimal_hint, is_mixture, parse_size

if TYPE_CHECKING:
    import pandas as pd

_LLAMACPP = PRESENT["llama.cpp"]
"""Where both engines have a setting, their defaults are the same."""
_LARGE_DEVICE, _LARGE_DEVICE_BATCH = 70 << 30, 8192
"""Bytes from which ``vllm serve`` takes more tokens in a step, and how many (``EngineArgs.get_batch_defaults``)."""
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
            part.bytes for part in vllm_memory.parts(self.shape, self.settings) if part.kind != "kv"
        )
        return max(0, left) // vllm_memory.BlockGroups.of(self.shape, self.settings).block_bytes

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
    tensor_parallel: int = 1,
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
        tensor_parallel,
    )
    check_settings(settings, ubatch)
    available = None if memory is None else _bytes(memory)
    if available is not None and available < _LEAST_MEMORY:
        raise UserError(f"--memory is {available} bytes; at least 1 MiB is expected, such as 8GB, 8GiB or 512MiB")
    shape = memory_shape(model) if isinstance(model, str) else model
    check_weights(shape, settings.weights)
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


def default_cells(
    model: str,
    device: str,
    *,
    tp: int = 1,
    weights: str | None = None,
    batch: int | None = None,
    sequences: int = 256,
    type_k: str = "f16",
    block_size: int = PRESENT["vLLM"].block_size,
    gpu_memory_utilization: float = 0.9,
) -> int:
    """Return the tokens that the KV cache of a vLLM server holds on a device: its blocks times their size.

    ``model``: a shipped name, a config.json or a GGUF file; ``device``: a name of ``devices.toml``; ``tp``: GPUs over
    which each layer is divided; ``batch``: by default vLLM's own on that device. vLLM reports the null block among its
    blocks, and so does this count, although no request can have it. Raises ``UserError`` if the weights do not fit.
    """
    memory = device_named(device).memory_bytes
    made = plan(
        model,
        ctx=block_size,
        parallel=sequences,
        type_k=type_k,
        type_v=type_k,
        engine="vllm",
        batch=batch or default_batch("vllm", memory),
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        weights=weights,
        tensor_parallel=tp,
        memory=memory,
    )
    blocks = made.vllm_blocks(memory)
    if blocks < 2:  # The null block and one for a request.
        raise UserError(f"{model} does not fit on {device}")
    return blocks * block_size


def default_batch(engine: Engine, memory: int | None) -> int:
    """Tokens in a step that an engine takes by default: ``vllm serve`` takes more on a device of 70 GiB or more."""
    if engine == "vllm" and memory is not None and memory >= _LARGE_DEVICE:
        return _LARGE_DEVICE_BATCH
    return _LLAMACPP.n_batch if engine == "llamacpp" else PRESENT["vLLM"].n_batch


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


_PARTS: dict[Engine, Callable[[MemoryShape, PlanSettings], list[Part]]] = {
    "llamacpp": llamacpp_memory.parts,
    "vllm": vllm_memory.parts,
}
_WHY_NOT: dict[Engine, Callable[[MemoryShape, PlanSettings], str | None]] = {
    "llamacpp": llamacpp_memory.why_not,
    "vllm": vllm_memory.why_not,
}


def _notes(shape: MemoryShape, s: PlanSettings, engines: tuple[Engine, ...]) -> list[str]:
    notes = llamacpp_memory.notes(shape) if "llamacpp" in engines else []
    notes += vllm_memory.notes(shape, s) if "vllm" in engines else []
    if shape.context is not None and s.ctx > shape.context:
        notes.append(f"the model states a context of {shape.context:,} tokens, less than --ctx {s.ctx:,}")
    if s.weights is not None and is_mixture(s.weights):
        notes.append(f"{s.weights}: bits per weight as measured with llama-quantize on Llama 3.1 8B")
    return notes
