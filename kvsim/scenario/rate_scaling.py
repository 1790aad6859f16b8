"""More or less of a workload: the same requests, closer together or farther apart."""

from __future__ import annotations

from typing import Any

from kvsim.errors import UserError

_WITH_TIME = {"rate": 1, "rates": 1, "rate_scale": 1, "dwell_s": -1, "period_s": -1, "phase_s": -1}
"""Keys that change with the load, and to which power."""
_SESSIONS = ("sessions", "agents", "weka")
"""Kinds whose users think as long as ever: only more of them come."""


def scale_rate(workload: dict[str, Any], factor: float) -> dict[str, Any]:
    """A ``[workload]`` table with ``factor`` times the arrivals a second. Raises ``UserError``.

    All times of the arrivals shrink alike, so that they stay as bursty as they are. In a closed loop there are more
    users, at least one.
    """
    kind = workload.get("kind", "poisson")
    if kind == "batch":
        raise UserError("workload.kind: batch: everything arrives at once; it has no load that could be changed")
    if kind == "mix":
        return {**workload, "parts": [scale_rate(part, factor) for part in workload["parts"]]}
    if kind == "closed-loop":
        return {**workload, "users": max(1, round(workload["users"] * factor))}
    if kind in _SESSIONS:
        return {**workload, "rate": workload["rate"] * factor}
    if kind == "renewal" and workload.get("rate") is None:
        return {**workload, "quantiles": _scaled(workload["quantiles"], 1 / factor)}
    changed = {key: _scaled(workload[key], factor**power) for key, power in _WITH_TIME.items() if workload.get(key)}
    return {**workload, **changed}


def mean_rate(workload: dict[str, Any]) -> float:
    """Requests/s in the long run, of a table of one kind of arrivals that has a rate."""
    if "rates" in workload:
        # Each state comes as often as any other: the next one is any of them, all as likely.
        pairs = list(zip(workload["rates"], workload["dwell_s"], strict=True))
        return float(sum(rate * stay for rate, stay in pairs) / sum(stay for _, stay in pairs))
    return float(workload["rate"])


def _scaled(value: float | list[float] | tuple[float, ...], factor: float) -> Any:
    return [v * factor for v in value] if isinstance(value, list | tuple) else value * factor
