"""Block tables, the prefix cache, windows and the host tier: stories with the numbers of their blocks.

Blocks have 4 cells: block b is cells 4b to 4b + 3.
"""

from functools import partial

import numpy as np
import pytest

from policies import NOTHING, CacheConfig, Chunk, Content, NoSlot, SequencePlan, Transfer, Unsupported
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks
from policies.paging.host_tier import TransferLog

ENDLESS = 400
SAME = Content([(0, 0, ENDLESS)])
OTHER = Content([(1, 0, ENDLESS)])
OUT, BACK = True, False
"""Which way a transfer goes."""


def cache(blocks, *, prefix_cache=True, window=None, tail_only=False, eviction="lru", order="0.33.0", **config):
    """A cache of that many blocks besides block 0."""
    config = CacheConfig(**{"n_ubatch": 64, "max_tokens": ENDLESS} | config, cells=4 * (blocks + 1), block_size=4)
    return PagedPolicy(
        "mine",
        config,
        block_size=4,
        free=partial(free_blocks, eviction, order=order),
        prefix_cache=prefix_cache,
        window=window,
        tail_only=tail_only,
    )


def says(source, n, *more):
    """So many tokens of a text, then other pieces."""
    return Content([(source, 0, n), *more])


def tell(policy, seq, content):
    """A sequence opens, whose prompt is all that it says."""
    policy.open(seq, SequencePlan(content.n, ENDLESS, content.n, content))


def run(policy, *chunks):
    """The micro-batches of a step."""
    return policy.allocate([Chunk(*chunk) for chunk in chunks], views=True)


def begin(policy, seq, content, n=None):
    """A sequence starts as in a scheduler and runs its prompt (``n`` tokens); tokens found in the cache."""
    n = content.n if n is None else n
    hit = policy.match(seq, content, n)
    tell(policy, seq, content)
    assert policy.reserve(Chunk(seq, hit, n - hit))
    run(policy, (seq, hit, n - hit))
    return hit


def table(policy, seq):
    return policy.tables[seq].blocks


def order(policy):
    return policy.pool.free.order()


def refs(policy):
    return list(policy.pool.refs)


def runs(moves):
    return list(zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True))


def moves_of(batches):
    assert all(batch.places[0].moves.n_runs == 0 for batch in batches[1:])
    return runs(batches[0].places[0].moves)


def transfers_of(batches):
    assert all(batch.places[0].transfers == () for batch in batches[1:])
    return batches[0].places[0].transfers


def counted(policy):
    """Cells with a token as ``usage`` has it, and as they lie there."""
    return policy.usage().stored, sum(1 for owners in policy.occupancy().owners if owners)


class Engine:
    """Cells and host cells, which hold 100 * sequence + position of the token that was written."""

    def __init__(self, policy):
        self.policy = policy
        self.cells, self.host = (np.full(n, -1) for n in (policy.groups[0].cells, policy.groups[0].host_cells))

    def run(self, *chunks):
        """Run a step; what the last sequence sees in the end."""
        for batch in run(self.policy, *chunks):
            [place] = batch.places
            self.transfer(place.transfers)
            place.moves.apply(self.cells)
            ends = np.cumsum([chunk.n for chunk in batch.chunks])[:-1]
            for chunk, own in zip(batch.chunks, np.split(place.cells, ends), strict=True):
                self.cells[own] = 100 * chunk.seq + np.arange(chunk.start, chunk.start + chunk.n)
        return self.cells[place.views[-1].cells].tolist()

    def transfer(self, transfers):
        for to_host, cell, host, n in transfers:
            if to_host:
                self.host[host : host + n] = self.cells[cell : cell + n]
            else:
                self.cells[cell : cell + n] = self.host[host : host + n]


# Tables


def test_tables_take_blocks_from_the_front_of_the_queue_as_they_need_them():
    policy = cache(6)
    batches = run(policy, (0, 0, 5), (1, 0, 2))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [3])
    assert batches[0].cells.tolist() == [4, 5, 6, 7, 8, 12, 13]
    assert run(policy, (0, 5, 3))[0].cells.tolist() == [9, 10, 11]
    assert table(policy, 0) == [1, 2]
    [batch] = run(policy, (0, 8, 1), (1, 2, 1))
    assert batch.cells.tolist() == [16, 14]
    assert [view.cells.tolist() for view in batch.views] == [[4, 5, 6, 7, 8, 9, 10, 11, 16], [12, 13, 14]]
    assert order(policy) == [5, 6]
    assert policy.sequences() == [0, 1]


def test_a_step_longer_than_a_micro_batch_is_cut_but_finds_room_as_a_whole():
    policy = cache(3, n_ubatch=5)
    batches = run(policy, (0, 0, 12))
    assert [batch.cells.tolist() for batch in batches] == [[4, 5, 6, 7, 8], [9, 10, 11, 12, 13], [14, 15]]
    policy.free(0)
    with pytest.raises(NoSlot):
        run(policy, (0, 0, 13))
    assert policy.sequences() == []


def test_no_room_changes_nothing_and_says_how_much_was_missing():
    policy = cache(3)
    run(policy, (0, 0, 6))
    with pytest.raises(NoSlot, match="the step needs 2 blocks of 4 cells, 1 are free") as caught:
        run(policy, (0, 6, 3), (1, 0, 1))
    assert caught.value.done == ()
    assert (table(policy, 0), order(policy), policy.sequences()) == ([1, 2], [3], [0])
    run(policy, (0, 6, 3))
    assert table(policy, 0) == [1, 2, 3]


def test_a_sequence_gives_its_blocks_back_last_first():
    policy = cache(4, prefix_cache=False)
    run(policy, (0, 0, 12))
    policy.free(0, 5)
    assert (table(policy, 0), order(policy), counted(policy)) == ([1, 2], [3, 4], (5, 5))
    policy.free(0)
    assert order(policy) == [2, 1, 3, 4]
    older = cache(4, order="0.22.1")
    run(older, (0, 0, 12))
    older.free(0)
    assert order(older) == [4, 3, 2, 1]


