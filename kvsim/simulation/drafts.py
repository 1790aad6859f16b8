"""Speculation in a run: what is drafted for each request and accepted, by seeded draws, and what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.costs.draft_price import DraftPrice
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from workloads import named_rng


class Drafts:
    """Drafts tokens for requests, and says how many of them are accepted.

    Whether a drafted token is accepted is drawn by the request and the token's place in its answer: a request has the
    same luck under every policy, however its steps fall.
    """

    def __init__(self, scenario: Scenario, price: DraftPrice | None, recorder: Recorder):
        """``price``: of the drafter's passes; None where drafting takes no pass."""
        section = scenario.speculation
        self.tokens = section.tokens
        self.lookahead = section.lookahead
        self.are_noted = True
        """Whether blocks are cached as soon as all of their drafts have been checked: since vLLM 0.33."""
        self.slots = 1 if section.method == "draft-model" else 0
        """Tokens of a step's budget that each sequence takes beside its own (``max_num_new_slots_for_drafting``)."""
        self._seed = scenario.seed
        self._rates = section.rates(scenario.folder)
        self._found = section.found if section.method == "ngram" else 1.0
        self._price = price
        self._recorder = recorder
        self._luck: dict[int, tuple[list[float], list[float]]] = {}
        """For each request and each place in its answer, numbers in [0, 1): whether a token that was drafted for it is
        accepted, and whether a draft that begins there is found."""

    def propose(self, job: Job, most: int) -> int:
        """Tokens that are drafted next for a request, at most ``most``."""
        if self._found < 1 and self._luck_of(job)[1][min(job.generated, job.request.output_tokens)] >= self._found:
            return 0
        return max(min(self.tokens, most), 0)

    def verify(self, job: Job, drafted: int, *, hopeless: bool = False) -> int:
        """How many of a request's drafted tokens are accepted, which its last pass has checked; counts both.

        ``hopeless``: they say nothing, and were added for the sake of an even batch.
        """
        accepted, at, luck = 0, job.generated, self._luck_of(job)[0]
        while not hopeless and accepted < drafted and luck[at + accepted] < self._rates[accepted]:
            accepted += 1
        self._recorder.counts.speculation.verified(drafted, accepted)
        return accepted

    def forget(self, job: Job) -> None:
        """A request has ended."""
        self._luck.pop(job.request.id, None)

    def seconds(self, first: Sequence[tuple[int, int]], passes: Sequence[Sequence[tuple[int, int]]]) -> float:
        """What drafting takes in a step: a pass over the step's own chunks, and those behind; as in ``DraftPrice``."""
        price = self._price
        if price is None:
            return 0.0
        return price.seconds(first) + sum([price.seconds(chunks) for chunks in passes])

    @property
    def costs(self) -> bool:
        """Whether drafting takes passes."""
        return self._price is not None

    def _luck_of(self, job: Job) -> tuple[list[float], list[float]]:
        number = job.request.id
        found = self._luck.get(number)
        if found is None:
            n = job.request.output_tokens + self.tokens + 1
            drawn = named_rng(self._seed, f"drafts of request {number}").random((n, 2))
            found = self._luck[number] = drawn[:, 0].tolist(), drawn[:, 1].tolist()
        return found
