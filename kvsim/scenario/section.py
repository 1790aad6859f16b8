"""What every section of a scenario file has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

MAX_ENTRIES = 10_000
"""A list in a scenario file has no more."""


class Section(BaseModel):
    """Refuses unknown keys, infinities and wrong types: a misspelt key must not pass for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def entries(at_least: int, at_most: int) -> BeforeValidator:
    """For a key that is a list in the file, of so many entries; here a tuple, as a section cannot change."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple) and not at_least <= len(value) <= at_most:
            raise ValueError(f"{at_least} to {at_most} entries are expected, got {len(value)}")
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(check)
