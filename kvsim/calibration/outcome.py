"""What a calibration has found: the profile, how well it fits, and why it is refused where the fit is poor."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

from kvsim import machine
from kvsim.costs.profile import MachineInfo, Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIGHT = 0.01
"""Measuring ends when the half-width of half of the 95 % intervals, over the median, is at most this."""
HELD_OUT_BOUND = 0.10
"""Largest median held-out error of a profile that is worth keeping."""

_SHARE = 0.97
"""Share of its core below which other work is blamed."""
_SPREAD = 1.25
"""Slow over fast pace beyond which an unsteady machine is blamed."""
_APART = 1.5
"""How many times as large the error of a class must be as that of all others to be blamed."""
_FEWEST = 20
"""Passes of a class before anything is said of it."""


@dataclass(frozen=True)
class Outcome(ABC):
    """A profile that was measured, and how well it fits."""

    LEAST_ROUNDS: ClassVar[int]
    """Rounds before intervals say anything."""

    profile: Profile
    held_out: pd.DataFrame
    """A row for each pass or step held out of the fit: kernel, tokens, chunks, measured_s (at the median pace),
    predicted_s, and of an engine mixed (in a running server, or alone), of a server regime."""
    rounds: float
    """How often everything was measured, on average."""
    half_width: float
    """Median over all trials, or kinds of steps, of the 95 % interval's half-width relative to the median; 1 if that is
    not known."""
    scatter: float | None
    """Median over these of the relative standard deviation from one measurement to the next; None if not known."""
    resumed: int
    """Measurements taken over from an earlier, unfinished calibration."""
    left_out: float
    """Share of the measurements that were left out: other work had the processor, or it is not certain what they
    measured."""

    @property
    def tight(self) -> bool:
        """Whether measuring ended because the intervals were narrow enough."""
        return self.rounds >= self.LEAST_ROUNDS and self.half_width <= TIGHT

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the measurement, one line each."""
        return ()

    def refusal(self, bound: float = HELD_OUT_BOUND) -> str | None:
        """Why the profile is not worth keeping, with the likeliest cause; None if it is."""
        errors = {f" of {regime} steps": error.error_median for regime, error in self.profile.held_out.items()}
        for of, error in (errors or {"": self.profile.held_out_error_median}).items():
            if not error <= bound:
                cause = likely_cause(self.profile, self.held_out, self.scatter)
                return (
                    f"the median held-out error{of} is {error:.1%}, over the bound of {bound:.1%} (by so much the "
                    f"profile is off where it was not fitted); {cause}"
                )
        return None

    @abstractmethod
    def plot(self) -> Figure:
        """Predicted against measured seconds of what was held out."""


def machine_info(threads: int, load_before: float, cpu_share: float = 1.0) -> MachineInfo:
    """This machine, when the measurement ends. ``cpu_share``: of its cores, how much the engine got."""
    return MachineInfo(
        processor=machine.processor(),
        cores=os.cpu_count() or 1,
        blas=machine.blas(),
        threads=threads,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numpy=np.__version__,
        load_before=load_before,
        load_after=machine.system_load(),
        cpu_share=cpu_share,
    )


def likely_cause(profile: Profile, held_out: pd.DataFrame, scatter: float | None) -> str:
    """One clause that names the likeliest cause of a large held-out error.

    ``held_out`` as in ``Outcome``; ``scatter``: relative standard deviation of one pass, measured again and again.
    """
    share, pace, error = profile.measured_on.cpu_share, profile.pace, profile.held_out_error_median
    where = _worst_class(held_out)
    if share < _SHARE:
        return f"likely cause: other work had {1 - share:.0%} of the core, so that single passes were interrupted"
    if scatter is not None and scatter > error / 2:
        took = f"{1 - scatter:.0%} to {1 + scatter:.0%} of" if scatter < 1 else f"up to {1 + scatter:,.0f} times"
        said = f"likely cause: an unsteady machine: the same pass, timed again and again, took {took} its usual time"
        if pace is not None and pace.spread > _SPREAD:
            said += f", and the machine's pace was between {pace.p5:.2f} and {pace.p95:.2f} of its median"
        return f"{said}; stop other programs on it, or measure when it has less to do"
    if where is not None:
        return f"likely cause: a cost that the model does not know, {where}"
    if pace is not None and pace.spread > _SPREAD:
        return (
            f"likely cause: the machine's pace changed between {pace.p5:.2f} and {pace.p95:.2f} of its median (a "
            "shared or throttled processor), and not alike for all passes"
        )
    return "no single cause stands out: the passes measured may be too few"


def _worst_class(held_out: pd.DataFrame) -> str | None:
    """The kernel and kind of pass whose error stands out from that of all others; None if there is none."""
    kind = pd.Series("prompts", index=held_out.index)
    kind[held_out["tokens"] == held_out["chunks"]] = "decodes"
    named = held_out.assign(
        error=(held_out["predicted_s"] / held_out["measured_s"] - 1).abs(),
        each=held_out["kernel"].astype(str) + " " + kind,
    )
    medians = named.groupby("each")["error"].median()[named["each"].value_counts() >= _FEWEST]
    if len(medians) < 2:
        return None
    worst = str(medians.idxmax())
    rest = float(named.loc[named["each"] != worst, "error"].median())
    error = float(medians.max())
    if error < _APART * rest:
        return None
    return f"since {worst} are off by {error:.0%} and the rest by {rest:.0%}"
