"""Sweeps of callables, and what tells the code of one policy from that of another."""

import importlib
import json
import sys
from contextlib import closing
from functools import partial

import pytest

import kvsim
from kvsim import UserError, sweep
from kvsim.experiments.policy_code import describe_code
from kvsim.experiments.store import Store
from policies import plugins
from policies.compaction.compactors import pack
from policies.layouts.sequence_regions import GrowingPolicy
from policies.layouts.unified import UnifiedPolicy

SMALL = {
    "name": "small",
    "base": {"workload": {"requests": 30, "rate": 50.0}, "server": {"slots": 4}},
    "axes": {"cache.cells": [1024, 2048]},
}


class Mine(UnifiedPolicy):
    """A policy of one's own."""

    def __init__(self, config, name="mine", **options):
        super().__init__(name, config, **options)


def executed(path):
    with closing(Store(path)) as store:
        return len(store.timings())


@pytest.mark.slow
def test_a_sweep_takes_callables_in_this_process_and_in_others(tmp_path):
    packing = partial(Mine, name="packing", compactor=pack)
    given = ["paged", Mine, packing, lambda config: GrowingPolicy("local", config)]
    here = sweep(SMALL, policies=given, out=tmp_path / "a.sqlite", workers=1)
    there = sweep(SMALL | {"policies": given}, out=tmp_path / "b.sqlite", workers=2)
    assert here.plan.policies == ["paged", "mine", "packing", "local"]
    assert [row.digest for row in here.rows] == [row.digest for row in there.rows]
    assert [(row.status, row.measures) for row in here.rows] == [(row.status, row.measures) for row in there.rows]
    assert {row.status for row in here.rows} == {"done"}
    compared = kvsim.compare(kvsim.load_scenario(SMALL["base"], cache__cells=1024), ["paged", Mine], snapshots=False)
    of_mine = next(row for row in here.rows if (row.policy, row.number) == ("mine", 0))
    assert json.loads(of_mine.summary)["e2e_s"] == compared.results[1].summary["e2e_s"]


@pytest.mark.slow
def test_a_sweep_of_callables_goes_on_where_it_was(tmp_path):
    path, few = tmp_path / "a.sqlite", SMALL | {"axes": {}}

    def run(policy):
        assert sweep(few, policies=[policy], out=path, workers=1).failures.empty
        return executed(path)

    def of_size(cells):
        return lambda config: Mine(config, keeps_partial=cells > 1)

    assert [run(of_size(1)), run(of_size(1)), run(of_size(2))] == [1, 1, 2]
    assert run(partial(Mine, name="mine")) == 3
    assert run("contiguous") == 4


def test_a_callable_must_name_a_policy_of_its_own(tmp_path):
    clash = "policies: a callable names its policy 'paged', the name of another policy"
    with pytest.raises(UserError, match=clash):
        sweep(SMALL, policies=[partial(Mine, name="paged")], out=tmp_path / "a.sqlite")
    with pytest.raises(UserError, match="'mine', the name of another policy"):
        sweep(SMALL, policies=[Mine, partial(Mine)], out=tmp_path / "a.sqlite")


# Descriptions


def test_built_in_policies_have_no_code_of_their_own():
    assert describe_code("paged") is None


@pytest.mark.slow
def test_what_a_callable_holds_is_part_of_its_code():
    def holding(value):
        return describe_code(lambda config: value)

    alike = [(1, 1), ("a", "a"), ([1, {"b": 2}], [1, {"b": 2}]), ({1, 2}, {2, 1}), (Mine, Mine)]
    assert all(holding(a) == holding(b) for a, b in alike)
    values = [1, 2, "1", None, [1], [2], {"a": 1}, {"a": 2}, Mine, GrowingPolicy, partial(Mine, name="a"), ...]
    assert len({str(holding(value)) for value in values}) == len(values)


@pytest.mark.slow
def test_an_object_is_described_by_its_attributes():
    class Thing:
        def __init__(self, size):
            self.size, self.itself = size, self

        def build(self, config):
            return Mine(config)

    assert describe_code(Thing(1).build) == describe_code(Thing(1).build) != describe_code(Thing(2).build)
    with pytest.raises(UserError, match="whether that has changed cannot be told; put the policy into a file"):
        describe_code(partial(Mine, iter([1])))


@pytest.mark.slow
@pytest.mark.parametrize("body", ["return Mine(config, keeps_partial={})", "return built(config, {})"])
def test_what_has_no_file_is_described_by_its_code(body):
    """As in a notebook: a function that uses others by name."""

    def described(value, helper="Mine(config)"):
        names = {"__name__": "a_notebook", "Mine": Mine}
        text = f"def built(config, value):\n    return {helper}\ndef make(config):\n    {body.format(value)}\n"
        exec(compile(text, "<cell>", "exec"), names)
        return describe_code(names["make"])

    assert described(True) == described(True) != described(False)
    assert (described(True) != described(True, "Mine(config, name='b')")) == ("built" in body)


def test_a_class_without_a_file_is_described_by_its_methods():
    def described(value):
        names = {"__name__": "a_notebook", "Mine": Mine}
        text = f"class Own(Mine):\n    least = 1\n    @property\n    def size(self):\n        return {value}\n"
        exec(text, names)
        return describe_code(names["Own"])

    assert described(1) == described(1) != described(2)


@pytest.mark.parametrize("changed", ["own_code_a/inner/part.py", "own_code_a/__init__.py", "own_code_a/table.txt"])
def test_the_whole_package_of_a_callable_is_part_of_its_code(changed, tmp_path, monkeypatch):
    folder = tmp_path / "own_code_a"
    (folder / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/part.py", "table.txt"):
        (folder / name).write_text("")
    (folder / "made.py").write_text("class Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("own_code_a")]:
        monkeypatch.delitem(sys.modules, name)
    own = importlib.import_module("own_code_a.made").Own
    before = describe_code(own)
    assert describe_code(own) == before
    (tmp_path / changed).write_text("x = 1\n")
    assert describe_code(own) != before


def test_the_modules_beside_a_file_are_part_of_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("beside_b", "import beside_c\n"), ("beside_c", ""), ("beside_d", "")):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "mine.py").write_text("import beside_b\nPOLICIES = {'mine': print}\n")
    codes = []
    for name, text in (("beside_d", "x = 1\n"), ("beside_c", "x = 1\n"), ("beside_b", "import beside_c, beside_d\n")):
        plugins.load_plugin(tmp_path / "mine.py")
        codes.append(describe_code("mine"))
        (tmp_path / f"{name}.py").write_text(text)
    plugins.load_plugin(tmp_path / "mine.py")
    codes.append(describe_code("mine"))
    assert codes[0] == codes[1], "a module that nothing imports"
    assert codes[1] != codes[2] != codes[3]
