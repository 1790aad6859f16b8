"""Why requests slow down: every second has one cause, and constructed slowdowns are attributed to their cause."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.advice.why.diagnosis import why
from kvsim.advice.why.remedies import REMEDIES
from kvsim.costs.load_profile import load_profile
from kvsim.errors import Livelock
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import DETAILS
from kvsim.simulation.run import run
from kvsim.simulation.time_breakdown import SECONDS, TERMS
from policies import available
from tests.kvsim.advice.why.worlds import FEW, SHORT, breakdown, crowded, one_after_another
from tests.kvsim.simulation.random_runs import scenarios


@pytest.mark.slow
@settings(max_examples=22, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
@given(scenarios(), st.sampled_from(sorted(available())))
def test_seconds_add_up(world, name):
    try:
        causes, result = breakdown(world, name)
    except (kvsim.UserError, Livelock):
        return
    completed = result.requests[result.requests["status"] == "completed"]
    assert causes["id"].tolist() == completed["id"].tolist()
    np.testing.assert_allclose(causes[SECONDS].sum(axis=1), causes["e2e_s"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(causes["e2e_s"], completed["e2e_s"], rtol=1e-12)
    assert (causes[SECONDS] > -1e-12).all(axis=None)
    passes = result.passes
    np.testing.assert_allclose(passes[list(TERMS)].sum(axis=1), passes["seconds"], rtol=1e-9)


def test_a_prompt_that_the_server_has_cut_is_watched_no_longer_than_it_is():
    """What follows it are tokens of the answer, of which none was computed before."""
    lengths = {"kind": "lognormal", "min": 1}
    world = load_scenario(
        {
            "seed": 133,
            "workload": {
                "kind": "sessions",
                "sessions": 1,
                "rate": 2.0,
                "turns": {"kind": "fixed", "value": 3},
                "system_tokens": {"kind": "fixed", "value": 20},
                "user_tokens": {**lengths, "mu": 2.0, "sigma": 1.0, "max": 100},
                "output_tokens": {**lengths, "mu": 4.5, "sigma": 0.8, "max": 200},
            },
            "server": {"scheduler": "llama-server-b4875", "n_batch": 4, "slot_context": 160, "n_keep": 4},
            "cache": {"cells": 192},
        },
        server__keep_idle_slots=False,
    )
    together, alone = (breakdown(world, "contiguous", most_steps=most)[0] for most in (1 << 62, 0))
    assert len(together) > 0
    pd.testing.assert_frame_equal(together, alone, check_exact=True)


def test_attention_behind_a_window_is_charged_no_more_than_it_costs():
    """A chunk of several tokens can see more cells than its window still holds."""
    lengths = {"kind": "fixed", "value": 60}
    world = load_scenario(
        {
            "workload": {
                "kind": "batch",
                "requests": 1,
                "prompt_tokens": lengths,
                "output_tokens": {**lengths, "value": 2},
            },
            "server": {"slots": 1, "n_batch": 4, "n_ubatch": 4, "slot_context": 64},
            "cache": {"cells": 192, "block_size": 1, "window": 2, "kernel": "masked", "prefix_cache": False},
        }
    )
    causes, _ = breakdown(world, "paged-window")
    assert (causes[SECONDS] >= 0).all(axis=None)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
@pytest.mark.parametrize("name", ["contiguous", "llama.cpp-b4666", "paged", "streams", "idle-compaction", "ring"])
def test_shares_of_a_difference_make_up_the_whole(name, scheduler):
    found = why(load_scenario(FEW, server__scheduler=scheduler), name)
    for contrast in (found.over_time, found.across):
        assert contrast.table["share"].sum() == pytest.approx(1)
        assert contrast.table["difference"].sum() == pytest.approx(contrast.difference_s)
    latencies = found.requests["e2e_s"]
    quarter = len(latencies) // 4
    assert found.over_time.means_s == pytest.approx((latencies.head(quarter).mean(), latencies.tail(quarter).mean()))
    assert found.across.means_s[1] == pytest.approx(latencies.nlargest(quarter).mean())


@pytest.mark.parametrize("detail", DETAILS)
def test_the_breakdown_changes_no_result(detail):
    """The summary is that of a run without a time breakdown; times may be summed up in another order."""
    least, printed = (run(FEW, "fill-holes", detail=d).summary for d in ("cache", detail))
    assert printed["e2e_s"] == pytest.approx(least["e2e_s"], rel=1e-12)
    for part in ("queue", "prefix", "forward_passes"):
        assert printed[part] == least[part]


def test_queueing_alone():
    """One slot, and twice as many requests as it can serve."""
    workload = {"kind": "poisson", "rate": 240.0, "requests": 80, **SHORT}
    found = why(load_scenario({"workload": workload, "server": {"slots": 1, "keep_idle_slots": False}}))
    assert found.over_time.dominant == "queueing"
    assert found.over_time.table["share"]["queueing"] > 0.99
    assert found.sentence.startswith("Late requests take")
    assert found.remedies[0] == REMEDIES["queueing"][0]


@pytest.mark.slow
def test_waiting_with_a_free_slot_is_waiting_for_cells():
    found = why(crowded(), "paged")
    assert found.across.dominant == "cells"
    assert "is waiting for cells" in found.sentence
    assert found.requests["cells_s"].sum() > 20 * found.requests["queueing_s"].sum()
    assert found.remedies[0] == REMEDIES["cells"][0]
    more_slots, more_cells = why(crowded(slots=32), "paged"), why(crowded(cells=1024), "paged")
    waited = found.requests["cells_s"].sum()
    assert more_slots.requests["cells_s"].sum() > 0.9 * waited
    assert more_cells.requests["cells_s"].sum() < 0.1 * waited


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
def test_waiting_without_a_free_slot_is_waiting_for_a_slot(scheduler):
    """Control: if all requests fit, none waits for cells, even if prompts fill the steps."""
    for world in (crowded(16384, 2, scheduler), crowded(16384, 16, scheduler, n_batch=32)):
        found = why(world, "paged")
        waited = "steps_s" if scheduler != "static" and world.server.slots == 16 else "queueing_s"
        assert found.requests[waited].sum() > 0
        assert (found.requests["cells_s"] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_waiting_with_free_slots_and_cells_is_waiting_for_a_step(ahead):
    """Whatever the cells: for the rest of the step, the one composed ahead of it, and those that prompts fill."""
    tables = [
        why(crowded(cells, 200, n_batch=128, async_scheduling=ahead), "paged").requests for cells in (16384, 131072)
    ]
    for column in ("queueing_s", "cells_s"):
        assert (tables[0][column] == 0).all()
    assert (tables[0]["steps_s"] > 0).sum() > 50
    assert tables[0]["steps_s"].tolist() == tables[1]["steps_s"].tolist()


@pytest.mark.slow
def test_a_policy_that_admits_no_request_makes_llama_server_wait_for_cells():
    found = why(crowded(1024, 8, "llama-server", slot_context=256), "hf-reserved")
    assert found.failed == 0
    assert found.requests["cells_s"].sum() > 10 * found.requests["queueing_s"].sum()


def test_holes_alone():
    """Idle slots keep their cells, and a masked kernel reads them all, so each request reads more of them."""
    found = why(one_after_another(requests=40, slots=40, keep_idle_slots=True, cache_ram=0), "contiguous")
    assert found.over_time.dominant == "holes"
    assert found.over_time.table["share"]["holes"] > 0.99
    assert (found.requests["queueing_s"] == 0).all()
    assert "streams" in found.remedies[0].kvsim


def test_a_policy_with_block_tables_has_no_holes():
    """Control: a policy that reads only a sequence's own cells."""
    found = why(one_after_another(requests=40, slots=40, keep_idle_slots=True, cache_ram=0), "paged")
    assert (found.requests["holes_s"] == 0).all()
    assert found.main is None
    assert found.remedies == ()


