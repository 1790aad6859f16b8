"""The scheduler and the order of eviction on the pages that say how to add one work as they stand there."""

import json
import sys

import pytest

import kvsim
from kvsim.errors import UserError
from kvsim.experiments.fingerprint import scenario_parts
from kvsim.scenario.server_defaults import SCHEDULERS
from policies import PluginError, PluginWarning, load_plugin, plugins, registry
from policies.paging.eviction import EVICTION_ORDERS
from tests.docs.pages import blocks
from tests.paths import ROOT
from tests.policies.invariants.subjects import FakeEntryPoint
from tests.worlds import command

SCHEDULER = ROOT / "examples" / "own-scheduler" / "shortest_first.py"
EVICTION = ROOT / "examples" / "own-eviction-order" / "used_twice.py"


@pytest.fixture(autouse=True)
def none_added(monkeypatch):
    """What a test adds is forgotten afterwards."""
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    for each in registry.REGISTRIES:
        monkeypatch.setattr(each, "_installed", None)
    yield
    registry.FILES.clear()


@pytest.mark.parametrize(("page", "file"), [("add-a-scheduler.md", SCHEDULER), ("add-an-eviction-order.md", EVICTION)])
def test_the_page_shows_the_example(page, file):
    assert blocks(page, "python") == [file.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paged", "contiguous", "llama.cpp-today", "h2o"])
def test_the_scheduler_serves_every_request(policy):
    load_plugin(SCHEDULER)
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler="shortest-first")
    result = kvsim.run(scenario, policy, detail="tables")
    assert (result.summary["completed"], result.summary["failed"]) == (60, 0)
    spent = result.causes.filter(like="_s").drop(columns=["arrival_s", "e2e_s"]).sum(axis=1)
    assert spent.to_numpy() == pytest.approx(result.causes["e2e_s"].to_numpy())


def test_the_shortest_of_those_that_wait_starts_first():
    load_plugin(SCHEDULER)
    queue = {"server__slots": 1, "workload__requests": 12, "workload__rate": 1e6}
    scenario = kvsim.load_scenario("chat", server__scheduler="shortest-first", **queue)
    started = kvsim.run(scenario, "paged", detail="rows").requests.sort_values("started_s")["prompt_tokens"]
    assert list(started[1:]) == sorted(started[1:])


@pytest.mark.slow
def test_it_preempts_where_the_cache_is_full():
    load_plugin(SCHEDULER)
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler="shortest-first", cache__cells=640)
    result = kvsim.run(scenario, "paged", detail="tables")
    assert result.summary["preemptions"] > 0
    assert result.summary["completed"] + result.summary["failed"] == 60
    assert result.causes["cells_s"].sum() > 0


def test_commands_take_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ("--scheduler", "shortest-first", "--plugin", str(SCHEDULER))
    done = command("run", "chat", "--requests", "5", *own, "--json")
    assert json.loads(done.stdout)["completed"] == 5
    assert "shortest-first" in command("policies", "--plugin", str(SCHEDULER)).stdout.partition("schedulers")[2]
    study = ("prefix-cache", "assistant", "--requests", "8", "--blocks", "64", "-e", "used-twice", "--json")
    rows = json.loads(command(*study, "--plugin", str(EVICTION)).stdout)["runs"]
    assert [row["eviction"] for row in rows] == ["used-twice"]
    done = command("run", "chat", "--scheduler", "shortest")
    assert done.returncode == 2
    assert (
        "server.scheduler: no scheduler called 'shortest'; did you mean 'shortest-first'? There are llama-"
        in done.stderr
    )


def test_packages_register_them(monkeypatch):
    namespace = {}
    exec(SCHEDULER.read_text(encoding="utf-8"), namespace)
    points = [
        FakeEntryPoint("mine", namespace["ShortestFirst"]),
        FakeEntryPoint("vllm", namespace["ShortestFirst"]),
        FakeEntryPoint("number", 3),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "kvsim.schedulers" else [])
    with pytest.warns(PluginWarning) as warned:
        assert SCHEDULERS.names()[-1] == "mine"
    assert "there is a scheduler called 'vllm' already" in str(warned[1].message)
    assert "a class or another callable is expected, got 3" in str(warned[0].message)
    scenario = kvsim.load_scenario("chat", workload__requests=5, server__scheduler="mine")
    assert kvsim.run(scenario, "paged").summary["completed"] == 5


def test_an_order_of_eviction_changes_what_is_found():
    load_plugin(EVICTION)
    keys = {"workload__sessions": 20, "cache__cells": 2048}
    own, lru = (
        kvsim.run(kvsim.load_scenario("assistant", cache__eviction=name, **keys), "paged").summary
        for name in ("used-twice", "lru")
    )
    assert own["completed"] == lru["completed"]
    assert own["prefix"] != lru["prefix"]


def test_a_fault_in_a_scheduler_is_named_in_a_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(SCHEDULER.read_text(encoding="utf-8").replace("room -= n", "room -= n / 0"))
    load_plugin(file)
    with pytest.raises(UserError, match=r"broken\.py:\d+: ZeroDivisionError"):
        kvsim.run(kvsim.load_scenario("chat", workload__requests=5, server__scheduler="shortest-first"), "paged")


def test_a_scheduler_that_composes_nothing_ends_the_run(tmp_path):
    file = tmp_path / "lazy.py"
    file.write_text(SCHEDULER.read_text(encoding="utf-8").replace("while self.waiting and", "while False and"))
    load_plugin(file)
    with pytest.raises(UserError, match="the scheduler composes no step"):
        kvsim.run(kvsim.load_scenario("chat", workload__requests=5, server__scheduler="shortest-first"), "paged")


def test_a_method_of_an_earlier_version_is_refused_with_its_name_now(tmp_path):
    file = tmp_path / "early.py"
    file.write_text(SCHEDULER.read_text(encoding="utf-8").replace("on_out_of_cells", "no_slot"))
    load_plugin(file)
    with pytest.raises(PluginError, match="'shortest-first': the method no_slot is called on_out_of_cells now"):
        SCHEDULERS.names()


def test_two_files_may_not_have_the_same_name(tmp_path):
    load_plugin(SCHEDULER)
    (tmp_path / "again.py").write_text(SCHEDULER.read_text(encoding="utf-8"))
    load_plugin(tmp_path / "again.py")
    with pytest.raises(PluginError, match="there is a scheduler called 'shortest-first' already"):
        SCHEDULERS.names()


def test_stored_runs_depend_on_their_code(tmp_path):
    def parts(name, text, **keys):
        (tmp_path / name).write_text(text)
        load_plugin(tmp_path / name)
        return scenario_parts(kvsim.load_scenario("chat", **keys))

    scheduler, eviction = SCHEDULER.read_text(encoding="utf-8"), EVICTION.read_text(encoding="utf-8")
    for name, text, keys in (
        ("a.py", scheduler, {"server__scheduler": "shortest-first"}),
        ("b.py", eviction, {"cache__eviction": "used-twice"}),
    ):
        before = parts(name, text, **keys)
        assert parts(name, text, **keys) == before
        assert parts(name, text + "\n# Changed.\n", **keys) != before
    assert EVICTION_ORDERS.origin("lru") is None
