"""The settings that a sweep tries: every combination of its axes, or a design that fills the space between them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from kvsim.scenario.scenario import Scenario
from kvsim.scenario.section import Section

AXIS_ACCEPTED = "a list of numbers, words, true or false, or { from, to, steps, scale }"
"""What is accepted as an axis."""

Scalar = bool | int | float | str


def _scalar(value: Any) -> Any:
    if not isinstance(value, Scalar) or value in (math.inf, -math.inf) or value != value:
        raise ValueError(f"accepted: {AXIS_ACCEPTED}, got {value!r:.60}")
    return value


def listed(axis: Any) -> Any:
    """Convert an axis given from Python to the types that a file would have."""
    if isinstance(axis, np.ndarray):
        return axis.tolist()
    if isinstance(axis, list | tuple | range):
        return [value.item() if isinstance(value, np.generic) else value for value in axis]
    return axis


class Span(Section):
    """The values between two ends: ``steps`` of them in a grid, otherwise those that the design draws."""

    start: Annotated[int | float, Field(alias="from")]
    to: int | float
    steps: Annotated[int, Field(ge=2, le=10_000)] | None = None
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _rises(self) -> Span:
        if self.start >= self.to:
            raise ValueError(f"from ({self.start}) must lie below to ({self.to})")
        if self.scale == "log" and self.start <= 0:
            raise ValueError(f'scale = "log" begins above 0, not at {self.start}')
        return self

    def at(self, shares: NDArray[np.float64]) -> list[float]:
        """Return the values at the given shares of the range; shape (n,), between 0 and 1."""
        if self.scale == "log":
            values = self.start * (self.to / self.start) ** shares
        else:
            values = self.start + (self.to - self.start) * shares
        return [float(value) for value in np.clip(values, self.start, self.to)]

    @property
    def whole(self) -> bool:
        """Whether both ends are integers."""
        return isinstance(self.start, int) and isinstance(self.to, int)


Axis = Annotated[
    Annotated[list[Annotated[Any, AfterValidator(_scalar)]], Field(min_length=1), Tag("list")]
    | Annotated[Span, Tag("span")],
    Discriminator(lambda value: "span" if isinstance(value, dict | Span) else "list"),
]
Axes = Mapping[str, Axis]


def count_settings(axes: Axes, points: int | None, base: Scenario) -> int:
    """Number of settings; for a drawn design of so many ``points`` an upper bound."""
    if points is not None:
        return points
    columns = (_grid(axis, _is_whole(base, key, axis)) for key, axis in axes.items())
    return math.prod(len({json.dumps(value) for value in column}) for column in columns)


def lay_out(axes: Axes, design: str, points: int | None, base: Scenario) -> list[dict[str, Scalar]]:
    """The distinct settings, in the order of the design; keys that take whole numbers in ``base`` get whole ones."""
    whole = {key: _is_whole(base, key, axis) for key, axis in axes.items()}
    rows: Iterator[tuple[Scalar, ...]]
    if points is None:
        rows = itertools.product(*(_grid(axis, whole[key]) for key, axis in axes.items()))
    else:
        shares = _shares(design, len(axes), points, base.seed).T
        rows = zip(*(_drawn(axes[key], whole[key], each) for key, each in zip(axes, shares, strict=True)), strict=True)
    # Rounding to whole numbers may have made some equal.
    distinct = {json.dumps(row): row for row in rows}
    return [dict(zip(axes, row, strict=True)) for row in distinct.values()]


def _grid(axis: list[Any] | Span, whole: bool) -> list[Scalar]:
    if not isinstance(axis, Span):
        return axis
    assert axis.steps is not None
    return _drawn(axis, whole, np.linspace(0, 1, axis.steps))


def _drawn(axis: list[Any] | Span, whole: bool, shares: NDArray[np.float64]) -> list[Scalar]:
    if isinstance(axis, Span):
        return [round(value) if whole else value for value in axis.at(shares)]
    return [axis[min(int(share * len(axis)), len(axis) - 1)] for share in shares]


def _shares(design: str, axes: int, points: int, seed: int) -> NDArray[np.float64]:
    """Points of a space-filling design in the unit cube; shape (points, axes).

    Latin hypercube: McKay, Beckman, Conover, Technometrics 21(2), 1979. Scrambled Sobol sequence: Owen 1998; the first
    ``points`` of the next power of two.
    """
    from scipy.stats import qmc

    rng = np.random.default_rng(seed)
    if design == "sobol":
        drawn: NDArray[np.float64] = qmc.Sobol(axes, rng=rng).random_base2((points - 1).bit_length())
        return drawn[:points]
    return qmc.LatinHypercube(axes, rng=rng).random(points)


def _is_whole(base: Scenario, key: str, axis: list[Any] | Span) -> bool:
    """Whether a key takes whole numbers: its base value is one or, if there is none, the ends of the axis are."""
    value: Any = base.model_dump()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return isinstance(axis, Span) and axis.whole
    return isinstance(value, int) and not isinstance(value, bool)
