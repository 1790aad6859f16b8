"""The command line as a user meets it: the installed program, its streams and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kvsim import load, load_profile
from kvsim.scenario import builtin_names

PROGRAM = Path(sys.executable).parent / "kvsim"
BOTH = ("--policy", "contiguous", "--policy", "paged")
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
SUMMARY_KEYS = {"scenario", "policy", "seed", "requests", "completed", "failed", "throughput_tokens_per_s", *LATENCIES}
SUMMARY_KEYS |= {"cache", "profile", "wall_s"}
CACHE_KEYS = {"utilization_mean", "external_fragmentation_mean", "internal_fragmentation_mean", "failed_allocations"}
CACHE_KEYS |= {"batch_splits", "moved_bytes", "moved_cells"}


@pytest.fixture
def kvsim(tmp_path):
    """Runs the program in an empty folder, with no terminal."""
    quiet = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}

    def run(*arguments):
        return subprocess.run([PROGRAM, *arguments], cwd=tmp_path, env=quiet, capture_output=True, text=True)

    return run


def succeeded(finished):
    """What a command printed that went well: and that it had nothing to complain of."""
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def complaint(finished):
    """The one line that answers a mistake."""
    assert finished.returncode == 2
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("kvsim: ")
    return line.removeprefix("kvsim: ")


def check_summary(summary):
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["cache"].keys() >= CACHE_KEYS
    assert all(list(summary[latency]) == ["mean", "p50", "p95", "p99"] for latency in LATENCIES)
    assert summary["completed"] + summary["failed"] == summary["requests"]


def test_run_prints_the_same_object_every_time(kvsim):
    command = ("run", "chat", "--policy", "paged", "--seed", "1", "--requests", "40", "--json")
    one, two = (json.loads(succeeded(kvsim(*command))) for _ in range(2))
    check_summary(one)
    assert [one[key] for key in ("scenario", "policy", "seed", "requests")] == ["chat", "paged", 1, 40]
    assert one.pop("wall_s") > 0
    two.pop("wall_s")
    assert one == two


def test_run_prints_what_a_reader_asks_first(kvsim):
    printed = succeeded(kvsim("run", "chat", "--policy", "paged", "--seed", "7", "--requests", "40"))
    printed = " ".join(printed.split())
    assert "chat under paged, seed 7" in printed
    assert "40 of 40 requests completed, 0 failed" in printed
    for word in ("TTFT", "TPOT", "P99", "external fragmentation", "profile default"):
        assert word in printed


def test_compare_as_one_object(kvsim, tmp_path):
    compared = json.loads(succeeded(kvsim("compare", "chat", *BOTH, "--requests", "40", "--json")))
    assert [summary["policy"] for summary in compared["policies"]] == ["contiguous", "paged"]
    for summary in compared["policies"]:
        check_summary(summary)
    assert (compared["scenario"], compared["seed"], compared["profile"]) == ("chat", 1, "default")
    assert list(tmp_path.iterdir()) == []


def test_compare_writes_a_picture_and_tables(kvsim, tmp_path):
    printed = succeeded(kvsim("compare", "chat", *BOTH, "--requests", "40", "--out", "kept"))
    folder = tmp_path / "kept" / "chat"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    compared = json.loads((folder / "comparison.json").read_text())
    table = pd.read_csv(folder / "comparison.csv", index_col="policy")
    for summary in compared["policies"]:
        check_summary(summary)
        assert table.loc[summary["policy"], "ttft_p95_s"] == pytest.approx(summary["ttft_s"]["p95"])
        assert len(pd.read_csv(folder / f"requests-{summary['policy']}.csv")) == 40
    assert load(folder / "scenario.toml").workload.requests == 40
    assert f"{len(list(folder.iterdir())) - 2} more files in kept/chat/" in printed
    for name in ("cells.png", "cells-paged.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


MISTAKES = {
    "misspelt key": (("run", "misspelt.toml"), "misspelt.toml: workload.raet: unknown key; did you mean 'rate'?"),
    "negative rate": (("compare", "negative.toml"), "negative.toml: workload.rate: "),
    "trace with a NaN": (("run", "nan.toml"), "nan.csv: row 2: ContextTokens 'NaN' "),
    "missing trace": (("run", "lost.toml"), "lost.csv: no such file"),
    "missing file": (("run", "none.toml"), "none.toml: no such file, and not a built-in scenario"),
    "missing file, shown": (("scenario", "show", "none.toml"), "none.toml: no such file"),
    "unknown policy": (("compare", "--policy", "paged", "--policy", "magic"), "no policy called 'magic'; there are "),
    "unknown profile": (("run", "--profile", "magic"), "magic: no profile file there, and none shipped of that name"),
    "unknown model": (("calibrate", "--model", "gpt"), "no model called 'gpt'; there are tiny, small"),
    "no JSON": (("run", "--profile", "nan.csv"), "nan.csv: not a machine profile: file: invalid json"),
    "out is a file": (("compare", "--requests", "5", "--out", "nan.csv"), "nan.csv/chat: cannot write results: "),
    "name that leads out of the folder": (("compare", "outside.toml", *BOTH, "--out", "kept"), "outside.toml: name: "),
    "profile of nobody": (("run", "--profile", "~no-such-user/p.json"), "~no-such-user/p.json: no profile file there"),
    "half a profile": (("run", "--profile", "half.json"), "half.json: not a machine profile: base_s: field required"),
}
GIVEN_FILES = {
    "misspelt.toml": "[workload]\nraet = 8.0\n",
    "negative.toml": "[workload]\nrate = -8.0\n",
    "nan.toml": '[workload]\nkind = "azure"\npath = "nan.csv"\n',
    "lost.toml": '[workload]\nkind = "azure"\npath = "lost.csv"\n',
    "outside.toml": 'name = "../outside"\n[workload]\nrequests = 5\n',
    "nan.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n2023-11-16 18:15:47,NaN,4\n",
    "half.json": '{"format": 1}',
}


@pytest.mark.parametrize(("command", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(kvsim, tmp_path, command, answer):
    for name, text in GIVEN_FILES.items():
        (tmp_path / name).write_text(text)
    assert answer in complaint(kvsim(*command))


@pytest.mark.parametrize("change", [{"matmul_knots": []}, {"matmul_knots": [1]}, {"matmul_slopes_s": []}], ids=str)
def test_a_profile_that_does_not_fit_together_is_refused(kvsim, tmp_path, change):
    broken = load_profile("default").model_dump(mode="json") | change
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert "broken.json: not a machine profile: matmul" in complaint(kvsim("run", "--profile", "broken.json"))


def test_a_scenario_that_is_shown_loads_again(kvsim, tmp_path):
    shown = succeeded(kvsim("scenario", "show", "chat"))
    (tmp_path / "shown.toml").write_text(shown)
    assert load(tmp_path / "shown.toml").to_toml() == shown == load("chat").to_toml()


def test_scenarios_and_policies_are_listed(kvsim):
    assert succeeded(kvsim("scenario", "list")).split() == builtin_names()
    described = json.loads(succeeded(kvsim("policies", "--json")))
    assert described.keys() >= {"contiguous", "paged"}
    assert all(line and "\n" not in line for line in described.values())


def test_a_reader_who_leaves_early_sees_no_traceback():
    program = subprocess.Popen([PROGRAM, "policies"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program.stdout.close()
    assert program.stderr.read() == ""
    program.stderr.close()
    program.wait()


def test_a_calibrated_profile_predicts(kvsim, tmp_path):
    # Tests share the machine with each other, so a busy one is no obstacle here.
    measured = json.loads(succeeded(kvsim("calibrate", "--seconds", "1", "--force", "--out", "mine.json", "--json")))
    assert measured == json.loads((tmp_path / "mine.json").read_text())
    assert load_profile("mine.json", tmp_path).samples == measured["samples"]
    predicted = json.loads(succeeded(kvsim("run", "chat", "--requests", "10", "--profile", "mine.json", "--json")))
    assert predicted["profile"] == measured["name"] == "mine"
    check_summary(predicted)
