"""Latencies of recorded requests, measured and predicted, and their statistics."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from kvsim.costs.tables import FloatArray
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.simulation.result import Result

MEASURES = ("ttft_s", "tpot_s", "e2e_s")
"""Latencies that are compared. ``tpot_s``: seconds per token after the first."""
STATISTICS = {"mean": None, "p50": 0.5, "p95": 0.95, "p99": 0.99}
"""Statistics of each latency; quantiles are interpolated."""
_UNQUEUED = 0.125
"""The quantile of TTFT by which it is told what of a client's times is not the engine's: the median of a quarter."""


def statistic_of(values: pd.Series, statistic: str) -> float:
    """One of ``STATISTICS`` of some values; NaN of nothing."""
    quantile = STATISTICS[statistic]
    return float(values.mean() if quantile is None else values.quantile(quantile))


def measured_latencies(recording: RecordedServer, ids: Container[str] | None = None) -> pd.DataFrame:
    """The measured latencies in seconds, one row for each request by its id: the columns ``MEASURES``.

    ``ids``: of these requests alone.
    """
    chosen = [request for request in recording.requests if ids is None or request.id in ids]
    sent, first, last, tokens = (
        np.array([(r.asked.arrival_s, r.first_token_s, r.last_token_s, r.asked.output_tokens) for r in chosen])
        .reshape(-1, 4)
        .T
    )
    return _latencies([request.id for request in chosen], sent, first, last, tokens)


def predicted_latencies(recording: RecordedServer, result: Result, around_s: FloatArray | float = 0.0) -> pd.DataFrame:
    """The latencies of completed requests in a simulation, as ``measured_latencies``.

    ``around_s``: what lies between client and server, for each row of ``result.requests``.
    """
    rows = result.requests
    arrival: FloatArray = rows["arrival_s"].to_numpy(dtype=float, copy=True)
    if recording.meta.clock == "engine":
        for server, passes in passes_by_server(result):
            own = np.ones(len(rows), dtype=bool) if server is None else (rows["server"] == server).to_numpy()
            arrival[own] = taken_in(arrival[own], passes)
    first, last = (rows[column].to_numpy(dtype=float) for column in ("first_token_s", "finished_s"))
    table = _latencies([recording.id_of(int(n)) for n in rows["id"]], arrival, first, last, rows["output_tokens"])
    table["ttft_s"] += around_s
    table["e2e_s"] += around_s
    return table[(rows["status"] == "completed").to_numpy()]


def _latencies(ids: Sequence[str], sent: FloatArray, first: FloatArray, last: FloatArray, n: ArrayLike) -> pd.DataFrame:
    further = np.asarray(n, dtype=float) - 1
    tpot = np.divide(last - first, further, out=np.full(len(sent), np.nan), where=further > 0)
    return pd.DataFrame(dict(zip(MEASURES, (first - sent, tpot, last - sent), strict=True)), index=list(ids))


def passes_by_server(result: Result) -> list[tuple[int | None, pd.DataFrame]]:
    """Each server of a cluster with its passes; None: the only one.

    Passes of servers that step together begin at the same time, and end with the last of them.
    """
    passes = result.passes
    if "server" not in passes:
        return [(None, passes)]
    if result.scenario.machine.expert_parallel > 1:
        passes = passes.assign(seconds=passes.groupby("start_s")["seconds"].transform("max"))
    return [(number, passes[passes["server"] == number]) for number in sorted(set(passes["server"].tolist()))]


def taken_in(arrival: FloatArray, passes: pd.DataFrame) -> FloatArray:
    """When the engine takes each request in: it looks for new ones when a step ends, or at once if none runs.

    vLLM notes the arrival of a request then (``Scheduler.add_request``).
    """
    start = passes["start_s"].to_numpy()
    end = start + passes["seconds"].to_numpy()
    before = np.searchsorted(start, arrival, side="left") - 1
    return np.where(before >= 0, np.maximum(arrival, end[before]), arrival)


def fitted_network_s(requests: pd.DataFrame) -> float:
    """The seconds of a client's TTFT that are not the engine's: the network's and the front end's, at least 0.

    By how much the shortest quarter of the measured TTFT, in its median, is longer than that of the predicted ones: an
    error in how long requests wait is not to be taken for the network. They are not the same requests, since which of
    them a step just misses is chance. ``requests``: rows with measured_ttft_s and predicted_ttft_s, in seconds.
    """
    both = requests[["measured_ttft_s", "predicted_ttft_s"]].dropna().quantile(_UNQUEUED)
    found = float(both["measured_ttft_s"] - both["predicted_ttft_s"])
    return found if found > 0 else 0.0  # NaN where nothing was predicted.
