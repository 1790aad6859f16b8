"""Models whose layers keep states, simulated by their names."""

from dataclasses import replace

import pytest

from kvsim import recommend
from kvsim.costs.devices import devices
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import plan
from kvsim.costs.memory_settings import PlanSettings
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.scenario import load_scenario
from policies import available
from tests.kvsim.advice.recommend.worlds import SMALL, space_of
from tests.worlds import command

GRANITE = {"model": {"name": "granite-4.0-h-small"}, "machine": {"device": "h100_sxm"}}


def on_device(model, **changes):
    return load_scenario({"model": {"name": model}, "machine": {"device": "h100_sxm"}}, **changes)


@pytest.mark.parametrize(
    ("model", "tables", "grid"),
    [
        ("granite-4.0-h-small", ["full", *["state"] * 9], 1),
        ("qwen3.5-27b", ["full", *["state"] * 3], 64),
        ("falcon-h1-7b", ["full", "state"], 1),
        ("jamba-1.5-mini", ["full", *["state"] * 7], 0),
        ("kimi-linear-48b-a3b", ["latent", *["state"] * 3], 0),
    ],
)
def test_the_groups_are_the_tables_that_vllm_makes(model, tables, grid):
    scenario = on_device(model)
    planned = plan(model, engine="vllm", device="h100_sxm", batch=8192, parallel=1024, weights=scenario.machine.weights)
    made, blocks = BlockGroups.of(planned.shape, planned.settings), planned.vllm_blocks(planned.memory)
    policy = available()["vllm"](scenario.cache_config())
    assert [group.kind for group in scenario.cache.groups] == tables
    assert len(tables) == made.least
    assert {group.block_size for group in scenario.cache.groups} == {made.block_size}
    assert {group.checkpoint_grid for group in scenario.cache.groups if group.kind == "state"} == {grid}
    assert policy.pool.n == blocks
    assert f"{blocks:,} blocks of {made.block_size}" in assumptions(scenario)[0]


def test_blocks_without_a_prefix_cache_are_those_of_the_plan():
    planned = plan("qwen3.5-27b", engine="vllm", device="h100_sxm", prefix_caching=False)
    groups = on_device("qwen3.5-27b", cache__prefix_cache=False).cache.groups
    assert groups[0].block_size == BlockGroups.of(planned.shape, planned.settings).block_size


def test_no_more_sequences_run_at_once_than_there_are_blocks_for_states():
    """vLLM issue 49064."""
    scenario = on_device("qwen3.5-27b")
    blocks = scenario.cache.cells // scenario.cache.groups[0].block_size
    assert scenario.server.slots == blocks < 1024
    assert on_device("qwen3.5-27b", server__slots=blocks).server.slots == blocks
    with pytest.raises(UserError, match=rf"--max-num-seqs {2 * blocks}: .*available Mamba cache blocks"):
        on_device("qwen3.5-27b", server__slots=2 * blocks)


def test_groups_that_a_scenario_states_come_first_and_those_of_the_model_follow_the_policy():
    groups = [{"kind": "full", "block_size": 1056}, {"kind": "state", "block_size": 1056, "layers": 9}]
    assert len(load_scenario(GRANITE, cache__groups=groups).cache.groups) == 2
    scenario = load_scenario(GRANITE)
    other = scenario.under("hybrid")
    assert (other.cache.groups, other.server.scheduler) == ((), "llama-server")
    assert other.under("vllm").cache == scenario.cache


def test_llamacpp_keeps_the_states_of_the_model():
    scenario = load_scenario(GRANITE, machine__engine="llamacpp")
    assert (scenario.cache.policy, scenario.cache.cells) == ("hybrid", 131_072)
    assert scenario.model.state_bytes == sum(
        part.bytes for part in plan("granite-4.0-h-small", engine="llamacpp").parts if part.name.startswith("state")
    )
    assert any("a state of 147.48 MiB" in line for line in assumptions(scenario))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("granite-4.0-h-small", {"cache__policy": "llama.cpp-b6975"}, "which policy llama.cpp-b6975 does not; hybrid"),
        ("granite-4.0-h-small", {"cache__policy": "paged"}, "which policy paged does not"),
        ("mamba-2.8b", {}, "models without any attention are not simulated; kvsim plan --model mamba-2.8b"),
        ("mamba-2.8b", {"machine__engine": "llamacpp"}, "models without any attention"),
    ],
)
def test_what_is_not_simulated_is_refused_in_a_line(model, changes, message):
    with pytest.raises(UserError, match=message) as refused:
        on_device(model, **changes)
    assert "\n" not in str(refused.value)


