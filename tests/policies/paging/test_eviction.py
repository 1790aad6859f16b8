"""Orders of free blocks against lists, SIEVE against its publication, and clairvoyance against all others."""

import copy
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import EVICTIONS, Content
from policies.paging.blocks import BlockPool
from policies.paging.eviction import free_blocks
from policies.paging.free_lists.belady import NEVER, Future
from policies.paging.free_lists.uncached import LowestFirst

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=60)
BLOCKS = 4
"""In the pools that are driven at random: 1 to 4."""


# Plain models: lists of blocks, looked through from one end to the other


class PlainLru:
    def __init__(self, pool, plain_first):
        self.pool, self.plain_first = pool, plain_first
        self.queue = list(range(1, BLOCKS + 1))

    def order(self):
        return self.queue

    def taken(self, blocks):
        self.queue = [block for block in self.queue if block not in blocks]

    def released(self, blocks):
        front = [block for block in blocks if self.pool.keys[block] is None and self.plain_first]
        self.queue = front + self.queue + [block for block in blocks if block not in front]

    def touched(self, block, was_free):
        if was_free:
            self.queue.remove(block)

    def stored(self, block):
        pass

    def forgotten(self, block):
        pass


class PlainRanked:
    """Plain ones, the last that came first; then cached ones by rank, the one that came first among equals."""

    def __init__(self, pool, rank):
        self.pool, self.rank = pool, rank
        self.plain, self.cached = list(range(1, BLOCKS + 1)), []
        self.born, self.uses, self.clock = {}, {}, 0

    def order(self):
        ranks = {"fifo": self.born, "lfu": self.uses}[self.rank]
        return self.plain + sorted(self.cached, key=ranks.__getitem__)

    def taken(self, blocks):
        self.plain = [block for block in self.plain if block not in blocks]
        self.cached = [block for block in self.cached if block not in blocks]

    def released(self, blocks):
        for block in blocks:
            if self.pool.keys[block] is None:
                self.plain.insert(0, block)
            else:
                self.cached.append(block)

    def touched(self, block, was_free):
        self.uses[block] += 1
        if was_free:
            self.cached.remove(block)

    def stored(self, block):
        self.clock += 1
        self.born[block], self.uses[block] = self.clock, 1

    def forgotten(self, block):
        if block in self.cached:
            self.cached.remove(block)
            self.plain.insert(0, block)


class PlainSieve:
    """Cached blocks, the oldest first; the hand lies before one of them, or (None) before the oldest.

    Blocks keep their place while they are in use, even where what they hold has been forgotten.
    """

    def __init__(self, pool):
        self.pool = pool
        self.plain, self.line, self.hand = list(range(1, BLOCKS + 1)), [], None
        self.free, self.hit = set(), set()

    def order(self):
        rest = copy.copy(self)
        rest.line, rest.free, rest.hit = list(self.line), set(self.free), set(self.hit)
        return self.plain + [rest.sift() for _ in self.free]

    def sift(self):
        while True:
            block = self.line[0] if self.hand is None else self.hand
            self.hand = self.after(block)
            if block in self.free:
                if block not in self.hit:
                    self.line.remove(block)
                    self.free.remove(block)
                    return block
                self.hit.remove(block)

    def after(self, block):
        at = self.line.index(block) + 1
        return self.line[at] if at < len(self.line) else None

    def leave(self, block):
        if self.hand == block:
            self.hand = self.after(block)
        self.line.remove(block)

    def taken(self, blocks):
        for block in blocks:
            if block in self.plain:
                self.plain.remove(block)
            else:
                assert self.sift() == block

    def released(self, blocks):
        for block in blocks:
            if self.pool.keys[block] is None:
                self.plain.insert(0, block)
            else:
                self.free.add(block)

    def touched(self, block, was_free):
        self.hit.add(block)
        self.free.discard(block)

    def stored(self, block):
        if block in self.line:
            self.leave(block)
        self.line.append(block)
        self.hit.discard(block)

    def forgotten(self, block):
        if block in self.free:
            self.free.remove(block)
            self.leave(block)
            self.plain.insert(0, block)


MODELS = {
    "lru": partial(PlainLru, plain_first=True),
    "lru 0.22.1": partial(PlainLru, plain_first=False),
    "fifo": partial(PlainRanked, rank="fifo"),
    "lfu": partial(PlainRanked, rank="lfu"),
    "sieve": PlainSieve,
}
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "release", "release", "store", "store", "touch", "touch", "forget"]),
        st.integers(0, 11),
        st.integers(1, 3),
    ),
    max_size=30,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@DERANDOMIZED
