"""One region for each sequence: cells worked out by hand."""

import pytest

from policies import CacheConfig, Chunk, OutOfCells, SequencePlan, Unsupported, available


def policy(name, **keys):
    return available()[name](CacheConfig(**({"cells": 64, "n_ubatch": 32, "max_tokens": 16} | keys)))


def plan(prompt, final=None, most=16):
    return SequencePlan(prompt, most, prompt if final is None else final)


def cells_of(batches):
    return [batch.cells.tolist() for batch in batches]


def moves_of(batch):
    moves = batch.places[0].moves
    return list(zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True))


# Reserved


def test_reserved_takes_the_longest_there_could_be():
    cache = policy("hf-reserved", cells=40)
    cache.open(0, plan(3))
    cache.open(1, plan(5))
    assert cells_of(cache.allocate([Chunk(0, 0, 3), Chunk(1, 0, 5)])) == [[0, 1, 2, 16, 17, 18, 19, 20]]
    usage = cache.usage()
    assert (usage.stored, usage.allocated, usage.free) == (8, 32, 8)
    assert usage.internal_fragmentation == 0.75
    assert usage.span == 21


def test_a_region_is_taken_when_its_sequence_is_let_in():
    """Three are asked for before any has a token; the third must wait."""
    cache = policy("hf-reserved", cells=40)
    for seq in range(2):
        assert cache.admits(plan(1))
        cache.open(seq, plan(1))
    assert not cache.admits(plan(1))
    cache.free(0)
    assert cache.admits(plan(1))


def test_a_region_that_stands_empty_has_no_cell_to_be_read():
    cache = policy("hf-reserved")
    for seq in range(2):
        cache.open(seq, plan(1))
    assert cache.usage().span == 0


def test_no_sequence_outgrows_its_reservation():
    cache = policy("hf-reserved")
    cache.open(0, plan(10))
    cache.allocate([Chunk(0, 0, 16)])
    with pytest.raises(OutOfCells, match="16 cells cannot hold 17 tokens"):
        cache.allocate([Chunk(0, 16, 1)])
    assert cache.usage().stored == 16


@pytest.mark.parametrize("name", ["hf-reserved", "growing", "oracle", "ring"])
def test_a_tail_can_go_and_a_middle_cannot(name):
    cache = policy(name)
    cache.open(0, plan(6, 10))
    cache.allocate([Chunk(0, 0, 8)])
    allocated = cache.usage().allocated
    with pytest.raises(Unsupported, match=r"only a sequence's tail can go, not \[2, 4\)"):
        cache.free(0, 2, 4)
    with pytest.raises(Unsupported, match="tied to cells"):
        cache.shift(0, 4, None, -2)
    with pytest.raises(Unsupported, match="cannot share"):
        cache.copy(0, 1)
    cache.free(0, 5)
    assert (cache.usage().stored, cache.usage().allocated) == (5, allocated)
    assert cells_of(cache.allocate([Chunk(0, 5, 1)])) == [[5]]


@pytest.mark.parametrize("name", ["hf-reserved", "growing", "oracle", "ring", "paged", "chunked"])
def test_an_empty_range_holds_nothing_to_be_freed(name):
    cache = policy(name)
    cache.open(0, plan(6, 10))
    before = cache.usage()
    cache.free(0, 0, 0)
    assert cache.usage() == before
    cache.allocate([Chunk(0, 0, 6)])
    before = cache.usage()
    cache.free(0, 2, 2)
    assert cache.usage() == before


# Growing


def test_growing_doubles_its_buffer_and_copies_it():
    cache = policy("growing")
    cache.open(0, plan(10))
    cache.open(1, plan(17))
    cache.allocate([Chunk(0, 0, 10), Chunk(1, 0, 17)])
    assert cache.usage().allocated == 16 + 32
    cache.free(1)
    (batch,) = cache.allocate([Chunk(0, 10, 7)])
    # Cells 0 to 15 are full with the sixteenth token; the seventeenth needs 32, and the first such extent is behind.
    assert moves_of(batch) == [(0, 16, 10)]
    assert batch.cells.tolist() == list(range(26, 33))
    assert [cache.usage().free, cache.usage().free_extents] == [32, 2]
    # The buffer that was left is free again.
    assert cells_of(cache.allocate([Chunk(1, 0, 2)])) == [[0, 1]]


def test_growing_by_more_than_double():
    cache = policy("growing", cells=256)
    cache.open(0, plan(5))
    cache.allocate([Chunk(0, 0, 5)])
    (first, *_) = cache.allocate([Chunk(0, 5, 70)])
    assert cache.usage().allocated == 128
    assert moves_of(first) == [(0, 16, 5)]


