"""Which policy and settings serve this traffic on this machine: many are tried briefly, few at length.

The search halves successively (Jamieson, Talwalkar, AISTATS 2016), with budgets that count runs and requests, never
seconds. All settings see the same requests.

1. Screen: a sample of the settings serves a short stretch at the load asked about. Those that meet the service level
   serve it at twice the load, and so on, until no more than a dozen do; where the others fell is found to a quarter
   of a doubling. Then what differs in one step from the best few is tried likewise.
2. The best dozen serve a longer stretch in three replications, and for each the largest load that meets the service
   level is found in one of them.
3. The best four serve the longest stretch in several replications, others than those before where there are any; the
   largest load is found in each by bisection of its logarithm. They are ranked by ``recommendation.rank``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvsim.advice.candidates import Candidate, Home, Space, model_shape, space
from kvsim.advice.recommendation import Fate, Finalist, Recommendation, rank
from kvsim.advice.slo import Slo, read_slo
from kvsim.advice.trials import MOST_DOUBLINGS, Make, Outcome, Stretch, Trial
from kvsim.costs.profile import load_profile
from kvsim.costs.shipped import is_shipped
from kvsim.errors import UserError
from kvsim.experiments.traffic import Traffic, read_traffic
from kvsim.experiments.workers import each
from kvsim.model.storage_types import parse_size
from kvsim.scenario.scenario import Scenario, load_scenario
from workloads import sniff

RecommendProgress = Callable[[int, int, int], None]
"""Called with the number of runs made, of runs that there will be (an estimate), and of those that could not end."""

_TOGETHER = 4
"""Runs that are handed to a worker at a time."""
_FINE = 0.25
"""Of a doubling of the load: how finely the first stage tells settings apart."""
_BISECTION = 8
"""Runs that finding a largest load takes, about."""


class Budget(NamedTuple):
    """How much is tried; counts of settings, runs and steps, so that the result does not depend on how fast it goes."""

    screened: int = 96
    """Settings in the sample."""
    neighbours: int = 36
    """Settings tried beside the best of them."""
    kept: int = 12
    """Settings in the second stage."""
    best: int = 4
    """Settings in the last."""
    replications: int = 5
    """In the last stage; there are three in the second, of a short trace fewer."""
    steps: int = 5
    """Halvings of a doubling of the load, in the last stage."""
    short: float = 0.25
    """Share of the requests in the first stage."""
    long: float = 0.5
    """Share of them in the second."""
    fewest: int = 100
    """Requests in a stretch at least, if there are so many."""


class _Standing(NamedTuple):
    """How far a setting came on the ladder of loads."""

    met: float
    """The largest load that it has met, as a power of 2; -1: none."""
    tried: float
    """The smallest that it has missed, or the largest that was tried."""
    factor: float
    """By which it missed, or met, that one."""
    outcome: Outcome

    @property
    def key(self) -> tuple[float, float]:
        """The smaller, the better; who has met all loads is not told by how."""
        return -self.met, self.factor if self.met < MOST_DOUBLINGS else 0.0


def recommend(
    source: str | Path | Scenario | None = None,
    *,
    slo: str,
    trace: str | Path | None = None,
    profile: str | None = None,
    memory: int | str | None = None,
    model: str | None = None,
    weights: str | None = None,
    engine: str = "both",
    load: float = 1.0,
    seed: int | None = None,
    requests: int | None = None,
    workers: int | None = None,
    progress: RecommendProgress | None = None,
    budget: Budget = Budget(),  # noqa: B008  (immutable)
) -> Recommendation:
    """Recommend settings for a scenario's workload, or for a trace file's.

    ``slo``: bounds such as ``ttft_p95<1s,tpot_p95<80ms`` (``slo.read_slo``). ``memory``: bytes that there are for
    weights, cache and buffers, or a text such as 8GB; by default nothing is ruled out by memory. ``model``: whose
    memory is reckoned, if not the scenario's; times are those of the profile's model in any case. ``engine``:
    ``llamacpp``, ``vllm``, ``both``, or ``any``, which has layouts of no engine, too. ``load``: times the workload's
    own. ``requests``: in the longest runs (of sessions, conversations; by default 400 at most). ``workers``: processes,
    by default one for each processor; the result is the same. Raises ``UserError`` and ``WorkloadError``.
    """
    if (source is None) == (trace is None):
        raise UserError("recommend: give either a scenario or a trace")
    if not 1e-6 <= load <= 1e6:
        raise UserError(f"--load is {load}; a number from 0.000001 to 1000000 is accepted")
    for name, value in (("--requests", requests), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; at least 1 is accepted")
    asked = read_slo(slo)
    room = parse_size(memory) if isinstance(memory, str) else memory
    if room is not None and room < 1:
        raise UserError(f"--memory is {room}; at least one byte is expected")
    base = _of_trace(trace) if trace is not None else load_scenario(source)  # type: ignore[arg-type]
    changes: dict[str, object] = {} if seed is None else {"seed": seed}
    if profile is not None:
        own_file = not is_shipped(profile) and "\0" not in profile and Path(profile).is_file()
        changes["machine__profile"] = str(Path(profile).resolve()) if own_file else profile
    base = load_scenario(base, **changes)
    measured = load_profile(base.machine.profile, base.folder)
    # A trace says nothing of a model.
    shape = model_shape(model or (measured.model if trace is not None else base.model.name))
    traffic = read_traffic(base, budget.replications, requests, load)
    tolerant = any(bound.is_share and bound.limit > 0 for bound in asked.bounds)
    choices = space(traffic.scenario, traffic.needs, engine, measured, shape, room, weights=weights, tolerant=tolerant)
    search = _Search(traffic, asked, choices, budget, workers, progress)
    best = search.run()
    return Recommendation(
        scenario=traffic.scenario,
        slo=asked,
        engine=engine,
        load=load,
        memory=room,
        model=shape.name,
        profile=measured,
        traffic=traffic,
        space=choices,
        best=tuple(rank(best)),
        fates=search.fates,
        tried=len(search.tried),
        runs=search.runs,
    )


def _of_trace(trace: str | Path) -> Scenario:
    """A scenario of a trace, whose kind is found by how it begins. Raises ``UserError`` and ``WorkloadError``."""
    path = Path(trace)
    kind = sniff(path)
    name = "".join(c if c.isalnum() or c in "_+=@-" else "_" for c in path.name.split(".")[0])[:100].lstrip("_.+=@-")
    return load_scenario({"name": name or "trace", "workload": {"kind": kind, "path": str(path.resolve())}})


@dataclass
class _Search:
    """Makes the runs, and remembers why each setting was ruled out."""

    traffic: Traffic
    slo: Slo
    space: Space
    budget: Budget
    workers: int | None
    progress: RecommendProgress | None
    fates: dict[int, Fate] = field(default_factory=dict)
    """Of each setting that was ruled out, by its number."""
    tried: set[int] = field(default_factory=set)
    runs: int = 0
    _stuck: int = 0
    _later: int = 0
    """Runs that later stages will take, about."""

    def run(self) -> list[Finalist]:
        """The settings that are left, in no order."""
        b = self.budget
        for c in self.space.candidates:
            if c.reason:
                self.fates[c.number] = Fate(c.reason, c.detail)
        self._later = b.neighbours * 2 + b.kept * (3 + _BISECTION) + b.best * b.replications * (1 + _BISECTION)
        dozen = self._screen()
        self._later = b.best * b.replications * (1 + _BISECTION)
        few = self._longer(dozen)
        self._later = 0
        return self._finals(few)

    # Stage 1

    def _screen(self) -> list[Candidate]:
        sample = self.space.sample(self.budget.screened, self.traffic.scenario.seed)
        standing: dict[int, _Standing] = {}
        top = self._climb(sample, standing, None)
        self._refine(sample, standing)
        by_number = {c.number: c for c in self.space.candidates}
        mixed_step: dict[int, Candidate] = {}
        for number in sorted(standing, key=lambda n: (standing[n].key, by_number[n].memory_bytes, n)):
            for c in self.space.neighbours(by_number[number]):
                if c.number not in standing and len(mixed_step) < self.budget.neighbours:
                    mixed_step[c.number] = c
        self._later -= self.budget.neighbours * 2
        self._climb(list(mixed_step.values()), standing, top)
        self._refine([by_number[n] for n in standing], standing)
        self.tried = set(standing)
        for c in self.space.candidates:
            if not c.reason and c.number not in standing:
                self.fates[c.number] = Fate("untried", "")
        tried = [by_number[n] for n in standing]
        ordered = sorted(tried, key=lambda c: (standing[c.number].key, -c.width, c.memory_bytes, c.number))
        dozen = _with_each_home(_unlike(ordered), self.budget.kept)
        chosen = {c.number for c in dozen}
        for c in ordered:
            if c.number not in chosen:
                self.fates[c.number] = self._fate(standing[c.number])
        return dozen

    def _climb(self, candidates: Sequence[Candidate], standing: dict[int, _Standing], top: int | None) -> int:
        """Try them at ever higher loads, while they meet the service level; the last load that was tried, as a power
        of 2. Without ``top`` it ends where no more than the second stage takes are left."""
        level, alive, scout = 0, list(candidates), self.traffic.scouts[0]
        while alive:
            share = self._share(self.budget.short)
            found = self._make([Trial(c.number, scout, c.scenario, share, 2.0**level) for c in alive])
            latencies = {trial.number: outcome for trial, outcome in found}
            passing = []
            for c in alive:
                outcome = latencies[c.number]
                met = outcome.met(self.slo)
                standing[c.number] = _Standing(level - (not met), level, outcome.factor(self.slo), outcome)
                if met:
                    passing.append(c)
            last = MOST_DOUBLINGS if top is None else top
            if level >= last or not self.traffic.scalable or (top is None and len(passing) <= self.budget.kept):
                break
            level, alive = level + 1, passing
        return level

    def _refine(self, candidates: Sequence[Candidate], standing: dict[int, _Standing]) -> None:
        """Halve the doubling in which they fell, twice, for those who came as far as the best of their engine, or fell
        a doubling before: by how much a load too large is missed says little of the largest that is met."""
        homes = {c.home for c in candidates}
        best = {h: max(standing[c.number].met for c in candidates if c.home == h) for h in homes}
        near = [c for c in candidates if standing[c.number].met >= max(best[c.home] - 1, 0)]
        while wide := [c for c in near if standing[c.number].tried - standing[c.number].met > _FINE]:
            powers = {c.number: (standing[c.number].met + standing[c.number].tried) / 2 for c in wide}
            share, scout = self._share(self.budget.short), self.traffic.scouts[0]
            for trial, outcome in self._make(
                [Trial(c.number, scout, c.scenario, share, 2.0 ** powers[c.number]) for c in wide]
            ):
                before, power = standing[trial.number], powers[trial.number]
                standing[trial.number] = (
                    before._replace(met=power)
                    if outcome.met(self.slo)
                    else _Standing(before.met, power, outcome.factor(self.slo), outcome)
                )

    def _fate(self, standing: _Standing) -> Fate:
        if standing.met < 0:
            return _miss(standing.outcome, self.slo)
        if standing.outcome.met(self.slo):
            return Fate("dominated", f"meets it at {2**standing.met:.3g} x the load, as more than enough others do")
        return Fate("dominated", f"at {2**standing.tried:.3g} x the load: {_missed(standing.outcome, self.slo)}")

    # Stage 2

    def _longer(self, dozen: Sequence[Candidate]) -> list[Candidate]:
        share = self._share(self.budget.long)
        several = self.traffic.scouts
        found = self._make([Trial(c.number, r, c.scenario, share, 1.0) for c in dozen for r in several])
        trials = [Trial(c.number, several[0], c.scenario, share, 1.0) for c in dozen]
        loads = self._stretch(trials, self.budget.steps - 2)
        keys = {}
        for c in dozen:
            latencies = [outcome for trial, outcome in found if trial.number == c.number]
            met, worst = all(o.met(self.slo) for o in latencies), max(o.factor(self.slo) for o in latencies)
            load = loads.get((c.number, several[0]), 0.0)
            keys[c.number] = (not met, -load, 0.0 if load else worst, -c.width, c.memory_bytes, c.number)
        ordered = sorted(dozen, key=lambda c: keys[c.number])
        few = _with_each_home(_unlike(ordered), self.budget.best)
        for c in ordered:
            if c not in few:
                missed, load, worst = keys[c.number][:3]
                reach = f"sustains {-load:.2f} x the load in one replication; others more" if load else ""
                if missed:
                    latencies = [o for trial, o in found if trial.number == c.number and not o.met(self.slo)]
                    self.fates[c.number] = _miss(max(latencies, key=lambda o: o.factor(self.slo)), self.slo)
                else:
                    self.fates[c.number] = Fate("dominated", reach or f"worst bound at {worst:.2f} of its limit")
        return few

    # Stage 3

    def _finals(self, few: Sequence[Candidate]) -> list[Finalist]:
        all_of_them = range(self.traffic.replications)
        found = self._make([Trial(c.number, r, c.scenario, 1.0, 1.0) for c in few for r in all_of_them])
        loads = self._stretch(
            [Trial(c.number, r, c.scenario, 1.0, 1.0) for c in few for r in all_of_them], self.budget.steps
        )
        latencies = {(trial.number, trial.replication): outcome for trial, outcome in found}
        return [
            Finalist(
                c,
                self.slo,
                tuple(latencies[c.number, r] for r in all_of_them),
                tuple(loads[c.number, r] for r in all_of_them) if loads else (),
            )
            for c in few
        ]

    # Runs

    def _share(self, share: float) -> float:
        """So much of the requests, unless they would be too few."""
        return min(1.0, max(share, self.budget.fewest / self.traffic.requests))

    def _make(self, trials: Sequence[Trial]) -> list[tuple[Trial, Outcome]]:
        """By number and replication, whichever ended first."""
        jobs = [trials[i : i + _TOGETHER] for i in range(0, len(trials), _TOGETHER)]
        found: list[tuple[Trial, Outcome]] = []
        for made in each(Make(self.traffic), jobs, self.workers):
            found += made
            self._stuck += sum(bool(outcome.error) for _, outcome in made)
            self._tell(len(made), len(trials) - len(found))
        return sorted(found, key=lambda each: (each[0].number, each[0].replication))

    def _stretch(self, trials: Sequence[Trial], steps: int) -> dict[tuple[int, int], float]:
        """The largest load of each, by number and replication; nothing where there is no load to change."""
        if not self.traffic.scalable:
            return {}
        found = {}
        for trial, load, runs in each(Stretch(self.traffic, self.slo, max(steps, 0)), trials, self.workers):
            found[trial.number, trial.replication] = load
            self._tell(runs, (len(trials) - len(found)) * _BISECTION)
        return found

    def _tell(self, runs: int, left: int) -> None:
        self.runs += runs
        if self.progress is not None:
            self.progress(self.runs, self.runs + left + self._later, self._stuck)


def _unlike(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The first of each policy with so many cells and slots, then those that differ from them in less."""
    first: dict[tuple[str, int, int], Candidate] = {}
    for c in ordered:
        first.setdefault((c.family, c.scenario.cache.cells, c.scenario.server.slots), c)
    return [*first.values(), *(c for c in ordered if c not in first.values())]


