"""What a policy is: the one interface that the simulator, the real engine and the recorded runs all drive.

A new policy sets ``name``, ``capacity``, ``groups`` and ``kernel``, and has three methods: ``allocate``, ``free`` and
``occupancy``. Every other method has a default that is right, if slower than a policy could be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from policies.abilities import Admits, Compacts, Exports, FindsPrefixes, HasPlacementRule
from policies.content import Content
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    RelativeCosts,
    SequencePlan,
    Unsupported,
    Usage,
    usage_of,
)

if TYPE_CHECKING:
    from policies.cells.region_search import SearchName
    from policies.cells.token_ranks import AttentionReceived
    from policies.paging.eviction import Eviction, FreeOrder

Kernel = Literal["masked", "tiled", "gather", "sliced"]
"""How attention reads the cache. ``masked``: every cell up to the highest used one, padded, and masks what is not
the sequence's own (llama.cpp without flash attention). ``tiled``: as ``masked``, but skips tiles that hold nothing of
the sequence (flash attention). ``gather``: just the sequence's cells, found through a table (paged attention).
``sliced``: the sequence's own stretch of the cache, from its lowest cell to its highest."""

AdmissionRuleName = Literal["as-it-fits", "no-evict", "expected"]
"""``as-it-fits``: a sequence starts if there is room for what it has (vLLM). ``no-evict``: only if there is room for
all that it and those that run may ever hold, so that none is ever preempted (TensorRT-LLM's GUARANTEED_NO_EVICT).
``expected``: only if there is room for its own limit and for a share of what those that run may still generate, a share
that is learned from preemptions (SGLang)."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The settings that every policy is built from."""

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
    page_tokens: int = 32
    """Cells in a page of virtual memory, for layouts that have pages."""
    pad: int = 32
    """The ``masked`` kernel's span is rounded up to a multiple of this many cells."""
    kernel: Kernel | None = None
    """How attention reads; None leaves it to the policy."""
    threshold: float = 0.1
    """Fragmentation ratio above which a threshold trigger compacts."""
    window: int = 256
    """Tokens that a ring or a sliding window keeps for each sequence."""
    full_layers: int = 1
    """Two-level pages: layers with full attention, for so many ``window_layers``."""
    window_layers: int = 5
    """Two-level pages: layers with a sliding window, for so many ``full_layers``."""
    sinks: int = 4
    """First tokens of each sequence that a ring never overwrites, and StreamingLLM never evicts (Xiao et al., arXiv
    2309.17453)."""
    budget: int = 256
    """Token eviction: tokens that each sequence keeps in each group of layers."""
    budget_groups: int = 1
    """Token eviction: equal groups of layers, each of which evicts by itself."""
    attention: AttentionReceived | None = None
    """Token eviction: what an engine measures of attention; None: it is drawn."""
    unified: bool = True
    """One cache for all sequences (llama-server's ``--kv-unified``), instead of an equal share for each."""
    n_layers: int = 4
    """Layers of the model, on which llama.cpp's limit of runs in one defragmentation depends."""
    search: SearchName | None = None
    """Regions of sequences: how free cells for one are searched for; None leaves it to the policy."""
    sort_batch: bool = False
    """Prompt/decode regions: place the longest sequences of a batch first."""
    prefix_cache: bool = True
    """Paged: full blocks are found again by their content."""
    eviction: Eviction = "lru"
    """Paged: which cached block is forgotten first."""
    free_order: FreeOrder = "0.33.0"
    """Paged: the version of vLLM whose order of free blocks is kept."""
    watermark: float = 0.0
    """Paged: share of the blocks that a waiting sequence must leave free while others run."""
    admission: AdmissionRuleName = "as-it-fits"
    """Paged: how much room a sequence that starts must leave for those that run."""
    conservativeness: float = 1.0
    """Paged, ``admission`` "expected": the larger, the more room is expected to be needed."""
    host_cells: int = 0
    """Paged: cells of a tier in host memory for what is evicted or swapped out."""
    future: Callable[[], Iterable[tuple[int, Content, int]]] | None = None
    """For clairvoyant eviction: number, content and prompt length of every request, in the order expected."""
    seed: int = 0
    """What is drawn inside of a policy depends on it: for token eviction, the attention on each token."""
    costs: RelativeCosts = field(default_factory=lambda: RelativeCosts(score=1.0, run=50.0, cell=8.0))
    """What an adaptive trigger weighs compactions by."""


