"""Comparisons of a scenario under several lengths of drafts, and without any."""

import json

import pytest

from kvsim.advice.memory.command_line import read_command
from kvsim.advice.memory.engine_flags import command_line, llamacpp_flags, vllm_flags
from kvsim.advice.recommend.families import SettingsFamily
from kvsim.errors import UserError
from kvsim.experiments.draft_counts import compare_drafts
from kvsim.reports.report import report_of
from kvsim.scenario.scenario import load_scenario
from tests.worlds import command

SCENARIO = {
    "name": "busy",
    "workload": {
        "kind": "poisson",
        "rate": 4.0,
        "requests": 60,
        "prompt_tokens": {"kind": "fixed", "value": 200},
        "output_tokens": {"kind": "fixed", "value": 60},
    },
    "model": {"name": "llama-3.1-8b"},
    "machine": {"device": "h100_sxm"},
    "speculation": {"method": "eagle", "acceptance": [0.7, 0.5, 0.4, 0.3]},
}


@pytest.fixture(scope="module")
def found():
    return compare_drafts(SCENARIO, [0, 2, 8], loads=[1, 100])


def test_drafts_help_a_server_that_has_little_to_do_and_hinder_a_busy_one(found):
    assert found.best(1)["tokens"] == 2
    assert 0.2 < found.gain(1) < 0.7
    alone, busy = ({row["tokens"]: row["tpot_s"]["mean"] for row in found.at(load)} for load in (1, 100))
    assert alone[8] < alone[0]
    assert busy[8] > busy[0]


def test_it_says_so(found):
    first, second, third, *_ = found.sentences
    without, few, many = (row["cells"] for row in found.at(1))
    assert without > few == many
    assert third == f"What drafts takes memory: with it {few:,} cells are left, without {without:,}."
    assert first.startswith("At 1 times the load drafts of 2 tokens are best, ")
    assert second.startswith("At 100 times the load drafts")
    report = report_of(found)
    assert [len(table.rows) for section in report.sections for table in section.tables] == [6]
    assert json.loads(json.dumps(found.to_dict()))["best"][0]["tokens"] == 2


def test_without_a_section_it_cannot_be_asked():
    with pytest.raises(UserError, match="a method and an acceptance"):
        compare_drafts(load_scenario({**SCENARIO, "speculation": {}}), [0, 2])


@pytest.mark.parametrize("typed", ["2;4", "two", "-1", "100"])
def test_what_is_typed_wrongly_is_refused_in_one_line(typed):
    done = command("compare", "chat", "--draft-tokens", typed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--draft-tokens" in done.stderr


def test_recommend_searches_them_where_they_can_be_checked():
    axes = {"slots": (1, 2)}
    vllm, early = (
        SettingsFamily(name, "llamacpp", {"server__scheduler": name}, axes).drafting(3)
        for name in ("vllm", "llama-server-b4875")
    )
    assert vllm.axes == {**axes, "drafts": (3, 0, 2, 6)}
    assert (early.axes, early.keys["speculation__method"]) == (axes, "none")


def test_what_to_type():
    on = load_scenario(SCENARIO)
    assert """--speculative-config '{"method":"eagle3","num_speculative_tokens":3}'""" in command_line(vllm_flags(on))
    assert "--speculative-config" not in command_line(vllm_flags(load_scenario({**SCENARIO, "speculation": {}})))
    here = load_scenario({"name": "here", "speculation": {"method": "ngram", "tokens": 5, "acceptance": 0.5}})
    assert command_line(llamacpp_flags(here)).endswith("--spec-type ngram-simple --spec-draft-n-max 5")


def test_a_command_line_with_drafts_says_what_is_not_counted():
    line = read_command("llama-server -m a.gguf --spec-type ngram-simple --spec-draft-n-max 4")
    assert [remark.partition(":")[0] for remark in line.remarks] == ["--spec-type"]
