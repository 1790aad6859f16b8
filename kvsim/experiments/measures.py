"""Named measures of a run: what sweeps store, and what replications are compared by."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from kvsim.errors import UserError, no_such
from kvsim.experiments.estimates import LEVEL, Interval, mser5, replication_interval
from kvsim.experiments.pooled_percentiles import LatencySketches, pooled_percentile, sketch
from kvsim.scenario.prefixes import hit_rate
from kvsim.scenario.section import Section

if TYPE_CHECKING:
    from kvsim.simulation.result import Result
    from kvsim.simulation.run_tables import Table, Tables

FloatArray = NDArray[np.float64]

WarmupRule = Literal["mser-5", "none"] | int
"""How many requests count as warm-up: the cut that MSER-5 finds in the end-to-end latencies by arrival, none, or a
given number."""

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

MEASURES = (
    *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in ("mean", *STATISTICS)),
    *("throughput_tokens_per_s", "goodput_requests_per_s", "slo_share", "failed_share", "preemptions"),
    *("utilization_mean", "external_fragmentation_mean", "prefix_hit_rate", "memory_bytes", "cache_bytes"),
    *("requests", "warmup_requests", "too_short", "unstable"),
)
"""The names of all measures, in order. Latencies are in seconds."""

SHORT_NAMES = {"goodput": "goodput_requests_per_s", "throughput": "throughput_tokens_per_s"}
"""What measures may be called for short."""

NEED_OBJECTIVES = frozenset({"goodput_requests_per_s", "slo_share"})
"""Measures that are only known where there is a service level."""

MORE_IS_BETTER = frozenset(
    {"throughput_tokens_per_s", "goodput_requests_per_s", "slo_share", "utilization_mean", "prefix_hit_rate"}
)
"""Measures of which higher values are better; of all others, lower values are."""

SHARES = frozenset({"slo_share", "failed_share", "utilization_mean", "external_fragmentation_mean", "prefix_hit_rate"})
"""Measures that lie between 0 and 1."""

WITHOUT_INTERVAL = frozenset({"cache_bytes", "requests", "warmup_requests", "too_short", "unstable"})
"""Flags, settings and counts, which are not estimates and so have no interval."""

Measures = dict[str, float | None]


class Objectives(Section):
    """A service level: the latencies, in seconds, that a request must not exceed to count towards goodput."""

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    """Requests with a single output token have no TPOT and always meet this bound."""
    e2e_s: PositiveFloat | None = None


@dataclass(frozen=True)
class _SteadyPart:
    """The part of a run after its warm-up."""

    requests: Table
    completed: Table
    start_s: float
    """Arrival time of the first request after the warm-up."""
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def is_latency(measure: str) -> bool:
    """Whether a measure is a time that requests took, in seconds."""
    return measure.split("_")[0] in LATENCIES


def measures(result: Result, warmup: WarmupRule = "mser-5", slo: Objectives | None = None) -> Measures:
    """Return a run's measures by name (``MEASURES``); None for those that are not known.

    Requests that arrived during the warm-up do not count, and means over time begin with the first request that does.
    A result without tables gives the measures of its summary; ``warmup`` must then be ``none``. ``memory_bytes`` is the
    mean size of the cells that no other sequence could take, ``cache_bytes`` the size of all cells. ``too_short`` and
    ``unstable`` are 1 if the latencies depend on the length of the run (``estimates.mser5``, ``QueueMonitor``).
    Raises ``UserError``.
    """
    if (isinstance(warmup, str) and warmup not in ("mser-5", "none")) or (isinstance(warmup, int) and warmup < 0):
        raise UserError(f"warmup: {warmup!r}; accepted: mser-5, none, or a number of requests")
    cell_bytes = result.scenario.cell_bytes
    by_name: Measures = dict.fromkeys(MEASURES)
    by_name["cache_bytes"] = result.scenario.cache.cells * cell_bytes
    by_name["unstable"] = int(result.summary["queue"]["unstable"])
    if result.tables is None:
        if warmup not in ("none", 0) or slo is not None:
            raise UserError(f'{result.policy}: warm-up and objectives need tables; run with detail="rows"')
        return by_name | _summary_measures(result.summary)
    requests = by_arrival(result.tables.requests)
    cut, enough = _warmup(requests, warmup)
    steady = _after_warmup(requests, cut)
    if result.summary["prefix"]["hit_rate"] is not None:
        by_name["prefix_hit_rate"] = _prefix_hit_rate(steady)
    return (
        by_name
        | _request_measures(steady)
        | _goodput_measures(steady, slo)
        | _cache_measures(result.tables, steady, cell_bytes)
        | {"warmup_requests": cut, "too_short": int(not enough)}
    )


def measure_called(name: str) -> str:
    """Return the measure with a name, which may be one of ``SHORT_NAMES``. Raises ``UserError``."""
    known = SHORT_NAMES.get(name, name)
    if known not in MEASURES:
        raise UserError(no_such("measure", name, (*SHORT_NAMES, *MEASURES)))
    return known


def share_of_requests(option: str, value: float | str) -> float:
    """Read a share of the requests, given as ``5%``, ``0.05`` or a number. Raises ``UserError``."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if isinstance(value, bool) or not 0 <= share <= 1:
        where = f"{option}: " if option else ""
        raise UserError(f"{where}{text[:40]!r}: a share of the requests is expected, such as 5% or 0.05")
    return share


