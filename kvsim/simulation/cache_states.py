"""How full and how broken up the cache of a server was: its states as they change, and their means over time."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from kvsim.simulation.run_tables import SHARES, STATES, KeptStates
from policies import Usage
from policies.compiled import i64, vec
from policies.placement.rule import PlacementRule

_MEANS = {
    **{f"{name}_mean": name for name in SHARES},
    "stored_cells_mean": "stored",
    "allocated_cells_mean": "allocated",
    "span_cells_mean": "span",
    "free_extents_mean": "free_extents",
    "largest_free_extent_mean": "largest_free_extent",
}
"""Keys of the summary, and the state that each is the mean over time of."""
_FIELDS: Final[i64] = 9
"""Numbers kept of a state: when it began, and ``STATES``."""
_BLOCK: Final = 9 << 12
"""Numbers that are collected before they become an array."""


class CacheStates:
    """States of the first cache group as they change, and their means from the first arrival to the last change."""

    def __init__(self, *, keeps: bool):
        """``keeps``: keep all states."""
        self.capacity = 0
        """Cells that can hold tokens."""
        self._keeps = keeps
        self._pending = vec[float]([])
        """Start and fields of each kept state that is in no block yet, flat, and room for others."""
        self._n_pending: i64 = 0
        """Numbers in it."""
        self._blocks: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]] = []
        self._begin = self._seconds = 0.0
        self._since = math.inf
        """When the state that holds began; before the first there is none."""
        self._utilization = self._external = self._internal = 0.0
        self._stored = self._allocated = self._span = self._extents = self._largest = 0.0
        """The state that holds, whose fields are shares or cells."""
        self._sum_utilization = self._sum_external = self._sum_internal = 0.0
        self._sum_stored = self._sum_allocated = self._sum_span = self._sum_extents = self._sum_largest = 0.0
        """Sums over the states before it, each times the seconds that it held."""

    def begin(self, now: float) -> None:
        """Means are taken from here on: the first request arrives."""
        self._begin = now

    def hold(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self.capacity = usage.capacity
        largest = usage.largest_free_extent
        self._hold(now, usage.stored, usage.allocated, usage.placeable, usage.free_extents, largest, usage.span)

    def hold_state(self, now: float, rule: PlacementRule) -> None:
        """From ``now`` on the cache is in the state that a placement rule has looked at."""
        self._hold(
            now,
            float(rule.stored),
            float(rule.allocated),
            float(rule.placeable),
            float(rule.free_extents),
            float(rule.largest_free_extent),
            float(rule.span),
        )

    def _hold(
        self,
        now: float,
        stored: float,
        allocated: float,
        placeable: float,
        extents: float,
        largest: float,
        span: float,
    ) -> None:
        since = self._since
        if since < self._begin:
            since = self._begin
        lasted = now - since
        if lasted > 0:
            self._seconds += lasted
            self._sum_utilization += lasted * self._utilization
            self._sum_external += lasted * self._external
            self._sum_internal += lasted * self._internal
            self._sum_stored += lasted * self._stored
            self._sum_allocated += lasted * self._allocated
            self._sum_span += lasted * self._span
            self._sum_extents += lasted * self._extents
            self._sum_largest += lasted * self._largest
        free = self.capacity - allocated
        self._since = now
        self._utilization = stored / self.capacity
        self._external = 1.0 - placeable / free if free > 0 else 0.0
        self._internal = 1.0 - stored / allocated if allocated > 0 else 0.0
        self._stored, self._allocated, self._span = stored, allocated, span
        self._extents, self._largest = extents, largest
        if self._keeps:
            self._keep()

    def _keep(self) -> None:
        """Keep the state that holds."""
        at, pending = self._n_pending, self._pending
        if at == len(pending):
            self._settle()
            self._pending = pending = vec[float]([0.0] * _BLOCK)
            at = 0
        pending[at], pending[at + 1], pending[at + 2] = self._since, self._utilization, self._external
        pending[at + 3], pending[at + 4], pending[at + 5] = self._internal, self._stored, self._allocated
        pending[at + 6], pending[at + 7], pending[at + 8] = self._span, self._extents, self._largest
        self._n_pending = at + _FIELDS

    def means(self) -> dict[str, float | None]:
        """Means over time, from the first arrival to the last change; None where none were kept or no time passed."""
        if self._seconds <= 0:
            return dict.fromkeys(_MEANS)
        sums = (
            *(self._sum_utilization, self._sum_external, self._sum_internal, self._sum_stored),
            *(self._sum_allocated, self._sum_span, self._sum_extents, self._sum_largest),
        )
        by_state = {state: total / self._seconds for state, total in zip(STATES, sums, strict=True)}
        return {key: by_state[state] for key, state in _MEANS.items()}

    def kept(self) -> KeptStates:
        """All states, which must be kept."""
        assert self._keeps, "states are kept"
        self._settle()
        self._blocks = [np.concatenate(self._blocks or [np.zeros((0, int(_FIELDS)))])]
        return KeptStates(self._blocks[0], self.capacity)

    def _settle(self) -> None:
        if self._n_pending:
            kept = np.asarray(self._pending, dtype=np.float64)[: self._n_pending]
            self._blocks.append(kept.reshape(-1, int(_FIELDS)))
        self._pending, self._n_pending = vec[float]([]), 0
