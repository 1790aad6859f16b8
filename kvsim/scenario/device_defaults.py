"""What a scenario on a device takes where it says nothing: the profile, the cells that its memory leaves, the engine's
settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario


def with_device_defaults(data: dict[str, Any]) -> tuple[dict[str, Any], frozenset[tuple[str, str]]]:
    """The table of a scenario with what follows from ``machine.device``, and the keys that were filled in.

    Tables without a device, or with faults that validation will find, are returned as they are. Raises ``ValueError``
    for a device or model that is not known, a model that does not fit, and times that there are not.
    """
    sections = {name: data.get(name, {}) for name in ("machine", "model", "server", "cache")}
    machine = sections["machine"]
    if not all(isinstance(section, dict) for section in sections.values()) or machine.get("device") is None:
        return data, frozenset()
    asked = (
        machine["device"],
        machine.get("tensor_parallel", 1),
        machine.get("weights"),
        sections["model"].get("name"),
    )
    device, tp, weights, model = asked
    if not (isinstance(device, str) and isinstance(model, str | None) and isinstance(weights, str | None)):
        return data, frozenset()
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        return data, frozenset()
    try:
        if model is None:
            raise UserError(f"machine.device is {device!r}: say which model it serves, model.name")
        found = _defaults(sections, device, tp, weights, model)
    except UserError as e:
        raise ValueError(str(e)) from None
    filled = frozenset((section, key) for section, key in found if sections[section].get(key) is None)
    for section, key in filled:
        sections[section] = {**sections[section], key: found[section, key]}
    return {**data, **sections}, filled


def _defaults(
    sections: dict[str, dict[str, Any]], device: str, tp: int, weights: str | None, model: str
) -> dict[tuple[str, str], Any]:
    """Values by section and key, of what has a value of its own on a device."""
    server, cache = sections["server"], sections["cache"]
    usual_batch, usual_slots = serve_defaults(device_named(device).memory_bytes, device)
    slots = server.get("slots", usual_slots)
    found: dict[tuple[str, str], Any] = {
        ("server", "scheduler"): "vllm",
        ("server", "slots"): slots,
        ("cache", "policy"): "vllm",
        ("cache", "type_k"): "f16",
        ("cache", "type_v"): "f16",
    }
    scheduler = server.get("scheduler", "vllm")
    if scheduler == "vllm":
        found["server", "async_scheduling"] = True  # Since 0.14.
    batch = server.get("n_batch")
    if scheduler == "vllm" and batch is None:
        batch = found["server", "n_batch"] = usual_batch
    if cache.get("cells") is None:
        block = cache.get("block_size", PRESENT["vLLM"].block_size)
        held = default_cells(
            model,
            device,
            block_size=block,
            tp=tp,
            weights=weights,
            batch=batch if isinstance(batch, int) else None,
            sequences=slots if isinstance(slots, int) else usual_slots,
            type_k=cache.get("type_k") or "f16",
        )
        # vLLM's null block is among its blocks, as it is among the cells of the policies with blocks.
        cells = found["cache", "cells"] = held
        context = memory_shape(model).context
        if server.get("slot_context") is None and context is not None and context < cells:
            found["server", "slot_context"] = context
    # After the memory: times of a model that does not fit would be of no use.
    if sections["machine"].get("profile") is None:
        found["machine", "profile"] = find_profile(model, device, tp=tp, weights=weights)
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
    device, block = device_named(machine.device), cache.block_size
    blocks = f"{cache.cells:,} cells ({cache.cells // block:,} blocks of {block}), what is left of its memory"
    items = {
        "cells": ("cells" not in cache.model_fields_set, blocks),
        "slots": ("slots" not in server.model_fields_set, f"{server.slots} sequences at a time (--max-num-seqs)"),
        "n_batch": (
            "n_batch" not in server.model_fields_set and server.n_batch is not None,
            f"{scenario.n_batch:,} tokens in a step (--max-num-batched-tokens)",
        ),
        "async_scheduling": (
            "async_scheduling" not in server.model_fields_set and server.async_scheduling,
            "each step composed while the one before it runs (--async-scheduling)",
        ),
        "type_k": ("type_k" not in cache.model_fields_set, f"K and V in {cache.type_k}"),
    }
    words = [text for assumed, text in items.values() if assumed]
    return f"assumed on {device.title}: {', '.join(words)}" if words else None


def beyond_memory(scenario: Scenario) -> list[str]:
    """A warning if a scenario says more cells than its device holds beside the model."""
    machine, cache = scenario.machine, scenario.cache
    if machine.device is None or "cells" not in cache.model_fields_set:
        return []
    held = default_cells(
        scenario.model.name,
        machine.device,
        tp=machine.tensor_parallel,
        weights=machine.weights,
        batch=scenario.n_batch,
        sequences=scenario.server.slots,
        type_k=cache.type_k,
        block_size=cache.block_size,
    )
    if cache.cells <= held:
        return []
    return [
        f"cache.cells: {cache.cells:,} cells are more than the {held:,} that {scenario.model.name} leaves on "
        f"{machine.device} by the memory plan"
    ]
