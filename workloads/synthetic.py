"""Generated workloads: arrivals from a renewal process, or users in a closed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from workloads.lengths import FloatArray, Lengths
from workloads.request import Request
from workloads.streams import stream

Gaps = Callable[[np.random.Generator, int], FloatArray]
"""Draws n gaps between arrivals, in seconds; shape (n,)."""

_PAGE = 4096
"""Requests drawn at a time. Part of what a seed means: another value would give other requests."""


def poisson_gaps(rate: float) -> Gaps:
    """Exponential gaps: ``rate`` requests/s, coefficient of variation 1."""
    return lambda rng, n: rng.exponential(1.0 / rate, n)


def gamma_gaps(rate: float, cv: float) -> Gaps:
    """Gamma gaps with mean ``1 / rate`` seconds and coefficient of variation ``cv``: above 1 is bursty."""
    shape = 1.0 / cv**2
    return lambda rng, n: rng.gamma(shape, 1.0 / (rate * shape), n)


def no_gaps(rng: np.random.Generator, n: int) -> FloatArray:
    """Everything arrives at once, at time 0."""
    return np.zeros(n)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """``n_requests`` requests with independent gaps and lengths, drawn page by page as they are asked for."""

    seed: int
    n_requests: int
    gaps: Gaps
    prompt_tokens: Lengths
    output_tokens: Lengths
    users: int | None = None
    """Closed loop: the gaps are the users' think times."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing: there is no source that could need mending."""
        return ()

    def __iter__(self) -> Iterator[Request]:
        arrivals = stream(self.seed, "arrivals")
        prompts = stream(self.seed, "prompt-lengths")
        outputs = stream(self.seed, "output-lengths")
        now = 0.0
        for first in range(0, self.n_requests, _PAGE):
            n = min(_PAGE, self.n_requests - first)
            gaps = self.gaps(arrivals, n)
            rows = zip(
                range(first, first + n),
                self.prompt_tokens.draw(prompts, n).tolist(),
                self.output_tokens.draw(outputs, n).tolist(),
                gaps.tolist() if self.users is not None else moments(now, gaps).tolist(),
                strict=True,
            )
            if self.users is not None:
                for i, prompt, output, gap in rows:
                    yield Request(i, 0.0, prompt, output, gap)
            else:
                for i, prompt, output, now in rows:
                    yield Request(i, now, prompt, output)


def moments(now: float, gaps: FloatArray) -> FloatArray:
    """When each of several arrivals comes after ``now``, in seconds; shape (n,).

    Each is the float that adding one gap after the other gives, so that a seed's times do not depend on pages.
    """
    return np.add.accumulate(np.concatenate(([now], gaps)))[1:]
