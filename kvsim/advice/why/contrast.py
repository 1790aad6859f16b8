"""Two groups of requests, and which causes make one of them slower than the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.costs.tables import FloatArray
from kvsim.experiments.estimates import t_quantile
from kvsim.simulation.run_tables import Table

if TYPE_CHECKING:
    import pandas as pd

NEGLIGIBLE = 0.05
"""Differences below this share of the earlier (or faster) requests' mean are ignored."""

_HARDLY = 0.005
"""Share of a difference that does not change what is printed of its shares."""

CAUSES: dict[str, str] = {
    "queueing": "waiting for a slot",
    "cells": "waiting for cells",
    "steps": "waiting for a step that takes them in",
    "own": "their own tokens",
    "batch": "other requests' tokens in the same passes",
    "context": "attention over useful cells",
    "holes": "attention over cells of other sequences and free cells",
    "compaction": "compaction",
    "failures": "batch splits and preemptions",
    "prefix": "prompt tokens that an earlier request had computed",
    "transfers": "copies to and from the host",
    "mapping": "mapping pages",
    "drafting": "drafting, and checking drafts",
    "machine": "the machine: measured minus predicted",
}
"""The causes that a request's time is attributed to, with descriptions.

``kvsim/simulation/time_breakdown.py`` defines all but the last, which only measured runs have.
"""

COLUMNS = [f"{cause}_s" for cause in CAUSES]
"""The columns of the seconds that they took."""
_SERVER_WORK = {
    "fixed_s": "the fixed cost of passes",
    "matrix_s": "matrix work",
    "useful_s": "attention over useful cells",
    "holes_s": "attention over cells of other sequences and free cells",
    "moves_s": "compaction",
    "transfers_s": "copies to and from the host",
    "mapping_s": "mapping pages",
}
"""What a server does while requests wait; the keys are ``time_breakdown.TERMS``."""
CAUSE_OF_WORK = {
    "useful_s": "context",
    "holes_s": "holes",
    "moves_s": "compaction",
    "transfers_s": "transfers",
    "mapping_s": "mapping",
}
"""The cause whose remedies reduce a kind of server work."""


@dataclass(frozen=True)
class Contrast:
    """Two groups of requests, a quarter each, with the causes of the difference between their mean latencies."""

    names: tuple[str, str]
    size: int
    """Number of requests in each group."""
    seconds: tuple[FloatArray, FloatArray]
    """Mean seconds of each of ``CAUSES``, for each group."""
    interval_s: tuple[float, float] | None
    """95 % interval of the difference of the mean latencies; None if the groups were chosen by latency itself."""
    server_work: Mapping[str, float]
    """What the server did while the second group waited for a slot, for cells or for a step, as shares by
    ``time_breakdown.TERMS``; empty if no request waited, or if it is unknown."""

    @property
    def means_s(self) -> tuple[float, float]:
        """Mean latency of each group, in seconds."""
        first, second = (float(seconds.sum()) for seconds in self.seconds)
        return first, second

    @property
    def differences_s(self) -> FloatArray:
        """By how many seconds each of ``CAUSES`` took the second group longer."""
        return self.seconds[1] - self.seconds[0]

    @property
    def shares(self) -> FloatArray:
        """Share of each of ``CAUSES`` in what those with a positive difference add; 0 for the others
        (``given_back_s``)."""
        added = self.differences_s.clip(min=0)
        total = float(added.sum())
        return added / total if total else np.zeros(len(CAUSES))

    @property
    def table(self) -> pd.DataFrame:
        """One row per cause; the columns are each group's mean seconds under its name, ``difference`` and ``share``."""
        import pandas as pd

        return pd.DataFrame.from_dict(dict(self.rows()), orient="index").rename_axis("cause")

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Each cause with its row of the table."""
        names = (*self.names, "difference", "share")
        columns = (*self.seconds, self.differences_s, self.shares)
        for cause, *row in zip(CAUSES, *(column.tolist() for column in columns), strict=True):
            yield cause, dict(zip(names, row, strict=True))

    @property
    def difference_s(self) -> float:
        """Mean latency of the second group minus that of the first, in seconds."""
        return self.means_s[1] - self.means_s[0]

    @property
    def given_back_s(self) -> float:
        """By how many seconds the causes that took the second group less time make the difference smaller."""
        return -float(self.differences_s.clip(max=0).sum())

    @property
    def adds_up(self) -> bool:
        """Whether the shares are those of the difference itself, since hardly anything is given back."""
        return self.given_back_s < _HARDLY * abs(self.difference_s)

    @property
    def ratio(self) -> float:
        """Mean latency of the second group divided by that of the first; NaN if that is 0."""
        first, second = self.means_s
        return second / first if first > 0 else float("nan")

    @property
    def slower(self) -> bool:
        """Whether the second group is slower by more than chance and more than a negligible amount."""
        significant = self.interval_s is None or self.interval_s[0] > 0
        return significant and self.difference_s > NEGLIGIBLE * self.means_s[0]

    @property
    def dominant(self) -> str | None:
        """The cause with the largest part of the difference; None if the second group is not slower."""
        return list(CAUSES)[int(self.differences_s.argmax())] if self.slower else None

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for this contrast."""
        return {
            "groups": list(self.names),
            "requests_each": self.size,
            "means_s": list(self.means_s),
            "difference_s": self.difference_s,
            "given_back_s": self.given_back_s,
            "interval_s": None if self.interval_s is None else list(self.interval_s),
            "slower": self.slower,
            "dominant": self.dominant,
            "causes": dict(self.rows()),
            "server_meanwhile": dict(self.server_work),
        }


