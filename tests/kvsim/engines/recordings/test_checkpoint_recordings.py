"""Recordings of the real llama-server on tiny models with states and windows, repeated by ours.

They are of scenarios in ``tests/real_engine/llama_server/traffic.py``, which ``make test-llama`` runs anew.
"""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from tests.paths import ROOT

RUNS = sorted((ROOT / "tests" / "data" / "llama-server-checkpoints").glob("*.jsonl.gz"))
DECISIONS = {
    *("checkpoint", "restored_checkpoint", "no_checkpoint", "invalid_checkpoint", "look_at_checkpoint"),
    *("same_checkpoint", "old_checkpoint", "close_checkpoint"),
}


def records(path):
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_checkpoints_are_made_and_found_as_by_the_server(path):
    agreement = conform(LlamaServerReplay, path)
    assert agreement.first is None
    assert agreement.agree == agreement.total > 20


def test_every_decision_on_checkpoints_is_among_them():
    assert {record.get("kind") for path in RUNS for record in records(path)} >= DECISIONS


@pytest.mark.parametrize(("kind", "field"), [("checkpoint", "pos_max"), ("restored_checkpoint", "n_past")])
def test_a_checkpoint_elsewhere_would_be_seen(tmp_path, kind, field):
    """The control."""
    lines = records(RUNS[0])
    next(line for line in lines if line.get("kind") == kind)[field] += 1
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert conform(LlamaServerReplay, path).first is not None