def test_only_a_tail_can_go():
    policy = cache(4)
    run(policy, (0, 0, 10))
    with pytest.raises(Unsupported, match=r"mine: a block table gives up its tail only, not \[2, 5\) of 10"):
        policy.free(0, 2, 5)
    policy.free(0, 10)
    policy.free(0, 4, 4)
    policy.free(9)
    assert table(policy, 0) == [1, 2, 3]
    policy.free(0, 6, 99)
    assert (table(policy, 0), policy.can_truncate(0, 6), policy.can_truncate(0, 7), policy.can_truncate(9, 3)) == (
        [1, 2],
        6,
        6,
        0,
    )
    policy.free(0, 0, 6)
    assert policy.sequences() == []


def test_a_sequence_holds_no_gap():
    policy = cache(4)
    with pytest.raises(ValueError, match="mine: sequence 0 holds no token before position 1"):
        run(policy, (0, 1, 1))
    run(policy, (0, 0, 4))
    with pytest.raises(ValueError, match="mine: sequence 0 holds no token before position 5"):
        run(policy, (0, 5, 1))


def test_a_chunk_is_for_one_sequence():
    policy = cache(4)
    with pytest.raises(Unsupported, match="mine: a chunk for several sequences at once; copy the sequence instead"):
        policy.allocate([Chunk(0, 0, 4, (1,))])


@pytest.mark.parametrize(
    ("cells", "null_block", "message"),
    [
        (7, True, "7 cells make 1 blocks of 4, and block 0 is never handed out"),
        (3, False, "3 cells make 0 blocks of 4"),
    ],
)
def test_a_cache_without_a_block_to_hand_out_is_refused(cells, null_block, message):
    config = CacheConfig(cells=cells)
    with pytest.raises(ValueError, match=f"^{message}$"):
        PagedPolicy("mine", config, block_size=4, free=partial(free_blocks, "lru"), null_block=null_block)


def test_requests_that_even_an_empty_cache_could_not_hold_are_refused():
    policy = cache(3)
    assert policy.refusal(SequencePlan(5, ENDLESS, 12)) is None
    assert policy.refusal(SequencePlan(5, ENDLESS, 13)) == (
        "the request needs 4 blocks of 4 cells (5 prompt tokens, 13 in all), the cache has 3"
    )
    unbounded = cache(5, window=8, n_ubatch=4)
    assert unbounded.refusal(SequencePlan(5, ENDLESS, 300)) is None
    assert cache(3, window=8, n_ubatch=4).refusal(SequencePlan(5, ENDLESS, 300)) == (
        "the request needs 4 blocks of 4 cells (5 prompt tokens, 300 in all), the cache has 3"
    )


def test_usage_counts_blocks_and_what_is_in_them():
    policy = cache(6)
    begin(policy, 0, says(0, 6))
    begin(policy, 1, says(1, 5))
    policy.free(0)
    usage = policy.usage()
    assert (usage.capacity, usage.stored, usage.allocated, usage.placeable) == (24, 5, 8, 16)
    assert (usage.free_extents, usage.largest_free_extent, usage.span, usage.cached) == (2, 8, 17, 4)
    policy.free(1)
    assert policy.usage().cached == 8
    assert policy.usage().span == 0


# Prefixes


def test_whoever_begins_alike_shares_full_blocks():
    policy = cache(8)
    assert begin(policy, 0, says(0, 8, (1, 0, 3))) == 0
    assert begin(policy, 1, says(0, 8, (2, 0, 2))) == 8
    assert (table(policy, 0), table(policy, 1)) == ([1, 2, 3], [1, 2, 4])
    assert refs(policy) == [0, 2, 2, 1, 1, 0, 0, 0, 0]
    assert begin(policy, 2, says(0, 6, (1, 0, 6))) == 4
    assert table(policy, 2) == [1, 5, 6]
    assert policy.occupancy().owners[4] == {0, 1, 2}


def test_what_has_ended_is_found_until_its_blocks_are_handed_out():
    policy = cache(4)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    assert order(policy) == [3, 4, 2, 1]
    assert policy.match(1, SAME, 20) == 8
    assert policy.found(1) == [1, 2]
    run(policy, (2, 0, 9))
    assert (table(policy, 2), order(policy)) == ([3, 4, 2], [1])
    assert policy.match(1, SAME, 20) == 4
    policy.free(2)
    assert order(policy) == [2, 4, 3, 1]
    assert begin(policy, 1, SAME, 6) == 4
    assert table(policy, 1) == [1, 2]


def test_the_last_token_is_always_computed_and_the_copy_found_only_when_the_first_is_gone():
    policy = cache(4)
    begin(policy, 0, says(0, 8))
    assert policy.match(1, SAME, 8) == 4
    assert policy.match(1, SAME, 9) == 8
    assert begin(policy, 1, says(0, 8)) == 4
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [1, 3])
    assert policy.match(2, SAME, 9) == 8
    assert policy.found(2) == [1, 2]
    policy.free(0)
    assert order(policy) == [4, 2]
    run(policy, (3, 0, 8))
    assert policy.match(2, SAME, 9) == 8
    assert policy.found(2) == [1, 3]


def test_answers_count_too_and_only_full_blocks_do():
    policy = cache(8)
    tell(policy, 0, says(0, 3, (7, 0, 9)))
    run(policy, (0, 0, 3))
    longer = says(0, 3, (7, 0, 9), (1, 0, 9))
    assert policy.match(1, longer, 20) == 0
    run(policy, (0, 3, 1))
    assert policy.match(1, longer, 20) == 4
    run(policy, (0, 4, 7))
    assert policy.match(1, longer, 20) == 8
    run(policy, (0, 11, 1))
    assert policy.match(1, longer, 20) == 12


def test_what_a_sequence_says_may_be_told_bit_by_bit():
    """Blocks that were full before it was known what they hold get their key with the next step."""
    policy = cache(8)
    content = says(0, 3)
    tell(policy, 0, content)
    run(policy, (0, 0, 7))
    assert policy.match(1, SAME, 20) == 0
    content.extend((0, 3, 5))
    assert policy.match(1, SAME, 20) == 0
    run(policy, (0, 7, 1))
    assert policy.match(1, SAME, 20) == 8


def test_who_says_nothing_is_never_found():
    policy = cache(4)
    tell(policy, 0, NOTHING)
    run(policy, (0, 0, 8), (1, 0, 8))
    assert policy.match(2, NOTHING, 8) == 0
    assert policy.pool.n_cached == 0