def test_a_step_that_cannot_grow_everyone_grows_no_one():
    """Two buffers of 16 in 64 cells: one can grow to 32, the other finds no run of 32 any more."""
    cache = policy("growing")
    for seq in range(2):
        cache.open(seq, plan(16))
    cache.allocate([Chunk(0, 0, 16), Chunk(1, 0, 16)])
    before, occupied = cache.usage(), cache.occupancy()
    with pytest.raises(OutOfCells, match="no free extent of 32 cells"):
        cache.allocate([Chunk(0, 16, 1), Chunk(1, 16, 1)])
    assert cache.usage() == before
    assert (cache.occupancy().position == occupied.position).all()
    (batch,) = cache.allocate([Chunk(0, 16, 1)])
    assert (moves_of(batch), batch.cells.tolist()) == ([(0, 32, 16)], [48])


# Oracle


def test_the_oracle_takes_what_will_be_needed_and_the_tightest_place_for_it():
    cache = policy("oracle", cells=30)
    for seq, final in enumerate([4, 2, 7, 3, 6]):
        assert cache.admits(plan(1, final))
        cache.open(seq, plan(1, final))
    assert cache.usage().allocated == 22
    cache.free(0)  # leaves cells 0 to 3
    cache.free(2)  # leaves cells 6 to 12
    cache.free(4)  # leaves the end, from cell 16 on
    assert [cache.usage().free_extents, cache.usage().largest_free_extent] == [3, 14]
    for seq, final, first in [(5, 5, 6), (6, 3, 0), (7, 14, 16)]:
        cache.open(seq, plan(1, final))
        assert cells_of(cache.allocate([Chunk(seq, 0, 1)])) == [[first]]
    assert not cache.admits(plan(1, 3))
    assert cache.admits(plan(1, 2))


# Ring. A window of six cells, two of them sinks; no position beyond 7 (max_tokens 8).


def ring(**keys):
    cache = policy("ring", **({"cells": 12, "max_tokens": 8, "window": 6, "sinks": 2} | keys))
    cache.open(0, plan(6, 8, 8))
    return cache


RING_BY_HAND = [
    # token, its cell and position, rotations due before, tokens seen with their positions
    (4, 4, 4, {}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}),
    (5, 5, 5, {}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
    (6, 2, 6, {}, {0: 0, 1: 1, 3: 3, 4: 4, 5: 5, 6: 6}),
    (7, 3, 7, {}, {0: 0, 1: 1, 4: 4, 5: 5, 6: 6, 7: 7}),
    # Position 8 is one too many: tokens 5 to 8 are renumbered 2 to 5, behind the sinks.
    (8, 4, 5, {5: -3, 6: -3, 7: -3}, {0: 0, 1: 1, 5: 2, 6: 3, 7: 4, 8: 5}),
    (9, 5, 6, {}, {0: 0, 1: 1, 6: 3, 7: 4, 8: 5, 9: 6}),
    (10, 2, 7, {}, {0: 0, 1: 1, 7: 4, 8: 5, 9: 6, 10: 7}),
    (11, 3, 5, {8: -3, 9: -3, 10: -3}, {0: 0, 1: 1, 8: 2, 9: 3, 10: 4, 11: 5}),
    (12, 4, 6, {}, {0: 0, 1: 1, 9: 3, 10: 4, 11: 5, 12: 6}),
]


def test_a_ring_by_hand_through_two_renumberings():
    cache = ring()
    cache.allocate([Chunk(0, 0, 4)])
    cell_of = {token: token for token in range(4)}
    for token, cell, position, rotated, seen in RING_BY_HAND:
        (batch,) = cache.allocate([Chunk(0, token, 1)], views=True)
        shift = batch.places[0].shift
        owed = dict(zip(shift.cells.tolist(), shift.deltas.tolist(), strict=True))
        assert owed == {cell_of[t]: delta for t, delta in rotated.items()}
        cell_of[token] = cell
        assert batch.cells.tolist() == [cell]
        (view,) = batch.views
        assert view.cells.tolist() == [cell_of[t] for t in seen]
        assert view.positions.tolist() == list(seen.values())
        assert view.positions[-1] == position


def test_a_prompt_longer_than_the_window_goes_through_it_in_pieces():
    """Micro-batches of four, the window less its sinks; the last token is number 10."""
    cache = ring(max_tokens=64)
    batches = cache.allocate([Chunk(0, 0, 11)], views=True)
    assert cells_of(batches) == [[0, 1, 2, 3], [4, 5, 2, 3], [4, 5, 2]]
    assert batches[-1].views[0].positions.tolist() == [0, 1, 7, 8, 9, 10]
    assert batches[-1].views[0].cells.tolist() == [0, 1, 3, 4, 5, 2]
    assert cache.usage().stored == 6


def test_what_was_overwritten_cannot_be_gone_back_to():
    cache = ring()
    cache.allocate([Chunk(0, 0, 6)])
    cache.free(0, 4)
    cache.allocate([Chunk(0, 4, 3)])
    with pytest.raises(Unsupported, match="the oldest tokens are overwritten"):
        cache.free(0, 5)
    cache.free(0)
    assert cache.usage().allocated == 0
