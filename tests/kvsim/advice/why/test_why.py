"""Why requests slow down: every second has one cause, and constructed slowdowns are attributed to their cause."""

import io
import json
import re
import shlex
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import kvsim
from kvsim.advice.why.contrast import CAUSES, blame, contrast_of, difference_interval
from kvsim.advice.why.diagnosis import FEWEST_REQUESTS, diagnose, why
from kvsim.advice.why.remedies import FAILURES, REMEDIES
from kvsim.cli.console import draw_report
from kvsim.costs.load_profile import load_profile
from kvsim.errors import Livelock
from kvsim.reports.diagnosis_report import contrast_table
from kvsim.reports.report import Report, Section
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import FailureKind
from kvsim.simulation.recorder import DETAILS
from kvsim.simulation.run import run
from kvsim.simulation.run_tables import Table
from kvsim.simulation.time_breakdown import SECONDS, TERMS
from policies import available
from tests.kvsim.simulation.random_runs import scenarios
from tests.worlds import command

SHORT = {"prompt_tokens": {"kind": "fixed", "value": 8}, "output_tokens": {"kind": "fixed", "value": 8}}
FEW = load_scenario("chat", workload__requests=60)


def breakdown(scenario, policy, **options):
    """Seconds by cause for each request, and the run's result."""
    result = run(scenario, policy, detail="tables", **options)
    return result.causes, result


def one_after_another(requests=40, **server):
    """One user at a time, so that no request waits and nothing is batched."""
    workload = {"kind": "closed-loop", "users": 1, "requests": requests, **SHORT}
    return load_scenario({"name": "single", "workload": workload, "server": {"keep_idle_slots": False, **server}})


# Every second has one cause


