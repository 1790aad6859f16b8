"""The base of all sections of a scenario file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

import workloads

MAX_COUNT = 2**31 - 1
"""The most of what engines count in 32 bits; compiled code counts in 64, sums and products included."""
PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Several = Annotated[int, Field(ge=2, le=MAX_COUNT)]
MAX_ENTRIES = 10_000
"""The most entries of a list in a scenario file."""


class Section(BaseModel):
    """A table of a scenario file; refuses unknown keys, infinities and wrong types."""

    # Schemas are built when first used: a scenario builds those of all its sections at once.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class WorkloadSection(Section):
    """What all kinds of workload have; a subclass builds one."""

    max_output_tokens: PositiveInt | None = None
    """The most tokens that clients let be generated (``max_tokens`` of their requests); longer outputs are cut to it.
    By default they state none."""

    if TYPE_CHECKING:

        def build(self, seed: int, folder: Path) -> workloads.Workload:
            """Build the workload, without the limit."""

    def build_limited(self, seed: int, folder: Path) -> workloads.Workload:
        """Build the workload, with the limit that clients state."""
        built, limit = self.build(seed, folder), self.max_output_tokens
        return built if limit is None else workloads.LimitedOutputs(built, limit)


def entries(at_least: int, at_most: int) -> BeforeValidator:
    """Validator that limits the length of a list and makes a tuple of it, since sections are immutable."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple) and not at_least <= len(value) <= at_most:
            raise ValueError(f"{at_least} to {at_most} entries are expected, got {len(value)}")
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(check)
