"""What every policy owes its engine, as far as it shows from outside; held in the tests, and of others as they run.

Each function here raises ``BrokenPromise`` where a policy does not keep its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from policies.content import Content
from policies.policy import Policy
from policies.vocabulary import CellMap, Chunk, Group, MicroBatch, Place


class BrokenPromise(AssertionError):
    """A policy, or a scheduler, does not do what it must. The message is one line."""


def declares_possible_sizes(policy: Policy) -> None:
    """Its capacity, its blocks and its groups are of a size that can be."""
    sizes = [("capacity", policy.capacity), ("block_size", policy.block_size)]
    for at, group in enumerate(policy.groups):
        if not isinstance(group, Group):
            raise BrokenPromise(f"groups[{at}] is {group!r:.40}; a policies.api.Group is expected")
        sizes += [(f"groups[{at}].cells", group.cells), (f"groups[{at}].streams", group.streams)]
    for name, size in sizes:
        if not isinstance(size, int | np.integer) or size < 1:
            raise BrokenPromise(f"{name} is {size!r:.40}; a whole number from 1 on is expected")
    if not policy.groups:
        raise BrokenPromise("groups is empty; one for each cache is expected")
    if not policy.shared_memory and policy.capacity > policy.groups[0].cells:
        raise BrokenPromise(f"capacity is {policy.capacity}, and the first group has {policy.groups[0].cells} cells")


def places_what_was_asked(
    policy: Policy, step: Sequence[Chunk], batches: Sequence[MicroBatch], n_ubatch: int, *, refused: bool = False
) -> None:
    """The micro-batches hold the step's chunks in order, and every token has a cell of its own in every group.

    ``refused``: there was no room for the step, and these were placed before.
    """
    if not isinstance(batches, tuple | list):
        raise BrokenPromise(f"allocate gave {batches!r:.40}; a tuple of micro-batches is expected")
    at = {chunk.seq: chunk.start for chunk in step}
    for batch in batches:
        if not isinstance(batch, MicroBatch):
            raise BrokenPromise(f"allocate gave {batch!r:.40} as a micro-batch; a policies.api.MicroBatch is expected")
        tokens = sum([chunk.n for chunk in batch.chunks])
        if not 0 < tokens <= n_ubatch:
            raise BrokenPromise(f"a micro-batch has {tokens} tokens; 1 to {n_ubatch} are expected")
        for chunk in batch.chunks:
            if at.get(chunk.seq) != chunk.start or chunk.n < 1:
                raise BrokenPromise(f"{chunk.n} tokens of sequence {chunk.seq} are placed from position {chunk.start}")
            at[chunk.seq] += chunk.n
        if len(batch.places) != len(policy.groups):
            raise BrokenPromise(
                f"a micro-batch has {len(batch.places)} places, and there are {len(policy.groups)} groups"
            )
        for group, place in zip(policy.groups, batch.places, strict=True):
            _gives_cells(group, place, tokens)
            _reads_what_it_may(group, place, [chunk.n for chunk in batch.chunks])
    for chunk in () if refused else step:
        if at[chunk.seq] != chunk.start + chunk.n:
            placed = at[chunk.seq] - chunk.start
            raise BrokenPromise(f"{placed} of {chunk.n} tokens of sequence {chunk.seq} were given a cell")


def _gives_cells(group: Group, place: Place, tokens: int) -> None:
    cells = np.asarray(place.cells)
    if cells.shape != (tokens,):
        raise BrokenPromise(f"{cells.size} cells are given to {tokens} tokens")
    if cells.min() < 0 or cells.max() >= group.cells:
        wrong = next(cell for cell in cells.tolist() if not 0 <= cell < group.cells)
        raise BrokenPromise(f"cell {wrong} is given, and there are cells 0 to {group.cells - 1}")
    distinct, times = np.unique(cells, return_counts=True)
    if len(distinct) < tokens:
        raise BrokenPromise(f"cell {distinct[times.argmax()]} is given to {times.max()} tokens at once")


def _reads_what_it_may(group: Group, place: Place, tokens: list[int]) -> None:
    reads = place.reads
    if np.asarray(reads.tokens).tolist() != tokens:
        raise BrokenPromise(
            f"reads.tokens is {np.asarray(reads.tokens).tolist()!r:.60} for chunks of {tokens!r:.60} tokens"
        )
    for name, counts in zip(("scanned", "useful", "runs", "span"), reads[1:], strict=True):
        counted = np.asarray(counts)
        if counted.shape not in ((), (len(tokens),)) or counted.min() < 0:
            raise BrokenPromise(f"reads.{name} is {counted.tolist()!r:.60} for {len(tokens)} chunks")
    if group.window is None and (np.asarray(reads.useful) > np.asarray(reads.scanned)).any():
        raise BrokenPromise("reads.useful is more than reads.scanned")
    if place.mapped < 0:
        raise BrokenPromise(f"mapped is {place.mapped}")


def maps_of(policy: Policy) -> list[CellMap]:
    """The cell map of each group, with as many cells as it has."""
    maps = [policy.occupancy(group) for group in range(len(policy.groups))]
    for group, table in zip(policy.groups, maps, strict=True):
        if not len(table.position) == len(table.owners) == group.cells:
            raise BrokenPromise(f"occupancy tells of {len(table.owners)} cells of {group.cells}")
    return maps


def cells_by_owner(table: CellMap) -> dict[int, tuple[list[int], list[int]]]:
    """Each sequence's cells in order of position, and those positions."""
    owners = table.owners
    order = np.argsort(table.position, kind="stable")
    order = order[np.searchsorted(table.position[order], 0) :]
    if sum(map(bool, owners)) != len(order):
        for cell, (position, of) in enumerate(zip(table.position.tolist(), owners, strict=True)):
            if (position >= 0) != bool(of):
                raise BrokenPromise(f"cell {cell} has position {position} and the owners {sorted(of)}")
    found: dict[int, tuple[list[int], list[int]]] = {}
    for cell, position in zip(order.tolist(), table.position[order].tolist(), strict=True):
        for seq in owners[cell]:
            cells, positions = found.setdefault(seq, ([], []))
            cells.append(cell)
            positions.append(position)
    return found