def test_without_a_prefix_cache_nothing_is_found():
    policy = cache(4, prefix_cache=False)
    begin(policy, 0, says(0, 8))
    assert begin(policy, 1, says(0, 8)) == 0
    assert (table(policy, 0), table(policy, 1), policy.pool.n_cached) == ([1, 2], [3, 4], 0)


def test_a_block_is_found_from_the_moment_it_is_scheduled():
    policy = cache(6)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 9))
    assert policy.match(1, SAME, 10) == 8
    tell(policy, 1, says(0, 10))
    assert policy.reserve(Chunk(1, 8, 2))
    [batch] = run(policy, (0, 0, 9), (1, 8, 2))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2, 3], [1, 2, 4])
    assert batch.views[1].cells.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17]


def test_a_block_that_was_scheduled_but_never_written_is_not_found():
    """It goes back as a plain one, in front of those that were written."""
    policy = cache(6)
    tell(policy, 0, says(0, 20))
    run(policy, (0, 0, 6))
    assert policy.reserve(Chunk(0, 6, 7))
    assert policy.match(1, SAME, 20) == 12
    policy.free(0)
    assert policy.match(1, SAME, 20) == 4
    assert order(policy) == [4, 3, 2, 5, 6, 1]
    assert counted(policy) == (0, 0)


def test_room_that_was_set_aside_is_there_whatever_else_is_asked():
    policy = cache(3)
    assert policy.reserve(Chunk(0, 0, 5))
    assert not policy.reserve(Chunk(1, 0, 5))
    with pytest.raises(NoSlot, match="the step needs 2 blocks of 4 cells, 1 are free"):
        run(policy, (0, 0, 5), (1, 0, 5))
    assert run(policy, (0, 0, 5), (1, 0, 1))[0].cells.tolist() == [4, 5, 6, 7, 8, 12]


def test_room_may_be_asked_for_twice():
    """Others have found the block in between. It is still what it will be, and nobody needs a copy."""
    policy = cache(6)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 4))
    assert policy.match(1, SAME, 6) == 4
    tell(policy, 1, says(0, 6))
    assert policy.reserve(Chunk(1, 4, 2))
    assert policy.reserve(Chunk(0, 0, 4))
    assert moves_of(run(policy, (0, 0, 4), (1, 4, 2))) == []
    assert (table(policy, 0), table(policy, 1), policy.match(2, SAME, 6)) == ([1], [1, 2], 4)


def test_drafts_get_room_but_no_key():
    policy = cache(5)
    tell(policy, 0, says(0, 20))
    assert policy.reserve(Chunk(0, 0, 6), lookahead=7)
    assert table(policy, 0) == [1, 2, 3, 4]
    run(policy, (0, 0, 6))
    assert policy.match(1, SAME, 20) == 4
    assert policy.reserve(Chunk(0, 6, 3), lookahead=1)
    assert table(policy, 0) == [1, 2, 3, 4]
    assert policy.match(1, SAME, 20) == 8
    short = cache(5, max_tokens=10)
    assert short.reserve(Chunk(0, 0, 6), lookahead=50)
    assert table(short, 0) == [1, 2, 3]


def test_what_was_found_for_a_sequence_is_found_once():
    """Its blocks are its own from ``reserve`` to ``free``; then it holds nothing again."""
    policy = cache(8)
    begin(policy, 0, says(0, 9))
    assert begin(policy, 1, says(0, 9)) == 8
    policy.free(1)
    with pytest.raises(ValueError, match="sequence 1 holds no token before position 8"):
        run(policy, (1, 8, 1))


# Room


def test_whoever_waits_leaves_the_watermark_free():
    """10 % of 21 blocks are 2."""
    policy = cache(20, watermark=0.1)
    run(policy, (0, 0, 60))
    assert len(order(policy)) == 5
    assert not policy.reserve(Chunk(1, 0, 13), waits=True)
    assert policy.reserve(Chunk(1, 0, 12), waits=True)
    policy.free(1)
    assert policy.reserve(Chunk(1, 0, 20))
    assert len(order(policy)) == 0


def test_the_whole_sequence_must_fit_though_only_a_chunk_is_placed():
    policy = cache(5, watermark=0.2)
    assert not policy.reserve(Chunk(0, 0, 4), whole=21)
    assert not policy.reserve(Chunk(0, 0, 4), whole=17, waits=True)
    assert order(policy) == [1, 2, 3, 4, 5]
    assert policy.reserve(Chunk(0, 0, 4), whole=16, waits=True)
    assert table(policy, 0) == [1]
    assert policy.reserve(Chunk(1, 0, 4), whole=16)


def test_what_was_found_counts_as_room_only_if_others_hold_it():
    """Three blocks are found; what leaves the free ones are those that nobody holds."""
    policy = cache(6)
    begin(policy, 0, says(0, 13))
    assert policy.match(1, SAME, 20) == 12
    tell(policy, 1, says(0, 20))
    assert policy.reserve(Chunk(1, 12, 8), whole=20)
    policy.free(1)
    policy.free(0)
    assert order(policy) == [4, 6, 5, 3, 2, 1]
    assert policy.match(1, SAME, 28) == 12
    tell(policy, 1, says(0, 28))
    assert not policy.reserve(Chunk(1, 12, 13))
    assert not policy.reserve(Chunk(1, 12, 4), whole=25)
    assert policy.match(1, SAME, 28) == 12
    assert policy.reserve(Chunk(1, 12, 12), whole=24)
    assert (table(policy, 1), order(policy)) == ([1, 2, 3, 4, 6, 5], [])


# Copies


def test_whoever_writes_first_into_a_shared_block_gets_a_copy_of_it():
    policy = cache(8)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    assert (table(policy, 1), refs(policy)[:4]) == ([1, 2], [0, 2, 2, 0])
    batches = run(policy, (1, 6, 1))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [1, 3])
    assert moves_of(batches) == [(8, 12, 2)]
    assert batches[0].cells.tolist() == [14]
    assert moves_of(run(policy, (0, 6, 1), (1, 7, 1))) == []
    assert (refs(policy)[:4], counted(policy)) == ([0, 2, 1, 1], (11, 11))


