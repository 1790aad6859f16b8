"""Whether several servers are better divided into those that prefill and those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.server_trials import ServerTrials, measures_dict, order
from kvsim.experiments.estimates import Interval, paired_difference


@dataclass(frozen=True)
class Apart:
    """Servers of which some prefill and the others decode, beside as many that do both."""

    prefill: int
    decode: int
    found: Finalist
    """How they fare."""
    together: Finalist
    """How as many servers that do both fare behind the best router."""

    @property
    def replicas(self) -> int:
        """Number of servers."""
        return self.prefill + self.decode

    @property
    def router(self) -> str:
        """What gives requests to the servers that prefill; those that decode are behind ``least-load``."""
        return self.found.candidate.scenario.cluster.router

    @property
    def meets(self) -> bool:
        """Whether they meet the service level, at least by their means."""
        return self.found.verdict != "not"

    @cached_property
    def ratios(self) -> dict[str, Interval]:
        """The latencies that are asked about, each over that of servers together, over pairs of replications."""
        ratios = {}
        for bound in self.found.slo.asked:
            mine, other = (
                [outcome.measures.get(bound.measure) or 0.0 for outcome in each.outcomes]
                for each in (self.found, self.together)
            )
            if not bound.is_share and min(*mine, *other) > 0:
                ratios[bound.measure] = paired_difference(np.log(mine), np.log(other)).exp()
        return ratios

    @cached_property
    def shorter(self) -> tuple[list[str], list[str]]:
        """The latencies asked about that are shorter apart, and those that are shorter together, both not by chance."""
        told = {measure: ratio for measure, ratio in self.ratios.items() if ratio.excludes(1.0)}
        return [m for m, ratio in told.items() if ratio.value < 1], [m for m, ratio in told.items() if ratio.value > 1]

    @cached_property
    def better(self) -> Literal["apart", "together"] | None:
        """Which of both is better; None if that is chance, or each is better in something.

        The one that meets the service level where the other does not, if the other misses a bound by more than chance
        is, or cannot keep up; where both or neither meet it, the one with shorter latencies.
        """
        apart, together = self.shorter
        if self.meets != (self.together.verdict != "not"):
            other, shorter = (self.together, apart) if self.meets else (self.found, together)
            missed = [bound for bound in other.slo.bounds if not bound.met(other.means.get(bound.measure))]
            sure = not other.settled or any(b.is_share or b.measure in shorter for b in missed)
            return ("apart" if self.meets else "together") if sure else None
        if bool(apart) == bool(together):
            return None
        return "apart" if apart else "together"

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``--json``."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "router": self.router,
            "verdict": self.found.verdict,
            "measures": measures_dict(self.found),
            "together": {"verdict": self.together.verdict, "measures": measures_dict(self.together)},
            "ratios": {measure: ratio.to_dict() for measure, ratio in self.ratios.items()},
            "better": self.better,
        }


Division = tuple[int, int]
"""Numbers of servers that prefill and that decode."""


def find_apart(
    trials: ServerTrials, router: str, together: dict[int, Finalist], searched: Sequence[int], everything: Sequence[int]
) -> Apart | None:
    """The fewest servers that meet the service level apart, or else the best division of the most; None if none runs.

    ``together``: how numbers of servers that do both fare behind ``router``, the best; none has more than the largest.
    Replications ``searched`` find a division, and ``everything`` tells how it fares.
    """
    search = _DivisionSearch(trials, router, searched)
    most = max(together)
    shares = {min(max(1, round(most * share)), most - 1) for share in (0.25, 0.5, 0.75)}
    division, found = search.best([(prefill, most - prefill) for prefill in sorted(shares)])
    enough = [division]
    while found.verdict != "not" and sum(division) > 2:
        prefill, decode = division
        fewer = [each for each in ((prefill - 1, decode), (prefill, decode - 1)) if min(each) > 0]
        division, found = search.best(fewer)
        if found.verdict != "not":
            enough.append(division)
    while True:
        division = enough.pop()
        found = search.run([division], everything)[division]
        if found.verdict != "not" or not enough:
            break  # More replications may say otherwise than those that were searched.
    if _error(found):
        return None  # Such servers cannot be divided: their blocks are not of full attention alone, say.
    n = sum(division)
    both = together[n] if n in together else trials.behind(n, (router,), everything)[0][1]
    return Apart(*division, found, both)


@dataclass(frozen=True)
class _DivisionSearch:
    trials: ServerTrials
    router: str
    replications: Sequence[int]

    def best(self, divisions: Sequence[Division]) -> tuple[Division, Finalist]:
        """The best of the divisions or, where none meets the service level, of those of as many servers near it."""
        tried = self.run(divisions, self.replications)
        while True:
            best = min(tried, key=lambda division: (_error(tried[division]), order(tried[division])))
            near = [(best[0] + more, best[1] - more) for more in (-1, 1)]
            near = [each for each in near if min(each) > 0 and each not in tried]
            if tried[best].verdict != "not" or _error(tried[best]) or not near:
                return best, tried[best]
            tried |= self.run(near, self.replications)

    def run(self, divisions: Sequence[Division], replications: Sequence[int]) -> dict[Division, Finalist]:
        """How servers fare that are divided so."""
        several = [self.trials.divided(*division, self.router) for division in divisions]
        return dict(zip(divisions, self.trials.run(several, replications), strict=True))


def _error(found: Finalist) -> bool:
    return any(outcome.error for outcome in found.outcomes)
