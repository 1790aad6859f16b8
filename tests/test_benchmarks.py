"""The benchmarks of the simulator's speed on a small scale, with stand-ins for Vidur and for runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import million, preset_tables, presets, runs, sampling, scale, shares, speed
from benchmarks import sweep as sweeping
from benchmarks.vidur import Vidur, VidurError
from tests.paths import ROOT

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


def ran(main, *options: str):
    """The command's outcome."""
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, [*options])


@pytest.fixture
def made_up(monkeypatch):
    """Instead of runs, what a run would answer: overload takes twice as long, and the cache three times."""

    def answer(task: speed.Task):
        if task.bare:
            return {"events_per_s": 0.76e6}
        if task.policy == "ring" or (task.policy == "growing" and task.rate is not None):
            raise RuntimeError("no such thing")
        overload = task.rate is not None and task.rate > 10
        seconds = 1e-5 * task.requests * (2 if overload else 1) * (3 if task.detail == "cache" else 1)
        counts = {"completed": task.requests, "failed": int(overload), "truncated": 0, "preemptions": 0}
        counts |= {"prompt_tokens": 900 * task.requests, "output_tokens": 100 * task.requests, "forward_passes": 7}
        summary = counts | {"queue": {"unstable": overload}, "makespan_s": task.requests / 10}
        quiet = 0.5 if task.scheduler == "static" else 1.0
        return {"wall_s": seconds, "cpu_s": quiet * seconds, "before_mb": 60, "peak_mb": 80, "summary": summary}

    monkeypatch.setattr(runs, "run_isolated", answer)


def test_presets_are_compared_in_one_table(made_up, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "found.json"
    names = ("paged", "ring", "growing", "llama.cpp-b6975")
    asked = [f"--only={name}" for name in names] + ["--scheduler=static", "--scheduler=vllm"]
    done = ran(presets.main, *asked, "--rounds", "2", "--out", str(out))
    assert done.exit_code == 1  # Of what was refused.
    report = json.loads(out.read_text())
    assert len(report["bare_timeouts_per_s"]) == 5  # One for each preset of a round, until none of its runs are left.
    assert len(report["runs"]) == 2 * 2 * 3 * 2
    loads = {row["load"]: row["arrivals_per_s"] for row in report["runs"]}
    assert loads == pytest.approx({0.3: 3.0, 0.7: 7.0, 1.3: 13.0})
    assert {round(each["ratio"], 9) for each in report["ratios"] if each["above"]["load"] != each["below"]["load"]} == {
        2.0
    }
    assert {round(each["ratio"], 9) for each in report["ratios"] if each["above"]["load"] == each["below"]["load"]} == {
        3.0
    }
    assert [len(row["wall_s"]) for row in report["runs"]] == [2] * 24

    page = out.with_suffix(".md").read_text()
    assert "| `paged` | 10,000 | 10 | 10 | 20 | 30 | 30 | 60 | 2.00 | 3.00 | 80 |" in page
    assert "| `llama.cpp-b6975` | 2,000 | 10 |" in page
    assert page.count("`paged` under `vllm`, overload, requests: 1 failed, 0 cut short") == 1
    assert "at load 0.7: none; at load 1.3: all." in page
    assert "some run: `paged` under `static`, `llama.cpp-b6975` under `static`." in page
    assert "ring under static: no such thing" in page
    assert "growing under vllm, load 1.3, cache, 10,000 requests: no such thing" in page


def test_figures_of_other_simulators_are_scaled(made_up, tmp_path: Path) -> None:
    assert preset_tables.machines([0.76e6, 3.04e6, 0.1e6]) == 0.5
    options = ("--only=paged", "--scheduler=vllm", "--detail=requests", "--rounds=1", "--out", str(tmp_path / "a.json"))
    done = ran(presets.main, *options, "--markdown", str(tmp_path / "b.md"))
    assert done.exit_code == 0, done.output
    page = (tmp_path / "b.md").read_text()
    assert "scaled by 0.50" in page
    assert "| Vidur, default output | 144 | 0.20 | 987 | 288 |" in page
    assert "| kvsim, `paged`, 0.7 | 100,000 | 100.00 | 80 | run here |" in page
    assert "cache / requests" not in page
    assert "Vidur, default output" in done.output


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--only=pages", "no policy called 'pages'; did you mean 'paged'?"),
        ("--scheduler=vlm", "no scheduler called 'vlm'; did you mean 'vllm'?"),
        ("--detail=tables", "no detail called 'tables'"),
    ],
)
def test_an_unknown_name_is_named(option: str, says: str) -> None:
    done = ran(presets.main, option)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.slow
