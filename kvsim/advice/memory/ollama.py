"""What to set for Ollama where ``llama-server`` is recommended, and what of it Ollama cannot express.

Source: Ollama 0.33 (August 2026), which serves every GGUF model by a ``llama-server`` of its own. In
``llm/llama_server.go``, ``startLlamaServer`` starts it with ``-c``, the context length times the parallel requests,
``-np``, one type for K and V, ``--flash-attn``, and ``-b`` and ``-ub`` alike; never with ``--kv-unified`` or
``--cache-ram``, but in Ollama's own environment (``SetupLlamaServerCommandEnv``), so that what llama-server reads there
holds. ``envconfig/config.go`` has the variables and their defaults, ``server/routes.go`` the context by memory,
``server/sched.go`` the batch (``automaticGenerationBatch``), ``docs/faq.mdx`` the types of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvsim.advice.memory.engine_flags import Flags, flags_dict, padded
from kvsim.advice.memory.flag_effects import MIB, Effect, cell_size, flash_attention, kv_bytes
from kvsim.costs.memory_plan import Plan
from kvsim.errors import counted
from kvsim.model.storage_types import CACHE_TYPES, format_size

COMMAND = "ollama serve"
"""The program that reads the variables."""

_DOCUMENTED = ("f16", "q8_0", "q4_0")
"""Types of K and V that Ollama's own pages name; it hands on any other as it is."""
_DEFAULT_CONTEXT = "4,096, or 32,768 from 23 GiB of GPU memory on, or 262,144 from 47 GiB on"
_DEFAULT_PARALLEL = 1

_INSTEAD = {
    "--cache-reuse": "its llama-server reads LLAMA_ARG_CACHE_REUSE={value}",
    "--ctx-checkpoints": "its llama-server reads LLAMA_ARG_CTX_CHECKPOINTS={value}",
    "--checkpoint-min-step": "its llama-server reads LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT={value}",
    "--no-cache-idle-slots": "its llama-server reads LLAMA_ARG_CACHE_IDLE_SLOTS=0",
    "--swa-full": "its llama-server reads LLAMA_ARG_SWA_FULL=1",
    "--slot-prompt-similarity": "its llama-server has its own default",
    "--keep": "num_keep of a Modelfile or a request, where its context is shifted",
    "--no-cache-prompt": "it always asks for the prompt cache",
    "--context-shift": "the option shift of a request",
}
"""What there is instead of options that no variable of Ollama's own expresses."""


@dataclass(frozen=True)
class OllamaSettings:
    """The variables that come nearest to options of ``llama-server``."""

    effects: tuple[Effect, ...]
    """Each variable, and what it does to memory."""
    missing: dict[str, str]
    """Why, by options of ``llama-server`` that no variable expresses."""

    @property
    def typed(self) -> str:
        """The command line."""
        return " ".join([*(each.typed for each in self.effects), COMMAND])

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "typed": self.typed,
            "variables": {each.name: each.value for each in self.effects},
            "effects": [each.to_dict() for each in self.effects],
            "missing": self.missing,
        }


def ollama_settings(flags: Flags, made: Plan, longest: int) -> OllamaSettings:
    """The variables for options of today's ``llama-server``.

    ``made``: the plan of these options. ``longest``: tokens of the longest request, for which each of Ollama's slots
    needs room, since they share no cells.
    """
    given, s = flags_dict(flags), made.settings
    # The wider type costs memory, the narrower one accuracy.
    kind = max((s.type_k, s.type_v), key=lambda name: CACHE_TYPES[name][1] / CACHE_TYPES[name][0])
    settings = replace(s, ctx=_context(made, longest), kv_unified=False, swa_full=False, type_k=kind, type_v=kind)
    theirs = replace(made, settings=settings)
    return OllamaSettings(_effects(theirs), _missing(given, made, theirs))


def _context(made: Plan, longest: int) -> int:
    """Tokens of a slot: its share of the cells and, where they are shared, at least the longest request."""
    share = made.settings.ctx
    tokens = max(share, padded(longest)) if made.settings.kv_unified else share
    return min(tokens, made.shape.context or tokens)


def _effects(theirs: Plan) -> tuple[Effect, ...]:
    s, size = theirs.settings, kv_bytes(theirs)
    total = f"{counted(s.parallel, 'slot')} of {s.ctx:,} cells each"
    flash, saved = flash_attention(theirs, on=s.flash_attn)
    if s.flash_attn:
        flash += "; a quantised V needs it"
    return (
        Effect(
            "OLLAMA_NUM_PARALLEL",
            str(s.parallel),
            f"times the context: {total}, a cache for each (default {_DEFAULT_PARALLEL})",
        ),
        Effect(
            "OLLAMA_CONTEXT_LENGTH",
            str(s.ctx),
            f"KV cache {format_size(size)}: {total}, {cell_size(theirs)} a cell (default {_DEFAULT_CONTEXT})",
            size,
        ),
        Effect("OLLAMA_KV_CACHE_TYPE", s.type_k, f"K and V alike: {cell_size(theirs)} a cell (default f16)"),
        Effect("OLLAMA_FLASH_ATTENTION", "1" if s.flash_attn else "0", flash, saved),
    )


def _missing(given: Any, made: Plan, theirs: Plan) -> dict[str, str]:
    """Why, by options that no variable expresses."""
    found, ours, size = dict[str, str](), kv_bytes(made), kv_bytes(theirs)
    if "--kv-unified" in given:
        more = f", which takes {size / ours:.3g} times the KV cache" if size > ours else ""
        found["--kv-unified"] = f"each slot has cells of its own, enough for the longest request{more}"
    if made.settings.type_k != made.settings.type_v:
        found["--cache-type-k"] = "K and V have one type: the wider one"
    elif theirs.settings.type_k not in _DOCUMENTED:
        found["--cache-type-k"] = (
            f"it documents {', '.join(_DOCUMENTED)} only, and hands {theirs.settings.type_k} on to llama-server"
        )
    if (limit := given.get("--cache-ram")) is not None and limit != (usual := _usual_cache_ram()):
        found["--cache-ram"] = (
            f"its llama-server keeps up to {format_size(int(usual) * MIB)} of host memory, unless LLAMA_ARG_CACHE_RAM="
            f"{limit} is set too"
        )
    if "--batch-size" in given:
        found["--batch-size"] = (
            "num_batch of a Modelfile or a request sets it and --ubatch-size; by itself 512 to 2,048, by context and "
            "memory"
        )
    return found | {option: why.format(value=given[option]) for option, why in _INSTEAD.items() if option in given}


def _usual_cache_ram() -> str:
    # The sections of scenarios are slow to import, and a plan needs none.
    from kvsim.scenario.serving_sections import ServerSection

    return str(ServerSection().cache_ram)
