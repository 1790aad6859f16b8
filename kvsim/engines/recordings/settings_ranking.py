"""Whether settings rank as predicted, where a server was asked the same under several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from kvsim.engines.recordings.spread import same_requests
from kvsim.engines.recordings.steps import SteppedServer

MEASURES = ("ttft_s", "e2e_s")
"""Latencies whose means rank settings."""
_SIDES = ("measured", "predicted")


@dataclass(frozen=True)
class Ranking:
    """Settings of one server under the same requests, ranked by a mean latency."""

    measure: str
    table: pd.DataFrame
    """One row for each setting, in the measured order: settings, runs, measured, predicted (seconds, medians over the
    runs), spread (half the range of the measured over their median; 0 for one run)."""

    @property
    def tau(self) -> float | None:
        """See ``kendalls_tau``."""
        return kendalls_tau(self.table)

    @property
    def wrong(self) -> int:
        """See ``ranked_wrong``."""
        return ranked_wrong(self.table)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "measure": self.measure,
            "kendall_tau": self.tau,
            "pairs_ranked_wrong": self.wrong,
            "settings": self.table.to_dict("records"),
        }


def kendalls_tau(table: pd.DataFrame) -> float | None:
    """Kendall's tau between the measured and the predicted order of a table's rows; None if it is not defined."""
    tau = float(kendalltau(table["predicted"], table["measured"]).statistic)
    return None if tau != tau else tau


def ranked_wrong(table: pd.DataFrame) -> int:
    """Pairs of rows ranked otherwise than measured, although they differ by more than their spreads (relative)."""
    rows = zip(table["predicted"], table["measured"], table["measured"] * table["spread"], strict=True)
    return sum((a[0] - b[0]) * (a[1] - b[1]) < 0 and abs(a[1] - b[1]) > a[2] + b[2] for a, b in combinations(rows, 2))


def rankings(runs: Sequence[tuple[SteppedServer, pd.DataFrame]]) -> tuple[Ranking, ...]:
    """The rankings of settings; none unless the same requests were sent under several.

    ``runs``: recordings, each with its measured_* and predicted_* latencies by request.
    """
    groups: list[list[tuple[SteppedServer, pd.DataFrame]]] = []
    for run in runs:
        for group in groups:
            first = group[0][0]
            if first.same_server == run[0].same_server and same_requests(first, run[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    return tuple(
        Ranking(measure, table) for group in groups for measure in MEASURES if len(table := _table(group, measure)) > 1
    )


def _table(group: Sequence[tuple[SteppedServer, pd.DataFrame]], measure: str) -> pd.DataFrame:
    # A run that ended early has other requests, and thus another mean.
    common = set.intersection(*(set(table["id"]) for _, table in group))
    each = pd.DataFrame(
        [
            (
                recording.settings,
                *(float(table.loc[table["id"].isin(common), f"{side}_{measure}"].mean()) for side in _SIDES),
            )
            for recording, table in group
        ],
        columns=["settings", *_SIDES],
    )
    by = each.groupby("settings", sort=False)
    found = by[list(_SIDES)].median()
    found.insert(0, "runs", by.size())
    found["spread"] = (by["measured"].max() - by["measured"].min()) / 2 / by["measured"].median()
    return found.sort_values("measured", kind="stable").reset_index()
