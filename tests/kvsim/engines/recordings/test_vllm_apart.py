"""Recordings of vLLM's scheduler with its NIXL connector, made by ``tests/real_engine/vllm_server/record_apart.py``."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.engines.recordings import write
from tests.paths import DATA

FILES = sorted((DATA / "vllm-apart").glob("*.jsonl.gz"))


def records_of(name):
    with gzip.open(DATA / "vllm-apart" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_decision_agrees(path):
    found = ENGINES["vllm"](path)
    assert found.first is None
    assert found.agree == found.total > 300


@pytest.mark.parametrize("decision", ["look", "reads", "hold", "wait"])
def test_each_kind_of_decision_occurs_and_is_compared(tmp_path, decision):
    records = records_of("steps")
    at = next(at for at, record in enumerate(records) if record.get(decision))
    changed = [*records[:at], records[at] | {decision: []}, *records[at + 1 :]]
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed))
    assert (found.first.record, found.first.fields) == (at - 1, (decision,))
    assert found.first.ours[decision] == records[at][decision]


@pytest.mark.parametrize("told", ["done", "sent"])
def test_blocks_that_are_given_up_too_late_are_found_out(tmp_path, told):
    """What is read, or has been, is not free before the scheduler has been told."""
    records = records_of("steps")
    at = next(at for at, record in enumerate(records) if record.get(told))
    late = [*records[:at], records[at] | {told: []}, records[at + 1] | {told: records[at][told]}, *records[at + 2 :]]
    assert ENGINES["vllm"](write(tmp_path / "late.jsonl", late)).first is not None


def test_the_recordings_have_requests_of_all_kinds_preemptions_and_aborts():
    records = [record for path in FILES for record in records_of(path.name.removesuffix(".jsonl.gz"))]
    assert {added[5] for record in records for added in record.get("add", ())} == {"prefill", "decode", ""}
    assert any(record.get("abort") for record in records)
