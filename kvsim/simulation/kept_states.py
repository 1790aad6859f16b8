"""All states of a cache in a run: as a table, and as means over any part of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.rows import Table

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
