"""Blocks of which single tokens are evicted: what is free, what is a hole, and what compaction copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.block_table import blocks_for
from policies.paging.token_blocks import TokenBlocks

SIZE = 4


def filled(tokens, *, refill=False, blocks=12):
    """A pool in which sequence 0 has its first tokens in blocks 1, 2, ..."""
    pool = TokenBlocks(blocks, SIZE, refill=refill)
    add(pool, 0, tokens)
    return pool


def add(pool, start, n, seq=0):
    own = pool.of(seq)
    pool.reserve(own, n)
    pool.write(own, start, n)
    return own.cells[-n:]


def test_a_block_is_free_when_its_last_token_has_gone():
    pool = filled(12)
    pool.evict(pool.held[0], [4, 5, 6])
    assert pool.held[0].blocks == [1, 2, 3]
    pool.evict(pool.held[0], [4])
    assert pool.held[0].blocks == [1, 3]
    assert 2 in pool.pool.free.order()
    assert pool.usage(44).stored == 8


def test_new_tokens_go_behind_the_last_one_and_holes_stay():
    pool = filled(10)
    pool.evict(pool.held[0], [1, 2])
    assert add(pool, 10, 4) == [14, 15, 16, 17]
    assert pool.held[0].cells_read() == 14
    assert pool.fragmentation(pool.held[0]) == pytest.approx(2 / 14)


def test_holes_are_refilled_in_the_fullest_block_first():
    pool = filled(12, refill=True)
    pool.evict(pool.held[0], [0, 1, 2, 7])
    assert add(pool, 12, 1) == [11]
    assert add(pool, 13, 3) == [4, 5, 6]
    assert pool.held[0].blocks == [1, 2, 3]
    assert pool.held[0].cells_read() == 12
    assert add(pool, 16, 1) == [16]


def test_compaction_moves_the_fewest_cells_into_the_holes_of_the_fullest_blocks():
    pool = filled(12)
    pool.evict(pool.held[0], [1, 2, 3, 6])  # Left: one token in block 1, three in block 2, four in block 3.
    moves = pool.compact(pool.held[0])
    assert (moves.src.tolist(), moves.dst.tolist(), moves.length.tolist()) == ([4], [10], [1])
    assert pool.held[0].blocks == [3, 2]
    assert pool.held[0].positions == [0, 4, 5, 7, 8, 9, 10, 11]
    assert pool.held[0].cells == [10, 8, 9, 11, 12, 13, 14, 15]
    assert pool.fragmentation(pool.held[0]) == 0
    assert add(pool, 12, 1) == [4]


def test_no_cell_moves_where_no_block_would_be_freed():
    pool = filled(12)
    pool.evict(pool.held[0], [1, 5, 9])
    assert pool.compact(pool.held[0]).n_runs == 0


def test_compaction_leaves_the_room_that_was_reserved():
    pool = filled(12)
    pool.evict(pool.held[0], [1, 2, 3, 6])
    pool.reserve(pool.held[0], 5)
    pool.compact(pool.held[0])
    assert len(pool.held[0].blocks) == blocks_for(8 + 5, SIZE)
    pool.write(pool.held[0], 12, 5)
    assert len(pool.held[0].cells) == 13


def test_a_truncated_sequence_goes_on_in_its_last_block():
    pool = filled(10)
    pool.truncate(pool.held[0], 6)
    assert pool.held[0].blocks == [1, 2]
    assert add(pool, 6, 3) == [10, 11, 12]


@pytest.mark.slow
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 2**9 - 1)), max_size=20))
@settings(deadline=None)
def test_every_block_is_free_or_has_one_owner_and_counts_its_tokens(refill, rounds):
    """``rounds``: each a sequence, tokens to write, and bits that say which of its tokens go; then it is compacted."""
    pool, ends, cells = TokenBlocks(40, SIZE, refill=refill), [0, 0, 0], {}
    for seq, n, bits in rounds:
        for at, cell in zip(range(ends[seq], ends[seq] + n), add(pool, ends[seq], n, seq), strict=True):
            assert cell not in cells
            cells[cell] = (seq, at)
        ends[seq] += n
        own = pool.held[seq]
        gone = [i for i in range(len(own.cells) - 1) if bits >> (i % 9) & 1]
        for at in gone:
            del cells[own.cells[at]]
        pool.evict(own, gone)
        if bits % 3 == 0:
            before = len(own.blocks)
            moves = pool.compact(own)
            assert before - len(own.blocks) == max(before - blocks_for(len(own.cells), SIZE), 0)
            for src, dst, length in zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True):
                for i in range(length):
                    assert dst + i not in cells
                    cells[dst + i] = cells.pop(src + i)
        held = {(s, p): c for s, h in pool.held.items() for p, c in zip(h.positions, h.cells, strict=True)}
        assert held == {token: cell for cell, token in cells.items()}
        blocks = [block for h in pool.held.values() for block in h.blocks]
        assert sorted([*blocks, *pool.pool.free.order()]) == list(range(1, 40))
        assert all(cell // SIZE in pool.held[s].blocks for cell, (s, _) in cells.items())
        assert pool.stored == len(cells)
        assert own.blocks_read() == len({cell // SIZE for cell, (s, _) in cells.items() if s == seq})
        assert pool.top == max(cells, default=-1) + 1
        assert len(own.cells) <= own.cells_read() <= len(own.blocks) * SIZE
