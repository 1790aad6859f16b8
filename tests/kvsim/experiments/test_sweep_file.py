"""The points that a sweep file lays out, and the messages about invalid files."""

import json

import pytest

from kvsim import UserError, builtin_sweeps
from kvsim.experiments.sweep_file import MOST_RUNS, plan_sweep

CELLS = {"from": 512, "to": 4096, "scale": "log"}
RATE = {"from": 2, "to": 8}


def laid_out(**keys):
    return plan_sweep({"scenario": "chat", **keys})


def settings(planned):
    return [point.settings for point in planned.points]


def test_a_grid_is_every_combination_under_every_policy():
    axes = {"cache.cells": [1024, 2048], "workload.rate": {"from": 4.0, "to": 8.0, "steps": 3}}
    planned = laid_out(policies=["paged", "ring"], axes=axes)
    assert len(planned.points) == 12
    assert [point.number for point in planned.points] == [n for n in range(6) for _ in range(2)]
    assert settings(planned)[2] == {"cache.cells": 1024, "workload.rate": 6.0}
    assert planned.points[11].scenario.cache.policy == planned.points[11].policy == "ring"
    assert planned.points[11].scenario.workload.rate == 8.0


def test_a_logarithmic_axis_of_whole_numbers():
    planned = laid_out(axes={"cache.cells": {**CELLS, "steps": 4}})
    assert [each["cache.cells"] for each in settings(planned)] == [512, 1024, 2048, 4096]


def test_values_that_round_to_the_same_number_are_run_once():
    planned = laid_out(axes={"server.slots": {"from": 1, "to": 3, "steps": 9}})
    assert [each["server.slots"] for each in settings(planned)] == [1, 2, 3]


def test_a_key_without_a_default_is_whole_if_its_ends_are():
    base = {"workload": {"requests": 5}}
    (_, middle, _) = settings(
        plan_sweep({"base": base, "axes": {"server.slot_context": {"from": 5, "to": 10, "steps": 3}}})
    )
    assert middle["server.slot_context"] in (7, 8)


@pytest.mark.parametrize("design", ["latin-hypercube", "sobol"])
def test_drawn_designs_fill_their_axes(design):
    axes = {"cache.cells": CELLS, "workload.rate": RATE, "server.n_batch": [128, 256]}
    planned = laid_out(design=design, points=21, axes=axes, policies=["paged", "ring"])
    assert len(planned.points) == 42
    each = settings(planned)[::2]
    assert all(512 <= row["cache.cells"] <= 4096 and 2 <= row["workload.rate"] <= 8 for row in each)
    assert isinstance(each[0]["cache.cells"], int)
    assert {row["server.n_batch"] for row in each} == {128, 256}
    # Even spread: half of the points lie in each half of an axis, plus or minus a few.
    assert 8 <= sum(row["workload.rate"] < 5 for row in each) <= 13
    assert settings(laid_out(design=design, points=21, axes=axes)) == each
    assert settings(plan_sweep({"scenario": "chat", "design": design, "points": 21, "axes": axes}, seed=2)) != each


def test_replications_have_the_same_seeds_everywhere():
    planned = plan_sweep({"scenario": "chat", "axes": {"cache.cells": [1024, 2048]}, "replications": 3}, seed=10)
    assert [[point.replication(r).seed for r in range(3)] for point in planned.points] == [[10, 11, 12]] * 2


def test_all_policies_or_the_scenarios_own():
    assert "oracle" in laid_out(policies="all").policies
    assert laid_out().policies == ["contiguous"]
    assert laid_out(axes={"cache.policy": ["paged", "ring"]}).policies == ["paged", "ring"]


def test_an_invalid_combination_is_a_point_with_a_fault():
    planned = laid_out(axes={"cache.cells": [256, 2048]})
    assert planned.points[0].scenario is None
    assert planned.points[0].fault.endswith("server.slot_context (512) exceeds cache.cells (256)")
    assert planned.points[1].fault == ""


def test_a_key_of_only_one_kind_of_workload():
    axes = {"workload.kind": ["poisson", "gamma"], "workload.cv": [1.0, 2.0]}
    assert [bool(point.fault) for point in laid_out(axes=axes).points] == [True, True, False, False]


