"""Several devices compared: which of them meets a service level, up to which load, and at what price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.advice.memory.engine_flags import command_line, flags_dict
from kvsim.advice.recommend.advice import Advice
from kvsim.advice.recommend.finalists import Finalist, Verdict
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.places import Place
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.trials import TrialOutcome
from kvsim.costs.devices import device_named
from kvsim.errors import counted
from kvsim.experiments.estimates import UNKNOWN, Interval
from kvsim.experiments.interval_text import plain
from kvsim.experiments.traffic import OfferedLoad
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_HOUR_S = 3600.0
_MILLION = 1e6
_NOT_REACHED = "interrupted before its turn"


@dataclass(frozen=True)
class DeviceAnswer:
    """What was found out about one place."""

    place: Place
    answer: Recommendation | MemoryAnswer | None
    """None if nothing could be tried."""
    no_verdict: str
    """Why nothing is said about the service level; empty if it is."""
    price_of_one: float | None = None
    """Price of an hour of one device; None if not given."""
    measured_largest: OfferedLoad | None = None
    """What runs served per second at the largest load, where only runs tell that: in a closed loop."""

    @property
    def price_per_hour(self) -> float | None:
        """Price of an hour of all devices that share the model; None if not given."""
        return None if self.price_of_one is None else self.price_of_one * self.place.tensor_parallel

    @property
    def replicas(self) -> int | None:
        """Servers that meet the service level at the load asked about; None if that is not known of any number."""
        return 1 if self.met else None if self.several is None else self.several[0]

    @property
    def several(self) -> tuple[int, str] | None:
        """The number of servers where one does not suffice, and what they are behind, or do, in words."""
        fleet = None if self.recommendation is None else self.recommendation.fleet
        return None if fleet is None else fleet.needed

    @property
    def price_in_all(self) -> float | None:
        """Price of an hour of so many servers; None if either is not known."""
        if self.replicas is None or self.price_per_hour is None:
            return None
        return self.replicas * self.price_per_hour

    @property
    def recommendation(self) -> Recommendation | None:
        """The answer, if it is one with times."""
        return self.answer if isinstance(self.answer, Recommendation) else None

    @property
    def best(self) -> Finalist | None:
        """The best setting; None without a verdict, and if every setting was ruled out without a run at length."""
        found = self.recommendation
        return found.best[0] if found is not None and found.best else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the service level is met at the load asked about; None if that is unknown."""
        if self.recommendation is None:
            return None
        return "not" if self.best is None else self.best.verdict

    @property
    def met(self) -> bool | None:
        """Whether it is met, at least by the means; None if that is unknown."""
        return None if self.verdict is None else self.verdict != "not"

    @property
    def load(self) -> float | None:
        """The largest load at which every replication meets the service level; None if there is none.

        It is a multiple of the load asked about. Replications differ in their traffic, windows of a trace most, and the
        whole has its worst part in it.
        """
        return None if self.best is None or self.mean_load is None else min(self.best.loads)

    @property
    def mean_load(self) -> Interval | None:
        """The mean of the replications' largest loads; None if there is none."""
        return None if self.best is None else self.best.sustained

    @property
    def at_least(self) -> bool:
        """Whether every replication meets it at the largest load that was tried, so that it may be more."""
        return self.load is not None and self.best is not None and self.load >= self.best.largest_load

    @cached_property
    def served(self) -> OfferedLoad | None:
        """What is served per second at the load asked about; None unless it meets the service level there."""
        if not self.met or self.best is None or self.answer is None:
            return None
        if self.answer.traffic.offered is not None:
            return self.answer.traffic.offered
        return mean_rates(self.best.outcomes)

    @property
    def largest(self) -> OfferedLoad | None:
        """What is served per second at the largest load; None if there is none or that is unknown."""
        if self.load is None or self.answer is None:
            return None
        offered = self.answer.traffic.offered
        if offered is None:
            return self.measured_largest
        return OfferedLoad(offered.requests_per_s * self.load, offered.output_tokens_per_s * self.load)

    @property
    def cost(self) -> float | None:
        """Price of a million output tokens at the load asked about; None if not met there, or without a price."""
        return self._cost(self.served)

    @property
    def cost_at_largest(self) -> float | None:
        """Price of a million output tokens at the largest load; None if there is none, or without a price."""
        return self._cost(self.largest)

    def _cost(self, served: OfferedLoad | None) -> float | None:
        """Price of a million output tokens where so much is served."""
        if served is None or self.price_per_hour is None:
            return None
        return self.price_per_hour / _HOUR_S / served.output_tokens_per_s * _MILLION


