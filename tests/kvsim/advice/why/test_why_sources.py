"""What ``why`` takes: comparisons, folders, measured runs; and its command."""

import json

import numpy as np
import pandas as pd
import pytest

import kvsim
from kvsim.advice.why.diagnosis import FEWEST_REQUESTS, diagnose, why
from kvsim.costs.load_profile import load_profile
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.time_breakdown import SECONDS
from tests.kvsim.advice.why.worlds import FEW
from tests.worlds import command


@pytest.mark.slow
def test_a_measured_run_has_the_machine_as_a_cause():
    validation = kvsim.validate("identical", load_profile("default"), ["paged"], repeats=2)
    causes = validation.causes
    assert len(causes) == 20
    np.testing.assert_allclose(causes[[*SECONDS, "machine_s"]].sum(axis=1), causes["e2e_s"], rtol=1e-9)
    found = why(validation)
    assert found.measured
    assert found.policy == "paged"
    assert found.requests["e2e_s"].mean() == pytest.approx(causes["e2e_s"].mean())


@pytest.mark.slow
def test_a_slow_machine_is_diagnosed_from_saved_output(tmp_path):
    """Half of a measured run is slowed down by the machine only."""
    printed = kvsim.validate("identical", load_profile("default"), ["paged", "contiguous"], requests=8).to_dict()
    for policy in printed["policies"]:
        for row in policy["causes"]:
            row["machine_s"] = 0.0 if row["id"] < 4 else 5.0 + 0.01 * row["id"]
            row["e2e_s"] = sum(row[s] for s in [*SECONDS, "machine_s"])
    file = tmp_path / "v.json"
    file.write_text(json.dumps(printed))
    done = command("why", str(file), "-p", "contiguous", "--json")
    assert done.returncode == 0
    message = json.loads(done.stdout)
    assert message["measured"] is True
    assert message["over_time"]["dominant"] == "machine"
    assert message["remedies"][0]["kvsim"] == "kvsim validate identical --repeat 5"
    done = command("why", str(file), "-p", "ring")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "accepted: paged, contiguous" in done.stderr


@pytest.mark.slow
def test_a_folder_of_results_is_run_again(tmp_path):
    world = load_scenario(FEW, name="tight", workload__rate=20.0)
    kvsim.compare(world, ["contiguous", "paged"], snapshots=False).save(tmp_path / "tight")
    again, first = why(tmp_path / "tight"), why(world)
    assert again.requests.equals(first.requests)
    assert again.policy == "contiguous"
    assert why(tmp_path / "tight", "paged").policy == "paged"
    assert diagnose(run(world, detail="tables"), "tight").sentence == first.sentence


@pytest.mark.slow
def test_the_policy_chosen_from_a_comparison(tmp_path):
    """It is the scenario's own, else the slowest; any other on request."""
    world = load_scenario(FEW, name="tight", workload__rate=20.0)
    compared = kvsim.compare(world, ["paged", "llama.cpp-b4666"], snapshots=False)
    compared.save(tmp_path / "tight")
    slowest = max(compared.results, key=lambda result: result.summary["e2e_s"]["mean"]).policy
    for source in (compared, tmp_path / "tight"):
        found = why(source)
        assert found.policy == slowest
        assert found.note == (
            f"contiguous, the scenario's own policy, was not compared; {slowest} is the slowest of those that were"
        )
        assert why(source, "paged").policy == "paged"
        assert why(source, "ring").policy == "ring"
        assert why(source, "paged").note == ""
    assert why(kvsim.compare(world, ["paged", "contiguous"], snapshots=False)).policy == "contiguous"
    assert slowest in command("why", str(tmp_path / "tight"), "--out", str(tmp_path)).stdout
    (tmp_path / "tight" / "comparison.json").write_text("[]")
    done = command("why", str(tmp_path / "tight"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not what kvsim compare writes" in done.stderr


@pytest.mark.slow
def test_the_command_prints_a_table_and_saves_a_picture(tmp_path):
    done = command("why", "chat", "-p", "paged", "--plots", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "400 completed requests (simulated)" in done.stdout
    assert "The slowest quarter takes" in done.stdout
    assert "To try" in done.stdout
    assert (tmp_path / "chat" / "why.png").stat().st_size > 20_000
    saved = pd.read_csv(tmp_path / "chat" / "why.csv")
    assert len(saved) == 400


@pytest.mark.slow
def test_json_adds_up_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("why", "chat", "--json")
    printed = json.loads(done.stdout)
    assert sum(cause["share"] for cause in printed["across"]["causes"].values()) == pytest.approx(1)
    assert printed["completed"] + printed["failed"] == 400
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_gets_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage.json").write_text("{")
    (tmp_path / "other.json").write_text('{"scenario": "chat", "policies": [{"policy": "paged"}]}')
    few = tmp_path / "few.toml"
    few.write_text(f'[workload]\nkind = "batch"\nrequests = {FEWEST_REQUESTS - 1}\n')
    for arguments, message in (
        (("nowhere",), "not a built-in scenario"),
        ((str(tmp_path / "empty"),), "a folder that kvsim compare wrote is expected"),
        ((str(tmp_path / "garbage.json"),), "not what kvsim validate --json prints"),
        ((str(tmp_path / "other.json"),), "not what kvsim validate --json prints"),
        ((str(tmp_path / "none.json"),), "cannot be read"),
        ((str(few),), f"at least {FEWEST_REQUESTS} are needed"),
        (("chat", "-p", "nobody"), "no policy called 'nobody'"),
    ):
        done = command("why", *arguments, "--out", str(tmp_path / "out"))
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("kvsim: ")
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_result_must_have_kept_tables():
    with pytest.raises(kvsim.UserError, match="tables"):
        why(run(FEW))
    with pytest.raises(kvsim.UserError, match="not 'paged'"):
        why(run(FEW, detail="tables"), "paged")
