"""Paged memory: fixed blocks of cells, and for each sequence a table of the blocks it holds.

``paged``: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023),
with the prefix cache and the allocation rules of vLLM 0.33.0's ``KVCacheManager``.
``chunked``: larger pieces, the lowest free one first, and nothing is found again, as engines do that keep a list of
chunks for each sequence (MLC-LLM, TGI).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from policies.cells.reads import padded_span, reads_of, table_reads
from policies.content import NOTHING, Content, Key
from policies.fast_forward.forecast import FastForward
from policies.fast_forward.lockstep import LockstepBatch, PassSummary
from policies.paging.block_occupancy import BlockOccupancy
from policies.paging.block_table import Paged, append_steps, plan_steps
from policies.paging.blocks import NULL, BlockPool
from policies.paging.free_lists.belady import Future
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.paging.host_tier import HostTier, TransferLog
from policies.paging.lockstep import PagedLockstepBatch, Tables
from policies.paging.window_lockstep import WindowLockstepBatch
from policies.policy import CacheConfig, Kernel, Policy, Unsupported
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Reads,
    SequencePlan,
    Transfer,
    Usage,
    View,
    split_batch,
)


class PagedPolicy(Policy):
    """A block table for each sequence; a token's cell follows from its position.

    ``null_block``: block 0 is never handed out, as in vLLM. ``prefix_cache``: full blocks are found again by their
    content, from the moment they are scheduled. ``watermark``: blocks that a waiting sequence must leave free while
    others run. ``window``: attention of all layers looks back that many tokens, and blocks behind are given up;
    ``tail_only``: then only the last window of a prompt can be found again (vLLM's retention interval of 0).
    """

    moves_cells = True
    can_reserve = True
    """A block that others share too is copied before it is written to."""

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
        kernel: Kernel = "gather",
    ):
        n_blocks, reserved = config.cells // block_size, int(null_block)
        if n_blocks <= reserved:
            why = ", and block 0 is never handed out" if null_block else ""
            raise ValueError(f"{config.cells} cells make {n_blocks} blocks of {block_size}{why}")
        host_blocks = config.host_cells // block_size
        self.name = name
        self.block_size = block_size
        self.groups = (Group(n_blocks * block_size, window=window, host_cells=host_blocks * block_size),)
        self.capacity = (n_blocks - reserved) * block_size
        self.kernel = config.kernel or kernel
        self.pool = BlockPool(n_blocks, free, first=reserved)
        self.prefix_cache = prefix_cache
        self.window = window
        self.can_free_while_decoding = window is not None or prefix_cache
        self._window_blocks = -(-((window or 0) - 1) // block_size)
        """Blocks that the token behind them can see."""
        self._most_blocks = n_blocks if window is None else -(-(window - 1 + config.n_ubatch) // block_size) + 1
        """That a sequence ever holds at once."""
        self._tail_only = tail_only
        self.host = HostTier(host_blocks) if host_blocks else None
        if self.host is not None:
            self.pool.on_evict = self._keep
        self.tables: dict[int, Paged] = {}
        """Of each sequence that was opened or holds blocks."""
        self._watermark = int(config.watermark * n_blocks)
        self._max_tokens = config.max_tokens
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._future = future
        self._found: dict[int, list[int]] = {}
        """What ``match`` found for a sequence: blocks, and ``~slot`` for those in the host tier."""
        self._log = TransferLog(block_size)
        self._swapped: dict[int, tuple[Paged, list[int]]] = {}
        """By ticket: a sequence that was swapped out, and its slots."""
        self._tickets = count()
        self._copies: list[tuple[int, int, int]] = []
        """Copies on write that an engine has yet to make: from cell, to cell, cells. Their sources are held until
        then, so that nothing else is written there."""
        self._fill = BlockOccupancy(n_blocks, block_size)
        name_blocks = self._name if prefix_cache else None
        about = Tables(
            block_size, self.pool, self._fill, self.tables.get, name_blocks, self._place_beside, config.n_ubatch
        )
        self._crew = PagedLockstepBatch(about) if window is None else WindowLockstepBatch(about, window, self._give_up)

    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Where nothing is copied on the way."""
        return self._crew if self.kernel == "gather" and self.host is None else None

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Tells what the sequence will say; what it holds already must agree with that."""
        if self._future is not None:
            self._future.advance(plan.request)
        held = self.tables.get(seq)
        if held is None:
            self.tables[seq] = Paged(plan.content, plan.prompt_tokens)
        else:
            held.content, held.prompt = plan.content, plan.prompt_tokens

    def refusal(self, plan: SequencePlan) -> str | None:
        """Whether all blocks together are too few."""
        need, have = min(self._blocks(plan.final_tokens), self._most_blocks), self.pool.n - self.pool.first
        if need <= have:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {need} blocks of {self.block_size} cells ({sizes}), the cache has {have}"

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest prefix that is cached, here or in the host tier; always fewer than ``tokens``."""
        if not self.prefix_cache:
            return 0
        if not content.private:
            self._crew.name_all()
        keys = content.keys(self.block_size, (tokens - 1) // self.block_size)
        if self.window is not None:
            found = self.pool.trailing(keys, self._window_blocks)
        else:
            found = self.pool.leading(keys)
            if self.host is not None:
                self._continue_in_host(found, keys)
        self._found[seq] = found
        return len(found) * self.block_size

    def found(self, seq: int) -> list[int]:
        """The blocks that ``match`` found last for the sequence; ``~slot`` for those in the host tier."""
        return self._found.get(seq, [])

    def reserve(self, chunk: Chunk, *, whole: int = 0, waits: bool = False, ahead: int = 0, in_flight: int = 0) -> bool:
        """vLLM's ``allocate_slots``: blocks up to the end of the chunk, and keys for those that it fills."""
        seq, start, n, _ = chunk
        s = self.tables.get(seq)
        if s is None:
            s = self.tables[seq] = Paged(NOTHING)
        table, size = s.table, self.block_size
        found = self._found.get(seq, []) if start and not table else []
        if found and not self._still_there(s, found):
            del self._found[seq]
            return False
        if start > len(table) * size + len(found) * size:
            raise ValueError(f"{self.name}: sequence {seq} holds no token before position {start}")
        if self.window is not None:
            self._skip(s, start - in_flight)
        free = len(self.pool.free) - (self._watermark if waits else 0)
        if not table and not start and self.window is None:
            # The beginning of a sequence, of which nothing was found: all that it needs is blocks.
            more = -(-min(n + ahead, self._max_tokens) // size)
            if more > free or (whole and -(-whole // size) > free):
                return False
            table += self.pool.take(more)
            if self.prefix_cache:
                self._name(s, n)
            s.reserved = n
            return True
        more, extra = self._missing(s, found, start, min(start + n + ahead, self._max_tokens))
        if whole and min(self._blocks(whole), self._most_blocks) - len(table) - len(found) + extra > free:
            return False
        if more + extra > free:
            return False
        if found:
            self._attach(s, found)
            del self._found[seq]
        if n and start // size < len(table):
            self._own(s, start // size)
        if more:
            table += self.pool.take(more)
        self._name(s, start + n)
        s.reserved = start + n
        return True

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Append blocks to the tables where the new tokens need them: all of them, or none."""
        return self._allocate(step, views, 0)

    def _allocate(self, step: Sequence[Chunk], views: bool, lockstep_tokens: int) -> tuple[MicroBatch, ...]:
        """``beside``: so many tokens of a lockstep batch are in the first pass as well."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: a chunk for several sequences at once; copy the sequence instead")
        need, free = self._need(step), len(self.pool.free)
        if need > free:
            raise NoSlot(f"the step needs {need} blocks of {self.block_size} cells, {free} are free")
        for chunk in step:
            # Before anything is handed out, what was found is taken hold of.
            if chunk.start and self._found.get(chunk.seq):
                self.reserve(chunk._replace(n=0))
        for chunk in step:
            if not self._is_reserved(chunk) and not self.reserve(chunk):
                raise AssertionError(f"{self.name}: blocks that were counted are not there")
        parts = split_batch(step, self._n_ubatch, lockstep_tokens)
        if not parts:
            return ()
        first = Moves.from_runs(self._copies) if self._copies else NO_MOVES
        transfers = self._log.settle()
        copied, self._copies = self._copies, []
        self._empty(self.pool.release([src // self.block_size for src, _, _ in copied]))
        batches = []
        for chunks in parts:
            batches.append(self._place(chunks, first, transfers, views))
            first, transfers = NO_MOVES, ()
        return tuple(batches)

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Until the free blocks run out. Blocks are taken, and named when they are full, step by step as ever."""
        size, pool = self.block_size, self.pool
        plain = self.kernel == "gather" and self.window is None and self.host is None
        if not plain or self._copies or len(step) > self._n_ubatch:
            return None
        tables = [self.tables.get(chunk.seq) for chunk in step]
        active = [s for s in tables if s is not None and s.table]
        if len(active) < len(step) or any(s.length != c.start or c.also for s, c in zip(active, step, strict=True)):
            return None
        taken = partial(append_steps, active, size, pool, self._fill, self._name, self.usage)
        return plan_steps(active, min(n, *(self._max_tokens - s.length for s in active)), size, pool, taken)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Return the blocks past ``start``, last first. Only a sequence's tail can go, or all of it."""
        s = self.tables.get(seq)
        if s is None or (stop is not None and stop <= start):
            return
        if s.lockstep_batch is not None:
            s.lockstep_batch.leave(seq)
        if start == 0 and (stop is None or stop >= s.length):
            self._release(s, 0)
            del self.tables[seq]
            return
        if start >= s.length:
            return
        if stop is not None and stop < s.length:
            raise Unsupported(f"{self.name}: a block table gives up its tail only, not [{start}, {stop}) of {s.length}")
        if start <= s.skipped * self.block_size:
            raise Unsupported(
                f"{self.name}: what comes before position {s.skipped * self.block_size} has been given up"
            )
        self._release(s, self._blocks(start))
        s.length, s.reserved = start, 0
        s.named = min(s.named, start // self.block_size)
        s.content = s.content.head(start)
        if start % self.block_size:
            self._fill.partially_visible.add(s.table[-1])
            self._refill(s.table[-1])

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the blocks; whoever appends to a shared one that is not full gets a copy of it then."""
        source, target = self.tables.get(src), self.tables.get(dst)
        if src == dst or source is None:
            return
        stop = source.length if stop is None else min(stop, source.length)
        if stop <= start:
            return
        if start > 0 or (target is not None and target.table):
            raise Unsupported(
                f"{self.name}: only the beginning of a sequence can be shared, with one that holds nothing"
            )
        if stop <= source.skipped * self.block_size:
            raise Unsupported(f"{self.name}: the window has moved past position {stop}")
        copied = self.tables[dst] = target or Paged(NOTHING)
        if copied.content.common_prefix(source.content) < min(stop, source.content.n):
            copied.content = source.content.head(stop)
        copied.table = source.table[: self._blocks(stop)]
        copied.length, copied.skipped = stop, source.skipped
        copied.named = min(source.named, stop // self.block_size)
        self.pool.share(copied.table[copied.skipped :])
        if stop % self.block_size:
            self._fill.partially_visible.add(copied.table[-1])

    def can_truncate(self, seq: int, n: int) -> int:
        """All of them, unless the window has moved on."""
        s = self.tables.get(seq)
        return 0 if s is None or s.skipped else min(n, s.length)

    def swap_out(self, seq: int) -> int | None:
        """Copy the sequence's blocks to the host tier and give them up."""
        s = self.tables[seq]
        slots = None if self.host is None or s.skipped else self.host.hold(len(s.table))
        if slots is None:
            return None
        sources = {dst // self.block_size: src // self.block_size for src, dst, _ in self._copies}
        for block, slot in zip(s.table, slots, strict=True):
            # Of a block that is yet to be copied, the original goes.
            while block in sources:
                block = sources[block]
            self._log.add(block, slot, to_host=True)
        left = Paged(s.content)
        left.length, left.named = s.length, min(s.named, s.length // self.block_size)
        ticket = next(self._tickets)
        self._swapped[ticket] = left, slots
        self.free(seq)
        return ticket

    def swap_in(self, seq: int, ticket: int, upto: int = 0, *, waits: bool = False) -> int | None:
        """Bring a sequence back under this number; the tokens it holds, None where there is no room."""
        left, slots = self._swapped[ticket]
        assert self.host is not None
        keys = left.content.keys(self.block_size, left.named)
        here = [self.pool.find(key) for key in keys] + [None] * (len(slots) - len(keys))
        idle = sum(1 for block in here if block is not None and self.pool.refs[block] == 0)
        more = max(self._blocks(upto) - len(slots), 0)
        need = here.count(None) + idle + more + (self._watermark if waits else 0)
        if need > len(self.pool.free):
            return None
        del self._swapped[ticket]
        self.pool.touch(block for block in here if block is not None)
        fresh = iter(self.pool.take(here.count(None)))
        for at, (block, slot) in enumerate(zip(here, slots, strict=True)):
            left.table.append(next(fresh) if block is None else block)
            if block is None:
                self._log.add(left.table[-1], slot, to_host=False)
            self._fill.raise_to(left.table[-1], min(self.block_size, left.length - at * self.block_size))
        self.host.release(slots)
        left.named = 0
        self.tables[seq] = left
        self._name(left, left.length)
        return left.length

    def forget_swapped(self, ticket: int) -> None:
        """A sequence that was swapped out will not come back."""
        assert self.host is not None
        self.host.release(self._swapped.pop(ticket)[1])

    def fetch(self, content: Content, tokens: int) -> list[Key]:
        """Bring a prefix from the host tier into free blocks, all of it or nothing; the keys of the blocks brought."""
        if self.host is None or not self.prefix_cache or self.window is not None:
            return []
        keys = content.keys(self.block_size, (tokens - 1) // self.block_size)
        found = self.pool.leading(keys)
        self._continue_in_host(found, keys)
        brought = [key for key, block in zip(keys, found, strict=False) if block < 0]
        idle = sum(1 for block in found if block >= 0 and self.pool.refs[block] == 0)
        if not brought or len(brought) > len(self.pool.free) - idle - self._watermark:
            return []
        s = Paged(content)
        self._attach(s, found)
        self._release(s, 0)
        return brought

    def settle_transfers(self) -> tuple[Transfer, ...]:
        """Copies between the tiers that no micro-batch has carried yet."""
        return self._log.settle()

    def usage(self) -> Usage:
        """Read off the blocks; any free block serves any sequence."""
        pool, size = self.pool, self.block_size
        fill = self._filled()
        free = len(pool.free) * size
        runs = pool.free_extents()
        return Usage(
            self.capacity,
            fill.stored,
            self.capacity - free,
            free,
            len(runs),
            int(runs.max(initial=0)) * size,
            fill.top,
            pool.n_idle * size,
        )

    def sequences(self) -> list[int]:
        """Those with a block."""
        return sorted(seq for seq, s in self.tables.items() if s.table)

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from the tables."""
        position = np.full(self.groups[0].cells, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.groups[0].cells
        for seq, s in self.tables.items():
            first = s.skipped * self.block_size
            cells = s.cells(first, s.length, self.block_size)
            position[cells] = np.arange(first, s.length)
            for cell in cells.tolist():
                owners[cell] = owners[cell] | {seq}
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """Laid out from the tables."""
        owners = np.full(self.groups[0].cells, -1, dtype=np.int64)
        for seq in sorted(self.tables, reverse=True):
            s = self.tables[seq]
            owners[s.cells(s.skipped * self.block_size, s.length, self.block_size)] = seq
        return owners

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _is_reserved(self, chunk: Chunk) -> bool:
        s = self.tables.get(chunk.seq)
        return s is not None and s.reserved == chunk.start + chunk.n > s.length

    def _missing(self, s: Paged, found: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        """Blocks to append so that the table reaches ``stop``; and others that leave the free ones for it:
        what was found and nobody holds, and the copy of a shared block that is about to be written."""
        table = s.table
        more = max(self._blocks(stop) - len(table) - len(found), 0)
        if found:
            return more, sum(
                1 for block in found if block < 0 or (block >= self.pool.first and self.pool.refs[block] == 0)
            )
        at = start // self.block_size
        return more, int(stop > start and s.named <= at < len(table) and self._holders(table[at]) > 1)

    def _need(self, step: Sequence[Chunk]) -> int:
        """Free blocks that the whole step takes. Counts twice what two sequences have found and nobody holds."""
        need = 0
        leaving: dict[int, int] = {}
        for chunk in step:
            if self._is_reserved(chunk):
                continue
            seq, start, n, _ = chunk
            s = self.tables.get(seq) or Paged(NOTHING)
            if self.window is not None:
                self._skip(s, start)
            found = self._found.get(seq, []) if start and not s.table else []
            if found and not self._still_there(s, found):
                del self._found[seq]
                raise NoSlot(f"what sequence {seq} had found has been handed out since")
            more, extra = self._missing(s, found, start, min(start + n, self._max_tokens))
            if extra and not found:
                # The last holder of a shared block writes into it; those before it take a copy.
                block = s.table[start // self.block_size]
                leaving[block] = leaving.get(block, 0) + 1
                extra = int(leaving[block] < self._holders(block))
            need += more + extra
        return need

    def _still_there(self, s: Paged, found: Sequence[int]) -> bool:
        """Whether what was found can still be had: others may have been given room since."""
        keys, cached = s.content.keys(self.block_size, len(found)), self.pool.keys
        return all(
            cached[block] == key if block >= 0 else self.host is not None and self.host.find(key) == ~block
            for block, key in zip(found, keys, strict=False)
            if block != NULL
        )

    def _continue_in_host(self, found: list[int], keys: Sequence[Key]) -> None:
        """Follow a prefix that ends on the device into the host tier, and back where it goes on there."""
        assert self.host is not None
        for key in keys[len(found) :]:
            block = self.pool.find(key)
            if block is None:
                slot = self.host.find(key)
                if slot is None:
                    return
                block = ~slot
            found.append(block)

    def _attach(self, s: Paged, found: Sequence[int]) -> None:
        """Begin a table with what was found, bringing in what lies in the host tier."""
        keys = s.content.keys(self.block_size, len(found))
        away = [at for at, block in enumerate(found) if block < 0]
        s.skipped = next((at for at, block in enumerate(found) if block != NULL), 0) if self.window else 0
        blocks = list(found)
        self.pool.touch(block for block in found[s.skipped :] if block >= 0)
        if away:
            assert self.host is not None
            slots = self.host.pin([keys[at] for at in away])
            for at, slot, block in zip(away, slots, self.pool.take(len(away)), strict=True):
                self._log.add(block, slot, to_host=False)
                self.pool.store(block, keys[at])
                blocks[at] = block
            self.host.unpin([keys[at] for at in away], slots)
        for block in blocks[s.skipped :]:
            self._fill.raise_to(block, self.block_size)
        s.table += blocks
        s.length = len(blocks) * self.block_size
        s.named = len(blocks)

    def _holders(self, block: int) -> int:
        """Sequences that hold a block."""
        if not self._copies:
            return self.pool.holders(block)
        return self.pool.refs[block] - sum(src == block * self.block_size for src, _, _ in self._copies)

    def _own(self, s: Paged, at: int) -> None:
        """Before a block is written: a copy of it if others hold it; and it is no longer what it was cached as.

        Who found this sequence's own block, cached since it was scheduled, waits for just what is to be written.
        """
        block = s.table[at]
        if at < s.named:
            return
        if self._holders(block) > 1:
            new = self.pool.take(1)[0]
            filled = s.length - at * self.block_size
            s.table[at] = new
            if filled > 0:
                self._copies.append((block * self.block_size, new * self.block_size, filled))
                self._fill.raise_to(new, filled)
            else:
                self.pool.release((block,))
            self._refill(block)
        elif self.pool.keys[block] is not None:
            self.pool.forget(block)

    def _name(self, s: Paged, tokens: int) -> None:
        """Let the blocks that its first ``tokens`` tokens fill be found, if anything is to be."""
        upto = min(tokens, s.content.n) // self.block_size
        if not self.prefix_cache or upto <= s.named:
            return
        keys, pool = s.content.keys(self.block_size, upto), self.pool
        first, last = max(s.named, s.skipped), upto
        if self._tail_only and self.window is not None:
            end = (s.prompt - 1) // self.block_size
            first, last = max(first, end - self._window_blocks), min(upto, end)
        if last - first == 1:
            if pool.keys[s.table[first]] is None:
                pool.store(s.table[first], keys[first])
        elif last > first:
            pool.store_all(s.table[first:last], keys[first:last])
        s.named = upto

    def _skip(self, s: Paged, tokens: int) -> None:
        """Give up the blocks that no token from position ``tokens`` on can see, the last of them first."""
        assert self.window is not None
        past = min(max(tokens - self.window + 1, 0) // self.block_size, len(s.table))
        if past > s.skipped:
            gone = s.table[s.skipped : past]
            s.table[s.skipped : past] = [NULL] * len(gone)
            s.skipped = past
            self._give_up(gone[::-1])

    def _release(self, s: Paged, keep: int) -> None:
        """Give up all blocks but the first ``keep``, the last first. Keys of blocks that were never written go."""
        gone = s.table[max(keep, s.skipped) :]
        for at in range(max(s.length // self.block_size, s.skipped), s.named):
            if self._holders(s.table[at]) == 1:
                self.pool.forget(s.table[at], evicted=False)
        del s.table[keep:]
        gone.reverse()
        self._give_up(gone)

    def _give_up(self, gone: Sequence[int]) -> None:
        """One sequence fewer holds each of these blocks."""
        self._empty(self.pool.release(gone))
        if self._fill.partially_visible:
            for block in self._fill.partially_visible.intersection(gone):
                self._refill(block)

    def _empty(self, blocks: Iterable[int]) -> None:
        """Nobody holds these blocks any more."""
        self._fill.empty(blocks)
        if self._copies:
            # A copy for nobody need not be made, and its source need not be held for it.
            gone = {block * self.block_size for block in blocks}
            sources = [src // self.block_size for src, dst, _ in self._copies if dst in gone]
            self._copies = [run for run in self._copies if run[1] not in gone]
            if sources:
                self._empty(self.pool.release(sources))

    def _filled(self) -> BlockOccupancy:
        """How far the blocks are filled, counted anew where it was not kept up to date."""
        fill, size = self._fill, self.block_size
        if not fill.kept:
            fill.begin_anew()
            for s in self.tables.values():
                for at in range(s.skipped, self._blocks(s.length)):
                    fill.raise_to(s.table[at], min(size, s.length - at * size))
        return fill

    def _refill(self, block: int) -> None:
        """Count anew what can be seen of a block, when one of its holders has given up some or all of it."""
        most = 0
        for s in self.tables.values():
            if block in s.table:
                at = s.table.index(block)
                most = max(most, min(self.block_size, s.length - at * self.block_size))
        self._fill.set_to(block, most)

    def _place(
        self, chunks: tuple[Chunk, ...], copies: Moves, transfers: tuple[Transfer, ...], views: bool
    ) -> MicroBatch:
        parts = []
        for seq, start, n, _ in chunks:
            s = self.tables[seq]
            parts.append(s.cells(start, start + n, self.block_size))
            self._write(s, start, start + n)
        seen = tuple(self._view(c.seq) for c in chunks) if views else ()
        place = Place(np.concatenate(parts), self._reads(chunks), copies, views=seen, transfers=transfers)
        return MicroBatch(chunks, (place,))

    def _write(self, s: Paged, start: int, end: int) -> None:
        """Tokens ``[start, end)`` are there."""
        s.length, s.reserved = end, 0
        if self._fill.kept:
            size = self.block_size
            full = end // size
            self._fill.fill(s.table[start // size : full])
            if end % size:
                self._fill.raise_to(s.table[full], end % size)

    def _place_beside(self, step: Sequence[Chunk], lockstep_tokens: int) -> Sequence[PassSummary]:
        """Place chunks for which room has been set aside, where nobody asks for cells."""
        tokens = sum([chunk.n for chunk in step])
        if self._copies or tokens > self._n_ubatch - lockstep_tokens:
            return [PassSummary.from_micro_batch(batch) for batch in self._allocate(step, False, lockstep_tokens)]
        rows = []
        for seq, start, n, _ in step:
            s = self.tables[seq]
            self._write(s, start, start + n)
            held = start + n - s.skipped * self.block_size
            rows.append((n, held, self._blocks(held)))
        return [PassSummary(tokens, rows)]

    def _view(self, seq: int) -> View:
        s = self.tables[seq]
        first = s.skipped * self.block_size
        return View(s.cells(first, s.length, self.block_size), np.arange(first, s.length))

    def _reads(self, chunks: Sequence[Chunk]) -> Reads:
        held = [self.tables[chunk.seq] for chunk in chunks]
        if self.kernel == "gather":
            lengths = np.array([s.length - s.skipped * self.block_size for s in held], dtype=np.int64)
            return table_reads(chunks, lengths, -(-lengths // self.block_size))
        span = padded_span(self._fill.top, self._pad, self.groups[0].cells)
        return reads_of(self.kernel, chunks, lambda seq: self._view(seq).cells, span)

    def _keep(self, block: int, key: Key) -> None:
        """A cached block is about to be handed out: let the host tier have it, if it has room."""
        assert self.host is not None
        slot = self.host.keep(key)
        if slot is not None:
            self._log.add(block, slot, to_host=True)
