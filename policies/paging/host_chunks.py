"""Chunks of blocks in host memory, as vLLM 0.32.0 keeps them: its ``CPUOffloadingManager`` with ``lru`` or ``arc``.

Source: ``vllm/v1/kv_offload/cpu/manager.py`` and ``policies/``. It knows no clock: a chunk is being written from
``prepare_store`` to ``stored``, and read from ``pin`` to ``unpin``; others tell it when.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from policies.content import Key

OffloadOrder = Literal["lru", "arc"]
"""Which chunk is evicted first: the one used least recently, or as adaptive replacement has it (Megiddo and Modha,
FAST 2003)."""

_MOST_COUNTED = 64_000
"""Chunks of which it is counted how often they were offered (``max_tracker_size``)."""


@dataclass(slots=True)
class Chunk:
    """A chunk's place, and who uses it."""

    slot: int
    readers: int = -1
    """Copies under way that read it; -1 while it is being written."""


Evicted = list[tuple[Key, Chunk]]


@dataclass(slots=True, eq=False)
class Access:
    """What one request has done with chunks, which counts as a use when it ends."""

    seen: set[Key] = field(default_factory=set)
    inserted: set[Key] = field(default_factory=set)
    reused: set[Key] = field(default_factory=set)
    missed: set[Key] = field(default_factory=set)
    sought: set[Key] = field(default_factory=set)
    """Those for which a disk was asked."""


class LruOrder:
    """The least recently used first; of one request's chunks, the last first."""

    def __init__(self, n: int):
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()

    def get(self, key: Key) -> Chunk | None:
        """The chunk of a key."""
        return self._chunks.get(key)

    def insert(self, key: Key, chunk: Chunk) -> None:
        """Add a new chunk, as the most recently used."""
        self._chunks[key] = chunk

    def missed(self, key: Key) -> None:
        """A key was offered that is not there: without effect."""

    def used(self, keys: Sequence[Key], access: Access) -> None:
        """A request has ended that saw chunks of these keys, in the order of its text."""
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def evict(self, n: int, protected: Collection[Key]) -> Evicted | None:
        """Remove ``n`` chunks that nobody uses and whose keys are not protected; None, and no effect, if too few."""
        found: Evicted = []
        idle = _idle(self._chunks, protected)
        while len(found) < n:
            entry = next(idle, None)
            if entry is None:
                return None
            found.append(entry)
        for key, _ in found:
            del self._chunks[key]
        return found


class ArcOrder:
    """Chunks that were stored once, and those that were found again, in proportions that past evictions teach."""

    def __init__(self, n: int):
        self._n = n
        self._once: OrderedDict[Key, Chunk] = OrderedDict()
        self._again: OrderedDict[Key, Chunk] = OrderedDict()
        self._gone_once: OrderedDict[Key, None] = OrderedDict()
        """Keys evicted from ``_once`` lately, the oldest first."""
        self._gone_again: OrderedDict[Key, None] = OrderedDict()
        self._target = 0.0
        """How many chunks ``_once`` is to have."""

    def get(self, key: Key) -> Chunk | None:
        """The chunk of a key."""
        return self._once.get(key) or self._again.get(key)

    def insert(self, key: Key, chunk: Chunk) -> None:
        """Add a new chunk, as one that was stored once."""
        self._once[key] = chunk
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)

    def missed(self, key: Key) -> None:
        """A key was offered that is not there: if it was evicted lately, its kind is to have more room."""
        once, again = self._gone_once, self._gone_again
        if key in once:
            self._target = min(self._target + max(1, len(again) / len(once)), self._n)
            once.move_to_end(key)
        elif key in again:
            self._target = max(self._target - max(1, len(once) / len(again)), 0)
            again.move_to_end(key)

    def used(self, keys: Sequence[Key], access: Access) -> None:
        """A request has ended that saw chunks of these keys, in the order of its text."""
        for key in reversed(keys):
            if key in access.inserted and key not in access.reused:
                for part in (self._once, self._again):
                    if key in part:
                        part.move_to_end(key)
                        break
            elif key in access.reused:
                if key in self._once:
                    self._again[key] = self._once.pop(key)
                elif key in self._again:
                    self._again.move_to_end(key)

    def evict(self, n: int, protected: Collection[Key]) -> Evicted | None:
        """Remove ``n`` chunks that nobody uses and whose keys are not protected; None, and no effect, if too few."""
        found: list[tuple[Key, Chunk, bool]] = []
        left, once, again = len(self._once), _idle(self._once, protected), _idle(self._again, protected)
        for _ in range(n):
            entry = next(once, None) if left >= int(self._target) else None
            from_once = entry is not None
            if entry is None:
                entry = next(again, None)
            if entry is None:
                entry, from_once = next(once, None), True
            if entry is None:
                return None
            left -= from_once
            found.append((*entry, from_once))
        for key, _, from_once in found:
            del (self._once if from_once else self._again)[key]
            (self._gone_once if from_once else self._gone_again)[key] = None
        for ghosts in (self._gone_once, self._gone_again):
            while len(ghosts) > self._n:
                ghosts.popitem(last=False)
        return [(key, chunk) for key, chunk, _ in found]


