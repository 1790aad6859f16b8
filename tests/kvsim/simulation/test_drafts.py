"""Speculation: what is accepted, what it gives, what it costs, and that it leaves nothing behind."""

import numpy as np
import pytest

import kvsim
from kvsim.costs.draft_price import head_share
from kvsim.errors import UserError
from kvsim.scenario.accepted_drafts import measured_rates, rate_of
from kvsim.scenario.scenario import load_scenario
from kvsim.scenario.speculation_section import if_those_before_were


def fixed(value):
    return {"kind": "fixed", "value": value}


ONE_LONG_ANSWER = {
    "name": "long",
    "workload": {"kind": "batch", "requests": 4, "prompt_tokens": fixed(8), "output_tokens": fixed(4000)},
    "cache": {"cells": 20_000},
    "server": {"slots": 4},
}
FEW = {
    "name": "few",
    "workload": {
        "kind": "poisson",
        "rate": 40.0,
        "requests": 24,
        "prompt_tokens": fixed(30),
        "output_tokens": fixed(25),
    },
    "cache": {"cells": 512},
}
DRAFTS = {"method": "draft-model", "tokens": 3, "acceptance": [0.9, 0.6, 0.3], "share": 0.1}


def run(base, policy="vllm", detail="requests", **speculation):
    return kvsim.run(load_scenario({**base, "speculation": speculation}), policy, detail=detail)


@pytest.mark.parametrize(("rate", "tokens"), [(0.5, 1), (0.8, 4), (0.3, 7)])
def test_a_constant_rate_gives_what_theory_says(rate, tokens):
    # Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), equation 1.
    expected = (1 - rate ** (tokens + 1)) / (1 - rate)
    found = run(ONE_LONG_ANSWER, method="ngram", tokens=tokens, acceptance=rate).summary["speculation"]
    assert found["tokens_per_draft"] == pytest.approx(expected, rel=0.03)
    assert found["drafts"] == pytest.approx(16_000 / expected, rel=0.03)


@pytest.mark.parametrize(
    ("by_position", "mean_length", "drafted", "accepted"),
    [((0.783, 0.477), 2.26, 76_516, 48_997), ((0.158, 0.073), 1.23, 16_956, 1_852)],
)
def test_published_rates_give_the_published_length(by_position, mean_length, drafted, accepted):
    # DeepSeek V4 Flash with MTP under vLLM: jasl/vllm-ds4-sm120-harness (MIT), b200_main_51295793a/report.md.
    mean = np.cumprod(if_those_before_were(by_position)).sum()
    assert 1 + mean == pytest.approx(mean_length, abs=0.005)
    # The rates are means of windows of the log, the counts are of the whole run.
    assert mean == pytest.approx(accepted / (drafted / 2), rel=0.06)
    found = run(ONE_LONG_ANSWER, method="mtp", tokens=2, accepted_by_position=by_position).summary["speculation"]
    assert found["tokens_per_draft"] == pytest.approx(mean_length, rel=0.03)


def test_a_request_has_the_same_luck_under_every_policy():
    slots, blocks = ("llama.cpp-b6975", "oracle", "growing"), ("vllm", "contiguous")
    counts = {"llama-server": set(), "vllm": set()}
    for scheduler, name in [*(("llama-server", name) for name in slots), *(("vllm", name) for name in blocks)]:
        base = {**FEW, "cache": {"cells": 4096}, "server": {"scheduler": scheduler}}
        summary = run(base, name, **DRAFTS).summary
        assert summary["completed"] == 24
        counts[scheduler].add(tuple(list(summary["speculation"].values())[:4]))
    # llama-server drafts no more than an answer still lacks; vLLM does not look.
    assert [len(each) for each in counts.values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "two-level-pages", "paged-window", "llama.cpp-b6975", "sliding-window"])
def test_what_is_rejected_leaves_nothing_behind(policy):
    scenario = load_scenario({**FEW, "speculation": DRAFTS})
    result = kvsim.run(scenario, policy, check=True)  # Which compares the cells with what each sequence was given.
    assert result.summary["completed"] == 24
    assert result.summary["speculation"]["wasted_tokens"] > 0


def test_every_second_still_has_one_cause():
    causes = run(FEW, detail="tables", **DRAFTS).tables.causes.columns
    spent = sum(column for name, column in causes.items() if name.endswith("_s") and name not in ("arrival_s", "e2e_s"))
    assert spent == pytest.approx(causes["e2e_s"], rel=1e-9)
    assert (causes["drafting_s"] > 0).all()