def test_batch_alone():
    """With enough slots and little context, slow requests are those in larger batches."""
    workload = {"kind": "poisson", "rate": 60.0, "requests": 40, "prompt_tokens": 1, "output_tokens": 100}
    workload |= {key: {"kind": "fixed", "value": workload[key]} for key in ("prompt_tokens", "output_tokens")}
    found = why(load_scenario({"workload": workload, "server": {"slots": 64}}), "paged")
    assert found.across.dominant == "batch"
    assert found.across.table["share"]["batch"] > 0.6


@pytest.fixture
def slow_copies(tmp_path):
    """The shipped profile, but copies are 300 times slower."""
    profile = load_profile("default")
    slow = {key: {name: 300 * x for name, x in cost.items()} for key, cost in profile.moves.model_dump().items()}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(profile.model_dump(mode="json") | {"moves": slow}))
    return str(path)


@pytest.mark.slow
def test_compaction_alone(slow_copies):
    """Where copies are slow, requests that wait for a compaction are the slow ones."""
    world = load_scenario(FEW, machine__profile=slow_copies, workload__rate=1.0)
    assert why(world, "threshold-compaction").across.dominant == "compaction"
    assert why(load_scenario(FEW, workload__rate=1.0), "threshold-compaction").across.dominant != "compaction"
    assert (breakdown(world, "contiguous")[0]["compaction_s"] == 0).all()


