"""Tables of what recorded servers took beside what is predicted: latencies, their errors, and load over time."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvsim.costs.tables import FloatArray
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.spread import Spread, statistic_of
from kvsim.simulation.result import Result

MEASURES = ("ttft_s", "tpot_s", "e2e_s")
"""Latencies that are compared. ``tpot_s``: seconds per token after the first."""
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Statistics of each latency; quantiles are interpolated."""
BOUNDED = ("mean", "p50", "p99")
"""Statistics whose largest error sums up a run."""
RATES = ("output_tokens_per_s", "requests_per_s")
"""Also compared, over the whole run."""
WITHIN = {"p50": 0.05, "p99": 0.10}
"""Bounds of errors, where each step of a server is known."""

_UNQUEUED_SHARE, _UNQUEUED_LEAST = 4, 10
"""What of a client's times is not the engine's is fitted to a quarter of the requests, and no fewer than 10."""


def side_by_side(recording: RecordedServer, result: Result) -> pd.DataFrame:
    """``ServerRun.requests``, and ``waited_s``: how long each request waited in the simulation."""
    measured = pd.DataFrame(
        [(r.id, r.asked.arrival_s, r.first_token_s, r.last_token_s, r.asked.output_tokens) for r in recording.requests],
        columns=["id", "arrival_s", "first_s", "last_s", "tokens"],
    )
    table = measured[["id", "arrival_s"]].copy()
    ours = result.requests
    arrival = ours["arrival_s"].to_numpy()
    if recording.meta.clock == "engine":
        arrival = _taken_in(arrival, result.passes)
    done = ours["status"] == "completed"
    sides = {
        "measured": (table["arrival_s"], measured["first_s"], measured["last_s"], measured["tokens"]),
        "predicted": (
            pd.Series(arrival),
            ours["first_token_s"].where(done),
            ours["finished_s"].where(done),
            ours["output_tokens"],
        ),
    }
    for side, (arrived, first, last, tokens) in sides.items():
        several = tokens > 1
        table[f"{side}_ttft_s"] = first - arrived
        table[f"{side}_tpot_s"] = (last - first).where(several) / (tokens - 1).where(several)
        table[f"{side}_e2e_s"] = last - arrived
    return table.assign(waited_s=ours["started_s"] - arrival)


def _taken_in(arrival: FloatArray, passes: pd.DataFrame) -> FloatArray:
    """When the engine takes each request in: it looks for new ones when a step ends, or at once if none runs.

    vLLM notes the arrival of a request then (``Scheduler.add_request``).
    """
    start = passes["start_s"].to_numpy()
    end = start + passes["seconds"].to_numpy()
    before = np.searchsorted(start, arrival, side="left") - 1
    return np.where(before >= 0, np.maximum(arrival, end[before]), arrival)


def fitted_network_s(requests: pd.DataFrame) -> float:
    """The seconds of a client's TTFT that are not the engine's: the network's and the front end's, at least 0.

    The median of what was measured beyond the prediction, over the quarter of the requests that waited least in the
    simulation: an error in how long requests wait is not to be taken for the network.
    """
    beyond = (requests["measured_ttft_s"] - requests["predicted_ttft_s"]).dropna()
    most = max(len(beyond) // _UNQUEUED_SHARE, _UNQUEUED_LEAST)
    least_waited = requests.loc[beyond.index, "waited_s"].sort_values(kind="stable").index[:most]
    return max(0.0, float(beyond[least_waited].median())) if len(beyond) else 0.0


def error_table(requests: pd.DataFrame, recording: RecordedServer, result: Result, network_s: float) -> pd.DataFrame:
    """``ServerRun.table``; ``network_s``: what a client waits beside the server's own time."""
    rows: list[tuple[str, str, float, float, float]] = []
    for measure in MEASURES:
        fitted = 0.0 if measure == "tpot_s" else network_s
        measured, predicted = (requests[f"{side}_{measure}"].dropna() for side in ("measured", "predicted"))
        for statistic, q in STATISTICS.items():
            pair = [statistic_of(values, q) for values in (measured, predicted)]
            rows.append((measure, statistic, pair[0], pair[1], pair[1] - fitted))
    tokens = sum(request.asked.output_tokens for request in recording.requests)
    began_s = min(request.asked.arrival_s for request in recording.requests)
    lasted_s = max(request.last_token_s for request in recording.requests) - began_s
    done, seconds = result.summary["completed"], result.summary["makespan_s"] + network_s
    predicted_rates = (result.summary["output_tokens"] / seconds, done / seconds) if seconds else (0.0, 0.0)
    for rate, count, ours in zip(RATES, (tokens, len(recording.requests)), predicted_rates, strict=True):
        rows.append((rate, "mean", count / lasted_s if lasted_s else float("nan"), ours, ours))
    table = pd.DataFrame(rows, columns=["measure", "statistic", "measured", "predicted", "unfitted"])
    table["error"] = table["predicted"] / table["measured"] - 1
    table["unfitted"] = table["unfitted"] / table["measured"] - 1
    # Nothing against nothing agrees; something against nothing has no relative error.
    table.loc[(table["predicted"] == 0) & (table["measured"] == 0), ["error", "unfitted"]] = 0.0
    table = table.replace([np.inf, -np.inf], np.nan)
    table["unpaced"], table["spread"], table["within"] = np.nan, np.nan, None
    columns = ["measure", "statistic", "measured", "predicted", "error", "unfitted", "unpaced", "spread", "within"]
    return table[columns]


def load_table(recording: RecordedServer, result: Result) -> pd.DataFrame:
    """``ServerRun.load``: the simulated server at the times at which the recorded one was looked at."""
    at = np.array([second.t for second in recording.seconds], dtype=np.float64)
    start = result.passes["start_s"].to_numpy()
    end = start + result.passes["seconds"].to_numpy()
    current = np.searchsorted(start, at, side="right") - 1
    running = np.where((current >= 0) & (at < end[current]), result.passes["chunks"].to_numpy()[current], 0)
    arrived, ended = (
        np.searchsorted(np.sort(result.requests[column].to_numpy()), at, side="right")
        for column in ("arrival_s", "finished_s")
    )
    return pd.DataFrame(
        {
            "t": at,
            "measured_running": [second.running for second in recording.seconds],
            "predicted_running": running,
            "measured_waiting": [second.waiting for second in recording.seconds],
            "predicted_waiting": np.maximum(arrived - ended - running, 0),
        }
    )


def with_bounds(table: pd.DataFrame, requests: pd.DataFrame, spread: Spread | None, *, verdict: bool) -> pd.DataFrame:
    """The table of errors with the columns unpaced, spread and, for a ``verdict``, within."""
    unpaced, spreads, within = [], [], []
    for row in table.to_dict("records"):
        measure, statistic = row["measure"], row["statistic"]
        known = None if spread is None else spread.of.get((measure, statistic))
        spreads.append(np.nan if known is None else known)
        if measure in MEASURES:
            q, values = STATISTICS[statistic], requests[f"unpaced_{measure}"].dropna()
            unpaced.append(statistic_of(values, q) / row["measured"] - 1)
        else:
            unpaced.append(np.nan)
        was_measured = row["measured"] == row["measured"]
        bounded = verdict and was_measured and measure in MEASURES and statistic in WITHIN
        within.append(bool(abs(row["error"]) <= max(WITHIN[statistic], known or 0.0)) if bounded else None)
    return table.assign(unfitted=np.nan, unpaced=unpaced, spread=spreads, within=pd.Series(within, dtype=object))
