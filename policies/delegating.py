"""A policy around another, for those that want to look on, or to do elsewhere what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from policies.content import Content, Key
from policies.policy import Policy
from policies.vocabulary import CellMap, Chunk, IntArray, MicroBatch, Moves, SequencePlan, Transfer, Usage

if TYPE_CHECKING:
    from policies.fast_forward.forecast import FastForward
    from policies.fast_forward.lockstep import LockstepBatch


class DelegatingPolicy(Policy):
    """Leaves everything to the policy within; whoever builds on it says what else is to happen."""

    def __init__(self, inner: Policy):
        self.inner = inner
        self.name, self.capacity, self.groups, self.kernel = inner.name, inner.capacity, inner.groups, inner.kernel
        self.block_size, self.unbounded, self.can_free_while_decoding = (
            inner.block_size,
            inner.unbounded,
            inner.can_free_while_decoding,
        )
        self.moves_cells = inner.moves_cells
        self.can_shift, self.can_reserve = inner.can_shift, inner.can_reserve

    @property
    def max_sequence_tokens(self) -> int:
        """As the inner one."""
        return self.inner.max_sequence_tokens

    def open(self, seq: int, plan: SequencePlan) -> None:
        """As the inner one."""
        self.inner.open(seq, plan)

    def admits(self, plan: SequencePlan) -> bool:
        """As the inner one."""
        return self.inner.admits(plan)

    def refusal(self, plan: SequencePlan) -> str | None:
        """As the inner one."""
        return self.inner.refusal(plan)

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """As the inner one."""
        return self.inner.match(seq, content, tokens)

    def can_truncate(self, seq: int, n: int) -> int:
        """As the inner one."""
        return self.inner.can_truncate(seq, n)

    def reserve(self, chunk: Chunk, *, whole: int = 0, waits: bool = False) -> bool:
        """As the inner one."""
        return self.inner.reserve(chunk, whole=whole, waits=waits)

    def swap_out(self, seq: int) -> int | None:
        """As the inner one."""
        return self.inner.swap_out(seq)

    def swap_in(self, seq: int, ticket: int, upto: int = 0, *, waits: bool = False) -> int | None:
        """As the inner one."""
        return self.inner.swap_in(seq, ticket, upto, waits=waits)

    def forget_swapped(self, ticket: int) -> None:
        """As the inner one."""
        self.inner.forget_swapped(ticket)

    def fetch(self, content: Content, tokens: int) -> Sequence[Key]:
        """As the inner one."""
        return self.inner.fetch(content, tokens)

    def settle_transfers(self) -> tuple[Transfer, ...]:
        """As the inner one."""
        return self.inner.settle_transfers()

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """As the inner one."""
        return self.inner.allocate(step, views=views)

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Nothing: what is taken in a fast-forward would not be seen."""
        return None

    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Nobody, for the same reason."""
        return None

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """As the inner one."""
        self.inner.free(seq, start, stop)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """As the inner one."""
        self.inner.copy(src, dst, start, stop)

    def keep(self, seq: int) -> None:
        """As the inner one."""
        self.inner.keep(seq)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """As the inner one."""
        self.inner.shift(seq, start, stop, delta)

    def compact(self) -> Moves:
        """As the inner one."""
        return self.inner.compact()

    def idle(self) -> Moves:
        """As the inner one."""
        return self.inner.idle()

    def sequences(self) -> list[int]:
        """As the inner one."""
        return self.inner.sequences()

    def usage(self) -> Usage:
        """As the inner one."""
        return self.inner.usage()

    def occupancy(self, group: int = 0) -> CellMap:
        """As the inner one."""
        return self.inner.occupancy(group)

    def first_owners(self, group: int = 0) -> IntArray:
        """As the inner one."""
        return self.inner.first_owners(group)
