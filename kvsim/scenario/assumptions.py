"""What a run assumes of an engine because the scenario does not say, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvsim.model.engine_versions import EngineVersion
from kvsim.model.storage_types import format_size
from kvsim.scenario.device_defaults import described
from kvsim.scenario.length_sections import MeanLengths
from kvsim.scenario.scenario import Scenario
from kvsim.scenario.server_defaults import EARLY_DEFAULTS, EARLY_SERVER
from policies import Preset, available

_BY_LIMIT = ("hf-reserved", "no-evict", "expected-length")
"""Policies that set room aside for all that a sequence may ever hold."""


def assumptions(scenario: Scenario) -> tuple[str, ...]:
    """A line for what the scheduler's engine would do, and one for the policy's; none for what the scenario states."""
    of_device = described(scenario)
    of_engines = (
        *_of_policy(scenario),
        *tuple(
            f"assumed {what}, as in {engine}: {', '.join(items)}"
            for what, engine, items in (
                ("of the server", scenario.scheduler_engine, list(_batches(scenario, scenario.scheduler_engine))),
                (f"under {scenario.cache.policy}", scenario.engine, list(_cache(scenario, scenario.engine))),
            )
            if items
        ),
    )
    return (
        (*_of_lengths(scenario), *of_engines) if of_device is None else (of_device, *_of_lengths(scenario), *of_engines)
    )


def _of_lengths(scenario: Scenario) -> Iterator[str]:
    """The spread of lengths of which the mean alone is said."""
    named = dict(scenario.workload)
    means = {
        name: lengths
        for name, lengths in named.items()
        if isinstance(lengths, MeanLengths) and name in scenario.workload.model_fields_set
    }
    assumed = [f"{name} {lengths.mean:,g}" for name, lengths in means.items() if "cv" not in lengths.model_fields_set]
    if assumed:
        usual = MeanLengths.model_fields["cv"].default
        yield (
            f"assumed of the lengths around {', '.join(assumed)}: lognormal, with a standard deviation of {usual:.0%} "
            "of the mean (cv), none above 4 times the mean"
        )


def _of_policy(scenario: Scenario) -> Iterator[str]:
    """What the policy takes for granted of the model and of clients, a line for each that the scenario leaves open."""
    cache, stated = scenario.cache, scenario.cache.model_fields_set
    if scenario.machine.device is None and "type_k" not in stated and cache.type_k != type(cache)().type_k:
        yield f"assumed of the cache, as in engines: K and V in {cache.type_k} (--cache-type-k, --cache-type-v)"
    if cache.policy == "hybrid" and scenario.model.state_mib is None and scenario.model.state_bytes:
        size = format_size(scenario.model.state_bytes)
        yield f"assumed of the model, as llama.cpp keeps it: a state of {size} for each sequence, in 32 bits"
    preset = available().get(cache.policy)
    parameters = preset.parameters if isinstance(preset, Preset) else ()
    if "budget" in parameters and "budget" not in stated:
        yield f"assumed where tokens are evicted: a budget of {cache.budget:,} tokens for each sequence (cache.budget)"
    if "window_layers" in parameters and not stated & {"full_layers", "window_layers"}:
        layers = f"{cache.window_layers} of {cache.full_layers + cache.window_layers} layers"
        yield f"assumed of the model: a window in {layers} (cache.window_layers, cache.full_layers)"
    if "window" in parameters and "window" not in stated:
        yield f"assumed where layers have a window: {cache.window:,} tokens (cache.window)"
    counts = cache.policy in _BY_LIMIT or (cache.admission != "as-it-fits" and "admission" in parameters)
    if counts and scenario.workload.max_output_tokens is None:
        yield (
            "assumed where requests state no limit of output (workload.max_output_tokens): a sequence may hold "
            f"{scenario.slot_context:,} tokens"
        )


def _batches(scenario: Scenario, engine: EngineVersion | None) -> Iterator[str]:
    """The defaults of the scheduler's engine that hold for the batches."""
    if engine is None:
        return
    yield from _sizes_of_batches(scenario, engine)
    assumed = "async_scheduling" not in scenario.server.model_fields_set
    if engine.engine == "vLLM" and scenario.machine.device is None and assumed:
        yield engine.defaults["async_scheduling"]


def _sizes_of_batches(scenario: Scenario, engine: EngineVersion) -> Iterator[str]:
    if scenario.machine.device is not None and "n_batch" not in scenario.server.model_fields_set:
        return  # The device's own line has it.
    if scenario.auto_slots:
        share = "that share one cache" if scenario.unified else "with caches of their own"
        yield f"{scenario.server.slots} slots {share} (no --parallel)"
    if scenario.server.scheduler == EARLY_SERVER:
        yield from (words for key, (_, words) in EARLY_DEFAULTS.items() if key not in scenario.server.model_fields_set)
    left = [key for key in ("n_batch", "n_ubatch") if getattr(scenario.server, key) is None]
    if engine.engine == "vLLM":  # Each step is one pass.
        left = [key for key in left if key == "n_batch"]
    yield from (engine.defaults[key] for key in (["batch"] if len(left) == 2 else left))


def _cache(scenario: Scenario, engine: EngineVersion | None) -> Iterator[str]:
    """The defaults of the policy's engine that hold for the cache."""
    preset = available().get(scenario.cache.policy)
    if engine is None or not isinstance(preset, Preset):
        return
    given = scenario.cache.model_fields_set | ({"slot_context"} if scenario.server.slot_context is not None else set())
    if scenario.cache.kernel is not None:
        given |= {"flash_attention"}
    if scenario.cache.groups:
        given |= {"block_size"}  # Each group has its own.
    if scenario.auto_slots and scenario.unified:
        given |= {"unified"}  # The server's own line has it.
    if scenario.context_cells != scenario.cache.cells:
        yield f"{scenario.cache.cells:,} cells rounded up to {scenario.context_cells:,}"
    for setting, words in engine.defaults.items():
        if setting not in given and (setting in preset.parameters or setting in ("flash_attention", "slot_context")):
            if setting == "unified" and scenario.unified != engine.unified:
                words = "one cache for all slots (--kv-unified), since server.slot_context is more than an equal share"
            yield words
