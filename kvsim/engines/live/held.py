"""Did it hold? What was predicted before beside what a server then did, and whether the service level was met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvsim.advice.recommend.slo import LATENCY_MEASURES, Bound
from kvsim.engines.live.processor_share import ProcessorShare
from kvsim.experiments.measures import STATISTICS

_SLOW = 1.15
"""How many times as long as the profile says a server's steps may take before its machine is looked at."""

Measures = Mapping[str, float | None]
"""Seconds, or shares between 0 and 1, by the names that bounds of a service level have."""


class CheckedBound(NamedTuple):
    """A bound of the service level, predicted and measured; seconds, or shares between 0 and 1."""

    bound: Bound
    predicted: float | None
    measured: float | None

    @property
    def met(self) -> bool:
        """Whether the bound was met by what was measured."""
        return self.bound.met(self.measured)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        said = {"measure": self.bound.measure, "limit": self.bound.limit, "text": self.bound.text or None}
        return {**said, "predicted": self.predicted, "measured": self.measured, "met": self.met}


class ComparedLatency(NamedTuple):
    """A latency at its mean or a percentile, in seconds; None for what is not known."""

    measure: str
    predicted: float | None
    """Before, at the profile's own pace."""
    measured: float | None
    at_pace: float | None
    """Predicted at the pace that the machine turned out to have."""
    spread: float | None
    """How much it differs between runs of the server with the same requests."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {**self._asdict(), "error": self.error}


@dataclass(frozen=True)
class Held:
    """A prediction, what a server then did, and what its machine did meanwhile."""

    predicted: Measures
    """Before, at the profile's own pace."""
    measured: Measures
    at_pace: Measures
    """Predicted at the pace that the machine turned out to have; empty if that is not known."""
    pace: float | None
    """How many times as long the server's steps took as the profile says."""
    processors: ProcessorShare | None
    """What the server had of its machine's processors; None where that cannot be seen."""
    bounds: Sequence[Bound] = ()
    """The service level; empty if none was given."""
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def latencies(self) -> tuple[ComparedLatency, ...]:
        """TTFT, TPOT and end to end, each at its mean and percentiles."""
        sides = (self.predicted, self.measured, self.at_pace, self.spread)
        return tuple(ComparedLatency(m, *(side.get(m) for side in sides)) for m in LATENCY_MEASURES)

    @property
    def checked(self) -> tuple[CheckedBound, ...]:
        """Each bound of the service level."""
        return tuple(CheckedBound(b, self.predicted.get(b.measure), self.measured.get(b.measure)) for b in self.bounds)

    @property
    def worst(self) -> float:
        """Largest size of an error of a latency; NaN if there is none."""
        errors = [abs(each.error) for each in self.latencies if each.error is not None]
        return max(errors, default=float("nan"))

    @property
    def per_token(self) -> float | None:
        """The mean time per token, measured over predicted; prompts that others send in between count too."""
        return _ratio(self.measured, self.predicted)

    @property
    def slow(self) -> bool:
        """Whether the server's steps or tokens took notably longer than predicted."""
        return max(self.pace or 0.0, self.per_token or 0.0) > _SLOW

    @property
    def starved(self) -> bool:
        """Whether the server was slow, and other work had its machine's processors."""
        return self.slow and self.processors is not None and self.processors.busy

    @property
    def predicted_met(self) -> bool:
        """Whether the service level would be met by what was predicted."""
        return all(each.bound.met(each.predicted) for each in self.checked)

    @property
    def met(self) -> bool | None:
        """Whether the service level was met; None: no verdict, since a starved server missed what was predicted."""
        if all(each.met for each in self.checked):
            return True
        return None if self.starved and self.predicted_met else False

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds."""
        return {
            "met": self.met,
            "predicted_met": self.predicted_met,
            "bounds": [each.to_dict() for each in self.checked],
            "latencies": [each.to_dict() for each in self.latencies],
            "pace": self.pace,
            "per_token": self.per_token,
            "starved": self.starved,
            "processors": None if self.processors is None else self.processors.to_dict(),
        }


def pace_of(steps: float | None, predicted: Measures, measured: Measures) -> float | None:
    """How many times as long a server took as the profile says.

    ``steps``: by steps whose work is known; without enough of them, by the mean time per token.
    """
    return _ratio(measured, predicted) if steps is None else steps


def _ratio(one: Measures, other: Measures) -> float | None:
    over, under = one.get("tpot_mean"), other.get("tpot_mean")
    return over / under if over is not None and under else None


def statistics_of(values: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Latencies at their means and percentiles; ``values``: those of each request in seconds, by ttft, tpot and e2e."""
    found: dict[str, float | None] = {}
    for measure in LATENCY_MEASURES:
        latency, statistic = measure.split("_")
        known = [value for value in values[latency] if value is not None and value == value]
        if not known:
            found[measure] = None
        else:
            q = STATISTICS.get(statistic)
            found[measure] = float(np.mean(known) if q is None else np.quantile(known, q))
    return found