@pytest.mark.slow
@settings(max_examples=45, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
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


# Slowdowns with a single cause


def test_queueing_alone():
    """One slot, and twice as many requests as it can serve."""
    workload = {"kind": "poisson", "rate": 240.0, "requests": 80, **SHORT}
    found = why(load_scenario({"workload": workload, "server": {"slots": 1, "keep_idle_slots": False}}))
    assert found.over_time.dominant == "queueing"
    assert found.over_time.table["share"]["queueing"] > 0.99
    assert found.sentence.startswith("Late requests take")
    assert found.remedies[0] == REMEDIES["queueing"][0]


def crowded(cells=512, slots=16, scheduler="vllm", **more):
    """Arrivals for which there are enough slots, but not enough cells."""
    hundred = {"kind": "fixed", "value": 100}
    workload = {"kind": "poisson", "rate": 8.0, "requests": 150, "prompt_tokens": hundred, "output_tokens": hundred}
    server = {"slots": slots, "scheduler": scheduler, **more}
    return load_scenario({"name": "crowded", "workload": workload, "server": server, "cache": {"cells": cells}})


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


@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
def test_waiting_without_a_free_slot_is_waiting_for_a_slot(scheduler):
    """Control: if all requests fit, none waits for cells, even if prompts fill the steps."""
    for world in (crowded(16384, 2, scheduler), crowded(16384, 16, scheduler, n_batch=32)):
        found = why(world, "paged")
        assert found.requests["queueing_s"].sum() > 0
        assert (found.requests["cells_s"] == 0).all()


def test_a_policy_that_admits_no_request_makes_llama_server_wait_for_cells():
    found = why(crowded(1024, 8, "llama-server", slot_context=256), "hf-reserved")
    assert found.failed == 0
    assert found.requests["cells_s"].sum() > 10 * found.requests["queueing_s"].sum()


def test_failures_are_reported_first():
    """Half of the requests fail while the others are not slow, so the failures are what matters."""
    found = why(crowded(scheduler="llama-server"), "paged")
    assert 60 <= found.failed <= 90
    assert [(each["kind"], each["count"]) for each in found.failures] == [("no slot", found.failed)]
    full = "a step found no room in the cache: the step needs 1 block of 16 cells, 0 are free"
    assert found.sentence.startswith(f"{found.failed} of 150 requests failed: {full}. Of the others: flat")
    assert found.remedies[0] == FAILURES[FailureKind.OUT_OF_CELLS][0]
    assert found.to_dict()["failures"] == found.failures


def test_refused_prompts_are_grouped():
    """All are one failure, with the numbers; the remedy is longer slots."""
    found = why(load_scenario("chat", workload__requests=100, server__slot_context=100), "paged")
    (refused,) = found.failures
    longest = refused["longest_prompt"]
    assert 100 <= refused["shortest_prompt"] < longest
    assert refused["reason"] == f"the prompt is too long for a slot (longest {longest} tokens; a slot has 100)"
    assert refused["count"] == found.failed > 0
    assert found.remedies[0] == FAILURES[FailureKind.CONTEXT][0]


def test_if_most_requests_failed_the_message_says_why():
    with pytest.raises(kvsim.UserError, match=r"at least 8 are needed; \d+ of 20 requests failed: a step found") as e:
        why(load_scenario(crowded(256, scheduler="llama-server"), workload__requests=20, workload__rate=100.0), "paged")
    assert "\n" not in str(e.value)


def given_seconds(**seconds):
    """Two groups of requests whose causes took these seconds: (first, second)."""
    zeros = {f"{cause}_s": 0.0 for cause in CAUSES}
    groups = [
        Table({k: np.array([v]) for k, v in {**zeros, **{f"{c}_s": pair[i] for c, pair in seconds.items()}}.items()})
        for i in (0, 1)
    ]
    return contrast_of(("early", "late"), *groups, None, None)


def test_shares_of_a_difference_never_exceed_the_whole():
    """Attention costs 14.1 ms more, of a difference of 10 ms; less waiting gives 4.1 ms back."""
    contrast = given_seconds(context=(0.020, 0.0341), queueing=(0.0091, 0.005))
    assert contrast.difference_s == pytest.approx(0.010)
    assert contrast.given_back_s == pytest.approx(0.0041)
    assert contrast.table["share"].tolist() == [0.0] * 4 + [pytest.approx(1.0)] + [0.0] * 7
    expected = "14.1 ms more go to attention over useful cells; other causes give back 4.1 ms."
    assert blame(contrast) == expected
    written = io.StringIO()
    draw_report(Console(file=written, width=140), Report(sections=[Section(tables=[contrast_table(contrast)])]))
    assert "141" not in written.getvalue()
    assert "-41" not in written.getvalue()


def test_shares_of_a_difference_to_which_nothing_is_given_back():
    contrast = given_seconds(context=(0.020, 0.030), own=(0.010, 0.012), queueing=(0.005, 0.00498))
    assert blame(contrast) == "83% of that is attention over useful cells, 17% their own tokens."


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


def test_compaction_alone(slow_copies):
    """Where copies are slow, requests that wait for a compaction are the slow ones."""
    world = load_scenario(FEW, machine__profile=slow_copies, workload__rate=1.0)
    assert why(world, "threshold-compaction").across.dominant == "compaction"
    assert why(load_scenario(FEW, workload__rate=1.0), "threshold-compaction").across.dominant != "compaction"
    assert (breakdown(world, "contiguous")[0]["compaction_s"] == 0).all()


def test_requests_that_arrive_during_an_idle_compaction_wait(slow_copies):
    world = load_scenario(FEW, machine__profile=slow_copies, workload__rate=3.0)
    causes, result = breakdown(world, "idle-compaction")
    assert result.summary["cache"]["compactions"] > 0
    assert causes["compaction_s"].sum() > 0
    np.testing.assert_allclose(causes[SECONDS].sum(axis=1), causes["e2e_s"], rtol=1e-9)


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
    assert [remedy.what for remedy in REMEDIES["prefix"]] == [remedy.what for remedy in diagnosis.remedies][-3:]
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


# The diagnosis in words


def test_a_flat_run_is_called_flat():
    found = why("identical")
    assert found.sentence.startswith("flat: no slowdown over time")
    assert "95 % interval 0 s to 0 s" in found.sentence
    assert found.main is None
    assert found.remedies == ()


def test_a_run_that_only_varies_is_called_flat():
    """Latencies differ with the lengths of requests, but not with their arrival."""
    found = why(load_scenario("chat", workload__rate=1.0), "paged")
    low, high = found.over_time.interval_s
    assert low < 0 < high
    assert found.sentence.startswith("flat")
    assert found.across.dominant == "own"


def noisy(rng, r):
    """An AR(1) sequence of 400 values."""
    noise = rng.normal(size=400)
    for i in range(1, 400):
        noise[i] += r * noise[i - 1]
    return noise


@pytest.mark.parametrize("r", [0.0, 0.6])
def test_intervals_cover_the_true_difference(r):
    """The interval covers the true difference, 0 or not, about as often as its level says."""
    rng = np.random.default_rng(1)
    for rise in (0.0, 3.0):
        holds = 0
        for _ in range(400):
            low, high = difference_interval(noisy(rng, r) + rise * np.arange(400) / 300, 100)
            holds += low <= rise <= high
        assert 0.91 <= holds / 400 <= 0.99


def test_correlated_neighbours_widen_the_interval():
    """Control: shuffling the values, which removes their correlation, narrows the interval."""
    noise = noisy(np.random.default_rng(1), 0.95)
    low, high = difference_interval(noise, 100)
    shuffled = np.random.default_rng(2).permutation(noise)
    low_shuffled, high_shuffled = difference_interval(shuffled, 100)
    assert high - low > 2 * (high_shuffled - low_shuffled)


def test_a_steady_rise_is_seen_in_few_requests():
    """Ten values on a line are enough; the same values in another order are noise."""
    assert difference_interval(np.arange(10.0), 2) == pytest.approx((8.0, 8.0))
    low, high = difference_interval(np.array([3.0, 9, 1, 5, 0, 8, 4, 2, 7, 6]), 2)
    assert low < 0 < high


def test_remedies_name_existing_commands_and_keys():
    names = kvsim.cli.app.COMMANDS.keys()
    assert REMEDIES.keys() == CAUSES.keys()
    assert [f"{cause}_s" for cause in CAUSES] == [*SECONDS, "machine_s"]
    for remedy in (remedy for remedies in [*REMEDIES.values(), *FAILURES.values()] for remedy in remedies):
        for part in remedy.kvsim.split(";"):
            words = shlex.split(part)
            if words[0] == "kvsim":
                assert words[1] in names
                assert {b for a, b in pairwise(words) if a == "-p"} <= available().keys()
            else:
                section, key = words[0].strip(",").split(".")
                assert key in load_scenario({"workload": {}}).model_dump()[section]


OPTIONS = {
    "llama.cpp-b4666": "--threads --parallel --ctx-size --n-predict --batch-size --ubatch-size --flash-attn "
    "--defrag-thold --cache-type-k --cache-type-v --slot-prompt-similarity --cache-reuse",
    "llama.cpp-b6975": "--threads --parallel --ctx-size --n-predict --batch-size --ubatch-size --flash-attn "
    "--kv-unified --context-shift --cache-type-k --cache-type-v --slot-prompt-similarity --cache-reuse --cache-ram "
    "--no-cache-idle-slots",
    "vllm": "--max-num-seqs --max-num-batched-tokens --long-prefill-token-threshold --max-model-len --kv-cache-dtype "
    "--gpu-memory-utilization --num-gpu-blocks-override --enable-prefix-caching --enable-chunked-prefill",
}
"""The options of each version that remedies may name."""
OPTIONS |= dict.fromkeys(("streams", "sliding-window"), OPTIONS["llama.cpp-b6975"])
ALL_REMEDIES = [remedy for remedies in [*REMEDIES.values(), *FAILURES.values()] for remedy in remedies]


@pytest.mark.parametrize("policy", available())
def test_no_remedy_names_an_option_that_the_version_lacks(policy):
    """A layout of no engine is told the options of the engines that people have today."""
    known = OPTIONS.get(policy, f"{OPTIONS['llama.cpp-b6975']} {OPTIONS['vllm']}").split()
    named = {word for remedy in ALL_REMEDIES for word in re.findall(r"--[a-z-]+", remedy.engine(policy))}
    assert named <= set(known)
    assert len(named) > 5
    assert ("--defrag-thold" in named) == (policy == "llama.cpp-b4666")


@pytest.mark.parametrize("policy", [name for name in available() if name.startswith(("llama", "vllm"))])
def test_an_engine_is_not_told_to_become_what_it_is(policy):
    suited = [remedy for remedy in ALL_REMEDIES if remedy.suits(policy)]
    for remedy in suited:
        assert ("llama.cpp since b6975" in remedy.engine(policy)) <= (policy == "llama.cpp-b4666")
        assert ("vLLM by default" in remedy.engine(policy)) <= (policy != "vllm")
        assert remedy.parameter != "unified" or policy == "llama.cpp-b6975"
    assert len(suited) < len(ALL_REMEDIES)


def test_what_is_printed_names_the_options_of_the_policys_version():
    """The same holes under two versions; the new one has no defragmentation."""
    world = load_scenario("chat", workload__requests=100, cache__kernel="masked", server__cache_ram=0)
    for policy, has, lacks in (
        ("llama.cpp-b4666", "--defrag-thold X, lower", "--kv-unified"),
        ("llama.cpp-b6975", "without --kv-unified", "--defrag-thold"),
    ):
        found = why(world, policy)
        printed = " ".join(remedy["engine"] for remedy in found.to_dict()["remedies"])
        assert has in printed
        assert lacks not in printed
        assert "vllm serve" not in printed


# Sources of runs


@pytest.mark.slow
def test_a_measured_run_has_the_machine_as_a_cause():
    validation = kvsim.validate("identical", load_profile("default"), ["paged"], repeats=2)
    causes = validation.causes
    assert len(causes) == 20
    np.testing.assert_allclose(causes[[*SECONDS, "machine_s"]].sum(axis=1), causes["e2e_s"], rtol=1e-9)
    found = why(validation)
    assert found.measured
    assert found.policy == "paged"
    assert found.requests["e2e_s"].mean() == pytest.approx(causes["e2e_s"].mean())


@pytest.mark.slow
def test_a_slow_machine_is_diagnosed_from_saved_output(tmp_path):
    """Half of a measured run is slowed down by the machine only."""
    printed = kvsim.validate("identical", load_profile("default"), ["paged", "contiguous"], requests=8).to_dict()
    for policy in printed["policies"]:
        for row in policy["causes"]:
            row["machine_s"] = 0.0 if row["id"] < 4 else 5.0 + 0.01 * row["id"]
            row["e2e_s"] = sum(row[s] for s in [*SECONDS, "machine_s"])
    file = tmp_path / "v.json"
    file.write_text(json.dumps(printed))
    done = command("why", str(file), "-p", "contiguous", "--json")
    assert done.returncode == 0
    message = json.loads(done.stdout)
    assert message["measured"] is True
    assert message["over_time"]["dominant"] == "machine"
    assert message["remedies"][0]["kvsim"] == "kvsim validate identical --repeat 5"
    done = command("why", str(file), "-p", "ring")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "accepted: paged, contiguous" in done.stderr


@pytest.mark.slow
def test_a_folder_of_results_is_run_again(tmp_path):
    world = load_scenario(FEW, name="tight", workload__rate=20.0)
    kvsim.compare(world, ["contiguous", "paged"], snapshots=False).save(tmp_path / "tight")
    again, first = why(tmp_path / "tight"), why(world)
    assert again.requests.equals(first.requests)
    assert again.policy == "contiguous"
    assert why(tmp_path / "tight", "paged").policy == "paged"
    assert diagnose(run(world, detail="tables"), "tight").sentence == first.sentence


@pytest.mark.slow
def test_the_policy_chosen_from_a_comparison(tmp_path):
    """It is the scenario's own, else the slowest; any other on request."""
    world = load_scenario(FEW, name="tight", workload__rate=20.0)
    compared = kvsim.compare(world, ["paged", "llama.cpp-b4666"], snapshots=False)
    compared.save(tmp_path / "tight")
    slowest = max(compared.results, key=lambda result: result.summary["e2e_s"]["mean"]).policy
    for source in (compared, tmp_path / "tight"):
        found = why(source)
        assert found.policy == slowest
        assert found.note == (
            f"contiguous, the scenario's own policy, was not compared; {slowest} is the slowest of those that were"
        )
        assert why(source, "paged").policy == "paged"
        assert why(source, "ring").policy == "ring"
        assert why(source, "paged").note == ""
    assert why(kvsim.compare(world, ["paged", "contiguous"], snapshots=False)).policy == "contiguous"
    assert slowest in command("why", str(tmp_path / "tight"), "--out", str(tmp_path)).stdout
    (tmp_path / "tight" / "comparison.json").write_text("[]")
    done = command("why", str(tmp_path / "tight"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not what kvsim compare writes" in done.stderr


@pytest.mark.slow
def test_the_command_prints_a_table_and_saves_a_picture(tmp_path):
    done = command("why", "chat", "-p", "paged", "--plots", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "400 completed requests (simulated)" in done.stdout
    assert "The slowest quarter takes" in done.stdout
    assert "To try" in done.stdout
    assert (tmp_path / "chat" / "why.png").stat().st_size > 20_000
    saved = pd.read_csv(tmp_path / "chat" / "why.csv")
    assert len(saved) == 400


@pytest.mark.slow
def test_json_adds_up_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("why", "chat", "--json")
    printed = json.loads(done.stdout)
    assert sum(cause["share"] for cause in printed["across"]["causes"].values()) == pytest.approx(1)
    assert printed["completed"] + printed["failed"] == 400
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_gets_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage.json").write_text("{")
    (tmp_path / "other.json").write_text('{"scenario": "chat", "policies": [{"policy": "paged"}]}')
    few = tmp_path / "few.toml"
    few.write_text(f'[workload]\nkind = "batch"\nrequests = {FEWEST_REQUESTS - 1}\n')
    for arguments, message in (
        (("nowhere",), "not a built-in scenario"),
        ((str(tmp_path / "empty"),), "a folder that kvsim compare wrote is expected"),
        ((str(tmp_path / "garbage.json"),), "not what kvsim validate --json prints"),
        ((str(tmp_path / "other.json"),), "not what kvsim validate --json prints"),
        ((str(tmp_path / "none.json"),), "cannot be read"),
        ((str(few),), f"at least {FEWEST_REQUESTS} are needed"),
        (("chat", "-p", "nobody"), "no policy called 'nobody'"),
    ):
        done = command("why", *arguments, "--out", str(tmp_path / "out"))
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("kvsim: ")
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_result_must_have_kept_tables():
    with pytest.raises(kvsim.UserError, match="tables"):
        why(run(FEW))
    with pytest.raises(kvsim.UserError, match="not 'paged'"):
        why(run(FEW, detail="tables"), "paged")
