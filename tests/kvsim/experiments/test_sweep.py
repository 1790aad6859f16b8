"""Sweeps: the same rows however they are executed, no run executed twice, no run lost."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pandas as pd
import pytest
import tomli_w

import kvsim
from kvsim import UserError, sweep
from kvsim.costs.efficiency import efficiencies
from kvsim.experiments import fingerprint
from kvsim.experiments.store import Store
from policies.checked import CheckedPolicy
from tests.kvsim.experiments.small_sweeps import SMALL
from tests.worlds import command

HOME = sys.modules["kvsim.experiments.sweep"]
"""The module; ``kvsim.sweep`` is the function."""

TOML = tomli_w.dumps(SMALL | {"replications": 5, "axes": {"cache.cells": [512, 1024], "workload.rate": [30.0, 60.0]}})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return sweep(SMALL, out=tmp_path_factory.mktemp("small") / "one.sqlite", workers=1)


def executed(path):
    """The digests of the runs that were executed, in order."""
    with Store(path) as store:
        return [timing.digest for timing in store.timings()]


@pytest.mark.slow
def test_every_point_has_rows(small):
    assert len(small.rows) == 24 + 6
    assert len(small.table) == 18
    assert len(small.runs) == 24
    done = small.table[small.table["cache.cells"] > 128]
    assert (done["replications"] == 2).all()
    assert (done["e2e_mean_low"] <= done["e2e_mean"]).all()
    assert sorted(executed(small.store)) == sorted(row.digest for row in small.rows if row.status == "done")


def test_invalid_points_are_stored_with_their_reason(small):
    failures = small.failures
    assert len(failures) == 6
    assert set(failures["cache.cells"]) == {128}
    assert set(failures["error"]) == {"small: scenario: server.slot_context (160) exceeds cache.cells (128)"}
    assert (small.table[small.table["cache.cells"] == 128]["verdict"] == "failed: 1 run").all()


def test_a_row_can_be_run_again_by_itself(small, tmp_path):
    row = next(row for row in small.rows if row.status == "done" and row.replication == 1)
    (tmp_path / "one.toml").write_text(row.scenario)
    again = kvsim.run(tmp_path / "one.toml", detail="rows").summary
    again.pop("wall_s")
    assert json.loads(row.summary) == json.loads(json.dumps(again))


@pytest.mark.slow
def test_two_workers_give_the_same_rows(small, tmp_path):
    assert sweep(SMALL, out=tmp_path / "two.sqlite", workers=2).rows == small.rows


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_rows(small, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        result = sweep(SMALL, out=tmp_path / "dask.sqlite", dask=cluster.scheduler_address)
        several = SMALL | {"policies": ["paged"], "axes": {"cluster.replicas": [2, 3]}}
        there = sweep(several, out=tmp_path / "several.sqlite", dask=cluster.scheduler_address)
    assert result.rows == small.rows
    assert there.rows == sweep(several, out=tmp_path / "here.sqlite", workers=1).rows
    with Store(tmp_path / "dask.sqlite") as store:
        assert os.getpid() not in {timing.process for timing in store.timings()}


def test_no_run_is_executed_twice(small):
    before = executed(small.store)
    seen = []
    again = sweep(SMALL, out=small.store, workers=2, progress=lambda *counts: seen.append(counts))
    assert again.rows == small.rows
    assert executed(small.store) == before
    assert seen == [(30, 30, 6), (30, 30, 6)]


@pytest.mark.slow
def test_a_larger_sweep_executes_only_missing_runs(small, tmp_path):
    path = tmp_path / "grown.sqlite"
    few = SMALL | {"axes": {"cache.cells": [512], "workload.rate": [60.0]}, "policies": ["paged"]}
    assert len(sweep(few, out=path, workers=1).rows) == 2
    grown = sweep(SMALL, out=path, workers=1)
    assert grown.rows == small.rows
    assert len(executed(path)) == 24
    # A smaller sweep keeps the runs that it no longer uses.
    assert len(sweep(few, out=path, workers=1).rows) == 2
    assert len(executed(path)) == 24


@pytest.mark.slow
def test_stored_runs_move_to_their_new_points(tmp_path):
    path = tmp_path / "moved.sqlite"
    few = SMALL | {"axes": {"cache.cells": [512]}, "policies": ["paged"]}
    sweep(few, out=path, workers=1)
    wider = few | {"axes": {"workload.rate": [30.0, 50.0], "cache.cells": [256, 512]}}
    assert sweep(wider, out=path, workers=1).rows == sweep(wider, out=tmp_path / "new.sqlite", workers=1).rows
    assert len(executed(path)) == 8


def pretend_other_code(monkeypatch):
    """In this process only; its workers have the real version."""
    for module in (HOME, sys.modules["kvsim.experiments.sweep_task"]):
        monkeypatch.setattr(module, "code_version", lambda: "0.0+other")


def test_other_code_repeats_every_run(small, tmp_path, monkeypatch):
    path = tmp_path / "code.sqlite"
    few = SMALL | {"axes": {"cache.cells": [512]}, "policies": ["paged"]}
    before = sweep(few, out=path, workers=1)
    pretend_other_code(monkeypatch)
    after = sweep(few, out=path, workers=1)
    assert len(executed(path)) == 4
    assert [row.measures for row in after.rows] == [row.measures for row in before.rows]
    assert not {row.digest for row in after.rows} & {row.digest for row in before.rows}


@pytest.mark.slow
def test_workers_of_another_kvsim_are_refused(tmp_path, monkeypatch):
    """Forked workers cannot be of another, so that new processes are started."""
    monkeypatch.setattr("kvsim.experiments.workers.can_fork", lambda: False)
    pretend_other_code(monkeypatch)
    with pytest.raises(UserError, match=r"the workers run a different kvsim: .*, this process has 0\.0"):
        sweep(SMALL, out=tmp_path / "a.sqlite", workers=2)


def test_the_contents_of_a_trace_are_part_of_the_digest(tmp_path):
    trace = tmp_path / "trace.csv"
    (tmp_path / "traced.toml").write_text('[workload]\nkind = "azure"\npath = "trace.csv"\n')
    digests = set()
    for tokens in (3, 4):
        trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{tokens},4\n")
        fingerprint._file_digest.cache_clear()
        digests.add(fingerprint.digest_of(fingerprint.scenario_parts(kvsim.load(tmp_path / "traced.toml"))))
    assert len(digests) == 2


def test_a_failed_run_stops_no_other(tmp_path):
    """A server that makes no progress, and a policy that breaks."""
    stuck = {
        "base": {
            "workload": {
                "kind": "batch",
                "requests": 3,
                "prompt_tokens": {"kind": "fixed", "value": 10},
                "output_tokens": {"kind": "fixed", "value": 12},
            },
            "server": {"scheduler": "vllm"},
            "cache": {"cells": 24, "block_size": 4},
        },
        "policies": ["growing", "paged"],
    }
    result = sweep(stuck, out=tmp_path / "a.sqlite", workers=1)
    assert [row.status for row in result.rows] == ["failed", "done"]
    (error,) = result.failures["error"]
    assert error.startswith("growing: no progress after 0.0")
    assert result.to_dict()["failed"] == 1


def test_unexpected_errors_are_reported_in_one_line(tmp_path, monkeypatch):
    def broken(scenario, **_):
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("kvsim.experiments.sweep_task.run", broken)
    result = sweep(SMALL | {"axes": {}}, out=tmp_path / "a.sqlite", workers=1)
    assert set(result.failures["error"]) == {"ZeroDivisionError: by; nothing"}
    assert len(result.best()) == 0
    assert result.conclusion().startswith("no conclusion: no policy served all requests")
    result.save()


@pytest.mark.slow
def test_replications_are_added_until_they_are_precise(tmp_path):
    rule = {"measure": "e2e_mean", "within": 0.04, "most": 9}
    stopped = SMALL | {"axes": {"workload.rate": [30.0, 60.0]}, "policies": ["paged"], "replications": 3, "stop": rule}
    one = sweep(stopped, out=tmp_path / "one.sqlite", workers=1)
    counts = one.table["replications"].tolist()
    assert all(3 <= n <= 9 for n in counts)
    assert max(counts) > 3
    for row in one.table.to_dict("records"):
        half = (row["e2e_mean_high"] - row["e2e_mean_low"]) / 2 / row["e2e_mean"]
        assert half <= 0.04 or row["replications"] == 9
    assert sweep(stopped, out=tmp_path / "two.sqlite", workers=2).rows == one.rows
    assert sweep(stopped, out=tmp_path / "one.sqlite", workers=1).rows == one.rows
    assert len(executed(tmp_path / "one.sqlite")) == sum(counts)


def test_the_best_of_each_point(small):
    best = small.best("e2e_mean")
    assert best["number"].tolist() == [2, 3, 4, 5]
    for row in best.to_dict("records"):
        at = small.table[(small.table["number"] == row["number"]) & (small.table["failed_share"] == 0)]
        assert row["value"] == at["e2e_mean"].min()
        assert row["rivals"] == len(at) - 1
    most = small.best("throughput_tokens_per_s")
    assert (most["behind"].dropna() <= 0).all() or (most["behind"].dropna() >= 0).all()
    assert "e2e_mean of 6 points: " in small.conclusion()
    with pytest.raises(UserError, match="no measure called 'speed'"):
        small.best("speed")


@pytest.mark.slow
def test_pictures_and_tables_are_saved(small, tmp_path):
    written = small.save(tmp_path / "kept")
    names = ["one.json", "one.csv", "one-runs.csv", "one-best.csv", "one-failures.csv", "one.png"]
    assert [path.name for path in written] == names
    assert len(pd.read_csv(tmp_path / "kept" / "one.csv")) == 18
    assert written[-1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"cache.prefix_cache": [True, False]},
        {"cache.cells": [512, 1024], "cache.prefix_cache": [True, False], "server.slots": [3, 4]},
        {"cache.cells": [512, 600], "cache.prefix_cache": [True], "server.slots": [3, 4], "cache.pad": [32]},
    ],
    ids=len,
)
def test_any_number_of_axes_can_be_drawn(tmp_path, axes):
    few = SMALL | {"axes": axes, "policies": ["paged"], "base": {"workload": {"requests": 5}}, "replications": 1}
    sweep(few, out=tmp_path / "a.sqlite", workers=1).plot("ttft_p95").savefig(tmp_path / "a.png")


HELD = """
import os, sys, time
from kvsim.cli.app import main
from kvsim.experiments.store import Store
from kvsim.experiments.sweep_task import RunTasks

