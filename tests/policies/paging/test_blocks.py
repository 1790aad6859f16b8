"""The pool of blocks against a simple model; in which order it hands blocks out is tested in ``test_eviction.py``."""

from functools import partial
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.blocks import BlockPool
from policies.paging.eviction import EVICTIONS, free_blocks
from policies.paging.free_lists.belady import Future

A, B = 11, 12
"""Keys."""


class Evicted(list):
    """Blocks and their keys, in the order in which they were evicted."""

    def __call__(self, block, key):
        self.append((block, key))


def pool_of(blocks, eviction="lru"):
    """A pool with that many blocks besides block 0, which writes down what it evicts."""
    pool = BlockPool(blocks + 1, partial(free_blocks, eviction, future=Future([])))
    pool.on_evict = Evicted()
    return pool


def test_without_a_null_block_the_first_is_block_0():
    pool = BlockPool(3, partial(free_blocks, "lru"), first=0)
    assert pool.take(3) == [0, 1, 2]


def test_evictions_are_reported_while_the_block_can_still_be_found():
    pool = pool_of(1)
    pool.store(pool.take(1)[0], A)
    pool.release([1])
    found = []
    pool.on_evict = lambda block, key: found.append((block, pool.find(key)))
    pool.take(1)
    assert found == [(1, 1)]


def test_a_reset_leaves_the_queue_as_it_is():
    pool = pool_of(4)
    for block in pool.take(3):
        pool.store(block, 10 + block)
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


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(eviction=st.sampled_from(EVICTIONS), operations=OPERATIONS)
def test_counts_are_those_of_a_simple_model(eviction, operations):
    """Holders as a list with repetitions; what is cached as a list of (block, key), oldest first."""
    pool, holders, cached = pool_of(5, eviction=eviction), [], []
    for what, which in operations:
        block, key, gone = 1 + which % 5, (A, B)[which % 2], None
        if what == "take" and len(set(holders)) < 5:
            [block] = pool.take(1)
            assert block not in holders
            holders.append(block)
            gone = block
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
            gone = block
        elif what == "reset":
            assert pool.forget_all() == (not holders)
            cached = cached if holders else []
        assert pool.on_evict == [pair for pair in cached if pair[0] == gone]
        cached = [pair for pair in cached if pair[0] != gone]
        pool.on_evict.clear()
        assert list(pool.refs) == [holders.count(b) for b in range(6)]
        assert sorted(pool.free.order()) == sorted(set(range(1, 6)) - set(holders))
        assert pool.keys == [dict(cached).get(b) for b in range(6)]
        found = [next((b for b, named in cached if named == k), None) for k in (A, B)]
        assert [pool.find(k) for k in (A, B)] == found
        assert pool.leading([A, B]) == list(takewhile(lambda b: b is not None, found))
        assert pool.n_cached == len({k for _, k in cached})
        assert pool.n_free_cached == sum(1 for b, _ in cached if b not in holders)
