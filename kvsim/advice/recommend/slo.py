"""Service levels such as ``ttft_p95<1s,tpot_p95<80ms,failed<1%``: reading them, and checking measures against them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvsim.errors import UserError
from kvsim.experiments.measures import LATENCIES, STATISTICS

LATENCY_MEASURES = tuple(f"{latency}_{name}" for latency in LATENCIES for name in ("mean", *STATISTICS))
"""Measures that can be bounded in seconds; all are in ``measures.MEASURES``."""
SHARES = {"failed": "failed_share", "truncated": "truncated_share"}
"""Measures that can be bounded in percent, by their name in text: the requests that end with an error, and those whose
output is cut short because their slot is full."""

_SECONDS = {"s": 1.0, "ms": 1e-3}
_BOUND = re.compile(r"\s*([A-Za-z]\w*)\s*(<=|<)\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z%]*)\s*", re.ASCII)
_MOST_BOUNDS = 30

ACCEPTED = (
    "bounds such as ttft_p95<1s, tpot_p95<80ms, e2e_p99<=30s, failed<1% or truncated<1% are accepted, separated by "
    "commas"
)
"""The end of messages about unreadable bounds."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on a measure."""

    measure: str
    limit: float
    """Seconds, or a share between 0 and 1."""
    strict: bool
    """Whether the limit itself is excluded."""
    text: str
    """The bound as written; empty for an implied one."""

    @property
    def is_share(self) -> bool:
        """Whether this bounds a share of the requests."""
        return self.measure in SHARES.values()

    def met(self, value: float | None) -> bool:
        """Whether a value meets the bound; an unknown value does so only for TPOT, which one-token requests lack."""
        if value is None:
            return self.measure.startswith("tpot")
        return value < self.limit if self.strict and self.limit > 0 else value <= self.limit

    def factor(self, value: float | None) -> float:
        """Return the value divided by the limit, so above 1 for a missed bound.

        Infinite if the value is unknown and the bound needs one, or if the limit is 0 and the value is not.
        """
        if value is None:
            return 0.0 if self.met(None) else math.inf
        if self.limit == 0:
            return math.inf if value > 0 else 0.0
        return value / self.limit


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level: bounds that must all be met."""

    bounds: tuple[Bound, ...]
    """The bounds asked for, in order, and by default bounds of 0 on failed and truncated requests."""
    text: str
    """The service level as written."""

    @property
    def asked(self) -> tuple[Bound, ...]:
        """The bounds that were written, without the implied ones."""
        return tuple(bound for bound in self.bounds if bound.text)

    def met(self, measures: Mapping[str, float | None]) -> bool:
        """Whether all bounds are met; a missing measure counts as unknown."""
        return all(bound.met(measures.get(bound.measure)) for bound in self.bounds)

    def worst(self, measures: Mapping[str, float | None]) -> tuple[Bound, float]:
        """Return the bound that is missed by the largest factor, or met most narrowly, and that factor."""
        factors = [(bound, bound.factor(measures.get(bound.measure))) for bound in self.bounds]
        return max(factors, key=lambda pair: pair[1])


def read_slo(text: str, where: str = "--slo") -> Slo:
    """Read a service level from text. Raises ``UserError`` with one line that says what is accepted."""
    parts = text.split(",")
    if not text.strip() or len(parts) > _MOST_BOUNDS:
        raise UserError(f"{where}: {text!r:.60}: {len(parts) if text.strip() else 'no'} bounds; {ACCEPTED}")
    bounds = [_read(part, where) for part in parts]
    for at, bound in enumerate(bounds):
        if bound.measure in {other.measure for other in bounds[:at]}:
            raise UserError(
                f"{where}: {bound.text}: {bound.measure} is bounded twice; one bound for each measure is accepted"
            )
    known = {bound.measure for bound in bounds}
    implied = [Bound(measure, 0.0, False, "") for measure in SHARES.values() if measure not in known]
    return Slo((*bounds, *implied), ", ".join(bound.text for bound in bounds))


def _read(part: str, where: str) -> Bound:
    found = _BOUND.fullmatch(part)
    if found is None:
        raise UserError(f"{where}: {part.strip()!r:.60} is not a bound; {ACCEPTED}")
    name, sign, number, unit = found.groups()
    label = f"{where}: {part.strip()!r:.60}"
    value = float(number)
    if name in SHARES or name in SHARES.values():
        if unit != "%" or value > 100:
            raise UserError(f"{label}: {name} is a share of the requests; 0% to 100% is accepted")
        return Bound(SHARES.get(name, name), value / 100, sign == "<", f"{name}{sign}{number}%")
    if name not in LATENCY_MEASURES:
        kinds, ends = " or ".join(LATENCIES), ", ".join(("mean", *STATISTICS))
        raise UserError(
            f"{label}: no measure {name!r}; accepted: {kinds} followed by _ and one of {ends}; failed; truncated"
        )
    if unit not in _SECONDS:
        raise UserError(f"{label}: {name} is a time; a number followed by s or ms is accepted")
    if not 0 < value * _SECONDS[unit] < 1e9:
        raise UserError(f"{label}: a time above 0 and below 1e9 seconds is accepted")
    return Bound(name, value * _SECONDS[unit], sign == "<", f"{name}{sign}{number}{unit}")