def add(store, rows, timings=(), add=Store.add):
    add(store, rows, timings)
    with open("stored", "a") as told:
        told.writelines("one\\n" for _ in timings)

def execute(these, tasks, execute=RunTasks.__call__):
    if tasks[0].number >= {settings}:
        open(f"held-{{os.getpid()}}", "w").close()
        time.sleep(600)
    return execute(these, tasks)

Store.add, RunTasks.__call__ = add, execute
main()
"""
"""The command ``kvsim``, whose runs end at the first settings only: both workers are in the midst of a run then."""


@contextmanager
def held(folder, settings):
    """A sweep by two workers that has stored all runs at its first settings, and goes no further."""
    for earlier in folder.glob("held-*"):
        earlier.unlink()
    (folder / "small.toml").write_text(TOML)
    words = ["sweep", "small.toml", "--out", "a.sqlite", "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", HELD.format(settings=settings), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            wait_for(lambda: len(list(folder.glob("held-*"))) == 2)
            wait_for(lambda: len((folder / "stored").read_text().split()) == 15 * settings)
            yield running
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


def wait_for(happens):
    until = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_sweep_can_be_resumed(tmp_path):
    """The rows are those of an undisturbed sweep, and no stored run is executed again."""
    for settings in (1, 2):
        with held(tmp_path, settings) as running:
            running.kill()
    result = sweep(tmp_path / "small.toml", out=tmp_path / "a.sqlite", workers=2)
    assert result.rows == sweep(tmp_path / "small.toml", out=tmp_path / "whole.sqlite", workers=1).rows
    digests = executed(tmp_path / "a.sqlite")
    assert len(digests) == len(set(digests)) == 60


@pytest.mark.slow
@pytest.mark.parametrize("settings", [0, 2], ids=["at its beginning", "after some runs"])
def test_an_interrupted_sweep_says_how_to_resume(tmp_path, settings):
    """Workers print nothing."""
    with held(tmp_path, settings) as running:
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    *progress, line = err.splitlines()
    assert all(re.fullmatch(r"small\.toml: \d+ of 60 runs after \d+ s", each) for each in progress)  # On slow machines.
    said = re.fullmatch(r"kvsim: stopped; (\d+) of 60 runs are kept; the same command goes on from there", line)
    kept = len(executed(tmp_path / "a.sqlite"))
    assert kept == 15 * settings
    # The last may have been stored and not counted any more.
    assert kept - int(said[1]) in ((0, 1) if settings else (0,))


def test_interrupted_before_it_counts_a_sweep_does_not_say_that_none_is_kept(within, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(HOME, "sweep", interrupted)
    finished = within()
    assert finished.returncode == 130
    assert finished.stderr == "kvsim: stopped; finished runs are kept; the same command goes on from there\n"


# The command


@pytest.fixture
def within(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TOML.replace("replications = 5", "replications = 2"))
    return lambda *arguments: command("sweep", "small.toml", "--workers", "1", *arguments)


@pytest.mark.slow
def test_the_command_prints_a_table_and_a_conclusion(within, tmp_path):
    finished = within("--requests", "20")
    assert (finished.returncode, finished.stderr) == (0, "")
    printed = " ".join(finished.stdout.split())
    assert "point cache.cells workload.rate policy runs e2e mean" in printed
    assert "24 runs, 0 of which could not finish" in printed
    assert "lowest e2e_mean of 4 points: " in printed
    assert "Saved sweep.sqlite, sweep.json, sweep.csv, runs.csv, best.csv in results/small/" in printed
    assert len(pd.read_csv(tmp_path / "results" / "small" / "runs.csv")) == 24


@pytest.mark.slow
def test_the_command_prints_one_object(within):
    printed = json.loads(within("--json", "--requests", "20", "--seed", "5").stdout)
    assert {"name", "store", "runs", "failed", "measure", "level", "conclusion", "points", "best", "failures"} <= {
        *printed
    }
    assert (printed["name"], printed["runs"], printed["failed"]) == ("small", 24, 0)
    assert printed["points"][0]["requests"] <= 20


@pytest.mark.slow
def test_the_command_lists_failures(within, tmp_path):
    text = (tmp_path / "small.toml").read_text().replace("512", "128")
    (tmp_path / "small.toml").write_text(text)
    finished = within("--requests", "10", "--json")
    assert finished.returncode == 0
    assert json.loads(finished.stdout)["failed"] == 6
    assert len(finished.stderr.splitlines()) == 6
    assert finished.stderr.splitlines()[-1] == "warning: and 1 more failed runs, see failures.csv"


def test_an_invalid_file_leaves_nothing_behind(within, tmp_path):
    (tmp_path / "small.toml").write_text(TOML.replace("cells", "cels"))
    finished = within()
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == "kvsim: small.toml: axes: cache.cels: unknown key; did you mean 'cells'?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


@pytest.mark.slow
def test_a_missing_dask_scheduler_is_reported(within, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("kvsim.experiments.workers._CONNECT_S", 0.5)
    for address in ("nonsense://x", "127.0.0.1:9"):
        finished = command("sweep", "small.toml", "--dask", address)
        assert finished.returncode == 2
        (line,) = finished.stderr.splitlines()
        assert line.startswith(f"kvsim: {address}: no dask scheduler answers there: ")
    both = within("--dask", "127.0.0.1:9")
    assert both.stderr == "kvsim: workers: a dask cluster has its own; give either workers or dask\n"


def test_a_run_depends_on_what_its_estimate_is_made_of(monkeypatch):
    on = {"model": "qwen3-4b", "device": "h100_sxm"}
    before = fingerprint.scenario_parts(kvsim.load_scenario("chat", **on))
    assert before == fingerprint.scenario_parts(kvsim.load_scenario("chat", **on))
    assert before != fingerprint.scenario_parts(kvsim.load_scenario("chat", **on, machine__weights="fp8"))
    fitted = efficiencies()["vllm"]["nvidia"]
    other = fitted.model_copy(update={"decode": fitted.decode.model_copy(update={"reading": 0.5})})
    monkeypatch.setitem(efficiencies()["vllm"], "nvidia", other)
    assert before != fingerprint.scenario_parts(kvsim.load_scenario("chat", **on))


@pytest.mark.slow
def test_a_lost_dask_scheduler_ends_in_a_line_and_keeps_what_was_done(tmp_path, capfd):
    distributed = pytest.importorskip("distributed")
    start = "import sys; from distributed.cli.dask_{} import main; sys.exit(main(sys.argv[1:]))"

    def begin(what, *arguments):
        return subprocess.Popen(
            [sys.executable, "-c", start.format(what), *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
        )

    file = tmp_path / "scheduler.json"
    scheduler = begin(
        "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)
    )
    worker = begin("worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard")
    try:
        wait_for(file.exists)
        address = json.loads(file.read_text())["address"]
        done = []

        def kill_scheduler(*counts):
            done.append(counts)
            if counts[0] > done[0][0]:
                scheduler.kill()

        line = (
            f"^{address}: the dask scheduler was lost; start it again, or leave out --dask, and give the same command"
        )
        with pytest.raises(UserError, match=line):
            sweep(SMALL, out=tmp_path / "lost.sqlite", dask=address, progress=kill_scheduler)
    finally:
        for process in (worker, scheduler):
            process.kill()
            process.wait()
    assert distributed is not None
    assert capfd.readouterr().err == ""
    with Store(tmp_path / "lost.sqlite") as store:
        assert len(store.digests()) >= done[-1][0] > done[0][0]


@pytest.mark.slow
def test_a_damaged_run_is_named_and_done_again(within, tmp_path):
    assert within("--json").returncode == 0
    store = next(tmp_path.rglob("*.sqlite"))
    with Store(store) as found:
        before = found.rows()
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE points SET measures = substr(measures, 1, 40) WHERE digest = ?", (before[0].digest,))
    again = within("--json")
    assert again.returncode == 0
    assert "a damaged run (policy " in again.stderr
    with Store(store) as found:
        assert found.rows() == before


def test_stored_runs_are_done_again_where_policies_are_to_be_held_to_their_word(tmp_path):
    """With the same results."""
    table, path = SMALL | {"axes": {"cache.cells": [1024]}, "replications": 1}, tmp_path / "one.sqlite"
    plain, checked = (sweep(table, out=path, workers=1, requests=9, check=check) for check in (False, True))
    assert len(executed(path)) == 2 * len(plain.runs)
    assert [row.times for row in checked.rows] == [row.times for row in plain.rows]


def test_a_policy_that_does_not_hold_its_word_is_a_failed_run(within, monkeypatch):
    def refuses(policy, always, **_):
        assert always
        raise UserError("step 1: no word is held to")

    assert within("--requests", "9").stderr == ""
    monkeypatch.setattr(CheckedPolicy, "__init__", lambda self, policy, *_, **how: refuses(policy, **how))
    assert within("--requests", "9").stderr == ""
    done = within("--requests", "9", "--check")
    assert done.returncode == 0
    assert "point 0 under paged, replication 0: step 1: no word is held to" in done.stderr