@dataclass(frozen=True, kw_only=True)
class DeviceComparison(Advice):
    """Which of some devices meets a service level, up to which load, and what a million output tokens cost."""

    answers: tuple[DeviceAnswer, ...]
    """One for each place that was reached before an interrupt."""
    asked: tuple[Place, ...]
    """The places asked about."""

    @cached_property
    def ranked(self) -> tuple[DeviceAnswer, ...]:
        """All devices: those that meet the service level first, by the largest load; those without a verdict last."""
        reached = {answer.place for answer in self.answers}
        missing = [DeviceAnswer(place, None, _NOT_REACHED) for place in self.asked if place not in reached]
        return tuple(sorted((*self.answers, *missing), key=_rank))

    @property
    def met(self) -> bool | None:
        """Whether a device meets the service level at the load asked about; None if no device has a verdict."""
        verdicts = [answer.met for answer in self.answers if answer.met is not None]
        return any(verdicts) if verdicts else None

    @property
    def interrupted(self) -> str:
        """Where the search was interrupted, so that the answer is provisional; empty if it was not."""
        for answer in self.answers:
            if answer.recommendation is not None and answer.recommendation.interrupted:
                return f"{self.name(answer)}: {answer.recommendation.interrupted}"
        return f"before {self.asked[len(self.answers)].name(self.asked)}" if len(self.answers) < len(self.asked) else ""

    @property
    def bases(self) -> list[str]:
        """What the times rest on, one line for each place that has any."""
        return list(dict.fromkeys(found.basis for _, found in self._with_times))

    @property
    def conclusion(self) -> str:
        """Which devices meet the service level, up to which load, and what a million output tokens cost there."""
        costs = [(answer.cost_at_largest, answer) for answer in self.ranked]
        known = sorted(((cost, answer) for cost, answer in costs if cost is not None), key=lambda pair: pair[0])
        listed = ", ".join(f"{'at most ' * a.at_least}{plain(cost, 3)} on {self.name(a)}" for cost, a in known)
        provisional = f"Interrupted, {self.interrupted}. So far: " if self.interrupted else ""
        priced = f" At the largest load, a million output tokens cost {listed}." if listed else ""
        return f"{provisional}{'; '.join(self._clauses)}.{self._several}{priced}"

    @property
    def _several(self) -> str:
        """How many servers the load takes where one does not suffice, in a sentence, the cheapest first."""
        needed = [answer for answer in self.ranked if answer.replicas is not None]
        if all(answer.replicas == 1 for answer in needed):
            return ""
        needed.sort(key=lambda answer: answer.price_in_all or 0.0)
        said = []
        for answer in needed:
            price = "" if answer.price_in_all is None else f" ({plain(answer.price_in_all, 3)} an hour)"
            n, how = answer.several or (1, "")
            said.append(f"{counted(n, 'server')} of {self.name(answer)}{how}{price}")
        return f" This load takes {' or '.join(said)}."

    @property
    def _clauses(self) -> Iterator[str]:
        """What is said of each device."""
        if self.met is None:
            names = "; ".join(map(self.name, self.ranked))
            yield f"Whether {self.slo.text} can be met is unknown: {names} have no verdict"
            return
        first, *others = self.ranked
        reach = _reach(first) if self.traffic.scalable else ""
        if first.met:
            verb = "meets" if first.verdict == "surely" else "probably meets"
            yield f"{self.name(first)} {verb} {self.slo.text} at this load{f', and {reach}' if reach else ''}"
        else:
            where = f": {self.name(first)} meets it {reach}" if reach else ""
            yield f"Nothing meets {self.slo.text} at this load{where}"
        for answer in others:
            yield f"{self.name(answer)} {_further(answer, _reach(answer) if self.traffic.scalable else '')}"

    @property
    def limits(self) -> list[str]:
        """Limits of these figures, one line each, with the devices that they are about unless it is all of them."""
        by_line: dict[str, list[str]] = {}
        for answer, found in self._with_times:
            for line in dict.fromkeys((*found.notes, *found.limits)):
                by_line.setdefault(line, []).append(self.name(answer))
        lines = [
            line if len(names) == len(self._with_times) else f"{'; '.join(names)}: {line}"
            for line, names in by_line.items()
        ]
        if any(answer.price_per_hour is not None for answer in self.answers):
            come = "arrive" if self.traffic.offered is not None else "are served"
            lines.append(
                "price of a million output tokens: that of all devices that share the model, divided by the output "
                f"tokens that {come}; work on prompts is included"
            )
        return lines

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per place, in the order of ``ranked``.

        The columns are ``device``, ``model``, ``tensor_parallel``, ``weights``, ``kv``, ``verdict``, ``no_verdict``,
        ``load`` (in every run), ``mean_load`` and each bounded measure at the load asked about, both with ``_low`` and
        ``_high``, ``requests_per_s`` and ``cost_per_million`` at the load asked about and ``_at_largest``, ``replicas``
        that meet it and ``price_in_all`` of theirs, ``price_per_hour`` of one server, and the best settings. Times are
        in seconds.
        """
        import pandas as pd

        return pd.DataFrame([self._row(answer) for answer in self.ranked])

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """The settings of all devices, as in ``Recommendation.candidates``, after a column ``device``."""
        import pandas as pd

        found = [each.candidates.assign(device=self.name(answer)) for answer, each in self._with_times]
        if not found:
            return pd.DataFrame({"device": []})
        table = pd.concat(found, ignore_index=True)
        return table[["device", *(column for column in table.columns if column != "device")]]

    @property
    def _with_times(self) -> list[tuple[DeviceAnswer, Recommendation]]:
        pairs = [(answer, answer.recommendation) for answer in self.ranked]
        return [(answer, found) for answer, found in pairs if found is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; times in seconds, sizes in bytes, unknown values None."""
        return {
            **super().to_dict(),
            "interrupted": self.interrupted or None,
            "met": self.met,
            "bases": self.bases,
            "conclusion": self.conclusion,
            "devices": [self._device(answer) for answer in self.ranked],
            "limits": self.limits,
        }

    def plot(self) -> Figure:
        """Draw the largest load of each device and, where prices were given, what a million output tokens cost."""
        from kvsim.reports.recommendation_plots import device_comparison_figure

        return device_comparison_figure(self.to_dict())

    @property
    def scenarios(self) -> dict[str, Scenario]:
        """The best scenario of each device, ``best-rtx4090.toml`` and so on."""
        return {
            a.place.file(self.asked): each.scenario_of(a.best) for a, each in self._with_times if a.best is not None
        }

    def name(self, answer: DeviceAnswer) -> str:
        """What a place is called beside the others."""
        return answer.place.name(self.asked)

    @staticmethod
    def _place(answer: DeviceAnswer) -> dict[str, Any]:
        """What serves, as tables and the object of ``--json`` have it."""
        place = answer.place
        served = {"device": place.device, "model": memory_shape(place.model).name}
        return {**served, "tensor_parallel": place.tensor_parallel, "weights": place.weights, "kv": place.kv}

    def _device(self, answer: DeviceAnswer) -> dict[str, Any]:
        best, served, largest = answer.best, answer.served, answer.largest
        flags = () if best is None else best.candidate.flags
        return {
            **self._place(answer),
            "name": self.name(answer),
            "title": device_named(answer.place.device).title,
            "met": answer.met,
            "verdict": answer.verdict,
            "no_verdict": answer.no_verdict or None,
            "load": answer.load,
            "load_at_least": answer.at_least,
            "mean_load": None if answer.mean_load is None else answer.mean_load.to_dict(),
            "served": None if served is None else asdict(served),
            "served_at_largest": None if largest is None else asdict(largest),
            "price_per_hour": answer.price_per_hour,
            "replicas": answer.replicas,
            "price_in_all": answer.price_in_all,
            "cost_per_million": answer.cost,
            "cost_per_million_at_largest": answer.cost_at_largest,
            "command": best.candidate.command if best is not None and flags else None,
            "flags": flags_dict(flags),
            "typed": command_line(flags),
            "scenario": None if best is None else answer.place.file(self.asked),
            "answer": None if answer.answer is None else answer.answer.to_dict(),
        }

    def _row(self, answer: DeviceAnswer) -> dict[str, Any]:
        best, served, largest = answer.best, answer.served, answer.largest
        row = self._place(answer)
        row |= {"verdict": answer.verdict, "no_verdict": answer.no_verdict, "load": answer.load}
        intervals = {"mean_load": answer.mean_load}
        measures = {} if best is None else best.measures
        intervals |= {bound.measure: measures.get(bound.measure) for bound in self.slo.asked}
        for name, interval in intervals.items():
            row |= (interval or UNKNOWN).columns(name)
        row |= {"requests_per_s": served and served.requests_per_s}
        row |= {"requests_per_s_at_largest": largest and largest.requests_per_s}
        row |= {"replicas": answer.replicas, "price_in_all": answer.price_in_all}
        row |= {"price_per_hour": answer.price_per_hour, "cost_per_million": answer.cost}
        row |= {"cost_per_million_at_largest": answer.cost_at_largest}
        return row | ({} if best is None else {**best.candidate.settings, "flags": command_line(best.candidate.flags)})


