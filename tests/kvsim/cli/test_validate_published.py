"""``kvsim validate --published``."""

import json

import pytest

from kvsim.engines.published import points
from tests.kvsim.cli.answers import complaint, succeeded
from tests.kvsim.engines.published import REPLAYED, write_points
from tests.worlds import command


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_points(tmp_path / "points.csv")
    return tmp_path


def published(*arguments):
    return command("validate", "--published", "--points", "points.csv", *arguments)


@pytest.mark.slow
def test_errors_the_worst_and_what_was_not_replayed_are_told(files):
    told = " ".join(succeeded(published()).split())
    assert "Measured points of real servers: 4 of 5 replayed" in told
    assert "Taken to be the server's: 4 points: K and V in f16, fixed lengths (no source: the defaults of vLLM)" in told
    assert "TPOT: median error" in told
    assert "clients up to 1 1" in told
    assert "1 pipeline parallelism is not simulated" in told
    assert "Saved published.csv, published.png in results/published/" in told
    assert (files / "results" / "published" / "published.csv").is_file()


def test_the_object_has_every_point(files):
    told = json.loads(succeeded(published("--json", "--only", "model=llama-3.1-8b")))
    assert [point["id"] for point in told["replayed"]] == list(REPLAYED)
    assert sum(told["not_replayed"].values()) == 3
    assert not (files / "results").exists()


@pytest.mark.slow
def test_a_bound_ends_with_1(files):
    done = published("--bound", "0.001", "--only", "id=four")
    assert (done.returncode, done.stderr.splitlines()[-1].split(",")[0]) == (1, "kvsim: the largest error")
    assert published("--bound", "100", "--only", "id=four").returncode == 0


def test_what_goes_with_another_use_is_refused(files):
    assert complaint(published("--repeat", "2")) == "--repeat means nothing beside --published"
    assert complaint(command("validate", "chat", "--only", "tp=1")) == (
        "--only: only with --published, for points that others measured"
    )
    assert complaint(published("--only", "tp=4")) == "--only: no tp of these points called '4'; there are 1, 2"
    assert complaint(command("validate", "--published", "--points", "none.csv")).startswith("none.csv: cannot be read")


def test_without_the_package_the_extra_is_named(files, monkeypatch):
    monkeypatch.setattr(points, "find_spec", lambda name: None)
    line = complaint(command("validate", "--published"))
    assert line.startswith("the measured points are in aiconfigurator-core, which is not installed; install it with: ")
