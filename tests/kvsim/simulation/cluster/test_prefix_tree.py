"""The tree of prompts against a plain list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsim.simulation.cluster.routers.prefix_tree import PrefixTree
from policies.content import Content, TextSegment

SERVERS = 3

# Few sources and places, so that texts often begin alike, and cut at different places.
segments = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 4))
texts = st.lists(segments, max_size=4)
sent = st.lists(st.tuples(texts, st.integers(0, SERVERS - 1)), max_size=20)


def tokens(text: list[TextSegment]) -> list[tuple[int, int]]:
    return [(source, start + i) for source, start, n in text for i in range(n)]


def shared(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def filled(history: list[tuple[list[TextSegment], int]]) -> PrefixTree:
    tree = PrefixTree(SERVERS)
    for text, server in history:
        tree.insert(tree.find(text), server)
    return tree


def check(tree: PrefixTree) -> None:
    """Raise ``AssertionError`` unless the tree is consistent with itself."""
    sizes = [0] * SERVERS
    for node in tree._below():
        assert node.parent is not None
        assert node.parent.children[node.begin()] is node
        assert node.size == sum(n for _, _, n in node.text) > 0
        assert node.used.keys() <= node.parent.used.keys()
        assert node.used
        for server in node.used:
            sizes[server] += node.size
    assert sizes == tree.sizes


@given(sent, texts)
def test_as_much_of_a_text_is_found_as_each_server_has_had(history, text):
    tree = filled(history)
    check(tree)
    found = tree.find(text)
    longest = [
        max((shared(tokens(text), tokens(past)) for past, to in history if to == server), default=0)
        for server in range(SERVERS)
    ]
    assert tree.matches(found) == longest
    assert found.matched == max(longest)


@given(sent, texts)
def test_a_match_is_of_a_server_that_has_had_all_of_it(history, text):
    tree = filled(history)
    found = tree.find(text)
    assert tree.matches(found)[tree.owner(found)] == found.matched


@given(sent)
def test_a_server_s_size_is_that_of_its_distinct_beginnings(history):
    tree = filled(history)
    for server in range(SERVERS):
        beginnings = {tuple(tokens(past)[:n]) for past, to in history if to == server for n in range(1, 99)}
        assert tree.sizes[server] == len({b for b in beginnings if b})


@given(sent, st.integers(0, 12), st.booleans())
def test_eviction_keeps_the_limit_and_a_tree(history, most, together):
    tree = filled(history)
    before = list(tree.sizes)
    tree.evict(most, together=together)
    check(tree)
    if together:
        assert sum(tree.sizes) <= most
        assert sum(before) > most or tree.sizes == before
    else:
        assert all(size <= most for size in tree.sizes)
        assert all(now == then for now, then in zip(tree.sizes, before, strict=True) if then <= most)


def test_what_was_used_longest_ago_is_forgotten_first():
    tree = filled([([(1, 0, 5)], 0), ([(2, 0, 5)], 0), ([(3, 0, 5)], 1)])
    tree.insert(tree.find([(1, 0, 5)]), 0)
    tree.evict(5)
    assert [tree.find([(source, 0, 5)]).matched for source in (1, 2, 3)] == [5, 0, 5]


def test_a_beginning_is_forgotten_at_once_when_nothing_follows_it():
    """As in the real trees, where only the node in which an insertion ends gets a time."""
    history = [([(1, 0, 4), (source, 0, 4)], 0) for source in (2, 3)]
    tree = filled([*history, ([(9, 0, 4)], 0)])
    tree.evict(8)
    assert tree.find([(1, 0, 4)]).matched == 4  # The leaves went until the limit held: 16, 12, 8.
    assert tree.find([(9, 0, 4)]).matched == 4
    tree.evict(4)
    assert tree.find([(1, 0, 4)]).matched == 0


@given(texts, texts)
def test_a_text_is_found_however_it_is_cut(text, rest):
    whole = [*text, *rest]
    tree = filled([(list(Content(whole)), 1)])
    assert tree.find(whole).matched == len(tokens(whole))
