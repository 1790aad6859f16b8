"""Workload-aware eviction: cases by hand, and beside a model that computes every chance anew."""

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.blocks import BlockPool
from policies.paging.eviction import free_blocks


def pool_of(blocks, eviction="workload-aware"):
    return BlockPool(blocks, partial(free_blocks, eviction), first=0)


def serve(pool, keys, kind):
    """One request: it finds what is cached of its keys, computes the rest, and is gone; returns the blocks found."""
    found = pool.leading(keys)
    pool.touch(found, kind)
    new = pool.take(len(keys) - len(found))
    for block, key in zip(new, keys[len(found) :], strict=True):
        pool.store(block, key, kind)
    pool.release([*found, *new][::-1])
    return len(found)


@pytest.mark.parametrize(("eviction", "left"), [("workload-aware", 2), ("lru", 0)])
def test_a_kind_that_never_comes_back_is_forgotten_before_an_older_one_that_does(eviction, left):
    pool = pool_of(8, eviction)
    for n in range(5):
        assert serve(pool, [1, 2], kind=1) == (2 if n else 0)
        serve(pool, [100 + n], kind=2)
    for n in range(7):
        serve(pool, [200 + n], kind=2)
    assert len(pool.leading([1, 2])) == left


def test_what_was_evicted_and_is_asked_for_again_counts_as_used_again():
    """Kind 1 always comes back, but only after its blocks have gone; kind 2 never does."""
    pool, hits = pool_of(4), 0
    for n in range(30):
        hits += serve(pool, [n % 2], kind=1)
        serve(pool, [100 + 3 * n], kind=2)
        serve(pool, [101 + 3 * n], kind=2)
        serve(pool, [102 + 3 * n], kind=2)
    assert hits > 20
    assert pool.find(0) is not None
    assert pool.find(1) is not None


@dataclass
class Kind:
    releases: int = 0
    ages: list = field(default_factory=list)


class Model:
    """All free cached blocks in one list, in order of release; kinds, and texts that were evicted."""

    def __init__(self, n):
        self.n, self.plain, self.free, self.now = n, list(range(n)), [], 0
        self.kinds, self.ghosts = {}, {}

    def chance(self, kind, age):
        """The formula of the paper, with a release of average outcome added to those of each kind."""
        ages = [each for seen in self.kinds.values() for each in seen.ages]
        releases = sum(seen.releases for seen in self.kinds.values())
        share = (len(ages) + 1) / (releases + 2)
        mean = max(sum(ages) / len(ages), 1) if ages else self.n
        seen = self.kinds[kind]
        p = (len(seen.ages) + share) / (seen.releases + 1)
        m = (sum(seen.ages) + mean) / (len(seen.ages) + 1)
        return p * (math.exp(-age / m) - math.exp(-(age + self.n) / m))

    def used_again(self, kind, released):
        self.kinds[kind].ages.append(self.now - released)


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(
    n=st.integers(2, 7),
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)), max_size=25),
)
def test_it_evicts_what_a_look_at_every_block_finds_least_likely(n, requests):
    pool, model = pool_of(n), Model(n)
    kind_of = {}
    for text, length, kind in requests:
        keys = [10 * text + i for i in range(min(length, n))]
        found = pool.leading(keys)
        for block in found:
            at = next(at for at, entry in enumerate(model.free) if entry[0] == block)
            _, released = model.free.pop(at)
            model.used_again(kind_of[block], released)
            kind_of[block] = kind
        pool.touch(found, kind)
        new = []
        for key in keys[len(found) :]:
            assert pool.free.order()[: len(model.plain)] == model.plain
            model.now += 1
            if model.plain:
                expected = [model.plain.pop(0)]
            else:
                chances = [model.chance(kind_of[block], model.now - at) for block, at in model.free]
                close = [math.isclose(chance, min(chances), rel_tol=1e-9) for chance in chances]
                expected = [block for (block, _), least in zip(model.free, close, strict=True) if least]
            (block,) = old = [pool.free.order()[0]]
            evicted = pool.keys[block]
            assert pool.take(1) == old
            assert block in expected
            if evicted is not None:
                released = next(at for other, at in model.free if other == block)
                model.free = [entry for entry in model.free if entry[0] != block]
                model.ghosts[evicted] = kind_of[block], released
            if key in model.ghosts:
                model.used_again(*model.ghosts.pop(key))
            pool.store(block, key, kind)
            kind_of[block] = kind
            new.append(block)
        for block in [*found, *new][::-1]:
            model.free.append((block, model.now))
            model.kinds.setdefault(kind, Kind()).releases += 1
        pool.release([*found, *new][::-1])
        assert len(pool.free) == n


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=30))
def test_with_one_kind_it_is_lru(requests):
    pools = pool_of(6), pool_of(6, "lru")
    for text, length in requests:
        one, other = (serve(pool, [10 * text + i for i in range(length)], kind=3) for pool in pools)
        assert one == other
    assert pools[0].free.order() == pools[1].free.order()


def test_the_order_is_that_in_which_blocks_are_handed_out():
    pool = pool_of(12)
    for n in range(9):
        serve(pool, [n % 5, 10 + n], kind=1 + n % 3)
    order = pool.free.order()
    assert pool.take(12) == order
