"""The base of all parts of a profile and of its measurements."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Record(BaseModel):
    """Base of all parts of a profile and of its measurements: immutable, every key checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)