@pytest.mark.slow
def test_requests_that_arrive_during_an_idle_compaction_wait(slow_copies):
    world = load_scenario(FEW, machine__profile=slow_copies, workload__rate=3.0)
    causes, result = breakdown(world, "idle-compaction")
    assert result.summary["cache"]["compactions"] > 0
    assert causes["compaction_s"].sum() > 0
    np.testing.assert_allclose(causes[SECONDS].sum(axis=1), causes["e2e_s"], rtol=1e-9)


@pytest.mark.slow
def test_batch_splits_are_charged_for_further_passes():
    """Passes that only a batch split made necessary are charged their base cost; without splits there is none."""
    tight = load_scenario(FEW, cache__cells=1536, workload__rate=20.0)
    causes, result = breakdown(tight, "contiguous")
    assert result.summary["cache"]["batch_splits"] > 0
    assert 0 < result.passes["cut"].sum() < result.summary["forward_passes"]
    assert causes["failures_s"].sum() > 0
    causes, result = breakdown(load_scenario(FEW, cache__cells=16384), "contiguous")
    assert result.summary["cache"]["batch_splits"] == 0
    assert not result.passes["cut"].any()
    assert (causes["failures_s"] == 0).all()


def test_preemption_is_a_failure():
    """A preempted request waits for a slot again and recomputes its tokens; no other request is charged."""
    tight = load_scenario(
        FEW, server__scheduler="vllm", cache__cells=1024, workload__rate=40.0, cache__prefix_cache=False
    )
    causes, result = breakdown(tight, "paged")
    preempted = result.requests.query("status == 'completed'")["preemptions"].to_numpy() > 0
    assert preempted.any()
    assert (causes["failures_s"].to_numpy()[preempted] > 0).all()
    assert (causes["failures_s"].to_numpy()[~preempted] == 0).all()


@pytest.mark.slow
def test_prefix_misses_are_what_a_prefix_cache_would_hit():
    """Without a prefix cache conversations recompute their earlier turns; with a large enough one they do not."""
    talk = load_scenario(
        "assistant", workload__sessions=20, server__keep_idle_slots=False, server__slots=8, cache__cells=2**15
    )
    without, _ = breakdown(talk, "contiguous")
    found, result = breakdown(talk, "paged")
    assert result.summary["prefix"]["hit_rate"] > 0.5
    assert without["prefix_s"].sum() > 0.05 * without["e2e_s"].sum()
    assert found["prefix_s"].sum() < 0.05 * without["prefix_s"].sum()
    diagnosis = why(talk, "contiguous")
    assert diagnosis.main.dominant != "prefix"
    suitable = [remedy.what for remedy in REMEDIES["prefix"] if remedy.suits("contiguous")]
    assert suitable == [remedy.what for remedy in diagnosis.remedies][-3:]
    assert not {*REMEDIES["prefix"][1:]} & {*why(talk, "paged").remedies}
    private, _ = breakdown(FEW, "contiguous")
    assert (private["prefix_s"] == 0).all()


def test_a_swap_is_a_transfer():
    world = load_scenario(
        FEW,
        server__scheduler="vllm",
        server__preemption="swap",
        cache__cells=1024,
        cache__host_cells=8192,
        workload__rate=40.0,
    )
    causes, result = breakdown(world, "paged")
    assert result.summary["host"]["bytes_in"] > 0
    assert causes["transfers_s"].sum() > 0


def test_blocks_of_states_are_mended_by_narrower_states():
    """Not where requests have no states, or are so long that they hold more blocks of tokens."""
    pages = Path(__file__).parents[4] / "examples" / "hybrid-caches" / "pages.toml"
    groups = [{"kind": "full", "block_size": 784}, *3 * ({"kind": "state", "block_size": 784},)]
    prompt = {"kind": "fixed", "value": 5 * 784}
    long = load_scenario(pages, cache__groups=groups, cache__cells=20 * 784, workload__prompt_tokens=prompt)
    for world, told, untold in (
        (pages, "--mamba-ssm", "--kv-cache"),
        (crowded(), "--kv-cache", "--mamba-ssm"),
        (long, "--kv-cache", "--mamba-ssm"),
    ):
        found = why(world, "vllm")
        assert found.main.dominant == "cells"
        options = " ".join(remedy.engine("vllm") for remedy in found.remedies)
        assert told in options
        assert untold not in options
