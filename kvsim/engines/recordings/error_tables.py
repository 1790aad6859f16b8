"""Tables of what recorded servers took beside what is predicted: errors of latencies, and load over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvsim.engines.recordings.latencies import MEASURES, STATISTICS, passes_by_server, statistic_of
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.spread import Spread
from kvsim.simulation.result import Result

BOUNDED = ("mean", "p50", "p99")
"""Statistics whose largest error sums up a run."""
RATES = ("output_tokens_per_s", "requests_per_s")
"""Also compared, over the whole run."""
WITHIN = {"p50": 0.05, "p99": 0.10}
"""Bounds of errors, where each step of a server is known."""


def error_table(
    requests: pd.DataFrame, recording: RecordedServer, result: Result, network_s: float, *, fitted: bool
) -> pd.DataFrame:
    """``ServerRun.table``, without spread and verdict.

    ``network_s``: what a client waits beside the server's own time; ``fitted``: whether it was fitted to the requests.
    """
    rows: list[dict[str, Any]] = []
    for measure in MEASURES:
        values = {side: requests[f"{side}_{measure}"].dropna() for side in _sides(requests)}
        for statistic in STATISTICS:
            found = {side: statistic_of(each, statistic) for side, each in values.items()}
            alone = found["predicted"] - (0.0 if measure == "tpot_s" else network_s)
            rows.append({"measure": measure, "statistic": statistic, **found, "alone": alone})
    served = recording.requests
    tokens = sum(request.asked.output_tokens for request in served)
    lasted_s = max(r.last_token_s for r in served) - min(r.asked.arrival_s for r in served)
    predicted_s = result.summary["makespan_s"] + network_s
    counts = ((tokens, result.summary["output_tokens"]), (len(served), result.summary["completed"]))
    for rate, (count, ours) in zip(RATES, counts, strict=True):
        predicted = ours / predicted_s if predicted_s else 0.0
        sides = {"measured": count / lasted_s if lasted_s else np.nan, "predicted": predicted, "alone": predicted}
        rows.append({"measure": rate, "statistic": "mean", **sides})
    table = pd.DataFrame(rows)
    for column, side in (("error", "predicted"), ("unfitted", "alone"), ("unpaced", "unpaced")):
        table[column] = _relative(table[side], table["measured"]) if side in table else np.nan
    if not fitted:
        table["unfitted"] = np.nan
    return table[["measure", "statistic", "measured", "predicted", "error", "unfitted", "unpaced"]]


def _sides(requests: pd.DataFrame) -> list[str]:
    return [side for side in ("measured", "predicted", "unpaced") if f"{side}_ttft_s" in requests]


def _relative(predicted: pd.Series, measured: pd.Series) -> pd.Series:
    """Relative errors: 0 of nothing against nothing, NaN of something against nothing."""
    errors = (predicted / measured - 1).replace([np.inf, -np.inf], np.nan)
    return errors.mask((predicted == 0) & (measured == 0), 0.0)


def with_bounds(table: pd.DataFrame, spread: Spread | None, *, verdict: bool) -> pd.DataFrame:
    """The table of errors with the columns spread and, for a ``verdict``, within."""
    spreads, within = [], []
    for row in table.to_dict("records"):
        measure, statistic = row["measure"], row["statistic"]
        known = None if spread is None else spread.of.get((measure, statistic))
        spreads.append(np.nan if known is None else known)
        was_measured = row["measured"] == row["measured"]
        bounded = verdict and was_measured and measure in MEASURES and statistic in WITHIN
        within.append(bool(abs(row["error"]) <= max(WITHIN[statistic], known or 0.0)) if bounded else None)
    return table.assign(spread=spreads, within=pd.Series(within, dtype=object))


def load_table(recording: RecordedServer, result: Result) -> pd.DataFrame:
    """``ServerRun.load``: the simulated server at the times at which the recorded one was looked at."""
    at = np.array([second.t for second in recording.seconds], dtype=np.float64)
    running = np.zeros(len(at), dtype=int)
    for _, passes in passes_by_server(result):
        start = passes["start_s"].to_numpy()
        end = start + passes["seconds"].to_numpy()
        current = np.searchsorted(start, at, side="right") - 1
        running += np.where((current >= 0) & (at < end[current]), passes["chunks"].to_numpy()[current], 0)
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
