"""Each cost alone: work that is timed again and again, and what its time says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample
from kvsim.costs.pass_layout import Sample
from kvsim.costs.records import Record

CELLS = 4096
"""Cells of the measured caches."""

_DECODES = (0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of decoding sequences in a random pass, drawn uniformly."""
_LONGEST = 512
"""Most tokens of an ordinary pass."""
_WARM_S = 0.004
"""Warm-up of a decode: in a server it follows other decodes, but not always equal ones."""

Measurable = Sample | MoveSample | ShiftSample | HostCopySample
"""What is measured alone: a pass, a compaction, a rotation of keys, a copy to the host or back."""
_NEEDED: dict[type[Record], int] = {Sample: 8, MoveSample: 4, ShiftSample: 1, HostCopySample: 4}
"""Trials of each kind (and kernel, or way) without which nothing is fitted, however little time there was."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Work to time."""

    sample: Measurable
    """What is timed; its seconds mean nothing."""
    run: Callable[[], float]
    before: Callable[[], float] | None = None
    """Work to run first, so that the processor's caches are as in a server; None: the same work, as a warm-up."""

    def measure(self) -> tuple[float, ...]:
        """Seconds of the work: once, or twice after a warm-up."""
        if self.before is not None:
            self.before()
            return (self.run(),)
        warm_s = self.run()
        while warm_s < _WARM_S:
            warm_s += self.run()
        return self.run(), self.run()

    @property
    def tokens(self) -> int:
        """Tokens of the pass; 1 for all else, which is bound by memory."""
        return self.sample.tokens if isinstance(self.sample, Sample) else 1

    @property
    def kind(self) -> tuple[type[Record], object]:
        """Trials of one kind, which is that of the sample and its kernel or way."""
        what = self.sample
        return type(what), getattr(what, "kernel", getattr(what, "out", None))


def enough(trials: Sequence[Trial], measured: set[int]) -> bool:
    """Whether the trials with these numbers are enough for a fit."""
    kinds = [trial.kind for trial in trials]
    seen = [kind for number, kind in enumerate(kinds) if number in measured]
    return all(seen.count(kind) >= min(_NEEDED[kind[0]], kinds.count(kind)) for kind in set(kinds))


def medians(trials: Sequence[Trial], seconds: Sequence[Sequence[float]]) -> list[Measurable]:
    """Each trial's sample with the median of its ``seconds``, where there are any."""
    return [
        trial.sample.model_copy(update={"seconds": float(np.median(each))})
        for trial, each in zip(trials, seconds, strict=True)
        if len(each)
    ]


def half_width(seconds: Sequence[float]) -> float:
    """Half-width of the median's 95 % interval over the median, from the spread as if normal."""
    return float(1.96 * 1.2533 * scatter(seconds) / len(seconds) ** 0.5)


def scatter(seconds: Sequence[float]) -> float:
    """Standard deviation over the median, from the median absolute deviation as if normal."""
    middle = float(np.median(seconds))
    return float(1.4826 * np.median(np.abs(np.array(seconds) - middle)) / middle)


def host_copy_sizes(rng: np.random.Generator, many: int) -> list[int]:
    """Tokens of the sequences that are copied to the host and back, from 16 to half of the cells."""
    most = int(np.log2(CELLS)) - 1
    sizes: list[int] = np.unique((2 ** rng.uniform(4, most, many)).astype(int)).tolist()
    return sizes


def random_lengths(rng: np.random.Generator) -> list[int]:
    """Tokens of each chunk of a random pass, at most 512 in all."""
    decodes = int(rng.choice(_DECODES))
    lengths = [1] * decodes
    if decodes == 0 or rng.random() < 0.3:
        most = 3 if rng.random() < 0.3 else 8
        lengths += [max(2, round(2 ** rng.uniform(1, most))) for _ in range(rng.integers(1, 4))]
    while sum(lengths) > _LONGEST:
        lengths.pop()
    return lengths