def test_the_one_that_was_copied_may_be_the_first_to_write():
    policy = cache(8)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    batches = run(policy, (0, 6, 3))
    assert (table(policy, 0), table(policy, 1)) == ([1, 3, 4], [1, 2])
    assert moves_of(batches) == [(8, 12, 2)]
    assert moves_of(run(policy, (1, 6, 1))) == []
    assert (table(policy, 1), counted(policy)) == ([1, 2], (12, 12))


def test_of_several_the_last_to_write_keeps_the_block():
    policy = cache(8)
    run(policy, (0, 0, 7))
    for seq in (1, 2, 3):
        policy.copy(0, seq)
    assert refs(policy)[2] == 4
    batches = run(policy, (2, 7, 1), (0, 7, 2), (3, 7, 1))
    assert moves_of(batches) == [(8, 12, 3), (8, 16, 3), (8, 24, 3)]
    assert [table(policy, seq) for seq in range(4)] == [[1, 4, 5], [1, 2], [1, 3], [1, 6]]
    assert moves_of(run(policy, (1, 7, 1))) == []
    assert table(policy, 1) == [1, 2]


def test_three_who_share_a_block_need_two_more():
    policy = cache(3)
    run(policy, (0, 0, 3))
    policy.copy(0, 1)
    policy.copy(0, 2)
    batches = run(policy, (0, 3, 1), (1, 3, 1), (2, 3, 1))
    assert moves_of(batches) == [(4, 8, 3), (4, 12, 3)]
    assert [table(policy, seq) for seq in range(3)] == [[2], [3], [1]]
    assert batches[0].cells.tolist() == [11, 15, 7]
    tight = cache(2)
    run(tight, (0, 0, 3))
    tight.copy(0, 1)
    tight.copy(0, 2)
    with pytest.raises(NoSlot, match="needs 2 blocks of 4 cells, 1 are free"):
        run(tight, (0, 3, 1), (1, 3, 1), (2, 3, 1))
    assert moves_of(run(tight, (0, 3, 1))) == [(4, 8, 3)]


def test_a_part_can_be_copied_and_the_full_blocks_of_both_stay_apart():
    """Sequence 1 sees 6 of 8 tokens. What it says from there on is not what block 2 was cached as."""
    policy = cache(8)
    begin(policy, 0, says(0, 8))
    policy.copy(0, 1, 0, 6)
    assert counted(policy) == (8, 8)
    tell(policy, 1, says(0, 6, (5, 0, 6)))
    batches = run(policy, (1, 6, 2))
    assert moves_of(batches) == [(8, 12, 2)]
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [1, 3])
    assert policy.match(2, SAME, 9) == 8
    assert policy.found(2) == [1, 2]
    assert policy.match(2, says(0, 6, (5, 0, 6)), 9) == 8
    assert policy.found(2) == [1, 3]


def test_a_full_block_is_shared_for_good():
    policy = cache(4)
    run(policy, (0, 0, 4))
    policy.copy(0, 1)
    assert moves_of(run(policy, (0, 4, 1), (1, 4, 1))) == []
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [1, 3])


def test_what_can_be_copied():
    policy = cache(4)
    run(policy, (0, 0, 6), (1, 0, 1))
    with pytest.raises(Unsupported, match="mine: only the beginning of a sequence can be shared, with one that holds"):
        policy.copy(0, 2, 2)
    with pytest.raises(Unsupported, match="with one that holds nothing"):
        policy.copy(0, 1)
    policy.copy(0, 0)
    policy.copy(7, 2)
    policy.copy(0, 2, 0, 0)
    assert policy.sequences() == [0, 1]


def test_what_is_owed_comes_with_the_first_micro_batch_only():
    policy = cache(8, n_ubatch=2, host_cells=32, prefix_cache=False)
    run(policy, (0, 0, 6), (2, 0, 4))
    policy.copy(0, 1)
    assert policy.swap_out(2) is not None
    batches = run(policy, (1, 6, 5))
    assert len(batches) == 3
    assert moves_of(batches) == [(8, 12, 2)]
    assert transfers_of(batches) == (Transfer(OUT, 12, 0, 4),)
    assert moves_of(run(policy, (1, 11, 1))) == []


def test_a_copy_that_was_promised_is_not_made_once_its_owner_has_gone():
    policy = cache(4)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    assert table(policy, 1) == [1, 3]
    policy.free(1)
    assert moves_of(run(policy, (0, 6, 1))) == []


# Truncation


def test_what_was_cut_off_is_found_as_long_as_it_is_not_overwritten():
    """Block 2 still holds the old text, until another one is written into it."""
    policy = cache(4)
    begin(policy, 0, says(0, 8))
    policy.free(0, 6)
    assert policy.match(1, SAME, 9) == 8
    run(policy, (0, 6, 2))
    assert (table(policy, 0), refs(policy)) == ([1, 2], [0, 1, 1, 0, 0])
    assert policy.match(1, SAME, 9) == 4


def test_other_text_behind_a_cut_is_found_as_what_it_is():
    policy = cache(8)
    begin(policy, 0, says(0, 12))
    policy.free(0, 6)
    new = says(0, 6, (5, 0, 7))
    tell(policy, 0, new)
    run(policy, (0, 6, 6))
    assert policy.match(1, new, 20) == 12
    assert policy.found(1) == table(policy, 0)
    assert policy.match(1, SAME, 20) == 4


def test_without_being_told_it_is_not_known_what_stands_behind_a_cut():
    policy = cache(8)
    begin(policy, 0, says(0, 12))
    policy.free(0, 4)
    run(policy, (0, 4, 8))
    assert policy.match(1, SAME, 20) == 12
    assert policy.found(1) == [1, 2, 3]
    assert table(policy, 0) == [1, 4, 5]
    assert policy.pool.keys[4] is None


def test_a_block_that_others_hold_is_copied_before_other_text_is_written():
    policy = cache(8)
    begin(policy, 0, says(0, 9))
    begin(policy, 1, says(0, 9))
    assert table(policy, 1) == [1, 2, 4]
    policy.free(1, 6)
    assert moves_of(run(policy, (1, 6, 2))) == [(8, 16, 2)]
    assert (table(policy, 1), policy.match(2, SAME, 9), policy.found(2)) == ([1, 4], 8, [1, 2])


# Windows


