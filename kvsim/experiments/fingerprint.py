"""What a run's result depends on, as digests: the code, and all that its scenario says and reads."""

from __future__ import annotations

import hashlib
import inspect
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kvsim import __version__
from kvsim.costs.shipped import is_shipped
from kvsim.scenario.scenario import Scenario
from policies import Preset, available

PACKAGES = ("kvsim", "policies", "workloads")
"""Whose sources a simulated result depends on."""


@cache
def code_version() -> str:
    """The version of kvsim and a digest of its sources, as they were when this process first asked."""
    found = hashlib.blake2b(digest_size=8)
    for package in PACKAGES:
        home = Path(str(resources.files(package)))
        for path in sorted(home.rglob("*.py")):
            found.update(f"{package}/{path.relative_to(home).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return f"{__version__}+{found.hexdigest()}"


def digest_of(*parts: Any) -> str:
    """Of anything that JSON can say."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def scenario_parts(scenario: Scenario) -> list[Any]:
    """All that a run of the scenario depends on but our code: its keys, and what the files hold that it names."""
    table = scenario.model_dump(mode="json")
    _read_paths(table["workload"], scenario.folder)
    profile = table["machine"]["profile"]
    if is_shipped(profile):
        shipped = resources.files("kvsim.costs") / "profiles" / f"{profile}.json"
        table["machine"]["profile"] = [profile, hashlib.blake2b(shipped.read_bytes()).hexdigest()]
    else:
        table["machine"]["profile"] = _contents(str(scenario.folder / Path(profile).expanduser()))
    if table["model"]["name"].endswith(".gguf"):
        table["model"]["name"] = _contents(table["model"]["name"])
    return [table, _plugged_in(scenario.cache.policy)]


def _read_paths(table: Any, folder: Path) -> None:
    """In place of every path in a workload, at any depth: a digest of what is there."""
    if isinstance(table, list):
        for each in table:
            _read_paths(each, folder)
    elif isinstance(table, dict):
        for key, value in table.items():
            if key == "path" and isinstance(value, str):
                table[key] = _contents(str(folder / Path(value)))
            else:
                _read_paths(value, folder)


@cache
def _contents(path: str) -> str:
    """Of a file; of one that cannot be read its name, for the run will say so."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except (OSError, ValueError):
        return f"unread: {path}"


@cache
def _plugged_in(policy: str) -> str:
    """A digest of the module that a plugged-in policy comes from; empty for our own."""
    factory = available()[policy]
    build = factory.build if isinstance(factory, Preset) else factory
    module = inspect.getmodule(build)
    source = getattr(module, "__file__", None)
    if module is None or source is None or module.__name__.split(".")[0] in PACKAGES:
        return ""
    return _contents(source)
