"""What is assumed of an engine where a scenario says nothing, and that what it says comes first."""

import json
import tomllib

import pytest

import kvsim
from kvsim.costs.memory_settings import PlanSettings
from kvsim.model.engine_versions import ENGINE_VERSIONS, LLAMACPP_B4666, LLAMACPP_B6975, PRESENT, VLLM_0_33_0
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.set_up import build_policy
from policies import available
from policies.presets import PRESETS
from tests.worlds import command

LLAMA = [preset.name for preset in PRESETS if preset.engine.startswith("llama.cpp")]
TODAY = ("llama.cpp-b6975", "streams", "sliding-window", "hybrid")
NOTHING = {"workload": {"requests": 20, "rate": 20.0}}
SLOTS = "since server.slot_context is more than an equal share"


def succeeded(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def said(policy="contiguous", **keys):
    return load_scenario(NOTHING, cache__policy=policy, **{"server__slots": 8, **keys})


def test_presets_agree_with_the_versions_that_they_name():
    named = {preset.name: preset.engine for preset in PRESETS if preset.engine}
    assert set(named.values()) <= ENGINE_VERSIONS.keys()
    assert named.keys() == {"llama.cpp-b4666", *TODAY, "vllm"}
    for name in LLAMA:
        preset, policy = available()[name], build_policy(said(name))
        assert preset.kernel == policy.kernel == ("tiled" if name in TODAY else "masked")
        assert ENGINE_VERSIONS[preset.engine].flash_attention == (policy.kernel == "tiled")


def test_plan_starts_from_the_same_defaults():
    s, llama, vllm = PlanSettings(), PRESENT["llama.cpp"], PRESENT["vLLM"]
    assert (s.batch, s.ubatch) == (llama.n_batch, llama.n_ubatch)
    assert (s.kv_unified, s.flash_attn) == (llama.unified, llama.flash_attention)
    assert (s.batch, s.block_size) == (vllm.n_batch, vllm.block_size)
    printed = succeeded(command("plan", "--model", "llama-3.1-8b", "--kv-unified", "--block-size", "32"))
    assert "defaults of llama.cpp b6975: flash attention auto (on), batch 2,048/512" in printed
    assert "defaults of vLLM 0.33.0: 2,048 tokens in a step (--max-num-batched-tokens)\n" in printed


@pytest.mark.parametrize(
    ("keys", "batches"),
    [
        ({}, (2048, 512)),
        ({"server__n_batch": 100}, (100, 100)),
        ({"server__n_ubatch": 64}, (2048, 64)),
        ({"server__n_batch": 256, "server__n_ubatch": 128}, (256, 128)),
        ({"server__n_batch": 64, "server__n_ubatch": 128}, (64, 64)),
        ({"cache__cells": 1000}, (1000, 512)),  # llama.cpp's n_batch is at most n_ctx.
        ({"server__scheduler": "vllm"}, (2048, 2048)),
        ({"server__scheduler": "vllm", "server__n_batch": 64, "server__n_ubatch": 32}, (64, 64)),
        ({"server__scheduler": "vllm", "server__slots": 2, "server__slot_context": 300}, (600, 600)),
        ({"server__scheduler": "vllm", "server__chunked_prefill": False, "server__slots": 1}, (16384, 16384)),
        ({"server__scheduler": "static"}, (256, 128)),
    ],
)
def test_batches_are_those_of_the_schedulers_engine_unless_stated(keys, batches):
    world = said(**keys)
    assert (world.n_batch, world.n_ubatch) == batches
    assert world.cache_config().n_ubatch == batches[1]


@pytest.mark.parametrize(
    ("policy", "keys", "unified", "slot_context"),
    [
        ("contiguous", {}, True, 16384),
        ("paged", {}, True, 16384),
        ("vllm", {}, True, 16384),
        ("llama.cpp-b4666", {}, True, 2048),
        ("llama.cpp-b6975", {}, False, 2048),
        ("sliding-window", {}, False, 2048),
        ("llama.cpp-b6975", {"cache__unified": True}, True, 16384),
        ("contiguous", {"cache__unified": False}, False, 2048),
        ("llama.cpp-b6975", {"server__slot_context": 2048}, False, 2048),
        ("llama.cpp-b6975", {"server__slot_context": 2049}, True, 2049),
        ("llama.cpp-b6975", {"server__slot_context": 2049, "cache__unified": False}, False, 2049),
    ],
)
def test_slots_share_a_cache_as_in_the_policys_engine_unless_stated(policy, keys, unified, slot_context):
    for world in (said(policy, **keys), said("oracle", **keys).under(policy)):
        assert (world.unified, world.slot_context) == (unified, slot_context)
        if policy == "llama.cpp-b6975":
            assert build_policy(world).groups[0].streams == (1 if unified else 8)


def test_slots_left_to_the_server_are_four_that_share_one_cache():
    for keys in ({}, {"server": {"slots": "auto"}}, {"server": {"parallel": "auto"}}):
        world = load_scenario({**NOTHING, **keys}, cache__policy="llama.cpp-b6975")
        assert (world.server.slots, world.unified, world.slot_context) == (4, True, 16384)
        first, second = assumptions(world)
        assert first == BATCH.replace("batch 2,048", "4 slots that share one cache (no --parallel), batch 2,048")
        assert second.endswith("flash attention auto (on)")
        assert load_scenario(tomllib.loads(world.to_toml())) == load_scenario(world)
    divided = load_scenario(NOTHING, cache__policy="streams")
    assert (divided.server.slots, divided.unified, divided.slot_context) == (4, False, 4096)
    assert "4 slots with caches of their own (no --parallel)" in assumptions(divided)[0]
    assert not load_scenario(divided, cache__unified=True).unified
    assert load_scenario({**NOTHING, "server": {"parallel": -1}}).server.slots == 4
    with pytest.raises(kvsim.UserError, match=r'a whole number or "auto" is expected, got .autp.'):
        load_scenario(NOTHING, server__slots="autp")
    assert load_scenario(NOTHING, server__scheduler="vllm").server.slots == 8
    with pytest.raises(kvsim.UserError, match=r'server.slots = "auto" is of the scheduler'):
        load_scenario(NOTHING, server__scheduler="vllm", server__slots="auto")


@pytest.mark.parametrize(
    ("asked", "slots", "unified", "cells", "slot_context"),
    [(1000, 3, False, 3 * 512, 512), (1000, 3, True, 1024, 1024), (300, 4, True, 512, 512), (512, 2, False, 512, 256)],
)
def test_todays_llamacpp_rounds_a_context_up_to_256_cells(asked, slots, unified, cells, slot_context):
    keys = {"server__slots": slots, "cache__cells": asked, "cache__unified": unified}
    world = said("llama.cpp-b6975", **keys)
    assert (world.context_cells, world.slot_context, world.n_batch) == (cells, slot_context, min(asked, 2048))
    assert build_policy(world).capacity == cells
    for policy, scheduler in (("contiguous", "llama-server"), ("llama.cpp-b6975", "static")):
        assert said(policy, server__scheduler=scheduler, **keys).context_cells == asked


def test_a_servers_flags_name_the_keys_of_a_scenario():
    flags = {"parallel": 3, "ctx_size": 3072, "kv_unified": False, "batch_size": 64, "ubatch_size": 32, "keep": 5}
    flags |= {"slot_similarity": 0.5, "cache_type_k": "q8_0"}
    world = load_scenario({"server": flags})
    server, cache = world.server, world.cache
    assert (server.slots, server.n_batch, server.n_ubatch, server.n_keep) == (3, 64, 32, 5)
    assert (cache.cells, cache.unified, cache.type_k, server.slot_prompt_similarity) == (3072, False, "q8_0", 0.5)
    assert load_scenario(world, server__parallel=2).server.slots == 2
    with pytest.raises(kvsim.UserError, match=r"server.parallel is another name of server.slots, which is there too"):
        load_scenario({"server": {"slots": 2, "parallel": 2}})


def test_a_flag_s_name_in_a_file_gives_way_to_an_axis_or_an_option():
    table = {**NOTHING, "server": {"parallel": 2, "ctx_size": 3072, "kv_unified": True}}
    changed = load_scenario(table, server__ctx_size=4096, server__slots=3, cache__unified=False)
    assert (changed.cache.cells, changed.server.slots, changed.unified) == (4096, 3, False)


def test_cells_that_are_rounded_up_are_said():
    assert (
        "1,000 cells rounded up to 1,024"
        in assumptions(said("llama.cpp-b6975", cache__cells=1000, cache__unified=True))[1]
    )
    assert not any("rounded" in line for line in assumptions(said("contiguous", cache__cells=1000)))


def test_a_stated_kernel_comes_first():
    assert build_policy(said("llama.cpp-b6975", cache__kernel="masked")).kernel == "masked"
    assert build_policy(said("llama.cpp-b4666", cache__kernel="tiled")).kernel == "tiled"


def test_too_many_slots_for_a_cache_each_are_refused_in_one_line():
    world = said(server__slots=64, cache__cells=64)
    assert build_policy(world).name == "contiguous"
    with pytest.raises(kvsim.UserError, match=r"cache.cells \(64\) shared out over server.slots \(64\)") as refused:
        kvsim.run(world, "llama.cpp-b4666")
    assert "\n" not in str(refused.value)


def test_a_run_under_another_policy_takes_that_policys_engine():
    """Whichever policy the scenario names, what is left open follows from the one that runs."""
    asked = {"workload__prompt_tokens": {"kind": "fixed", "value": 230}, "cache__cells": 2048}
    stated = said(
        "llama.cpp-b6975",
        server__n_batch=512,
        server__n_ubatch=512,
        server__slot_context=256,
        cache__unified=False,
        cache__kernel="tiled",
        **asked,
    )
    own = kvsim.run(stated)
    assert own.summary["assumed"] == []
    for world in (said("paged", **asked), said("llama.cpp-b6975", **asked)):
        run = kvsim.run(world, "llama.cpp-b6975")
        assert len(run.summary["assumed"]) == 2
        assert run.summary["truncated"] > 0
        different = {"wall_s", "assumed"}
        assert {k: v for k, v in run.summary.items() if k not in different} == {
            k: v for k, v in own.summary.items() if k not in different
        }


BATCH = "assumed of the server, as in llama.cpp b6975: batch 2,048/512 (--batch-size/--ubatch-size)"
EARLY = "assumed of the server, as in llama.cpp b4666:"
VLLM = "assumed of the server, as in vLLM 0.33.0: "
STEP = "2,048 tokens in a step (--max-num-batched-tokens)"
BLOCKS = "assumed under vllm, as in vLLM 0.33.0: blocks of 16 (--block-size)"
NOT_AHEAD = "each step composed when the one before it has ended, as on CPUs"


@pytest.mark.parametrize(
    ("policy", "keys", "lines"),
    [
        ("contiguous", {}, [BATCH]),
        ("contiguous", {"server__n_batch": 9}, [f"{BATCH[:45]} micro-batch 512 (--ubatch-size)"]),
        ("contiguous", {"server__n_ubatch": 9}, [f"{BATCH[:45]} batch 2,048 (--batch-size)"]),
        ("contiguous", {"server__n_ubatch": 9, "server__n_batch": 9}, []),
        ("contiguous", {"server__scheduler": "static"}, []),
        ("paged", {"server__scheduler": "vllm"}, [f"{VLLM}{STEP}, {NOT_AHEAD}"]),
        ("paged", {"server__scheduler": "vllm", "server__async_scheduling": False}, [VLLM + STEP]),
        ("paged", {"server__scheduler": "vllm", "server__n_batch": 64}, [VLLM + NOT_AHEAD]),
        ("paged", {"server__scheduler": "vllm", "server__n_batch": 64, "server__async_scheduling": True}, []),
        ("vllm", {}, [f"{VLLM}{STEP}, {NOT_AHEAD}", BLOCKS]),
        ("vllm", {"cache__block_size": 16, "server__scheduler": "llama-server"}, [BATCH]),
        (
            "llama.cpp-b6975",
            {},
            [
                BATCH,
                "assumed under llama.cpp-b6975, as in llama.cpp b6975: flash attention auto (on), "
                "a cache for each slot (no --kv-unified)",
            ],
        ),
        (
            "llama.cpp-b6975",
            {"server__slot_context": 4096, "cache__kernel": "tiled"},
            [
                BATCH,
                "assumed under llama.cpp-b6975, as in llama.cpp b6975: one cache for all slots (--kv-unified), "
                + SLOTS,
            ],
        ),
        ("llama.cpp-b6975", {"cache__unified": True, "cache__kernel": "masked"}, [BATCH]),
        ("streams", {}, [BATCH, "assumed under streams, as in llama.cpp b6975: flash attention auto (on)"]),
        (
            "llama.cpp-b4666",
            {},
            [
                f"{EARLY} context shift (no --no-context-shift), slots chosen for half of what they hold "
                "(--slot-prompt-similarity), batch 2,048/512 (--batch-size/--ubatch-size)",
                "assumed under llama.cpp-b4666, as in llama.cpp b4666: flash attention off, an equal share of the "
                "context for each slot, defragmentation above 0.1 (--defrag-thold)",
            ],
        ),
        (
            "llama.cpp-b4666",
            {"server__slot_context": 512, "cache__threshold": 0.3, "server__scheduler": "llama-server"},
            [BATCH, "assumed under llama.cpp-b4666, as in llama.cpp b4666: flash attention off"],
        ),
    ],
)
def test_what_is_assumed_is_said_and_what_is_stated_is_not(policy, keys, lines):
    assert list(assumptions(said(policy, **keys))) == lines


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_tables_and_reports_are_headed_by_what_was_assumed(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[workload]\nrequests = 12\n[server]\nslots = 8\n")
    ran = ["scheduler llama-server, 16,384 cells, 8 slots: llama.cpp-b6975 (llama.cpp b6975)"]
    ran.append("scheduler vllm, 16,384 cells, 8 slots: vllm (vLLM 0.33.0)")
    lines = [*assumptions(said("llama.cpp-b6975")), *assumptions(said("vllm"))]
    printed = succeeded(command("run", str(file), "-p", "llama.cpp-today"))
    head = "mine under llama.cpp-b6975 (llama.cpp b6975), scheduler llama-server, 16,384 cells, 8 slots, seed 1"
    assert printed.splitlines()[1:4] == [head, *lines[:2]]
    out = tmp_path / "out"
    printed = succeeded(
        command("compare", str(file), "-p", "llama.cpp-today", "-p", "vllm", "--out", str(out), "--all")
    )
    assert printed.splitlines()[5:11] == [*ran, *lines]
    saved = json.loads((out / "mine" / "comparison.json").read_text())
    assert [run["assumed"] for run in saved["policies"]] == [lines[:2], lines[2:]]
    assert [run["scheduler"] for run in saved["policies"]] == ["llama-server", "vllm"]
    page = tmp_path / "page.html"
    succeeded(command("report", str(out / "mine"), "--out", str(page)))
    assert all(line in page.read_text() for line in (*ran, *lines))
    sweep = tmp_path / "two.toml"
    sweep.write_text(
        'policies = ["llama.cpp-today", "vllm"]\n[base]\nworkload = { requests = 12 }\n'
        '[axes]\n"server.slots" = [2, 4]\n'
    )
    store = tmp_path / "two.sqlite"
    printed = succeeded(command("sweep", str(sweep), "--out", str(store), "--workers", "1"))
    schedulers = ["scheduler llama-server: llama.cpp-b6975", "scheduler vllm: vllm"]
    assert printed.splitlines()[5:11] == [*schedulers, *lines]
    again = json.loads(succeeded(command("sweep", str(sweep), "--out", str(store), "--workers", "1", "--json")))
    assert again["assumed"] == lines


@pytest.mark.slow
def test_a_saved_comparison_runs_again_as_it_did(tmp_path):
    """What was left open is still open in the scenario that is saved, so it follows from each policy once more."""
    compared = kvsim.compare(said("paged"), ["contiguous", "llama.cpp-b6975"], snapshots=False)
    compared.save(tmp_path)
    again = kvsim.compare(tmp_path / "scenario.toml", ["contiguous", "llama.cpp-b6975"], snapshots=False)
    for one, other in zip(compared.results, again.results, strict=True):
        assert one.summary["e2e_s"] == other.summary["e2e_s"]
        assert one.summary["cache"] == other.summary["cache"]


def test_the_versions_are_those_of_the_engines():
    """As read in their sources, see engine_versions.py."""
    assert (LLAMACPP_B4666.flash_attention, LLAMACPP_B4666.unified, LLAMACPP_B4666.threshold) == (False, True, 0.1)
    assert (LLAMACPP_B6975.flash_attention, LLAMACPP_B6975.unified, LLAMACPP_B6975.threshold) == (True, False, 0.0)
    assert {(v.n_batch, v.n_ubatch) for v in (LLAMACPP_B4666, LLAMACPP_B6975)} == {(2048, 512)}
    assert (VLLM_0_33_0.n_batch, VLLM_0_33_0.block_size) == (2048, 16)


@pytest.mark.parametrize("name", ["llama.cpp-b6975", "llama.cpp-b4666", "vllm", "paged"])
def test_a_policy_is_explained_with_its_engines_defaults(name):
    printed = " ".join(succeeded(command("policies", name)).split())
    engine = available()[name].engine
    assert (f"{engine}; where the scenario says nothing:" in printed) == bool(engine)
    assert json.loads(succeeded(command("policies", name, "--json")))["engine"] == engine


@pytest.mark.parametrize(
    ("policy", "keys", "said"),
    [
        ("h2o", {}, "assumed where tokens are evicted: a budget of 256 tokens for each sequence (cache.budget)"),
        ("h2o", {"cache__budget": 256}, None),
        ("paged-window", {}, "assumed where layers have a window: 256 tokens (cache.window)"),
        ("paged-window", {"cache__window": 256}, None),
        (
            "layer-groups",
            {"cache__window": 64},
            "assumed of the model: a window in 5 of 6 layers (cache.window_layers, cache.full_layers)",
        ),
        ("layer-groups", {"cache__window_layers": 3, "cache__window": 64}, None),
        (
            "no-evict",
            {},
            "assumed where requests state no limit of output (workload.max_output_tokens): a sequence may hold 512 "
            "tokens",
        ),
        ("no-evict", {"workload__max_output_tokens": 200}, None),
        ("paged", {}, None),
    ],
)
def test_what_a_policy_takes_for_granted_is_said_unless_it_is_stated(policy, keys, said):
    lines = assumptions(load_scenario("chat", cache__policy=policy, **keys))
    ours = [line for line in lines if " where " in line or "of the model" in line]
    assert ours == ([said] if said else [])
