"""Named workloads: generators fitted to public traces, as ``[workload]`` sections that ship with the package,
and what scales their arrival rate."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from functools import cache
from importlib import resources
from typing import Any

from kvsim.errors import UserError, no_such

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


_WITH_TIME = {"rate": 1, "rates": 1, "rate_scale": 1, "dwell_s": -1, "period_s": -1, "phase_s": -1}
"""Keys that change with the rate, and the power of the factor by which they do."""
_SESSIONS = ("sessions", "agents", "weka")
"""Kinds in which only the rate of new sessions changes; think times stay."""


def scale_rate(workload: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a ``[workload]`` table with ``factor`` times the arrival rate. Raises ``UserError`` for kind ``batch``.

    All times of the arrival process scale alike, so that burstiness does not change. In a closed loop the number of
    users scales, and is at least one.
    """
    kind = workload.get("kind", "poisson")
    if kind == "batch":
        raise UserError("workload.kind: batch: everything arrives at once; there is no load to change")
    if kind == "mix":
        return {**workload, "parts": [scale_rate(part, factor) for part in workload["parts"]]}
    if kind in ("closed-loop", "users"):
        return {**workload, "users": max(1, round(workload["users"] * factor))}
    if kind in _SESSIONS:
        return {**workload, "rate": workload["rate"] * factor}
    if kind == "renewal" and workload.get("rate") is None:
        return {**workload, "quantiles": _scaled(workload["quantiles"], 1 / factor)}
    changed = {key: _scaled(workload[key], factor**power) for key, power in _WITH_TIME.items() if workload.get(key)}
    return {**workload, **changed}


def mean_rate(workload: dict[str, Any]) -> float:
    """Mean requests/s of a ``[workload]`` table that has ``rate`` or ``rates``."""
    if "rates" in workload:
        # All states are visited equally often, so that each weighs as much as its mean stay.
        pairs = list(zip(workload["rates"], workload["dwell_s"], strict=True))
        return float(sum(rate * stay for rate, stay in pairs) / sum(stay for _, stay in pairs))
    return float(workload["rate"])


def _scaled(value: float | list[float] | tuple[float, ...], factor: float) -> Any:
    return [v * factor for v in value] if isinstance(value, list | tuple) else value * factor
