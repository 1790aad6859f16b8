"""The example of a package with a policy: it is installed as its page says, and used by name in every way."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvsim.scenario.scenario import load_scenario
from tests.kvsim.simulation.random_runs import outcome
from tests.paths import ROOT
from tests.policies.invariants.rules import CacheMachine
from tests.policies.invariants.subjects import SETTINGS
from tests.worlds import python

EXAMPLE = ROOT / "examples" / "own-policy"


@pytest.fixture(scope="module")
def best_fit():
    """The example's class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        from own_policy.best_fit import BestFit

        yield BestFit


def install(folder):
    """Put the example into a folder as pip does, without the network: its modules, and what pip writes about it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(EXAMPLE / "own_policy", folder / "own_policy", ignore=shutil.ignore_patterns("__pycache__"))
    told = folder / f"own_policy-{project['version']}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{n} = {of}\n" for n, of in points.items())
        for group, points in project["entry-points"].items()
    ]
    (told / "entry_points.txt").write_text("\n".join(groups))
    files = [*folder.glob("own_policy/*.py"), *told.iterdir()]
    (told / "RECORD").write_text("".join(f"{path.relative_to(folder).as_posix()},,\n" for path in files))


def kvsim(*arguments, path, folder):
    """Run the command in a process of its own, with a folder on Python's path."""
    return python("-m", "kvsim", *arguments, path=[path], folder=folder)


@pytest.mark.slow
def test_it_is_compared_by_name_once_it_is_installed(tmp_path):
    install(tmp_path / "site")
    done = kvsim(
        "compare",
        "chat",
        "--requests",
        "20",
        "-p",
        "best-fit",
        "-p",
        "paged",
        "--json",
        path=tmp_path / "site",
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert [(run["policy"], run["completed"]) for run in told["policies"]] == [("best-fit", 20), ("paged", 20)]
    assert told["plugins"] == [{"policy": "best-fit", "package": "own-policy", "version": "0.1.0"}]


SWEEP = """
scenario = "chat"
policies = ["best-fit"]
[axes]
"cache.cells" = [1024, 2048]
"""


@pytest.mark.slow
def test_an_edit_in_its_second_module_has_a_sweep_run_anew(tmp_path):
    """By name from an installed package; the policy itself stands in the first."""
    site, sweep = tmp_path / "site", tmp_path / "sweep.toml"
    install(site)
    sweep.write_text(SWEEP)

    def latencies():
        done = kvsim("sweep", "sweep.toml", "--requests", "10", "--workers", "1", "--json", path=site, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return [point["e2e_mean"] for point in json.loads(done.stdout)["points"]]

    def runs():
        with closing(sqlite3.connect(tmp_path / "results" / "sweep" / "sweep.sqlite")) as store:
            return store.execute("SELECT count(*) FROM timings").fetchone()[0]

    first = latencies()
    assert (latencies(), runs()) == (first, 2), "nothing has changed, so nothing is run again"
    extents = site / "own_policy" / "extents.py"
    text = extents.read_text(encoding="utf-8")
    extents.write_text(text.replace("min(fitting)", "max(fitting)"), encoding="utf-8")
    os.utime(extents, (0, 0))  # So that Python does not take the old compiled code for current.
    assert latencies() != first
    assert runs() == 4
    shutil.move(site / "own_policy-0.1.0.dist-info", site / "own_policy-0.2.0.dist-info")
    told = site / "own_policy-0.2.0.dist-info" / "METADATA"
    told.write_text(told.read_text().replace("0.1.0", "0.2.0"))
    latencies()
    assert runs() == 6, "another version"


@pytest.mark.slow
def test_pip_installs_it(tmp_path):
    """The build needs no network: setuptools is there for the tests."""
    copy = shutil.copytree(EXAMPLE, tmp_path / "own-policy")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(copy)], check=True)
    done = kvsim("policies", "best-fit", path=tmp_path / "site", folder=tmp_path)
    assert "plug-in own-policy 0.1.0" in done.stdout


@pytest.mark.slow
def test_its_own_tests_pass():
    asked = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    done = python(*asked, folder=EXAMPLE, path=[EXAMPLE], PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_it_keeps_every_invariant(best_fit):
    run_state_machine_as_test(partial(CacheMachine, best_fit), settings=settings(SETTINGS, max_examples=25))


def test_its_usage_is_that_of_a_layout_that_needs_one_extent(best_fit):
    scenario = load_scenario("chat", workload__requests=20)
    usage = outcome(scenario, best_fit)[2]
    assert usage.placeable == usage.largest_free_extent
