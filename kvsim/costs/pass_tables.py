"""Tables of what the parts of a forward pass take on a device, between whose entries times are interpolated.

A pass is the work on its tokens (matrices, norms, experts, the exchange between devices), the language-model head for
its sequences, and attention: of sequences that decode, and of chunks of prompts. What was measured or estimated in one
place is in the tables as it is; between two entries it is linear, and behind the last one it goes on as between the
last two. Tables are therefore made as far as servers go, by physics where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from kvsim.costs.records import Record, Seconds
from kvsim.costs.tables import FloatArray

_MOST = 2**31
Axis = Annotated[tuple[Annotated[int, Field(ge=0, le=_MOST)], ...], Field(min_length=2)]
"""Numbers of tokens, sequences or cells, rising."""


def _check_axes(**axes: Sequence[int]) -> None:
    for name, axis in axes.items():
        if any(a >= b for a, b in pairwise(axis)):
            raise ValueError(f"{name} must rise")


class Line(Record):
    """Seconds by one number."""

    at: Axis
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_axes(at=self.at)
        if len(self.seconds) != len(self.at):
            raise ValueError(f"seconds must be {len(self.at)}, as at")
        return self

    def each(self, stop: int) -> FloatArray:
        """The seconds of 0, 1, ..., ``stop - 1``: none for 0; shape (stop,)."""
        numbers = np.arange(stop, dtype=float)
        found: FloatArray = np.interp(numbers, self.at, self.seconds)
        low, high = self.at[-2:]
        slope = max(self.seconds[-1] - self.seconds[-2], 0.0) / (high - low)
        found += slope * np.maximum(numbers - high, 0.0)
        found[0] = 0.0
        return found


class Grid(Record):
    """Seconds by two numbers."""

    rows: Axis
    columns: Axis
    seconds: tuple[tuple[Seconds, ...], ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_axes(rows=self.rows, columns=self.columns)
        if len(self.seconds) != len(self.rows) or any(len(row) != len(self.columns) for row in self.seconds):
            raise ValueError(f"seconds must be {len(self.rows)} rows of {len(self.columns)}")
        return self


class Together(Record):
    """How many times as long attention takes where a prompt and sequences that decode are in one pass, as both alone.

    Kernels that take both in one launch neither overlap perfectly nor run one behind the other.
    """

    tokens: Axis
    """Tokens of the prompt in the pass."""
    cached: Axis
    """Its tokens that were computed before."""
    sequences: Axis
    """Sequences that decode."""
    cells: Axis
    """Cells of each of them."""
    ratios: tuple[Annotated[float, Field(ge=0, le=1000)], ...]
    """One for each combination, the last axis running fastest."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_axes(tokens=self.tokens, cached=self.cached, sequences=self.sequences, cells=self.cells)
        size = len(self.tokens) * len(self.cached) * len(self.sequences) * len(self.cells)
        if len(self.ratios) != size:
            raise ValueError(f"ratios must be {size}, one for each combination")
        return self


class PassTables(Record):
    """What the parts of a pass take in all layers on a device, or on those that share a model."""

    work: Line
    """All but attention and head, by tokens of the pass."""
    prompt_work: Line | None = None
    """All but attention and head where a prompt is in the pass; None: as ``work``."""
    head: Line
    """The language-model head and the sampler, by sequences."""
    decode: Grid
    """Attention of sequences that decode: rows are sequences, columns the cells of each, which is their mean."""
    prompt: Grid
    """Attention of the chunks of prompts in a pass: rows are their tokens, columns the cells that a token sees on the
    mean."""
    together: Together | None = None
    """None: attention of prompts and of sequences that decode take as long in one pass as alone."""

    @property
    def cell_s(self) -> float:
        """Seconds of a further cell of a sequence that decodes alone, in a long context."""
        row, columns = self.decode.seconds[0], self.decode.columns
        return (row[-1] - row[-2]) / (columns[-1] - columns[-2])
