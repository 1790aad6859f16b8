"""Many requests in lockstep: cells, counts, failures and times are those of single steps."""

from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import build_policy, cost_model, drive
from policies import CacheConfig, Chunk, available
from policies.cells.stream_arenas import CacheSpec
from policies.fast_forward.lockstep import NO_READS, ReadForecast
from policies.layouts.multi_stream import MultiStreamPolicy
from tests.policies.fast_forward.harness import PROFILE, assert_alike, outcome, scenarios


@pytest.mark.slow
@pytest.mark.parametrize("detail", ["requests", "cache"])
@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(schedulers=("vllm", "vllm", "vllm", "llama-server", "llama-server-b4875", "static")))
def test_lockstep_changes_nothing(name, detail, scenario):
    together, a = outcome(scenario, name, fast_forward=True, detail=detail)
    alone, b = outcome(scenario, name, fast_forward=False, detail=detail)
    assert together == alone
    if a is not None:
        assert_alike(a, b)


IN_LOCKSTEP = [
    "contiguous",
    "adaptive",
    "llama.cpp-b4666",
    "llama.cpp-b6975",
    "prompt-decode-regions",
    "streams",
    "paged",
    "vllm",
    "chunked",
    "vattention",
    "paged-window",
    "hf-reserved",
    "growing",
    "oracle",
    "ring",
]


def counted(batch):
    """Count the calls that place chunks beside a lockstep batch; a compiled one hands them on to a function."""
    name = "_place" if hasattr(batch, "_place") else "place"
    calls = Mock(side_effect=getattr(batch, name))
    setattr(batch, name, calls)
    return calls


