"""What a scenario on a device takes where it says nothing: the profile, the cells that its memory leaves, the engine's
settings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from pydantic import ValidationError

from kvsim.costs.cpu_layers import check_served
from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import TooLargeError, default_cells, llamacpp_cells
from kvsim.costs.memory_settings import MOST_CONTEXT, Engine, PlanSettings
from kvsim.costs.served import Served
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import GGUF_ONLY
from kvsim.scenario.model_groups import groups_of, why_not_simulated
from kvsim.scenario.server_defaults import own_scheduler
from kvsim.scenario.speculation_section import SpeculationSection
from policies import current_name, engine_of

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario


def _engine_named(table: dict[str, Any]) -> tuple[Engine, str] | None:
    """The engine whose scheduler or, without one, policy a scenario's table names, and how; None if it names none."""
    server, cache = (section if isinstance(section := table.get(name), dict) else {} for name in ("server", "cache"))
    scheduler, policy = (str(part.get(key, "")) for part, key in ((server, "scheduler"), (cache, "policy")))
    for key, name, of in (
        ("server.scheduler", scheduler, scheduler),
        ("cache.policy", policy, engine_of(current_name(policy)).lower()),
    ):
        if of.startswith(("llama-server", "llama.cpp")):
            return "llamacpp", f"{key} is {name!r}"
        if of.startswith("vllm"):
            return "vllm", f"{key} is {name!r}"
    return None


def engine_on(table: dict[str, Any], device: str, model: str, weights: str | None) -> Engine:
    """The engine of a scenario's table: the one that is named, or that of what is.

    Raises ``UserError``, also where an engine is named, and a scheduler or policy of another one.
    """
    machine = table.get("machine") or {}
    named, asked = _engine_named(table), machine.get("engine")
    if asked in get_args(Engine):
        if named is not None and named[0] != asked:
            raise UserError(f"machine.engine is {asked!r}, and {named[1]}, of another engine; leave one of them out")
        return cast("Engine", asked)
    if named is not None:
        return named[0]
    if machine.get("n_gpu_layers") is not None or machine.get("n_cpu_moe"):
        return "llamacpp"
    of_files = model.endswith(".gguf") or (weights is not None and weights.lower() in GGUF_ONLY)
    return "llamacpp" if of_files or device_named(device).kind in ("apple", "amd", "cpu") else "vllm"


def with_device_defaults(data: dict[str, Any]) -> tuple[dict[str, Any], frozenset[tuple[str, str]]]:
    """The table of a scenario with what follows from ``machine.device``, and the keys that were filled in.

    Tables without a device, or with faults that validation will find, are returned as they are. Raises ``ValueError``
    for a device or model that is not known, and for a model that does not fit.
    """
    sections = {name: data.get(name, {}) for name in ("machine", "model", "server", "cache")}
    machine = sections["machine"]
    if not all(isinstance(section, dict) for section in sections.values()) or machine.get("device") is None:
        return data, frozenset()
    device, tp, weights = machine["device"], machine.get("tensor_parallel", 1), machine.get("weights")
    model = sections["model"].get("name")
    if not (isinstance(device, str) and isinstance(model, str | None) and isinstance(weights, str | None)):
        return data, frozenset()
    types: dict[str, Any] = {key: sections["cache"].get(key) or "f16" for key in ("type_k", "type_v")}
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1 or not all(isinstance(t, str) for t in types.values()):
        return data, frozenset()
    placed = placed_by(sections)
    if any(isinstance(n, bool) or not isinstance(n, int | float | None) or (n or 0) < 0 for n in placed.values()):
        return data, frozenset()
    try:
        if model is None:
            raise UserError(f"machine.device is {device!r}: say which model it serves, model.name")
        engine = engine_on(sections, device, model, weights)
        placed["flash_attn"] = engine != "llamacpp" or sections["cache"].get("kernel") != "masked"
        served = Served(engine, device, model, tp, weights, **types, **placed, ep=machine.get("expert_parallel", 1))
        found = _defaults_that_fit(sections, served, _drafts(data.get("speculation")))
    except UserError as e:
        raise ValueError(str(e)) from None
    filled = frozenset((section, key) for section, key in found if sections[section].get(key) is None)
    for section, key in filled:
        sections[section] = {**sections[section], key: found[section, key]}
    return {**data, **sections}, filled


