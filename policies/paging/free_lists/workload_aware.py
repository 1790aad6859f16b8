"""Workload-aware eviction: the cached block that is least likely to be used again soon is forgotten first.

Wang et al., "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large Cloud Provider" (USENIX
ATC 2025, arXiv 2506.02634), and vLLM pull request 22236 by its authors: blocks are used again after an exponential time
that depends on the kind of their request; of each kind only the block released longest ago is looked at.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys

_GHOSTS = 8
"""So many times the blocks of the pool are remembered after they have been evicted."""


class _Kind:
    """The free cached blocks of one kind of request, and how such blocks were used again."""

    def __init__(self) -> None:
        self.queue: OrderedDict[int, int] = OrderedDict()
        """The free blocks, and when each was released, the longest ago first."""
        self.releases = 0
        self.reuses = 0
        """Releases after which the block was used again."""
        self.ages = 0
        """Times from release to use again, summed over all of these."""
        self.worth = 0.0
        """Logarithm of the probability that a block just released is used again in the time of one turnover."""
        self.decay = 0.0
        """What that logarithm loses in each unit of time."""


class WorkloadAwareQueues:
    """Plain blocks, last released first, then cached ones by their chance to be used again.

    A free list knows no clock: time is counted in blocks handed out. A pool turns over once when as many have been
    handed out as it has. With p the share of a kind's releases that were followed by another use, and m the mean time
    until then, a block of age t is used again before the next turnover, T, with probability
    ``p * (exp(-t / m) - exp(-(t + T) / m))``; p and m are learned from all releases so far, each as if a release of
    average outcome had been seen before. What is asked for again after its eviction counts too, as in the authors'
    profiles, which are those of a cache that never evicts. Blocks of one request are forgotten from the last to the
    first, since they are released so.
    """

    tracks_use = True

    def __init__(self, blocks: Iterable[int], keys: BlockKeys):
        self._plain = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._kind_of = [0] * len(keys)
        """For each block the kind of the request that used it last."""
        self._kinds: dict[int, _Kind] = {}
        self._all = _Kind()
        """Releases and uses of all kinds together."""
        self._ghosts: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """For keys of evicted blocks: the kind, and the time of release."""
        self._now = 0
        """Blocks handed out so far."""
        self._turnover = max(len(keys), 1)
        self._learned = True
        """Whether ``worth`` and ``decay`` are to be computed anew."""
        self._n_cached = 0

    def __len__(self) -> int:
        return len(self._plain) + self._n_cached

    def take(self, n: int) -> list[int]:
        """Hand out plain blocks, then those with the smallest chance."""
        taken: list[int] = []
        for _ in range(n):
            self._now += 1
            if self._plain:
                taken.append(self._plain.popitem(last=False)[0])
                continue
            number = self._least_likely(self._heads(), self._now)
            block, released = self._kinds[number].queue.popitem(last=False)
            self._n_cached -= 1
            self._remember(block, number, released)
            taken.append(block)
        return taken

    def _heads(self) -> dict[int, int]:
        """For each kind with free blocks, when the first of them was released."""
        return {number: next(iter(kind.queue.values())) for number, kind in self._kinds.items() if kind.queue}

    def _least_likely(self, heads: dict[int, int], now: int) -> int:
        """The kind whose block, released at this time, has the smallest chance; of several the one released first."""
        if self._learned:
            self._fit()
        found, least, oldest = -1, 0.0, 0
        for number, released in heads.items():
            kind = self._kinds[number]
            chance = kind.worth - kind.decay * (now - released)
            if found < 0 or chance < least or (chance == least and (released, number) < (oldest, found)):
                found, least, oldest = number, chance, released
        return found

    def _fit(self) -> None:
        """Compute each kind's probabilities from what was seen of it."""
        self._learned = False
        every = self._all
        share = (every.reuses + 1) / (every.releases + 2)
        mean = max(every.ages / every.reuses, 1.0) if every.reuses else float(self._turnover)
        for kind in self._kinds.values():
            p = (kind.reuses + share) / (kind.releases + 1)
            m = (kind.ages + mean) / (kind.reuses + 1)
            kind.decay = 1 / m
            kind.worth = math.log(p) + math.log(-math.expm1(-self._turnover / m))

    def _remember(self, block: int, number: int, released: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._ghosts[key] = number, released
            self._ghosts.move_to_end(key)
            if len(self._ghosts) > _GHOSTS * len(self._keys):
                self._ghosts.popitem(last=False)

    def _note_use(self, number: int, released: int) -> None:
        """A block of this kind, released at this time, is used again."""
        for kind in (self._kinds[number], self._all):
            kind.reuses += 1
            kind.ages += self._now - released
        self._learned = True

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back, cached ones to the end of their kind's queue."""
        for block in blocks:
            if self._keys[block] is None:
                self._put_first(block)
                continue
            number = self._kind_of[block]
            kind = self._kinds.get(number)
            if kind is None:
                kind = self._kinds[number] = _Kind()
            kind.queue[block] = self._now
            kind.releases += 1
            self._all.releases += 1
            self._n_cached += 1
            self._learned = True

    def _put_first(self, block: int) -> None:
        self._plain[block] = None
        self._plain.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """A block is used again: learn from it."""
        number = self._kind_of[block]
        self._n_cached -= 1
        self._note_use(number, self._kinds[number].queue.pop(block))

    def forget(self, block: int) -> None:
        """Put the block in front of the plain ones."""
        kind = self._kinds.get(self._kind_of[block])
        if kind is not None and kind.queue.pop(block, None) is not None:
            self._n_cached -= 1
        self._put_first(block)

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """Note the kind; a text that had been evicted is used again."""
        self._kind_of[block] = kind
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self._note_use(*ghost)

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """The block is of this request's kind from now on, if that is known."""
        if kind:
            self._kind_of[block] = kind

    def order(self) -> list[int]:
        """Plain blocks, then cached ones as they would be handed out if nothing else happened."""
        found, now = list(self._plain), self._now + len(self._plain)
        left = {number: list(kind.queue.items())[::-1] for number, kind in self._kinds.items() if kind.queue}
        while left:
            now += 1
            number = self._least_likely({number: queue[-1][1] for number, queue in left.items()}, now)
            found.append(left[number].pop()[0])
            if not left[number]:
                del left[number]
        return found
