"""The benchmarks of the simulator's speed on a small scale, with a stand-in for Vidur."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import scale, speed
from benchmarks import sweep as sweeping
from benchmarks.vidur import Vidur, VidurError

CONFIG = """
import argparse

class SimulationConfig:
    seed = 1

    @classmethod
    def create_from_cli_args(cls):
        parser = argparse.ArgumentParser()
        for name in {options!r}:
            parser.add_argument("--" + name, action=argparse.BooleanOptionalAction if "plots" in name else None)
        given = cls()
        vars(given).update(vars(parser.parse_args()))
        return given
"""
SIMULATOR = """
import csv

class Simulator:
    def __init__(self, config):
        self.config = config

    def run(self):
        with open(self.config.trace_request_length_generator_config_trace_file) as text:
            rows = list(csv.DictReader(text))
        assert len(rows) == int(self.config.synthetic_request_generator_config_num_requests)
        assert sum(int(row["num_prefill_tokens"]) + int(row["num_decode_tokens"]) for row in rows) == {tokens}
        assert self.config.metrics_config_store_plots is False
        assert self.config.replica_scheduler_config_type == "sarathi"
        print("done")
"""
OPTIONS = (
    "request_generator_config_type",
    "synthetic_request_generator_config_num_requests",
    "length_generator_config_type",
    "trace_request_length_generator_config_trace_file",
    "trace_request_length_generator_config_max_tokens",
    "interval_generator_config_type",
    "poisson_request_interval_generator_config_qps",
    "replica_scheduler_config_type",
    "sarathi_scheduler_config_batch_size_cap",
    "sarathi_scheduler_config_chunk_size",
    "metrics_config_output_dir",
    "metrics_config_store_plots",
)


def fake_vidur(folder: Path, task: speed.Task, options: tuple[str, ...] = OPTIONS) -> Vidur:
    """A checkout with these options that checks the lengths of the task's requests."""
    (folder / "vidur").mkdir(parents=True)
    tokens = sum(request.prompt_tokens + request.output_tokens for request in task.workload())
    (folder / "vidur" / "__init__.py").touch()
    (folder / "vidur" / "config.py").write_text(CONFIG.format(options=options))
    (folder / "vidur" / "simulator.py").write_text(SIMULATOR.format(tokens=tokens))
    return Vidur(folder, Path(sys.executable), 5.0)


@pytest.mark.slow
def test_the_whole_benchmark_at_a_small_scale(tmp_path: Path) -> None:
    policies = ("paged", "llama.cpp-b6975")
    fake_vidur(tmp_path / "other", scale.task("paged", 10, None))
    options = ["--requests", "0.001", "--rounds", "1", "--out", str(tmp_path / "a" / "scale.json")]
    options += ["--picture", str(tmp_path / "b" / "scale.png"), "--vidur", str(tmp_path / "other")]
    options += ["--vidur-python", sys.executable, *(f"--only={policy}" for policy in policies)]
    app = Typer()
    app.command()(scale.main)
    ran = CliRunner().invoke(app, options)
    assert ran.exit_code == 0, ran.output
    report = json.loads((tmp_path / "a" / "scale.json").read_text())
    assert (tmp_path / "b" / "scale.png").read_bytes().startswith(b"\x89PNG")

    assert [row["label"] for row in report["presets"]] == ["paged", "paged, prefix cache on", "llama.cpp-b6975"]
    for row in report["presets"]:
        assert row["completed"] == row["requests"]
        assert row["failed"] == 0
        assert len(row["wall_s"]) == 1
        assert row["requests_per_s"] == pytest.approx(row["requests"] / row["wall_s"][0])
        assert row["tokens_per_s"] > row["forward_passes_per_s"] > row["requests_per_s"] > 0
        assert row["arrivals_per_s"] == pytest.approx(0.7 * report["service_rates_per_s"][row["policy"]])
        assert 20 < row["start_mb"] <= row["peak_mb"] < 1000
    assert [row["requests"] for row in report["growth"]] == [10, 100]
    assert "against_size_before" in report["growth"][1]
    assert [row["policy"] for row in report["overload"]] == list(policies)
    (floor,) = report["floor"]
    assert floor["policy"] == "paged"
    assert floor["events_per_request"] > 1
    assert floor["ratio"] > 1
    assert report["vidur"]["requests"] == 10
    assert report["vidur"]["ratio"] > 0
    assert "Vidur" in ran.output
    assert "times the floor" in ran.output


def test_an_unknown_policy_is_named() -> None:
    app = Typer()
    app.command()(scale.main)
    ran = CliRunner().invoke(app, ["--only", "pages"])
    assert ran.exit_code == 2
    assert "no policy called 'pages'" in ran.output


def test_failures_of_vidur_are_reported_in_one_line(tmp_path: Path) -> None:
    task = scale.task("paged", 10, None)
    assert fake_vidur(tmp_path / "good", task).run(task) > 0
    with pytest.raises(VidurError, match=r"^AssertionError$"):
        fake_vidur(tmp_path / "longer", scale.task("paged", 11, None)).run(task)
    with pytest.raises(VidurError, match=r"^it has no option --sarathi_scheduler_config_chunk_size$"):
        fake_vidur(tmp_path / "older", task, tuple(o for o in OPTIONS if "chunk" not in o)).run(task)
    (tmp_path / "empty").mkdir()
    with pytest.raises(VidurError, match=r"^ModuleNotFoundError: No module named 'vidur'$"):
        Vidur(tmp_path / "empty", Path(sys.executable), 5.0).run(task)
    with pytest.raises(VidurError, match=r"no-python: No such file"):
        Vidur(tmp_path, tmp_path / "no-python", 5.0).run(task)


def test_lengths_are_those_of_the_table() -> None:
    for lengths, mean, median, p95, longest in (
        (speed.PROMPTS, 1155, 1020, 4083, 14050),
        (speed.OUTPUTS, 211, 129, 451, 1000),
    ):
        drawn = lengths.draw(np.random.default_rng(1), 200_000)
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert drawn.max() <= longest
        assert np.quantile(drawn, [0.5, 0.95]) == pytest.approx([median, p95], rel=0.02)


def test_a_traces_lengths_are_repeated_in_order(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:46.{i}000000,{100 + i},{10 + i}\r\n" for i in range(3))
    (tmp_path / "t.csv").write_bytes(f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}".encode())
    requests = list(speed.Task("paged", 5000, 2.0, trace=str(tmp_path / "t.csv")).workload())
    assert [request.prompt_tokens for request in requests[:5]] == [100, 101, 102, 100, 101]
    assert [request.id for request in requests] == list(range(5000))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2500, rel=0.1)


def test_ratios_are_of_medians_with_rounds_drawn_together() -> None:
    found = scale.ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert scale.ratio([3.0], [2.0]) == {"ratio": 1.5, "low": 1.5, "high": 1.5}


def test_parallel_efficiency_is_reported(capsys):
    sweeping.main(["--points", "4", "--requests", "20", "--rounds", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["points"] == 4
    assert report["efficiency"] > 0
