"""Each key, one by one, changes something under each policy and scheduler, or a line names it as without effect."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from kvsim.errors import UserError
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.server_defaults import EARLY_SERVER, own_scheduler
from kvsim.scenario.serving_sections import CacheSection, MachineSection, ServerSection
from kvsim.scenario.without_effect import effect_lines, without_effect
from kvsim.simulation.run import run
from policies import available, in_group
from tests.worlds import command

BUSY = {
    "workload": {
        "kind": "sessions",
        "sessions": 6,
        "rate": 60.0,
        "turns": {"kind": "fixed", "value": 3},
        "user_tokens": {"kind": "lognormal", "mu": 3.5, "sigma": 0.8, "min": 4, "max": 120},
        "output_tokens": {"kind": "lognormal", "mu": 3.0, "sigma": 0.6, "min": 4, "max": 60},
        "system_tokens": {"kind": "fixed", "value": 40},
        "think_s": 0.02,
    },
    "server": {"slots": 3, "n_batch": 48, "n_ubatch": 16, "slot_context": 220},
    "cache": {"cells": 512, "window": 64, "budget": 64, "host_cells": 512},
    "machine": {"host_gb_s": 0.05, "map_page_us": 50.0},
}
"""Sessions in too few cells, with long prompts in short steps: evictions, preemptions, copies, and prefixes."""
CALM = BUSY | {"server": {"slots": 8, "context_shift": True, "slot_context": 200}, "cache": {"cells": 2048}}
TIGHT = BUSY | {
    "workload": {"requests": 14, "rate": 400.0, "prompt_tokens": {"kind": "lognormal", "mu": 2.5, "sigma": 0.5}},
    "server": {"slots": 6, "n_batch": 48, "n_ubatch": 16, "slot_context": 90},
    "cache": {"cells": 192},
}
WORLDS = (BUSY, CALM, TIGHT)

OTHER: dict[str, Any] = {
    "server.slots": 2,
    "server.n_batch": 20,
    "server.n_ubatch": 7,
    "server.slot_context": 150,
    "server.context_shift": True,
    "server.n_keep": 30,
    "server.n_discard": 11,
    "server.cache_prompt": False,
    "server.cache_ram": 0,
    "server.cache_idle_slots": False,
    "server.cache_reuse": 1,
    "server.ctx_checkpoints": 0,
    "server.checkpoint_min_step": 3,
    "server.slot_prompt_similarity": 0.9,
    "server.keep_idle_slots": False,
    "server.chunked_prefill": False,
    "server.long_prefill_threshold": 9,
    "server.reserve_full": False,
    "server.async_scheduling": True,
    "server.order": "longest-prefix",
    "server.longest_prefix_limit": 1,
    "server.preemption": "swap",
    "server.victim": "fewest-generated",
    "server.requeue": "back",
    "server.prefetch": "on-resume",
    "cache.cells": 900,
    "cache.block_size": 4,
    "cache.chunk_size": 5,
    "cache.page_tokens": 8,
    "cache.threshold": 0.9,
    "cache.window": 20,
    "cache.full_layers": 3,
    "cache.window_layers": 1,
    "cache.sinks": 9,
    "cache.budget": 20,
    "cache.budget_groups": 2,
    "cache.unified": False,
    "cache.search": "next-fit",
    "cache.sort_batch": True,
    "cache.pad": 256,
    "cache.kernel": "gather",
    "cache.prefix_cache": False,
    "cache.eviction": "lfu",
    "cache.free_order": "0.11.0",
    "cache.watermark": 0.4,
    "cache.admission": "no-evict",
    "cache.conservativeness": 9.0,
    "cache.groups": [{"kind": "full"}, {"kind": "window", "span": 64}],
    "cache.retention": -1,
    "cache.host_cells": 64,
    "cache.offload_order": "arc",
    "cache.offload_blocks": 2,
    "cache.offload_store_threshold": 2,
    "cache.offload_answers": True,
    "cache.disk_cells": 4096,
    "machine.engine": "vllm",
    "machine.tensor_parallel": 2,
    "machine.weights": "fp8",
    "machine.n_gpu_layers": 1,
    "machine.n_cpu_moe": 1,
    "machine.cpu_gb_s": 1.0,
    "machine.host_gb_s": 0.001,
    "machine.host_latency_s": 0.5,
    "machine.disk_gb_s": 0.001,
    "machine.disk_latency_s": 0.05,
    "machine.map_page_us": 900.0,
}
"""A value of each key that is not the default. ``cache_reuse`` shows in prompts that leave out a part in the middle:
see the tests of llama-server."""
ELSEWHERE = {
    "server.scheduler",
    "cache.policy",
    "cache.type_k",
    "cache.type_v",
    "machine.profile",
    "machine.device",
} | {
    "machine.expert_parallel"  # Refused but for as many servers.
}
"""What is chosen, and types and profiles, for which there are times or an error."""


def outcome(scenario: Scenario, policy: str) -> Any:
    """All that a run tells, but what it says of its scenario; the error where it is refused."""
    try:
        result = run(load_scenario(scenario), policy)
    except UserError as e:
        return str(e)
    said = {"wall_s", "assumed", "without_effect", "cells", "slots", "inferred"}
    return {key: value for key, value in result.summary.items() if key not in said}


def silent(policy: str, scheduler: str, keys: Sequence[str]) -> list[str]:
    """The keys that change nothing in any of the worlds, and are not named; and those that are named wrongly."""
    found: list[str] = []
    idle = set(keys)
    for table in WORLDS:
        base = deepcopy(table) | {"machine": dict(table["machine"])}
        base["server"]["scheduler"], base["cache"]["policy"] = scheduler, policy
        world = load_scenario(base)
        others = OTHER | {"cache.unified": not world.unified, "server.context_shift": not world.server.context_shift}
        if scheduler == EARLY_SERVER:
            others["server.slot_prompt_similarity"] = 0.0
        if available()[policy].kernel == "gather":
            others["cache.kernel"] = "masked"
        before = outcome(world, policy)
        for key in sorted(idle):
            section, name = key.split(".")
            changed = base | {section: base[section] | {name: others[key]}}
            try:
                other = load_scenario(changed)
                after = outcome(other, policy)
            except UserError as e:
                after = str(e)
            if isinstance(after, str):  # Refused, in a line of its own.
                idle.discard(key)
                continue
            if key in without_effect(other):
                found += [f"{key}: named, and has an effect"] if after != before else []
                idle.discard(key)
            elif after != before:
                idle.discard(key)
    return found + [f"{key}: no effect, and not named" for key in keys if key in idle]


QUICK = [("llama.cpp-b6975", "llama-server"), ("vllm", "vllm")]
OTHERS = [(name, own_scheduler(name) or "vllm") for name in in_group("standard")]
OTHERS += [
    ("paged", "llama-server"),
    ("contiguous", "llama-server"),
    ("contiguous", "static"),
    ("ring", "llama-server"),
]
OTHERS += [("streams", "llama-server-fair")]
BY_TRAFFIC = {
    "llama.cpp-b4666": "cache.threshold",
    "prompt-decode-regions": "server.victim",
    "hybrid": "server.checkpoint_min_step",
    "sliding-window": "server.checkpoint_min_step",
}
"""Keys that have an effect with other traffic: in spans of 2,048 cells and more; with other preemptions; where several
messages of a user are computed at once."""


@pytest.mark.parametrize(
    ("policy", "scheduler"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS if pair not in QUICK)],
)
def test_each_key_changes_something_or_is_named(policy, scheduler):
    keys = OTHER.keys() - {"server.cache_reuse", BY_TRAFFIC.get(policy)}
    assert silent(policy, scheduler, sorted(keys)) == []


def test_keys_without_effect_are_said_in_the_answer():
    told = command("run", "chat", "-p", "vllm", "--requests", "5").stdout
    assert "\nno effect under vllm: server.cache_ram, server.n_ubatch\n" in told
    runs = [("a", ["cache.window"]), ("b", []), ("c", ["cache.window"])]
    assert effect_lines(runs) == ["no effect under a, c: cache.window"]


def test_with_groups_of_layers_their_own_block_sizes_count():
    groups = {"policy": "vllm", "groups": OTHER["cache.groups"], "retention": -1}
    stated = {"server": {"scheduler": "vllm"}, "cache": {**groups, "block_size": 4, "host_cells": 64}}
    assert without_effect(load_scenario(stated)) == ["cache.block_size", "cache.host_cells"]


def test_every_key_is_tried():
    sections = {"server": ServerSection, "cache": CacheSection, "machine": MachineSection}
    known = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    assert OTHER.keys() == known - ELSEWHERE
