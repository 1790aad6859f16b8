"""Service levels as people write them: ``ttft_p95<1s,tpot_p95<80ms,failed<1%``; met or missed, and by how much."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvsim.errors import UserError
from kvsim.experiments.measures import LATENCIES, STATISTICS

LATENCY_MEASURES = tuple(f"{latency}_{name}" for latency in LATENCIES for name in ("mean", *STATISTICS))
"""What may be bounded in seconds; those of ``measures.MEASURES``."""
SHARES = {"failed": "failed_share", "truncated": "truncated_share"}
"""What may be bounded in percent, as it is written and as it is called: requests that end with an error, and those that
end before they have said all because their slot is full."""

_SECONDS = {"s": 1.0, "ms": 1e-3}
_BOUND = re.compile(r"\s*([A-Za-z]\w*)\s*(<=|<)\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z%]*)\s*", re.ASCII)
_MOST_BOUNDS = 30

ACCEPTED = (
    "accepted are bounds such as ttft_p95<1s, tpot_p95<80ms, e2e_p99<=30s, failed<1% or truncated<1%, with commas "
    "between them"
)
"""For messages."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a measure must not exceed."""

    measure: str
    limit: float
    """Seconds, or a share between 0 and 1."""
    strict: bool
    """Whether the limit itself is too much already."""
    text: str
    """As it was written."""

    @property
    def is_share(self) -> bool:
        """Whether it bounds a share of the requests."""
        return self.measure in SHARES.values()

    def met(self, value: float | None) -> bool:
        """Whether a value is within the bound; what cannot be said is met only by ``tpot``, which requests of a single
        token do not have."""
        if value is None:
            return self.measure.startswith("tpot")
        return value < self.limit if self.strict and self.limit > 0 else value <= self.limit

    def factor(self, value: float | None) -> float:
        """The value over the limit: above 1 it is missed by that factor; infinite where it cannot be said, or nothing
        at all was allowed."""
        if value is None:
            return 0.0 if self.met(None) else math.inf
        if self.limit == 0:
            return math.inf if value > 0 else 0.0
        return value / self.limit


@dataclass(frozen=True, slots=True)
class Slo:
    """Several bounds, all of which are to be met."""

    bounds: tuple[Bound, ...]
    """As asked for, in order; where nothing was said of them, no request may fail and none be truncated."""
    text: str
    """As it was written."""

    @property
    def asked(self) -> tuple[Bound, ...]:
        """Those that were written."""
        return tuple(bound for bound in self.bounds if bound.text)

    def met(self, measures: Mapping[str, float | None]) -> bool:
        """Whether all bounds are met by these measures; one that is missing cannot be said."""
        return all(bound.met(measures.get(bound.measure)) for bound in self.bounds)

    def worst(self, measures: Mapping[str, float | None]) -> tuple[Bound, float]:
        """The bound that is missed by the largest factor, or met most narrowly, and that factor."""
        found = [(bound, bound.factor(measures.get(bound.measure))) for bound in self.bounds]
        return max(found, key=lambda each: each[1])


def read_slo(text: str, where: str = "--slo") -> Slo:
    """Bounds from text. Raises ``UserError``: one line that says what was wrong and what is accepted."""
    parts = text.split(",")
    if not text.strip() or len(parts) > _MOST_BOUNDS:
        raise UserError(f"{where}: {text!r:.60}: {len(parts) if text.strip() else 'no'} bounds; {ACCEPTED}")
    bounds = [_read(part, where) for part in parts]
    for at, bound in enumerate(bounds):
        if bound.measure in {other.measure for other in bounds[:at]}:
            raise UserError(f"{where}: {bound.text}: {bound.measure} is bounded twice; once is accepted")
    known = {bound.measure for bound in bounds}
    silent = [Bound(measure, 0.0, False, "") for measure in SHARES.values() if measure not in known]
    return Slo((*bounds, *silent), ", ".join(bound.text for bound in bounds))


def _read(part: str, where: str) -> Bound:
    found = _BOUND.fullmatch(part)
    if found is None:
        raise UserError(f"{where}: {part.strip()!r:.60} is no bound; {ACCEPTED}")
    name, sign, number, unit = found.groups()
    said = f"{where}: {part.strip()!r:.60}"
    value = float(number)
    if name in SHARES or name in SHARES.values():
        if unit != "%" or value > 100:
            raise UserError(f"{said}: {name} is a share of the requests; 0% to 100% is accepted")
        return Bound(SHARES.get(name, name), value / 100, sign == "<", f"{name}{sign}{number}%")
    if name not in LATENCY_MEASURES:
        kinds, ends = " or ".join(LATENCIES), ", ".join(("mean", *STATISTICS))
        raise UserError(
            f"{said}: no measure {name!r}; accepted are {kinds} followed by _ and one of {ends}, failed, truncated"
        )
    if unit not in _SECONDS:
        raise UserError(f"{said}: {name} is a time; a number followed by s or ms is accepted")
    if not 0 < value * _SECONDS[unit] < 1e9:
        raise UserError(f"{said}: a time above 0 and below 1e9 seconds is accepted")
    return Bound(name, value * _SECONDS[unit], sign == "<", f"{name}{sign}{number}{unit}")