def keeps_its_word(
    policy: Policy, lengths: Mapping[int, int], contents: Mapping[int, Content], *, at_least: bool = False
) -> None:
    """All that can be seen of a policy between two steps is right; arguments as in the functions below."""
    maps = maps_of(policy)
    holds_every_token(policy, maps, lengths, at_least=at_least)
    shares_only_what_is_alike(maps, contents)
    usage_counts_the_cells(policy, maps)
    first_owners_are_those_of_the_map(policy, maps)
    names_those_that_hold_cells(policy, lengths)


def holds_every_token(
    policy: Policy, maps: Sequence[CellMap], lengths: Mapping[int, int], *, at_least: bool = False
) -> None:
    """Each sequence holds a cell for each of its tokens, as far as its layout keeps all; and no other holds any.

    ``lengths``: the tokens of each sequence, negative where that is not known; ``at_least``: it may have more by now.
    """
    for group, table in zip(policy.groups, maps, strict=True):
        held = cells_by_owner(table)
        for seq in held.keys() - lengths.keys():
            raise BrokenPromise(f"sequence {seq} was given up, and still holds {len(held[seq][0])} cells")
        for seq, length in lengths.items():
            _, positions = held.get(seq, ([], []))
            if length < 0 or policy.can_skip_positions or policy.unbounded:
                continue
            n = max(length, len(positions)) if at_least else length
            if policy.forgets or group.window is not None:
                right = positions == sorted(set(positions)) and positions[-1:] == [n - 1] * bool(n)
                right = right or at_least
                if group.chunked and group.window is not None and n % group.window == 0:
                    right = right or not positions
            else:
                right = positions == list(range(n))
            if not right:
                raise BrokenPromise(f"sequence {seq} has {n} tokens, and cells for {_spelled(positions)}")


def _spelled(positions: list[int]) -> str:
    """Positions in a few words."""
    if not positions:
        return "none of them"
    if positions == list(range(positions[0], positions[0] + len(positions))):
        return f"positions {positions[0]} to {positions[-1]}"
    twice = next((a for a, b in pairwise(positions) if a == b), None)
    if twice is not None:
        return f"position {twice} twice"
    missing = next(at for at, position in enumerate(positions) if at != position)
    return f"{len(positions)} positions, and none for position {missing}"