def test_blocks_that_the_window_has_left_are_given_up_last_first():
    """A window of 6: the token at position 13 sees 8 to 13."""
    policy = cache(6, window=6, prefix_cache=False)
    run(policy, (0, 0, 13))
    assert table(policy, 0) == [1, 2, 3, 4]
    batches = run(policy, (0, 13, 1))
    assert (table(policy, 0), order(policy)) == ([0, 0, 3, 4], [2, 1, 5, 6])
    assert batches[0].views[0].positions.tolist() == [8, 9, 10, 11, 12, 13]
    assert batches[0].views[0].cells.tolist() == [12, 13, 14, 15, 16, 17]
    assert policy.occupancy().position.tolist()[4:12] == [-1] * 8
    assert counted(policy) == (6, 6)
    run(policy, (0, 14, 4))
    assert (table(policy, 0), order(policy)) == ([0, 0, 3, 4, 2], [1, 5, 6])
    policy.free(0)
    assert order(policy) == [2, 4, 3, 1, 5, 6]


def test_a_window_gives_blocks_up_even_if_there_is_no_room_then():
    policy = cache(4, window=6)
    run(policy, (0, 0, 12), (1, 0, 4))
    with pytest.raises(NoSlot, match="the step needs 3 blocks of 4 cells, 1 are free"):
        run(policy, (0, 12, 1), (1, 4, 8))
    assert (table(policy, 0), order(policy)) == ([0, 2, 3], [1])
    assert policy.reserve(Chunk(0, 12, 1))
    assert table(policy, 0) == [0, 2, 3, 1]


def test_what_is_in_flight_still_sees_its_window():
    policy = cache(6, window=6, prefix_cache=False)
    run(policy, (0, 0, 13))
    assert policy.reserve(Chunk(0, 13, 1), in_flight=1)
    assert table(policy, 0) == [0, 2, 3, 4]


def test_a_window_is_found_without_what_comes_before_it():
    """A window of 6 needs two blocks in a row; the last such are taken, and null blocks stand before them."""
    policy = cache(8, window=6)
    begin(policy, 0, says(0, 17))
    assert table(policy, 0) == [1, 2, 3, 4, 5]
    policy.pool.forget(1)
    assert policy.match(1, SAME, 14) == 12
    assert policy.found(1) == [0, 2, 3]
    assert policy.match(1, SAME, 99) == 16
    assert policy.found(1) == [0, 0, 3, 4]
    assert begin(policy, 1, SAME, 18) == 16
    assert (table(policy, 1), refs(policy)) == ([0, 0, 3, 4, 6], [0, 1, 1, 2, 2, 1, 1, 0, 0])
    assert policy.occupancy().owners[12] == {0, 1}
    policy.pool.forget(3)
    assert policy.match(2, SAME, 99) == 0


def test_without_a_whole_window_only_the_beginning_counts():
    policy = cache(8, window=10)
    begin(policy, 0, says(0, 17))
    policy.pool.forget(3)
    assert policy.match(1, SAME, 99) == 8
    assert policy.found(1) == [1, 2]
    policy.pool.forget(1)
    assert policy.match(1, SAME, 99) == 0


def test_a_sequence_that_has_moved_on_gives_up_its_tail_up_to_there():
    policy = cache(8, window=6)
    run(policy, (0, 0, 16))
    assert policy.can_truncate(0, 14) == 14
    run(policy, (0, 16, 1))
    assert (table(policy, 0), order(policy)) == ([0, 0, 3, 4, 2], [1, 5, 6, 7, 8])
    assert policy.can_truncate(0, 14) == 0
    with pytest.raises(Unsupported, match="mine: what comes before position 8 has been given up"):
        policy.free(0, 8)
    with pytest.raises(Unsupported, match="mine: the window has moved past position 8"):
        policy.copy(0, 1, 0, 8)
    policy.copy(0, 1, 0, 15)
    assert (table(policy, 1), refs(policy)) == ([0, 0, 3, 4], [0, 0, 1, 2, 2, 0, 0, 0, 0])
    policy.free(0, 9)
    assert (table(policy, 0), policy.occupancy().owners[12]) == ([0, 0, 3], {0, 1})


def test_of_what_is_told_late_only_what_is_still_held_can_be_found():
    policy = cache(8, window=6)
    content = Content()
    tell(policy, 0, content)
    run(policy, (0, 0, 16))
    content.extend((0, 0, 20))
    run(policy, (0, 16, 1))
    assert table(policy, 0) == [0, 0, 3, 4, 2]
    assert [block for block, key in enumerate(policy.pool.keys) if key is not None] == [3, 4]
    assert policy.match(1, SAME, 17) == 16


def test_with_tails_only_just_the_last_window_of_a_prompt_is_found():
    """A prompt of 18 tokens and a window of 6: its last full blocks, 2 and 3 from 0, are kept; of the answer none."""
    policy = cache(8, window=6, tail_only=True)
    policy.open(0, SequencePlan(18, ENDLESS, 24, SAME))
    run(policy, (0, 0, 18))
    assert [block for block, key in enumerate(policy.pool.keys) if key is not None] == [3, 4]
    run(policy, (0, 18, 6))
    assert policy.pool.n_cached == 2
    assert policy.match(1, SAME, 18) == 16
    assert policy.match(1, SAME, 16) == 0
    assert policy.match(1, SAME, 40) == 16
    ends_with_a_block = cache(8, window=6, tail_only=True)
    ends_with_a_block.open(0, SequencePlan(16, ENDLESS, 24, SAME))
    run(ends_with_a_block, (0, 0, 16))
    assert [block for block, key in enumerate(ends_with_a_block.pool.keys) if key is not None] == [2, 3]


# The host tier


def test_a_sequence_goes_to_the_host_tier_and_comes_back_under_another_number():
    policy = cache(4, host_cells=16, prefix_cache=False)
    run(policy, (0, 0, 10))
    ticket = policy.swap_out(0)
    assert ticket is not None
    assert (policy.sequences(), order(policy)) == ([], [3, 2, 1, 4])
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 12),)
    assert policy.settle_transfers() == ()
    run(policy, (5, 0, 2))
    assert policy.swap_in(3, ticket) == 10
    assert (table(policy, 3), order(policy), policy.host.used) == ([2, 1, 4], [], 0)
    assert policy.sequences() == [3, 5]
    [batch] = run(policy, (3, 10, 1))
    assert transfers_of([batch]) == (Transfer(BACK, 8, 0, 4), Transfer(BACK, 4, 4, 4), Transfer(BACK, 16, 8, 4))
    assert batch.cells.tolist() == [18]
    assert batch.views[0].cells.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 16, 17, 18]


