"""The machine's present speed, from two reference passes timed among calibrations and validations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvsim import machine
from kvsim.calibration.pace import Tick
from kvsim.costs.profile import Profile
from kvsim.errors import UserError
from kvsim.simulation.backend import Backend, DelegatingBackend
from policies import Chunk, MicroBatch

T = TypeVar("T")

_AMONG_MORE = {8: (2, 6), 7: (1, 5)}
"""By their number, which of the reference passes of older profiles are these two: of our own engine, of llama.cpp."""

_EVERY_S = 0.1
_TIMES_COST = 8
"""At least this many times as long as the reference passes take is between two measurements of them."""

_ATTEMPTS = 3
"""How often the reference passes are timed again where other work disturbs them."""

Clock = Callable[[], float]
"""Seconds from some moment on, like ``time.perf_counter``."""

Spent = Callable[[], tuple[float, float]]
"""Seconds so far by the clock times the threads at work, and processor seconds."""


class TimeOver(Exception):
    """The time to measure is over, in the middle of a server run."""


class ReferencePasses:
    """A decode, bound by memory, and a prompt, bound by arithmetic, which need not slow down together."""

    def __init__(self, decode: Callable[[], float], prompt: Callable[[], float]):
        """Functions that run the pass, repeatably, and return its seconds."""
        self._decode, self._prompt = decode, prompt

    def measure(self) -> tuple[float, float]:
        """Seconds of both, after an untimed decode that warms the processor's caches."""
        self._decode()
        decode_s = (self._decode() + self._decode()) / 2
        return decode_s, self._prompt()


def known_seconds(profile: Profile) -> tuple[float, float]:
    """Seconds of the two reference passes when a profile was measured. Raises ``UserError`` if it has others."""
    kept = profile.reference_passes_s
    places = (0, 1) if len(kept) == 2 else _AMONG_MORE.get(len(kept))
    if places is None:
        raise UserError(f"profile {profile.name} has {len(kept)} reference passes, not 2; calibrate anew")
    return kept[places[0]], kept[places[1]]


class PaceKeeper:
    """Times the reference passes now and then, and remembers when."""

    def __init__(
        self,
        passes: ReferencePasses,
        every_s: float = _EVERY_S,
        clock: Clock = time.perf_counter,
        until: float | None = None,
        spent: Spent = lambda: (time.perf_counter(), time.process_time()),
    ):
        """``every_s``: least seconds between two measurements; ``until``: when, on the clock, the time is over."""
        self.ticks: list[Tick] = []
        self._spent = spent
        self._only_disturbed = True
        """Whether the one tick there is was disturbed: it is better than none."""
        self._passes = passes
        self._every_s = every_s
        self._clock = clock
        self._until = until
        self._began = clock()
        self._due = 0.0

    def now(self) -> float:
        """Seconds since the first moment."""
        return self._clock() - self._began

    def keep(self) -> bool:
        """Time the reference passes if they are due, and return whether they were."""
        if self.now() < self._due:
            return False
        self.tick()
        return True

    def tick(self) -> None:
        """Time the reference passes; what other work disturbed does not count."""
        for _ in range(_ATTEMPTS):
            began = self.now()
            seconds, share = self.watch(self._passes.measure)
            ended = self.now()
            disturbed = share < machine.BUSY_BELOW
            if not disturbed:
                break
        self._due = ended + max(self._every_s, _TIMES_COST * (ended - began))
        if disturbed and self.ticks:
            return
        if self._only_disturbed:
            self.ticks.clear()
            self._only_disturbed = disturbed
        self.ticks.append(Tick((began + ended) / 2, seconds))

    def watch(self, work: Callable[[], T]) -> tuple[T, float]:
        """Do the work; return its result, and the share of the processor that it got."""
        wall, cpu = self._spent()
        result = work()
        wall_after, cpu_after = self._spent()
        took = wall_after - wall
        return result, (cpu_after - cpu) / took if took > 0 else 1.0

    def check_time(self) -> None:
        """Raise ``TimeOver`` if the time is over."""
        if self._until is not None and self._clock() >= self._until:
            raise TimeOver


class PaceMeasuringBackend(DelegatingBackend):
    """An engine among whose steps the reference passes are timed, outside of the server's clock."""

    def __init__(self, engine: Backend, keeper: PaceKeeper):
        super().__init__(engine)
        self.keeper = keeper
        self.stamps: list[float] = []
        """When each step ran, on the keeper's clock."""
        self.disturbed = False
        """Whether other work had the processor during the last step."""
        self.just_paced = False
        """Whether the reference passes were timed right before the last step."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Run the step, and time the reference passes before it if they are due."""
        self.keeper.check_time()
        self.just_paced = self.keeper.keep()
        began = self.keeper.now()
        inner = super().step
        seconds, share = self.keeper.watch(lambda: inner(step, batches))
        self.disturbed = share < machine.BUSY_BELOW
        self.stamps.append((began + self.keeper.now()) / 2)
        return seconds
