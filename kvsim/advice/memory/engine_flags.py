"""Command-line options of llama.cpp and vLLM that configure them like a scenario.

Sources: llama.cpp, ``common/arg.cpp`` (``--defrag-thold`` is still accepted, but ignored with a warning that it is
deprecated; there is no defragmentation since b6975) and ``tools/server`` (until 2025 each slot had an equal share of
the context although all shared one cache); vLLM 0.33, ``vllm serve --help``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.costs.memory_settings import CONTEXT_UNIT, Engine, PlanSettings
from kvsim.costs.vllm_profile import profile_run
from kvsim.model.engine_versions import LLAMACPP_B4666, PRESENT
from kvsim.model.memory_shapes import memory_shape

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario

OLD_NOTE = (
    "needs llama.cpp b4666 to b4880, the last versions to defragment by threshold; later ones ignore --defrag-thold"
)

COMMANDS: dict[str, str] = {"llamacpp": "llama-server", "vllm": "vllm serve"}
"""The program that takes an engine's options."""

Flags = tuple[tuple[str, str], ...]
"""Pairs of an option and its value, which is empty for a switch."""


def llamacpp_flags(scenario: Scenario, *, windows: bool = False) -> Flags:
    """Return the options of ``llama-server``.

    ``windows``: the model has sliding windows; unless the policy is ``sliding-window``, their cache is kept at full
    size.
    """
    server, cache = scenario.server, scenario.cache
    flags = [*_placed(scenario.machine.n_gpu_layers, scenario.machine.n_cpu_moe)]
    flags += [("--ctx-size", str(cache.cells)), ("--parallel", str(server.slots))]
    old = scenario.engine == LLAMACPP_B4666
    if scenario.unified and not old:
        # Otherwise --parallel gives each slot a cache of its own.
        flags.append(("--kv-unified", ""))
    flags += [("--batch-size", str(scenario.n_batch)), ("--ubatch-size", str(scenario.n_ubatch))]
    flags += [("--cache-type-k", cache.type_k), ("--cache-type-v", cache.type_v)]
    if not old:
        flags.append(("--flash-attn", "on" if flash_attention(scenario) else "off"))
    elif flash_attention(scenario):
        flags.append(("--flash-attn", ""))
    if windows and cache.policy != "sliding-window" and not old:
        flags.append(("--swa-full", ""))
    if old:
        flags.append(("--defrag-thold", f"{cache.threshold:g}"))
    return (*flags, *_slot_flags(scenario), *_llamacpp_drafts(scenario))


_SPEC_TYPES = {"ngram": "ngram-simple", "draft-model": "draft-simple", "eagle": "draft-eagle3", "mtp": "draft-mtp"}
"""llama-server's names (``--spec-type``) of the methods of a scenario."""
_VLLM_METHODS = {"ngram": "ngram", "draft-model": "draft_model", "eagle": "eagle3", "mtp": "mtp"}
"""vLLM's names of them."""


def _llamacpp_drafts(scenario: Scenario) -> Flags:
    """The options of llama-server that draft."""
    drafts = scenario.speculation
    if not drafts.on:
        return ()
    return ("--spec-type", _SPEC_TYPES[drafts.method]), ("--spec-draft-n-max", str(drafts.tokens))


def _vllm_drafts(scenario: Scenario) -> Flags:
    """The option of vLLM that drafts."""
    drafts = scenario.speculation
    if not drafts.on:
        return ()
    said = {"method": _VLLM_METHODS[drafts.method], "num_speculative_tokens": drafts.tokens}
    return (("--speculative-config", f"'{json.dumps(said, separators=(',', ':'))}'"),)


def _placed(n_gpu_layers: int | None, n_cpu_moe: int) -> Flags:
    """The options that keep layers on the CPU."""
    layers = () if n_gpu_layers is None else (("--n-gpu-layers", str(n_gpu_layers)),)
    return (*layers, *((("--n-cpu-moe", str(n_cpu_moe)),) if n_cpu_moe else ()))


