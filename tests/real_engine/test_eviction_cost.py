"""What token eviction costs in perplexity: nothing if nothing is evicted, much without sinks; mistakes in one line."""

import json
import math

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.reports.accuracy_report import eviction_object, ratio_interval
from real_engine import load_model
from real_engine.eviction_cost import EvictionSetting, eviction_cost
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.kvsim.cli.answers import complaint
from tests.paths import ROOT
from tests.real_engine.recomputed import without_cache
from tests.real_engine.test_accuracy import the_text
from tests.worlds import command


def test_the_reference_is_a_pass_without_a_cache():
    loaded = load_model("tiny")
    found = eviction_cost([], loaded, passages=2, tokens=30, prompt=20)
    losses = []
    for start in (0, 256):
        text = the_text(loaded)[start : start + 30]
        logits = without_cache(loaded.transformer, text).astype(np.float64)
        shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-shares[at - 1, text[at]] for at in range(20, 30)]
    assert found.reference_perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert (found.passages, found.prompt, found.tokens) == (2, 20, 30)


@pytest.mark.parametrize("policy", ["h2o", "h2o-compacted", "snapkv", "streaming-llm", "ring", "paged"])
def test_where_nothing_is_evicted_nothing_changes(policy):
    found = eviction_cost([EvictionSetting(policy, 60, 1 + (policy == "h2o"))], "tiny", passages=2, tokens=40)
    (row,) = found.table.to_dict("records")
    assert row["perplexity_over_full"] == pytest.approx(1, rel=1e-4)
    assert row["held"] == 1
    assert row["blocks"] == 1 or policy == "ring", "its regions begin anywhere in a block"


def test_holes_keep_blocks_until_they_are_compacted():
    settings = [EvictionSetting(policy, 40) for policy in ("h2o", "h2o-compacted", "streaming-llm")]
    table = eviction_cost(settings, "tiny", passages=2, tokens=160, prompt=120).table.set_index("policy")
    assert table.loc["h2o-compacted", "by_passage"] == pytest.approx(table.loc["h2o", "by_passage"], rel=1e-4)
    assert table["held"].nunique() == 1
    assert table.loc["h2o", "blocks"] > table.loc["h2o-compacted", "blocks"] >= 41 / 160
    assert table.loc["streaming-llm", "blocks"] <= table.loc["h2o", "blocks"]


def test_groups_keep_tokens_of_their_own_and_hold_as_many():
    settings = [EvictionSetting("h2o", 20, groups) for groups in (1, 4)]
    one, each = eviction_cost(settings, "tiny", tokens=60).table.to_dict("records")
    assert one["held"] == each["held"] == pytest.approx(21 / 59)
    assert one["perplexity"] != each["perplexity"]


def test_the_interval_is_of_the_geometric_mean():
    found = eviction_cost([EvictionSetting("h2o", 8)], "tiny", passages=4, tokens=40)
    (row,) = eviction_object(found)["settings"]
    assert row["perplexity_over_full"] == pytest.approx(math.prod(row["by_passage"]) ** 0.25)
    assert row["low"] < row["perplexity_over_full"] < row["high"]
    assert ratio_interval(row["by_passage"]).value == pytest.approx(row["perplexity_over_full"])
    assert ratio_interval([1.5]) is None


def test_the_command_prints_one_object_or_a_table(tmp_path):
    given = [
        "accuracy",
        "--model",
        "tiny",
        "--policy",
        "h2o",
        "-p",
        "streaming-llm",
        "--budget",
        "16",
        "--tokens",
        "40",
    ]
    finished = command(*given, "--budget-groups", "1", "--budget-groups", "2", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    printed = json.loads(finished.stdout)
    assert [(row["policy"], row["budget"], row["groups"]) for row in printed["settings"]] == [
        ("h2o", 16, 1),
        ("h2o", 16, 2),
        ("streaming-llm", 16, 1),
        ("streaming-llm", 16, 2),
    ]
    assert [row["low"] for row in printed["settings"]] == [None] * 4
    table = command(*given, "--passages", "3", "--prompt", "25", "--sinks", "0").stdout
    assert "reads 3 passages of 40 tokens (random tokens, seed 0), the first 25 at once" in table
    path, page = str(Small().write(tmp_path / "m.gguf")), tmp_path / "page.txt"
    page.write_text("hello world " * 40, encoding="utf-8")
    own = command("accuracy", "--model", path, "--text", str(page), "-p", "h2o", "--budget", "12")
    assert "(the given text)" in own.stdout
    narrow = command("accuracy", "--model", path, "--text", str(page), "--cache-type-k", "f16", "--tokens", "20")
    assert "reads 20 tokens (the given text)" in narrow.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "16"), "--budget: it is for --policy"),
        (("--sinks", "0"), "--sinks: it is for --policy"),
        (("-p", "h2o"), "--policy: a --budget is missing"),
        (("-p", "h2o", "--budget", "8", "--cache-type-v", "f16"), "--policy: K and V are kept in f32"),
        (("-p", "h20", "--budget", "8"), "no policy called 'h20'"),
        (("-p", "contiguous", "--budget", "8"), "contiguous: it evicts no tokens"),
        (("-p", "h2o", "--budget", "8", "--budget-groups", "5"), "5 groups of layers; from 1 to 4 are accepted"),
        (("-p", "h2o", "--budget", "8", "--tokens", "40", "--prompt", "40"), "a prompt of 40 tokens; from 1 to 39"),
        (("-p", "h2o", "--budget", "8", "--passages", "400"), "400 passages of a text of 512 tokens: each needs"),
        (("-p", "h2o", "--budget", "8", "--text", "none.txt"), "--text: none.txt cannot be read"),
        (("-p", "h2o", "--budget", "8", "--text", __file__), "model tiny has no vocabulary to read a text with"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, words):
    assert words in complaint(command("accuracy", "--model", "tiny", *arguments))


def test_too_small_a_budget_is_refused():
    with pytest.raises(UserError, match="a budget of 1 tokens; at least 2"):
        eviction_cost([EvictionSetting("h2o", 1)], "tiny")


@pytest.mark.slow
def test_without_sinks_the_model_is_lost_and_with_four_it_is_not(request):
    """StreamingLLM's observation (arXiv 2309.17453)."""
    if SMOLLM2_MISSING:
        pytest.skip(SMOLLM2_MISSING)
    settings = [EvictionSetting("streaming-llm", 64, sinks=n) for n in (0, 4)]
    text = (ROOT / "examples/reproduced/reading.txt").read_text(encoding="utf-8")
    model = request.getfixturevalue("smollm2")
    without, sinks = eviction_cost(settings, model, text=text, prompt=160, tokens=200).table["perplexity_over_full"]
    assert without > 1.5 * sinks
    assert without > 2