def failed_requests(runs: Sequence[Measures]) -> tuple[int, int]:
    """Return the number of failed requests in all runs, and of all requests."""
    counts = [(run["failed_share"] or 0.0, int(run["requests"] or 0)) for run in runs]
    return sum(round(share * requests) for share, requests in counts), sum(requests for _, requests in counts)


def measure_interval(
    measure: str,
    values: FloatArray | Sequence[float],
    level: float = LEVEL,
    sketches: Sequence[LatencySketches] = (),
) -> Interval:
    """Return a measure's interval over replications, cut off at the measure's own bounds.

    ``values`` have shape (n,). A percentile of a latency is that of all requests of all replications together
    (``pooled_percentiles``), for which ``sketches`` has those of each replication; all other measures, and percentiles
    without sketches, are means of the replications with a t interval. That knows no bounds, so ends that no value can
    have are cut off: below 0 for every measure, above 1 for a share. The estimate is not changed, and the infinite ends
    of a single replication stay infinite.
    """
    latency, _, statistic = measure.partition("_")
    if sketches and latency in LATENCIES and statistic in STATISTICS:
        interval = pooled_percentile(
            values, [each[latency] for each in sketches if latency in each], STATISTICS[statistic], level
        )
    else:
        interval = replication_interval(values, level)
    if not math.isfinite(interval.half_width):
        return interval
    # Rounding must not push the estimate out of its own interval.
    high = max(min(interval.high, 1.0), interval.value) if measure in SHARES else interval.high
    return replace(interval, low=min(max(interval.low, 0.0), interval.value), high=high)


def latency_sketches(result: Result, cut: int = 0) -> LatencySketches:
    """Return a sketch of each latency of a run's requests, without the first ``cut`` of them by arrival."""
    completed = _after_warmup(by_arrival(result.kept_tables.requests), cut).completed.columns
    values = {latency: completed[f"{latency}_s"] for latency in LATENCIES}
    known = {latency: each[~np.isnan(each)] for latency, each in values.items()}
    return {latency: sketch(each) for latency, each in known.items() if len(each)}


def whole_run_measures(result: Result) -> Measures:
    """Return the measures of a whole run, equal to those of its summary, and ``too_short`` as found by MSER-5."""
    _, enough = _warmup(by_arrival(result.kept_tables.requests), "mser-5")
    return measures(result, "none") | {"too_short": int(not enough)}


def times_digest(result: Result) -> str:
    """Return a digest of when each request started, gave its first token, and ended, and whether it was completed.

    Times are taken to the nanosecond.
    """
    requests = result.kept_tables.requests.columns
    completed = requests["status"] == "completed"
    times = [requests[name] for name in ("started_s", "first_token_s", "finished_s")]
    rounded = np.round(np.column_stack([requests["id"], completed, *times]).astype(np.float64), 9)
    return hashlib.blake2b(rounded.tobytes(), digest_size=16).hexdigest()