@pytest.mark.parametrize("name", IN_LOCKSTEP)
@pytest.mark.parametrize(("prefix_cache", "detail"), [(False, "requests"), (False, "cache"), (True, "cache")])
def test_nearly_all_passes_are_made_in_lockstep(name, prefix_cache, detail):
    """The control: otherwise the above would compare single steps with themselves."""
    tokens = {"kind": "lognormal", "mu": 4.5, "sigma": 0.5, "min": 1, "max": 250}
    scenario = load_scenario(
        {
            "workload": {
                "kind": "poisson",
                "requests": 40,
                "rate": 20.0,
                "prompt_tokens": tokens,
                "output_tokens": tokens,
            },
            "server": {"scheduler": "vllm", "slots": 20, "n_batch": 400, "n_ubatch": 400, "slot_context": 512},
            "cache": {"cells": 16_000, "window": 48, "prefix_cache": prefix_cache, "unified": True},
        }
    )
    costs = cost_model(scenario, PROFILE)
    policy, recorder = build_policy(scenario, name, costs), Recorder(detail=detail)
    policy.allocate = Mock(side_effect=policy.allocate)
    lockstep_batch = policy.lockstep_batch()
    placing = counted(lockstep_batch)
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), recorder, PROFILE)
    assert recorder.forward_passes > 700
    # Neither in single steps, nor beside a lockstep batch that they could not join.
    assert policy.allocate.call_count + placing.call_count < 0.1 * recorder.forward_passes


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    size=st.integers(1, 20),
    reserved=st.booleans(),
    n=st.integers(1, 100),
)
def test_a_forecast_sums_up_what_its_steps_read(lengths, size, reserved, n):
    """``reserved``: who begins a block in the first step has it already."""
    begins = {}
    for seq, length in enumerate(lengths):
        at = -length % size
        begins.setdefault(size if reserved and at == 0 else at, {})[seq] = None
    blocks = [-(-length // size) + (reserved and length % size == 0) for length in lengths]
    forecast = ReadForecast(
        n, sum(lengths), len(lengths), sum(blocks), block_size=size, block_starts=sorted(begins.items())
    )
    later = [length + step for step in range(1, n + 1) for length in lengths]
    assert forecast.total_scanned(n) == sum(later)
    assert forecast.total_runs(n) == sum(-(-length // size) for length in later)


@given(lengths=st.lists(st.integers(1, 100), max_size=8), most=st.integers(1, 100), n=st.integers(1, 100))
def test_a_forecast_grows_no_more_where_all_is_held(lengths, most, n):
    bends = [most - length for length in lengths if length < most]
    forecast = ReadForecast(n, sum(min(length, most) for length in lengths), len(bends), len(lengths), bends)
    assert forecast.total_scanned(n) == sum(min(length + step, most) for step in range(1, n + 1) for length in lengths)
    assert forecast.total_runs(n) == n * len(lengths)


def alone(name, prompt, output, window=64):
    """A single request on a server of its own, whose steps are all in lockstep.

    The policy, the recorder, and the calls that placed chunks beside those in lockstep.
    """
    fixed = {key: {"kind": "fixed", "value": n} for key, n in (("prompt_tokens", prompt), ("output_tokens", output))}
    scenario = load_scenario(
        {
            "workload": {"kind": "batch", "requests": 1, **fixed},
            "server": {"scheduler": "vllm", "slots": 4, "n_batch": 512, "n_ubatch": 512, "slot_context": 512},
            "cache": {"cells": 4096, "window": window},
        }
    )
    costs = cost_model(scenario, PROFILE)
    policy, recorder = build_policy(scenario, name, costs), Recorder(detail="requests")
    policy.allocate, placing = Mock(side_effect=policy.allocate), counted(policy.lockstep_batch())
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), recorder, PROFILE)
    assert policy.allocate.call_count == 0
    return policy, recorder, placing


def test_a_region_grows_on_the_way():
    _, recorder, placing = alone("growing", 20, 200)
    assert (recorder.compactions, recorder.moved_cells) == (3, 32 + 64 + 128)
    # The prompt, and nothing else, is placed beside the others.
    assert placing.call_count == 1


def test_a_ring_takes_a_prompt_longer_than_its_window_in_several_passes():
    policy, recorder, placing = alone("ring", 300, 10)
    assert recorder.forward_passes == -(-300 // policy.lockstep_batch().max_pass_tokens) + 9
    assert placing.call_count == 1


@pytest.mark.parametrize("kernel", ["tiled", "masked"])
def test_cells_that_a_window_has_passed_are_overwritten_in_lockstep(kernel):
    """Two sequences under a window of 24 tokens beside a prompt now and then, in 90 cells, against single steps."""
    caches = [CacheSpec(900, 32, share=0.5), CacheSpec(90, 30, window=24, share=0.5)]
    together, single = (
        MultiStreamPolicy("windows", CacheConfig(cells=900, n_ubatch=40), caches, kernel=kernel) for _ in range(2)
    )
    batch, held, taken = together.lockstep_batch(), {0: 30, 1: 11}, 0
    for seq, n in held.items():
        for policy in (together, single):
            policy.allocate([Chunk(seq, 0, n)])
        assert batch.join(seq)

    def next_step(*others):
        (passed,) = single.allocate([*(Chunk(seq, n, 1) for seq, n in held.items()), *others])
        held.update({seq: n + 1 for seq, n in held.items()})
        return [(int(p.reads.scanned[:2].sum()), int(p.reads.useful[:2].sum())) for p in passed.places]

    for prompt in (3, 9, 1, 30, 2, 2, 8):
        if forecast := batch.forecast(13):
            taken += forecast.steps
            groups = forecast.passes(2, lambda size: size)[0][1]
            expected = [next_step() for _ in range(forecast.steps)]
            each = [zip(g.each_scanned(forecast.steps), g.each_useful(forecast.steps), strict=True) for g in groups]
            assert list(zip(*each, strict=True)) == [tuple(step) for step in expected]
            batch.take_steps(forecast, forecast.steps)
        batch.place([Chunk(2, 0, prompt)])
        first = batch.next_step_reads()
        assert [(r.scanned, r.useful) for r in (first, *first.further)] == next_step(Chunk(2, 0, prompt))
        batch.take_step()
        for policy in (together, single):
            policy.free(2)
        for group in range(2):
            mine, other = together.occupancy(group), single.occupancy(group)
            assert (mine.position.tolist(), mine.owners) == (other.position.tolist(), other.owners)
    assert taken > 40


@pytest.mark.parametrize("name", ["contiguous", "llama.cpp-b6975", "sliding-window"])
def test_chunks_of_several_passes_are_summed_up_beside_the_members(name):
    """The members take part in the first pass only; without members nothing of them is left over from before."""
    policy = available()[name](CacheConfig(cells=512, n_ubatch=8, sequences=4, unified=True))
    policy.allocate([Chunk(0, 0, 8)])
    batch = policy.lockstep_batch()
    assert batch.join(0)
    first, second = batch.place([Chunk(1, 0, 9)])
    reads = batch.next_step_reads()
    assert (reads.useful, reads.runs, first.tokens, list(first.useful), second.tokens, list(second.useful)) == (
        *(9, 1, 7, [7]),
        *(2, [9]),
    )
    batch.take_step()
    batch.leave(0)
    passes = batch.place([Chunk(1, 9, 9)])
    assert batch.next_step_reads() == NO_READS
    assert [each.tokens for each in passes] == [8, 1]


def test_a_sequence_that_leaves_the_lockstep_to_grow_still_has_a_token_in_flight():
    """Where it is preempted at once, asynchronous scheduling lets the next one go first."""
    lengths = {"kind": "lognormal", "min": 1}
    server = {"scheduler": "vllm", "async_scheduling": True, "slots": 1, "n_batch": 8, "n_ubatch": 4}
    found = load_scenario(
        {
            "seed": 0,
            "workload": {
                "kind": "poisson",
                "rate": 30.0,
                "requests": 5,
                "prompt_tokens": {**lengths, "mu": 2.0, "sigma": 1.0, "max": 100},
                "output_tokens": {**lengths, "mu": 3.5, "sigma": 0.8, "max": 200},
            },
            "server": {**server, "slot_context": 160, "chunked_prefill": False, "reserve_full": False},
            "cache": {"cells": 192},
        }
    )
    fast, slow = (outcome(found, "growing", fast_forward=on, detail="requests")[0] for on in (True, False))
    assert fast == slow
