"""The pool of blocks: stories with the numbers of blocks, and counts against a simple model."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.blocks import NULL, BlockPool
from policies.paging.eviction import EVICTIONS, free_blocks
from policies.paging.free_lists.belady import Future

OLD, NEW = "0.22.1", "0.33.0"
A, B, C, D = 11, 12, 13, 14
"""Keys."""


class Evicted(list):
    """Blocks and their keys, in the order in which they were evicted."""

    def __call__(self, block, key):
        self.append((block, key))


def pool_of(blocks, order=NEW, eviction="lru"):
    """A pool with that many blocks besides block 0, which writes down what it evicts."""
    pool = BlockPool(blocks + 1, partial(free_blocks, eviction, order=order, future=Future([])))
    pool.on_evict = Evicted()
    return pool


def store(pool, *pairs):
    for block, key in pairs:
        pool.store(block, key)


def refs(pool):
    return list(pool.refs)


def test_blocks_are_handed_out_from_the_first_on_and_block_0_never():
    pool = pool_of(4)
    assert pool.free.order() == [1, 2, 3, 4]
    assert pool.take(2) == [1, 2]
    assert pool.take(2) == [3, 4]
    assert refs(pool) == [0, 1, 1, 1, 1]
    assert (len(pool.free), pool.find(A), NULL) == (0, None, 0)


def test_without_a_null_block_the_first_is_block_0():
    pool = BlockPool(3, partial(free_blocks, "lru"), first=0)
    assert pool.take(3) == [0, 1, 2]


def test_plain_blocks_come_back_to_the_front_in_their_order_and_cached_ones_to_the_back():
    pool = pool_of(6)
    pool.take(4)
    store(pool, (1, A), (3, B))
    assert pool.release([4, 3, 2, 1]) == [4, 3, 2, 1]
    assert pool.free.order() == [4, 2, 5, 6, 3, 1]
    assert pool.n_free_cached == 2


def test_in_the_older_order_all_come_back_to_the_back():
    pool = pool_of(6, OLD)
    pool.take(4)
    store(pool, (1, A), (3, B))
    pool.release([4, 3, 2, 1])
    assert pool.free.order() == [5, 6, 4, 3, 2, 1]


def test_a_chain_released_from_its_end_loses_its_end_first():
    pool = pool_of(3)
    store(pool, *zip(pool.take(3), (A, B, C), strict=True))
    pool.release([3, 2, 1])
    assert pool.leading([A, B, C]) == [1, 2, 3]
    assert pool.take(1) == [3]
    assert pool.on_evict == [(3, C)]
    assert pool.leading([A, B, C]) == [1, 2]
    assert pool.take(1) == [2]
    assert pool.leading([A, B, C]) == [1]


def test_a_prefix_ends_at_the_first_missing_block():
    pool = pool_of(3)
    store(pool, *zip(pool.take(3), (A, B, D), strict=True))
    assert pool.leading([A, B, C, D]) == [1, 2]
    assert pool.leading([C, D]) == []
    assert pool.find(D) == 3


def test_a_hit_takes_a_free_block_out_of_the_middle_and_moves_no_other():
    pool = pool_of(4)
    store(pool, *zip(pool.take(3), (A, B, C), strict=True))
    pool.release([3, 2, 1])
    assert pool.free.order() == [4, 3, 2, 1]
    pool.touch([2])
    assert pool.free.order() == [4, 3, 1]
    assert (refs(pool), pool.n_free_cached) == ([0, 0, 1, 0, 0], 2)
    pool.touch([2])
    assert refs(pool) == [0, 0, 2, 0, 0]
    assert pool.release([2]) == []
    assert pool.free.order() == [4, 3, 1]
    assert pool.release([2]) == [2]
    assert pool.free.order() == [4, 3, 1, 2]


def test_the_first_of_several_blocks_cached_under_one_key_is_found():
    pool = pool_of(3)
    pool.take(3)
    store(pool, (2, A), (1, A), (3, A))
    assert (pool.find(A), pool.leading([A]), pool.n_cached) == (2, [2], 1)
    pool.forget(2)
    assert (pool.find(A), pool.n_cached) == (1, 1)
    store(pool, (2, A))
    assert pool.find(A) == 1
    pool.forget(3)
    pool.forget(1)
    assert (pool.find(A), pool.n_cached) == (2, 1)
    pool.forget(2)
    assert (pool.find(A), pool.n_cached) == (None, 0)
    assert pool.on_evict == [(2, A), (3, A), (1, A), (2, A)]


def test_a_block_that_is_handed_out_is_no_longer_found():
    pool = pool_of(2)
    store(pool, *zip(pool.take(2), (A, B), strict=True))
    pool.release([2, 1])
    assert pool.take(2) == [2, 1]
    assert pool.on_evict == [(2, B), (1, A)]
    assert (pool.find(A), pool.find(B), pool.n_cached, pool.n_free_cached) == (None, None, 0, 0)
    assert pool.release([1, 2]) == [1, 2]
    assert pool.free.order() == [1, 2]
    assert pool.take(2) == [1, 2]
    assert len(pool.on_evict) == 2


def test_evictions_are_reported_while_the_block_can_still_be_found():
    pool = pool_of(1)
    store(pool, (pool.take(1)[0], A))
    pool.release([1])
    found = []
    pool.on_evict = lambda block, key: found.append((block, pool.find(key)))
    pool.take(1)
    assert found == [(1, 1)]


def test_a_shared_block_is_free_when_its_last_reference_is_dropped():
    pool = pool_of(2)
    pool.take(2)
    pool.share([1, 1, 2])
    assert refs(pool) == [0, 3, 2]
    assert pool.release([1, 2]) == []
    assert pool.release([1, 2]) == [2]
    assert pool.release([1]) == [1]
    assert pool.free.order() == [1, 2]


@pytest.mark.parametrize("order", [NEW, OLD])
def test_a_free_block_that_is_uncached_keeps_its_place(order):
    """In the queue of vLLM, which only a release reorders."""
    pool = pool_of(4, order)
    store(pool, *zip(pool.take(3), (A, B, C), strict=True))
    pool.release([3, 2, 1])
    pool.forget(2)
    assert pool.free.order() == [4, 3, 2, 1]
    assert (pool.n_free_cached, pool.n_cached, pool.on_evict) == (2, 2, [(2, B)])
    pool.forget(2)
    pool.forget(4)
    assert pool.on_evict == [(2, B)]
    assert pool.take(4) == [4, 3, 2, 1]
    assert pool.on_evict == [(2, B), (3, C), (1, A)]


def test_a_block_in_use_that_is_uncached_comes_back_as_a_plain_one():
    pool = pool_of(3)
    store(pool, *zip(pool.take(2), (A, B), strict=True))
    pool.forget(1)
    assert (pool.find(A), pool.n_free_cached, pool.on_evict) == (None, 0, [(1, A)])
    pool.release([2, 1])
    assert pool.free.order() == [1, 3, 2]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_reset_waits_until_nothing_is_in_use(eviction):
    pool = pool_of(3, eviction=eviction)
    store(pool, *zip(pool.take(3), (A, B, A), strict=True))
    pool.release([3, 2])
    assert not pool.forget_all()
    assert (pool.find(A), pool.find(B), pool.n_cached, pool.n_free_cached) == (1, 2, 2, 2)
    pool.release([1])
    assert pool.forget_all()
    assert (pool.find(A), pool.find(B), pool.n_cached, pool.n_free_cached) == (None, None, 0, 0)
    assert pool.keys == [None] * 4
    assert sorted(pool.free.order()) == [1, 2, 3]
    taken = pool.take(3)
    assert (sorted(taken), pool.on_evict) == ([1, 2, 3], [])
    store(pool, *zip(taken, (C, D, B), strict=True))
    assert pool.leading([C, D, B, A]) == taken


def test_a_reset_leaves_the_queue_as_it_is():
    pool = pool_of(4)
    store(pool, *zip(pool.take(3), (A, B, C), strict=True))
    pool.release([3, 1, 2])
    assert pool.forget_all()
    assert pool.free.order() == [4, 3, 1, 2]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "store", "store", "release", "release", "touch", "share", "forget", "reset"]),
        st.integers(0, 9),
    ),
    max_size=30,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(eviction=st.sampled_from(EVICTIONS), operations=OPERATIONS)
def test_counts_are_those_of_a_simple_model(eviction, operations):
    """Holders as a list with repetitions; what is cached as a list of (block, key), oldest first."""
    pool, holders, cached = pool_of(5, eviction=eviction), [], []
    for what, which in operations:
        block, key = 1 + which % 5, (A, B)[which % 2]
        if what == "take" and len(set(holders)) < 5:
            [block] = pool.take(1)
            assert block not in holders
            holders.append(block)
            gone = [(b, k) for b, k in cached if b == block]
            assert pool.on_evict == gone
            cached = [pair for pair in cached if pair not in gone]
        elif what == "store" and block in holders and block not in dict(cached):
            pool.store(block, key)
            cached.append((block, key))
        elif what == "release" and block in holders:
            holders.remove(block)
            assert pool.release([block]) == ([] if block in holders else [block])
        elif what == "touch" and block in dict(cached):
            pool.touch([block])
            holders.append(block)
        elif what == "share" and block in holders:
            pool.share([block])
            holders.append(block)
        elif what == "forget":
            pool.forget(block)
            cached = [pair for pair in cached if pair[0] != block]
        elif what == "reset":
            assert pool.forget_all() == (not holders)
            cached = cached if holders else []
        pool.on_evict.clear()
        assert refs(pool) == [holders.count(b) for b in range(6)]
        assert sorted(pool.free.order()) == sorted(set(range(1, 6)) - set(holders))
        assert pool.keys == [dict(cached).get(b) for b in range(6)]
        for k in (A, B):
            assert pool.find(k) == next((b for b, named in cached if named == k), None)
        assert pool.n_cached == len({k for _, k in cached})
        assert pool.n_free_cached == sum(1 for b, _ in cached if b not in holders)
