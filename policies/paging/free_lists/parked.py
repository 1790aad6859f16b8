"""Pages that stay mapped in the slot of a sequence that has ended: vAttention's deferred reclamation.

Prabhu et al., "vAttention" (ASPLOS 2025, arXiv 2405.04437); ``map_pages_for_curr_step`` and
``reclaim_kvblocks_on_demand`` in microsoft/vattention, ``vattention/vattention.cu``. The same is called parking in
TensorRT-LLM's pull request 15931.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.paging.free_lists.uncached import Uncached

_Place = tuple[int, int]
"""A slot, and the number of a page in its range of addresses."""


class ParkedPages(Uncached):
    """Hands out first what is still mapped just there, then pages that are mapped nowhere, then the longest parked.

    A block is a page of all layers. Pages of a sequence are released from its end, so that those of a slot are taken
    away from the end of its range.
    """

    def __init__(self, blocks: Iterable[int]):
        self._unmapped = list(blocks)[::-1]
        """Pages that were never mapped, the next one last."""
        self._place: dict[int, _Place] = {}
        """Where each page is mapped, in use or not."""
        self._parked: dict[_Place, int] = {}
        """The free pages that are mapped, by their place, the longest parked first."""
        self._slot = self._at = 0
        self._ahead = False
        self.due = 0
        """Pages that were mapped since the last ``settle`` while the sequence waited for them."""
        self.n_mapped = 0
        """Pages mapped so far."""
        self.n_found = 0
        """Pages so far that were found mapped in the slot that needed them."""

    def __len__(self) -> int:
        return len(self._unmapped) + len(self._parked)

    def turn_to(self, slot: int, at: int, *, ahead: bool) -> None:
        """Say for whom the next pages are: those of a slot from number ``at`` on.

        ``ahead``: the first of them is mapped while the step before is computed.
        """
        self._slot, self._at, self._ahead = slot, at, ahead

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` pages for where ``turn_to`` said, and go on behind them."""
        taken, slot, at, parked = list[int](), self._slot, self._at, self._parked
        for number in range(at, at + n):
            place = slot, number
            page = parked.pop(place, -1)
            if page >= 0:
                self.n_found += 1
            else:
                page = self._unmapped.pop() if self._unmapped else parked.pop(next(iter(parked)))
                self._place[page] = place
                self.n_mapped += 1
                self.due += not (self._ahead and number == at)
            taken.append(page)
        self._at, self._ahead = at + n, False
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take pages back, which stay mapped where they are."""
        for page in blocks:
            self._parked[self._place[page]] = page

    def settle(self) -> int:
        """Pages that were mapped since the last call while their sequences waited."""
        due, self.due = self.due, 0
        return due

    def order(self) -> list[int]:
        """All free pages, in the order in which a slot without parked ones would get them."""
        return [*self._unmapped[::-1], *self._parked.values()]