def by_arrival(requests: Table) -> Table:
    """Sort a table of requests by arrival."""
    return requests.sorted_by("arrival_s", "id")


def latencies_by_arrival(requests: Table) -> FloatArray:
    """Return the end-to-end latencies of the completed requests by arrival; shape (completed,), seconds."""
    ordered = by_arrival(requests).columns
    latencies: FloatArray = ordered["e2e_s"][ordered["status"] == "completed"]
    return latencies


def _warmup(requests: Table, rule: WarmupRule) -> tuple[int, bool]:
    """Number of requests, which are in order of arrival, to leave out, and whether enough remain."""
    if rule == "none":
        return 0, True
    if isinstance(rule, int):
        return min(rule, len(requests)), rule < len(requests)
    latencies, arrivals = latencies_by_arrival(requests), requests.columns["arrival_s"]
    if not len(latencies):
        return 0, False
    if arrivals[0] == arrivals[-1]:
        return 0, True  # A batch has no steady state to warm up to.
    cut = mser5(latencies)
    if not cut.drop:
        return 0, cut.enough
    # The cut counts completed requests; failed ones among them are left out too.
    completed = requests.columns["status"] == "completed"
    return int(np.flatnonzero(completed)[cut.drop]), cut.enough


def _after_warmup(requests: Table, cut: int) -> _SteadyPart:
    kept = requests[cut:]
    completed = kept[kept.columns["status"] == "completed"]
    ends = (
        (float(kept.columns["arrival_s"][0]), float(np.nanmax(kept.columns["finished_s"]))) if len(kept) else (0.0, 0.0)
    )
    return _SteadyPart(kept, completed, *ends)


def _request_measures(steady: _SteadyPart) -> Measures:
    by_name: Measures = {}
    for latency in LATENCIES:
        values = steady.completed.columns[f"{latency}_s"]
        values = values[~np.isnan(values)]
        by_name[f"{latency}_mean"] = float(values.mean()) if len(values) else None
        for name, q in STATISTICS.items():
            by_name[f"{latency}_{name}"] = float(np.quantile(values, q)) if len(values) else None
    output_tokens = int(steady.completed.columns["output_tokens"].sum())
    return by_name | {
        "throughput_tokens_per_s": output_tokens / steady.seconds if steady.seconds > 0 else None,
        "failed_share": 1 - len(steady.completed) / len(steady.requests) if len(steady.requests) else None,
        "preemptions": int(steady.requests.columns["preemptions"].sum()),
        "requests": len(steady.requests),
    }


def _prefix_hit_rate(steady: _SteadyPart) -> float | None:
    started = steady.requests[~np.isnan(steady.requests.columns["started_s"])].columns
    return hit_rate(int(started["cached_tokens"].sum()), int(started["prompt_tokens"].sum()), "tokens")


def _goodput_measures(steady: _SteadyPart, slo: Objectives | None) -> Measures:
    if slo is None:
        return {}
    good = np.ones(len(steady.completed), dtype=bool)
    for latency in LATENCIES:
        limit = getattr(slo, f"{latency}_s")
        if limit is not None:
            good &= ~(steady.completed.columns[f"{latency}_s"] > limit)
    met = int(good.sum())
    return {
        "goodput_requests_per_s": met / steady.seconds if steady.seconds > 0 else None,
        "slo_share": met / len(steady.requests) if len(steady.requests) else None,
    }


def _cache_measures(tables: Tables, steady: _SteadyPart, cell_bytes: float) -> Measures:
    """Means over time; each state lasts until the next."""
    means = tables.states.means_between(steady.start_s, steady.end_s)
    if means is None:
        return {}
    return {
        "utilization_mean": means["utilization"],
        "external_fragmentation_mean": means["external_fragmentation"],
        "memory_bytes": means["allocated"] * cell_bytes,
    }


def _summary_measures(summary: dict[str, Any]) -> Measures:
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
