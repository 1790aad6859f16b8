"""From one run to named numbers: what sweeps keep of it, and what replications are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import PositiveFloat

from kvsim.errors import UserError
from kvsim.experiments.estimates import LEVEL, Interval, mser5, over_replications
from kvsim.scenario.section import Section
from kvsim.simulation.result import Result

FloatArray = NDArray[np.float64]

Rule = Literal["mser-5", "none"] | int
"""What counts as warm-up: what MSER-5 says of the end-to-end latencies in order of arrival, nothing, or so many
requests."""

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

MEASURES = (
    *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in ("mean", *STATISTICS)),
    "throughput_tokens_per_s",
    "goodput_requests_per_s",
    "slo_share",
    "failed_share",
    "preemptions",
    "utilization_mean",
    "external_fragmentation_mean",
    "prefix_hit_rate",
    "memory_bytes",
    "cache_bytes",
    "requests",
    "warmup_requests",
    "too_short",
    "unstable",
)
"""Every measure, in order. Latencies in seconds."""

MORE_IS_BETTER = frozenset(
    {"throughput_tokens_per_s", "goodput_requests_per_s", "slo_share", "utilization_mean", "prefix_hit_rate"}
)
"""Of all others, less is."""

SHARES = frozenset({"slo_share", "failed_share", "utilization_mean", "external_fragmentation_mean", "prefix_hit_rate"})
"""Measures that lie between 0 and 1."""

WITHOUT_INTERVAL = frozenset({"cache_bytes", "requests", "warmup_requests", "too_short", "unstable"})
"""Flags, settings, and counts of what was looked at: they estimate nothing."""

Measures = dict[str, float | None]


class Objectives(Section):
    """A service level: what a request's latencies must not exceed, in seconds, for it to count as good."""

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    """Not asked of requests of a single token."""
    e2e_s: PositiveFloat | None = None


@dataclass(frozen=True)
class _Seen:
    """What is left of a run behind its warm-up."""

    requests: pd.DataFrame
    completed: pd.DataFrame
    start_s: float
    """When the first request that counts arrived."""
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def measures(result: Result, warmup: Rule = "mser-5", slo: Objectives | None = None) -> Measures:
    """A run's measures by name (``MEASURES``), None for what cannot be said.

    Requests that arrived during the warm-up do not count, and means over time begin with the first that does. Where no
    tables were kept, ``warmup`` must be ``none``: the figures are then those of the summary. ``memory_bytes`` are those
    of the cells that no other sequence could take, on average; ``cache_bytes`` those of all cells. ``too_short`` and
    ``unstable`` are 1 where the figures say how long the run was (``estimates.mser5``, ``QueueMonitor``).
    Raises ``UserError``.
    """
    if (isinstance(warmup, str) and warmup not in ("mser-5", "none")) or (isinstance(warmup, int) and warmup < 0):
        raise UserError(f"warmup: {warmup!r}; accepted: mser-5, none, or a number of requests")
    cell_bytes = result.scenario.cell_bytes
    found: Measures = dict.fromkeys(MEASURES)
    found["cache_bytes"] = result.scenario.cache.cells * cell_bytes
    found["unstable"] = int(result.summary["queue"]["unstable"])
    if result.tables is None:
        if warmup not in ("none", 0) or slo is not None:
            raise UserError(f'{result.policy}: warm-up and objectives need tables; run with detail="tables"')
        return found | _of_summary(result.summary)
    cut, enough = _warmup(result.requests, warmup)
    seen = _behind(result.requests, cut)
    return (
        found
        | _of_requests(seen)
        | _objectives(seen, slo)
        | _of_cache(result.cache, seen, cell_bytes)
        | {
            "warmup_requests": cut,
            "too_short": int(not enough),
        }
    )


def over_runs(measure: str, values: FloatArray | Sequence[float], level: float = LEVEL) -> Interval:
    """A measure's interval over replications, shape (n,), by ``estimates.over_replications``.

    A t interval knows no bounds, so ends that no value could have are cut off: below 0 for every measure, latencies
    among them, and above 1 for a share. The estimate is not changed. Infinite ends, of one replication, stay so.
    """
    found = over_replications(values, level)
    if not math.isfinite(found.half_width):
        return found
    # Rounding must not push the estimate out of its own interval.
    high = max(min(found.high, 1.0), found.value) if measure in SHARES else found.high
    return replace(found, low=min(max(found.low, 0.0), found.value), high=high)


def of_whole(result: Result) -> Measures:
    """The measures of a whole run, whose figures are those of its summary; ``too_short`` as MSER-5 has it."""
    _, enough = _warmup(result.requests, "mser-5")
    return measures(result, "none") | {"too_short": int(not enough)}


