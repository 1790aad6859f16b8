"""The attention that tokens received, measured by the engine: what policies that evict tokens rank them by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies import MicroBatch, Policy
from policies.layouts.token_eviction import TokenEvictionPolicy
from real_engine.arrays import FloatArray, IntArray


class MeasuredAttention:
    """Sums of softmax weights by cache group, sequence and position, over query tokens, heads and a group's layers.

    Cells may move between passes: what a token received belongs to its position. H2O (Zhang et al., arXiv 2306.14048)
    ranks tokens by the sum over all queries, SnapKV (Li et al., arXiv 2404.14469) by that over the prompt's last ones.
    """

    def __init__(self, observed: int | None = None):
        """``observed``: sum over so many latest query tokens of each sequence only; None: over all."""
        self._observed = observed
        self._rows: dict[tuple[int, int], FloatArray] = {}
        """By group and sequence: shape (n_rows, positions); one row that sums up all queries, or one for each of the
        latest."""

    def note(self, batch: MicroBatch, received: Sequence[FloatArray]) -> None:
        """Add a pass; ``received``: for each group, the weights of each token on each cell, (n_tokens, n_cells)."""
        for group, (place, by_cell) in enumerate(zip(batch.places, received, strict=True)):
            at = 0
            for chunk, view in zip(batch.chunks, place.views, strict=True):
                queries = by_cell[at : at + chunk.n, view.cells]
                at += chunk.n
                self._add((group, chunk.seq), queries, view.positions)

    def scores(self, group: int, seq: int, positions: IntArray) -> NDArray[np.float64]:
        """What the tokens at ``positions`` of a sequence have received; 0 where no pass has seen them yet."""
        rows = self._rows.get((group, seq))
        found = np.zeros(len(positions))
        if rows is not None:
            seen = positions < rows.shape[1]
            found[seen] = rows[:, positions[seen]].sum(axis=0, dtype=np.float64)
        return found

    def forget(self, seq: int) -> None:
        """Drop all that is known of a sequence."""
        for key in [key for key in self._rows if key[1] == seq]:
            del self._rows[key]

    def _add(self, key: tuple[int, int], queries: FloatArray, positions: IntArray) -> None:
        """Add the weights of a chunk's queries, shape (n, len(positions)), to those of its sequence."""
        rows = self._rows.get(key, np.zeros((0 if self._observed else 1, 0), dtype=np.float32))
        needed = int(positions[-1]) + 1
        if rows.shape[1] < needed:
            # Twice the room, so that a sequence that grows by a token in each pass is not copied each time.
            grown = np.zeros((len(rows), 2 * needed), dtype=np.float32)
            grown[:, : rows.shape[1]] = rows
            rows = grown
        if self._observed is None:
            rows[0, positions] += queries.sum(axis=0)
        else:
            latest = np.zeros((min(len(queries), self._observed), rows.shape[1]), dtype=np.float32)
            latest[:, positions] = queries[-self._observed :]
            rows = np.concatenate([rows, latest])[-self._observed :]
        self._rows[key] = rows


def measured_for(policy: Policy) -> MeasuredAttention | None:
    """What an engine must feed after each pass for a policy to evict by real attention; None if it asks for none.

    The passes of a step must not be placed before those of the step before have run.
    """
    if not isinstance(policy, TokenEvictionPolicy):
        return None
    policy.attention = measured = MeasuredAttention(policy.rule.queries)
    return measured
