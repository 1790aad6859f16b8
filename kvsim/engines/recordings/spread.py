"""How much a server's times differ from run to run: the same requests, sent again at the same times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from kvsim.engines.recordings.latencies import MEASURES, STATISTICS, measured_latencies, statistic_of
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


def spread_of(recording: SteppedServer, others: Sequence[SteppedServer]) -> Spread | None:
    """The spread of a server between runs of the same requests; None if no requests were sent twice.

    Where those of this recording were sent again, it is that of these runs; else the largest of any requests that the
    same server was sent again.
    """
    by_path = {each.path: each for each in (recording, *others)}
    pairs = [
        (one, other)
        for one, other in combinations(by_path.values(), 2)
        if one.same_server == other.same_server == recording.same_server
        and one.same_settings == other.same_settings
        and same_requests(one, other)
    ]
    chosen = [pair for pair in pairs if any(each.path == recording.path for each in pair)] or pairs
    if not chosen:
        return None
    found: dict[tuple[str, str], float] = {}
    for pair in chosen:
        both = set.intersection(*(set(_by_id(each)) for each in pair))
        first, second = (measured_latencies(each, both) for each in pair)
        for measure in MEASURES:
            for statistic in STATISTICS:
                a, b = (statistic_of(each[measure].dropna(), statistic) for each in (first, second))
                if a > 0 and b > 0:
                    key = measure, statistic
                    found[key] = max(found.get(key, 0.0), abs(a / b - 1), abs(b / a - 1))
    return Spread(found, tuple(dict.fromkeys(each.name for pair in chosen for each in pair)))


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
