"""Many requests in lockstep: the same cells, counts, failures and times as one by one."""

from unittest.mock import Mock

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.costs.profile import load_profile
from kvsim.errors import Livelock, UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import build_policy, cost_model, drive
from kvsim.simulation.run_tables import requests_table
from policies import available
from policies.fast_forward.lockstep import ReadForecast
from policies.layouts.paged import PagedPolicy

PROFILE = load_profile("default")
COUNTS = [name for name in vars(Recorder()) if isinstance(vars(Recorder())[name], int) and not name.startswith("_")]


@st.composite
def scenarios(draw):
    prompt = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5])), "sigma": 1.0, "min": 1, "max": 100}
    output = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5, 4.5])), "sigma": 0.8, "min": 1, "max": 200}
    kind = draw(st.sampled_from(["poisson", "batch", "closed-loop", "sessions"]))
    workload = {"prompt_tokens": prompt, "output_tokens": output, "requests": draw(st.integers(1, 25))}
    if kind == "poisson":
        workload["rate"] = draw(st.sampled_from([2.0, 30.0, 200.0]))
    if kind == "closed-loop":
        workload |= {"users": 4, "think_s": draw(st.sampled_from([0.0, 0.5]))}
    if kind == "sessions":
        turns = {"kind": "fixed", "value": 3}
        workload = {"sessions": draw(st.integers(1, 6)), "rate": draw(st.sampled_from([2.0, 50.0])), "turns": turns}
        workload |= {"user_tokens": prompt, "output_tokens": output, "system_tokens": {"kind": "fixed", "value": 20}}
    scheduler = draw(st.sampled_from(["vllm", "vllm", "vllm", "llama-server", "static"]))
    host = draw(st.sampled_from([0, 0, 400])) if scheduler == "vllm" else 0
    swap = bool(host) and draw(st.booleans())
    context = draw(st.sampled_from([64, 160]))
    return load_scenario(
        {
            "name": "crew",
            "seed": draw(st.integers(0, 1000)),
            "workload": {"kind": kind, **workload},
            "server": {
                "scheduler": scheduler,
                "slots": draw(st.sampled_from([1, 3, 8, 20])),
                "n_batch": draw(st.sampled_from([4, 24, 64, 400])),
                "n_ubatch": 32,
                "slot_context": context,
                "chunked_prefill": draw(st.booleans()),
                "long_prefill_threshold": draw(st.sampled_from([0, 0, 10])),
                "reserve_full": draw(st.booleans()),
                "order": draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
                "preemption": "swap" if swap else "recompute",
            },
            "cache": {
                "cells": draw(st.sampled_from([192, 320, 800, 4000])),
                "block_size": draw(st.sampled_from([1, 4, 16])),
                "chunk_size": draw(st.sampled_from([8, 64])),
                "window": draw(st.sampled_from([2, 16, 21, 48])),
                "kernel": draw(st.sampled_from([None, None, None, "gather", "sliced"])),
                "prefix_cache": draw(st.booleans()),
                "eviction": draw(st.sampled_from(["lru", "lru", "fifo", "lfu", "sieve"])),
                "free_order": draw(st.sampled_from(["0.33.0", "0.33.0", "0.22.1"])),
                "watermark": draw(st.sampled_from([0.0, 0.1])),
                "host_cells": host,
            },
        }
    )


def outcome(scenario, name, fast_forward):
    """Everything that a run leaves behind, but for how the cache was on the way; or why it ended."""
    costs = cost_model(scenario, PROFILE)
    try:
        policy, recorder = build_policy(scenario, name, costs), Recorder(detail="requests")
        backend = SimulatedBackend(costs, policy.kernel, policy.groups)
        drive(scenario, policy, backend, recorder, "default", fast_forward=fast_forward)
    except UserError as e:
        return str(e), None
    except Livelock as e:
        return str(e).split(" s: ")[-1], None
    counts = {count: getattr(recorder, count) for count in COUNTS} | {"passes": recorder.forward_passes}
    cells = [(policy.occupancy(g).position.tolist(), policy.occupancy(g).owners) for g in range(len(policy.groups))]
    if isinstance(policy, PagedPolicy):
        # When all have gone, only the order of the free blocks still tells who had which.
        cells.append((policy.pool.free.order(), policy.pool.keys))
    order = [job.request.id for job in recorder.jobs]
    seen = costs.warnings(), costs.most_tokens, costs.most_cells
    return (counts, cells, policy.usage(), seen, order), requests_table(recorder.jobs)


@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_lockstep_changes_nothing(name, scenario):
    together, a = outcome(scenario, name, fast_forward=True)
    alone, b = outcome(scenario, name, fast_forward=False)
    assert together == alone
    if a is not None:
        pd.testing.assert_frame_equal(a, b, check_exact=False, rtol=1e-12, atol=1e-12)


CREWS = ["paged", "vllm", "chunked", "paged-window", "hf-reserved", "growing", "oracle", "ring"]


@pytest.mark.parametrize("name", CREWS)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nearly_all_passes_are_made_in_lockstep(name, prefix_cache):
    """Control: otherwise the above would compare one by one with itself."""
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
            "cache": {"cells": 16_000, "window": 48, "prefix_cache": prefix_cache},
        }
    )
    costs = cost_model(scenario, PROFILE)
    policy, recorder = build_policy(scenario, name, costs), Recorder(detail="requests")
    policy.allocate = Mock(side_effect=policy.allocate)
    lockstep_batch = policy.lockstep_batch()
    lockstep_batch.place = Mock(side_effect=lockstep_batch.place)
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), recorder, "default")
    assert recorder.forward_passes > 1000
    # Neither one by one, nor with those beside a lockstep batch who could not join it.
    assert policy.allocate.call_count + lockstep_batch.place.call_count < 0.1 * recorder.forward_passes


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    size=st.integers(1, 20),
    reserved=st.booleans(),
    n=st.integers(1, 100),
)
def test_a_course_sums_up_what_its_steps_read(lengths, size, reserved, n):
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
def test_a_course_grows_no_more_where_all_is_held(lengths, most, n):
    bends = [most - length for length in lengths if length < most]
    forecast = ReadForecast(n, sum(min(length, most) for length in lengths), len(bends), len(lengths), bends)
    assert forecast.total_scanned(n) == sum(min(length + step, most) for step in range(1, n + 1) for length in lengths)
    assert forecast.total_runs(n) == n * len(lengths)


def alone(name, prompt, output, window=64):
    """A single request on a server of its own; the policy, whose calls are counted, and the recorder."""
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
    for method in ("allocate", "place"):
        setattr(policy, method, Mock(side_effect=getattr(policy, method)))
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), recorder, "default")
    return policy, recorder


def test_a_region_grows_on_the_way():
    policy, recorder = alone("growing", 20, 200)
    assert (recorder.compactions, recorder.moved_cells) == (3, 32 + 64 + 128)
    # The prompt, and nothing else, is placed beside the others.
    assert (policy.allocate.call_count, policy.place.call_count) == (0, 1)


def test_a_ring_takes_a_prompt_longer_than_its_window_in_several_passes():
    policy, recorder = alone("ring", 300, 10)
    assert recorder.forward_passes == -(-300 // policy.lockstep_batch().max_pass_tokens) + 9
    assert (policy.allocate.call_count, policy.place.call_count) == (0, 1)