def test_paths_are_relative_to_their_file(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n")
    (tmp_path / "inner" / "traced.toml").write_text('[workload]\nkind = "azure"\npath = "trace.csv"\n')
    (tmp_path / "sweep.toml").write_text('scenario = "inner/traced.toml"\n')
    planned = plan_sweep(tmp_path / "sweep.toml")
    assert planned.name == "sweep"
    assert planned.points[0].scenario.build_workload().n_requests == 1


def test_shipped_sweeps_can_be_planned():
    assert builtin_sweeps()
    for name in builtin_sweeps():
        planned = plan_sweep(name)
        assert planned.name == name
        assert not any(point.fault for point in planned.points)
        json.dumps(planned.to_dict())


MISTAKES = {
    "misspelt key": ({"axs": {}}, "sweep: axs: unknown key; did you mean 'axes'?"),
    "misspelt axis": ({"axes": {"cache.cels": [64]}}, "sweep: axes: cache.cels: unknown key; did you mean 'cells'?"),
    "misspelt section": ({"axes": {"cash.cells": [64]}}, "cash.cells: unknown section; did you mean 'cache.cells'?"),
    "unquoted": ({"axes": {"cache": {"cells": [64]}}}, 'sweep: axes: quote the key: "cache.cells"'),
    "unquoted range": ({"axes": {"cache": {"cells": CELLS}}}, 'sweep: axes: quote the key: "cache.cells"'),
    "huge": (
        {"axes": {f"workload.a{i}": list(range(10)) for i in range(11)}},
        "sweep: 100,000,000,000 runs; at most 100,000 are accepted",
    ),
    "misspelt step": (
        {"axes": {"cache.cells": {"from": 1, "to": 2, "step": 3}}},
        "step: unknown key; did you mean 'st",
    ),
    "no key of a table": (
        {"axes": {"server.slots.x": [1]}},
        "sweep: axes: server.slots: not a table, so it has no key",
    ),
    "a value that no cache has": ({"axes": {"cache.cells": [1, 2048]}}, "axes: cache.cells: input should be greater"),
    "a word for a number": ({"axes": {"cache.cells": ["many"]}}, "axes: cache.cells: input should be a valid integer"),
    "no list": ({"axes": {"cache.cells": 64}}, "sweep: axes.cache.cells: accepted: a list of numbers, words, "),
    "a list of lists": ({"axes": {"cache.cells": [[64]]}}, "sweep: axes.cache.cells: accepted: a list of numbers"),
    "no values": ({"axes": {"cache.cells": []}}, "sweep: axes.cache.cells: accepted: a list of numbers, words, "),
    "not a number": ({"axes": {"workload.rate": [float("nan")]}}, "axes.workload.rate: accepted: a list of numbers"),
    "falling": ({"axes": {"cache.cells": {"from": 5, "to": 3}}}, "axes.cache.cells: from (5) must lie below to (3)"),
    "log of 0": ({"axes": {"workload.rate": {"from": 0, "to": 3, "scale": "log"}}}, 'scale = "log" begins above 0'),
    "a grid without steps": ({"axes": {"cache.cells": CELLS}}, "sweep: axes.cache.cells: a grid needs steps"),
    "a grid with points": ({"points": 4}, "sweep: points: a grid has as many as its axes make; give design"),
    "how many": (
        {"design": "sobol", "axes": {"cache.cells": CELLS}},
        'points: design = "sobol" needs to know how many',
    ),
    "of nothing": ({"design": "sobol", "points": 4}, 'sweep: axes: design = "sobol" needs at least one'),
    "unknown design": ({"design": "random"}, "sweep: design: input should be 'grid', 'latin-hypercube' or 'sobol'"),
    "unknown policy": ({"policies": ["paged", "magic"]}, "policies: no policy called 'magic'; there are contiguous"),
    "unknown policy of an axis": (
        {"axes": {"cache.policy": ["magic"]}},
        "axes: cache.policy: no policy called 'magic'",
    ),
    "policies twice": (
        {"policies": "all", "axes": {"cache.policy": ["paged"]}},
        "policies and the axis cache.policy say",
    ),
    "one policy": ({"policies": "paged"}, "sweep: policies: accepted: a list of policies or \"all\", got 'paged'"),
    "seeds": (
        {"axes": {"seed": [1, 2]}},
        "sweep: the axis seed: give replications instead; each has a seed of its own",
    ),
    "no replications": ({"replications": 0}, "sweep: replications: input should be greater than or equal to 1, got 0"),
    "unknown rule": ({"warmup": "mser"}, 'sweep: warmup: accepted: "mser-5", "none" or a number of requests, got'),
    "unknown measure": (
        {"stop": {"measure": "ttft_p96", "within": 0.1}},
        "stop.measure: no measure called 'ttft_p96'; did you mean 'ttft_p",
    ),
    "no precision": ({"stop": {"measure": "ttft_p95"}}, "sweep: stop.within: field required"),
    "fewer than wanted": (
        {"replications": 9, "stop": {"measure": "ttft_p95", "within": 0.1, "most": 5}},
        "sweep: stop.most (5) is less than replications (9)",
    ),
    "missing scenario": (
        {"scenario": "nope"},
        "sweep: scenario: nope: no such file, and not a built-in scenario; there are agent",
    ),
    "two scenarios": ({"base": {}}, "sweep: a sweep needs either scenario, a name or a file, or a table [base]"),
    "misspelt base": (
        {"scenario": None, "base": {"workload": {"raet": 1}}},
        "workload.raet: unknown key; did you mean",
    ),
    "too many": ({"replications": 9999, "axes": {"seed ": list(range(99))}}, f"at most {MOST_RUNS:,} are accepted"),
    "name of a folder": ({"name": "../x"}, "../x: name: '../x' cannot name a folder; "),
}


@pytest.mark.parametrize(("keys", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(keys, answer):
    with pytest.raises(UserError) as caught:
        laid_out(**keys)
    (line,) = str(caught.value).splitlines()
    assert answer in line


@pytest.mark.parametrize("requests", [0, 999_999_999_999_999_999_999])
def test_the_number_of_requests_is_bounded(requests):
    with pytest.raises(UserError, match="a whole number from 1 to 1,000,000,000 is accepted"):
        plan_sweep({"scenario": "chat"}, requests=requests)


def test_seeds_must_fit():
    with pytest.raises(UserError, match="leaves no room for further replications' seeds"):
        plan_sweep({"scenario": "chat", "replications": 2}, seed=2**63 - 1)
