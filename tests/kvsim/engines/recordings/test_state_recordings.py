"""Recordings of the real llama.cpp on tiny models with states, repeated by ours.

``tests/real_engine/llamacpp/state_stories.py`` made them; ``make test-llama`` makes new ones and compares these, too.
"""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llamacpp_replay import LlamaCppReplay
from tests.paths import ROOT

STORIES = sorted((ROOT / "tests" / "data" / "llamacpp-states").glob("*.jsonl.gz"))


def records(path):
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.name)
def test_states_lie_where_llamacpp_has_them(path):
    agreement = conform(LlamaCppReplay, path)
    assert agreement.first is None
    assert agreement.agree == agreement.total == len(records(path)) - 1 > 50


def test_what_llamacpp_refuses_is_among_them():
    told = [record for path in STORIES for record in records(path)[1:]]
    assert len(STORIES) == 6
    assert {(r["op"], r.get("ret")) for r in told} >= {("seq_rm", 0), ("seq_rm", 1), ("decode", 0), ("decode", -1)}
    assert any(len(seqs) > 1 for record in told for _, seqs in record["states"])


def test_a_removal_that_succeeds_would_be_seen(tmp_path):
    """The control."""
    lines = records(STORIES[0])
    at = next(i for i, line in enumerate(lines) if line.get("op") == "seq_rm" and line["ret"] == 0)
    lines[at]["ret"] = 1
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = conform(LlamaCppReplay, path).first
    assert (found.record, found.fields) == (at - 1, ("ret",))
