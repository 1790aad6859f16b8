"""The search for the best settings: many are tried briefly, a few at length.

It is a successive halving (Jamieson, Talwalkar, AISTATS 2016). Its budgets count runs and requests, never seconds, and
all settings see the same requests.

1. Screening: a sample of the settings serves a small part of the traffic at the load asked about. Those that meet the
   service level serve it at twice the load, and so on, until at most a dozen do; the largest load of the others is
   found to a quarter of a doubling. Then the neighbours of the best few are tried in the same way, and theirs, as
   long as there are new ones and not too many were tried.
2. The best dozen serve a larger part in three replications, and the largest load that meets the service level is found
   for each of them in one replication.
3. The best four serve all of it in several replications, different from the earlier ones where possible; the largest
   load in each is found by bisection of its logarithm. They are ranked by ``recommendation.rank``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsim.advice.recommend.candidates import Candidate, SearchSpace
from kvsim.advice.recommend.families import TargetEngine
from kvsim.advice.recommend.finalists import Finalist, RuledOut, describe_miss, missed_slo, rank
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search_space import build_search_space
from kvsim.advice.recommend.slo import Slo
from kvsim.advice.recommend.trials import (
    MOST_DOUBLINGS,
    FindLargestLoad,
    LoadSearch,
    RunTrials,
    TrialOutcome,
    TrialRun,
    most_doublings,
)
from kvsim.experiments.traffic import Traffic
from kvsim.experiments.workers import Done, Job, map_unordered, preload
from kvsim.model.cache_groups import MemoryShape
from kvsim.scenario.scenario import Scenario

RecommendProgress = Callable[[int, int, int], None]
"""Called with the number of finished runs, an estimate of all runs, and the number of runs that could not finish."""

_CHUNK_RUNS = 4
"""Runs sent to a worker at a time."""
_LADDER_STEP = 0.25
"""Resolution of the largest load in the first stage, in doublings."""
_CLIMBED_FROM, _NEIGHBOURS = 6, 12
"""The best settings whose neighbours are tried, and how many of these before the best are chosen again."""
_SAME = 0.05
"""Settings whose worst bound differs by no more than this share, in every run, are one."""
_BISECTION_RUNS = 8
"""Approximate number of runs needed to find a largest load."""


class SearchBudget(NamedTuple):
    """How much is tried, counted in settings, runs and steps, so that results do not depend on the machine's speed."""

    screened: int = 96
    """Settings in the first sample."""
    neighbours: int = 36
    """Neighbours of the best ones that are tried too."""
    kept: int = 12
    """Settings in the second stage."""
    best: int = 4
    """Settings in the last stage."""
    replications: int = 5
    """Replications in the last stage; the second has three, or fewer for a short trace."""
    steps: int = 5
    """Bisection steps within a doubling of the load, in the last stage."""
    short: float = 0.25
    """Share of the requests used in the first stage."""
    long: float = 0.5
    """Share of the requests used in the second stage."""
    fewest: int = 100
    """Minimum number of requests in a run, if there are as many."""


class Effort(NamedTuple):
    """What a search may take, and who is told how far it is."""

    budget: SearchBudget = SearchBudget()
    workers: int | None = None
    """Number of processes, by default one per processor; it does not change the result."""
    progress: RecommendProgress | None = None
    told: Callable[[str], None] | None = None
    """Is told at once what bears on the whole answer."""


def find_settings(
    asked: dict[str, Any],
    shape: MemoryShape,
    weights: str | None,
    effort: Effort,
    narrower: Sequence[str] = (),
    fixed: Mapping[str, Scenario] | None = None,
) -> Recommendation:
    """Lay out all settings and search them; ``asked`` are the fields of ``Advice``. Raises ``UserError``.

    ``narrower``, ``fixed``: as in ``build_search_space``.
    """
    traffic, slo = asked["traffic"], asked["slo"]
    space = build_search_space(
        asked["scenario"],
        traffic.summary,
        asked["engine"],
        asked["profile"],
        shape,
        asked["memory"],
        weights=weights,
        tolerant=any(bound.is_share and bound.limit > 0 for bound in slo.bounds),
        narrower=narrower,
        fixed=fixed,
    )
    search = Search(traffic, slo, space, effort.budget, effort.workers, effort.progress)
    finalists = search.run()
    return Recommendation(
        **asked,
        space=space,
        best=tuple(rank(finalists)),
        fixed=search.fixed,
        ruled_out=search.ruled_out,
        tried=len(search.tried),
        runs=search.runs,
        interrupted=search.interrupted,
    )


