"""What happened in a run, row by row: tables of requests, of the cache, of forward passes, and of causes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.job import Job
from policies.placement.rule import PassReads

if TYPE_CHECKING:
    import pandas as pd

_PENDING = 4096
"""Single rows that are collected before they become arrays."""


class Table:
    """Columns of equal length by name, and a pandas table of them where one is wanted: pandas takes long to import."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]):
        """``columns``: arrays of shape (rows,)."""
        self.columns = columns

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A pandas table of the columns."""
        import pandas as pd

        # Of a list of texts, pandas makes a column of texts, whatever its version.
        return pd.DataFrame({k: v.tolist() if v.dtype == object else v for k, v in self.columns.items()})

    def sorted_by(self, *names: str) -> Table:
        """The rows in order of a column, and where it is equal of the next; ties stay in order."""
        return self[np.lexsort([self.columns[name] for name in reversed(names)])]

    def with_columns(self, columns: Mapping[str, NDArray[Any]]) -> Table:
        """The table with columns added or replaced."""
        return Table({**self.columns, **columns})

    def to_csv(self) -> str:
        """The text of a CSV file, numbers with all of their digits."""
        rows = zip(*(column.tolist() for column in self.columns.values()), strict=True)
        return "".join(f"{','.join(map(str, row))}\n" for row in ((*self.columns,), *rows))

    def __getitem__(self, rows: slice | NDArray[Any]) -> Table:
        """Some of the rows."""
        return Table({name: column[rows] for name, column in self.columns.items()})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Rows:
    """Rows of numbers, kept by column."""

    def __init__(self, columns: Mapping[str, type]):
        """``columns``: names in order, each with ``int`` or ``float``."""
        self._columns = columns
        self._pending: list[tuple[float, ...]] = []
        self._blocks: list[list[NDArray[np.generic]]] = [[] for _ in columns]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, row: tuple[float, ...]) -> None:
        """Add one row."""
        self._pending.append(row)
        self._length += 1
        if len(self._pending) == _PENDING:
            self._settle()

    def table(self) -> Table:
        """All rows, in the order in which they were added."""
        self._settle()
        for i, (blocks, kind) in enumerate(zip(self._blocks, self._columns.values(), strict=True)):
            self._blocks[i] = [np.concatenate(blocks) if blocks else np.empty(0, dtype=kind)]
        return Table({name: blocks[0] for name, blocks in zip(self._columns, self._blocks, strict=True)})

    def _settle(self) -> None:
        if self._pending:
            kinds = self._columns.values()
            for blocks, column, kind in zip(self._blocks, zip(*self._pending, strict=True), kinds, strict=True):
                blocks.append(np.array(column, dtype=kind))
            self._pending.clear()


SHARES = ("utilization", "external_fragmentation", "internal_fragmentation")
STATES = (*SHARES, "stored", "allocated", "span", "free_extents", "largest_free_extent")
"""The fields of a state."""
_COLUMNS = ("time_s", "stored", "allocated", "free", "span", "free_extents", "largest_free_extent", *SHARES)


@dataclass(frozen=True)
class KeptStates:
    """The states of the first cache group, each valid until the next."""

    rows: NDArray[np.float64]
    """The start of each state in seconds, then its fields; shape (states, 1 + fields)."""
    capacity: int
    """Cells that can hold tokens."""

    def means_between(self, start_s: float, end_s: float) -> dict[str, float] | None:
        """Each field's mean over time from ``start_s`` to ``end_s``; None where no time passes."""
        starts, *states = self.rows.T
        lasted = np.diff(np.clip(np.append(starts, end_s), start_s, end_s))
        seconds = float(lasted.sum())
        if seconds <= 0:
            return None
        # BLAS would sum in an order that depends on its threads.
        totals = [float((lasted * column).sum()) for column in states]
        return {name: total / seconds for name, total in zip(STATES, totals, strict=True)}

    def table(self) -> Table:
        """One row for each change; a state that lasted no time is left out."""
        starts, *averaged = self.rows.T
        columns = {"time_s": starts, **dict(zip(STATES, averaged, strict=True))}
        columns["free"] = self.capacity - columns["allocated"]
        lasted = np.append(starts[1:] != starts[:-1], True)
        shares = ("time_s", *SHARES)
        return Table({k: columns[k] if k in shares else columns[k].astype(int) for k in _COLUMNS})[lasted]


_PASSES = {"start_s": float, "seconds": float, "tokens": int, "chunks": int, "scores": int, "cells_read": int}
_REQUESTS: dict[str, tuple[type, str]] = {
    "id": (int, "request.id"),
    "status": (object, "status"),
    "arrival_s": (float, "arrival_s"),
    "started_s": (float, "started_s"),
    "first_token_s": (float, "first_token_s"),
    "finished_s": (float, "finished_s"),
    "prompt_tokens": (int, "request.prompt_tokens"),
    "output_tokens": (int, "generated"),
    "truncated": (bool, "truncated"),
    "cached_tokens": (int, "cached"),
    "preemptions": (int, "preemptions"),
    "error": (object, "error"),
    "failure": (object, "failure.value"),
}
"""Columns of the table of requests: their type, and where a job has their values."""


class Tables(NamedTuple):
    """What happened in a run, row by row; times in seconds."""

    requests: Table
    """One row for each request, in order of its number."""
    states: KeptStates
    """How full and how broken up the cache was, for means from the arrival of a request to the end of another; columns
    are fields of ``Usage``."""
    cache: Table | None = None
    """The state of the cache over time: one row for each change, valid until the next."""
    passes: Table | None = None
    """One row for each forward pass."""
    causes: Table | None = None
    """One row for each completed request: what its seconds were spent on (``TimeBreakdown.table``)."""


class PassLog:
    """A row for each forward pass."""

    def __init__(self) -> None:
        self._rows = Rows(_PASSES)

    def add(self, start_s: float, seconds: float, work: PassReads) -> None:
        """One pass."""
        group = work.groups[0]
        self._rows.add((start_s, seconds, int(work.tokens), int(work.chunks), group.scores, int(group.span)))

    def table(self) -> Table:
        """All passes, in the order in which they were run."""
        return self._rows.table()


def requests_table(jobs: Sequence[Job]) -> Table:
    """One row for each job that has ended, in order of its request's number; times in seconds."""
    table = Table(
        {name: np.array(list(map(attrgetter(at), jobs)), dtype=kind) for name, (kind, at) in _REQUESTS.items()}
    )
    arrived, first, finished, output = (
        table.columns[name] for name in ("arrival_s", "first_token_s", "finished_s", "output_tokens")
    )
    later = np.where(output > 1, output - 1, 1)
    latencies = {
        "ttft_s": first - arrived,
        "e2e_s": finished - arrived,
        "tpot_s": np.where(output > 1, (finished - first) / later, math.nan),
    }
    return table.with_columns(latencies).sorted_by("id")
