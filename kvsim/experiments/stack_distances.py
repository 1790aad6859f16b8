"""Hits of an LRU prefix cache of every size, in one pass over the requests.

LRU's caches are nested: one of ``n`` blocks holds the first ``n`` of all blocks in order of last use, so that a block
is found where its place in that order, its *stack distance*, is at most ``n`` (Mattson et al., "Evaluation techniques
for storage hierarchies", IBM Systems Journal 9(2), 1970). A request uses its blocks from the last to the first, as vLLM
releases them, so that a block never comes before one that it follows: what each request was the last to use is the end
of its text, and the order is that of these ends, latest request first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from kvsim.scenario.prefixes import Lookup
from policies.content import Key


def lru_hits(lookups: Sequence[Lookup], sizes: Sequence[int]) -> list[int]:
    """Number of blocks found in an LRU cache of each size in blocks, as requests are served one after another.

    A block that is stored again, because its prompt ends with it and does not look it up, is held once; a real cache
    keeps both copies, so that it may find a few blocks less or more.
    """
    last_user: dict[Key, int] = {}
    """Which request was the last to use a block; along a prompt, ever earlier ones."""
    held = _Sums(len(lookups))
    """For each request, the number of blocks that it was the last to use."""
    before, runs = [], []
    for number, (_, keys, asked, _) in enumerate(lookups):
        at = 0
        while at < len(keys) and (user := last_user.get(keys[at])) is not None:
            end = bisect_left(keys, True, at, key=lambda key, user=user: last_user.get(key) != user)  # type: ignore[misc]
            if at < asked:
                before.append(at + held.after(user))
                runs.append(min(end, asked) - at)
            held.add(user, at - end)
            at = end
        last_user.update(dict.fromkeys(keys, number))
        held.add(number, len(keys))
    first, lengths = np.array(before, dtype=np.int64), np.array(runs, dtype=np.int64)
    return [int(np.clip(n - first, 0, lengths).sum()) for n in sizes]


class _Sums:
    """Numbers that change, and their sums from any place to the end: a Fenwick tree."""

    def __init__(self, n: int):
        self._tree = [0] * (n + 1)
        self._all = 0

    def add(self, at: int, amount: int) -> None:
        self._all += amount
        at += 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def after(self, at: int) -> int:
        """The sum of all numbers behind this place."""
        total = self._all
        at += 1
        while at:
            total -= self._tree[at]
            at -= at & -at
        return total