def test_presets_are_run_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "presets.json"
    done = ran(
        presets.main,
        "--only=paged",
        "--scheduler=llama-server",
        "--detail=requests",
        "--requests=0.001",
        "--rounds=1",
        "--out",
        str(out),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    (rate,) = report["service_rates_per_s"]
    assert len(report["runs"]) == 3
    for row in report["runs"]:
        assert row["scheduler"] == "llama-server"
        assert row["completed"] == row["requests"] == 10
        assert row["arrivals_per_s"] == pytest.approx(row["load"] * rate["rate"])
        assert row["tokens_per_s"] > row["forward_passes_per_s"] > row["requests_per_s"] > 0
        assert 20 < row["before_mb"] <= row["peak_mb"] < 1000


@pytest.mark.slow
def test_a_million_requests_are_run_as_typed(tmp_path: Path) -> None:
    out = tmp_path / "million.json"
    done = ran(presets.main, "--million", "--requests=0.00002", "--rounds=1", "--out", str(out))
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert [row["policy"] for row in report["runs"]] == ["paged", "llama.cpp-today"]
    for row in report["runs"]:
        assert row["requests"] == row["completed"] == 20
        assert row["seconds"] > 0
        assert 20 < row["peak_mb"] < 1000
    assert "requests = 20\n" in out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_typed_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        million.run_typed(million.command(tmp_path / "nowhere.toml", "paged"))


@pytest.mark.slow
def test_growth_floor_and_vidur_at_a_small_scale(tmp_path: Path, monkeypatch) -> None:
    # That runs are in processes of their own is shown above, and each takes seconds to start.
    for module in (runs, scale):
        monkeypatch.setattr(module, "run_isolated", lambda task: json.loads(json.dumps(speed.run_task(task))))
    fake_vidur(tmp_path / "other", runs.task("paged", 10))
    options = ["--requests", "0.001", "--rounds", "1", "--out", str(tmp_path / "a" / "scale.json")]
    options += ["--picture", str(tmp_path / "b" / "scale.png"), "--vidur", str(tmp_path / "other")]
    done = ran(scale.main, *options, "--vidur-python", sys.executable)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "a" / "scale.json").read_text())
    assert (tmp_path / "b" / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert [row["requests"] for row in report["growth"]] == [10, 100]
    assert "against_size_before" in report["growth"][1]
    assert [floor["policy"] for floor in report["floor"]] == ["paged", "oracle"]
    for floor in report["floor"]:
        assert floor["events_per_request"] > 1
        assert floor["ratio"] > 1
    assert report["vidur"]["requests"] == 10
    assert report["vidur"]["ratio"] > 0
    assert "Vidur" in done.output
    assert "times the floor" in done.output


def test_every_file_that_a_run_goes_through_belongs_to_a_part() -> None:
    folders = ("kvsim/simulation", "kvsim/costs", "policies/cells", "policies/placement", "policies/layouts")
    files = [
        *(path for folder in folders for path in (ROOT / folder).rglob("*.py")),
        *(ROOT / "workloads").rglob("*.py"),
    ]
    assert {sampling.part_of(str(path)) for path in files} <= sampling.PARTS.keys() - {sampling.OTHER}
    named = [ROOT / name for names in sampling.PARTS.values() for name in names if not name.startswith("simpy")]
    assert [path for path in named if not path.exists()] == []
    assert sampling.part_of(str(ROOT / "policies/placement/blocks.py")) == "step loop"
    assert sampling.part_of(str(ROOT / "kvsim/simulation/step_loop.py")) == "step loop"
    assert sampling.part_of(str(ROOT / "kvsim/simulation/schedulers/vllm.py")) == "scheduler"
    assert sampling.part_of(str(ROOT / "kvsim/simulation/server.py")) == "server"
    assert sampling.part_of(np.__file__) is None


def test_a_sample_belongs_to_the_innermost_function_of_a_part() -> None:
    lengths = np.random.default_rng(1)
    found = sampling.sampled(lambda: [speed.PROMPTS.draw(lengths, 100_000) for _ in range(10)])
    assert found["samples"] > 0
    assert max(found["parts"], key=lambda part: found["parts"][part].total()) == "arrivals"
    assert all(name.startswith("speed.Quantiles.") for name in found["parts"]["arrivals"])


@pytest.mark.slow
def test_shares_of_time_are_told() -> None:
    done = ran(shares.main, "paged", "--scheduler=vllm", "--scheduler=llama-server", "--requests", "0.004", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)["runs"]
    assert [run["scheduler"] for run in found] == ["vllm", "llama-server"]
    for run in found:
        assert run["requests"] == 200
        assert run["samples"] > 0
        assert sum(run["parts"].values()) == pytest.approx(1)
    (table, most) = shares.parts_of(found)
    assert [row[0] for row in table.rows[-1:]] == ["samples"]
    assert {row[0] for row in table.rows[:-1]} == {*sampling.PARTS}
    assert next(iter(found[0]["functions"])) in most.text


def test_failures_of_vidur_are_reported_in_one_line(tmp_path: Path) -> None:
    task = runs.task("paged", 10)
    assert fake_vidur(tmp_path / "good", task).run(task) > 0
    with pytest.raises(VidurError, match=r"^AssertionError$"):
        fake_vidur(tmp_path / "longer", runs.task("paged", 11)).run(task)
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
    found = runs.ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert runs.ratio([3.0], [2.0]) == {"ratio": 1.5, "low": 1.5, "high": 1.5}


def test_parallel_efficiency_is_reported(capsys):
    sweeping.main(["--points", "4", "--requests", "20", "--rounds", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["points"] == 4
    assert report["efficiency"] > 0
