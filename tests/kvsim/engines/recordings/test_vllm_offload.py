"""Recordings of vLLM's scheduler with chunks in host memory, made by ``tests/real_engine/vllm_server``."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.engines.recordings import check_refused, lines, write
from tests.paths import DATA

FILES = sorted((DATA / "vllm-offload").glob("*.jsonl.gz"))


def records_of(name):
    with gzip.open(DATA / "vllm-offload" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_decision_agrees(path):
    found = ENGINES["vllm"](path)
    assert found.first is None
    assert found.agree == found.total > 150


@pytest.mark.parametrize(
    ("name", "decision"),
    [*(("lru", field) for field in ("look", "loads", "stores", "flush", "out")), ("disk", "gets"), ("disk", "puts")],
)
def test_each_kind_of_decision_occurs_and_is_compared(tmp_path, name, decision):
    records = records_of(name)
    at = next(at for at, record in enumerate(records) if record.get(decision))
    changed = [*records[:at], records[at] | {decision: []}, *records[at + 1 :]]
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed))
    assert (found.first.record, found.first.fields) == (at - 1, (decision,))
    assert found.first.ours[decision] == records[at][decision]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("arc", {"order": "lru"}),
        ("arc", {"chunks": 20}),
        ("arc", {"store_threshold": 0}),
        ("arc", {"blocks_per_chunk": 1}),
        ("answers", {"prompt_only": 1}),
        ("ahead", {"prompt_only": 0}),
        ("disk", {"order": "lru"}),
        ("disk", {"disk": 149}),
        ("disk_ahead", {"disk": 151}),
    ],
)
def test_under_other_settings_it_disagrees(tmp_path, name, change):
    header, *steps = records_of(name)
    other = header | {"offload": header["offload"] | change}
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [other, *steps])).first is not None


@pytest.mark.parametrize("change", [{"order": "mru"}, {"chunks": 0}, {"blocks_per_chunk": "two"}, {"disk": 0}])
def test_settings_that_cannot_be_are_refused(tmp_path, change):
    header, *steps = records_of("lru")
    other = header | {"offload": header["offload"] | change}
    check_refused(tmp_path, "vllm", lines([other, *steps]), "line 1")
