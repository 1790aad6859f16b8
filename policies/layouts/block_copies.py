"""What a paged cache does with blocks whose contents are elsewhere, or come from there."""

from __future__ import annotations

from collections.abc import Sequence

from policies.content import Content, Key
from policies.paging.admission import Admission
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable
from policies.paging.blocks import BlockPool
from policies.paging.host_offload import HostOffload
from policies.policy import Policy
from policies.vocabulary import Cells, Chunk, Exported, HostCopy, Transfer


class BlockCopies(Policy):
    """The part of a paged policy that has to do with copies: to and from the host tier, and into blocks from anywhere.

    ``_offload`` is None without a host tier for what is evicted.
    """

    prefix_cache: bool
    window: int | None
    pool: BlockPool
    blocks: BlockManager
    tables: dict[int, BlockTable]
    admission: Admission
    _offload: HostOffload | None
    _watermark: int

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """Copy the sequence's blocks to the host tier; None if the window has left some of them."""
        return super().export(seq, host) if host is not None or self._offload is None else self._offload.export(seq)

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Bring a sequence back, taking blocks that are still cached instead of copies."""
        if self._offload is None:
            return super().import_(seq, exported)
        self._offload.import_(seq, exported, upto, self._watermark if waits else 0)
        return ()

    def drop_export(self, exported: Exported) -> None:
        """Give up the host slots of a sequence."""
        assert self._offload is not None
        self._offload.drop_export(exported)

    def fetch(self, content: Content, tokens: int) -> list[Key]:
        """Bring a prefix from the host tier into free blocks, all of it or none; the keys of the blocks brought."""
        if self._offload is None or not self.prefix_cache or self.window is not None:
            return []
        return self._offload.fetch(content, tokens, self._watermark)

    def table_of(self, seq: int) -> Sequence[int]:
        """The blocks that a sequence holds."""
        return self.tables[seq].blocks

    def expect(self, chunk: Chunk, *, whole: int = 0, waits: bool = False, besides: int = 0) -> bool:
        """Take blocks that are copied into: vLLM's ``allocate_slots`` with ``delay_cache_blocks``."""
        need = self.admission.need([chunk]) + (self._watermark if waits else 0)
        if need + besides > len(self.pool.free):
            return False
        return self.admission.reserve(chunk, whole, waits, 0, 0, chunk.start)

    def arrive(self, seq: int, tokens: int) -> None:
        """Cache the blocks that have been copied into."""
        table = self.tables[seq]
        self.blocks.write(table, table.length, tokens)
        self.blocks.cache_full_blocks(table, tokens)

    def rename(self, seq: int, new: int) -> None:
        """Give a sequence's table another number."""
        table = self.tables[new] = self.tables.pop(seq)
        table.seq = new

    def settle_transfers(self) -> tuple[Transfer, ...]:
        """Copies between the tiers that no micro-batch has carried yet, in order."""
        return () if self._offload is None else self._offload.settle()