@given(operations=OPERATIONS)
def test_the_order_is_that_of_a_plain_list_and_blocks_are_handed_out_in_it(name, operations):
    eviction, _, version = name.partition(" ")
    pool = BlockPool(BLOCKS + 1, partial(free_blocks, eviction, order=version or "0.33.0"))
    model = MODELS[name](pool)
    held, names = [], iter(range(100, 200))
    for what, which, n in operations:
        if what == "take":
            n = min(n, len(pool.free))
            expected = pool.free.order()[:n]
            taken = pool.take(n)
            assert taken == expected
            model.taken(taken)
            held += taken
        elif what == "release" and held:
            which %= len(held)
            gone = list(dict.fromkeys(held[which : which + n]))
            for block in gone:
                held.remove(block)
            model.released(pool.release(gone))
        elif what == "store":
            plain = [block for block in held if pool.keys[block] is None]
            if plain:
                block = plain[which % len(plain)]
                pool.store(block, next(names))
                model.stored(block)
        else:
            cached = [block for block, key in enumerate(pool.keys) if key is not None]
            if cached:
                block = cached[which % len(cached)]
                if what == "touch":
                    was_free = pool.refs[block] == 0
                    pool.touch([block])
                    model.touched(block, was_free)
                    held.append(block)
                elif what == "forget":
                    pool.forget(block)
                    model.forgotten(block)
        order = pool.free.order()
        assert order == list(model.order())
        assert len(pool.free) == len(order)
        assert pool.free.order() == order


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 4)), max_size=30))
def test_the_lowest_free_blocks_are_handed_out_first(operations):
    free, held = LowestFirst(range(8)), set()
    for takes, which, n in operations:
        if takes:
            n = min(n, len(free))
            expected = sorted(set(range(8)) - held)[:n]
            assert free.order()[:n] == expected
            assert free.take(n) == expected
            held |= set(expected)
        else:
            gone = sorted(held)[which:][:n][::-1]
            free.release(gone)
            held -= set(gone)
        assert free.order() == sorted(set(range(8)) - held)
        assert len(free) == 8 - len(held)


class Published:
    """SIEVE as its paper gives it (Zhang et al., NSDI 2024, algorithm 1): objects from head to tail, and a hand."""

    def __init__(self, size):
        self.size, self.queue, self.visited, self.hand = size, [], {}, None

    def ask(self, x):
        """Whether it was there, and what was evicted for it."""
        if x in self.queue:
            self.visited[x] = True
            return True, None
        evicted = self.evict() if len(self.queue) == self.size else None
        self.queue.insert(0, x)
        self.visited[x] = False
        return False, evicted

    def evict(self):
        o = self.queue[-1] if self.hand is None else self.hand
        while self.visited[o]:
            self.visited[o] = False
            o = self.before(o) or self.queue[-1]
        self.hand = self.before(o)
        self.queue.remove(o)
        return o

    def before(self, o):
        at = self.queue.index(o)
        return self.queue[at - 1] if at else None


@DERANDOMIZED
@given(size=st.integers(1, 5), asked=st.lists(st.integers(1, 8), max_size=60))
def test_sieve_evicts_what_the_published_algorithm_evicts(size, asked):
    """Where each block is released at once, so that none is in use when another is needed."""
    pool, published = BlockPool(size + 1, partial(free_blocks, "sieve")), Published(size)
    evicted = []
    pool.on_evict = lambda block, key: evicted.append(key)
    for key in asked:
        block = pool.find(key)
        hit, gone = published.ask(key)
        assert (block is not None) == hit
        if block is None:
            [block] = pool.take(1)
            pool.store(block, key)
        else:
            pool.touch([block])
        pool.release([block])
        assert evicted == ([] if gone is None else [gone])
        evicted.clear()


def story(eviction, blocks=3, future=None):
    """A pool whose blocks 1, 2, .. were cached in that order as keys 101, 102, .. and released in it."""
    pool = BlockPool(blocks + 1, partial(free_blocks, eviction, future=future))
    for block in pool.take(blocks):
        pool.store(block, 100 + block)
    pool.release(list(range(1, blocks + 1)))
    return pool


def hit(pool, *blocks):
    for block in blocks:
        pool.touch([block])
        pool.release([block])


# Clairvoyance


def test_a_future_knows_the_next_use():
    future = Future(enumerate([[5, 6], [], [5], [6, 5]]))
    assert [future.next_use(key) for key in (5, 6, 7)] == [0, 0, NEVER]
    future.advance(0)
    assert [future.next_use(key) for key in (5, 6)] == [2, 3]
    future.advance(2)
    future.advance(1)
    assert [future.next_use(key) for key in (5, 6)] == [3, 3]
    future.advance(3)
    assert [future.next_use(key) for key in (5, 6)] == [NEVER, NEVER]


def test_a_request_that_is_later_than_expected_is_still_to_come():
    """A turn of a conversation whose answers took long; numbers are those of the workload, not of the arrivals."""
    future = Future([(0, [5]), (7, [6]), (1, [5, 6])])
    future.advance(0)
    future.advance(1)
    assert [future.next_use(key) for key in (5, 6)] == [NEVER, 1]