def contrast_of(
    names: tuple[str, str],
    first: Table,
    second: Table,
    interval: tuple[float, float] | None,
    passes: Table | None,
) -> Contrast:
    """Contrast two groups of requests; ``passes`` are those of a simulated run, None if latencies were measured."""
    earlier, later = (np.array([rows.columns[name].mean() for name in COLUMNS]) for rows in (first, second))
    server_work = {} if passes is None else _server_work(second.columns, passes.columns)
    return Contrast(names, len(first), (earlier, later), interval, server_work)


def _server_work(requests: Mapping[str, FloatArray], passes: Mapping[str, FloatArray]) -> dict[str, float]:
    """Shares of the kinds of work that passes did while the requests waited for a slot, for cells or for a step."""
    waited = requests["queueing_s"] + requests["cells_s"] + requests["steps_s"]
    starts, before = passes["start_s"], passes["waited_s"]
    if not waited.sum() > 0 or not len(starts):
        return {}
    edges = np.stack([starts - before, starts, starts + passes["seconds"]], axis=1).ravel()
    begun = requests["arrival_s"]
    ended = begun + waited
    spent = {}
    for term in _SERVER_WORK:
        # What is copied for whole sequences, or waited for, comes before the pass and is no part of its seconds.
        beside = before if term == "transfers_s" else np.zeros(len(starts))
        parts = np.stack([np.zeros(len(starts)), beside, passes[term]], axis=1)
        known = parts.ravel().cumsum()
        spent[term] = float((np.interp(ended, edges, known) - np.interp(begun, edges, known)).sum())
    total = sum(spent.values())
    return {term: seconds / total for term, seconds in spent.items()} if total > 0 else {}


def difference_interval(values: FloatArray, n: int) -> tuple[float, float]:
    """Return a 95 % interval for the mean of the last ``n`` values minus the mean of the first ``n``.

    ``values`` are in order and have shape (N,) with N >= 2 n and n >= 2. The interval is Welch's for the residuals from
    a straight line through all values, so that a steady rise does not count as noise; correlated neighbours count for
    fewer values (``_effective_number``).
    """
    groups = values[:n], values[-n:]
    at = np.arange(len(values), dtype=float)
    slope = float(np.polyfit(at, values, 1)[0])
    residuals = [group - slope * at[:n] for group in groups]
    counts = [_effective_number(each) for each in residuals]
    parts = [float(each.var(ddof=1)) / count for each, count in zip(residuals, counts, strict=True)]
    difference, variance = float(groups[1].mean() - groups[0].mean()), sum(parts)
    if variance <= (1e-9 * float(np.abs(values).max())) ** 2:
        return difference, difference
    freedom = variance**2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    reach = t_quantile(0.95, freedom) * variance**0.5
    return difference - reach, difference + reach


def _effective_number(values: FloatArray) -> float:
    """Effective number of independent values for an AR(1) sequence: n (1 - r) / (1 + r), but at least 2.

    r is the correlation between neighbours.
    """
    centred = values - values.mean()
    square = float(centred @ centred)
    r = float(centred[1:] @ centred[:-1]) / square if square > 0 else 0.0
    return max(len(values) * (1 - r) / (1 + r), 2.0) if r > 0 else float(len(values))


def over_time_text(c: Contrast) -> str:
    """What early and late requests say, in words."""
    low, high = c.interval_s or (c.difference_s, c.difference_s)
    sizes = (
        f"{seconds(c.means_s[0])} for the first {c.size} requests, {seconds(c.means_s[1])} for the last {c.size}; "
        f"difference {seconds(c.difference_s)}, 95 % interval {seconds(low)} to {seconds(high)}"
    )
    if not c.slower:
        if high < 0 and c.difference_s < -NEGLIGIBLE * c.means_s[0]:
            return f"no slowdown: late requests are faster ({sizes})."
        chance = " beyond chance" if c.difference_s > NEGLIGIBLE * c.means_s[0] else ""
        return f"flat: no slowdown over time{chance} ({sizes})."
    return f"Late requests take {c.ratio:.2f} times as long as early ones ({sizes}). {blame(c)}"


def across_text(c: Contrast) -> str:
    """What fast and slow requests say, in words."""
    sizes = f"{seconds(c.means_s[0])} and {seconds(c.means_s[1])}"
    if not c.slower:
        return f"Slow requests take about as long as fast ones ({sizes})."
    return f"The slowest quarter takes {c.ratio:.2f} times as long as the fastest ({sizes}). {blame(c)}"


def blame(c: Contrast) -> str:
    """Which causes make most of the difference, in words."""
    ranked = sorted(c.rows(), key=lambda pair: -pair[1]["share"])
    shares, costs = ([row[column] for _, row in ranked] for column in ("share", "difference"))
    first, second = (CAUSES[cause] for cause, _ in ranked[:2])
    if c.adds_up:
        most = f"{shares[0]:.0%} of that is {first}"
        most += f", {shares[1]:.0%} {second}" if shares[1] >= 0.1 else ""
    else:
        # Shares of the difference would exceed 100 %.
        most = f"{seconds(costs[0])} more go to {first}"
        most += f", {seconds(costs[1])} more to {second}" if shares[1] >= 0.1 else ""
        most += f"; other causes give back {seconds(c.given_back_s)}"
    if c.dominant in ("queueing", "cells", "steps") and c.server_work:
        term = max(c.server_work, key=c.server_work.__getitem__)
        most += f"; while they waited, {c.server_work[term]:.0%} of the server's time went to {_SERVER_WORK[term]}"
    return f"{most}."


def seconds(value: float) -> str:
    """Format a time in seconds with three significant digits and a unit."""
    if abs(value) < 1e-12:
        return "0 s"
    if abs(value) >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"