def test_what_is_still_there_need_not_come_back():
    """Block 2 was overwritten while the sequence was away, and block 3 was never full."""
    policy = cache(4, host_cells=16)
    begin(policy, 0, says(0, 10))
    ticket = policy.swap_out(0)
    policy.settle_transfers()
    assert order(policy) == [3, 4, 2, 1]
    run(policy, (1, 0, 9))
    assert table(policy, 1) == [3, 4, 2]
    policy.settle_transfers()
    policy.free(1)
    assert policy.swap_in(2, ticket) == 10
    assert table(policy, 2) == [1, 2, 4]
    assert policy.settle_transfers() == (Transfer(BACK, 8, 4, 4), Transfer(BACK, 16, 8, 4))
    assert policy.match(3, SAME, 10) == 8
    assert policy.found(3) == [1, 2]


def test_a_sequence_comes_back_to_find_its_blocks_in_use():
    policy = cache(5, host_cells=16)
    begin(policy, 0, says(0, 10))
    ticket = policy.swap_out(0)
    begin(policy, 1, says(0, 9))
    assert policy.swap_in(0, ticket) == 10
    assert (table(policy, 0)[:2], refs(policy)[:3]) == ([1, 2], [0, 2, 2])
    policy.free(0)
    policy.free(1)
    assert policy.match(2, SAME, 9) == 8
    run(policy, (3, 0, 20))
    assert policy.pool.n_cached == 0


def test_what_waits_for_it_among_the_free_blocks_is_no_room_for_the_rest():
    """Two blocks are still there and both are free, but the third has been taken."""
    policy = cache(3, host_cells=16)
    begin(policy, 0, says(0, 10))
    ticket = policy.swap_out(0)
    run(policy, (1, 0, 1))
    assert order(policy) == [2, 1]
    assert policy.swap_in(0, ticket) is None
    assert order(policy) == [2, 1]
    policy.free(1)
    assert policy.swap_in(0, ticket) == 10
    assert table(policy, 0) == [1, 2, 3]


def test_a_sequence_that_has_given_up_its_beginning_is_not_swapped():
    policy = cache(6, window=6, host_cells=64)
    run(policy, (0, 0, 13), (1, 0, 4))
    run(policy, (0, 13, 1))
    assert policy.swap_out(0) is None
    assert table(policy, 0) == [0, 0, 3, 4]
    ticket = policy.swap_out(1)
    assert policy.swap_in(2, ticket) == 4


def test_a_sequence_stays_away_while_there_is_no_room():
    """It needs 3 blocks, and with others running one of 6 must stay free."""
    policy = cache(5, host_cells=16, prefix_cache=False, watermark=0.2)
    run(policy, (0, 0, 10))
    ticket = policy.swap_out(0)
    run(policy, (1, 0, 12))
    assert policy.swap_in(0, ticket) is None
    policy.free(1, 8)
    assert policy.swap_in(0, ticket, waits=True) is None
    assert policy.sequences() == [1]
    assert policy.swap_in(0, ticket) == 10
    assert order(policy) == []


def test_a_tier_too_small_takes_no_sequence():
    policy = cache(8, host_cells=8, prefix_cache=False)
    run(policy, (0, 0, 9), (1, 0, 5))
    assert policy.swap_out(0) is None
    assert table(policy, 0) == [1, 2, 3]
    assert policy.swap_out(1) is not None
    run(policy, (2, 0, 1))
    assert policy.swap_out(2) is None
    assert policy.host.used == 2


def test_without_a_tier_sequences_stay():
    policy = cache(4)
    run(policy, (0, 0, 4))
    assert policy.swap_out(0) is None
    assert (list(policy.fetch(SAME, 9)), policy.settle_transfers(), policy.sequences()) == ([], (), [0])
    assert policy.groups[0].host_cells == cache(4, host_cells=3).groups[0].host_cells == 0
    assert cache(4, host_cells=11).groups[0].host_cells == 8


def test_a_sequence_that_will_not_come_back_gives_up_its_slots():
    policy = cache(4, host_cells=8, prefix_cache=False)
    run(policy, (0, 0, 8), (1, 0, 8))
    ticket = policy.swap_out(0)
    assert policy.swap_out(1) is None
    policy.forget_swapped(ticket)
    assert policy.host.used == 0
    other = policy.swap_out(1)
    assert other not in (None, ticket)
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 8), Transfer(OUT, 12, 0, 8))


def test_what_is_forgotten_here_is_found_in_the_host_tier():
    policy = cache(3, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    assert order(policy) == [3, 2, 1]
    batches = run(policy, (1, 0, 12))
    assert table(policy, 1) == [3, 2, 1]
    assert transfers_of(batches) == (Transfer(OUT, 8, 0, 4), Transfer(OUT, 4, 4, 4))
    assert policy.match(2, SAME, 9) == 8
    assert policy.found(2) == [~1, ~0]
    policy.free(1)
    assert begin(policy, 2, SAME, 9) == 8
    assert table(policy, 2) == [1, 2, 3]


def test_what_is_brought_back_is_cached_again_and_stays_in_the_host_tier():
    policy = cache(3, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 12))
    policy.free(1)
    assert policy.match(2, SAME, 9) == 8
    tell(policy, 2, says(0, 9))
    assert policy.reserve(Chunk(2, 8, 1))
    [batch] = run(policy, (2, 8, 1))
    assert transfers_of([batch]) == (Transfer(BACK, 4, 4, 4), Transfer(BACK, 8, 0, 4))
    assert policy.match(3, SAME, 9) == 8
    assert policy.found(3) == [1, 2]
    assert policy.host.used == 2
    policy.free(2)
    assert transfers_of(run(policy, (4, 0, 12))) == ()
    assert policy.match(3, SAME, 9) == 8


