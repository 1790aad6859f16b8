"""Runs of several servers with one setting at the load asked about, and how these are told and ordered."""

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
from kvsim.scenario.scenario import Scenario, load_scenario


def measures_dict(found: Finalist) -> dict[str, Any]:
    """The measures that are asked about, with intervals."""
    known = ((bound.measure, found.measures.get(bound.measure)) for bound in found.slo.asked)
    return {measure: interval.to_dict() for measure, interval in known if interval is not None}


def order(found: Finalist) -> tuple[int, float]:
    """Sort key: how surely the service level is met, then by how much it is missed most, or met most narrowly."""
    factor = found.worst[1] if found.measures else math.inf
    return VERDICTS.index(found.verdict), factor


@dataclass
class ServerTrials:
    """Runs of several servers with one setting."""

    first: Finalist
    traffic: Traffic
    slo: Slo
    workers: int | None
    ran: Callable[[int], None]
    runs: int = 0

    def behind(self, replicas: int, routers: Sequence[str], replications: Sequence[int]) -> list[tuple[str, Finalist]]:
        """How so many servers fare behind each of the routers at the load asked about."""
        one = self.first.candidate.scenario
        several = [load_scenario(one, cluster__replicas=replicas, cluster__router=router) for router in routers]
        return list(zip(routers, self.run(several, replications), strict=True))

    def divided(self, prefill: int, decode: int, router: str) -> Scenario:
        """Servers of which some prefill, behind a router, and the others decode."""
        groups = [{"count": prefill, "role": "prefill"}, {"count": decode, "role": "decode"}]
        # Round robin is no better than the least load, and worse where prompts differ.
        router = "least-load" if router == "round-robin" else router
        cluster = {"servers": groups, "router": router, "decode_router": "least-load"}
        return load_scenario(self.first.candidate.scenario, cluster=cluster)

    def run(self, several: Sequence[Scenario], replications: Sequence[int]) -> list[Finalist]:
        """How each of the scenarios fares at the load asked about."""
        one = self.first.candidate
        jobs = [[TrialRun(i, r, scenario, 1.0, 1.0)] for i, scenario in enumerate(several) for r in replications]
        outcomes: dict[tuple[int, int], TrialOutcome] = {}
        for done in map_unordered(RunTrials(self.traffic), jobs, self.workers):
            self.runs += len(done)
            self.ran(self.runs)
            outcomes |= {(trial.number, trial.replication): outcome for trial, outcome in done}
        return [
            Finalist(replace(one, scenario=scenario), self.slo, tuple(outcomes[i, r] for r in replications), loads=())
            for i, scenario in enumerate(several)
        ]