def test_belady_forgets_the_block_whose_use_is_farthest_away():
    """Keys 101 to 104: 103 is needed next, then 101 and 104 together, 102 never."""
    future = Future(enumerate([[101, 102, 103, 104], [103], [101, 104]]))
    future.advance(0)
    pool = story("belady", blocks=4, future=future)
    assert pool.free.order() == [2, 1, 4, 3]
    future.advance(1)
    hit(pool, 3)
    assert pool.free.order() == [2, 3, 1, 4]
    assert pool.take(4) == [2, 3, 1, 4]


def test_belady_must_know_the_future():
    with pytest.raises(ValueError, match="eviction 'belady' must know which requests will come; no workload was given"):
        free_blocks("belady", range(1, 3), [None] * 3)


SIZE = 4
TEXTS = ((0, 0), (0, 0), (1, 0))


def request(text, alike, other, n):
    """A prompt of ``n`` tokens: ``alike`` blocks of one text, then another text."""
    source, start = TEXTS[text]
    return Content([(source, start, alike * SIZE), (other, 0, 64)]), n


def requests_of(lengths):
    prompts = st.builds(request, st.integers(0, 2), st.integers(1, 3), st.integers(2, 4), lengths)
    return st.lists(prompts, min_size=2, max_size=14)


ANY_LENGTH = st.integers(1, 15)
NO_FULL_LAST_BLOCK = ANY_LENGTH.filter(lambda n: n % SIZE)
"""The last token of a prompt is always computed. If it ends a full block, that block comes to be cached twice."""


def hits(eviction, blocks, requests, order="0.33.0"):
    """Number of blocks found by requests that are served in sequence."""
    future = Future(enumerate(content.keys(SIZE, (n - 1) // SIZE) for content, n in requests))
    pool = BlockPool(blocks + 1, partial(free_blocks, eviction, order=order, future=future))
    total = 0
    for number, (content, n) in enumerate(requests):
        future.advance(number)
        table = pool.leading(content.keys(SIZE, (n - 1) // SIZE))
        pool.touch(table)
        found = len(table)
        table += pool.take(-(-n // SIZE) - found)
        for block, key in list(zip(table, content.keys(SIZE, n // SIZE), strict=False))[found:]:
            pool.store(block, key)
        pool.release(table[::-1])
        total += found
    return total


@pytest.mark.slow
@settings(DERANDOMIZED, max_examples=125)
@given(blocks=st.integers(4, 7), requests=requests_of(NO_FULL_LAST_BLOCK))
def test_no_order_hits_more_often_than_belady(blocks, requests):
    best = hits("belady", blocks, requests)
    for eviction in EVICTIONS:
        assert hits(eviction, blocks, requests) <= best
    assert hits("lru", blocks, requests, "0.22.1") <= best


def test_belady_hits_more_often_than_all_others_where_they_cannot_know():
    """A loop over one block more than there is room for: by age or by use, each is lost just before it is needed."""
    loop = [(Content([(source, 0, 8)]), 5) for _ in range(6) for source in range(4)]
    found = {eviction: hits(eviction, 4, loop) for eviction in EVICTIONS}
    assert found["lru"] == found["fifo"] == 0
    assert found["belady"] == max(found.values()) == 14


def test_belady_does_not_keep_a_duplicate_that_will_never_be_found():
    """A prompt that ends with a full block computes it again. Of the two blocks the second is of no use."""
    requests = [
        request(0, 2, 3, 9),
        request(0, 1, 2, 4),
        request(0, 1, 2, 4),
        request(0, 2, 2, 10),
        request(0, 2, 2, 8),
    ]
    found = {eviction: hits(eviction, 3, requests) for eviction in EVICTIONS}
    assert found["belady"] == max(found.values())


def test_belady_does_not_foresee_that_a_block_will_be_computed_again_in_any_case():
    """Here it is not optimal. The fourth prompt ends with its only full block, which the last one begins with: an order
    that forgets that block and keeps the one behind it has both by then. Among equals belady keeps the first."""
    requests = [
        request(0, 2, 3, 16),
        request(0, 3, 3, 9),
        request(2, 2, 2, 9),
        request(0, 1, 2, 4),
        request(0, 3, 2, 14),
    ]
    assert (hits("belady", 4, requests), hits("sieve", 4, requests)) == (3, 4)


@pytest.mark.slow
@settings(DERANDOMIZED, max_examples=125)
@given(blocks=st.integers(4, 7), requests=requests_of(ANY_LENGTH), order=st.sampled_from(["0.33.0", "0.22.1"]))
def test_a_larger_lru_cache_never_hits_less_often(blocks, requests, order):
    assert hits("lru", blocks, requests, order) <= hits("lru", blocks + 1, requests, order)


def test_a_larger_fifo_cache_can_hit_less_often():
    """The control: Belady's anomaly, in its textbook order of requests."""
    asked = [(Content([(source, 0, 8)]), 5) for source in (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)]
    assert (hits("fifo", 4, asked), hits("fifo", 5, asked)) == (3, 2)
