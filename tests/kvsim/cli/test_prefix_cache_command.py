"""``kvsim prefix-cache`` as a user meets it."""

import json

import pandas as pd
import pytest

from tests.kvsim.cli.answers import TIGHT, complaint, succeeded
from tests.workloads.fuzz.readers import AZURE


def mooncake_rows(*prompts):
    """A trace of prompts, each told by the ids of its blocks."""
    keys = ({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids} for ids in prompts)
    return "".join(json.dumps(row) + "\n" for row in keys)


TRACE = mooncake_rows([1, 2], [1, 3, 4], [1, 2])


@pytest.mark.slow
def test_a_trace_can_be_studied_as_it_is(within, tmp_path):
    (tmp_path / "some.prompts.jsonl").write_text(TRACE)
    printed = succeeded(within("prefix-cache", "some.prompts.jsonl", "--blocks", "4,2", "-e", "belady", "-e", "lru"))
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[:3] == [
        "blocks tokens belady lru lru / belady",
        "2 1,024 28.6% 28.6% 100%",
        "4 2,048 42.9% 42.9% 100%",
    ]
    assert "3 requests ask for 7 blocks of 512 tokens, 4 of them distinct; infinite cache 42.9%" in lines
    assert lines[-1] == "Saved prefix-cache.csv and prefix-cache.png in results/some/"
    table = pd.read_csv(tmp_path / "results" / "some" / "prefix-cache.csv")
    assert table["hits"].tolist() == [2, 3, 2, 3]
    assert (tmp_path / "results" / "some" / "prefix-cache.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_study_as_one_object(within, tmp_path):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    told = json.loads(succeeded(within("prefix-cache", "trace.jsonl", "--requests", "2", "--json")))
    runs = [(run["eviction"], run["blocks"], run["hits"]) for run in told.pop("runs")]
    assert runs == [
        (name, n, 1) for name in ("lru", "fifo", "lfu", "sieve", "workload-aware", "belady") for n in (3, 4)
    ]
    assert told == {
        "scenario": "trace",
        "block_size": 512,
        "requests": 2,
        "prompt_tokens": 2560,
        "references": 5,
        "distinct": 4,
        "infinite_hit_rate": pytest.approx(0.2),
        "reason": None,
        "knee_blocks": {},
        "one_in": 1,
        "error": None,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_of_a_trace_without_texts_one_line_says_that_hits_are_unknown(within, tmp_path):
    (tmp_path / "mine.csv").write_bytes(AZURE)
    done = within("prefix-cache", "mine.csv")
    assert succeeded(done) == "mine: unknown: this trace does not say which prompts share a beginning\n"
    told = json.loads(succeeded(within("prefix-cache", "mine.csv", "--json")))
    assert (told["infinite_hit_rate"], told["runs"]) == (None, [])
    assert told["reason"] == "unknown: this trace does not say which prompts share a beginning"
    assert "prefix hits: unknown: this trace does not say" in succeeded(within("workload", "describe", "mine.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


def test_a_scenario_can_be_studied(within, tmp_path):
    (tmp_path / "tight.toml").write_text(TIGHT)
    told = json.loads(succeeded(within("prefix-cache", "tight.toml", "--json", "-e", "lru", "--block-size", "4")))
    assert (told["scenario"], told["block_size"]) == ("tight", 4)
    rates = [run["hit_rate"] for run in told["runs"]]
    assert rates[-1] == pytest.approx(told["infinite_hit_rate"])
    assert 0.5 < rates[-1] < 1
    assert {run["of_best"] for run in told["runs"]} == {None}


BLOCKS = "whole numbers from 1 to 2**28 are expected, separated by commas"

STUDY_MISTAKES = {
    **{
        f"blocks {text!r}": (("--blocks", text), f"--blocks: {text!r}: {BLOCKS}")
        for text in ("", "0", "-1", "many", "1,,2", "1.5", "1;2", "268435457")
    },
    "unknown eviction": (
        ("-e", "lru", "-e", "mru"),
        "--eviction: no order of eviction called 'mru'; did you mean 'lru'?",
    ),
    "no requests": (("--requests", "0"), "trace: workload.limit: input should be greater than 0, got 0"),
}


@pytest.mark.parametrize(("options", "answer"), STUDY_MISTAKES.values(), ids=STUDY_MISTAKES)
def test_a_study_of_mistakes_writes_nothing(within, tmp_path, options, answer):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    assert complaint(within("prefix-cache", "trace.jsonl", *options)).startswith(answer)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


TRACE_MISTAKES = {
    "malformed": ("odd.jsonl", "odd.jsonl: begins with 'odd'; expected a trace of one of the kinds azure, "),
    "missing": ("lost.jsonl", "lost.jsonl: no such file"),
    "not a trace": ("lost.toml", "lost.toml: no such file, and not a built-in scenario"),
    "no full block": ("short.toml", "short: no prompt is longer than a block of 16 tokens; try a smaller block size"),
}


@pytest.mark.parametrize(("name", "answer"), TRACE_MISTAKES.values(), ids=TRACE_MISTAKES)
def test_what_cannot_be_studied_is_answered_in_one_line(within, tmp_path, name, answer):
    given = {"odd.jsonl": "odd\n", "short.toml": '[workload]\nprompt_tokens = {kind = "fixed", value = 15}\n'}
    for file, text in given.items():
        (tmp_path / file).write_text(text)
    assert complaint(within("prefix-cache", name)).startswith(answer)
    assert {path.name for path in tmp_path.iterdir()} == set(given), "nothing is left behind"


def test_a_trace_may_have_a_name_that_no_folder_can_have(within, tmp_path):
    (tmp_path / "+odd.jsonl").write_text(TRACE)
    assert json.loads(succeeded(within("prefix-cache", "+odd.jsonl", "--json")))["requests"] == 3