def _idle(chunks: OrderedDict[Key, Chunk], protected: Collection[Key]) -> Iterator[tuple[Key, Chunk]]:
    return ((key, chunk) for key, chunk in chunks.items() if chunk.readers == 0 and key not in protected)


class HostChunks:
    """Room for ``n`` chunks; which of those that are offered are stored, and which are evicted for them."""

    noted = False
    """Whether note has been taken, since the end of the last step, of what has been copied behind host memory."""

    def __init__(
        self,
        n: int,
        blocks_per_chunk: int = 1,
        order: OffloadOrder = "lru",
        store_threshold: int = 0,
        *,
        answers: bool = False,
    ):
        """``store_threshold``: how often a chunk must have been offered before it is stored; below 2: it is at once.
        ``answers``: chunks of what is generated are to be offered, too."""
        self.n = n
        self.blocks_per_chunk = blocks_per_chunk
        self.answers = answers
        self._order: LruOrder | ArcOrder = LruOrder(n) if order == "lru" else ArcOrder(n)
        self._given_out = 0
        """Slots that were ever given out: the first ones."""
        self._free: list[int] = []
        """Those among them that are free again; the last one is given out first."""
        self._idle = 0
        """Chunks that are neither written nor read."""
        self._threshold = store_threshold
        self._offers: OrderedDict[Key, int] = OrderedDict()
        """How often each of the chunks offered lately was offered, where there is a threshold."""
        self.evicted: list[Key] = []
        """What was evicted since this was last cleared, in order."""

    @property
    def busy(self) -> bool:
        """Whether requests may wait for what is behind host memory."""
        return False

    def is_there(self, key: Key, access: Access) -> bool | None:
        """Whether a chunk can be read; None while it is being written."""
        chunk = self._order.get(key)
        return False if chunk is None else None if chunk.readers < 0 else True

    def pin(self, keys: Collection[Key], access: Access | None) -> list[int]:
        """Begin to read chunks, which must be there, perhaps for a request; their slots."""
        slots = []
        for key in keys:
            chunk = self._chunk(key)
            self._idle -= chunk.readers == 0
            chunk.readers += 1
            slots.append(chunk.slot)
        if access is not None:
            access.seen.update(keys)
            access.reused.update(key for key in keys if key not in access.inserted)
        return slots

    def unpin(self, keys: Collection[Key]) -> None:
        """End reading chunks."""
        for key in keys:
            chunk = self._chunk(key)
            chunk.readers -= 1
            self._idle += chunk.readers == 0

    def prepare_store(self, keys: Sequence[Key], access: Access) -> dict[Key, int] | None:
        """Begin to write those of the offered chunks that are to be stored: their slots; None where there is no room.

        Then nothing is stored, and they may be offered again.
        """
        if self._threshold >= 2:
            self._count(keys)
        new, there = [], []
        for key in keys:
            chunk = self._order.get(key)
            if chunk is None:
                new.append(key)
            elif chunk.readers >= 0:
                there.append(key)
        if self._threshold >= 2:
            new = [key for key in new if self._offers.get(key, 0) >= self._threshold]
        for key in reversed([key for key in new if key not in access.missed]):
            self._order.missed(key)
        access.missed.update(new)
        access.seen.update(new, there)
        access.reused.update(key for key in there if key not in access.inserted)
        lacking = len(new) - len(self._free) - (self.n - self._given_out)
        if lacking > 0:
            gone = self._order.evict(lacking, set(keys)) if lacking <= self._idle else None
            if gone is None:
                return None
            self._idle -= len(gone)
            self._free += [chunk.slot for _, chunk in gone]
            self.evicted += [key for key, _ in gone]
        slots = {key: self._give_out() for key in new}
        for key, slot in slots.items():
            self._order.insert(key, Chunk(slot))
        access.inserted.update(new)
        return slots

    def stored(self, keys: Collection[Key]) -> None:
        """End writing chunks."""
        for key in keys:
            self._chunk(key).readers = 0
        self._idle += len(keys)

    def ended(self, keys: Sequence[Key], access: Access) -> None:
        """A request has ended, whose text has chunks of these keys, in order."""
        self._order.used([key for key in keys if key in access.seen], access)

    def step_composed(self) -> None:
        """A step has been composed: nothing is to be done."""

    def forget(self, access: Access) -> None:
        """A request has ended, and nothing of it is being stored any more: nothing is to be done."""

    def _chunk(self, key: Key) -> Chunk:
        chunk = self._order.get(key)
        assert chunk is not None, "a chunk that is used is there"
        return chunk

    def _give_out(self) -> int:
        if self._given_out < self.n:
            self._given_out += 1
            return self._given_out - 1
        return self._free.pop()

    def _count(self, keys: Sequence[Key]) -> None:
        """Count an offer of each chunk; where there are too many to count, those offered long ago are forgotten."""
        offers = self._offers
        known = [key for key in keys if key in offers]
        for key in known:
            offers.move_to_end(key)
            offers[key] += 1
        others = len(offers) - len(set(known))
        for key in keys:
            if key in offers:
                continue
            if len(offers) >= _MOST_COUNTED:
                if not others:
                    continue
                offers.popitem(last=False)
                others -= 1
            offers[key] = 1
