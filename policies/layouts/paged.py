"""Paged memory: fixed blocks of cells, and for each sequence a table of the blocks it holds.

``paged``: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023),
with the prefix cache and the allocation rules of vLLM 0.33.0's ``KVCacheManager``.
``chunked``: larger blocks, the lowest free one first, and no prefix cache, as in engines that keep a list of chunks for
each sequence (MLC-LLM, TGI).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.reads import padded_span, reads_of, table_reads
from policies.content import NOTHING, Content
from policies.layouts.block_copies import BlockCopies
from policies.paging.admission import Admission
from policies.paging.admission_rules import admission_rule
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_for, blocks_for_each, most_blocks_in_window
from policies.paging.blocks import BlockPool
from policies.paging.cache_groups import GroupSpec
from policies.paging.eviction import Eviction, FreeOrder
from policies.paging.free_lists.belady import Future
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.paging.host_chunks import HostChunks, OffloadOrder
from policies.paging.host_offload import HostOffload, HostTier
from policies.placement.blocks import BlockRule
from policies.placement.rule import PlacementRule
from policies.policy import AdmissionRuleName, CacheConfig, Kernel
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    Place,
    Reads,
    SequencePlan,
    Transfer,
    Unsupported,
    Usage,
    split_batch,
)


@dataclass(frozen=True, slots=True)
class PagedOptions:
    """Options of paged layouts."""

    block_size: int = 16
    """Cells in a block."""
    prefix_cache: bool = True
    """Full blocks are found again by their content."""
    eviction: Eviction = "lru"
    """Which cached block is forgotten first."""
    free_order: FreeOrder = "0.33.0"
    """The version of vLLM whose order of free blocks is kept."""
    window: int = 256
    """Tokens that attention looks back, under policies with a window."""
    watermark: float = 0.0
    """Share of the blocks that a waiting sequence must leave free while others run."""
    admission: AdmissionRuleName = "as-it-fits"
    """How much room a sequence that starts must leave for those that run."""
    conservativeness: float = 1.0
    """With ``admission`` "expected": the larger, the more room is expected to be needed."""
    key_lookahead: int = 0
    """Tokens behind a block that its key covers: 1 where what drafts reads them (EAGLE and MTP, since vLLM 0.33)."""
    drops_last_found: bool = False
    """The last block that is found of a prefix is computed again instead, as in vLLM 0.32."""
    host_cells: int = 0
    """Cells of a tier in host memory: for what is evicted or exported, or under ``vllm``, for chunks."""
    offload_order: OffloadOrder = "lru"
    """vllm: which chunk in host memory is evicted first."""
    offload_blocks: int = 1
    """vllm: blocks in a chunk."""
    offload_store_threshold: int = 0
    """vllm: how often a chunk must have been computed before it is stored; below 2: it is at once."""
    offload_answers: bool = False
    """vllm: chunks of answers are stored, too."""
    disk_cells: int = 0
    """vllm: cells in files behind those in host memory."""
    groups: tuple[GroupSpec, ...] = ()
    """vllm: groups of layers that keep different things; none: all layers keep every token."""
    retention: int = 0
    """vllm, with ``groups``: as ``HybridOptions`` has it."""
    future: Callable[[], Iterable[tuple[int, Content, int]]] | None = None
    """For clairvoyant eviction: number, content and prompt length of every request, in the order expected."""


class BlockPasses:
    """Writes the chunks of forward passes into their blocks, and says what attention reads of these."""

    def __init__(self, blocks: BlockManager, kernel: Kernel, pad: int, cells: int, *, one_run: bool):
        """``cells``: of the whole cache. ``one_run``: each sequence is read as one run."""
        self._blocks = blocks
        self._kernel = kernel
        self._pad = pad
        self._cells = cells
        self._one_run = one_run
        self.reads_own_cells = kernel == "gather" or one_run
        """Whether attention reads a sequence's cells and no others."""

    def place(
        self, chunks: tuple[Chunk, ...], copies: Moves, transfers: tuple[Transfer, ...], views: bool
    ) -> MicroBatch:
        """Write the chunks of one pass into blocks that their tables have."""
        blocks, size, parts = self._blocks, self._blocks.block_size, []
        for seq, start, n, _ in chunks:
            table = blocks.tables[seq]
            parts.append(table.cells(start, start + n, size))
            blocks.write(table, start, start + n)
        seen = tuple(blocks.tables[chunk.seq].view(size) for chunk in chunks) if views else ()
        place = Place(np.concatenate(parts), self._reads(chunks), copies, views=seen, transfers=transfers)
        return MicroBatch(chunks, (place,))

    def _reads(self, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads for chunks that have just been written."""
        tables, size = self._blocks.tables, self._blocks.block_size
        if self.reads_own_cells:
            held = [tables[chunk.seq] for chunk in chunks]
            lengths = np.array([table.length - table.skipped * size for table in held], dtype=np.int64)
            runs = np.ones_like(lengths) if self._one_run else blocks_for_each(lengths, size)
            return table_reads(chunks, lengths, runs)
        span = padded_span(self._blocks.counted_occupancy().top, self._pad, self._cells)
        return reads_of(self._kernel, chunks, lambda seq: tables[seq].view(size).cells, span)


def _count_blocks(cells: int, block_size: int, null_block: bool) -> int:
    """Blocks that so many cells make. Raises ``ValueError`` if none can be used."""
    n_blocks = cells // block_size
    if n_blocks <= int(null_block):
        why = ", and block 0 is never handed out" if null_block else ""
        raise ValueError(f"{cells} cells make {n_blocks} blocks of {block_size}{why}")
    return n_blocks


class PagedPolicy(BlockCopies):
    """A block table for each sequence; a token's cell follows from its position."""

    # A shared block is copied before it is written to, but blocks that are not full are shared by ``copy`` alone, which
    # no server asks for; so what moves cost need not be known.
    moves_cells = False
    can_reserve = True
    has_placement_rule = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        *,
        block_size: int,
        free: Callable[[range, BlockKeys], FreeBlocks],
        null_block: bool = True,
        prefix_cache: bool = False,
        window: int | None = None,
        tail_only: bool = False,
        future: Future | None = None,
        chunks: HostChunks | None = None,
        kernel: Kernel = "gather",
        one_run: bool = False,
    ):
        """Build an empty cache of ``config.cells // block_size`` blocks; raises ``ValueError`` if none can be used.

        ``free``: builds the free list. ``null_block``: block 0 is never handed out, as in vLLM. ``prefix_cache``: full
        blocks are found again by their content, from the moment they are scheduled. ``window``: attention of all layers
        looks back that many tokens, and blocks behind are given up; ``tail_only``: then only the last window of a
        prompt can be found again (vLLM's retention interval of 0). ``future``: what clairvoyant eviction looks at.
        ``chunks``: what host memory has room for, where it is not for what is evicted. ``one_run``: under ``sliced``, a
        sequence's blocks lie in one range of virtual addresses.
        """
        n_blocks = _count_blocks(config.cells, block_size, null_block)
        options = config.read(PagedOptions)
        self.name, self.block_size = name, block_size
        host = options.host_cells // block_size if chunks is None else chunks.n * chunks.blocks_per_chunk
        self.groups = (Group(n_blocks * block_size, window=window, host_cells=host * block_size),)
        self.kernel = config.kernel or kernel
        self.prefix_cache, self.window = prefix_cache, window
        self.can_free_while_decoding = window is not None or prefix_cache
        self.pool = BlockPool(n_blocks, free, first=int(null_block))
        self.blocks = BlockManager(self.pool, block_size, prefix_cache=prefix_cache, window=window, tail_only=tail_only)
        self.blocks.key_lookahead = options.key_lookahead
        self.capacity, self.tables = self.blocks.capacity, self.blocks.tables
        self.chunks, self._future = chunks, future
        self.host = HostTier(host) if host and chunks is None else None
        self._offload = None if self.host is None else HostOffload(self.host, self.blocks)
        self._watermark, self._n_ubatch = int(options.watermark * n_blocks), config.n_ubatch
        self.admission = Admission(
            name,
            self.blocks,
            self._offload,
            watermark=self._watermark,
            max_tokens=config.max_tokens,
            most_blocks=n_blocks if window is None else most_blocks_in_window(window, config.n_ubatch, block_size),
            drops_last_found=options.drops_last_found,
        )
        """Says which chunks find room, and gives them theirs."""
        one_run = one_run and self.kernel == "sliced"
        self._passes = BlockPasses(self.blocks, self.kernel, config.pad, self.groups[0].cells, one_run=one_run)
        self._placement_rule = BlockRule(
            self.blocks, self.admission, self.allocate, self.settle_transfers, config.n_ubatch, one_run=one_run
        )
        self._rule = admission_rule(
            options.admission, options.conservativeness, self.blocks, self.admission, self._placement_rule
        )
        self.admits_while_decoding = self._rule.admits_while_decoding

    def placement_rule(self) -> PlacementRule | None:
        """None where other kernels read."""
        return self._placement_rule if self._passes.reads_own_cells else None

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Note what the sequence will say; what it holds already must agree with that."""
        if self._future is not None:
            self._future.advance(plan.request)
        self.blocks.open(seq, plan)

    def admits(self, plan: SequencePlan) -> bool:
        """What the admission rule says; a sequence that has the cache to itself may always start."""
        return not self.tables or self._rule.admits(plan)

    def will_return(self, seq: int) -> None:
        """Let it find its own blocks again."""
        table = self.tables.get(seq)
        if table is not None and self.prefix_cache and table.content.private:
            if table.rule is not None:
                table.rule.leave(seq)
            self.blocks.let_be_found(table)

    def note_preemption(self) -> None:
        """Let the admission rule learn from it."""
        self._rule.preempted()

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why all blocks together are too few, or None."""
        need = min(blocks_for(plan.final_tokens, self.block_size), self.admission.most_blocks)
        have = self.pool.n - self.pool.first
        if need <= have:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {need} blocks of {self.block_size} cells ({sizes}), the cache has {have}"

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix, in the pool or the host tier; always fewer than ``tokens``."""
        if not self.prefix_cache:
            return 0
        if not content.private:
            self._placement_rule.cache_all_full_blocks()
        return self.admission.match(seq, content, tokens)

    def cached_tokens(self, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix, as ``match`` finds them."""
        if not self.prefix_cache:
            return 0
        if not content.private:
            self._placement_rule.cache_all_full_blocks()
        return self.admission.cached_tokens(content, tokens)

    def reserve(
        self,
        chunk: Chunk,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Take blocks up to the end of the chunk, and cache those that it fills: vLLM's ``allocate_slots``.

        ``lookahead``: drafted tokens behind the chunk that get blocks too.
        """
        return self.admission.reserve(chunk, whole, waits, lookahead, in_flight, known)

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
        """Take blocks for the tokens behind the chunk as well, which are not cached."""
        return self.reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known, lookahead=lookahead)

    def compose_ahead(self, steps: int) -> None:
        """Cache the blocks that decode steps fill a step later; of a window, keep what each step in flight sees."""
        self.blocks.lag = 1
        if self.window is not None:
            most = most_blocks_in_window(self.window, steps * self._n_ubatch, self.block_size)
            self.admission.most_blocks = most

    def note_known(self, seq: int, tokens: int) -> None:
        """Cache the blocks that these tokens fill: vLLM's ``cache_blocks``."""
        self.blocks.cache_full_blocks(self.tables[seq], tokens)

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Append blocks to the tables where the new tokens need them: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: a chunk for several sequences at once; copy the sequence instead")
        self.admission.reserve_step(step)
        parts = split_batch(step, self._n_ubatch)
        if not parts:
            return ()
        self._placement_rule.steps += 1
        transfers = self.settle_transfers()
        copies = self.blocks.settle_copies()
        batches = []
        for chunks in parts:
            batches.append(self._passes.place(chunks, copies, transfers, views))
            copies, transfers = NO_MOVES, ()
        return tuple(batches)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Return the blocks past ``start``, last first. Only a sequence's tail can go, or all of it."""
        table = self.tables.get(seq)
        if table is None or (stop is not None and stop <= start):
            return
        if table.rule is not None:
            table.rule.leave(seq)
        if start == 0 and (stop is None or stop >= table.length):
            self.blocks.release(table, 0)
            del self.tables[seq]
            if not self.tables:
                self._rule.emptied()
            return
        length, gone = table.length, table.skipped * self.block_size
        if start >= length:
            return
        if stop is not None and stop < length:
            raise Unsupported(f"{self.name}: a block table gives up its tail only, not [{start}, {stop}) of {length}")
        if start <= gone:
            raise Unsupported(f"{self.name}: what comes before position {gone} has been given up")
        self.blocks.truncate(table, start)

    def take_back(self, seq: int, start: int) -> None:
        """Leave the blocks with the sequence, as vLLM does, and count what they hold anew."""
        self.blocks.take_back(self.tables[seq], start)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the blocks; a sequence that then writes to a shared block gets a copy of it first."""
        source, target = self.tables.get(src), self.tables.get(dst)
        if src == dst or source is None:
            return
        stop = source.length if stop is None else min(stop, source.length)
        if stop <= start:
            return
        if start > 0 or (target is not None and target.blocks):
            raise Unsupported(
                f"{self.name}: only the beginning of a sequence can be shared, with one that holds nothing"
            )
        if stop <= source.skipped * self.block_size:
            raise Unsupported(f"{self.name}: the window has moved past position {stop}")
        if target is None:
            target = self.tables[dst] = BlockTable(NOTHING, seq=dst)
        self.blocks.share(source, target, stop)

    def can_truncate(self, seq: int, n: int) -> int:
        """All ``n`` tokens, or 0 if blocks behind a window have been given up."""
        table = self.tables.get(seq)
        return 0 if table is None or table.skipped else min(n, table.length)

    def usage(self) -> Usage:
        """How full the pool is."""
        return self.blocks.usage()

    def sequences(self) -> list[int]:
        """The sequences that hold a block, ascending."""
        return sorted(seq for seq, table in self.tables.items() if table.blocks)

    def occupancy(self, group: int = 0) -> CellMap:
        """The cell map, laid out from the tables."""
        position = np.full(self.groups[0].cells, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.groups[0].cells
        for seq, table in self.tables.items():
            cells, positions = table.view(self.block_size)
            position[cells] = positions
            for cell in cells.tolist():
                owners[cell] = owners[cell] | {seq}
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """The smallest sequence in each cell, laid out from the tables."""
        owners = np.full(self.groups[0].cells, -1, dtype=np.int64)
        for seq in sorted(self.tables, reverse=True):
            owners[self.tables[seq].view(self.block_size).cells] = seq
        return owners