def test_times_of_sparse_attention_are_refused_in_a_line():
    scenario = on_device("deepseek-v3.2", machine__device="h200_sxm", machine__tensor_parallel=8)
    with pytest.raises(UserError, match="times of attention that an index makes sparse are not known") as refused:
        load_profile(scenario.machine.profile)
    assert "\n" not in str(refused.value)


def test_without_a_device_the_line_names_what_it_takes():
    with pytest.raises(UserError, match=r"\[\[cache.groups\]\] of kind state, which follow from a machine.device"):
        load_scenario("chat", model="granite-4.0-h-tiny")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", "10 blocks for the shortest of sequences, 9 of them of states"),
        ("llamacpp", "assumed of the model, as llama.cpp keeps it: a state of 55.37 MiB for each sequence, in 32 bits"),
    ],
)
def test_a_model_with_states_runs_by_its_name(engine, said):
    asked = ("run", "chat", "--requests", "20", "--model", "granite-4.0-h-tiny", "--device", "h100_sxm")
    done = command(*asked, "--engine", engine)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "20 of 20 requests completed, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server__n_batch": 512, "server__slots": 8}, "blocks have 1,088 tokens .In Mamba cache align mode"),
        ({"server__chunked_prefill": False}, "Chunked prefill is required for mamba cache mode 'align'"),
    ],
)
def test_what_vllm_does_not_start_with_beside_a_prefix_cache_is_refused(changes, message):
    """vLLM's own messages, which users of it quote (``config/vllm.py``, ``model_executor/models/config.py``)."""
    with pytest.raises(UserError, match=message):
        on_device("qwen3.5-35b-a3b", **changes)
    on_device("qwen3.5-35b-a3b", **changes, cache__prefix_cache=False)


@pytest.mark.parametrize("model", ["granite-4.0-h-small", "qwen3.5-27b", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize("blocks", [40, 1000])
def test_the_longest_request_of_a_number_of_blocks_takes_no_more(model, blocks):
    shape, s = memory_shape(model), PlanSettings()
    longest = BlockGroups.of(shape, s).longest(blocks)
    taken, beyond = (BlockGroups.of(shape, replace(s, ctx=ctx)).of_request for ctx in (longest, longest + 1))
    assert taken <= blocks < beyond


def searched(model, engine):
    """The settings that are searched for it on an H100, where prompts share text."""
    base = on_device(model, machine__engine=engine)
    profile, memory = load_profile(base.machine.profile), devices()["h100_sxm"].memory_bytes
    return space_of(engine, base=base, profile=profile, model=model, memory=memory, reuse=True)


def test_of_vllm_the_settings_are_searched_with_which_it_starts():
    space = searched("qwen3.5-35b-a3b", "vllm")
    assert {c.scenario.cache.policy for c in space.candidates} == {"vllm"}
    kept = {c.scenario.cache.prefix_cache: c.scenario for c in space.candidates if not c.reason}
    assert set(kept) == {True, False}
    assert all(any(group.kind == "state" for group in scenario.cache.groups) for scenario in kept.values())
    least = {True: 2048, False: 128}
    for prefixes, batch in least.items():
        assert batch == min(c.scenario.n_batch for c in space.candidates if c.scenario.cache.prefix_cache is prefixes)
    many = [c for c in space.candidates if c.scenario.server.slots == 512]
    assert {c.reason for c in many} == {"memory"}
    assert all("available Mamba cache blocks" in c.detail for c in many)
    assert ("--enable-chunked-prefill", "") in many[0].flags
    assert space.policies_left_out["hf-reserved"] == ("engine", "not with the states of qwen3.5-35b-a3b")


@pytest.mark.slow
def test_of_llamacpp_the_policy_with_states_is_searched():
    space = searched("granite-4.0-h-small", "llamacpp")
    assert {(c.scenario.cache.policy, c.scenario.unified) for c in space.candidates} == {
        ("hybrid", True),
        ("hybrid", False),
    }
    assert (2048, 2048) in {(c.scenario.n_batch, c.scenario.n_ubatch) for c in space.candidates}
    assert {c.reason for c in space.candidates} == {"", "memory"}


@pytest.mark.slow
def test_recommend_searches_them():
    found = recommend(
        users={"users": 2, "prompt": 200, "output": 20, "think": "10s"},
        slo="ttft_p95<4s",
        model="granite-4.0-h-tiny",
        device="h100_sxm",
        engine="vllm",
        requests=10,
        workers=1,
        budget=SMALL,
    )
    assert found.best[0].verdict == "surely"
    assert "no measured server of this kind: no error is known" in found.profile.basis
