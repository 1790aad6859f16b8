"""Named workloads: generators fitted to public traces, as ``[workload]`` sections that ship with the package."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from functools import cache
from importlib import resources
from typing import Any

from kvsim.errors import UserError, no_such
from kvsim.scenario.rate_scaling import mean_rate, scale_rate

_FOLDER = resources.files("kvsim.scenario") / "named"

NAMED: tuple[str, ...] = tuple(
    sorted(p.name.removesuffix(".toml") for p in _FOLDER.iterdir() if p.name.endswith(".toml"))
)
"""Names of the workloads that ship with the package."""


def named_text(name: str) -> str:
    """The section of a named workload as TOML, with a comment on its source. Raises ``UserError``."""
    if name not in NAMED:
        raise UserError(no_such("workload", name, NAMED))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def named_source(name: str) -> str:
    """Source and licence of a named workload: the first sentence of its comment. Raises ``UserError``."""
    comment = " ".join(line.lstrip("# ") for line in named_text(name).splitlines() if line.startswith("#"))
    return comment.partition(" Fitted to ")[0]


@cache
def _read(name: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(named_text(name))["workload"]
    return table


def named_section(name: str, requests: int | None = None, rate: float | None = None) -> dict[str, Any]:
    """The section of a named workload as a table. Raises ``UserError``.

    ``requests``: number of requests (or sessions); ``rate``: their mean rate per second, to which all times are
    scaled, so that burstiness does not change.
    """
    section = deepcopy(_read(name))
    if requests is not None:
        section["sessions" if "sessions" in section else "requests"] = requests
    return section if rate is None else scale_rate(section, rate / mean_rate(section))
