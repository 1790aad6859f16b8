"""Models whose layers keep states, simulated by their names."""

import pytest

from kvsim.costs.memory_plan import plan
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.errors import UserError
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.scenario import load_scenario
from policies import available
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


def test_recommend_refuses_them_in_a_line():
    slo = ("--slo", "ttft_p95<1s")
    done = command("recommend", "--scenario", "chat", *slo, "--model", "granite-4.0-h-tiny", "--device", "h100_sxm")
    assert done.returncode == 2
    assert "granite-4.0-h-tiny: recommend does not search for layers that keep states" in done.stderr
