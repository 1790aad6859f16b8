"""Tables of a scenario that say how long something is, in tokens: one class for each kind of distribution."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, model_validator

import workloads
from kvsim.section import Section
from workloads.lengths import MAX_TOKENS


class FixedLengths(Section):
    """Always ``value`` tokens."""

    kind: Literal["fixed"]
    value: Annotated[int, Field(ge=1, le=MAX_TOKENS)]

    def build(self) -> workloads.Lengths:
        """The distribution."""
        return workloads.Fixed(self.value)


class LognormalLengths(Section):
    """exp(normal(mu, sigma)) tokens, held within [min, max]."""

    kind: Literal["lognormal"]
    mu: Annotated[float, Field(ge=-20, le=20)]
    sigma: Annotated[float, Field(ge=0, le=10)]
    min: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1
    max: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> LognormalLengths:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min})")
        return self

    def build(self) -> workloads.Lengths:
        """The distribution."""
        return workloads.Lognormal(self.mu, self.sigma, self.min, self.max)


AnyLengths = Annotated[FixedLengths | LognormalLengths, Discriminator("kind")]

LENGTHS: dict[str, type[Section]] = {"fixed": FixedLengths, "lognormal": LognormalLengths}
"""By ``kind``."""
