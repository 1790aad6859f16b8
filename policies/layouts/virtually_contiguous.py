"""Sequences that are contiguous in virtual memory, on physical pages that are mapped when they are needed.

Prabhu et al., "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention" (ASPLOS 2025, arXiv
2405.04437); TensorRT-LLM's pull request 15931 has the same for its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.fast_forward.forecast import FastForward
from policies.fast_forward.lockstep import PassSummary
from policies.layouts.paged import PagedPolicy
from policies.paging.free_lists.parked import ParkedPages
from policies.policy import CacheConfig, Unsupported
from policies.vocabulary import Chunk, MicroBatch


class VirtuallyContiguousPolicy(PagedPolicy):
    """Pages are blocks that no two sequences share, and attention reads a sequence as one run of virtual addresses.

    The page that holds the next token of a running sequence is mapped while the step before is computed; for all others
    their pass waits. Pages of a sequence that has ended stay mapped in its slot until they are needed in another one.
    """

    moves_cells = False
    can_fast_forward = True

    def __init__(self, name: str, config: CacheConfig):
        """Build an empty cache of ``config.cells // config.page_tokens`` pages; raises ``ValueError`` for none."""
        super().__init__(
            name,
            replace(config, watermark=0.0, host_cells=0, admission="as-it-fits"),
            block_size=config.page_tokens,
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

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Plan steps as for any paged layout; None while a pass must wait for pages."""
        return None if self._pages.due else super().plan_decode_steps(step, n)

    def _allocate(self, step: Sequence[Chunk], views: bool, lockstep_tokens: int) -> tuple[MicroBatch, ...]:
        """Place a step; its first pass waits for the pages that were mapped for it."""
        batches = super()._allocate(step, views, lockstep_tokens)
        if not batches or not self._pages.due:
            return batches
        first, *others = batches
        (place,) = first.places
        return (first._replace(places=(place._replace(mapped=self._pages.settle()),)), *others)

    def _place_beside_lockstep(self, step: Sequence[Chunk], lockstep_tokens: int) -> Sequence[PassSummary]:
        """Place chunks whose pages are reserved; the first pass waits for those that were mapped."""
        first, *others = super()._place_beside_lockstep(step, lockstep_tokens)
        return (first._replace(mapped=self._pages.settle()), *others) if self._pages.due else (first, *others)
