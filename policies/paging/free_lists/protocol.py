"""What a block pool asks of its free list.

A free block is *plain*, or *cached*: it still holds a prefix that may be asked for again. Plain ones are handed out
first, except in vLLM's order up to 0.22.1.
"""

from __future__ import annotations

from typing import Protocol

from policies.content import Key

BlockKeys = list[Key | None]
"""Each block's key, or None where the block is plain; the pool's own list, which changes."""


class FreeBlocks(Protocol):
    """The free blocks, in the order in which they will be handed out."""

    tracks_use: bool
    """Whether the order depends on when blocks are cached and hit."""

    def __len__(self) -> int: ...

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` blocks; at least that many must be free."""
        ...

    def release(self, blocks: list[int]) -> None:
        """Take blocks back, in this order."""
        ...

    def remove(self, block: int) -> None:
        """A free cached block is in use again."""
        ...

    def forget(self, block: int) -> None:
        """A free cached block has become plain."""
        ...

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """A block in use has become a cached one, for a request of this kind (``SequencePlan.kind``)."""
        ...

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """A cached block, free or in use, has been found by a sequence, for a request of this kind."""
        ...

    def order(self) -> list[int]:
        """All free blocks, the next to be handed out first."""
        ...
