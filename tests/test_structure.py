"""Which part of the project may import which: the directions of docs/architecture.md, held file by file."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.paths import ROOT
from tests.worlds import loaded_by

ROOMS = (
    "cli",
    "reports",
    "engines",
    "calibration",
    "advice",
    "experiments",
    "simulation",
    "scenario",
    "costs",
    "model",
)
"""The rooms of ``kvsim``, each importing only those behind it."""
AT_THE_ROOT = {"__init__", "__main__", "errors", "installation", "machine", "results"}
"""Modules of ``kvsim`` in no room: every room may import them, and they import none, but for the two entrances."""
MAY_MEASURE = {"cli", "engines", "calibration", "advice"}
"""Rooms that may import the real engine."""
FLOORS = {
    "policies": (
        "api",
        "plugins",
        "presets",
        "layouts",
        "placement",
        "paging",
        "compaction",
        "cells",
        "placement.rule",
        "",
    ),
    "workloads": ("api", "traces", "fitting", "generators", ""),
}
"""Folders of the other packages, in the same order, and modules in them that are apart; "" are those beside them."""


@cache
def imports_of(path):
    """The modules that a file imports at any depth, type checking apart: pairs of a name and the function it is in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []

    def walk(node, function):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend((name if is_module(name) else node.module, function) for name in names)
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(tree, None)
    return found


@cache
def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def modules(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def draws(function):
    """Whether an import in this function is that of a result which draws itself, the one way up that is allowed."""
    return function is not None and (function == "plot" or function.startswith("plot_") or function == "save")


@pytest.mark.slow
def test_every_room_imports_only_the_rooms_behind_it():
    for name, path in modules("kvsim"):
        room = name.split(".")[1] if "." in name else "__init__"
        assert room in {*ROOMS, *AT_THE_ROOT}, f"{name} is in no room"
        for target, function in imports_of(path):
            top, *rest = target.split(".")
            if top == "real_engine":
                assert room in MAY_MEASURE, f"{name} imports {target}"
            if top != "kvsim" or not rest or rest[0] in AT_THE_ROOT or name == "kvsim.__main__":
                continue
            assert room in ROOMS, f"{name} is outside of the rooms and imports {target}"
            if ROOMS.index(rest[0]) < ROOMS.index(room):
                assert (rest[0], draws(function)) == ("reports", True), f"{name} imports {target}"


def test_the_rooms_of_advice_stand_apart():
    """They share what an engine's options are and do to memory, and nothing else."""
    for name, path in modules("kvsim/advice"):
        room = name.removeprefix("kvsim.advice.").split(".")[0]
        for target, _ in imports_of(path):
            other = target.removeprefix("kvsim.advice.").split(".")[0]
            if target.startswith("kvsim.advice.") and other != room:
                assert other == "memory", f"{name} imports {target}"


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(FLOORS))
def test_folders_import_only_the_folders_behind_them(package):
    floors = FLOORS[package]

    def floor(name):
        _, _, inner = name.partition(".")
        return floors.index(inner if inner in floors else inner.split(".")[0] if inner.split(".")[0] in floors else "")

    for name, path in modules(package):
        if name == package:
            continue
        for target, _ in imports_of(path):
            if target.split(".")[0] == package and target != package:
                assert floor(target) >= floor(name), f"{name} imports {target}"
            assert target != package or name == f"{package}.presets", f"{name} imports the face of its own package"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("policies", {"kvsim", "real_engine", "workloads", "simpy"}),
        ("workloads", {"kvsim", "real_engine", "policies", "simpy"}),
        ("real_engine", {"simpy"}),
    ],
)
def test_a_package_does_not_import_those_above_it(package, forbidden):
    for name, path in modules(package):
        for target, _ in imports_of(path):
            assert target.split(".")[0] not in forbidden, f"{name} imports {target}"


def test_the_engine_imports_only_what_a_model_is_and_errors():
    for name, path in modules("real_engine"):
        for target, _ in imports_of(path):
            if target.startswith("kvsim"):
                assert target.startswith(("kvsim.model", "kvsim.errors", "kvsim.installation")), (
                    f"{name} imports {target}"
                )


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others():
    """But for a result, which imports what draws it as it is drawn."""
    known = {
        name: path for package in ("kvsim", "policies", "workloads", "real_engine") for name, path in modules(package)
    }
    graph = {
        name: {target for target, function in imports_of(path) if target in known and not draws(function)} - {name}
        for name, path in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1]))


def test_circles_are_found():
    """The control."""
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


@pytest.mark.slow
def test_the_simulation_runs_without_the_engine():
    assert "real_engine" not in loaded_by("import kvsim, kvsim.simulation.run")


@pytest.mark.slow
def test_the_engine_runs_without_what_only_the_simulation_needs():
    """Its memory is measured, and those packages would take more of it than the engine."""
    assert not loaded_by("import real_engine.footprint") & {"pandas", "scipy", "pydantic", "simpy"}


def test_no_module_of_the_package_is_named_like_one_of_its_verbs():
    import kvsim

    for name in kvsim.__all__:
        assert not is_module(f"kvsim.{name}")
        assert getattr(kvsim, name).__name__ == name
    assert {*kvsim.__all__} <= {*dir(kvsim)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsim.nothing
