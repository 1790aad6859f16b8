"""Which chunks find room in the pool: vLLM's ``get_computed_blocks`` and ``allocate_slots``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.content import NOTHING, Content
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_for, blocks_in_sight
from policies.paging.blocks import NULL
from policies.paging.host_offload import HostOffload
from policies.vocabulary import Chunk, OutOfCells


class Admission:
    """Looks prefixes up in the cache, and takes blocks for chunks that fit.

    ``watermark``: blocks that a waiting sequence must leave free. ``most_blocks``: the most that one sequence holds at
    once. ``drops_last_found``: the last block that is found of a prefix is not used.
    """

    def __init__(
        self,
        name: str,
        blocks: BlockManager,
        host: HostOffload | None,
        *,
        watermark: int,
        max_tokens: int,
        most_blocks: int,
        drops_last_found: bool = False,
    ):
        self._name = name
        self._blocks = blocks
        self._pool = blocks.pool
        self._host = host
        self._watermark = watermark
        self._max_tokens = max_tokens
        self.most_blocks = most_blocks
        self._in_sight = None if blocks.window is None else blocks_in_sight(blocks.window, blocks.block_size)
        """Blocks in a row that must be found for a window."""
        self._drops_last_found = drops_last_found
        self._found: dict[int, list[int]] = {}
        """What ``match`` found for a sequence that has not reserved yet: blocks, ``~slot`` for those in the host tier,
        and ``NULL`` for those before a window."""

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix of a text, in the pool or the host tier; always fewer than ``tokens``."""
        found = self._found[seq] = self._look_up(content, tokens)
        return len(found) * self._blocks.block_size

    def cached_tokens(self, content: Content, tokens: int) -> int:
        """What ``match`` would say, for no sequence in particular."""
        return len(self._look_up(content, tokens)) * self._blocks.block_size

    def _look_up(self, content: Content, tokens: int) -> list[int]:
        """The cached blocks that a text begins with, in the pool or the host tier; for a window, as in ``trailing``."""
        if content.private and self._in_sight is None and self._pool.hides_private:
            return []  # What no other sequence says is cached without a key.
        # The last token is always computed, for what it gives: the next token.
        keys, drops = self._blocks.keys(content, (tokens - 1) // self._blocks.block_size), int(self._drops_last_found)
        if self._in_sight is not None:
            found = self._pool.trailing(keys, self._in_sight + drops)
        else:
            found = self._pool.leading(keys)
            if self._host is not None:
                self._host.continue_prefix(found, keys)
        return found[:-1] if drops else found

    def found(self, seq: int) -> list[int]:
        """The blocks that ``match`` found last for the sequence; ``~slot`` for those in the host tier."""
        return self._found.get(seq, [])

    def reserve(
        self, chunk: Chunk, whole: int, waits: bool, lookahead: int, in_flight: int, known: int | None = None
    ) -> bool:
        """Take the blocks that a chunk needs, and cache those that it fills; False where there are too few.

        ``whole``, ``waits``: as in ``Policy.reserve``. ``lookahead``: drafted tokens behind the chunk that get blocks
        but no keys. ``in_flight``: tokens before the chunk that are still being computed and need their whole window.
        ``known``: only blocks within that many tokens can be cached.
        """
        seq, start, n, _ = chunk
        blocks, size = self._blocks, self._blocks.block_size
        table = blocks.tables.get(seq)
        if table is None:
            table = blocks.tables[seq] = BlockTable(NOTHING, seq=seq)
        held = table.blocks
        found = self._found.get(seq, []) if start and not held else []
        if found and not self._still_cached(table, found):
            del self._found[seq]
            return False
        if start > (len(held) + len(found)) * size:
            raise ValueError(f"{self._name}: sequence {seq} holds no token before position {start}")
        if blocks.window is not None:
            blocks.skip_behind_window(table, start - in_flight)
        free = len(self._pool.free) - (self._watermark if waits else 0)
        if not held and not start and blocks.window is None:
            # Nothing was found of a sequence that begins: all that it needs is blocks.
            more, extra = blocks_for(min(n + lookahead, self._max_tokens), size), 0
            if whole and blocks_for(whole, size) > free:
                return False
        else:
            more, extra = self._missing(table, found, start, min(start + n + lookahead, self._max_tokens))
            if whole and min(blocks_for(whole, size), self.most_blocks) - len(held) - len(found) + extra > free:
                return False
        if more + extra > free:
            return False
        if found:
            blocks.attach(table, found)
            del self._found[seq]
        if n and start // size < len(held):
            blocks.prepare_write(table, start // size)
        if more:
            blocks.extend(table, more, ahead=0 < start == len(held) * size)
        if blocks.prefix_cache:
            blocks.cache_full_blocks(
                table, start + n if known is None else min(start + n, known - blocks.key_lookahead)
            )
        table.reserved = start + n
        return True

    def reserve_step(self, step: Sequence[Chunk]) -> None:
        """Take blocks for all chunks of a step that have not got theirs yet, or raise ``OutOfCells`` and take none."""
        need, free = self.need(step), len(self._pool.free)
        if need > free:
            blocks = f"{need} block{'s' * (need > 1)}"
            raise OutOfCells(f"the step needs {blocks} of {self._blocks.block_size} cells, {free} are free")
        self.attach_found(step)
        self._reserve_all(step)

    def reserve_beside(self, step: Sequence[Chunk], besides: int, take: Callable[[], bool]) -> bool:
        """Take blocks for all chunks of a step in which other sequences need ``besides`` blocks, or return False.

        ``take``: takes those, before the chunks get theirs.
        """
        try:
            need = self.need(step)
        except OutOfCells:
            return False
        if need + besides > len(self._pool.free):
            return False
        self.attach_found(step)
        taken = take()
        self._reserve_all(step)
        return taken

    def attach_found(self, step: Sequence[Chunk]) -> None:
        """Let sequences have what was found of them, so that it is not handed out to other chunks."""
        for chunk in step:
            if chunk.start and self._found.get(chunk.seq):
                self.reserve(chunk._replace(n=0), 0, False, 0, 0)

    def _reserve_all(self, step: Sequence[Chunk]) -> None:
        """Take blocks for the chunks that have not got theirs yet; there must be enough."""
        for chunk in step:
            if not self.is_reserved(chunk) and not self.reserve(chunk, 0, False, 0, 0):
                raise AssertionError(f"{self._name}: blocks that were counted are not there")

    def is_reserved(self, chunk: Chunk) -> bool:
        """Whether a chunk has got its blocks, and is still to be placed."""
        table = self._blocks.tables.get(chunk.seq)
        return table is not None and table.reserved == chunk.start + chunk.n > table.length

    def need(self, step: Sequence[Chunk], whole: int = 0, in_flight: int = 0) -> int:
        """Free blocks that the whole step takes. Free blocks that two sequences have found are counted twice.

        ``whole``: as if each sequence were to hold at least that many tokens. ``in_flight``: as in ``reserve``. Raises
        ``OutOfCells`` if what a sequence had found is gone.
        """
        need = 0
        blocks, size = self._blocks, self._blocks.block_size
        writers: dict[int, int] = {}
        """For each shared block, the chunks so far that write to it."""
        for chunk in step:
            if self.is_reserved(chunk):
                continue
            seq, start, n, _ = chunk
            table = blocks.tables.get(seq) or BlockTable(NOTHING)
            if blocks.window is not None:
                blocks.skip_behind_window(table, start - in_flight)
            found = self._found.get(seq, []) if start and not table.blocks else []
            if found and not self._still_cached(table, found):
                del self._found[seq]
                raise OutOfCells(f"what sequence {seq} had found has been handed out since")
            more, extra = self._missing(table, found, start, min(start + n, self._max_tokens))
            if whole:
                more = max(more, min(blocks_for(whole, size), self.most_blocks) - len(table.blocks) - len(found))
            if extra and not found:
                # The last holder of a shared block writes into it; those before it take a copy.
                block = table.blocks[start // size]
                writers[block] = writers.get(block, 0) + 1
                extra = int(writers[block] < blocks.holders(block))
            need += more + extra
        return need

    def _missing(self, table: BlockTable, found: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        """Blocks to append so that a table reaches position ``stop``, and free blocks that it needs besides.

        Those are found blocks that are free or in the host tier, and the copy of a shared block that is written to.
        """
        blocks, pool = self._blocks, self._pool
        held = table.blocks
        more = max(blocks_for(stop, blocks.block_size) - len(held) - len(found), 0)
        if found:
            return more, sum(1 for block in found if block < 0 or (block >= pool.first and pool.refs[block] == 0))
        at = start // blocks.block_size
        return more, int(stop > start and table.n_keyed <= at < len(held) and blocks.holders(held[at]) > 1)

    def _still_cached(self, table: BlockTable, found: Sequence[int]) -> bool:
        """Whether what was found is still there: others may have taken blocks since."""
        keys, cached, host = self._blocks.keys(table.content, len(found)), self._pool.keys, self._host
        return all(
            cached[block] == key if block >= 0 else host is not None and host.tier.find(key) == ~block
            for block, key in zip(found, keys, strict=False)
            if block != NULL
        )
