"""Two-level pages: layers that keep different tokens each have blocks of their own, in one memory for all.

Zhang et al., "Jenga: Effective Memory Management for Serving LLM with Heterogeneity" (SOSP 2025, arXiv 2503.18292).
Which kinds of pages there are is a parameter, so that what Jenga is compared with is the same policy with other kinds:
one kind for all layers, as in vLLM until it had groups of layers, or several of equal size, as in vLLM since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import numpy as np

from policies.cells.reads import table_reads
from policies.content import Content
from policies.layouts.paged import PagedPolicy
from policies.paging.block_table import blocks_behind, blocks_for, blocks_for_each
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.paging.large_pages import LargePages, SmallPages
from policies.placement.parts import PartRule
from policies.placement.rule import PlacementRule
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    OutOfCells,
    Place,
    Reads,
    SequencePlan,
    Unsupported,
    Usage,
)


class LayerGroup(NamedTuple):
    """Layers that look back equally far."""

    layers: int
    window: int | None = None
    """Tokens that they look back, themselves included; None: all."""


class PageKind(NamedTuple):
    """Layers whose K and V lie in the same pages."""

    groups: tuple[LayerGroup, ...]
    padding: int = 0
    """Layers for which a page has room besides, and which do not exist."""

    @property
    def layers(self) -> int:
        """Layers that there are."""
        return sum(group.layers for group in self.groups)

    @property
    def page_layers(self) -> int:
        """Layers that a page has room for."""
        return self.layers + self.padding

    @property
    def window(self) -> int | None:
        """Tokens that the pages must keep of each sequence; None: all."""
        windows = [group.window for group in self.groups if group.window is not None]
        return max(windows) if len(windows) == len(self.groups) else None


@dataclass(frozen=True, slots=True)
class TwoLevelOptions:
    """Options of layouts with kinds of pages."""

    block_size: int = 16
    """Tokens in a page."""
    window: int = 256
    """Tokens that layers with a sliding window look back."""
    full_layers: int = 1
    """Layers with full attention, for so many ``window_layers``."""
    window_layers: int = 5
    """Layers with a sliding window, for so many ``full_layers``."""
    prefix_cache: bool = True
    """Full blocks are found again by their content."""
    watermark: float = 0.0
    """Share of the large pages that a waiting sequence must leave free while others run."""


class LayerLayout:
    """How the layers of a model lie in pages: what shares a kind of page, and what a large page holds."""

    def __init__(self, kinds: Sequence[PageKind], block_size: int):
        self.kinds = tuple(kinds)
        self.block_size = block_size
        self.layers = sum(kind.layers for kind in kinds)
        self.page_layers = lcm(*(kind.page_layers for kind in kinds))
        """Layers that a large page has room for, with a block of tokens each."""
        self.windows = [
            (at, None if group.window == kind.window else group.window)
            for at, kind in enumerate(kinds)
            for group in kind.groups
        ]
        """For each group of layers its kind of page, and its window where the page keeps more than that."""

    def pages(self, cells: int) -> int:
        """Large pages in the memory of so many cells, each of which has K and V of all layers.

        Raises ``ValueError`` if none can be used.
        """
        pages = cells * self.layers // (self.page_layers * self.block_size)
        if pages < 2:
            raise ValueError(
                f"{cells} cells make {pages} large pages of {self.block_size} x {self.page_layers} layers, and the "
                "first is never handed out"
            )
        return pages

    def cells(self, pages: int) -> int:
        """Number of cells, each with K and V of all layers, that so many large pages make."""
        return pages * self.page_layers * self.block_size // self.layers

    def places(self, batches: Sequence[MicroBatch], kernel: Kernel) -> Iterator[Place]:
        """A micro-batch's place in each group, given that in each kind of page."""
        for at, window in self.windows:
            (place,) = batches[at].places
            yield place if window is None else place._replace(reads=self._within(window, batches[at], kernel))

    def _within(self, window: int, batch: MicroBatch, kernel: Kernel) -> Reads:
        """What layers with a window read of pages that keep more than that."""
        if kernel != "gather":
            reads = batch.reads
            return reads._replace(useful=np.minimum(reads.useful, window + reads.tokens - 1))
        size = self.block_size
        lengths = np.array(
            [start + n - blocks_behind(start, window, size) * size for _, start, n, _ in batch.chunks], dtype=np.int64
        )
        return table_reads(batch.chunks, lengths, blocks_for_each(lengths, size))


