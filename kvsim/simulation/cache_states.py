"""How full and how broken up the cache was over time: means, and a row for each change where tables are kept."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.distribution import TimeMean
from kvsim.simulation.rows import Rows
from policies import Usage, Usages
from policies.fast_forward.state_sums import StateSums
from policies.vocabulary import external_fragmentation, internal_fragmentation

if TYPE_CHECKING:
    import pandas as pd

FloatArray = NDArray[np.float64]

_SHARES = ("utilization", "external_fragmentation", "internal_fragmentation")
_SAMPLED = ("stored", "allocated", "placeable", "free_extents", "largest_free_extent", "span")
"""Fields of ``Usage`` that are kept in the table."""
_sampled = attrgetter(*_SAMPLED)
_MEANS = {
    **{f"{name}_mean": name for name in _SHARES},
    "stored_cells_mean": "stored",
    "allocated_cells_mean": "allocated",
    "span_cells_mean": "span",
    "free_extents_mean": "free_extents",
    "largest_free_extent_mean": "largest_free_extent",
}
"""Keys of the summary, and the state that each is the mean over time of."""
_averaged = attrgetter(*_MEANS.values())
_COLUMNS = ("time_s", "stored", "allocated", "free", "span", "free_extents", "largest_free_extent", *_SHARES)


class CacheStates:
    """States of the first cache group as they change."""

    def __init__(self, *, averages: bool, tabulates: bool):
        """``averages``: keep means over time; ``tabulates``: keep a row for each change."""
        self._means = TimeMean(list(_MEANS.values())) if averages else None
        self._rows = Rows({"time_s": float, **dict.fromkeys(_SAMPLED, int)}) if tabulates else None
        self._capacity = 0

    def begin(self, now: float) -> None:
        """Means are taken from here on: the first request arrives."""
        if self._means is not None:
            self._means.begin(now)

    def hold(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self._capacity = usage.capacity
        if self._means is not None:
            self._means.hold(now, _averaged(usage))
        if self._rows is not None:
            self._rows.add((now, *_sampled(usage)))

    def hold_sums(self, now: float, sums: StateSums) -> None:
        """From ``now`` on the cache goes through some states; what counts until the next one are their means."""
        if self._means is None or sums.weight <= 0:
            return
        weight = sums.weight
        stored = sums.sum_stored / weight
        self._means.hold(
            now,
            (
                stored / sums.capacity,
                sums.external_fragmentation / weight,
                sums.internal_fragmentation / weight,
                stored,
                sums.sum_allocated / weight,
                sums.sum_span / weight,
                sums.sum_free_extents / weight,
                sums.sum_largest_free_extent / weight,
            ),
        )

    def extend(self, starts_s: FloatArray, usages: Usages) -> None:
        """From each of some times on the cache is in the state after that step; arrays of shape (steps,)."""
        if self._means is not None:
            self._means.extend(starts_s, self._averaged_columns(usages))
        if self._rows is not None:
            self._rows.extend((starts_s, *_sampled(usages)))

    def means(self) -> dict[str, float | None]:
        """Means over time, from the first arrival to the last change; None where none were kept or no time passed."""
        means = self._means.means() if self._means is not None else None
        return dict.fromkeys(_MEANS) if means is None else {key: means[state] for key, state in _MEANS.items()}

    def table(self) -> pd.DataFrame | None:
        """One row for each change, valid until the next; None if they are not kept."""
        if self._rows is None:
            return None
        table = self._rows.table()
        stored, allocated = table["stored"].to_numpy(), table["allocated"].to_numpy()
        free = self._capacity - allocated
        table["free"] = free
        table["utilization"] = stored / self._capacity
        table["external_fragmentation"] = external_fragmentation(table["placeable"].to_numpy(), free)
        table["internal_fragmentation"] = internal_fragmentation(stored, allocated)
        return table[list(_COLUMNS)].drop_duplicates("time_s", keep="last", ignore_index=True)

    def _averaged_columns(self, usages: Usages) -> Sequence[NDArray[Any]]:
        """What is averaged over time, as ``_averaged`` has it of one state."""
        free = self._capacity - usages.allocated
        return [
            usages.stored / self._capacity,
            external_fragmentation(usages.placeable, free),
            internal_fragmentation(usages.stored, usages.allocated),
            usages.stored,
            usages.allocated,
            usages.span,
            usages.free_extents,
            usages.largest_free_extent,
        ]
