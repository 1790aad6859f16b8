"""One memory for layers of several kinds: large pages, each of which is cut into small pages of one kind at a time.

Zhang et al., "Jenga: Effective Memory Management for Serving LLM with Heterogeneity" (SOSP 2025, arXiv 2503.18292): a
large page has the least common multiple of the sizes of the small ones, so that none is left over in it. Small pages
are the blocks of a pool for each kind of layer. Page 0 is never handed out: its first block stands for no block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.cells.free_cells import FreeCells
from policies.compiled import i32, i64, vec
from policies.content import Key
from policies.paging.block_table import blocks_for
from policies.paging.free_lists.protocol import BlockKeys
from policies.paging.free_lists.uncached import FreeStack


class LargePages:
    """Which kind of layer has each large page, and which pages are due to be given to another.

    A page of which no block is in use goes back at once, unless blocks in it are cached: then it is *idle*. Idle pages
    are taken from their kinds when no other is left, the one first that has been idle longest whatever its kind, so
    that the kinds lose a prefix at about the same time: one kind alone would keep it in vain.
    """

    def __init__(self, n: int):
        self.n = n
        self.kinds: list[SmallPages] = []
        """The small pages of each kind."""
        self.owner = vec[i32]([-1] * n)
        """The kind that has each page; -1 for none."""
        self.in_use = vec[i32]([0] * n)
        """Blocks in use in each page."""
        self.extents = FreeCells.of(n, range(1, n))
        """Pages without a block in use."""
        self.idle: dict[int, None] = {}
        """Idle pages, the one first that has been so longest."""
        self.taker = -1
        """The sequence that takes blocks next."""
        self.held_back = 0
        """Pages that are left to the kinds that take blocks after this one."""
        self.changed = True
        """Whether any block has been taken or given back since ``look``."""
        self.free_blocks: list[int] = []
        """For each kind the free blocks in pages that have a block in use; as ``look`` found it, like the next ones."""
        self.placeable_blocks = 0
        """The most blocks of every kind that could be taken."""
        self.free_extents = 0
        self.largest_free_extent = 0
        self.used_pages = 0
        """One past the last page with a block in use."""
        self._unowned = FreeStack(range(1, n))

    @property
    def n_unowned(self) -> int:
        """Pages that no kind has."""
        return len(self._unowned)

    @property
    def n_available(self) -> int:
        """Pages that may be given to any kind."""
        return len(self._unowned) + len(self.idle)

    def look(self) -> None:
        """Count what is free now."""
        if not self.changed:
            return
        self.changed = False
        self.free_blocks = [kind.n_free_beside_idle for kind in self.kinds]
        self.free_extents, self.largest_free_extent = self.extents.lengths.count, self.extents.largest
        self.used_pages = max(self.extents.used_below(self.n), 0)
        least, most, available = 0, self.n * self.kinds[0].per_page, self.n_available
        while least < most:
            middle, pages = (least + most + 1) // 2, 0
            for kind, free in zip(self.kinds, self.free_blocks, strict=True):
                if middle > free:
                    pages += (middle - free + kind.per_page - 1) // kind.per_page
            if pages <= available:
                least = middle
            else:
                most = middle - 1
        self.placeable_blocks = least

    def pages_for(self, needs: Sequence[int], found: Sequence[Sequence[int]]) -> tuple[list[int], int]:
        """For each kind the pages that it must be given to have ``needs`` blocks more; and idle pages that it keeps.

        ``found``: cached blocks that will be in use again; ``needs`` includes those of them that are free.
        """
        pages, kept = [], 0
        for kind, need, blocks in zip(self.kinds, needs, found, strict=True):
            again = len({block // kind.per_page for block in blocks} & self.idle.keys()) if blocks else 0
            missing = need - kind.n_free_beside_idle - again * kind.per_page
            pages.append(blocks_for(missing, kind.per_page) if missing > 0 else 0)
            kept += again
        return pages, kept

    def take(self, kind: int) -> int:
        """Give a page that no kind has to this one."""
        (page,) = self._unowned.take(1)
        self.owner[page] = i32(kind)
        return page

    def take_single(self, kind: int, n: int) -> list[int]:
        """Give a kind ``n`` pages of one block, which it uses, or as many as no kind has."""
        pages = self._unowned.take(max(min(n, len(self._unowned)), 0))
        for page in pages:
            self.owner[page] = i32(kind)
            self.in_use[page] = 1
        self.extents.take_each(pages)
        self.changed = True
        return pages

    def take_back(self, page: int) -> None:
        """The page belongs to no kind any more."""
        self.owner[page] = -1
        self._unowned.push(page)

    def evict_oldest(self) -> None:
        """Forget what is cached in the page that has been idle longest, which then belongs to no kind."""
        page = next(iter(self.idle))
        self.kinds[int(self.owner[page])].forget_page(page)


class SmallPages:
    """The free list of one kind's blocks: ``FreeBlocks`` for the kind's pool.

    A block is taken, in this order: from the page that its sequence has begun, so that sequences seldom share a page
    and give it back whole; from a page that no kind has; from any page of the kind; from the page that has been idle
    longest, of which all blocks are then forgotten; and last, the cached block that was released first.
    """

    tracks_use = False

    def __init__(self, memory: LargePages, per_page: int, keys: BlockKeys):
        self.per_page = per_page
        """Blocks in a large page."""
        self.forget_block: Callable[[int], None]
        """Removes a block from the pool's prefix cache."""
        self._memory = memory
        self._kind = len(memory.kinds)
        memory.kinds.append(self)
        self._keys = keys
        self._n_pages = self._n_in_use = self._n_idle = 0
        self._plain: dict[int, list[int]] = {}
        """Free blocks that are not cached, of each page with a block in use; the next to be taken last."""
        self._cached: dict[int, None] = {}
        """Free blocks that are cached, the one first that was released first."""
        self._begun: dict[int, int] = {}
        """The page that was last given to each sequence."""

    @property
    def n_free_beside_idle(self) -> int:
        """Free blocks in pages that have a block in use."""
        return (self._n_pages - self._n_idle) * self.per_page - self._n_in_use

    def __len__(self) -> int:
        """Blocks that this kind could take if no other took any."""
        return self.n_free_beside_idle + self.per_page * self._memory.n_available

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` blocks."""
        memory, found = self._memory, list[int]()
        if self.per_page == 1:
            # All at once where they come from the pages of no kind: then none is begun.
            found = memory.take_single(self._kind, min(n, memory.n_available - memory.held_back))
            self._n_pages += len(found)
            self._n_in_use += len(found)
        while len(found) < n:
            page = self._page_to_take_from()
            blocks = self._plain.get(page)
            if blocks:
                taken = blocks[: -1 - (n - len(found)) : -1]
                del blocks[-len(taken) :]
                if not blocks:
                    del self._plain[page]
                self._use(page, len(taken))
                found += taken
            else:
                block = self._oldest_cached()
                self._use(block // self.per_page, 1)
                found.append(block)
        return found

    def release(self, blocks: list[int]) -> None:
        """Take blocks back; a page without a block in use goes back as well, or becomes idle."""
        memory, keys, per_page = self._memory, self._keys, self.per_page
        self._n_in_use -= len(blocks)
        memory.changed = True
        gone = list[int]()
        for block in blocks:
            page: i64 = block // per_page
            memory.in_use[page] -= 1
            plain = keys[block] is None
            if not plain:
                self._cached[block] = None
            elif per_page > 1:
                self._plain.setdefault(int(page), []).append(block)
            if memory.in_use[page] > 0:
                continue
            gone.append(int(page))
            if plain and per_page == 1:
                self._n_pages -= 1
                memory.take_back(block)
                continue
            self._plain.pop(int(page), None)
            memory.idle[int(page)] = None
            self._n_idle += 1
            self._leave_if_plain(int(page))
        memory.extents.release_each(gone)

    def remove(self, block: int) -> None:
        """A free cached block is in use again."""
        del self._cached[block]
        self._end_idle(block // self.per_page)
        self._use(block // self.per_page, 1)

    def forget(self, block: int) -> None:
        """A free cached block has become plain; a page in which none is cached any more goes back."""
        self._memory.changed = True
        del self._cached[block]
        page = block // self.per_page
        if page in self._memory.idle:
            self._leave_if_plain(page)
        else:
            self._plain.setdefault(page, []).append(block)

    def forget_page(self, page: int) -> None:
        """Remove all blocks of an idle page from the prefix cache."""
        for block in self._blocks_of(page):
            if self._keys[block] is not None:
                self.forget_block(block)

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect."""

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect: only a release changes the order."""

    def order(self) -> list[int]:
        """All blocks that are not in use: first those that could be taken, last those in pages of other kinds."""
        memory, found = self._memory, [block for blocks in self._plain.values() for block in reversed(blocks)]
        owned = [page for page in memory.idle if memory.owner[page] == self._kind]
        found += [block for page in owned for block in self._blocks_of(page) if self._keys[block] is None]
        found += self._cached
        elsewhere = [page for page in range(1, memory.n) if memory.owner[page] != self._kind]
        elsewhere.sort(key=lambda page: int(memory.owner[page]))
        return found + [block for page in elsewhere for block in self._blocks_of(page)]

    def _page_to_take_from(self) -> int:
        """A page with a plain free block, as the class says; 0 where none is left to this kind."""
        memory, plain = self._memory, self._plain
        page, spare = self._begun.get(memory.taker, 0), memory.n_available > memory.held_back
        if page in plain:
            return page
        if plain and not (spare and memory.n_unowned):
            return next(iter(plain))
        return self._begin_page() if spare else 0

    def _begin_page(self) -> int:
        """Get a page for the sequence that takes blocks: one that no kind has, or the one that was idle longest."""
        memory = self._memory
        if not memory.n_unowned:
            memory.evict_oldest()
        page = memory.take(self._kind)
        self._n_pages += 1
        first = page * self.per_page
        self._plain[page] = [first + self.per_page - 1 - at for at in range(self.per_page)]
        self._begun[memory.taker] = page
        return page

    def _oldest_cached(self) -> int:
        """Take the cached block that was released first, of those in pages with a block in use."""
        idle = self._memory.idle
        block = next(block for block in self._cached if block // self.per_page not in idle)
        del self._cached[block]
        return block

    def _use(self, page: int, n: int) -> None:
        """Count ``n`` blocks of a page as in use."""
        memory = self._memory
        memory.changed = True
        if not memory.in_use[page]:
            memory.extents.take(page, 1)
        memory.in_use[page] += i32(n)
        self._n_in_use += n

    def _end_idle(self, page: int) -> None:
        """A block of the page is about to be in use; nothing happens unless it was idle."""
        if page in self._memory.idle:
            del self._memory.idle[page]
            self._n_idle -= 1
            plain = [block for block in reversed(self._blocks_of(page)) if self._keys[block] is None]
            if plain:
                self._plain[page] = plain

    def _leave_if_plain(self, page: int) -> None:
        """Give an idle page back if nothing in it is cached."""
        for block in range(page * self.per_page, (page + 1) * self.per_page):
            if self._keys[block] is not None:
                return
        del self._memory.idle[page]
        self._n_idle -= 1
        self._n_pages -= 1
        self._memory.take_back(page)

    def _blocks_of(self, page: int) -> range:
        return range(page * self.per_page, (page + 1) * self.per_page)