def test_a_prefix_goes_on_in_the_host_tier_and_comes_back_from_it():
    """Block 2 of three is gone from here, the others are still there."""
    policy = cache(5, host_cells=32)
    begin(policy, 0, says(0, 13))
    policy.free(0)
    policy.pool.forget(2)
    assert policy.match(1, SAME, 13) == 12
    assert policy.found(1) == [1, ~0, 3]
    assert begin(policy, 1, SAME, 13) == 12
    assert table(policy, 1) == [1, 4, 3, 5]
    assert policy.pool.find(SAME.keys(4, 2)[1]) == 4


def test_the_host_tier_forgets_what_was_used_longest_ago():
    """Two slots; the tail of the first text came first and goes first."""
    policy = cache(3, host_cells=8)
    begin(policy, 0, says(0, 12))
    policy.free(0)
    assert order(policy) == [3, 2, 1]
    batches = run(policy, (1, 0, 12))
    assert transfers_of(batches) == (
        Transfer(OUT, 12, 0, 4),
        Transfer(OUT, 8, 4, 4),
        Transfer(OUT, 4, 0, 4),
    )
    keys = SAME.keys(4, 3)
    assert [policy.host.find(key) for key in keys] == [0, 1, None]


def test_what_is_forgotten_here_once_more_counts_as_used_in_the_host_tier():
    """The first text, computed and forgotten again, need not be written there again, and is younger than the second."""
    policy = cache(3, host_cells=8)
    for text in (0, 1, 0):
        tell(policy, 0, says(text, 5))
        run(policy, (0, 0, 5))
        policy.free(0)
        run(policy, (9, 0, 12))
        policy.free(9)
    [slot] = policy.host.hold(1)
    assert slot == 1
    assert policy.match(1, SAME, 5) == 4
    assert policy.match(1, OTHER, 5) == 0


def test_runs_of_blocks_that_lie_side_by_side_on_both_sides_are_one_transfer():
    log = TransferLog(4)
    for block, slot, to_host in [(1, 0, OUT), (2, 1, OUT), (3, 2, BACK), (4, 3, BACK), (5, 5, BACK), (7, 6, BACK)]:
        log.add(block, slot, to_host=to_host)
    log.add(6, 5, to_host=BACK)
    assert len(log) == 5
    assert log.settle() == (
        Transfer(OUT, 4, 0, 8),
        Transfer(BACK, 12, 8, 8),
        Transfer(BACK, 20, 20, 4),
        Transfer(BACK, 28, 24, 4),
        Transfer(BACK, 24, 20, 4),
    )
    assert (len(log), log.settle()) == (0, ())


def test_what_was_brought_back_is_forgotten_after_all_others_and_its_end_first():
    policy = cache(3, host_cells=16)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 12))
    policy.free(1)
    begin(policy, 2, says(5, 9))
    policy.free(2)
    run(policy, (1, 0, 12))
    policy.free(1)
    same, other = SAME.keys(4, 2), says(5, 8).keys(4, 2)
    assert [policy.host.find(key) for key in (*same, *other)] == [1, 0, 3, 2]
    assert begin(policy, 3, SAME, 9) == 8
    policy.free(3)
    gone = [policy.host.hold(1)[0] for _ in range(4)]
    assert gone == [2, 3, 0, 1]


def test_swapped_sequences_have_priority_over_what_was_forgotten():
    policy = cache(5, host_cells=12)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 20))
    policy.free(1, 9)
    assert policy.match(2, SAME, 9) == 8
    assert policy.swap_out(1) is not None
    assert policy.match(2, SAME, 9) == 0
    begin(policy, 2, says(5, 9))
    policy.free(2)
    run(policy, (3, 0, 20))
    assert policy.match(2, says(5, 9), 9) == 0


def test_a_prefix_is_fetched_ahead_of_its_use():
    """Into free blocks, where it waits as any other cached prefix does."""
    policy = cache(4, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 16))
    policy.free(1)
    policy.settle_transfers()
    assert policy.fetch(SAME, 4) == []
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)
    assert policy.settle_transfers() == (Transfer(BACK, 4, 4, 4), Transfer(BACK, 8, 0, 4))
    assert order(policy) == [4, 3, 2, 1]
    assert (policy.sequences(), policy.usage().cached, counted(policy)) == ([], 8, (0, 0))
    assert policy.fetch(SAME, 9) == []
    assert begin(policy, 2, SAME, 9) == 8
    assert transfers_of(run(policy, (2, 9, 1))) == ()


def test_nothing_is_fetched_into_blocks_that_are_not_there():
    """Two blocks in the tier, 10 % of 11 blocks to be left free: with 3 free ones they come, with 2 they do not."""
    policy = cache(10, host_cells=32, watermark=0.1)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 40))
    policy.free(1, 32)
    policy.settle_transfers()
    assert len(order(policy)) == 2
    assert policy.fetch(SAME, 9) == []
    assert policy.settle_transfers() == ()
    policy.free(1, 28)
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)


def test_nothing_is_fetched_into_the_blocks_that_it_would_follow():
    """The first block is here and the only free one; the second, in the host tier, would need another."""
    policy = cache(3, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 8))
    assert (order(policy), policy.pool.find(SAME.keys(4, 1)[0])) == ([1], 1)
    assert policy.fetch(SAME, 9) == []
    policy.free(1, 4)
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)[1:]


# Where several of these come together


@pytest.mark.parametrize("leaves", ["all", "in part", "by its window"])
def test_cells_that_only_the_one_who_left_could_see_are_no_longer_counted(leaves):
    """Sequence 1 sees 6 of 8 tokens."""
    policy = cache(8, window=6 if leaves == "by its window" else None)
    run(policy, (0, 0, 8))
    policy.copy(0, 1, 0, 6)
    assert counted(policy) == (8, 8)
    if leaves == "all":
        policy.free(0)
        assert counted(policy) == (6, 6)
    elif leaves == "in part":
        policy.free(0, 3)
        assert counted(policy) == (6, 6)
    else:
        run(policy, (0, 8, 5))
        run(policy, (0, 13, 1))
        assert counted(policy) == (12, 12)


def test_room_for_drafts_does_not_count_as_tokens():
    policy = cache(8)
    assert policy.reserve(Chunk(0, 0, 6), lookahead=8)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    run(policy, (1, 6, 1))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2, 3, 4], [1, 5])
    assert counted(policy) == (9, 9)


