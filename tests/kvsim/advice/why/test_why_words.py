"""A diagnosis in words: what counts as flat, shares of a difference, and remedies."""

import io
import re
import shlex
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

import kvsim
from kvsim.advice.why.contrast import CAUSES, blame, contrast_of, difference_interval
from kvsim.advice.why.diagnosis import why
from kvsim.advice.why.remedies import FAILURES, REMEDIES
from kvsim.cli.console import draw_report
from kvsim.reports.diagnosis_report import contrast_table
from kvsim.reports.report import Report, Section
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import FailureKind
from kvsim.simulation.run_tables import Table
from kvsim.simulation.time_breakdown import SECONDS
from policies import available
from tests.kvsim.advice.why.worlds import crowded


def test_threads_are_no_remedy_on_a_device():
    found = why(load_scenario("chat", workload__requests=40), "llama.cpp-b6975")
    own = REMEDIES["own"][1]
    typed = [next(replace(found, on_device=on)._here([own])).engine(found.policy) for on in (False, True)]
    assert typed == ["llama-server --threads N", ""]


@pytest.mark.slow
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
    assert contrast.table["share"].tolist() == [0.0] * 5 + [pytest.approx(1.0)] + [0.0] * 8
    expected = "14.1 ms more go to attention over useful cells; other causes give back 4.1 ms."
    assert blame(contrast) == expected
    written = io.StringIO()
    draw_report(Console(file=written, width=140), Report(sections=[Section(tables=[contrast_table(contrast)])]))
    assert "141" not in written.getvalue()
    assert "-41" not in written.getvalue()


def test_shares_of_a_difference_to_which_nothing_is_given_back():
    contrast = given_seconds(context=(0.020, 0.030), own=(0.010, 0.012), queueing=(0.005, 0.00498))
    assert blame(contrast) == "83% of that is attention over useful cells, 17% their own tokens."


def test_a_flat_run_is_called_flat():
    found = why("identical")
    assert found.sentence.startswith("flat: no slowdown over time")
    assert "95 % interval 0 s to 0 s" in found.sentence
    assert found.main is None
    assert found.remedies == ()


@pytest.mark.slow
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


@pytest.mark.slow
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
    "--no-cache-idle-slots --spec-draft-n-max",
    "vllm": "--max-num-seqs --max-num-batched-tokens --long-prefill-token-threshold --max-model-len --kv-cache-dtype "
    "--gpu-memory-utilization --num-gpu-blocks-override --enable-prefix-caching --enable-chunked-prefill "
    "--kv-offloading-size --speculative-config --mamba-ssm-cache-dtype --no-enable-prefix-caching",
}
"""The options of each version that remedies may name."""
OPTIONS |= dict.fromkeys(("streams", "sliding-window", "hybrid"), OPTIONS["llama.cpp-b6975"])
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


@pytest.mark.slow
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
