"""Recordings of vLLM's scheduler with drafts, made by ``tests/real_engine/vllm_server/record_drafts.py``."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.engines.recordings import write
from tests.paths import DATA

FILES = sorted((DATA / "vllm-drafts").glob("*.jsonl.gz"))


def records_of(name):
    with gzip.open(DATA / "vllm-drafts" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_decision_agrees(path):
    found = ENGINES["vllm"](path)
    assert found.first is None
    assert found.agree == found.total > 45


def test_drafts_are_accepted_rejected_and_begun_anew():
    drafts = [draft for path in FILES for record in records_of(path.name[:-9]) for draft in record.get("drafts", ())]
    assert {drafted - accepted for _, drafted, accepted in drafts} >= {0, 1, 2}
    assert len({accepted for _, _, accepted in drafts}) > 3


@pytest.mark.parametrize(
    ("name", "method", "tokens"), [("ngram", "eagle", 4), ("eagle", "ngram", 2), ("eagle-ahead", "eagle", 2)]
)
def test_under_other_settings_it_disagrees(tmp_path, name, method, tokens):
    header, *steps = records_of(name)
    other = header | {"speculation": {"method": method, "tokens": tokens}}
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [other, *steps])).first is not None


@pytest.mark.parametrize("name", ["ngram", "eagle-ahead", "mtp-window"])
def test_what_is_rejected_matters(tmp_path, name):
    records = records_of(name)
    at = next(at for at, record in enumerate(records) if any(d[2] > 0 for d in record.get("drafts", ())))
    changed = [[request, drafted, 0] for request, drafted, _ in records[at]["drafts"]]
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [*records[:at], records[at] | {"drafts": changed}]))
    assert found.first is None or found.first.record == at - 1
    rest = [*records[:at], records[at] | {"drafts": changed}, *records[at + 1 :]]
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", rest)).first.record >= at - 1