def test_drafts_that_are_always_accepted_save_passes_and_those_that_never_are_cost_them():
    plain = run(FEW).summary["forward_passes"]
    all_accepted = run(FEW, method="ngram", tokens=4, acceptance=1.0).summary
    none_accepted = run(FEW, method="ngram", tokens=4, acceptance=0.0).summary
    assert all_accepted["forward_passes"] < plain / 2
    assert none_accepted["speculation"]["accepted_tokens"] == 0
    assert none_accepted["tpot_s"]["mean"] > all_accepted["tpot_s"]["mean"]


def test_no_speculation_changes_nothing():
    plain, off = (run(FEW, detail="tables", **section) for section in ({}, {"method": "ngram", "tokens": 0}))
    assert plain.summary | {"wall_s": 0} == off.summary | {"wall_s": 0}


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_composed_ahead_end_the_same_answers(ahead):
    at_once = {"kind": "batch", "requests": 24, "prompt_tokens": fixed(30), "output_tokens": fixed(25)}
    tight = {**FEW, "workload": at_once, "cache": {"cells": 320}, "server": {"async_scheduling": ahead, "slots": 8}}
    summary = run(tight, **DRAFTS).summary
    assert summary["completed"] == 24
    assert summary["preemptions"] > 0


def test_a_drafter_costs_its_share():
    cheap, dear = (run(FEW, **(DRAFTS | {"share": share})).summary for share in (0.1, 0.2))
    assert dear["speculation"]["drafting_s"] > cheap["speculation"]["drafting_s"] > 0
    assert run(FEW, method="ngram", acceptance=0.5).summary["speculation"]["drafting_s"] == 0
    assert 0.05 < head_share("llama-3.1-8b", None) < 0.12


def test_a_drafter_on_a_device_has_its_own_times():
    base = {**FEW, "cache": {}, "model": {"name": "llama-3.1-8b"}, "machine": {"device": "rtx4090"}}
    known = {key: value for key, value in DRAFTS.items() if key != "share"}
    small, large = (run(base, model=model, **known).summary for model in ("llama-3.2-1b", "llama-3.2-3b"))
    assert 0 < small["speculation"]["drafting_s"] < large["speculation"]["drafting_s"]
    with pytest.raises(UserError, match=r"machine\.device"):
        run(FEW, model="llama-3.2-1b", **known)


METRICS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 130.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 10.0
"""


def test_rates_are_read_from_what_servers_count(tmp_path):
    (tmp_path / "metrics.txt").write_text(METRICS)
    assert measured_rates(tmp_path / "metrics.txt", 3) == pytest.approx((0.8, 0.5, 0.25))
    answers = (
        '{"timings": {"draft_n": 60, "draft_n_accepted": 30}}\n{"timings": {"draft_n": 30, "draft_n_accepted": 15}}'
    )
    (tmp_path / "answers.jsonl").write_text(answers)
    (rate,) = measured_rates(tmp_path / "answers.jsonl", 3)
    assert (rate + rate**2 + rate**3) / 3 == pytest.approx(0.5)
    (tmp_path / "none.txt").write_text("nothing")
    with pytest.raises(UserError, match="no drafts are counted"):
        measured_rates(tmp_path / "none.txt", 3)
    with pytest.raises(UserError, match="cannot be read"):
        measured_rates(tmp_path / "missing.txt", 3)
    assert (rate_of(0.0, 4), rate_of(1.0, 4)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"method": "ngram"}, "is said by nothing"),
        ({"method": "ngram", "acceptance": 0.5, "measured": "f"}, "acceptance, measured"),
        ({"method": "draft-model", "acceptance": 0.5}, "what drafting costs"),
        ({"method": "mtp", "accepted_by_position": [0.4, 0.5]}, "accepted so far, too"),
        ({"method": "medusa"}, "'ngram'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(section, fault):
    with pytest.raises(UserError, match=fault) as refused:
        load_scenario({**FEW, "speculation": section})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("base", "policy", "fault"),
    [
        ({**FEW, "server": {"scheduler": "static"}}, None, "checks no drafts"),
        (FEW, "ring", "dropped tokens"),
        ({**FEW, "cache": {"cells": 512, "host_cells": 512}}, "vllm", "host memory"),
    ],
)
def test_who_cannot_check_drafts_says_so(base, policy, fault):
    with pytest.raises(UserError, match=fault):
        run(base, policy, **DRAFTS)
