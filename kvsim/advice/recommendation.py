"""What was recommended and why: the best few settings, what to type, why all others were ruled out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from kvsim.advice.candidates import REASONS, Candidate, SearchSpace
from kvsim.advice.engine_flags import flags_dict, typed
from kvsim.advice.slo import LATENCY_MEASURES, Bound, Slo
from kvsim.advice.trials import MOST_DOUBLINGS, TrialOutcome
from kvsim.costs.costs import Profile
from kvsim.errors import UserError
from kvsim.experiments.estimates import Interval, replication_interval, paired
from kvsim.experiments.traffic import Traffic
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["surely", "likely", "not"]
"""Whether the service level is met: the intervals lie within all bounds; the means do; neither, or arrivals outpace
service in a replication."""

_VERDICTS: tuple[Verdict, ...] = ("surely", "likely", "not")
_NEAR = 0.95
"""Loads that reach this share of the largest count as equal to it."""
_MOST_LOAD = 2.0**MOST_DOUBLINGS

RULE = (
    "ranked by whether the service level is met at this load (surely: the upper ends of all intervals are within the "
    "bounds; likely: the means are; not), then by the largest load sustained (5 % less counts as equal), then by "
    "wider K and V, then by less memory, then by order of search"
)


class RuledOut(NamedTuple):
    """Why a setting was ruled out."""

    reason: str
    """A key of ``candidates.REASONS``."""
    detail: str
    factor: float | None = None
    """Where it was run at the load asked about and missed: its worst measure over the limit, as far as that is finite
    (below 1 where arrivals outpace service)."""


@dataclass(frozen=True)
class Finalist:
    """One of the best few."""

    candidate: Candidate
    slo: Slo
    latencies: tuple[TrialOutcome, ...]
    """At the load asked about, one for each replication."""
    loads: tuple[float, ...]
    """The largest that meet the service level, as multiples of the load asked about, one for each replication; 0: none
    that was tried. Empty where there is no load to change."""

    @cached_property
    def measures(self) -> dict[str, Interval]:
        """Means over the replications of whatever all of them can say; latencies in seconds."""
        found = {}
        for measure in (*LATENCY_MEASURES, "failed_share", "truncated_share", "throughput_tokens_per_s"):
            values = [outcome.measures.get(measure) for outcome in self.latencies]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                found[measure] = replication_interval(known)
        return found

    @property
    def means(self) -> dict[str, float | None]:
        """The measures without their intervals."""
        return {measure: interval.value for measure, interval in self.measures.items()}

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it meets the service level at the load asked about."""
        if any(outcome.error or not outcome.settled for outcome in self.latencies) or not self.slo.met(self.means):
            return "not"
        highs = {measure: interval.high for measure, interval in self.measures.items()}
        return "surely" if self.slo.met(highs) else "likely"

    @property
    def worst(self) -> tuple[Bound, float]:
        """The bound that is nearest, or missed most, and its mean over its limit."""
        return self.slo.worst(self.means)

    @cached_property
    def sustained(self) -> Interval | None:
        """The largest load that meets the service level, as a multiple of the one asked about: geometric mean, with a
        t interval of the logarithms. None where no load was tried, or one of the replications met it at none."""
        if not self.loads or min(self.loads) == 0:
            return None
        logs = replication_interval(np.log(self.loads))
        low, high = math.exp(logs.low), math.exp(logs.high) if logs.high < 700 else math.inf
        return Interval(math.exp(logs.value), low, high, logs.level, logs.n, "t over logarithms of replications")

    @property
    def at_least(self) -> bool:
        """Whether larger loads than were tried might do, too."""
        return any(load >= _MOST_LOAD for load in self.loads)

    @property
    def reach(self) -> float:
        """What it is ranked by: the largest load; where none was tried, how far it is from the bounds."""
        if self.loads:
            # Of those that met no load the one that missed least comes first.
            return self.sustained.value if self.sustained else 1e-9 / max(self.worst[1], 1e-9)
        return 1 / max(self.worst[1], 1e-9)


class TopTwo(NamedTuple):
    """The first beside the second."""

    ratio: Interval
    """Largest loads of the first over those of the second; or, where no load was tried, of what the nearest bound
    bounds."""
    measure: str
    """``load``, or that measure."""

    @property
    def told(self) -> bool:
        """Whether they can be told apart."""
        return self.ratio.excludes(1.0)