def test_a_block_that_was_never_written_is_not_found_in_the_host_tier_either():
    policy = cache(4, host_cells=32)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 9))
    policy.free(0)
    assert policy.settle_transfers() == ()
    assert policy.match(1, SAME, 9) == 0


def test_a_sequence_is_swapped_out_with_what_it_was_about_to_get_a_copy_of():
    policy = cache(8, host_cells=32, prefix_cache=False)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    ticket = policy.swap_out(1)
    engine.run((0, 6, 1))
    assert policy.swap_in(1, ticket) == 6
    assert engine.run((1, 6, 1)) == [0, 1, 2, 3, 4, 5, 106]


def test_a_block_that_is_to_be_copied_is_not_overwritten_from_the_host_tier():
    """The one it was copied for has gone, but block 2 is held until the copy has been made."""
    policy = cache(4, host_cells=32, prefix_cache=False)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    ticket = policy.swap_out(0)
    engine.run((1, 0, 2))
    policy.copy(1, 2)
    assert policy.reserve(Chunk(2, 2, 1))
    policy.free(1)
    assert order(policy) == [3, 4]
    assert policy.swap_in(0, ticket) == 6
    assert engine.run((0, 6, 1), (2, 2, 1)) == [100, 101, 202]
    assert (table(policy, 0), table(policy, 2), order(policy)) == ([3, 4], [1], [2])


def test_a_copy_of_a_copy_that_was_never_made():
    policy = cache(8)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    policy.copy(1, 2)
    assert policy.reserve(Chunk(2, 6, 1))
    policy.free(1)
    assert engine.run((2, 6, 1)) == [0, 1, 2, 3, 4, 5, 206]


def test_what_was_found_is_not_taken_from_whoever_has_got_it_since():
    policy = cache(3)
    begin(policy, 0, says(0, 5))
    policy.free(0)
    assert policy.match(1, SAME, 5) == 4
    tell(policy, 1, says(0, 5))
    run(policy, (2, 0, 12))
    assert not policy.reserve(Chunk(1, 4, 0))
    assert (table(policy, 1), refs(policy)) == ([], [0, 1, 1, 1])
    policy.free(2)
    assert begin(policy, 1, says(0, 5)) == 0


def test_what_was_found_is_not_taken_by_others_in_the_same_step():
    policy = cache(4)
    begin(policy, 0, says(0, 5))
    begin(policy, 2, says(1, 8))
    policy.free(0)
    policy.free(2)
    assert order(policy) == [2, 1, 4, 3]
    assert policy.match(1, SAME, 5) == 4
    assert policy.found(1) == [1]
    tell(policy, 1, says(0, 5))
    run(policy, (2, 0, 8), (1, 4, 1))
    assert (table(policy, 1), table(policy, 2)) == ([1, 3], [2, 4])


def test_what_two_have_found_is_not_taken_by_either_in_the_same_step():
    """Block 3 is second in the queue, and the first sequence needs three."""
    policy = cache(6)
    for seq, text, n in [(0, 0, 5), (3, 1, 5), (4, 2, 8)]:
        begin(policy, seq, says(text, n))
    for seq in (3, 0, 4):
        policy.free(seq)
    assert order(policy) == [2, 4, 3, 1, 6, 5]
    for seq, text in [(1, 0), (2, 1)]:
        tell(policy, seq, says(text, 16))
        assert policy.match(seq, says(text, 16), 5) == 4
    run(policy, (1, 4, 12), (2, 4, 1))
    assert (table(policy, 1)[0], table(policy, 2)[0]) == (1, 3)
    assert sorted(table(policy, 1) + table(policy, 2)) == [1, 2, 3, 4, 5, 6]


def test_what_was_found_in_the_host_tier_may_be_gone_when_it_is_wanted():
    policy = cache(3, host_cells=4)
    begin(policy, 0, says(0, 5))
    policy.free(0)
    run(policy, (1, 0, 12))
    policy.free(1)
    begin(policy, 2, says(5, 5))
    policy.free(2)
    assert policy.match(3, SAME, 5) == 4
    tell(policy, 3, says(0, 5))
    run(policy, (4, 0, 12))
    policy.free(4)
    assert policy.match(5, says(5, 5), 5) == 4
    assert not policy.reserve(Chunk(3, 4, 1))


def test_in_a_text_of_no_tokens_nothing_is_found():
    policy = cache(4)
    begin(policy, 0, SAME, 8)
    assert policy.match(1, SAME, 9) == 8
    assert policy.match(1, SAME, 0) == 0


def test_an_empty_step_does_not_lose_what_the_engine_is_owed():
    policy = cache(4, host_cells=16)
    run(policy, (0, 0, 4))
    assert policy.swap_out(0) is not None
    assert policy.allocate([]) == ()
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 4),)


def test_a_step_without_a_token_does_not_lose_what_the_engine_is_owed():
    policy = cache(4, host_cells=16)
    run(policy, (0, 0, 4), (1, 0, 4))
    assert policy.swap_out(0) is not None
    assert run(policy, (1, 4, 0)) == ()
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 4),)


def test_a_block_that_was_never_written_is_not_found_because_its_beginning_is_to_be_copied():
    """Sequence 0 is to have a copy of block 2, and so sequence 1 was given room in it, but goes."""
    policy = cache(8)
    tell(policy, 0, says(0, 20))
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    tell(policy, 1, says(0, 20))
    assert policy.reserve(Chunk(0, 6, 1))
    assert policy.reserve(Chunk(1, 6, 2))
    assert (table(policy, 0), table(policy, 1)) == ([1, 3], [1, 2])
    policy.free(1)
    assert moves_of(run(policy, (0, 6, 1))) == [(8, 12, 2)]
    assert policy.match(2, SAME, 9) == 4
    assert order(policy) == [2, 4, 5, 6, 7, 8]


def test_a_sequence_may_say_what_it_will_say_before_it_becomes_a_copy():
    policy = cache(8)
    begin(policy, 0, says(0, 6))
    mine = says(0, 6, (5, 0, 6))
    tell(policy, 1, mine)
    policy.copy(0, 1)
    run(policy, (1, 6, 6))
    assert policy.match(2, mine, 13) == 12
