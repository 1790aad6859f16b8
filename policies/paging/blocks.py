"""A pool of blocks with reference counts and a prefix cache: vLLM's ``BlockPool``.

Order and rules are those of vLLM 0.33.0 (``vllm/v1/core/block_pool.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from policies.cells.free_cells import FreeCells
from policies.compiled import i32, i64, vec
from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks

NULL: Final = 0
"""Stands for no block in a block table."""
PRIVATE: Final[Key] = -2
"""Stands for the key of a block that is cached, but says what no other sequence says: none will look for it. Python's
hashes are never -1, and keys that count on from one hardly ever -2."""


class BlockPool:
    """Blocks ``first .. n - 1``, free or held by one or more sequences; full ones may be found by their key.

    Several blocks may be cached under the same key; the one cached first is found.
    """

    def __init__(self, n: int, free: Callable[[range, BlockKeys], FreeBlocks], *, first: int = 1):
        self.n = n
        self.first = first
        self.keys: BlockKeys = [None] * n
        """Each block's key while it is cached, else None."""
        self._refs = vec[i32]([0] * n)
        self._counting = True
        """Whether the reference counts are up to date; if not, no block is shared and none is cached."""
        self.free = free(range(first, n), self.keys)
        self.on_evict: Callable[[int, Key], None] | None = None
        """Called with a cached block and its key before it is handed out for other tokens."""
        self.n_free_cached = 0
        """Free blocks that are cached."""
        self._extra_refs = 0
        """References beyond the first, summed over all blocks."""
        self.extents: FreeCells | None = None
        """The free extents, once they are kept."""
        self._by_key: dict[Key, int | dict[int, None]] = {}
        """For each key the block, or the blocks in the order in which they were cached."""
        self._has_cached = False
        """Whether any block was ever cached."""

    @property
    def refs(self) -> vec[i32]:
        """For each block the number of sequences that hold it."""
        refs = self._refs
        if not self._counting:
            for block in range(self.first, self.n):
                refs[block] = 1
            for block in self.free.order():
                refs[block] = 0
            self._counting = True
        return refs

    def holders(self, block: int) -> int:
        """Number of sequences that hold a block, which must be in use."""
        return int(self._refs[block]) if self._counting else 1

    def keep_extents(self) -> FreeCells:
        """The free extents, which are kept from the first call on."""
        if self.extents is None:
            self.extents = FreeCells.of(self.n, self.free.order())
        return self.extents

    def stop_counting(self) -> None:
        """Save the work of reference counts until they matter again, if no block is shared and none is cached.

        Until then every block that is not free is held by one sequence.
        """
        if not self._extra_refs and not self._has_cached:
            self._counting = False

    @property
    def n_cached(self) -> int:
        """Number of different keys that can be found."""
        return len(self._by_key)

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` blocks with one reference each; they are no longer cached."""
        blocks = self.free.take(n)
        if self.extents is not None:
            self.extents.take_each(blocks)
        if not self._counting:
            return blocks
        refs, keys, on_evict = self._refs, self.keys, self.on_evict
        found, evicted = self._by_key, 0
        for block in blocks:
            at: i64 = block
            refs[at] = 1
            key = keys[at]
            if key is None:
                continue
            evicted += 1
            if key == PRIVATE:
                keys[at] = None
                continue
            if on_evict is not None:
                on_evict(block, key)
            cached = found.pop(key)
            if cached == block:
                keys[at] = None
            else:
                found[key] = cached
                self._drop(block, key)
        self.n_free_cached -= evicted
        return blocks

    def find(self, key: Key) -> int | None:
        """The block that is cached under a key, or None."""
        found = self._by_key.get(key)
        return next(iter(found)) if isinstance(found, dict) else found

    def leading(self, keys: Iterable[Key]) -> list[int]:
        """The blocks cached under these keys, up to the first key that is not cached."""
        blocks = []
        found = self._by_key
        for key in keys:
            block = found.get(key)
            if block is None:
                break
            blocks.append(next(iter(block)) if isinstance(block, dict) else block)
        return blocks

    def trailing(self, keys: Sequence[Key], n: int) -> list[int]:
        """The last ``n`` blocks in a row that are cached, with ``NULL`` for each block before them; where there are no
        ``n`` in a row, the leading blocks. A sliding window needs to see no more (vLLM's ``SlidingWindowManager``)."""
        run: list[int] = []
        for at in range(len(keys) - 1, -1, -1):
            block = self.find(keys[at])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) >= n:
                return [NULL] * at + run[::-1]
        return run[::-1]

    def touch(self, blocks: Iterable[int], kind: int = 0) -> None:
        """Add a reference to each of these cached blocks, which may be free, for a request of this kind."""
        refs, keys, free = self.refs, self.keys, self.free
        for block in blocks:
            if refs[block] == 0:
                free.remove(block)
                self.n_free_cached -= 1
                if self.extents is not None:
                    self.extents.take(block, 1)
            else:
                self._extra_refs += 1
            refs[block] += 1
            key = keys[block]
            if key is not None:
                free.hit(block, key, kind)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which must be in use."""
        refs = self.refs
        for block in blocks:
            refs[block] += 1
            self._extra_refs += 1

    def release(self, blocks: list[int]) -> list[int]:
        """Drop a reference to each of these blocks; returns those that are free now, in order."""
        gone = self._drop_references(blocks)
        self.free.release(gone)
        if self.extents is not None:
            self.extents.release_each(gone)
        return gone

    def _drop_references(self, blocks: list[int]) -> list[int]:
        """Returns the blocks that no sequence holds any more, in order."""
        if not self._counting:
            return blocks
        refs, keys, gone, cached = self._refs, self.keys, list[int](), 0
        shared = self._extra_refs > 0
        for block in blocks:
            at: i64 = block
            refs[at] -= 1
            if shared and refs[at] > 0:
                self._extra_refs -= 1
                continue
            if shared:
                gone.append(block)
            if keys[at] is not None:
                cached += 1
        self.n_free_cached += cached
        return gone if shared else blocks

    def store(self, block: int, key: Key, kind: int = 0) -> None:
        """Cache a block in use under a key, for a request of this kind."""
        self._begin_caching()
        self.keys[block] = key
        found = self._by_key.get(key)
        if found is None:
            self._by_key[key] = block
        elif isinstance(found, int):
            self._by_key[key] = {found: None, block: None}
        else:
            found[block] = None
        self.free.stored(block, key, kind)

    def store_all(self, blocks: Sequence[int], keys: Sequence[Key], kind: int = 0) -> None:
        """Cache blocks in use under their keys, in this order, except those that are cached already."""
        if self.free.tracks_use or not self._by_key.keys().isdisjoint(keys):
            for block, key in zip(blocks, keys, strict=True):
                if self.keys[block] is None:
                    self.store(block, key, kind)
            return
        self._begin_caching()
        own = self.keys
        for block, key in zip(blocks, keys, strict=True):
            own[block] = key
        self._by_key.update(zip(keys, blocks, strict=True))

    @property
    def hides_private(self) -> bool:
        """Whether blocks that no other sequence looks for may be cached without a key: nobody tells them apart."""
        return not self.free.tracks_use and self.on_evict is None

    def store_private(self, blocks: list[int]) -> None:
        """Cache blocks in use that no other sequence will look for, except those that are cached already.

        ``hides_private`` must be true.
        """
        self._begin_caching()
        own = self.keys
        for block in blocks:
            at: i64 = block
            if own[at] is None:
                own[at] = PRIVATE

    def _begin_caching(self) -> None:
        if not self._counting:
            _ = self.refs
        self._has_cached = True

    def forget(self, block: int, *, evicted: bool = True) -> None:
        """Remove a block from the prefix cache, free or not. Not ``evicted``: it never held what its key says."""
        key = self.keys[block]
        if key is not None:
            if evicted and self.on_evict is not None:
                self.on_evict(block, key)
            self._drop(block, key)
            if self.refs[block] == 0:
                self.n_free_cached -= 1
                self.free.forget(block)

    def forget_all(self) -> bool:
        """Empty the prefix cache (vLLM's ``reset_prefix_cache``); False and no effect while a block is in use."""
        if len(self.free) != self.n - self.first:
            return False
        for block, key in enumerate(self.keys):
            if key is not None:
                self.keys[block] = None
                self.free.forget(block)
        self._by_key.clear()
        self.n_free_cached = 0
        return True

    def _drop(self, block: int, key: Key) -> None:
        self.keys[block] = None
        if key == PRIVATE:
            return
        found = self._by_key[key]
        if isinstance(found, int):
            del self._by_key[key]
            return
        del found[block]
        if len(found) == 1:
            self._by_key[key] = next(iter(found))