def rank(finalists: Sequence[Finalist]) -> list[Finalist]:
    """From the best on, by ``RULE``."""
    left, ordered = list(finalists), []
    while left:
        leading = min(_VERDICTS.index(f.verdict) for f in left)
        group = [f for f in left if _VERDICTS.index(f.verdict) == leading]
        most = max(f.reach for f in group)
        near = [f for f in group if f.reach >= _NEAR * most]
        ordered.append(min(near, key=lambda f: _simple(f.candidate)))
        left.remove(ordered[-1])
    return ordered


def _simple(c: Candidate) -> tuple[float, int, int]:
    return -c.width, c.memory_bytes, c.number


@dataclass(frozen=True)
class Recommendation:
    """All of it."""

    scenario: Scenario
    """The workload at the load asked about, with all that is not searched."""
    slo: Slo
    engine: str
    load: float
    """Times the workload's own."""
    memory: int | None
    """Bytes."""
    model: str
    """Whose memory was reckoned."""
    profile: Profile
    traffic: Traffic
    space: SearchSpace
    best: tuple[Finalist, ...]
    """From the best on."""
    ruled_out: dict[int, RuledOut]
    """Of each setting that was ruled out, by its number; with the best they are all settings."""
    tried: int
    """Settings that were run at all."""
    runs: int

    @property
    def met(self) -> bool:
        """Whether the best meets the service level at the load asked about, by its means at least."""
        return bool(self.best) and self.best[0].verdict != "not"

    @cached_property
    def lead(self) -> TopTwo | None:
        """The first beside the second, in pairs of replications; None where there is no second."""
        if len(self.best) < 2:
            return None
        one, two = self.best[:2]
        if one.sustained and two.sustained:
            return TopTwo(_ratio(np.log(one.loads), np.log(two.loads)), "load")
        measure = one.slo.asked[0].measure
        values = [[o.measures.get(measure) or 0.0 for o in each.latencies] for each in (one, two)]
        if not np.array(values).all():
            return None
        return TopTwo(_ratio(np.log(values[0]), np.log(values[1])), measure)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each of the best: ``place``, ``verdict``, ``engine``, its settings, ``memory_bytes``, each bounded
        measure and the largest load with ``_low`` and ``_high``, and ``flags``. Times in seconds."""
        rows = []
        for place, f in enumerate(self.best, 1):
            row: dict[str, Any] = {"place": place, "verdict": f.verdict, "engine": f.candidate.home}
            row |= {**f.candidate.settings, "memory_bytes": f.candidate.memory_bytes}
            shown = {bound.measure: f.measures.get(bound.measure) for bound in self.slo.bounds}
            for measure, interval in {**shown, "sustained_load": f.sustained}.items():
                ends = (interval.value, interval.low, interval.high) if interval else (np.nan,) * 3
                row |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), ends, strict=True))
            rows.append({**row, "flags": typed(f.candidate.flags)})
        return pd.DataFrame(rows)

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """A row for each setting that was thought of: its number and settings, ``memory_bytes``, ``place`` among the
        best, or ``reason`` (a key of ``candidates.REASONS``), ``detail`` and ``factor``; see ``RuledOut``."""
        places = {f.candidate.number: place for place, f in enumerate(self.best, 1)}
        rows = []
        for c in self.space.candidates:
            fate = self.ruled_out.get(c.number, RuledOut("", ""))
            ends = {"place": places.get(c.number), **fate._asdict()}
            head = {"number": c.number, "family": c.family, "engine": c.home}
            rows.append({**head, **c.settings, "memory_bytes": c.memory_bytes, **ends})
        return pd.DataFrame(rows).astype({"place": "Int64"})

    @cached_property
    def reasons(self) -> dict[str, int]:
        """How many settings were ruled out for which reason, in the order of ``candidates.REASONS``."""
        counts = Counter(fate.reason for fate in self.ruled_out.values())
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    @property
    def missed_by(self) -> tuple[float, float] | None:
        """The smallest and the largest factor by which settings missed the service level."""
        factors = [f.factor for f in self.ruled_out.values() if f.reason == "slo" and f.factor is not None and f.factor > 1]
        return (min(factors), max(factors)) if factors else None

    @property
    def conclusion(self) -> str:
        """One sentence."""
        if not self.best:
            return f"Nothing can be recommended: {self._nothing()}."
        first = self.best[0]
        figures = ", ".join(
            f"{_title(bound.measure)} {spoken(first.measures.get(bound.measure), bound.is_share)}"
            for bound in self.slo.asked
        )
        if self.model != self.profile.model:
            figures += f" (times of {self.profile.model}, memory of {self.model})"
        what = f"{first.candidate.command} {typed(first.candidate.flags)}".strip()
        if not first.candidate.flags:
            what = f"{first.candidate.label} (which no engine has)"
        if not self.met:
            bound, factor = first.worst
            limits = (
                f"{bound.text or bound.measure}, at {factor:.2f} x its limit"
                if math.isfinite(factor)
                else bound.measure
            )
            if factor <= 1:
                limits = "arrivals that outpace service"
            nearest = f"Nearest is {what}: predicted {figures}"
            return f"Nothing meets {self.slo.text}. {nearest}; what limits it is {limits}; {self._fraction(first)}."
        sure = "" if first.verdict == "surely" else ", though not surely"
        return f"Run {what}: predicted {figures}{sure}; {self._sustains(first)}."

    @property
    def compared(self) -> str:
        """The first beside the second, in a sentence; empty where there is no second."""
        if self.lead is None:
            return ""
        ratio = self.lead.ratio
        shown = (
            f"{ratio.value:.2f} x ({ratio.low:.2f} to {ratio.high:.2f}, in pairs)" if math.isfinite(ratio.high) else ""
        )
        what = "the load of the second" if self.lead.measure == "load" else f"the second's {_title(self.lead.measure)}"
        verb = "sustains" if self.lead.measure == "load" else "has"
        if not self.lead.told:
            apart = f": it {verb} {shown} {what}" if shown else ""
            return f"First and second cannot be told apart by {self.traffic.replications} replications{apart}."
        return f"The first {verb} {shown} {what}."

    @property
    def limits(self) -> list[str]:
        """What these figures do not say, a line each."""
        p, found = self.profile, []
        found.append(f"times are those of {p.describe()}: its own kernels, not those of llama.cpp or vLLM")
        found.append(
            f"on passes held out of its fit the profile errs by {p.held_out_error_median:.1%} in the median, by "
            f"{p.held_out_error_p95:.1%} at P95; that is not in the intervals"
        )
        if self.model != p.model:
            found.append(f"memory is that of {self.model}, step times are those of the profile's model, {p.model}")
        if self.memory is None:
            found.append("no memory was given, so that none was ruled out by it")
        size = f"{self.traffic.requests:,} {self.scenario.workload.count_key.replace('limit', 'requests')}"
        found.append(
            f"{self.traffic.note}; intervals of 95 % over these; runs of {size} begin with an empty server, and a "
            "queue that builds up more slowly than that is not seen"
        )
        if not self.traffic.scalable:
            found.append("everything arrives at once, so that there is no load to change")
        for f in self.best:
            for warning in dict.fromkeys(w for outcome in f.latencies for w in outcome.warnings):
                found.append(f"{f.candidate.label}: {warning}")
        return list(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds, sizes in bytes; what cannot be said is None."""
        lead = self.lead
        needs = self.traffic.needs
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "engine": self.engine,
            "load": self.load,
            "slo": {"text": self.slo.text, "bounds": [_bound(bound) for bound in self.slo.bounds]},
            "memory_bytes": self.memory,
            "model": self.model,
            "profile": {"name": self.profile.name, "model": self.profile.model, "described": self.profile.describe()},
            "traffic": {
                "requests": self.traffic.requests,
                "replications": self.traffic.replications,
                "note": self.traffic.note,
                "longest": needs.longest,
                "p99": needs.p99,
                "p95": needs.p95,
                "mean": needs.mean,
                "reuse": needs.reuse,
                "scalable": self.traffic.scalable,
            },
            "met": self.met,
            "conclusion": self.conclusion,
            "compared": self.compared,
            "lead": None if lead is None else {"measure": lead.measure, "told": lead.told, **_ends(lead.ratio)},
            "rule": RULE,
            "best": [self._finalist(place, f) for place, f in enumerate(self.best, 1)],
            "searched": {
                "settings": len(self.space.candidates),
                "tried": self.tried,
                "runs": self.runs,
                "missed_by": list(self.missed_by) if self.missed_by else None,
                "reasons": {reason: {"count": n, "means": REASONS[reason]} for reason, n in self.reasons.items()},
                "policies_left_out": {
                    name: {"reason": reason, "detail": detail}
                    for name, (reason, detail) in self.space.elsewhere.items()
                },
            },
            "limits": self.limits,
        }

    def plot(self) -> Figure:
        """The best few: how far from the bounds, and the largest loads."""
        from kvsim.reports.recommendation_plot import recommendation_figure

        return recommendation_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``recommendation.json``, ``recommendation.csv`` (``table``), ``candidates.csv``, ``recommendation.png``
        and a scenario ``best-1.toml`` and so on for each of the best; returns the files. Raises ``UserError``."""
        target = writable(folder)
        names = ["recommendation.json", "recommendation.csv", "candidates.csv", "recommendation.png"]
        written = [target / name for name in names]
        try:
            text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
            written[0].write_text(text + "\n", encoding="utf-8")
            self.table.to_csv(written[1], index=False)
            self.candidates.to_csv(written[2], index=False)
            self.plot().savefig(written[3], dpi=130)
            for place, f in enumerate(self.best, 1):
                written.append(target / f"best-{place}.toml")
                written[-1].write_text(self.scenario_of(f).to_toml(), encoding="utf-8")
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written

    def scenario_of(self, finalist: Finalist) -> Scenario:
        """What to run to see it again: the first replication at the load asked about."""
        return self.traffic.stretch(finalist.candidate.scenario, 0, 1.0, 1.0)[0]

    def _finalist(self, place: int, f: Finalist) -> dict[str, Any]:
        c, (bound, factor) = f.candidate, f.worst
        limits = {bound.measure: bound.limit for bound in self.slo.bounds}
        return {
            "place": place,
            "engine": c.home,
            "label": c.label,
            "verdict": f.verdict,
            "settings": c.settings,
            "command": c.command if c.flags else None,
            "flags": flags_dict(c.flags),
            "typed": typed(c.flags),
            "notes": c.notes(self.profile),
            "memory_bytes": c.memory_bytes,
            "measures": {m: {**_ends(i), "limit": limits.get(m)} for m, i in f.measures.items()},
            "worst": {"measure": bound.measure, "factor": _finite(factor)},
            "sustained_load": None if f.sustained is None else {**_ends(f.sustained), "at_least": f.at_least},
            "loads": list(f.loads),
            "scenario": f"best-{place}.toml",
        }

    def _sustains(self, f: Finalist) -> str:
        if not f.loads:
            return "there is no load to change"
        if f.sustained is None:
            return "in some replications it meets the service level at no load that was tried"
        if f.at_least:
            return f"sustains at least {f.sustained.value:.3g} x this load; no more than {_MOST_LOAD:.0f} x was tried"
        return f"sustains {spoken_load(f.sustained)} this load"

    def _fraction(self, f: Finalist) -> str:
        if not f.loads:
            return "there is no load to change"
        if f.sustained is None:
            return f"not even 1/{_MOST_LOAD:.0f} of this load would meet it in all replications"
        return f"it would be met at {spoken_load(f.sustained)} this load"

    def _nothing(self) -> str:
        found = next(iter(self.ruled_out.values()))
        return f"all {len(self.ruled_out):,} settings were ruled out: {REASONS[found.reason]} ({found.detail})"


def spoken(interval: Interval | None, share: bool = False) -> str:
    """A time or a share with its interval, for people."""
    if interval is None:
        return "unknown"
    if share:
        return f"{interval.value:.1%}"
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    if not math.isfinite(interval.high):
        return f"{interval.value * scale:.3g} {unit}"
    low, high = max(interval.low, 0.0) * scale, interval.high * scale
    return f"{interval.value * scale:.3g} {unit} ({low:.3g} to {high:.3g})"


def spoken_load(interval: Interval) -> str:
    """A multiple of the load with its interval, for people."""
    ends = f" ({interval.low:.2f} to {interval.high:.2f})" if math.isfinite(interval.high) else ""
    return f"{interval.value:.2f} x{ends}"


def _title(measure: str) -> str:
    if measure.endswith("_share"):
        return measure.removesuffix("_share")
    latency, statistic = measure.split("_")
    return f"{latency.upper()} {statistic if statistic == 'mean' else statistic.upper()}"


def _ratio(one: Any, two: Any) -> Interval:
    """Of what these are logarithms of, in pairs."""
    logs = paired(one, two)
    high = math.exp(logs.high) if logs.high < 700 else math.inf
    return Interval(math.exp(logs.value), math.exp(logs.low), high, logs.level, logs.n, logs.how)


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "measure": bound.measure,
        "limit": bound.limit,
        "strict": bound.strict,
        "text": bound.text or None,
        "asked": bool(bound.text),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends(interval: Interval) -> dict[str, float | None]:
    return {"value": _finite(interval.value), "low": _finite(interval.low), "high": _finite(interval.high)}
