"""A bound for routers: one that is told what the caches hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt

Truth = Callable[[Prompt], Sequence[tuple[int, int]]]
"""For each server: tokens of the prompt that its cache holds now, and prompt tokens of others that it has yet to
compute."""


class Clairvoyant(CountingRouter):
    """The server that would have computed the prompt first, by what its cache and its queue really hold; of several
    the one with the fewest requests in flight.

    No router knows this. It looks at one request at a time, and so is a bound for those that do too.
    """

    def __init__(self, servers: int, rng: np.random.Generator, *, truth: Truth):
        super().__init__(servers, rng)
        self._truth = truth

    def choose(self, prompt: Prompt, now: float) -> int:
        seen = zip(self._truth(prompt), self.in_flight, strict=True)
        work = [(queued + prompt.tokens - held, sent) for (held, queued), sent in seen]
        return work.index(min(work))