def _with_each_home(ordered: Sequence[Candidate], most: int) -> list[Candidate]:
    """The first so many; of each engine its first, an equal share of them at least, as far as it has so many."""
    homes: dict[Home, list[Candidate]] = {}
    for c in ordered:
        homes.setdefault(c.home, []).append(c)
    share = most // max(len(homes), 1)
    sure = [c for members in homes.values() for c in members[:share]]
    rest = [c for c in ordered if c not in sure][: most - len(sure)]
    return [c for c in ordered if c in sure or c in rest]


def _miss(outcome: Outcome, slo: Slo) -> Fate:
    """Of a setting that does not meet the service level at the load asked about."""
    failing = bool(outcome.error) or (outcome.factor(slo) > 1 and slo.worst(outcome.measures)[0].is_share)
    factor = outcome.factor(slo)
    return Fate("fails" if failing else "slo", _missed(outcome, slo), factor if math.isfinite(factor) else None)


def _missed(outcome: Outcome, slo: Slo) -> str:
    """By how much, in words."""
    if outcome.error:
        return outcome.error
    bound, factor = slo.worst(outcome.measures)
    name = bound.text or bound.measure
    if factor <= 1 and not outcome.settled:
        return "arrivals outpace service"
    if bound.is_share:
        return f"{bound.measure} {outcome.measures[bound.measure]:.1%}"
    return f"{name} by {factor:.2f} x" if math.isfinite(factor) else f"{name}: nothing completed"
