"""What a policy is: the one interface that the simulator, the real engine and the recorded runs all drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from policies.triggers import RelativeCosts
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    MicroBatch,
    Moves,
    SequencePlan,
    Usage,
)

Kernel = Literal["masked", "tiled", "gather", "sliced"]
"""How attention reads the cache. ``masked``: every cell up to the highest used one, padded, and masks what is not
the sequence's own (llama.cpp without flash attention). ``tiled``: the same, but skips tiles that hold nothing of
the sequence (flash attention). ``gather``: just the sequence's cells, found through a table (paged attention).
``sliced``: the sequence's own stretch of the cache, from its lowest cell to its highest."""


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
    chunk_size: int = 64
    """Cells in a chunk, for layouts that have chunks."""
    pad: int = 32
    """The ``masked`` kernel's span is rounded up to a multiple of this many cells."""
    kernel: Kernel | None = None
    """How attention reads; None leaves it to the policy."""
    threshold: float = 0.1
    """Fragmentation ratio above which a threshold trigger compacts."""
    window: int = 256
    """Tokens that a ring or a sliding window keeps for each sequence."""
    sinks: int = 4
    """First tokens of each sequence that a ring never overwrites (Xiao et al., arXiv 2309.17453)."""
    unified: bool = True
    """One cache for all sequences (llama-server's ``--kv-unified``), or an equal share for each."""
    n_layers: int = 4
    """Layers of the model: llama.cpp's limit of runs in one defragmentation depends on them."""
    sort_batch: bool = False
    """Split regions: place the longest sequences of a batch first."""
    costs: RelativeCosts = field(default_factory=lambda: RelativeCosts(score=1.0, run=50.0, cell=8.0))
    """For adaptive triggers."""


class Unsupported(Exception):
    """The layout has no such operation; the message says why."""


class Policy(ABC):
    """Decides which cells hold each token's K and V. Deterministic; knows no clock, no bytes and no model.

    A method that raises leaves the state as it was (``NoSlot`` says where that is not so).
    """

    name: str
    """The name in every table and command."""
    capacity: int
    """Cells that can hold tokens, in the first group."""
    groups: tuple[Group, ...]
    """The caches side by side; one, but for models with a sliding window in some layers."""
    kernel: Kernel
    endless: bool = False
    """Whether a sequence may go on for ever in a bounded number of cells, forgetting its oldest tokens."""

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can ever hold here."""
        return self.capacity

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

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Let ``dst``, which holds none of them, see positions ``[start, stop)`` of ``src`` as well."""
        raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")

    def keep(self, seq: int) -> None:
        """Take everything from all other sequences."""
        for other in self.sequences():
            if other != seq:
                self.free(other)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add ``delta`` to positions ``[start, stop)``; those that become negative are freed.

        The next micro-batch says which keys must be rotated.
        """
        raise Unsupported(f"{self.name}: positions are tied to cells in this layout")

    def compact(self) -> Moves:
        """Tidy the first group, and say which cells must be copied where. Nothing to do: no moves."""
        return NO_MOVES

    def idle(self) -> Moves:
        """A slice of tidying for a server with nothing to do; the state is consistent after each."""
        return NO_MOVES

    @abstractmethod
    def sequences(self) -> list[int]:
        """The sequences that hold cells, ascending."""

    @abstractmethod
    def usage(self) -> Usage:
        """How full and how broken up the first group is now; cheap enough for every step."""

    @abstractmethod
    def occupancy(self, group: int = 0) -> CellMap:
        """The whole cache of a group, cell by cell; shape of its arrays: (groups[group].cells,)."""


PolicyFactory = Callable[[CacheConfig], Policy]
"""What a preset or a plug-in provides."""