def _drafts(given: Any) -> SpeculationSection:
    """The section of drafts; without any where it has faults that validation will find."""
    try:
        return SpeculationSection.model_validate(given or {})
    except ValidationError:
        return SpeculationSection()


def placed_by(sections: dict[str, Any]) -> dict[str, Any]:
    """What a scenario's table says of layers on the CPU, as fields of ``Served``."""
    machine = sections["machine"]
    usual = {"n_gpu_layers": None, "n_cpu_moe": 0, "cpu_gb_s": None}
    return {key: machine.get(key, default) for key, default in usual.items()}


_SMALLER: dict[Engine, str] = {"vllm": "fp8", "llamacpp": "q4_K_M"}
"""The weights of a model whose own do not fit: what vLLM makes of them itself (``--quantization fp8``), and what is
served most from GGUF files."""


Found = TypeVar("Found")


def with_weights_that_fit(of: Served, found: Callable[[Served], Found]) -> tuple[Served, Found]:
    """What is served and what is found for it, with smaller weights where none were named and its own do not fit.

    ``found``: raises ``TooLargeError`` where they do not. Raises ``UserError``, also where no weights fit.
    """
    try:
        return of, found(of)
    except TooLargeError as too_large:
        smaller = replace(of, weights=_SMALLER[of.engine])
        if of.weights is not None or of.model.endswith(".gguf"):
            raise
        try:
            return smaller, found(smaller)
        except UserError:
            raise too_large from None


def weights_assumed(weights: str) -> str:
    """Say in words that smaller weights were assumed."""
    return f"weights in {weights}, since the model's own do not fit (--weights)"


def _defaults_that_fit(
    sections: dict[str, dict[str, Any]], of: Served, drafts: SpeculationSection
) -> dict[tuple[str, str], Any]:
    """The defaults, with smaller weights where none were named and the model's own do not fit."""
    served, found = with_weights_that_fit(of, lambda served: _defaults(sections, served, drafts))
    return found if served is of else {("machine", "weights"): served.weights, **found}


def _defaults(
    sections: dict[str, dict[str, Any]], of: Served, drafts: SpeculationSection
) -> dict[tuple[str, str], Any]:
    """Values by section and key, of what has a value of its own on a device."""
    check_served(of)
    if refused := why_not_simulated(memory_shape(of.model)):
        raise UserError(refused)
    found: dict[tuple[str, str], Any] = {("cache", "type_k"): "f16", ("cache", "type_v"): "f16"}
    found |= (_vllm if of.engine == "vllm" else _llamacpp)(sections, of, drafts)
    # After the memory: times of a model that does not fit would be of no use.
    if sections["machine"].get("profile") is None:
        found["machine", "profile"] = find_profile(**vars(of))
    return found


