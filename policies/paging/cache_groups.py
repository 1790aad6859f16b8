"""Cache groups over one pool of blocks: the layers of a model that share a block table, each kind with its rules.

vLLM 0.33.0's ``single_type_kv_cache_manager.py``; what is said there of full attention holds of latents (MLA), too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Literal

from policies.content import Key
from policies.paging.block_table import (
    BlockOccupancy,
    blocks_behind,
    blocks_for,
    blocks_in_sight,
    most_blocks_in_window,
)
from policies.paging.blocks import NULL, BlockPool

GroupKind = Literal["full", "latent", "window", "chunked", "state"]
"""``full``: every token is seen by all that come after it. ``latent``: the same, one vector for K and V together.
``window``: a token sees the last ``span`` tokens. ``chunked``: it sees those of its own chunk of ``span`` tokens.
``state``: nothing is kept for a token, but one state for the sequence, as by Mamba and linear attention."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a policy must know of a cache group."""

    kind: GroupKind
    block_size: int
    """Tokens in a block. Of a state: after how many tokens it may be kept to be found again."""
    span: int = 0
    """Tokens of the window, or of a chunk."""
    layers: int = 1
    """Layers of the group; only their proportion among groups counts."""
    checkpoint_grid: int = 0
    """Of a state: a pass may also keep the state that it had some tokens before its end, if these are a multiple of
    this many behind its start; 0: never."""

    @property
    def holds_cells(self) -> bool:
        """Whether it has a cell for each token."""
        return self.kind != "state"

    @property
    def window(self) -> int | None:
        """The most tokens that one sees, itself included; None: all."""
        return self.span if self.kind in ("window", "chunked") else None


def check_groups(specs: Sequence[GroupSpec], *, prefix_cache: bool, retention: int) -> None:
    """Raise ``ValueError`` where groups do not fit together, or vLLM would do with them what is not simulated."""
    if all(spec.kind == "state" for spec in specs):
        raise ValueError("groups: at least one must be of another kind than state")
    for spec in specs:
        if (spec.span > 0) != (spec.kind in ("window", "chunked")):
            raise ValueError(f"groups: a group of kind {spec.kind} has a span of {spec.span} tokens")
    if not prefix_cache:
        return
    sizes = [spec.block_size for spec in specs]
    aligned, hashed = lcm(*sizes), gcd(*sizes)
    states = {spec.block_size for spec in specs if spec.kind == "state"}
    if any(spec.kind == "chunked" and spec.block_size != aligned for spec in specs):
        raise ValueError("groups: blocks of chunks must be as large as all others, or multiples, to be found again")
    if len(states) > 1:
        raise ValueError("groups: blocks of states differ in size")
    windows = [spec.block_size for spec in specs if spec.kind in ("window", "chunked")]
    if states and max(states) > hashed and all(size == hashed for size in windows):
        raise ValueError(
            "groups: blocks of states are larger than others; prefixes that end in a block are not simulated"
        )
    if retention > 0 and retention % aligned:
        raise ValueError(f"retention: {retention} tokens are no multiple of {aligned}, in which all blocks end")


@dataclass(slots=True)
class GroupTable:
    """The blocks that one sequence has in one group."""

    blocks: list[int] = field(default_factory=list)
    """The block of every ``block_size`` positions; ``NULL`` where there is none, or it was given up."""
    n_keyed: int = 0
    """Blocks from the first that have got their prefix-cache key, or are not to get one (``num_cached_block``)."""
    last_state: int | None = None
    """Of a state: the index of the block that the last step began with."""
    retired: int = 0
    """Of a state: blocks from the first that have been given up."""
    checkpoint: tuple[int, int] | None = None
    """Of a state: tokens after which the pass at hand keeps one more state, and the index of its block."""
    has_taken: bool = False
    """Whether blocks of a state were taken, beyond those that were found."""


@dataclass(slots=True)
class Boundaries:
    """At which tokens of a sequence others may go on, so that all groups should have what is needed there."""

    prompt: int
    """Tokens of the prompt."""
    junction: int = 0
    """Where another text that begins alike was found to part, as far as some group knew; 0 if there is none."""

    def all(self) -> list[int]:
        """Tokens before each."""
        return [self.prompt - 1, self.junction] if self.junction else [self.prompt - 1]


def group_key(key: Key, number: int) -> Key:
    """What a block is known by that a group, by its number, has for a text with this key."""
    return hash((key, number))