def in_order(requests: pd.DataFrame) -> pd.DataFrame:
    """A table of requests in order of arrival."""
    return requests.sort_values(["arrival_s", "id"], ignore_index=True)


def latencies_in_order(requests: pd.DataFrame) -> FloatArray:
    """End-to-end latencies of the completed requests, in order of arrival; shape (completed,), seconds."""
    ordered = in_order(requests)
    return ordered.loc[ordered["status"] == "completed", "e2e_s"].to_numpy(dtype=np.float64)


def _warmup(requests: pd.DataFrame, rule: Rule) -> tuple[int, bool]:
    """How many requests to leave out, and whether enough are left."""
    if rule == "none":
        return 0, True
    if isinstance(rule, int):
        return min(rule, len(requests)), rule < len(requests)
    latencies = latencies_in_order(requests)
    if not len(latencies):
        return 0, False
    if requests["arrival_s"].nunique() == 1:
        return 0, True  # A batch begins and ends; it has no steady state to warm up to.
    cut = mser5(latencies)
    if not cut.drop:
        return 0, cut.enough
    # So many completed ones; those among them that failed go with them.
    completed = (in_order(requests)["status"] == "completed").to_numpy()
    return int(np.flatnonzero(completed)[cut.drop]), cut.enough


def _behind(requests: pd.DataFrame, cut: int) -> _Seen:
    kept = in_order(requests).iloc[cut:]
    completed = kept[kept["status"] == "completed"]
    ends = (float(kept["arrival_s"].min()), float(kept["finished_s"].max())) if len(kept) else (0.0, 0.0)
    return _Seen(kept, completed, *ends)


def _of_requests(seen: _Seen) -> Measures:
    found: Measures = {}
    for latency in LATENCIES:
        values = seen.completed[f"{latency}_s"].dropna().to_numpy(dtype=np.float64)
        found[f"{latency}_mean"] = float(values.mean()) if len(values) else None
        for name, q in STATISTICS.items():
            found[f"{latency}_{name}"] = float(np.quantile(values, q)) if len(values) else None
    started = seen.requests[seen.requests["started_s"].notna()]
    asked = int(started["prompt_tokens"].sum())
    tokens = int(seen.completed["output_tokens"].sum())
    return found | {
        "throughput_tokens_per_s": tokens / seen.seconds if seen.seconds > 0 else None,
        "failed_share": 1 - len(seen.completed) / len(seen.requests) if len(seen.requests) else None,
        "preemptions": int(seen.requests["preemptions"].sum()),
        "prefix_hit_rate": int(started["cached_tokens"].sum()) / asked if asked else None,
        "requests": len(seen.requests),
    }


def _objectives(seen: _Seen, slo: Objectives | None) -> Measures:
    if slo is None:
        return {}
    good = pd.Series(True, index=seen.completed.index)
    for key in LATENCIES:
        most = getattr(slo, f"{key}_s")
        if most is not None:
            good &= ~(seen.completed[f"{key}_s"] > most)
    met = int(good.sum())
    return {
        "goodput_requests_per_s": met / seen.seconds if seen.seconds > 0 else None,
        "slo_share": met / len(seen.requests) if len(seen.requests) else None,
    }


def _of_cache(states: pd.DataFrame, seen: _Seen, cell_bytes: float) -> Measures:
    """Means over time, each state lasting until the next."""
    times = states["time_s"].to_numpy(dtype=np.float64)
    lasted = np.diff(np.clip(np.append(times, seen.end_s), seen.start_s, seen.end_s))
    total = float(lasted.sum())
    if total <= 0:
        return {}

    def mean(column: str) -> float:
        # Not by BLAS, whose order of summation depends on its threads.
        return float((lasted * states[column].to_numpy(dtype=np.float64)).sum()) / total

    return {
        "utilization_mean": mean("utilization"),
        "external_fragmentation_mean": mean("external_fragmentation"),
        "memory_bytes": mean("allocated") * cell_bytes,
    }


def _of_summary(summary: dict[str, Any]) -> Measures:
    latencies = {f"{key}_{name}": value for key in LATENCIES for name, value in summary[f"{key}_s"].items()}
    return latencies | {
        "throughput_tokens_per_s": summary["throughput_tokens_per_s"],
        "failed_share": summary["failed"] / summary["requests"] if summary["requests"] else None,
        "preemptions": summary["preemptions"],
        "utilization_mean": summary["cache"]["utilization_mean"],
        "external_fragmentation_mean": summary["cache"]["external_fragmentation_mean"],
        "prefix_hit_rate": summary["prefix"]["hit_rate"],
        "requests": summary["requests"],
        "warmup_requests": 0,
        "too_short": 0,
    }
