"""Orders of admission by prefixes: what comes first, and that served one by one no prefix is computed twice."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.queues import DepthFirstQueue, FcfsQueue, LongestPrefixQueue, depth_first
from policies import CacheConfig, Chunk, Content, SequencePlan, available
from policies.content import NOTHING
from tests.kvsim.simulation.stories import each, says, tell
from tests.worlds import scenario


def texts_of(*segments):
    return [Content(each) for each in segments]


def server(order, cells=400, **keys):
    """One slot over a radix tree, so that requests start one after another."""
    return scenario(
        server__scheduler="vllm",
        server__order=order,
        cache__cells=cells,
        **{
            "cache__policy": "radix-tree",
            "server__slots": 1,
            "server__n_batch": 400,
            "server__slot_context": 80,
            **keys,
        },
    )


def order_of(story):
    """The numbers of all requests, by when they started."""
    return sorted(story.jobs, key=lambda number: story.jobs[number].started_s)


# The order of a tree


def test_goes_down_the_branch_with_most_requests_first():
    texts = texts_of([(9, 0, 4)], [(1, 0, 8), (5, 0, 2)], [(1, 0, 8), (2, 0, 3)], [(1, 0, 8), (2, 0, 3), (7, 0, 1)])
    assert depth_first(texts, NOTHING) == [2, 3, 1, 0]


def test_branches_of_equal_size_come_in_order_of_arrival():
    texts = texts_of([(5, 0, 4)], [(1, 0, 9)], [(5, 0, 2), (6, 0, 1)], [(1, 0, 6), (2, 0, 2)])
    assert depth_first(texts, NOTHING) == [0, 2, 1, 3]


def test_finishes_the_branch_that_it_is_in():
    texts = texts_of([(1, 0, 4), (2, 0, 1)], [(1, 0, 4), (3, 0, 1)], [(8, 0, 4), (2, 0, 1)])
    assert depth_first(texts, Content([(8, 0, 4), (9, 0, 1)])) == [2, 0, 1]


TREES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 2), st.integers(0, 8)), min_size=1, max_size=25
)


def branching(rows):
    """Texts with one or two levels of shared beginnings, each with an end of its own, so that none is cached whole."""
    return [
        Content([(root, 0, n), (10 + 3 * root + branch, 0, 5 * m), (100 + number, 0, 3)])
        for number, (root, n, branch, m) in enumerate(rows)
    ]


@given(TREES, TREES)
@settings(max_examples=30, deadline=None)
def test_the_rest_of_an_order_is_the_order_of_the_rest(rows, others):
    texts, latest = branching(rows), branching(others)[0]
    order = depth_first(texts, latest)
    assert sorted(order) == list(range(len(texts)))
    for at, first in enumerate(order[:-1]):
        left = sorted(order[at + 1 :])
        assert [left[i] for i in depth_first([texts[i] for i in left], texts[first])] == order[at + 1 :]


# Theorem 3.1


def job(number, content):
    request = says(number, 0.0, *content)
    return Job(request, 0.0)


def served_one_by_one(texts, queue_of):
    """Prompt tokens computed when all wait from the beginning, in a cache that just holds the longest."""
    policy = available()["radix-tree"](CacheConfig(max(text.n for text in texts) + 1, sequences=1, max_tokens=200))
    queue, computed = queue_of(policy), 0
    for number, text in enumerate(texts):
        queue.add(job(number, text))
    while queue:
        queue.arrange()
        first = queue.first()
        queue.remove(first)
        found = policy.match(0, first.content, first.tokens)
        policy.open(0, SequencePlan(first.tokens, 200, first.tokens, first.content))
        step = [Chunk(0, found, first.tokens - found)]
        assert policy.reserve(*step)
        policy.allocate(step)
        policy.free(0)
        computed += step[0].n
    return computed


def edges(texts):
    """Tokens of the radix tree of all texts: each must be computed once."""
    return len({tuple(map(tuple, text.tokens()[: n + 1].tolist())) for text in texts for n in range(text.n)})


@pytest.mark.slow
@given(TREES)
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("queue_of", [lambda policy: LongestPrefixQueue(policy, 0), lambda policy: DepthFirstQueue()])
def test_one_by_one_each_token_of_the_tree_is_computed_once(queue_of, rows):
    texts = branching(rows)
    assert served_one_by_one(texts, queue_of) == edges(texts)


def test_in_order_of_arrival_they_would_be_computed_again_and_again():
    texts = [Content([(number % 2, 0, 40), (10 + number, 0, 2)]) for number in range(10)]
    assert served_one_by_one(texts, lambda policy: FcfsQueue()) == 10 * 42
    assert served_one_by_one(texts, lambda policy: LongestPrefixQueue(policy, 0)) == edges(texts) == 2 * 40 + 10 * 2


# Under vLLM's scheduler


def test_the_longest_cached_prefix_comes_first():
    requests = [says(0, 0.0, (1, 0, 50)), says(1, 0.1, (2, 0, 20)), says(2, 0.2, (1, 0, 10), (3, 0, 9))]
    requests.append(says(3, 0.3, (1, 0, 40), (4, 0, 9)))
    assert order_of(tell(server("longest-prefix"), requests)) == [0, 3, 2, 1]
    assert order_of(tell(server("fcfs"), requests)) == [0, 1, 2, 3]
    assert order_of(tell(server("longest-prefix", cache__policy="chunked"), requests)) == [0, 1, 2, 3]


def test_where_too_many_wait_they_are_served_as_they_came():
    requests = [says(0, 0.0, (1, 0, 50)), says(1, 0.1, (2, 0, 20)), says(2, 0.2, (1, 0, 40), (4, 0, 9))]
    assert order_of(tell(server("longest-prefix", server__longest_prefix_limit=2), requests)) == [0, 2, 1]
    assert order_of(tell(server("longest-prefix", server__longest_prefix_limit=1), requests)) == [0, 1, 2]


def test_of_those_that_begin_alike_one_goes_ahead_and_the_others_go_to_the_end():
    """While two slots are free the second starts beside it, and the third finds what the first has computed."""
    alike = [says(number, 0.5, (1, 0, 40), (2 + number, 0, 5), output=3) for number in (1, 2)]
    story = tell(
        server("longest-prefix", server__slots=2, server__n_batch=90),
        [says(0, 0.0, (9, 0, 9), output=1), *alike, says(3, 0.5, (20, 0, 40), output=3)],
    )
    assert order_of(story) == [0, 1, 3, 2]
    assert each(story, "cached") == [0, 0, 40, 0]
    short = [says(number, 0.5, (1, 0, 31), (2 + number, 0, 5), output=3) for number in (1, 2)]
    story = tell(
        server("longest-prefix", server__slots=2, server__n_batch=90),
        [says(0, 0.0, (9, 0, 9), output=1), *short, says(3, 0.5, (20, 0, 40), output=3)],
    )
    assert order_of(story) == [0, 1, 2, 3], "31 tokens are not enough"


def test_depth_first_finishes_a_branch_before_the_next():
    numbers = count()
    requests = [says(next(numbers), 0.0, (kind, 0, 30), (10 + at, 0, 5)) for at, kind in enumerate((1, 2, 1, 2, 2))]
    assert order_of(tell(server("depth-first"), requests)) == [1, 3, 4, 0, 2]


@pytest.mark.parametrize("order", ["longest-prefix", "depth-first"])
def test_a_preempted_request_goes_on_and_all_are_served(order):
    requests = [says(number, 0.0, (1, 0, 10), (2 + number, 0, 8), output=20) for number in range(6)]
    story = tell(server(order, 90, server__slots=4), requests)
    assert story.recorder.counts.preemptions > 0
    assert each(story, "status") == ["completed"] * 6


def test_a_preempted_request_is_ordered_like_all_others():
    policy = available()["radix-tree"](CacheConfig(200, sequences=2, max_tokens=100))
    back, fresh, cached = job(0, Content([(1, 0, 9)])), job(1, Content([(2, 0, 9)])), job(2, Content([(3, 0, 9)]))
    policy.open(0, SequencePlan(9, 9, 9, cached.content))
    policy.allocate([Chunk(0, 0, 9)])
    queue = LongestPrefixQueue(policy, 128)
    queue.add(fresh)
    queue.add(cached)
    queue.put_back(back)
    queue.arrange()
    assert list(queue) == [cached, back, fresh], "among equals it comes before those that have not started"
    queue.remove(back)
    assert list(queue) == [cached, fresh]
    assert len(queue) == 2
