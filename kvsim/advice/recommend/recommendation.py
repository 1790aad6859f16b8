"""The result of a recommendation: the best settings, their commands, and why all others were ruled out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.advice.memory.engine_flags import command_line, flags_dict
from kvsim.advice.memory.flag_effects import Effect, effects
from kvsim.advice.memory.ollama import OllamaSettings, ollama_settings
from kvsim.advice.recommend.advice import Advice
from kvsim.advice.recommend.candidates import NOW, REASONS, SearchSpace
from kvsim.advice.recommend.finalists import RULE, Finalist, RuledOut, TopTwo
from kvsim.advice.recommend.fleet import Fleet
from kvsim.advice.recommend.limits import limits_of
from kvsim.advice.recommend.spoken import figures, fleet_in_words, spoken, spoken_load, title
from kvsim.advice.recommend.trials import LOWEST_LOAD
from kvsim.costs.memory_settings import Engine
from kvsim.errors import counted
from kvsim.experiments.estimates import UNKNOWN, Interval, paired_difference
from kvsim.experiments.interval_text import plain
from kvsim.experiments.shared_warnings import share_warnings
from kvsim.model.engine_versions import LLAMACPP_B4666
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.summary import servers_behind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Recommendation(Advice):
    """The best settings for a workload, and why all others were ruled out."""

    space: SearchSpace
    best: tuple[Finalist, ...]
    """The finalists, best first."""
    ruled_out: dict[int, RuledOut]
    """Why each other setting was ruled out, by its number."""
    tried: int
    """Number of settings that were run."""
    runs: int
    interrupted: str = ""
    """Where the search was interrupted, so that the answer is provisional; empty if it was not."""
    fixed: tuple[Finalist, ...] = ()
    """What runs now, and the engine's defaults, judged like the best."""
    fleet: Fleet | None = None
    """How many servers meet the service level where one does not; None where one does, or it was not looked for."""
    offer: str = ""
    """What would sustain more and is not changed unasked, in a sentence; empty if nothing is known to."""

    @property
    def met(self) -> bool:
        """Whether the best setting meets the service level at the load asked about, at least by its means."""
        return bool(self.best) and self.best[0].verdict != "not"

    @cached_property
    def lead(self) -> TopTwo | None:
        """Paired comparison of the best with the second; None if there is no second."""
        if len(self.best) < 2:
            return None
        one, two = self.best[:2]
        if one.sustained and two.sustained:
            return TopTwo(paired_difference(np.log(one.loads), np.log(two.loads)).exp(), "load")
        measure = one.slo.asked[0].measure
        values = [[o.measures.get(measure) or 0.0 for o in each.outcomes] for each in (one, two)]
        if not np.array(values).all():
            return None
        return TopTwo(paired_difference(np.log(values[0]), np.log(values[1])).exp(), measure)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per finalist, best first.

        The columns are ``place``, ``verdict``, ``engine``, the settings, ``memory_bytes``, each bounded measure and
        ``sustained_load`` with ``_low`` and ``_high``, and ``flags``. Times are in seconds.
        """
        import pandas as pd

        rows = []
        for place, f in enumerate(self.best, 1):
            row: dict[str, Any] = {"place": place, "verdict": f.verdict, "engine": f.candidate.engine}
            row |= {**f.candidate.settings, "memory_bytes": f.candidate.memory_bytes}
            shown = {bound.measure: f.measures.get(bound.measure) for bound in self.slo.bounds}
            for measure, interval in {**shown, "sustained_load": f.sustained}.items():
                row |= (interval or UNKNOWN).columns(measure)
            rows.append({**row, "flags": command_line(f.candidate.flags)})
        return pd.DataFrame(rows)

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """One row per setting of the search space.

        The columns are its number, family, engine and settings, ``memory_bytes``, and either its ``place`` among the
        finalists or ``reason``, ``detail`` and ``factor`` (see ``RuledOut``).
        """
        import pandas as pd

        places = {f.candidate.number: place for place, f in enumerate(self.best, 1)}
        rows = []
        for c in self.space.candidates:
            why = self.ruled_out.get(c.number, RuledOut("", ""))
            head = {"number": c.number, "family": c.family, "engine": c.engine}
            tail = {"memory_bytes": c.memory_bytes, "place": places.get(c.number), **why._asdict()}
            rows.append({**head, **c.settings, **tail})
        return pd.DataFrame(rows).astype({"place": "Int64"})

    @cached_property
    def reasons(self) -> dict[str, int]:
        """Number of settings that were ruled out by reason, in the order of ``candidates.REASONS``."""
        counts = Counter(why.reason for why in self.ruled_out.values())
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    @property
    def missed_by(self) -> tuple[float, float] | None:
        """The smallest and largest factors by which settings missed the service level."""
        missed = [why.factor for why in self.ruled_out.values() if why.reason == "slo" and why.factor is not None]
        factors = [factor for factor in missed if factor > 1]
        return (min(factors), max(factors)) if factors else None

    @property
    def conclusion(self) -> str:
        """The recommendation in a sentence or two."""
        after = f"Interrupted {self.interrupted}, after {counted(self.runs, 'run')}. So far: "
        beyond = f"{self.traffic.beyond}. " if self.traffic.beyond else ""
        return f"{beyond}{after if self.interrupted else ''}{self._conclusion}"

    @property
    def _conclusion(self) -> str:
        if not self.best:
            why, n = next(iter(self.ruled_out.values())), len(self.ruled_out)
            ruled_out = f"all {n:,} settings were ruled out: {REASONS[why.reason]} ({why.detail})"
            return f"Nothing can be recommended: {ruled_out}."
        first = self.best[0]
        predicted = figures(first)
        command = f"{first.candidate.command} {command_line(first.candidate.flags)}".strip()
        if not first.candidate.flags:
            command = f"{first.candidate.label} (which no engine has)"
        cluster = first.candidate.scenario.cluster
        if cluster.size > 1:
            command += f" on each of {servers_behind(cluster.size, cluster.behind)}"
        if not self.met:
            bound, factor = first.worst
            times = f", by {factor:.2f} ×" if math.isfinite(factor) else ""
            missed = (
                "Arrivals outpace service" if factor <= 1 else f"It misses {bound.text or bound.measure} most{times}"
            )
            nearest = f"The nearest setting is {command}: predicted {predicted}"
            return f"Nothing meets {self.slo.text}. {nearest}. {missed}. {self._sustained_load(first)}."
        certainty = "" if first.verdict == "surely" else ", though this is not certain"
        return f"Run {command}: predicted {predicted}{certainty}. {self._sustained_load(first)}."

    @property
    def compared(self) -> str:
        """The best compared with the second, in a sentence; empty if there is no second."""
        if self.lead is None:
            return ""
        ratio = self.lead.ratio
        shown = (
            f"{ratio.value:.2f} × ({ratio.low:.2f} to {ratio.high:.2f}, paired)" if math.isfinite(ratio.high) else ""
        )
        what = "the load of the second" if self.lead.measure == "load" else f"the second's {title(self.lead.measure)}"
        verb = "sustains" if self.lead.measure == "load" else "has"
        if not self.lead.distinguishable:
            margin = f": the first {verb} {shown} {what}" if shown else ""
            n = len(self.best[0].outcomes)
            who = f"{n} replications" if n > 1 else "One replication"
            return f"{who} cannot distinguish the first from the second{margin}."
        return f"The first {verb} {shown} {what}."

    @property
    def fleet_in_words(self) -> str:
        """How many servers meet the service level, behind which router, together or apart; empty if none were looked
        for."""
        return "" if self.fleet is None else fleet_in_words(self.fleet)

    def _gain(self, fixed: Finalist) -> Interval | None:
        """How many times the load the best sustains that a fixed setting does; None where either sustains none."""
        if not self.best or not self.best[0].sustained or not fixed.sustained:
            return None
        return paired_difference(np.log(self.best[0].loads), np.log(fixed.loads)).exp()

    @property
    def gains(self) -> list[str]:
        """What the best settings bring beside those that run now and the defaults, in a sentence each."""
        lines = []
        for f in self.fixed:
            gain, name = self._gain(f), "what runs now" if f.candidate.family == NOW else f.candidate.family
            load = f.sustained
            if gain is not None and load is not None:
                more = (
                    f"the first sustains {spoken_load(gain)} as much" if gain.excludes(1) else "the first is no better"
                )
                lines.append(f"Beside {name}, which would sustain {self.load_in_words(load.value)}, {more}.")
            elif f.loads:
                subject = "What runs now" if f.candidate.family == NOW else name
                meets = f" would sustain {self.load_in_words(load.value)}" if load is not None else f": {_missed(f)}"
                lines.append(f"{subject}{meets}.")
        lines += [f"{c.family} cannot be tried: {c.detail}." for c in self.space.fixed if c.reason]
        return lines

    @property
    def limits(self) -> list[str]:
        """Limits of these predictions, one line each."""
        warnings = ((place, o.warnings) for place, f in enumerate(self.best, 1) for o in f.outcomes)
        return limits_of(self) + _by_place(warnings)

    @property
    def notes(self) -> list[str]:
        """What to read along with the finalists' settings, each remark once, with the places that it is about."""
        return _by_place((place, f.notes) for place, f in enumerate(self.best, 1))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; times in seconds, sizes in bytes, unknown values None."""
        return {
            **super().to_dict(),
            "basis": self.basis,
            "interrupted": self.interrupted or None,
            "met": self.met,
            "conclusion": self.conclusion,
            "compared": self.compared,
            "offer": self.offer,
            "fleet": None if self.fleet is None else self.fleet.to_dict(),
            "fleet_in_words": self.fleet_in_words,
            "lead": None if self.lead is None else self.lead.to_dict(),
            "rule": RULE,
            "best": [self._finalist(place, f) for place, f in enumerate(self.best, 1)],
            "fixed": [
                {
                    **self._finalist(0, f),
                    "scenario": None,
                    "name": f.candidate.family,
                    "gain": (gain := self._gain(f)) and gain.to_dict(),
                }
                for f in self.fixed
            ],
            "gains": self.gains,
            "searched": {
                "settings": len(self.space.candidates),
                "tried": self.tried,
                "runs": self.runs,
                "missed_by": list(self.missed_by) if self.missed_by else None,
                "reasons": {reason: {"count": n, "means": REASONS[reason]} for reason, n in self.reasons.items()},
                "policies_left_out": {
                    name: {"reason": reason, "detail": detail}
                    for name, (reason, detail) in self.space.policies_left_out.items()
                },
            },
            "limits": self.limits,
        }

    def effects(self, finalist: Finalist) -> tuple[Effect, ...]:
        """What each option of a finalist does to memory; none if no engine has the setting."""
        c = finalist.candidate
        engine: Engine = "vllm" if c.engine == "vllm" else "llamacpp"
        return effects(engine, c.flags, self.space.plan(c, self.memory)) if c.flags else ()

    def ollama(self, finalist: Finalist) -> OllamaSettings | None:
        """What to set for Ollama instead; None unless the finalist is of today's ``llama-server``."""
        c = finalist.candidate
        if c.engine != "llamacpp" or c.scenario.engine == LLAMACPP_B4666:
            return None
        return ollama_settings(c.flags, self.space.plan(c, self.memory), self.traffic.summary.longest)

    def plot(self) -> Figure:
        """Draw the finalists' distance from the bounds, and their largest loads."""
        from kvsim.reports.recommendation_plots import recommendation_figure

        return recommendation_figure(self.to_dict())

    @property
    def scenarios(self) -> dict[str, Scenario]:
        """A scenario for each finalist, ``best-1.toml`` and so on."""
        return {f"best-{place}.toml": self.scenario_of(f) for place, f in enumerate(self.best, 1)}

    def scenario_of(self, finalist: Finalist) -> Scenario:
        """Return a scenario that reproduces the finalist's first replication at the load asked about."""
        return self.traffic.part(finalist.candidate.scenario, 0, 1.0, 1.0)[0]

    def _finalist(self, place: int, f: Finalist) -> dict[str, Any]:
        c, (bound, factor) = f.candidate, f.worst
        limits = {bound.measure: bound.limit for bound in self.slo.bounds}
        return {
            "place": place,
            "engine": c.engine,
            "label": c.label,
            "verdict": f.verdict,
            "settings": c.settings,
            "command": c.command if c.flags else None,
            "flags": flags_dict(c.flags),
            "typed": command_line(c.flags),
            "effects": [effect.to_dict() for effect in self.effects(f)],
            "ollama": None if (ollama := self.ollama(f)) is None else ollama.to_dict(),
            "notes": f.notes,
            "memory_bytes": c.memory_bytes,
            "measures": {m: {**i.to_dict(), "limit": limits.get(m)} for m, i in f.measures.items()},
            "worst": {"measure": bound.measure, "factor": factor if math.isfinite(factor) else None},
            "sustained_load": None
            if f.sustained is None
            else {**f.sustained.to_dict(), "at_least": f.at_least, "promised": f.promised},
            "loads": list(f.loads),
            "scenario": f"best-{place}.toml",
        }

    def _spoken_load(self, load: Interval) -> str:
        """A multiple of the load with its interval; of a closed loop, its users first."""
        users, times = self.traffic.users, f"{spoken_load(load)} this load"
        return times if users is None else f"{counted(max(1, int(load.value * users)), 'user')}: {times}"

    def load_in_words(self, load: float) -> str:
        """A multiple of the load; of a closed loop, its users."""
        users = self.traffic.users
        times = f"{plain(load, 2)} × this load"
        return times if users is None else f"{counted(max(1, int(load * users)), 'user')} ({times})"

    def _sustained_load(self, f: Finalist) -> str:
        """At which load the best setting meets the service level, or would."""
        if not f.loads:
            return "No other load was searched" if self.traffic.scalable else "There is no load to change"
        if f.sustained is None and self.met:
            return "In some replications it meets the service level at no load that was tried"
        if f.sustained is None:
            not_even = "Not even" if max(f.loads) == 0 else "In some replications not even"
            return f"{not_even} 1/{1 / LOWEST_LOAD:.0f} of this load meets it"
        if not self.met:
            return f"It would meet it at {self._spoken_load(f.sustained)}"
        if f.at_least:
            return (
                f"It should sustain at least {self.load_in_words(f.sustained.value)}; the largest that was tried is "
                f"{self.load_in_words(f.largest_load)}"
            )
        average = self._spoken_load(f.sustained)
        if f.promised is None:
            return f"It should sustain {average}"
        return f"It should sustain {self.load_in_words(f.promised)} in 95 of 100 such runs; on average {average}"


def _missed(f: Finalist) -> str:
    """Why a setting sustains no load."""
    outcome = next((o for o in f.outcomes if o.error), None)
    if outcome is not None:
        return outcome.error
    bound, factor = f.worst
    if not bound.limit and (share := f.measures.get(bound.measure)):
        return (
            f"{spoken(share, share=True)} of the requests {title(bound.measure)} at this load, and some at every load"
        )
    return f"{bound.text or bound.measure} is missed at every load, by {factor:.3g} × at this one"


def _by_place(lines: Iterable[tuple[int, Sequence[str]]]) -> list[str]:
    """Each line once, with the places that have it."""
    shared = share_warnings((str(place), each) for place, each in lines)
    return [f"place{'s' * (len(s.sources) > 1)} {', '.join(s.sources)}: {s.text}" for s in shared]