def _vllm(sections: dict[str, dict[str, Any]], of: Served, drafts: SpeculationSection) -> dict[tuple[str, str], Any]:
    """What ``vllm serve`` does on a device by default."""
    server, cache = sections["server"], sections["cache"]
    usual_batch, usual_slots = serve_defaults(device_named(of.device).memory_bytes, of.device)
    slots = server.get("slots", usual_slots)
    found: dict[tuple[str, str], Any] = {
        ("server", "scheduler"): "vllm",
        ("server", "slots"): slots,
        ("cache", "policy"): "vllm",
    }
    scheduler = server.get("scheduler", "vllm")
    if scheduler == "vllm":
        # Since 0.14, but where n-grams draft.
        found["server", "async_scheduling"] = not (drafts.on and drafts.method == "ngram")
    batch = server.get("n_batch")
    if scheduler == "vllm" and batch is None:
        batch = found["server", "n_batch"] = usual_batch
    shape, block = memory_shape(of.model), cache.get("block_size", PRESENT["vLLM"].block_size)
    prefixes = cache.get("prefix_cache") is not False
    if shape.states:
        s = PlanSettings(
            block_size=block,
            type_k=of.type_k,
            type_v=of.type_k,
            tensor_parallel=of.tp,
            prefix_caching=prefixes,
            drafter=drafts.drafter,
        )
        groups = found["cache", "groups"] = groups_of(shape, s)
        # A block of states, which each sequence needs, is as large as one of tokens.
        block = groups[0]["block_size"]
        if scheduler == "vllm" and prefixes:
            _check_aligned(of.model, batch, block, chunked=server.get("chunked_prefill") is not False)
    if cache.get("cells") is None:
        # vLLM's null block is among its blocks, as it is among the cells of the policies with blocks.
        cells = found["cache", "cells"] = default_cells(
            of.model,
            of.device,
            block_size=cache.get("block_size", PRESENT["vLLM"].block_size),
            tp=of.tp,
            ep=of.ep,
            weights=of.weights,
            batch=batch if isinstance(batch, int) else None,
            sequences=slots if isinstance(slots, int) else usual_slots,
            type_k=of.type_k,
            prefix_caching=prefixes,
            drafter=drafts.drafter,
        )
        if shape.states and server.get("slots") is None:
            found["server", "slots"] = min(usual_slots, cells // block)
        elif shape.states and isinstance(slots, int):
            check_sequences(of.model, slots, cells // block)
        context = shape.context
        if server.get("slot_context") is None and context is not None and context < cells:
            found["server", "slot_context"] = context
    return found


def _check_aligned(model: str, batch: Any, block: int, *, chunked: bool) -> None:
    """Refuse steps in which no block of a model with states can be filled, as vLLM does with a prefix cache."""
    if isinstance(batch, int) and batch < block:
        raise UserError(
            f"server.n_batch: vLLM does not start {model} with --max-num-batched-tokens {batch}: its blocks have "
            f"{block:,} tokens (In Mamba cache align mode, block_size must be <= max_num_batched_tokens)"
        )
    if not chunked:
        raise UserError(
            f"server.chunked_prefill: vLLM does not start {model} without it (Chunked prefill is required for mamba "
            "cache mode 'align'); with cache.prefix_cache = false it does"
        )


def check_sequences(model: str, slots: int, blocks: int) -> None:
    """Refuse more sequences at a time than blocks where each needs one for its states, without which vLLM does not
    start."""
    if slots > blocks:
        raise UserError(
            f"server.slots: vLLM does not start {model} with --max-num-seqs {slots}: it has blocks for the states of "
            f"{blocks} (max_num_seqs exceeds available Mamba cache blocks)"
        )


def _llamacpp(
    sections: dict[str, dict[str, Any]], of: Served, drafts: SpeculationSection
) -> dict[tuple[str, str], Any]:
    """What llama-server does on a device by default: the model's whole context, or what of it fits."""
    present = f"llama.cpp-{PRESENT['llama.cpp'].version}"
    found: dict[tuple[str, str], Any] = {
        ("server", "scheduler"): own_scheduler(str(sections["cache"].get("policy", ""))) or "llama-server",
        ("cache", "policy"): "hybrid" if memory_shape(of.model).states else present,
    }
    if sections["cache"].get("cells") is None:
        found["cache", "cells"] = llamacpp_cells(of, drafter=drafts.drafter, draft_tokens=drafts.tokens)
    return found


_SIZES = {
    "server": ("slots", "n_batch", "n_ubatch", "slot_context"),
    "cache": ("cells", "type_k", "type_v", "kernel"),
    "machine": ("n_gpu_layers", "n_cpu_moe", "cpu_gb_s"),
}
"""What a scenario says of the machine that it was written for, by section."""


def table_on(data: dict[str, Any], model: str | None, device: str | None, engine: str | None = None) -> dict[str, Any]:
    """The table of a scenario with another model, on another device or by another engine; shape and rules as in a
    scenario file.

    A scenario that is moved to a device or an engine leaves the sizes of its own machine behind: slots, batches, cells
    and types of K and V are then what follows from the device; and for an engine, the scheduler and policy of another.
    Its workload and everything else stay.
    """
    data = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    machine = data.setdefault("machine", {})
    if model is not None:
        section = data.setdefault("model", {})
        if machine.get("device") is not None and section.get("name") != model:
            data.get("cache", {}).pop("cells", None)  # What another model leaves of the device.
        section["name"] = model
    for name, key in left_behind(data, device, engine):
        del data[name][key]
    if device is not None:
        machine["device"] = device
        machine.pop("profile", None)
    return data


def left_behind(data: dict[str, Any], device: str | None, engine: str | None = None) -> list[tuple[str, str]]:
    """The keys of a scenario's table that ``table_on`` leaves behind, each with its section."""
    named = None if engine is None else _engine_named(data)
    moved = device is not None and data.get("machine", {}).get("device") != device
    left = dict(_SIZES) if moved or (named is not None and named[0] != engine) else {}
    if named is not None and named[0] != engine:
        left = {"server": ("scheduler", *left["server"]), "cache": ("policy", *left["cache"])}
    return [(name, key) for name, keys in left.items() for key in keys if key in data.get(name, {})]


def left_aside(
    label: str, data: dict[str, Any], device: str | None, engine: str | None, but: Collection[str] = ()
) -> str:
    """A line for what a scenario's table says and ``table_on`` leaves behind, save keys ``but``; empty if nothing."""
    keys = [(name, key) for name, key in left_behind(data, device, engine) if f"{name}.{key}" not in but]
    said = ", ".join(f"{name}.{key} = {data[name][key]}" for name, key in keys)
    return said and (
        f"{label}: {said}: left aside, as of another machine than {device}; to keep them, write "
        f'device = "{device}" in the file\'s [machine]'
    )


def described(scenario: Scenario) -> str | None:
    """What a scenario takes of its device, in one line; None without a device or if it says everything itself."""
    machine, cache, server = scenario.machine, scenario.cache, scenario.server
    if machine.device is None:
        return None
    device, vllm = device_named(machine.device), server.scheduler == "vllm"
    states, drafts = sum(group.kind == "state" for group in cache.groups), scenario.speculation
    drafted = states * drafts.tokens if drafts.on else 0
    block = cache.groups[0].block_size if states else cache.block_size
    blocks = f"{cache.cells:,} cells ({cache.cells // block:,} blocks of {block}), what is left of its memory"
    context = memory_shape(scenario.model.name).context
    whole = "the model's whole context" if cache.cells == context else "what is left of its memory"
    flag = "--max-num-seqs" if vllm else "--parallel"
    items = {
        "weights": (
            machine.weights is not None and "weights" not in machine.model_fields_set,
            weights_assumed(machine.weights or ""),
        ),
        "cells": ("cells" not in cache.model_fields_set, blocks if vllm else f"{cache.cells:,} cells, {whole}"),
        "groups": (
            "groups" not in cache.model_fields_set and states > 0,
            f"{len(cache.groups) + drafted} blocks for the shortest of sequences, {states + drafted} of them of states",
        ),
        "slots": ("slots" not in server.model_fields_set, f"{server.slots} sequences at a time ({flag})"),
        "n_batch": (
            "n_batch" not in server.model_fields_set and server.n_batch is not None,
            f"{scenario.n_batch:,} tokens in a step (--max-num-batched-tokens)",
        ),
        "async_scheduling": (
            vllm and "async_scheduling" not in server.model_fields_set and server.async_scheduling,
            "each step composed while the one before it runs (--async-scheduling)",
        ),
        "type_k": ("type_k" not in cache.model_fields_set, f"K and V in {cache.type_k}"),
    }
    words = [text for assumed, text in items.values() if assumed]
    return f"assumed on {device.title}: {', '.join(words)}" if words else None


def beyond_memory(scenario: Scenario) -> list[str]:
    """A warning if a scenario says more cells than its device holds beside the model."""
    machine, cache, model = scenario.machine, scenario.cache, scenario.model.name
    if machine.device is None or "cells" not in cache.model_fields_set:
        return []
    on: dict[str, Any] = {"tp": machine.tensor_parallel, "ep": machine.expert_parallel, "weights": machine.weights}
    table = scenario.model_dump(include={"machine", "server", "cache"})
    if engine_on(table, machine.device, model, machine.weights) == "llamacpp":
        types = (cache.type_k, cache.type_v, machine.n_gpu_layers, machine.n_cpu_moe)
        of = Served("llamacpp", machine.device, model, on["tp"], on["weights"], *types)
        of = replace(of, flash_attn=cache.kernel != "masked")
        drafts = scenario.speculation
        held = llamacpp_cells(of, most=MOST_CONTEXT, drafter=drafts.drafter, draft_tokens=drafts.tokens)
    else:
        sizes: dict[str, Any] = {
            "batch": scenario.n_batch,
            "sequences": scenario.server.slots,
            "block_size": cache.block_size,
            "drafter": scenario.speculation.drafter,
        }
        held = default_cells(model, machine.device, type_k=cache.type_k, **(on | sizes))
    if cache.cells <= held:
        return []
    return [
        f"cache.cells: {cache.cells:,} cells are more than the {held:,} that {model} leaves on {machine.device} by the "
        "memory plan"
    ]