class Policy(Admits, FindsPrefixes, Exports, Compacts, HasPlacementRule, ABC):
    """Decides which cells hold each token's K and V. Deterministic; knows no clock, no bytes and no model.

    Eight methods everyone must understand: ``open``, ``reserve``, ``allocate``, ``free``, ``copy``, ``shift``,
    ``usage`` and ``occupancy``. What else a policy may be able to do is in ``policies/abilities.py``.
    A method that raises leaves the state as it was (``OutOfCells`` says where that is not so).
    """

    # Identity and declared capabilities

    name: str
    """The name in every table and command."""
    capacity: int
    """Cells that can hold tokens, in the first group; with ``shared_memory`` of all layers."""
    groups: tuple[Group, ...]
    """The caches side by side; one, except for models with a sliding window in some layers."""
    kernel: Kernel
    """How attention reads the cells."""
    block_size: int = 1
    """Cells that are handed out together."""
    shared_memory: bool = False
    """Whether the groups take their cells from one memory. ``capacity`` and ``usage`` are then of all groups together,
    in cells of all layers; and each group numbers its cells as if it had the memory to itself."""
    unbounded: bool = False
    """Whether a sequence may go on for ever in a bounded number of cells, forgetting its oldest tokens."""
    forgets: bool = False
    """Whether tokens are dropped that full attention would see: it serves cheaper answers, not the same ones."""

    clairvoyant: bool = False
    """Whether it knows how long answers will be, which no server does: verdicts do not rank it."""

    can_shift: bool = False
    """Whether ``shift`` works: positions of a sequence may be renumbered in place."""

    can_skip_positions: bool = False
    """Whether a chunk may begin behind the end of its sequence, as llama.cpp let it until mid-2025."""

    can_reserve: bool = False
    """Whether ``reserve`` sets room aside chunk by chunk; otherwise it says yes, and ``allocate`` may still refuse."""

    contiguous: bool = False
    """Whether a micro-batch needs one free extent, so that the largest one limits it; otherwise any free cells do."""

    @property
    def drops_tokens(self) -> bool:
        """Whether attention does not see all of a sequence: tokens are forgotten, or lie outside of a window."""
        return self.forgets or any(group.window is not None for group in self.groups)

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens that one sequence can ever hold here; by default all cells."""
        return self.capacity

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Announce a sequence that is about to start and holds nothing yet; by default nothing happens."""

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why such a sequence could not be served even if it had the cache to itself, with the sizes; or None."""
        if self.unbounded or plan.final_tokens <= self.max_sequence_tokens:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {plan.final_tokens} cells ({sizes}), a sequence can have {self.max_sequence_tokens}"

    # Placement

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, in_flight: int = 0, known: int | None = None
    ) -> bool:
        """Set room aside for a chunk that the next ``allocate`` will place; False if there is none.

        ``whole``: that many tokens of the sequence must fit as well. ``waits``: it holds nothing yet, and others run.
        ``in_flight``: tokens before the chunk that are still being computed, and need what they see. ``known``: of only
        that many first tokens it is known what they say, so that a block with others cannot be found yet; None: of all.
        Layouts that place whole micro-batches cannot say; they answer True, and refuse when they are asked to place.
        """
        return True

    @abstractmethod
    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Give every token of the step a cell, micro-batch by micro-batch.

        Each chunk must begin where its sequence ends. ``views`` asks for the cells that attention may see.
        Raises ``OutOfCells`` when there is no room.
        """

    # Giving up cells

    @abstractmethod
    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Take positions ``[start, stop)`` from a sequence (to its end if None); without effect if it holds none."""

    def can_truncate(self, seq: int, n: int) -> int:
        """With how many of its first ``n`` tokens a sequence could continue if the rest were freed: ``n`` or 0.

        0 where the layout cannot give up a tail, or has given up tokens that the next one would have to see.
        """
        return 0

    def keep(self, seq: int) -> None:
        """Take everything from all other sequences."""
        for other in self.sequences():
            if other != seq:
                self.free(other)

    # Sharing and shifting

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Let ``dst``, which holds none of them, see positions ``[start, stop)`` of ``src`` as well."""
        raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add ``delta`` to positions ``[start, stop)``; those that become negative are freed.

        The next micro-batch says which keys must be rotated.
        """
        raise Unsupported(f"{self.name}: positions are tied to cells in this layout")

    # Looking in

    @abstractmethod
    def occupancy(self, group: int = 0) -> CellMap:
        """The whole cache of a group, cell by cell; shape of its arrays: (groups[group].cells,)."""

    def sequences(self) -> list[int]:
        """The sequences that hold cells in any group, ascending."""
        maps = [self.occupancy(group) for group in range(len(self.groups))]
        return sorted({seq for cell_map in maps for owners in set(cell_map.owners) for seq in owners})

    def usage(self) -> Usage:
        """How full and how broken up the first group is now, or with ``shared_memory`` all of them.

        Asked for after every step where tables are kept. By default counted from ``occupancy()`` and ``contiguous``,
        as if nothing were reserved ahead.
        """
        return usage_of(self.occupancy(), self.capacity, self.groups[0].streams, contiguous=self.contiguous)

    def first_owners(self, group: int = 0) -> IntArray:
        """Shape (groups[group].cells,): the smallest sequence in each cell, -1 where it holds no token; for snapshots.

        By default read off ``occupancy()``, which needs a set for every cell.
        """
        return self.occupancy(group).first_owner()


PolicyFactory = Callable[[CacheConfig], Policy]
"""What a preset or a plug-in provides."""
