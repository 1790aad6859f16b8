"""What a scenario on a device takes where it says nothing: the profile, the cells that its memory leaves, the engine's
settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import default_cells, llamacpp_cells
from kvsim.costs.memory_settings import MOST_CONTEXT, Engine
from kvsim.costs.served import Served
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import GGUF_ONLY
from policies import engine_of

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario


def engine_on(table: dict[str, Any], device: str, model: str, weights: str | None) -> Engine:
    """The engine of a scenario's table: the one that is named, or that of what is. Raises ``UserError``."""
    machine, server, cache = (table.get(name) or {} for name in ("machine", "server", "cache"))
    if machine.get("engine") in get_args(Engine):
        found: Engine = machine["engine"]
        return found
    scheduler, policy = str(server.get("scheduler", "")), engine_of(str(cache.get("policy", "")))
    for name in (scheduler, policy.lower()):
        if name.startswith(("llama-server", "llama.cpp")):
            return "llamacpp"
        if name.startswith("vllm"):
            return "vllm"
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
    try:
        if model is None:
            raise UserError(f"machine.device is {device!r}: say which model it serves, model.name")
        served = Served(engine_on(sections, device, model, weights), device, model, tp, weights, **types)
        found = _defaults(sections, served)
    except UserError as e:
        raise ValueError(str(e)) from None
    filled = frozenset((section, key) for section, key in found if sections[section].get(key) is None)
    for section, key in filled:
        sections[section] = {**sections[section], key: found[section, key]}
    return {**data, **sections}, filled


def _defaults(sections: dict[str, dict[str, Any]], of: Served) -> dict[tuple[str, str], Any]:
    """Values by section and key, of what has a value of its own on a device."""
    found: dict[tuple[str, str], Any] = {("cache", "type_k"): "f16", ("cache", "type_v"): "f16"}
    found |= _vllm(sections, of) if of.engine == "vllm" else _llamacpp(sections, of)
    # After the memory: times of a model that does not fit would be of no use.
    if sections["machine"].get("profile") is None:
        found["machine", "profile"] = find_profile(**vars(of))
    return found


def _vllm(sections: dict[str, dict[str, Any]], of: Served) -> dict[tuple[str, str], Any]:
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
        found["server", "async_scheduling"] = True  # Since 0.14.
    batch = server.get("n_batch")
    if scheduler == "vllm" and batch is None:
        batch = found["server", "n_batch"] = usual_batch
    if cache.get("cells") is None:
        # vLLM's null block is among its blocks, as it is among the cells of the policies with blocks.
        cells = found["cache", "cells"] = default_cells(
            of.model,
            of.device,
            block_size=cache.get("block_size", PRESENT["vLLM"].block_size),
            tp=of.tp,
            weights=of.weights,
            batch=batch if isinstance(batch, int) else None,
            sequences=slots if isinstance(slots, int) else usual_slots,
            type_k=of.type_k,
        )
        context = memory_shape(of.model).context
        if server.get("slot_context") is None and context is not None and context < cells:
            found["server", "slot_context"] = context
    return found


def _llamacpp(sections: dict[str, dict[str, Any]], of: Served) -> dict[tuple[str, str], Any]:
    """What llama-server does on a device by default: the model's whole context, or what of it fits."""
    found: dict[tuple[str, str], Any] = {
        ("server", "scheduler"): "llama-server",
        ("cache", "policy"): f"llama.cpp-{PRESENT['llama.cpp'].version}",
    }
    if sections["cache"].get("cells") is None:
        served = {key: value for key, value in vars(of).items() if key != "engine"}
        found["cache", "cells"] = llamacpp_cells(**served)
    return found


_SIZES = {"server": ("slots", "n_batch", "n_ubatch", "slot_context"), "cache": ("cells", "type_k", "type_v", "kernel")}
"""What a scenario says of the machine that it was written for, by section."""


def table_on(data: dict[str, Any], model: str | None, device: str | None) -> dict[str, Any]:
    """The table of a scenario with another model or on another device; shape and rules as in a scenario file.

    A scenario that is moved to a device leaves the sizes of its own machine behind: slots, batches, cells and types of
    K and V are then what follows from the device. Its workload and everything else stay.
    """
    data = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    machine = data.setdefault("machine", {})
    if model is not None:
        section = data.setdefault("model", {})
        if machine.get("device") is not None and section.get("name") != model:
            data.get("cache", {}).pop("cells", None)  # What another model leaves of the device.
        section["name"] = model
    if device is not None:
        if machine.get("device") != device:
            for section, keys in _SIZES.items():
                for key in keys:
                    data.get(section, {}).pop(key, None)
        machine["device"] = device
        machine.pop("profile", None)
    return data


def described(scenario: Scenario) -> str | None:
    """What a scenario takes of its device, in one line; None without a device or if it says everything itself."""
    machine, cache, server = scenario.machine, scenario.cache, scenario.server
    if machine.device is None:
        return None
    device, block, vllm = device_named(machine.device), cache.block_size, server.scheduler == "vllm"
    blocks = f"{cache.cells:,} cells ({cache.cells // block:,} blocks of {block}), what is left of its memory"
    context = memory_shape(scenario.model.name).context
    whole = "the model's whole context" if cache.cells == context else "what is left of its memory"
    flag = "--max-num-seqs" if vllm else "--parallel"
    items = {
        "cells": ("cells" not in cache.model_fields_set, blocks if vllm else f"{cache.cells:,} cells, {whole}"),
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
    on: dict[str, Any] = {"tp": machine.tensor_parallel, "weights": machine.weights}
    table = scenario.model_dump(include={"machine", "server", "cache"})
    if engine_on(table, machine.device, model, machine.weights) == "llamacpp":
        held = llamacpp_cells(model, machine.device, type_k=cache.type_k, type_v=cache.type_v, most=MOST_CONTEXT, **on)
    else:
        sizes: dict[str, Any] = {
            "batch": scenario.n_batch,
            "sequences": scenario.server.slots,
            "block_size": cache.block_size,
        }
        held = default_cells(model, machine.device, type_k=cache.type_k, **(on | sizes))
    if cache.cells <= held:
        return []
    return [
        f"cache.cells: {cache.cells:,} cells are more than the {held:,} that {model} leaves on {machine.device} by the "
        "memory plan"
    ]