def mean_rates(outcomes: Iterable[TrialOutcome]) -> OfferedLoad | None:
    """What was served per second, on average over some runs; None if that is unknown, or without a run."""
    measures = [outcome.measures for outcome in outcomes]
    rates = np.array([(m.get("requests_per_s"), m.get("throughput_tokens_per_s")) for m in measures], dtype=float)
    if not rates.size or not (rates > 0).all():
        return None
    requests_per_s, tokens_per_s = rates.mean(axis=0).tolist()
    return OfferedLoad(requests_per_s, tokens_per_s)


def _rank(answer: DeviceAnswer) -> tuple[int, float, float]:
    """Sort key: whether the service level is met, then the largest load in every run, then on average."""
    mean = 0.0 if answer.mean_load is None else answer.mean_load.value
    return {True: 0, False: 1, None: 2}[answer.met], -(answer.load or 0.0), -mean


def _reach(answer: DeviceAnswer) -> str:
    """Up to which load the service level is met, in words."""
    every = "in every run " if answer.best is not None and len(answer.best.loads) > 1 else ""
    if answer.load is None or answer.mean_load is None:
        return f"{every}at no load that was tried"
    load, mean = plain(answer.load, 2), plain(answer.mean_load.value, 2)
    average = f" ({mean} on average)" if mean != load else ""
    return f"{every}up to {'at least ' * answer.at_least}{load} times the load{average}"


def _further(answer: DeviceAnswer, reach: str) -> str:
    """What is said of a device after the first."""
    if answer.met is None:
        return "has no verdict"
    verb = {"surely": "meets it too", "likely": "probably meets it"}.get(answer.verdict or "", "does not meet it")
    if not reach or (answer.load is None and not answer.met):
        return verb
    return f"{verb}, {reach}" if answer.met else f"{verb}, but does {reach}"
