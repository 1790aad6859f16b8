"""What a policy is: the one interface that the simulator, the real engine and the recorded runs all drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    MicroBatch,
    Moves,
    SequencePlan,
    Usage,
)

Kernel = Literal["masked", "gather"]
"""How attention reads the cache. ``masked``: every cell up to the highest used one, padded, and masks what is not
the sequence's own (llama.cpp without flash attention). ``gather``: just the sequence's cells, found through a
table (paged attention)."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What every policy is built from."""

    cells: int
    """Cells in the cache."""
    n_ubatch: int = 512
    """The most tokens in one micro-batch."""
    sequences: int = 8
    """The most sequences that hold cells at the same time."""
    max_tokens: int = 4096
    """The most positions that one sequence may hold."""
    block_size: int = 16
    """Cells in a block, for layouts that have blocks."""
    pad: int = 32
    """The ``masked`` kernel's span is rounded up to a multiple of this many cells."""
    kernel: Kernel | None = None
    """How attention reads; None leaves it to the policy."""


class Policy(ABC):
    """Decides which cells hold each token's K and V. Deterministic; knows no clock, no bytes and no model.

    A method that raises leaves the state as it was (``NoSlot`` says where that is not so).
    """

    name: str
    """The name in every table and command."""
    capacity: int
    """Cells that can hold tokens."""
    arena_cells: int
    """Cells that a real engine must make room for: ``capacity``, and any that are never handed out."""
    kernel: Kernel

    def open(self, seq: int, plan: SequencePlan) -> None:  # noqa: B027  (most policies look at no plan)
        """A sequence is about to start; it holds nothing yet."""

    def admits(self, plan: SequencePlan) -> bool:
        """Whether such a sequence may start now, or should wait. llama.cpp never makes one wait."""
        return True

    @abstractmethod
    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Give every token of the step a cell, micro-batch by micro-batch.

        Each chunk must begin where its sequence ends. ``views`` asks for the cells that attention may see.
        Raises ``NoSlot`` when there is no room.
        """

    @abstractmethod
    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Take positions ``[start, stop)`` from a sequence (to its end if None). None held: nothing happens."""

    def compact(self) -> Moves:
        """Tidy the cache, and say which cells must be copied where. Nothing to do: no moves."""
        return NO_MOVES

    @abstractmethod
    def usage(self) -> Usage:
        """How full and how broken up the cache is now; cheap enough for every step."""

    @abstractmethod
    def occupancy(self) -> CellMap:
        """The whole cache, cell by cell."""


PolicyFactory = Callable[[CacheConfig], Policy]
"""What a preset or a plug-in provides."""
