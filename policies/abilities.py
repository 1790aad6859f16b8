"""What a policy can do besides placing tokens: seven abilities, each with what holds of a policy that lacks it.

Every policy has these methods, so that a server may ask any. A policy overrides those of the abilities that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from policies.content import Content, Key
from policies.vocabulary import (
    NO_MOVES,
    Cells,
    Checkpoint,
    Chunk,
    Exported,
    HostCopy,
    Moves,
    SequencePlan,
    Transfer,
    Unsupported,
)

if TYPE_CHECKING:
    from policies.paging.host_chunks import HostChunks
    from policies.placement.rule import PlacementRule


class Admits:
    """Says when a sequence may start. Without: whenever its first tokens find room, as in llama.cpp."""

    can_free_while_decoding: bool = False
    """Whether decode steps may make room for waiting requests: by giving up cells, or by forgetting a shared prefix."""

    admits_while_decoding: bool = False
    """Whether ``admits`` may say yes after decode steps in which no cell was given up, where it said no before."""

    def admits(self, plan: SequencePlan) -> bool:
        """Whether such a sequence may start now, or should wait; by default it may, as in llama.cpp."""
        return True

    def note_preemption(self) -> None:
        """Be told that a sequence has just been preempted, and is gone; by default no effect."""


class FindsPrefixes:
    """Finds again what the cache holds of a text. Without: nothing is found."""

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """How many of the first ``tokens`` tokens of a text are cached already, for a sequence that holds nothing.

        They belong to the sequence as soon as a chunk that starts behind them has been reserved. By default none are.
        """
        return 0

    def cached_tokens(self, content: Content, tokens: int) -> int:
        """How many tokens ``match`` would find of a text now. Changes nothing; by default none are found."""
        return 0

    def will_return(self, seq: int) -> None:
        """Be told that a sequence is about to be freed, and will begin again with the same text."""

    def compose_ahead(self, steps: int) -> None:
        """Be told that up to ``steps`` steps are in flight at once, so that what decode steps place is known later.

        That holds for the steps of ``placement_rule``; by default nothing changes.
        """

    def note_known(self, seq: int, tokens: int) -> None:
        """Be told that it is now known what the first ``tokens`` tokens of a sequence say; by default no effect."""

    def fetch(self, content: Content, tokens: int) -> Sequence[Key]:
        """Bring a text's prefix from the host tier into free cells, ahead of its use; the keys of what was brought."""
        return ()


class Exports:
    """Copies sequences to host memory and back. Without: they are computed again.

    The same two verbs serve preemption by swapping, llama-server's host cache, and saved slots.
    """

    name: str
    can_export: bool = False
    """Whether ``export`` copies whole sequences to host cells that the caller names."""

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """Copy a sequence to host memory; it stays where it is. None where it cannot be copied, or there is no room.

        ``host``: the host cell of each position, as many as the sequence has tokens, for policies that declare
        ``can_export``; None: where the policy has it, in a host tier of its own, until ``import_`` or ``drop_export``.
        """
        if host is None:
            return None
        raise Unsupported(f"{self.name}: a sequence cannot be copied to host cells")

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Give a sequence cells for all that was exported, instead of those it has; the copies, one for each group.

        ``upto``: that many tokens of the sequence must fit as well. ``waits``: others run meanwhile.
        Raises ``OutOfCells`` where there is no room; the sequence then holds nothing, and may be imported later.
        """
        raise Unsupported(f"{self.name}: a sequence cannot be copied from the host")

    def drop_export(self, exported: Exported) -> None:
        """Drop a sequence that was exported to the policy's own host tier, and will not come back."""

    def settle_transfers(self) -> tuple[Transfer, ...]:
        """The copies between the tiers that no micro-batch has reported yet; from now on they are reported."""
        return ()


class Loads:
    """Gives sequences cells that are copied from host memory beside the steps. Without: there is nothing to load."""

    chunks: HostChunks | None = None
    """What host memory holds, and has room for, where copies are made beside the steps, as by vLLM's offloading."""

    def table_of(self, seq: int) -> Sequence[int]:
        """The blocks that a sequence holds, in the order of its tokens; empty for a layout without blocks."""
        return ()

    def expect(self, chunk: Chunk, *, whole: int = 0, waits: bool = False, besides: int = 0) -> bool:
        """Give a sequence cells for a chunk that will be copied into them; False where there is no room.

        ``whole``, ``waits``: as in ``reserve``. ``besides``: blocks that must stay free.
        """
        return False

    def arrive(self, seq: int, tokens: int) -> None:
        """Be told that the first tokens of a sequence are there, as was to be expected; others may find them."""

    def rename(self, seq: int, new: int) -> None:
        """Give all that a sequence has to another number, which holds nothing."""
        raise Unsupported(f"a sequence cannot be renamed from {seq} to {new}")


class SavesCheckpoints:
    """Saves what of a sequence cannot be rolled back, windows and states. Without: there is nothing of the kind."""

    saves_checkpoints: bool = False
    """Whether only some beginnings of a sequence can be gone on from, unless a checkpoint of it is restored."""

    holds_states: bool = False
    """Whether each sequence has a state of a fixed size beside its cells."""

    def ends(self, seq: int) -> tuple[int, int]:
        """The first position that a sequence still has in every cache, and the last one; -1 if it has none."""
        raise Unsupported("nothing of a sequence needs checkpoints here")

    def save_checkpoint(self, seq: int, host: Cells) -> Checkpoint:
        """Save what could not be rolled back later to host cells, as many as windows may hold; the sequence stays."""
        raise Unsupported("nothing of a sequence needs checkpoints here")

    def restore_checkpoint(self, seq: int, checkpoint: Checkpoint) -> tuple[HostCopy, ...]:
        """Put back what was saved of a sequence whose first tokens are still those of then; the others are freed.

        Returns what must be copied for that, one for each group.
        """
        raise Unsupported("nothing of a sequence needs checkpoints here")


class Compacts:
    """Moves tokens so that free cells lie together. Without: nothing moves."""

    moves_cells: bool = False
    """Whether it may ever ask for cells to be copied, so that what that costs must be known."""

    def compact(self) -> Moves:
        """Pack the first group, and say which cells must be copied where; no moves if there is nothing to do."""
        return NO_MOVES

    def idle(self) -> Moves:
        """A slice of tidying for a server with nothing to do; the state is consistent after each."""
        return NO_MOVES


class HasPlacementRule:
    """Gives sequences that decode their tokens in the step loop. Without: each step goes through ``allocate``."""

    has_placement_rule: bool = False
    """Whether ``placement_rule`` places tokens exactly as ``allocate`` would; if not, each step is taken through
    ``allocate``. Every class declares it for itself: a subclass that places tokens in another way would otherwise
    inherit a rule that is wrong."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Make ``has_placement_rule`` False in a subclass that does not declare it."""
        super().__init_subclass__(**options)
        if "has_placement_rule" not in vars(cls):
            cls.has_placement_rule = False

    def placement_rule(self) -> PlacementRule | None:
        """What gives sequences that only decode their tokens, the same object at every call; None for no rule.

        While a sequence is a row of the rule, its tokens must not be placed in any other way. Asked only of a policy
        that declares ``has_placement_rule``.
        """
        return None
