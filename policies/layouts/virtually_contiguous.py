"""Sequences that are contiguous in virtual memory, on physical pages that are mapped when they are needed.

Prabhu et al., "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention" (ASPLOS 2025, arXiv
2405.04437); TensorRT-LLM's pull request 15931 has the same for its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.layouts.paged import PagedPolicy
from policies.paging.free_lists.uncached import ParkedPages
from policies.policy import CacheConfig
from policies.vocabulary import Chunk, MicroBatch, Unsupported


@dataclass(frozen=True, slots=True)
class VirtualPageOptions:
    """Options of this layout."""

    page_tokens: int = 32
    """Cells in a page of virtual memory."""


class VirtuallyContiguousPolicy(PagedPolicy):
    """Pages are blocks that no two sequences share, and attention reads a sequence as one run of virtual addresses.

    The page that holds the next token of a running sequence is mapped while the step before is computed; for all others
    their pass waits. Pages of a sequence that has ended stay mapped in its slot until they are needed in another one.
    """

    moves_cells = False
    has_placement_rule = True

    def __init__(self, name: str, config: CacheConfig):
        """Build an empty cache of ``config.cells // page_tokens`` pages; raises ``ValueError`` for none."""
        super().__init__(
            name,
            config.without_options(),
            block_size=config.read(VirtualPageOptions).page_tokens,
            free=lambda blocks, _: ParkedPages(blocks),
            null_block=False,
            kernel="sliced",
            one_run=True,
        )
        assert self.blocks.pages is not None
        self._pages = self.blocks.pages

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Raise ``Unsupported``: a page is mapped for one sequence."""
        raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place a step; its first pass waits for the pages that were mapped for it."""
        batches = super().allocate(step, views=views)
        if not batches or not self._pages.due:
            return batches
        first, *others = batches
        (place,) = first.places
        return (first._replace(places=(place._replace(mapped=self._pages.settle()),)), *others)
