"""Tables that grow row by row, or many rows at a time as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