def _slot_flags(scenario: Scenario) -> Flags:
    """What of today's server's slots and host cache the scenario has otherwise than the server by itself."""
    server = scenario.server
    if server.scheduler != "llama-server":
        return ()
    usual = type(server)()
    values = {
        "--cache-reuse": (server.cache_reuse, usual.cache_reuse),
        "--ctx-checkpoints": (server.ctx_checkpoints, usual.ctx_checkpoints),
        "--checkpoint-min-step": (server.checkpoint_min_step, usual.checkpoint_min_step),
        "--slot-prompt-similarity": (server.slot_prompt_similarity, usual.slot_prompt_similarity),
        "--keep": (server.n_keep, usual.n_keep),
    }
    flags = [("--cache-ram", str(server.cache_ram))]
    flags += [(flag, f"{value:g}") for flag, (value, by_itself) in values.items() if value != by_itself]
    if not server.cache_idle_slots:
        flags.append(("--no-cache-idle-slots", ""))
    if not server.cache_prompt:
        flags.append(("--no-cache-prompt", ""))
    if server.context_shift:
        flags.append(("--context-shift", ""))
    return tuple(flags)


def flash_attention(scenario: Scenario) -> bool:
    """Whether llama.cpp uses flash attention: as stated or by default, and always with a quantised V."""
    cache = scenario.cache
    if cache.type_v not in ("f32", "f16"):
        return True
    version = scenario.engine or PRESENT["llama.cpp"]
    return version.flash_attention if cache.kernel is None else cache.kernel != "masked"


def vllm_flags(scenario: Scenario) -> Flags:
    """Return the options of ``vllm serve``; K and V keep the model's own type, but for fp8.

    On a device they include its share that vLLM may use, of which the cache is what is left. Elsewhere they include the
    number of blocks, so that the cache has exactly the size that was simulated.
    """
    server, cache = scenario.server, scenario.cache
    if scenario.machine.device is None:
        memory = (
            ("--block-size", str(cache.block_size)),
            ("--num-gpu-blocks-override", str(cache.cells // cache.block_size)),
        )
    else:
        memory = (
            ("--gpu-memory-utilization", f"{profile_run(PRESENT['vLLM'].version).utilization:g}"),
            ("--tensor-parallel-size", str(scenario.machine.tensor_parallel)),
        )
    kind = (("--kv-cache-dtype", "fp8"),) if cache.type_k == "fp8" else ()
    return (
        ("--max-model-len", str(scenario.slot_context)),
        ("--max-num-seqs", str(server.slots)),
        ("--max-num-batched-tokens", str(scenario.n_batch)),
        *memory,
        *kind,
        ("--enable-prefix-caching" if cache.prefix_cache else "--no-enable-prefix-caching", ""),
        ("--enable-chunked-prefill" if server.chunked_prefill else "--no-enable-chunked-prefill", ""),
        *_vllm_drafts(scenario),
    )


def largest_fit_flags(engine: Engine, settings: PlanSettings) -> Flags:
    """Return the options of ``llama-server`` or ``vllm serve`` with which memory was planned."""
    if engine == "vllm":
        kind = (("--kv-cache-dtype", settings.type_k),) if settings.type_k == "fp8" else ()
        ranks = (("--tensor-parallel-size", str(settings.tensor_parallel)),) if settings.tensor_parallel > 1 else ()
        return (
            ("--max-model-len", str(settings.ctx)),
            ("--max-num-seqs", str(settings.parallel)),
            ("--max-num-batched-tokens", str(settings.batch)),
            ("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"),
            *ranks,
            *kind,
        )
    return (
        *_placed(settings.n_gpu_layers, settings.n_cpu_moe),
        ("--ctx-size", str(settings.ctx * settings.parallel)),
        ("--parallel", str(settings.parallel)),
        ("--cache-type-k", settings.type_k),
        ("--cache-type-v", settings.type_v),
    )


def model_argument(model: str) -> str:
    """What ``vllm serve`` takes for a model: the repository that states its shape, or the folder of its config.json."""
    shape = memory_shape(model)
    known = re.match(r"https://huggingface\.co/([^/]+/[^/]+)/", shape.source)
    if known:
        return known[1]
    return str(Path(model).parent) if model.endswith(".json") else model


def command_line(flags: Flags) -> str:
    """Join options into one line."""
    return " ".join(f"{name} {value}".strip() for name, value in flags)


def flags_dict(flags: Flags) -> Mapping[str, str | bool]:
    """Return the values by option, True for a switch."""
    return {name: value or True for name, value in flags}


def padded(tokens: int) -> int:
    """Round up to a multiple of 256, as llama.cpp does; every power of two of slots up to that remains a divisor."""
    unit = CONTEXT_UNIT["llamacpp"]
    return -(-tokens // unit) * unit