class GroupBlocks:
    """The blocks of a group with full attention or latents, and what is common to all groups."""

    def __init__(self, pool: BlockPool, number: int, spec: GroupSpec, hashed: int, aligned: int, retention: int):
        """``hashed``: tokens between two keys of a text. ``aligned``: what is found of a text is a multiple of that.
        ``retention``: tokens between the windows and states that stay cached; 0: those at boundaries; -1: all."""
        self.spec, self.size = spec, spec.block_size
        self.keeps_all = spec.kind in ("full", "latent")
        """Whether a shorter prefix is cached wherever a longer one is."""
        self.most_blocks: int | None = None
        """The most that a sequence holds at once, where some are given up while it runs."""
        self.alike: list[GroupBlocks] = []
        """Other groups that are looked up together with this one, since they are of the same kind and size."""
        self.draft_tokens = 0
        """Tokens that are drafted for a sequence in each step."""
        self.occupancy = BlockOccupancy(pool.n, spec.block_size)
        """The tokens that its blocks hold; none, if it holds states."""
        self._pool, self._number = pool, number
        self._keys_per_block = spec.block_size // hashed
        self._hashed, self._aligned, self._retention = hashed, aligned, retention

    def note_in_flight(self, tokens: int) -> None:
        """Be told how many tokens are computed at once; by default no effect."""

    def new_step(self) -> None:
        """Be told that another step is composed; by default no effect."""

    # Keys

    def key_at(self, keys: Sequence[Key], tokens: int) -> Key:
        """The group's own key of a text's first tokens; ``keys``: those of the text."""
        return group_key(keys[tokens // self._hashed - 1], self._number)

    def find(self, keys: Sequence[Key], at: int) -> int | None:
        """The block that is cached as a text's block ``at``, if there is one in all groups that are alike."""
        key = self.key_at(keys, (at + 1) * self.size)
        return None if any(other.find(keys, at) is None for other in self.alike) else self._pool.find(key)

    # What is needed

    def behind(self, position: int) -> int:
        """How many of a sequence's first blocks no token from ``position`` on needs."""
        return 0

    def calm_until(self, table: GroupTable, position: int) -> int:
        """The last position for which a sequence, at ``position`` now, neither takes a block nor gives one up."""
        return len(table.blocks) * self.size - 1

    def need(
        self, table: GroupTable, found: Sequence[int], start: int, stop: int, prefill_end: int, whole: bool
    ) -> int:
        """Free blocks that tokens up to ``stop`` take, of a sequence that has ``start`` of them, ``found`` included.

        ``prefill_end``: up to where it is known what the sequence says; 0 if that is of no account. ``whole``: it is
        asked whether there would be room, and nothing is taken.
        """
        blocks, held = blocks_for(stop, self.size), len(table.blocks)
        if whole and self.most_blocks is not None:
            blocks = min(blocks, self.most_blocks)
        behind = self.behind(start)
        more = max(blocks - max(behind, held + len(found)), 0)
        return more + self.free_among(found[max(behind - held, 0) :])

    def free_among(self, found: Sequence[int]) -> int:
        """How many of these blocks no sequence holds."""
        refs = self._pool.refs
        return sum(1 for block in found if block != NULL and refs[block] == 0)

    # What is taken, kept and given up

    def attach(self, table: GroupTable, found: Sequence[int], tokens: int) -> None:
        """Begin an empty table with what was found of so many tokens."""
        behind = max(self.behind(tokens), 0)
        self._pool.touch([block for block in found[behind:] if block != NULL])
        table.blocks += [NULL] * behind
        table.blocks += found[behind:]
        table.n_keyed = len(table.blocks)
        if self.spec.holds_cells:
            self.occupancy.fill([block for block in table.blocks if block != NULL])

    def extend(self, table: GroupTable, stop: int) -> None:
        """Append the blocks that tokens up to ``stop`` take."""
        more = blocks_for(stop, self.size) - len(table.blocks)
        if more > 0:
            table.blocks += self._pool.take(more)

    def skip(self, table: GroupTable, position: int) -> None:
        """Give up what no token from ``position`` on needs, the last block first."""
        self._give_up(table, 0, min(self.behind(position), len(table.blocks)))

    def _give_up(self, table: GroupTable, first: int, stop: int) -> None:
        """Give up blocks back from ``stop``, until one is gone already."""
        blocks, gone = table.blocks, []
        for at in range(stop - 1, first - 1, -1):
            if blocks[at] == NULL:
                break
            gone.append(blocks[at])
            blocks[at] = NULL
        self.give_back(gone)

    def give_back(self, blocks: list[int]) -> None:
        """Drop a reference to each of these blocks, in this order."""
        if blocks:
            self.occupancy.empty(self._pool.release(blocks))

    def release(self, table: GroupTable, length: int, *, forget: bool) -> None:
        """Give up all blocks, the last one first. ``forget``: those cached that were not written up to ``length``."""
        pool, blocks = self._pool, table.blocks
        for block in blocks[length // self.size :] if forget else ():
            if block != NULL and pool.refs[block] == 1:
                pool.forget(block, evicted=False)
        self.give_back([block for block in reversed(blocks) if block != NULL])

    def write(self, table: GroupTable, start: int, stop: int) -> None:
        """Count tokens that are written to cells of the table."""
        full, rest = divmod(stop, self.size)
        self.occupancy.fill(table.blocks[start // self.size : full])
        if rest:
            self.occupancy.raise_to(table.blocks[full], rest)

    def take_back(self, table: GroupTable, n: int, length: int) -> None:
        """Count only the first ``n`` of ``length`` tokens that were written."""
        for at in range(n // self.size, blocks_for(length, self.size)):
            if table.blocks[at] != NULL:
                self.occupancy.set_to(table.blocks[at], max(n - at * self.size, 0))

    def first_held(self, table: GroupTable) -> int:
        """Positions before the first block that is still held."""
        blocks = table.blocks
        return next((at for at, block in enumerate(blocks) if block != NULL), len(blocks)) * self.size

    # What is cached

    def cache(self, table: GroupTable, keys: Sequence[Key], tokens: int, boundaries: Boundaries) -> None:
        """Cache the blocks that a sequence's first tokens fill, as far as they are worth it."""
        stop = tokens // self.size
        if stop <= table.n_keyed:
            return
        pool, blocks = self._pool, table.blocks
        for at in self.worth_caching(table.n_keyed, stop, boundaries):
            if blocks[at] != NULL and pool.keys[blocks[at]] is None:
                pool.store(blocks[at], self.key_at(keys, (at + 1) * self.size))
        table.n_keyed = stop

    def worth_caching(self, first: int, stop: int, boundaries: Boundaries) -> Iterator[int]:
        """The numbers of the blocks from ``first`` to ``stop`` that may be found again (``reachable_block_mask``)."""
        return iter(range(first, stop))

    # What is found

    def look_up(self, keys: Sequence[Key], tokens: int) -> list[int]:
        """The cached blocks of at most so many tokens of a text; as many tokens as they make, aligned, are found."""
        found: list[int] = []
        for at in range(tokens // self.size):
            block = self.find(keys, at)
            if block is None:
                break
            found.append(block)
        return self.cut(found)

    def cut(self, found: list[int]) -> list[int]:
        """The first of these blocks, as many as make an aligned number of tokens."""
        return found[: len(found) * self.size // self._aligned * self._aligned // self.size]


class WindowBlocks(GroupBlocks):
    """A group whose tokens see a window: ``SlidingWindowManager``."""

    def behind(self, position: int) -> int:
        """Blocks that the window has left."""
        return blocks_behind(position, self.spec.span, self.size)

    def calm_until(self, table: GroupTable, position: int) -> int:
        """Until the window leaves a block."""
        return min(super().calm_until(table, position), (self.behind(position) + 1) * self.size + self.spec.span - 2)

    def note_in_flight(self, tokens: int) -> None:
        """What these tokens see must be kept."""
        self.most_blocks = most_blocks_in_window(self.spec.span, tokens, self.size)

    def worth_caching(self, first: int, stop: int, boundaries: Boundaries) -> Iterator[int]:
        """The blocks that the token behind a boundary sees."""
        sight, per_aligned = blocks_in_sight(self.spec.span, self.size), self._aligned // self.size
        every = per_aligned if self._retention < 0 else self._retention // self.size
        if every and sight >= every:
            return iter(range(first, stop))
        worth = {at for at in range(first, stop) if every and at % every >= every - sight}
        if self._retention >= 0:
            for tokens in boundaries.all():
                end = tokens // self._aligned * per_aligned
                worth.update(range(max(first, end - sight), min(stop, end)))
        return iter(sorted(worth))

    def look_up(self, keys: Sequence[Key], tokens: int) -> list[int]:
        """The last blocks in a row that make a window, or else the first of the text."""
        sight, run = blocks_in_sight(self.spec.span, self.size), list[int]()
        for at in range(tokens // self.size - 1, -1, -1):
            block = self.find(keys, at)
            if block is None:
                run = []
            elif run or (at + 1) * self.size % self._aligned == 0:
                run.append(block)
                if len(run) >= sight:
                    return [NULL] * at + run[::-1]
        return self.cut(run[::-1])


class ChunkedBlocks(GroupBlocks):
    """A group whose tokens see those of their own chunk: ``ChunkedLocalAttentionManager``."""

    def behind(self, position: int) -> int:
        """Blocks of chunks before that of ``position``."""
        return position // self.spec.span * self.spec.span // self.size

    def calm_until(self, table: GroupTable, position: int) -> int:
        """Until the end of the chunk."""
        span = self.spec.span
        return min(super().calm_until(table, position), position // span * span + span - 1)

    def note_in_flight(self, tokens: int) -> None:
        """A chunk, and these tokens."""
        self.most_blocks = blocks_for(self.spec.span + tokens, self.size)

    def look_up(self, keys: Sequence[Key], tokens: int) -> list[int]:
        """What is cached of the last chunk; chunks before it are not needed."""
        found = [NULL] * self.behind(tokens)
        for at in range(len(found), tokens // self.size):
            block = self.find(keys, at)
            if block is None:
                break
            found.append(block)
        return found
