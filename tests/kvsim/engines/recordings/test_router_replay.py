"""Recorded decisions of real routers, through ours."""

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from kvsim.engines.recordings.recording_files import read_lines, write_recording
from kvsim.engines.recordings.router_replay import OURS
from kvsim.errors import UserError
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "routers"
RECORDINGS = sorted(FOLDER.glob("*.jsonl.gz"))
conform = ENGINES["router"]


def lines(name):
    return [record for _, record in read_lines(FOLDER / f"{name}.jsonl.gz")]


def test_there_is_a_recording_of_each_policy():
    recorded = {tuple(next(read_lines(path))[1][key] for key in ("package", "policy")) for path in RECORDINGS}
    assert recorded == {(package, policy) for package, policies in OURS.items() for policy in policies}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_recorded_decision_is_ours(path):
    found = conform(path)
    assert found.first is None
    assert found.agree == found.total >= 100


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("vllm-router-cache_aware", "sglang-router"),
        ("sglang-router-cache_aware", "vllm-router"),
        ("smg-cache_aware", "sglang-router"),
        ("vllm-router-cache_aware", "smg"),
    ],
)
def test_another_router_would_have_decided_otherwise(name, other, tmp_path):
    header, *records = lines(name)
    write_recording(tmp_path / "other.jsonl", [{**header, "package": other}, *records])
    assert conform(tmp_path / "other.jsonl").first is not None


def test_other_thresholds_would_have_decided_otherwise(tmp_path):
    header, *records = lines("vllm-router-cache_aware-tight")
    write_recording(tmp_path / "other.jsonl", [{**header, "flags": []}, *records])
    assert conform(tmp_path / "other.jsonl").first is not None


@pytest.mark.parametrize("package", OURS)
def test_a_tree_that_forgets_nothing_would_have_decided_otherwise(package, tmp_path):
    header, *records = lines(f"{package}-cache_aware-forgets")
    write_recording(tmp_path / "other.jsonl", [{**header, "flags": []}, *records])
    assert conform(tmp_path / "other.jsonl").first is not None


@pytest.mark.parametrize("changed", [0, 100, 249])
def test_one_other_decision_is_found(changed, tmp_path):
    header, *records = lines("vllm-router-consistent_hash")
    starts = [record for record in records if record["do"] == "start"]
    starts[changed]["server"] = (starts[changed]["server"] + 1) % header["workers"]
    write_recording(tmp_path / "changed.jsonl", [header, *records])
    found = conform(tmp_path / "changed.jsonl")
    assert found.total - found.agree == 1
    assert found.first.operation["request"] == changed


def test_choices_that_are_never_drawn_so_are_found(tmp_path):
    """Each is possible, and all together are not."""
    header, *records = lines("smg-least_load-seven")
    random = {**header, "policy": "random"}
    write_recording(tmp_path / "a.jsonl", [random, *records])
    assert conform(tmp_path / "a.jsonl").first.fields == ("drawn with these chances",)
    header, *records = lines("vllm-router-power_of_two-six")
    for record in records:
        if record["do"] == "start":
            record["server"] = 0
    write_recording(tmp_path / "b.jsonl", [{**header, "policy": "random"}, *records])
    assert conform(tmp_path / "b.jsonl").first.fields == ("drawn with these chances",)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"kind": "scheduler"}, "not the recording of a router"),
        ({"package": "smx"}, "no router package called 'smx'; did you mean 'smg'?"),
        ({"policy": "manual"}, "no policy of smg called 'manual'"),
        ({"workers": 0}, "workers is 0; a whole number from 1"),
    ],
)
def test_what_is_no_such_recording_is_refused_in_a_line(header, said, tmp_path):
    first, *records = lines("smg-random")
    write_recording(tmp_path / "bad.jsonl", [{**first, **header}, *records])
    with pytest.raises(UserError, match=said) as refused:
        conform(tmp_path / "bad.jsonl")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("record", [{"do": "go"}, {"do": "end", "request": 9}, {"do": "start", "request": 0}, {}])
def test_what_is_no_such_record_is_refused_in_a_line(record, tmp_path):
    header = lines("smg-random")[0]
    write_recording(tmp_path / "bad.jsonl", [header, record])
    with pytest.raises(UserError, match="line 2: ") as refused:
        conform(tmp_path / "bad.jsonl")
    assert "\n" not in str(refused.value)
