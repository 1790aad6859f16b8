"""The compiled core: that it gives the figures of Python's own files, and is passed over where these have changed."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from policies import compiled
from tests.paths import ROOT
from tests.worlds import printed


def listed(name):
    """A list of modules in setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


MODULES = listed("COMPILED")
SOURCES = [f"{name.replace('.', '/')}.py" for name in (*MODULES, *listed("TYPED"))]


def test_every_module_that_is_compiled_exists():
    assert all((ROOT / path).is_file() for path in SOURCES)
    assert len(set(SOURCES)) == len(SOURCES)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two sources, and the stamp that a build leaves."""
    monkeypatch.delenv(compiled.PURE, raising=False)
    (tmp_path / "policies").mkdir()
    for name in ("content", "vocabulary"):
        (tmp_path / "policies" / f"{name}.py").write_text(name)
    stamp = compiled.stamp_of(["policies/content.py", "policies/vocabulary.py"], tmp_path)
    (tmp_path / compiled.STAMP).write_text(stamp)
    return tmp_path


def test_compiled_modules_are_used_as_long_as_no_source_has_changed(checkout):
    assert compiled.state(checkout) == compiled.COMPILED


@pytest.mark.parametrize("name", ["content", "vocabulary"])
def test_a_source_that_changes_has_all_of_them_passed_over_until_it_is_as_it_was(checkout, name):
    source = checkout / "policies" / f"{name}.py"
    source.write_text("changed")
    assert compiled.state(checkout) == "compiled, but a source has changed since (make core)"
    source.write_text(name)
    assert compiled.state(checkout) == compiled.COMPILED
    source.unlink()
    assert compiled.state(checkout) != compiled.COMPILED


def test_a_build_that_did_not_end_is_not_used(checkout):
    (checkout / compiled.STAMP).write_text("")
    assert compiled.state(checkout) != compiled.COMPILED


def test_it_can_be_switched_off(checkout, monkeypatch):
    monkeypatch.setenv(compiled.PURE, "1")
    assert compiled.state(checkout) == f"compiled, but {compiled.PURE} is set"


def test_without_a_stamp_nothing_is_compiled(checkout):
    (checkout / compiled.STAMP).unlink()
    assert compiled.state(checkout) == "not compiled"


def test_python_files_are_found_beside_compiled_ones(tmp_path):
    for name in ("beside.py", f"beside{EXTENSION_SUFFIXES[0]}", f"alone{EXTENSION_SUFFIXES[0]}"):
        (tmp_path / name).touch()
    find = compiled.PythonFiles.find_spec
    assert find("kvsim.costs.beside", [str(tmp_path)]).origin == str(tmp_path / "beside.py")
    assert find("kvsim.costs.alone", [str(tmp_path)]) is None
    assert find("other.beside", [str(tmp_path)]) is None
    assert find("beside", None) is None


SWAP = {"server__order": "priority", "server__preemption": "swap", "cache__host_cells": 512, "cache__cells": 1024}
RUNS = [
    *[
        ("chat", "vllm", policy, {})
        for policy in ("paged", "paged-window", "chunked", "growing", "ring", "hf-reserved", "oracle", "contiguous")
    ],
    *[("assistant", "vllm", policy, {}) for policy in ("vllm", "llama.cpp-b6975", "streams", "prompt-decode-regions")],
    *[
        ("chat", "vllm", "vllm", {"cache__cells": 1024, "cache__eviction": order})
        for order in ("sieve", "lfu", "belady")
    ],
    ("assistant", "vllm", "vllm", {"server__async_scheduling": True}),
    ("chat", "vllm", "vllm", SWAP),
    ("assistant", "llama-server", "llama.cpp-b6975", {"server__cache_ram": 8}),
    ("assistant", "llama-server", "streams", {"server__cache_reuse": 16}),
    ("assistant", "llama-server-fair", "llama.cpp-b6975", {}),
    ("chat", "llama-server-b4875", "llama.cpp-b4666", {}),
    ("chat", "static", "paged", {}),
]
"""Scenarios, schedulers, policies, and further keys."""


def figures():
    """Every figure and a hash of every table of each run, with what is kept at the least and at the most."""
    import kvsim
    from kvsim.simulation.run_tables import Table

    told = []
    for name, scheduler, policy, keys in RUNS:
        least = {"workload__sessions": 4} if name == "assistant" else {"workload__requests": 20}
        world = kvsim.load_scenario(name, server__scheduler=scheduler, **least, **keys)
        for detail in ("requests", "tables"):
            result = kvsim.run(world, policy, detail=detail)
            kept = () if result.tables is None else result.tables
            tables = [each.to_csv() for each in kept if isinstance(each, Table)]
            hashes = [hashlib.blake2b(table.encode()).hexdigest() for table in tables]
            told.append([name, scheduler, policy, keys, detail, {**result.summary, "wall_s": None}, hashes])
    return told


USED = compiled.STATE == compiled.COMPILED
"""Whether these tests run on compiled modules."""


@pytest.mark.skipif(not USED, reason=f"the core is {compiled.STATE}")
@pytest.mark.parametrize(("switch", "suffix"), [("", EXTENSION_SUFFIXES[0]), ("1", ".py")])
@pytest.mark.parametrize("first", ["kvsim.simulation.job", "policies.content"])
def test_what_is_imported_is_what_is_said(first, switch, suffix):
    """With whichever of the packages one begins."""
    told = printed(f"import {first} as module; print(module.__file__)", **{compiled.PURE: switch})
    assert told.strip().endswith(suffix)


@pytest.mark.slow
@pytest.mark.skipif(not USED, reason=f"the core is {compiled.STATE}")
def test_every_figure_is_that_of_pure_python():
    program = "import json; from tests.test_core import figures; print(json.dumps(figures()))"
    told = [json.loads(printed(program, **{compiled.PURE: switch})) for switch in ("", "1")]
    assert len(told[0]) == 2 * len(RUNS)
    for one, other in zip(*told, strict=True):
        assert one == other


def wheel(folder, switch):
    """The name of a wheel that is built of the project, and the files in it."""
    home = folder / "project"
    home.mkdir()
    for name in ("kvsim", "policies", "workloads", "real_engine"):
        shutil.copytree(
            ROOT / name, home / name, ignore=shutil.ignore_patterns("*.so", "*.pyd", "*.sources", "__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, home / name)
    for path in (ROOT / "build" / "core", *(ROOT / "build").glob("temp.*")):  # so that little is left to compile
        if path.is_dir():
            shutil.copytree(path, home / "build" / path.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    env = os.environ | {compiled.PURE: switch}
    subprocess.run([*pip, "--wheel-dir", folder, home], env=env, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return built.name, set(archive.namelist())


@pytest.mark.slow
def test_a_wheel_without_a_compiler_is_pure(tmp_path):
    name, files = wheel(tmp_path, "1")
    assert name.endswith("-py3-none-any.whl")
    assert not any(file.endswith(tuple(EXTENSION_SUFFIXES)) for file in files)
    assert set(SOURCES) <= files
    assert compiled.STAMP not in files


BUILT = any((ROOT / "build").glob("temp.*"))
"""Whether a build is there to go on from; a new one takes half a minute."""


@pytest.mark.slow
@pytest.mark.skipif(not USED, reason=f"the core is {compiled.STATE}")
@pytest.mark.skipif(not BUILT and "KVSIM_WHEEL" not in os.environ, reason="only .ci/run compiles a wheel from nothing")
def test_a_wheel_with_a_compiler_has_every_module_twice(tmp_path):
    name, files = wheel(tmp_path, "")
    assert not name.endswith("-none-any.whl")
    assert {file.removesuffix(".py") + EXTENSION_SUFFIXES[0] for file in SOURCES[: len(MODULES)]} <= files
    assert {*SOURCES, compiled.STAMP} <= files
    # Used in a folder that has nothing else: what is compiled runs, and says so.
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(tmp_path / "used")
    env = {**os.environ, compiled.PURE: "", "PYTHONPATH": str(tmp_path / "used")}
    program = "import kvsim, policies.compiled as c; print(c.STATE, c.__file__, kvsim.run('chat').summary['completed'])"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert printed.split() == [compiled.COMPILED, str(tmp_path / "used" / "policies" / "compiled.py"), "400"]
