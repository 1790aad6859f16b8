"""What a policy is: the one interface that the simulator, the real engine and the recorded runs all drive.

A new policy sets ``name``, ``capacity``, ``groups`` and ``kernel``, and has three methods: ``allocate``, ``free`` and
``occupancy``. Every other method has a default that is right, if slower than a policy could be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast

from policies.abilities import Admits, Compacts, Exports, FindsPrefixes, HasPlacementRule, Loads, SavesCheckpoints
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    SequencePlan,
    Unsupported,
    Usage,
    usage_of,
)

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

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True, init=False)
class CacheConfig:
    """What a policy is built from: the size of its cache, and the options of its layout."""

    cells: int
    """Cells in the cache."""
    n_ubatch: int = 512
    """The most tokens in one micro-batch."""
    sequences: int = 8
    """The most sequences that hold cells at the same time."""
    max_tokens: int = 4096
    """The most positions that one sequence may hold."""
    kernel: Kernel | None = None
    """How attention reads; None leaves it to the policy."""
    pad: int = 32
    """The ``masked`` kernel's span is rounded up to a multiple of this many cells."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of layouts, by name, as far as they are stated; each layout reads its own."""
    for_any_layout: bool = False
    """Whether a layout leaves options alone that it does not have, since they are for others; or refuses them."""

    def __init__(
        self,
        cells: int,
        n_ubatch: int = 512,
        sequences: int = 8,
        max_tokens: int = 4096,
        kernel: Kernel | None = None,
        pad: int = 32,
        options: Mapping[str, Any] | None = None,
        for_any_layout: bool = False,
        **more_options: Any,
    ):
        """``more_options`` are added to ``options``, so that ``CacheConfig(64, block_size=4)`` has one."""
        stated = {**(options or {}), **more_options}
        values = (cells, n_ubatch, sequences, max_tokens, kernel, pad, stated, for_any_layout)
        for each, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, each.name, value)

    def read(self, kind: type[Options]) -> Options:
        """The options of a layout: a dataclass whose fields are their names, each with its default.

        Raises ``ValueError`` for an option that it does not have.
        """
        names = [each.name for each in fields(cast("Any", kind))]
        unknown = [name for name in self.options if name not in names]
        if unknown and not self.for_any_layout:
            there_are = f"there are {', '.join(names)}" if names else "it has none"
            raise ValueError(f"no option {', '.join(map(repr, unknown))} in this layout; {there_are}")
        return kind(**{name: self.options[name] for name in names if name in self.options})

    def with_options(self, **options: Any) -> CacheConfig:
        """This configuration with options that replace those of the same names."""
        return replace(self, options={**self.options, **options})

    def without_options(self) -> CacheConfig:
        """This configuration without options, for a layout within a layout."""
        return replace(self, options={})


class Policy(Admits, FindsPrefixes, Exports, Loads, SavesCheckpoints, Compacts, HasPlacementRule, ABC):
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

    cuts_chunks: bool = False
    """Whether the chunks of a prompt must end where ``cut_chunk`` says."""

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

    def cut_chunk(self, seq: int, start: int, n: int, *, prompt: int, tokens: int, most: int) -> int:
        """With how many of ``n`` tokens from ``start`` on a sequence may go on in a step; 0: with none.

        ``prompt``, ``tokens``: tokens of its prompt, and all that are known; ``most``: those that a step ever takes of
        one sequence. Asked of policies that declare ``cuts_chunks``; by default all.
        """
        return n

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

    def reserve_with_drafts(
        self,
        chunk: Chunk,
        lookahead: int,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
    ) -> bool:
        """Take room as ``reserve`` does, and for ``lookahead`` drafted tokens behind it; by default not for these.

        The chunk may itself end with drafted tokens, which are not ``known``.
        """
        return self.reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known)

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

    def take_back(self, seq: int, start: int) -> None:
        """Take the tokens from ``start`` on from a sequence that goes on: they were drafted, and not accepted.

        Their room may stay with the sequence, which will soon want it again. By default they are freed.
        """
        self.free(seq, start)

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
