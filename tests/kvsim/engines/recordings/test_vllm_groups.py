"""Recordings of vLLM's scheduler over several cache groups, made by ``tests/real_engine/vllm_server``."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.engines.recordings import check_refused, lines, write
from tests.paths import DATA

FILES = sorted((DATA / "vllm-groups").glob("*.jsonl.gz"))


def records_of(name):
    with gzip.open(DATA / "vllm-groups" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_block_and_every_step_agrees(path):
    found = ENGINES["vllm"](path)
    assert found.first is None
    assert found.agree == found.total > 50


@pytest.mark.parametrize("name", ["window", "uneven", "state", "checkpoints", "states-ahead", "chunked", "latent"])
def test_prefixes_are_found_and_requests_preempted(name):
    calls = [call for record in records_of(name)[1:] for call in record["calls"]]
    assert any(call[0] == "L" and call[2] for call in calls)
    assert any(call[0] == "P" for call in calls)


@pytest.mark.parametrize(
    ("name", "group", "change"),
    [
        ("window", 1, {"span": 64}),
        ("window", 1, {"kind": "full", "span": 0}),
        ("uneven", 1, {"block_size": 16}),
        ("state", 1, {"kind": "full"}),
        ("checkpoints", 1, {"checkpoint_grid": 0}),
        ("states-ahead", 1, {"checkpoint_grid": 0}),
        ("chunked", 1, {"kind": "window"}),
    ],
)
def test_with_another_group_it_disagrees(tmp_path, name, group, change):
    header, *steps = records_of(name)
    groups = [of | change if at == group else of for at, of in enumerate(header["groups"])]
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [header | {"groups": groups}, *steps])).first is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [("states-ahead", {"retention": 0}), ("uneven", {"retention": 0}), ("state", {"retention": None})],
)
def test_with_another_retention_it_disagrees(tmp_path, name, change):
    header, *steps = records_of(name)
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [header | change, *steps])).first is not None


@pytest.mark.parametrize(("name", "change"), [("drafts", {"tokens": 1}), ("drafts-one-state", {"tokens": 2})])
def test_with_other_drafts_it_disagrees(tmp_path, name, change):
    header, *steps = records_of(name)
    other = header | {"speculation": header["speculation"] | change}
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [other, *steps])).first is not None


@pytest.mark.parametrize("name", ["drafts", "drafts-ahead"])
def test_keys_that_do_not_look_ahead_disagree(tmp_path, name):
    header, *steps = records_of(name)
    assert header["effective"].pop("key_lookahead") == 1
    assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", [header, *steps])).first is not None


@pytest.mark.parametrize(
    "groups",
    [
        [{"kind": "mamba", "block_size": 16}],
        [{"kind": "full", "block_size": 0}],
        [{"kind": "state", "block_size": 16}],
        [],
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path, groups):
    header, *steps = records_of("window")
    check_refused(tmp_path, "vllm", lines([header | {"groups": groups}, *steps]), "line 1")