class _LadderResult(NamedTuple):
    """How far a setting came as the load was doubled."""

    met: float
    """Largest load that met the service level, as a power of 2; -1 if none did."""
    tried: float
    """Smallest load that missed it, as a power of 2; the largest one tried if none did."""
    factor: float
    """Factor by which the load ``tried`` missed or met it."""
    outcome: TrialOutcome
    """At the load ``tried``."""
    at_load_asked: TrialOutcome

    def key(self, most: int) -> tuple[float, float]:
        """Sort key, better settings first; settings that met the largest load of all, 2**``most``, are equal."""
        return -self.met, self.factor if self.met < most else 0.0


@dataclass
class Search:
    """The three stages of the search; remembers why each setting was ruled out."""

    traffic: Traffic
    slo: Slo
    space: SearchSpace
    budget: SearchBudget
    workers: int | None
    progress: RecommendProgress | None
    ruled_out: dict[int, RuledOut] = field(default_factory=dict)
    """Why each setting was ruled out, by its number."""
    tried: set[int] = field(default_factory=set)
    runs: int = 0
    interrupted: str = ""
    """In which stage the search was interrupted; no more runs are made then."""
    _stage: str = ""
    _ladders: dict[int, _LadderResult] = field(default_factory=dict)
    """Results of the first stage by number."""
    _loads_at_length: dict[int, float] = field(default_factory=dict)
    """The largest loads of the second stage by number; 0 if none met the service level."""
    fixed: tuple[Finalist, ...] = ()
    """The settings that are judged beside the best ones, after a run that was not interrupted."""
    _fixed: list[Candidate] = field(default_factory=list)
    _same: dict[int, list[Candidate]] = field(default_factory=dict)
    """Settings that do the same as one that goes on, by its number."""
    _failed: int = 0
    _later: int = 0
    """Estimated number of runs in later stages."""

    def run(self) -> list[Finalist]:
        """Return the settings that remain after all stages, in no particular order.

        An interrupt ends the search early with what is known by then; ``KeyboardInterrupt`` is raised if that is
        nothing.
        """
        budget = self.budget
        for c in self.space.candidates:
            if c.reason:
                self.ruled_out[c.number] = RuledOut(c.reason, c.detail)
        self._fixed = [c for c in self.space.fixed if not c.reason]
        last_stage = (budget.best + len(self._fixed)) * budget.replications * (1 + _BISECTION_RUNS)
        self._later = budget.neighbours * 2 + budget.kept * (3 + _BISECTION_RUNS) + last_stage
        preload(c.scenario for c in self.space.candidates if not c.reason)
        self._stage = "while screening settings"
        dozen = self._screen()
        if self.interrupted and not dozen:
            raise KeyboardInterrupt
        self._later = last_stage
        self._stage = "while comparing the better settings"
        few = self._compare_at_length(dozen)
        self._later = 0
        self._stage = "while judging the best settings"
        return self._finalists(few)

    # Stage 1

    def _screen(self) -> list[Candidate]:
        """Try a sample and the neighbours of its best; return the candidates for the second stage."""
        by_number = {c.number: c for c in self.space.candidates}
        sample = self.space.sample(self.budget.screened, self.traffic.scenario.seed)
        results = self._ladders
        top = self._climb(sample, results, None)
        self._refine([c for c in sample if c.number in results], results)
        # Without a load to change, settings differ by how well they meet the bounds.
        most = most_doublings(self.traffic) if self.traffic.scalable else MOST_DOUBLINGS
        left = self.budget.neighbours
        while not self.interrupted:
            best = sorted(results, key=lambda n: (results[n].key(most), by_number[n].memory_order))[:_CLIMBED_FROM]
            beside = (c for n in best for c in self.space.neighbours(by_number[n]))
            new = list({c.number: c for c in beside if c.number not in results}.values())[: min(left, _NEIGHBOURS)]
            if not new:
                break
            left -= len(new)
            self._later -= len(new) * 2
            self._climb(new, results, top)
            self._refine([by_number[n] for n in results], results)
        self._later -= left * 2
        tried = [by_number[n] for n in results]
        self.tried = set(results)
        ordered = sorted(tried, key=lambda c: (results[c.number].key(most), c.memory_order))
        dozen = _with_each_engine(_distinct_first(ordered), self.budget.kept)
        chosen = {c.number for c in dozen}
        for c in self.space.candidates:
            if not c.reason and c.number not in results:
                self.ruled_out[c.number] = RuledOut("untried", "")
        for c in ordered:
            if c.number not in chosen:
                self.ruled_out[c.number] = self._why_screened_out(results[c.number])
        return dozen

    def _climb(self, candidates: Sequence[Candidate], results: dict[int, _LadderResult], top: int | None) -> int:
        """Double the load of the candidates for as long as they meet the service level.

        Returns the last power of 2 that was tried. Without ``top`` the climb ends when no more candidates remain than
        the second stage takes.
        """
        level, climbing = 0, list(candidates)
        while climbing:
            outcomes = self._run_at({c.number: float(level) for c in climbing}, climbing)
            passing = []
            for c in climbing:
                if c.number not in outcomes:
                    continue  # Interrupted.
                outcome = outcomes[c.number]
                met = outcome.met(self.slo)
                at_load_asked = results[c.number].at_load_asked if level else outcome
                results[c.number] = _LadderResult(
                    level - (not met), level, outcome.factor(self.slo), outcome, at_load_asked
                )
                if met:
                    passing.append(c)
            last = most_doublings(self.traffic) if top is None else top
            if level >= last or not self.traffic.scalable or (top is None and len(passing) <= self.budget.kept):
                break
            level, climbing = level + 1, passing
        return level

    def _refine(self, candidates: Sequence[Candidate], results: dict[int, _LadderResult]) -> None:
        """Bisect, twice, the doubling in which each of the better candidates missed the service level.

        These are the candidates within a doubling of the best of their engine. Without this step they would be ranked
        by how much they miss a load that is too large, which says little about the largest load that they meet.
        """
        engines = {c.engine for c in candidates}
        best = {e: max(results[c.number].met for c in candidates if c.engine == e) for e in engines}
        near = [c for c in candidates if results[c.number].met >= max(best[c.engine] - 1, 0)]
        while wide := [c for c in near if results[c.number].tried - results[c.number].met > _LADDER_STEP]:
            if self.interrupted:
                return
            powers = {c.number: (results[c.number].met + results[c.number].tried) / 2 for c in wide}
            for number, outcome in self._run_at(powers, wide).items():
                before, power = results[number], powers[number]
                if outcome.met(self.slo):
                    results[number] = before._replace(met=power)
                else:
                    factor = outcome.factor(self.slo)
                    results[number] = before._replace(tried=power, factor=factor, outcome=outcome)

    def _run_at(self, powers: dict[int, float], candidates: Sequence[Candidate]) -> dict[int, TrialOutcome]:
        """Run each candidate briefly at its load, given as a power of 2 by number."""
        share, replication = self._share(self.budget.short), self.traffic.search_replications[0]
        trials = [TrialRun(c.number, replication, c.scenario, share, 2.0 ** powers[c.number]) for c in candidates]
        return {trial.number: outcome for trial, outcome in self._execute(trials)}

    def _why_screened_out(self, result: _LadderResult) -> RuledOut:
        if result.met < 0:
            return missed_slo(result.outcome, self.slo)
        if result.outcome.met(self.slo):
            return RuledOut("dominated", f"meets it at {2**result.met:.3g} × the load, but enough others do better")
        return RuledOut("dominated", f"at {2**result.tried:.3g} × the load: {describe_miss(result.outcome, self.slo)}")

    # Stage 2

    def _compare_at_length(self, dozen: Sequence[Candidate]) -> list[Candidate]:
        """Run the candidates on more requests and replications; return those for the last stage.

        Candidates that an interrupt leaves without a run keep the result of the first stage.
        """
        share, replications = self._share(self.budget.long), self.traffic.search_replications
        trials = [TrialRun(c.number, r, c.scenario, share, 1.0) for c in dozen for r in replications]
        outcomes: dict[int, list[TrialOutcome]] = {}
        met_by = {}
        for trial, outcome in self._execute(trials):
            outcomes.setdefault(trial.number, []).append(outcome)
            met_by[trial.number, trial.replication] = outcome.met(self.slo)
        first = replications[0]
        searches = [
            LoadSearch(t, met_by.get((t.number, first)), self._power_so_far(t.number))
            for t in trials
            if t.replication == first
        ]
        # How much the others sustain, which may be far from what the best do, makes the last stage shorter.
        searches += [LoadSearch(TrialRun(c.number, first, c.scenario, share, 1.0)) for c in self._fixed]
        loads = self._largest_loads(searches, self.budget.steps - 2)
        self._loads_at_length = {c.number: loads.get((c.number, first), 0.0) for c in (*dozen, *self._fixed)}
        keys, standing = {}, {}
        for c in dozen:
            known = outcomes.setdefault(c.number, [self._ladders[c.number].at_load_asked])
            met = all(o.met(self.slo) for o in known)
            worst = max(o.factor(self.slo) for o in known)
            power = self._power_so_far(c.number) if self.interrupted else None
            load = loads.get((c.number, first), 0.0 if power is None else 2.0**power)
            keys[c.number] = (not met, -load, 0.0 if load else worst, c.memory_order)
            # Of those that keep up and miss it, the nearest is the one that misses it least (``Finalist.score``).
            nearest = not met and all(o.settled and not o.error for o in known)
            standing[c.number] = (not met, not (met or nearest), worst if nearest else 0.0)
        ordered = sorted(dozen, key=lambda c: (standing[c.number], keys[c.number]))
        distinct = self._without_same(ordered, outcomes)
        few = _with_each_engine(_distinct_first(distinct), self.budget.best)
        for first, others in self._same.items():
            self.ruled_out |= {c.number: RuledOut("same", f"as setting {first}") for c in others}
        for c in distinct:
            if c in few:
                continue
            missed, negative_load, worst = keys[c.number][:3]
            if missed:
                misses = [o for o in outcomes[c.number] if not o.met(self.slo)]
                self.ruled_out[c.number] = missed_slo(max(misses, key=lambda o: o.factor(self.slo)), self.slo)
            elif negative_load:
                detail = f"sustains {-negative_load:.2f} × the load in one replication; others sustain more"
                self.ruled_out[c.number] = RuledOut("dominated", detail)
            else:
                self.ruled_out[c.number] = RuledOut("dominated", f"worst bound at {worst:.2f} of its limit")
        return few

    def _without_same(self, ordered: Sequence[Candidate], outcomes: dict[int, list[TrialOutcome]]) -> list[Candidate]:
        """The settings without those that do the same, in all runs of this stage, as one before them."""
        distinct: list[Candidate] = []
        for c in ordered:
            for other in distinct:
                if self._is_same(c, other, outcomes):
                    self._same.setdefault(other.number, []).append(c)
                    break
            else:
                distinct.append(c)
        return distinct

    def _is_same(self, one: Candidate, other: Candidate, outcomes: dict[int, list[TrialOutcome]]) -> bool:
        if (one.engine, one.narrowed) != (other.engine, other.narrowed):
            return False
        if self._loads_at_length[one.number] != self._loads_at_length[other.number]:
            return False
        pairs = zip(outcomes[one.number], outcomes[other.number], strict=False)
        return all(
            ours.settled == theirs.settled
            and abs(ours.factor(self.slo) - theirs.factor(self.slo)) <= _SAME * theirs.factor(self.slo)
            for ours, theirs in pairs
        )

    # Stage 3

    def _finalists(self, few: Sequence[Candidate]) -> list[Finalist]:
        replications = range(self.traffic.replications)
        judged = [*few, *self._fixed]
        trials = [TrialRun(c.number, r, c.scenario, 1.0, 1.0) for c in judged for r in replications]
        outcomes = {(trial.number, trial.replication): outcome for trial, outcome in self._execute(trials)}
        searches = []
        for t in trials:
            known, load = outcomes.get((t.number, t.replication)), self._loads_at_length.get(t.number, 0.0)
            met = None if known is None else known.met(self.slo)
            searches.append(LoadSearch(t, met, math.log2(load) if load else None))
        loads = self._largest_loads(searches, self.budget.steps)
        finished = [r for r in replications if all((c.number, r) in outcomes for c in few)]
        searched = [r for r in replications if all((c.number, r) in loads for c in few)]
        largest = 2.0 ** most_doublings(self.traffic)
        if not self.interrupted:
            self.fixed = tuple(
                Finalist(
                    c,
                    self.slo,
                    tuple(outcomes[c.number, r] for r in replications),
                    tuple(loads[c.number, r] for r in searched),
                    largest,
                )
                for c in self._fixed
            )
        return [
            Finalist(
                c,
                self.slo,
                tuple(outcomes[c.number, r] for r in finished) or (self._ladders[c.number].at_load_asked,),
                tuple(loads[c.number, r] for r in searched) or self._loads_so_far(c),
                largest,
                tuple(self._same.get(c.number, ())),
            )
            for c in few
        ]

    def _loads_so_far(self, candidate: Candidate) -> tuple[float, ...]:
        """The largest load of the first stage; empty if there was none, or without a load to change."""
        power = self._power_so_far(candidate.number)
        return (2.0**power,) if self.traffic.scalable and power is not None else ()

    def _power_so_far(self, number: int) -> float | None:
        """The largest load of the first stage as a power of 2; None if none met the service level."""
        met = self._ladders[number].met
        return met if met >= 0 else None

    # Runs

    def _share(self, share: float) -> float:
        """A share of the requests, raised where that would be too few of them."""
        return min(1.0, max(share, self.budget.fewest / self.traffic.requests))

    def _execute(self, trials: Sequence[TrialRun]) -> list[tuple[TrialRun, TrialOutcome]]:
        """Execute the runs, until an interrupt; returns them sorted by number and replication."""
        jobs = [trials[i : i + _CHUNK_RUNS] for i in range(0, len(trials), _CHUNK_RUNS)]
        finished: list[tuple[TrialRun, TrialOutcome]] = []
        with self._until_interrupted(RunTrials(self.traffic), jobs) as done:
            for chunk in done:
                finished += chunk
                self._failed += sum(bool(outcome.error) for _, outcome in chunk)
                self._report(len(chunk), len(trials) - len(finished))
        return sorted(finished, key=lambda pair: (pair[0].number, pair[0].replication))

    def _largest_loads(self, searches: Sequence[LoadSearch], steps: int) -> dict[tuple[int, int], float]:
        """The largest load that meets the service level, by number and replication; empty without a load to change."""
        if not self.traffic.scalable:
            return {}
        loads = {}
        find = FindLargestLoad(self.traffic, self.slo, max(steps, 0))
        with self._until_interrupted(find, searches) as done:
            for trial, load, runs in done:
                loads[trial.number, trial.replication] = load
                self._report(runs, (len(searches) - len(loads)) * _BISECTION_RUNS)
        return loads

    @contextmanager
    def _until_interrupted(self, work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Iterable[Done]]:
        """Do the jobs within this context, which swallows an interrupt; none are done after one."""
        if self.interrupted:
            yield ()
            return
        try:
            with closing(map_unordered(work, jobs, self.workers)) as done:
                yield done
        except KeyboardInterrupt:
            self.interrupted = self._stage

    def _report(self, runs: int, left: int) -> None:
        self.runs += runs
        if self.progress is not None:
            self.progress(self.runs, self.runs + left + self._later, self._failed)


def _distinct_first(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Reorder so that the best of each family, number of cells and number of slots come first, then the others."""
    first: dict[tuple[str, int, int], Candidate] = {}
    for c in ordered:
        first.setdefault((c.family, c.scenario.cache.cells, c.scenario.server.slots), c)
    return [*first.values(), *(c for c in ordered if c not in first.values())]


def _with_each_engine(ordered: Sequence[Candidate], most: int) -> list[Candidate]:
    """The first ``most``, of which each engine gets at least an equal share, as far as it has that many."""
    by_engine: dict[TargetEngine, list[Candidate]] = {}
    for c in ordered:
        by_engine.setdefault(c.engine, []).append(c)
    share = most // max(len(by_engine), 1)
    chosen = _numbers(c for members in by_engine.values() for c in members[:share])
    chosen |= _numbers([c for c in ordered if c.number not in chosen][: most - len(chosen)])
    return [c for c in ordered if c.number in chosen]


def _numbers(candidates: Iterable[Candidate]) -> set[int]:
    return {c.number for c in candidates}
