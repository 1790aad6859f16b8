"""How full and how broken up the cache was over time: means, and each state where these are kept."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.distribution import TimeMean
from kvsim.simulation.rows import Table
from policies import Usage, Usages
from policies.fast_forward.state_sums import StateSums
from policies.vocabulary import external_fragmentation, internal_fragmentation

FloatArray = NDArray[np.float64]
Cells = TypeVar("Cells", int, NDArray[np.int64])

_SHARES = ("utilization", "external_fragmentation", "internal_fragmentation")
_MEANS = {
    **{f"{name}_mean": name for name in _SHARES},
    "stored_cells_mean": "stored",
    "allocated_cells_mean": "allocated",
    "span_cells_mean": "span",
    "free_extents_mean": "free_extents",
    "largest_free_extent_mean": "largest_free_extent",
}
"""Keys of the summary, and the state that each is the mean over time of."""
_sampled = attrgetter("stored", "allocated", "placeable", "free_extents", "largest_free_extent", "span")
"""Fields of ``Usage`` and ``Usages`` from which all that is averaged follows, as ``StateSums.last`` has them."""
_COLUMNS = ("time_s", "stored", "allocated", "free", "span", "free_extents", "largest_free_extent", *_SHARES)


class CacheStates:
    """States of the first cache group as they change."""

    def __init__(self, *, averages: bool, keeps: bool):
        """``averages``: keep means over time; ``keeps``: keep all states that these are of."""
        self._means = TimeMean(list(_MEANS.values()), keeps=keeps) if averages else None
        self._capacity = 0

    def begin(self, now: float) -> None:
        """Means are taken from here on: the first request arrives."""
        if self._means is not None:
            self._means.begin(now)

    def hold(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self._capacity = usage.capacity
        if self._means is not None:
            self._means.hold(now, _averages(usage.capacity, *_sampled(usage)))

    def hold_sums(self, now: float, sums: StateSums) -> None:
        """From ``now`` on the cache goes through some states; what counts until the next one are their means."""
        if self._means is None or sums.weight <= 0:
            return
        weight = sums.weight
        stored = sums.sum_stored / weight
        self._means.hold_mean(
            now,
            (
                stored / sums.capacity,
                sums.external_fragmentation / weight,
                max(sums.internal_fragmentation / weight, 0.0),  # Less only by rounding.
                stored,
                sums.sum_allocated / weight,
                sums.sum_span / weight,
                sums.sum_free_extents / weight,
                sums.sum_largest_free_extent / weight,
            ),
            _averages(sums.capacity, *sums.last),
        )

    def extend(self, starts_s: FloatArray, usages: Usages) -> None:
        """From each of some times on the cache is in the state after that step; arrays of shape (steps,)."""
        if self._means is not None:
            self._means.extend(starts_s, _averages(self._capacity, *_sampled(usages)))

    def means(self) -> dict[str, float | None]:
        """Means over time, from the first arrival to the last change; None where none were kept or no time passed."""
        means = self._means.means() if self._means is not None else None
        return dict.fromkeys(_MEANS) if means is None else {key: means[state] for key, state in _MEANS.items()}

    def table(self) -> Table:
        """One row for each change, valid until the next; all states must be kept, and none be a mean of several."""
        assert self._means is not None, "states are kept"
        starts, *averaged = self._means.rows().T
        columns = {"time_s": starts, **dict(zip(_MEANS.values(), averaged, strict=True))}
        columns["free"] = self._capacity - columns["allocated"]
        lasted = np.append(starts[1:] != starts[:-1], True)
        shares = ("time_s", *_SHARES)
        return Table({k: columns[k] if k in shares else columns[k].astype(int) for k in _COLUMNS})[lasted]

    def kept(self) -> TimeMean:
        """All states, which must be kept."""
        assert self._means is not None, "states are kept"
        return self._means


def _averages(
    capacity: int, stored: Cells, allocated: Cells, placeable: Cells, free_extents: Cells, largest: Cells, span: Cells
) -> tuple[Any, ...]:
    """What is averaged over time, in the order of ``_MEANS``, of one state or of many."""
    return (
        stored / capacity,
        external_fragmentation(placeable, capacity - allocated),
        internal_fragmentation(stored, allocated),
        stored,
        allocated,
        span,
        free_extents,
        largest,
    )
