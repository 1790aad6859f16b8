"""Compactors against a cell-by-cell original, and against what a tidy cache is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.arena import Arena
from policies.compaction.compactors import fill_holes, is_packed, pack

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=200)


def arena_of(cells):
    """An arena whose cell ``i`` belongs to the sequences ``cells[i]``; positions rise with the cells."""
    arena = Arena(len(cells))
    for cell, seqs in enumerate(cells):
        if seqs:
            arena.free.take(cell, 1)
            arena.put(np.array([cell]), seqs, cell)
    return arena


def triples(moves):
    return list(zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True))


def fill_holes_cell_by_cell(used, most_runs):
    """llama.cpp's defragmentation pass in its own order: where each cell's token goes, and in how many runs."""
    used = list(used)
    n_used = sum(used)
    end = max((i for i, taken in enumerate(used) if taken), default=-1) + 1
    goes_to, runs = {}, 0
    i0 = 0
    while i0 < n_used:
        if used[i0]:
            i0 += 1
            continue
        hole = 1
        while i0 + hole < n_used and not used[i0 + hole]:
            hole += 1
        # From the end down, the last cells that are used and have not been moved: as many as the hole is long.
        seen, source = 0, end - 1
        while source > i0:
            if used[source] and source not in goes_to:
                seen += 1
                if seen == hole:
                    break
            source -= 1
        filled, in_run, ended = 0, False, False
        while filled < hole:
            if not used[source] or source in goes_to:
                if runs == most_runs:
                    ended = True
                    break
                in_run = False
            else:
                goes_to[source] = i0 + filled
                used[i0 + filled], used[source] = True, False
                filled += 1
                if not in_run:
                    in_run = True
                    runs += 1
            source += 1
        if ended or runs == most_runs:
            break
        i0 += hole
    return goes_to, runs


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(st.booleans(), min_size=1, max_size=70), st.sampled_from([1, 2, 3, 5, 1000]))
def test_holes_are_filled_as_the_original_fills_them(used, most_runs):
    moves = fill_holes(arena_of([{0} if taken else () for taken in used]), most_runs)
    goes_to = {src + i: dst + i for src, dst, n in triples(moves) for i in range(n)}
    expected, runs = fill_holes_cell_by_cell(used, most_runs)
    assert goes_to == expected
    assert moves.n_runs == runs


# Sequences 0, 1 and 2, or cells that two of them share; scattered, and out of order.
FEW = st.sampled_from([(), (), (0,), (1,), (2,), (0, 1)])


@st.composite
def scattered_arenas(draw):
    owners = draw(st.lists(FEW, min_size=1, max_size=60))
    arena = arena_of(owners)
    used = np.flatnonzero(arena.owner)
    arena.position[used] = draw(st.permutations(range(len(used))))
    return arena


def packed_in_order(arena):
    """Whether all used cells are at the low end, each set of sequences contiguous and in order of position."""
    owner, position = arena.owner[: arena.used], arena.position[: arena.used]
    together = np.diff(owner) == 0
    pieces = np.count_nonzero(~together) + min(arena.used, 1)
    return (owner > 0).all() and pieces == len(set(owner.tolist())) and (np.diff(position)[together] > 0).all()


def tokens_in(arena):
    return [(arena.sets[owner], position) for owner, position in zip(arena.owner, arena.position, strict=True)]


@pytest.mark.slow
@DERANDOMIZED
@given(scattered_arenas())
def test_packing_puts_each_sequence_in_order_into_one_piece(arena):
    full, tidy, before = arena.free.total == 0, packed_in_order(arena), tokens_in(arena)
    assert is_packed(arena) == tidy
    plan = pack(arena)
    assert tokens_in(arena) == before  # It only plans.
    arena.compact(plan)
    # A full cache has no cell to set a token aside in: there it is all or nothing.
    assert packed_in_order(arena) or (full and plan.n_runs == 0)
    assert is_packed(arena) == packed_in_order(arena)
    assert len(arena.free) <= 1
    if tidy:
        assert plan.n_runs == 0
    shadow = np.arange(arena.size)
    plan.apply(shadow)
    for cell in range(arena.used):
        assert tokens_in(arena)[cell] == before[shadow[cell]]


@pytest.mark.slow
@DERANDOMIZED
@given(scattered_arenas())
def test_packing_moves_a_token_once_or_by_way_of_a_free_cell(arena):
    cell_of = {cell: cell for cell in np.flatnonzero(arena.owner).tolist()}
    times = dict.fromkeys(cell_of, 0)
    for src, dst, n in triples(pack(arena)):
        at = {cell: token for token, cell in cell_of.items()}
        for i in range(n):
            cell_of[at[src + i]] = dst + i
            times[at[src + i]] += 1
        assert len(set(cell_of.values())) == len(cell_of)
    for token, moved in times.items():
        assert (moved == 0) == (cell_of[token] == token)
        assert moved <= 2


@pytest.mark.slow
@DERANDOMIZED
@given(scattered_arenas())
def test_packing_moves_no_more_tokens_than_in_the_order_of_first_cells(arena):
    sequences = {}
    for cell in np.flatnonzero(arena.owner).tolist():
        sequences.setdefault(arena.owner[cell], []).append((arena.position[cell], cell))
    in_order = sorted(sequences.values(), key=lambda pairs: min(cell for _, cell in pairs))
    targets = [cell for pairs in in_order for _, cell in sorted(pairs)]
    before = tokens_in(arena)
    arena.compact(pack(arena))
    moved = sum(old != new for old, new in zip(before, tokens_in(arena), strict=True) if new[0])
    assert moved <= sum(cell != target for target, cell in enumerate(targets))


def test_packing_fills_a_gap_with_a_sequence_from_the_end_rather_than_sliding_all():
    arena = Arena(80)
    for seq, start in ((1, 20), (2, 40)):
        cells = np.arange(start, start + 20)
        arena.free.take_each(cells.tolist())
        arena.put(cells, (seq,), 0)
    moves = pack(arena)
    assert [part.tolist() for part in (moves.src, moves.dst, moves.length)] == [[40], [0], [20]]