class TwoLevelPolicy(Policy):
    """A paged cache for each kind of page, all of them in the same large pages.

    A chunk finds room in all of them or in none. A prefix is found up to where all of them have what its next token
    sees (vLLM 0.33.0's ``HybridKVCacheCoordinator``). Attention reads each as it reads a paged cache. A group's cells
    are numbered as if it had the whole memory: no two groups use a large page at once, but an engine that keeps an
    array for each layer needs the room.
    """

    # A shared block is copied before it is written to, but blocks that are not full are shared by ``copy`` alone, which
    # no server asks for; so what moves cost need not be known.
    moves_cells = False
    can_reserve = True
    can_free_while_decoding = True
    has_placement_rule = True
    shared_memory = True

    def __init__(self, name: str, config: CacheConfig, kinds: Sequence[PageKind]):
        """Build an empty cache in the memory of ``config.cells`` cells, each of which has K and V of all layers.

        Raises ``ValueError`` if that makes no large page that can be used.
        """
        self.name = name
        options = config.read(TwoLevelOptions)
        self.block_size = options.block_size
        self._layout = layout = LayerLayout(kinds, options.block_size)
        n_pages = layout.pages(config.cells)
        self.pages = LargePages(n_pages)
        self._watermark = int(options.watermark * n_pages)
        bare = config.without_options()
        self.parts = tuple(self._part(bare, options.prefix_cache, kind) for kind in kinds)
        """The paged cache of each kind."""
        self.part_of = [part for part, kind in zip(self.parts, kinds, strict=True) for _ in kind.groups]
        """The paged cache that each group's cells are in."""
        self.groups = tuple(
            Group(part.groups[0].cells, group.window, group.layers / layout.layers)
            for part, kind in zip(self.parts, kinds, strict=True)
            for group in kind.groups
        )
        self.kernel = self.parts[0].kernel
        self.capacity = layout.cells(n_pages - 1)
        self._rule = PartRule(
            [part.blocks for part in self.parts],
            self.pages,
            layout.windows,
            [(kind.layers, kind.page_layers) for kind in kinds],
            self._reserve_step,
            self.allocate,
            config.n_ubatch,
        )

    def placement_rule(self) -> PlacementRule | None:
        """Rows take blocks of every kind of page, where attention reads through block tables."""
        return self._rule if self.kernel == "gather" else None

    def _part(self, config: CacheConfig, prefix_cache: bool, kind: PageKind) -> PagedPolicy:
        """The paged cache of a kind."""
        per_page = self._layout.page_layers // kind.page_layers

        def free(_: range, keys: BlockKeys) -> FreeBlocks:
            return SmallPages(self.pages, per_page, keys)

        cells = self.pages.n * per_page * self.block_size
        part = PagedPolicy(
            self.name,
            replace(config, cells=cells),
            block_size=self.block_size,
            free=free,
            prefix_cache=prefix_cache,
            window=kind.window,
        )
        self.pages.kinds[-1].forget_block = part.pool.forget
        return part

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens of one sequence for which there are pages of all kinds."""
        most = bisect_left(range(self.parts[0].pool.n), self.pages.n, key=lambda at: self._pages_for(at + 1))
        return self.block_size * most

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Note what the sequence will say."""
        for part in self.parts:
            part.open(seq, plan)

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why all large pages together are too few, or None."""
        need, have = self._pages_for(blocks_for(plan.final_tokens, self.block_size)), self.pages.n - 1
        if need <= have:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {need} large pages ({sizes}), the cache has {have}"

    def _pages_for(self, blocks: int) -> int:
        """The most large pages that a sequence which fills that many blocks needs at once."""
        return sum(
            blocks_for(min(blocks, part.admission.most_blocks), kind.per_page)
            for part, kind in zip(self.parts, self.pages.kinds, strict=True)
        )

    def will_return(self, seq: int) -> None:
        """Let it find its own blocks of all kinds again."""
        if seq in self._rule.by_seq:
            self._rule.leave(seq)
        for part in self.parts:
            part.will_return(seq)

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest prefix of which every kind of page has what the next token sees."""
        self._cache_rows(content)
        return self._agreed(tokens, lambda part, n: part.match(seq, content, n))

    def cached_tokens(self, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix, as ``match`` finds them."""
        self._cache_rows(content)
        return self._agreed(tokens, lambda part, n: part.cached_tokens(content, n))

    def _cache_rows(self, content: Content) -> None:
        """Let what rows have filled be found, if others may have the text too."""
        if not content.private:
            self._rule.cache_all_full_blocks()

    def _agreed(self, tokens: int, found_in: Callable[[PagedPolicy, int], int]) -> int:
        """The most tokens of a text, below ``tokens``, that are found in all parts.

        ``found_in``: looks in a part; the last time that it is called for each, it is asked for just these tokens.
        """
        found = before = -1
        while found < 0 or found != before:
            before = found
            for part in self.parts:
                found = found_in(part, tokens)
                tokens = found + 1  # The last token is never looked up.
        return found

    # Placement

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, in_flight: int = 0, known: int | None = None
    ) -> bool:
        """Take blocks of all kinds up to the end of the chunk, or none."""
        return self._reserve_step([chunk], whole, waits, in_flight, known)

    def reserve_with_drafts(
        self,
        chunk: Chunk,
        lookahead: int,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
    ) -> bool:
        """Take blocks for the tokens behind the chunk as well."""
        return self._reserve_step([chunk], whole, waits, in_flight, known, lookahead)

    def _reserve_step(
        self,
        step: Sequence[Chunk],
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Take blocks of all kinds for the chunks that have not got theirs, or none; arguments as in ``Admission``."""
        admissions = [part.admission for part in self.parts]
        step = [chunk for chunk in step if not admissions[0].is_reserved(chunk)]
        try:
            longer = [chunk._replace(n=chunk.n + lookahead) for chunk in step] if lookahead else step
            needs = [admission.need(longer, whole, in_flight) for admission in admissions]
        except OutOfCells:
            return False
        memory, later = self.pages, [0] * len(needs)
        if any(needs):
            found = [[b for chunk in step if chunk.start for b in each.found(chunk.seq)] for each in admissions]
            pages, kept = memory.pages_for(needs, found)
            if sum(pages) + kept > memory.n_available - (self._watermark if waits else 0):
                return False
            later = [sum(pages[at + 1 :]) for at in range(len(pages))]
        for admission in admissions:
            admission.attach_found(step)
        for admission, memory.held_back in zip(admissions, later, strict=True):
            for chunk in step:
                memory.taker = chunk.seq
                if not admission.reserve(chunk, 0, False, lookahead, in_flight, known):
                    raise AssertionError(f"{self.name}: pages that were counted are not there")
        return True

    def compose_ahead(self, steps: int) -> None:
        """Cache the blocks that decode steps fill a step later; of a window, keep what each step in flight sees."""
        for part in self.parts:
            part.compose_ahead(steps)

    def note_known(self, seq: int, tokens: int) -> None:
        """Cache the blocks that these tokens fill."""
        for part in self.parts:
            part.note_known(seq, tokens)

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Append blocks of all kinds where the new tokens need them: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: a chunk for several sequences at once")
        if not self._reserve_step(step):
            n, free = sum(chunk.n for chunk in step), self.pages.n_available
            raise OutOfCells(f"no room for {n} token{'s' * (n > 1)}: {free} of {self.pages.n - 1} large pages are free")
        by_part = [part.allocate(step, views=views) for part in self.parts]
        return tuple(
            MicroBatch(batches[0].chunks, tuple(self._layout.places(batches, self.kernel)))
            for batches in zip(*by_part, strict=True)
        )

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Give up blocks of all kinds. Only a sequence's tail can go, or all of it."""
        if seq in self._rule.by_seq and (stop is None or stop > start):
            self._rule.leave(seq)
        for part in reversed(self.parts):  # Those with a window may refuse, and come last.
            part.free(seq, start, stop)

    def take_back(self, seq: int, start: int) -> None:
        """Leave the blocks with the sequence."""
        for part in self.parts:
            part.take_back(seq, start)

    def can_truncate(self, seq: int, n: int) -> int:
        """All ``n`` tokens, or 0 if blocks behind a window have been given up."""
        return min(part.can_truncate(seq, n) for part in self.parts)

    # Looking in

    def usage(self) -> Usage:
        """How full the memory is, in cells of all layers; free extents are of large pages without a block in use."""
        rule = self._rule
        rule.look()
        cached = [
            part.pool.n_free_cached * kind.layers for part, kind in zip(self.parts, self._layout.kinds, strict=True)
        ]
        return Usage(
            self.capacity,
            rule.stored,
            rule.allocated,
            rule.placeable,
            rule.free_extents,
            rule.largest_free_extent,
            rule.span,
            sum(cached) * self.block_size // self._layout.layers,
        )

    def sequences(self) -> list[int]:
        """The sequences that hold a block of any kind, ascending."""
        return sorted({seq for part in self.parts for seq in part.sequences()})

    def occupancy(self, group: int = 0) -> CellMap:
        """The cell map of the group's kind of page."""
        return self.part_of[group].occupancy()

    def first_owners(self, group: int = 0) -> IntArray:
        """The smallest sequence in each cell of the group's kind of page."""
        return self.part_of[group].first_owners()