def shares_only_what_is_alike(maps: Sequence[CellMap], contents: Mapping[int, Content]) -> None:
    """Two sequences see the same cell only where they say the same from their beginning up to it."""
    for table in maps:
        alike: dict[frozenset[int], int] = {}
        shared = {owners for owners in set(table.owners) if len(owners) > 1 and owners <= contents.keys()}
        for cell, owners in enumerate(table.owners) if shared else ():
            if owners not in shared:
                continue
            position = table.position[cell]
            if owners not in alike:
                first, *others = [contents[seq] for seq in sorted(owners)]
                alike[owners] = min([first.common_prefix(other) for other in others])
            if position >= alike[owners]:
                named = " and ".join(map(str, sorted(owners)))
                raise BrokenPromise(f"sequences {named} share cell {cell}, where they do not say the same")


def first_owners_are_those_of_the_map(policy: Policy, maps: Sequence[CellMap]) -> None:
    """``first_owners`` says what ``occupancy`` says."""
    if type(policy).first_owners is Policy.first_owners:
        return
    for group, table in enumerate(maps):
        if not np.array_equal(policy.first_owners(group), table.first_owner()):
            raise BrokenPromise("first_owners() and occupancy() differ")


def usage_counts_the_cells(policy: Policy, maps: Sequence[CellMap]) -> None:
    """``usage`` says what can be counted in ``occupancy``."""
    if type(policy).usage is Policy.usage:
        return
    usage = policy.usage()
    for name in ("capacity", "stored", "allocated", "free", "placeable", "free_extents", "largest_free_extent", "span"):
        if getattr(usage, name) < 0:
            raise BrokenPromise(f"usage().{name} is {getattr(usage, name)}")
    if usage.capacity != policy.capacity:
        raise BrokenPromise(f"usage().capacity is {usage.capacity}, and capacity {policy.capacity}")
    if not usage.stored <= usage.allocated <= usage.capacity:
        sizes = f"stored is {usage.stored}, allocated {usage.allocated} and capacity {usage.capacity}"
        raise BrokenPromise(f"usage().{sizes}; each is at most the next")
    if not 0 <= usage.external_fragmentation <= 1 or usage.largest_free_extent > usage.free:
        sizes = f"placeable is {usage.placeable}, largest_free_extent {usage.largest_free_extent}"
        raise BrokenPromise(f"usage().{sizes}, and {usage.free} cells are free")
    used = np.fromiter(map(bool, maps[0].owners), bool, len(maps[0].owners))
    if policy.shared_memory:
        by_group = [sum(map(bool, table.owners)) for table in maps]
        stored = int(np.dot([group.share for group in policy.groups], by_group) + 1e-9)
    else:
        stored = int(used.sum())
    if usage.stored != stored:
        raise BrokenPromise(f"usage().stored is {usage.stored}, and {stored} cells hold a token")
    if policy.shared_memory:
        return
    if usage.span != (top := int(np.flatnonzero(used).max(initial=-1)) + 1):
        raise BrokenPromise(f"usage().span is {usage.span}, and the highest cell in use {top - 1}")
    if usage.stored == usage.allocated and policy.capacity == policy.groups[0].cells:
        lengths = [n for stream in np.split(used, policy.groups[0].streams) for n in _lengths_of_runs(~stream)]
        told, counted = (usage.free_extents, usage.largest_free_extent), (len(lengths), max(lengths, default=0))
        if told != counted:
            raise BrokenPromise(f"usage() tells of {told[0]} free extents up to {told[1]}, and there are {counted}")


def _lengths_of_runs(free: np.ndarray[Any, Any]) -> list[int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(int)))
    lengths: list[int] = (edges[1::2] - edges[::2]).tolist()
    return lengths


def names_those_that_hold_cells(policy: Policy, lengths: Mapping[int, int]) -> None:
    """``sequences`` are in order, among those that are open, and all that hold tokens."""
    if type(policy).sequences is Policy.sequences:
        return
    named = policy.sequences()
    if named != sorted(set(named)) or not {seq for seq, n in lengths.items() if n > 0} <= set(named) <= lengths.keys():
        raise BrokenPromise(f"sequences() is {named!r:.60}, and {sorted(lengths)!r:.60} are open")


def holds_nothing(policy: Policy) -> None:
    """Every sequence has been freed."""
    if policy.sequences():
        raise BrokenPromise(f"sequences {policy.sequences()!r:.60} were given up, and still hold cells")
    usage = policy.usage()
    if (usage.stored, usage.allocated, usage.span, usage.free) != (0, 0, 0, policy.capacity):
        raise BrokenPromise(f"all sequences were given up, and {usage.allocated} cells are still taken")
    if usage.free_extents != policy.groups[0].streams:
        raise BrokenPromise(f"all sequences were given up, and the free cells lie in {usage.free_extents} extents")
