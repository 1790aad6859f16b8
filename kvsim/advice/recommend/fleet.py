"""How many servers with the best settings meet a service level that one does not, and behind which router."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsim.advice.recommend.finalists import VERDICTS, Finalist
from kvsim.advice.recommend.slo import Slo
from kvsim.advice.recommend.trials import RunTrials, TrialOutcome, TrialRun
from kvsim.experiments.traffic import Traffic
from kvsim.experiments.workers import map_unordered
from kvsim.scenario.scenario import load_scenario

ROUTERS = ("round-robin", "least-load", "vllm-router/cache_aware", "smg/cache_aware", "llm-d")
"""Routers that are tried: what a plain load balancer does, and those that look at prompts."""
ANY_SERVER = ("round-robin", "least-load", "smg/cache_aware")
"""Those that need nothing that only vLLM answers."""
MOST_SERVERS = 64
_SEARCH_REPLICATIONS = 2
_AS_GOOD = 1.05
"""How many times the worst bound of the best router another's may be that counts as equal."""


@dataclass(frozen=True)
class Fleet:
    """The fewest servers that meet a service level at the load asked about, behind each router that was tried."""

    replicas: int
    """How many; ``MOST_SERVERS`` where so many do not suffice."""
    behind: tuple[tuple[str, Finalist], ...]
    """The routers and how so many servers fare behind each, the best first."""
    place: int
    """The place among the best settings of those that each server has, from 1."""
    one_less: Finalist | None
    """How one server less fares behind the best of them; None of two servers."""

    @property
    def met(self) -> bool:
        """Whether the service level is met behind any of the routers."""
        return self.behind[0][1].verdict != "not"

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``--json``."""
        return {
            "replicas": self.replicas,
            "place": self.place,
            "met": self.met,
            "behind": [
                {
                    "router": router,
                    "verdict": found.verdict,
                    "measures": _measures(found),
                }
                for router, found in self.behind
            ],
            "one_less": None if self.one_less is None else {"measures": _measures(self.one_less)},
        }


def _measures(found: Finalist) -> dict[str, Any]:
    """The measures that are asked about, with intervals."""
    known = ((bound.measure, found.measures.get(bound.measure)) for bound in found.slo.asked)
    return {measure: interval.to_dict() for measure, interval in known if interval is not None}


def find_fleet(
    best: Sequence[Finalist],
    traffic: Traffic,
    slo: Slo,
    workers: int | None,
    ran: Callable[[int], None] = lambda _: None,
) -> Fleet | None:
    """The fewest servers with those of the ``best`` settings that sustain the largest load.

    None where those that the scenario has suffice, are unlike, or were seen to sustain no load at all.

    It begins where the load is shared out evenly, and goes up or down from there: with every router, on two of the
    replications; then all of them are run at that number, and the best of them with one server less. ``ran`` is told
    after each run how many there were.
    """
    # Where none meets the service level at this load, they are not in order of the loads that they sustain.
    loads = [0.0 if each.sustained is None else each.sustained.value for each in best]
    place = loads.index(max(loads))
    first = best[place]
    cluster = first.candidate.scenario.cluster
    if best[0].verdict != "not" or first.sustained is None or cluster.servers:
        return None
    trials = _Trials(first, traffic, slo, workers, ran)
    routers = ROUTERS if first.candidate.engine == "vllm" else ANY_SERVER
    searched = range(min(_SEARCH_REPLICATIONS, len(first.outcomes)))

    def suffices(replicas: int) -> bool:
        return any(found.verdict != "not" for _, found in trials.run(replicas, routers, searched))

    replicas = min(max(2, math.ceil(cluster.size / first.sustained.value)), MOST_SERVERS)
    if suffices(replicas):
        while replicas > 2 and suffices(replicas - 1):
            replicas -= 1
    else:
        while replicas < MOST_SERVERS and not suffices(replicas + 1):
            replicas += max(1, replicas // 8)
        replicas = min(replicas + 1, MOST_SERVERS)
    everything = range(len(first.outcomes))
    behind = trials.run(replicas, routers, everything)
    nearest = min(_order(found) for _, found in behind)
    as_good = (nearest[0], nearest[1] * _AS_GOOD)
    # Of routers that are as good, the plainest comes first, as in the list.
    behind.sort(key=lambda pair: max(_order(pair[1]), as_good))
    less = trials.run(replicas - 1, (behind[0][0],), everything) if replicas > 2 else ()
    return Fleet(replicas, tuple(behind), place + 1, less[0][1] if less else None)


def _order(found: Finalist) -> tuple[int, float]:
    """Sort key: how surely the service level is met, then by how much it is missed most, or met most narrowly."""
    factor = found.worst[1] if found.measures else math.inf
    return VERDICTS.index(found.verdict), factor


@dataclass
class _Trials:
    """Runs of several servers with one setting."""

    first: Finalist
    traffic: Traffic
    slo: Slo
    workers: int | None
    ran: Callable[[int], None]
    runs: int = 0

    def run(self, replicas: int, routers: Sequence[str], replications: Sequence[int]) -> list[tuple[str, Finalist]]:
        """How so many servers fare behind each of the routers at the load asked about."""
        one = self.first.candidate
        several = [
            load_scenario(one.scenario, cluster__replicas=replicas, cluster__router=router) for router in routers
        ]
        jobs = [[TrialRun(i, r, scenario, 1.0, 1.0)] for i, scenario in enumerate(several) for r in replications]
        outcomes: dict[tuple[int, int], TrialOutcome] = {}
        for done in map_unordered(RunTrials(self.traffic), jobs, self.workers):
            self.runs += len(done)
            self.ran(self.runs)
            outcomes |= {(trial.number, trial.replication): outcome for trial, outcome in done}
        return [
            (
                router,
                Finalist(
                    replace(one, scenario=several[i]), self.slo, tuple(outcomes[i, r] for r in replications), loads=()
                ),
            )
            for i, router in enumerate(routers)
        ]
