"""How many servers with the best settings meet a service level that one does not, behind which router, and whether
they are better divided into those that prefill and those that decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsim.advice.recommend.apart import Apart, find_apart
from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.server_trials import ServerTrials, measures_dict, order
from kvsim.advice.recommend.slo import Slo
from kvsim.experiments.traffic import Traffic

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
    apart: Apart | None = None
    """The fewest servers that meet it with prefill and decode apart, else the best division of ``replicas``; None where
    these servers cannot be divided."""

    @property
    def met(self) -> bool:
        """Whether the service level is met behind any of the routers."""
        return self.behind[0][1].verdict != "not"

    @property
    def needed(self) -> tuple[int, str] | None:
        """The fewest servers that meet it, and what they are behind, or do, in words; None where no number does."""
        if (apart := self.apart) is not None and apart.meets and apart.better == "apart":
            return apart.replicas, f", {apart.prefill} to prefill and {apart.decode} to decode"
        return (self.replicas, f" behind {self.behind[0][0]}") if self.met else None

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
                    "measures": measures_dict(found),
                }
                for router, found in self.behind
            ],
            "one_less": None if self.one_less is None else {"measures": measures_dict(self.one_less)},
            "apart": None if self.apart is None else self.apart.to_dict(),
        }


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
    replications; then all of them are run at that number, the best of them with one server less, and as many or fewer
    servers with prefill and decode apart. ``ran`` is told after each run how many there were.
    """
    # Where none meets the service level at this load, they are not in order of the loads that they sustain.
    loads = [0.0 if each.sustained is None else each.sustained.value for each in best]
    place = loads.index(max(loads))
    first = best[place]
    cluster = first.candidate.scenario.cluster
    if best[0].verdict != "not" or first.sustained is None or cluster.servers:
        return None
    trials = ServerTrials(first, traffic, slo, workers, ran)
    routers = ROUTERS if first.candidate.engine == "vllm" else ANY_SERVER
    searched = range(min(_SEARCH_REPLICATIONS, len(first.outcomes)))

    def suffices(replicas: int) -> bool:
        return any(found.verdict != "not" for _, found in trials.behind(replicas, routers, searched))

    replicas = min(max(2, math.ceil(cluster.size / first.sustained.value)), MOST_SERVERS)
    if suffices(replicas):
        while replicas > 2 and suffices(replicas - 1):
            replicas -= 1
    else:
        while replicas < MOST_SERVERS and not suffices(replicas + 1):
            replicas += max(1, replicas // 8)
        replicas = min(replicas + 1, MOST_SERVERS)
    everything = range(len(first.outcomes))
    behind = trials.behind(replicas, routers, everything)
    while replicas < MOST_SERVERS and all(found.verdict == "not" for _, found in behind):
        replicas += 1  # Those that were searched had less to do than the others.
        behind = trials.behind(replicas, routers, everything)
    nearest = min(order(found) for _, found in behind)
    as_good = (nearest[0], nearest[1] * _AS_GOOD)
    # Of routers that are as good, the plainest comes first, as in the list.
    behind.sort(key=lambda pair: max(order(pair[1]), as_good))
    router, found = behind[0]
    together = {replicas: found}
    if replicas > 2:
        together[replicas - 1] = trials.behind(replicas - 1, (router,), everything)[0][1]
    apart = find_apart(trials, router, together, searched, everything)
    return Fleet(replicas, tuple(behind), place + 1, together.get(replicas - 1), apart)
