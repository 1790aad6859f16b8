"""What is taken of the servers behind published points, and the scenarios that follow."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from kvsim.costs.memory_plan import plan
from kvsim.engines.published.points import read_points
from kvsim.engines.published.servers import flags_of, scenario_of, version_of, why_not
from kvsim.errors import UserError
from kvsim.scenario.length_sections import EmpiricalLengths, FixedLengths
from tests.kvsim.engines.published import write_points

MISSING = "" if find_spec("aiconfigurator_core") else "aiconfigurator-core is not installed"


@pytest.fixture
def points(tmp_path):
    return {point.id: point for point in read_points(write_points(tmp_path / "points.csv"))}


def of_inference_max(point, **changes):
    return replace(point, source="source_file=2026-04-06.csv; model=any", **changes)


def test_scripts_of_the_makers_say_what_their_servers_were_started_with(points):
    gpt = of_inference_max(points["four"], model="gpt-oss-120b")
    assert (flags_of(gpt).kv, flags_of(gpt).sequences, flags_of(gpt).lengths) == ("f16", "concurrency", 0.8)
    on_b200 = replace(gpt, device="b200_sxm")
    assert (flags_of(on_b200).kv, flags_of(on_b200).sequences) == ("fp8", 512)
    assert (
        flags_of(of_inference_max(points["four"], model="minimax-m2.5", precision="fp8", device="b300_sxm")).block_size
        == 32
    )
    assert flags_of(replace(gpt, source="mine")).source == "no source: the defaults of vLLM"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_of_all_published_points_something_is_known():
    able = [point for point in read_points() if why_not(point) is None]
    assert len(able) > 1000
    assert not [point.id for point in able if flags_of(point).source.endswith("the defaults of vLLM")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("apart", "the point does not say how many servers prefill and decode, or how many clients there were"),
        ("halves", None),
        ("shared", "attention data parallelism: several schedulers behind one address are not simulated"),
        ("staged", "pipeline parallelism is not simulated"),
        ("other", "sglang: only servers of vLLM are replayed"),
        ("four", None),
    ],
)
def test_what_is_no_single_scheduler_of_vllm_is_not_replayed(points, name, why):
    assert why_not(points[name]) == why


def test_clients_of_several_servers_behind_dynamo_are_not_those_of_one(points):
    behind = replace(points["four"], source="gtl_job_id=1; dynamo_version=0.8.0")
    assert why_not(behind).startswith("the point does not say how many clients each server had")
    assert why_not(replace(behind, source=behind.source + "; silicon_concurrency=4")) is None


def test_a_version_that_is_not_named_is_that_of_its_time(points):
    named = [version_of(replace(points["four"], version=said)) for said in ("v0.19.1", "", "nightly-5b8c30")]
    assert named == ["0.19.1", "0.11.0", "0.19.0"]


def test_vllm_s_own_defaults_are_taken_where_nothing_is_said(points):
    scenario, blocks = scenario_of(points["many"], flags_of(points["many"]))
    memory = plan(
        "llama-3.1-8b", ctx=516, parallel=1024, engine="vllm", batch=8192, vllm_version="0.12.0", device="h100_sxm"
    )
    assert scenario.cache.cells == 16 * blocks == 16 * memory.vllm_blocks(memory.memory)
    assert (scenario.server.slots, scenario.server.n_batch) == (1024, 8192)
    # As in 0.12: steps one by one, a request starts with its first chunk, blocks in the order of their release.
    assert (scenario.server.async_scheduling, scenario.server.reserve_full) == (False, False)
    assert (scenario.cache.policy, scenario.cache.free_order, scenario.cache.prefix_cache) == ("paged", "0.22.1", False)
    assert (scenario.workload.users, scenario.workload.requests) == (16, 160)
    assert scenario.workload.prompt_tokens == FixedLengths(kind="fixed", value=512)
    assert scenario.workload.output_tokens == FixedLengths(kind="fixed", value=4)
    assert (scenario.machine.device, scenario.machine.tensor_parallel) == ("h100_sxm", 1)


def test_what_is_known_of_a_server_goes_before_the_defaults(points):
    point = of_inference_max(points["many"], isl=1000, osl=200, concurrency=48)
    flags = flags_of(points["many"]).model_copy(
        update={"sequences": "concurrency", "tokens": "2 x isl", "asynchronous": True, "lengths": 0.8, "block_size": 32}
    )
    scenario, _ = scenario_of(point, flags)
    assert (scenario.server.slots, scenario.server.n_batch, scenario.server.async_scheduling) == (48, 2000, True)
    assert scenario.cache.block_size == 32
    assert scenario.workload.prompt_tokens == EmpiricalLengths(kind="empirical", quantiles=(800, 1000))
    assert scenario.workload.output_tokens == EmpiricalLengths(kind="empirical", quantiles=(160, 200))
    half, _ = scenario_of(point, flags.model_copy(update={"utilization": 0.45}))
    assert half.cache.cells < 0.5 * scenario.cache.cells


def test_more_blocks_than_a_scenario_can_have_are_as_good_as_all_of_them(points):
    point = replace(points["four"], model="gpt-oss-120b", device="b200_sxm", tp=8)
    scenario, blocks = scenario_of(point, flags_of(point))
    assert 16 * blocks > 2**24 == scenario.cache.cells


def test_what_is_not_known_is_said(points):
    with pytest.raises(UserError, match="no model called 'someone/Some-Model-7B-FP8'"):
        scenario_of(points["unknown"], flags_of(points["unknown"]))
    strange = replace(points["four"], weights="fp3")
    with pytest.raises(UserError, match="weights in 'fp3' are not known here"):
        scenario_of(strange, flags_of(strange))
    large = replace(points["four"], model="llama-3.1-405b")
    with pytest.raises(UserError, match="405b does not fit on 1 x h100_sxm by the memory plan"):
        scenario_of(large, flags_of(large))
