"""How much a server's times differ from run to run: the same requests, sent again at the same times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from kvsim.engines.recordings.recorded_server import ServedRequest
from kvsim.engines.recordings.steps import SteppedServer

_FEWEST = 10
"""Requests that two runs must have in common."""
_ALIKE = 0.9
"""Share of the requests of the shorter run that both must have: some may have failed in one."""
_SAME_TIME_S = 0.5
"""Arrivals that differ by no more are the same."""


class Spread(NamedTuple):
    """Relative differences between runs of the same requests."""

    of: Mapping[tuple[str, str], float]
    """The largest, by measure and statistic."""
    runs: tuple[str, ...]
    """The names of the runs."""


def spread_of(recording: SteppedServer, others: Sequence[SteppedServer], statistics: Statistics) -> Spread | None:
    """The spread of a server between runs of the same requests; None if no requests were sent twice.

    Where those of this recording were sent again, it is that of these runs; else the largest of any requests that the
    same server was sent again.
    """
    pairs = [
        (one, other)
        for one, other in combinations(_unique([recording, *others]), 2)
        if one.same_server == other.same_server == recording.same_server and same_traffic(one, other)
    ]
    own = [pair for pair in pairs if any(each.path == recording.path for each in pair)]
    chosen = own or pairs
    if not chosen:
        return None
    found: dict[tuple[str, str], float] = {}
    for one, other in chosen:
        both = set(_by_id(one)) & set(_by_id(other))
        first, second = statistics(one, both), statistics(other, both)
        for key in first.keys() & second.keys():
            a, b = first[key], second[key]
            if a > 0 and b > 0:
                found[key] = max(found.get(key, 0.0), abs(a / b - 1), abs(b / a - 1))
    return Spread(found, tuple(dict.fromkeys(each.name for pair in chosen for each in pair)))


class Statistics:
    """Statistics of the measured latencies of some requests of a recording."""

    def __init__(self, quantiles: Mapping[str, float | None]):
        self._quantiles = quantiles

    def __call__(self, recording: SteppedServer, ids: set[str]) -> dict[tuple[str, str], float]:
        """By measure and statistic, in seconds."""
        table = latencies(recording, ids)
        return {
            (measure, name): statistic_of(values, q)
            for measure in table.columns
            if len(values := table[measure].dropna())
            for name, q in self._quantiles.items()
        }


def statistic_of(values: pd.Series, quantile: float | None) -> float:
    """A quantile, interpolated, or the mean for None; NaN of nothing."""
    return float(values.mean() if quantile is None else values.quantile(quantile))


def latencies(recording: SteppedServer, ids: set[str] | None = None) -> pd.DataFrame:
    """The measured latencies in seconds, one row for each request by its id.

    Columns ttft_s, tpot_s (NaN for one token) and e2e_s. ``ids``: of these requests alone.
    """
    rows = {}
    for request in recording.requests:
        if ids is None or request.id in ids:
            sent, tokens = request.asked.arrival_s, request.asked.output_tokens
            first, last = request.first_token_s, request.last_token_s
            tpot = (last - first) / (tokens - 1) if tokens > 1 else float("nan")
            rows[request.id] = (first - sent, tpot, last - sent)
    return pd.DataFrame.from_dict(rows, orient="index", columns=["ttft_s", "tpot_s", "e2e_s"], dtype=float)


def same_traffic(one: SteppedServer, other: SteppedServer) -> bool:
    """Whether two runs had the same settings and requests at the same times; one may have ended earlier."""
    return one.same_settings == other.same_settings and same_requests(one, other)


def same_requests(one: SteppedServer, other: SteppedServer) -> bool:
    """Whether two runs had the same requests at the same times; one may have ended earlier.

    A request that waited for the end of others came whenever these had ended.
    """
    mine, theirs = _by_id(one), _by_id(other)
    both = mine.keys() & theirs.keys()
    if len(both) < max(_FEWEST, _ALIKE * min(len(mine), len(theirs))):
        return False
    return all(
        _lengths(mine[i]) == _lengths(theirs[i])
        and (int(i) in one.clients.after or abs(mine[i].asked.arrival_s - theirs[i].asked.arrival_s) <= _SAME_TIME_S)
        for i in both
    )


def _lengths(request: ServedRequest) -> tuple[int, int]:
    return request.asked.prompt_tokens, request.asked.output_tokens


def _by_id(recording: SteppedServer) -> dict[str, ServedRequest]:
    return {request.id: request for request in recording.requests}


def _unique(recordings: Sequence[SteppedServer]) -> list[SteppedServer]:
    return list({recording.path: recording for recording in recordings}.values())
