"""Digests of everything that a run's result depends on: the code, the scenario, and the files it names."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kvsim import __version__
from kvsim.costs.load_profile import load_profile
from kvsim.costs.served import ADAPTED, ESTIMATE
from kvsim.costs.shipped import is_shipped, shipped_text
from kvsim.experiments.policy_code import describe_code
from kvsim.scenario.scenario import Scenario
from kvsim.scenario.server_defaults import SCHEDULERS
from policies.paging.eviction import EVICTION_ORDERS

PACKAGES = ("kvsim", "policies", "workloads")
"""The packages whose sources affect a simulated result."""


@cache
def code_version() -> str:
    """Return the version of kvsim and a digest of its sources, read once per process."""
    digest = hashlib.blake2b(digest_size=8)
    for package in PACKAGES:
        root = Path(str(resources.files(package)))
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can express."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def scenario_parts(scenario: Scenario, policy_code: Any = None) -> list[Any]:
    """Return what a run depends on besides our code.

    These are the scenario's keys, digests of the files and plug-ins that it names, and what ``describe_code`` says of
    its policy; ``policy_code`` says that of a callable which builds the policy.
    """
    table = scenario.model_dump(mode="json")
    _replace_paths(table["workload"], scenario.folder)
    profile = table["machine"]["profile"]
    if is_shipped(profile):
        table["machine"]["profile"] = [profile, _text_digest(shipped_text(profile))]
    elif profile.startswith(ESTIMATE) or ADAPTED.fullmatch(profile):
        made = load_profile(profile, scenario.folder)
        table["machine"]["profile"] = [profile, _text_digest(made.model_dump_json())]
    else:
        table["machine"]["profile"] = _file_digest(str(scenario.folder / Path(profile).expanduser()))
    if table["model"]["name"].endswith(".gguf"):
        table["model"]["name"] = _file_digest(table["model"]["name"])
    for registry, section, key in ((SCHEDULERS, "server", "scheduler"), (EVICTION_ORDERS, "cache", "eviction")):
        origin = registry.origin(table[section][key])
        if origin is not None:
            table[section][key] = [table[section][key], origin.version, origin.digest]
    return [table, describe_code(scenario.cache.policy) if policy_code is None else policy_code]


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()


def _replace_paths(table: Any, folder: Path) -> None:
    """Replace every path in a workload, at any depth, by a digest of the file."""
    if isinstance(table, list):
        for item in table:
            _replace_paths(item, folder)
    elif isinstance(table, dict):
        for key, value in table.items():
            if key == "path" and isinstance(value, str):
                table[key] = _file_digest(str(folder / Path(value)))
            else:
                _replace_paths(value, folder)


@cache
def _file_digest(path: str) -> str:
    """Digest of a file's contents; a note with its path if it cannot be read, since the run will report that."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except (OSError, ValueError):
        return f"unread: {path}"
