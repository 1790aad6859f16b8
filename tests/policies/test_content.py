"""Contents against plain lists of tokens, each named by its text and its place there."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import NOTHING, Content

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=150)
PIECES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 2, 4]), st.integers(0, 7)), max_size=5)
"""Few texts and few places to start from, so that many contents begin alike."""
SIZES = st.integers(1, 5)


def tokens(pieces):
    return [(source, start + i) for source, start, n in pieces for i in range(n)]


def prefixes(text, size):
    """Of each full block all tokens up to its end."""
    return [tuple(text[:end]) for end in range(size, len(text) + 1, size)]


def recut(draw, text):
    """The same tokens in pieces that are cut elsewhere, a few of them empty."""
    pieces = []
    for source, at in text:
        if pieces and pieces[-1][0] == source and sum(pieces[-1][1:]) == at and draw(st.booleans()):
            pieces[-1] = (source, pieces[-1][1], pieces[-1][2] + 1)
        else:
            pieces += [(source, at, 0)] * draw(st.integers(0, 1)) + [(source, at, 1)]
    return pieces


@DERANDOMIZED
@given(st.lists(PIECES, min_size=2, max_size=4), SIZES)
def test_two_blocks_have_the_same_key_exactly_when_all_up_to_their_ends_is_the_same(texts, size):
    prefix_of, key_of = {}, {}
    for pieces in texts:
        content, found = Content(pieces), prefixes(tokens(pieces), size)
        keys = content.keys(size, len(found))
        assert len(keys) == len(found)
        for key, prefix in zip(keys, found, strict=True):
            assert prefix_of.setdefault(key, prefix) == prefix
            assert key_of.setdefault(prefix, key) == key


@DERANDOMIZED
@given(st.data(), PIECES, SIZES)
def test_how_a_text_is_cut_into_pieces_does_not_matter(data, pieces, size):
    text = tokens(pieces)
    one, other = Content(pieces), Content(recut(data.draw, text))
    assert one.n == other.n == len(text)
    assert list(one) == list(other)
    assert one.keys(size, 99) == other.keys(size, 99)


def test_pieces_that_follow_one_another_become_one():
    content = Content([(7, 0, 3), (7, 3, 2), (7, 6, 1), (7, 7, 0), (8, 7, 1)])
    assert list(content) == [(7, 0, 5), (7, 6, 1), (8, 7, 1)]
    assert content.n == 7


@DERANDOMIZED
@given(PIECES, st.lists(st.tuples(SIZES, st.integers(0, 8)), max_size=12))
def test_a_content_that_grows_while_it_is_asked_answers_as_one_that_was_whole(pieces, questions):
    """A piece and a question by turns, the block size changing now and then; then all questions once more."""
    growing = Content()
    for at in range(max(len(pieces), len(questions))):
        if at < len(pieces):
            growing.extend(pieces[at])
        if at < len(questions):
            size, n = questions[at]
            assert growing.keys(size, n) == Content(pieces[: at + 1]).keys(size, n)
    for size, n in questions:
        assert growing.keys(size, n) == Content(pieces).keys(size, n)


@DERANDOMIZED
@given(PIECES, SIZES, st.integers(0, 9))
def test_as_many_keys_as_were_asked_for_or_as_there_are_full_blocks(pieces, size, n):
    content = Content(pieces)
    full = content.n // size
    every = list(Content(pieces).keys(size, full))
    assert content.keys(size, n) == every[:n]
    assert len(every) == full
    assert content.keys(size, full + 3) == every


def test_a_block_of_several_pieces_is_told_from_one_of_the_same_tokens_elsewhere():
    """Blocks of 4 across pieces of 3: each differs from its neighbour in one number only."""
    texts = [
        [(0, 0, 3), (1, 0, 3)],
        [(0, 0, 3), (1, 1, 3)],
        [(0, 0, 3), (2, 0, 3)],
        [(0, 1, 3), (1, 0, 3)],
        [(0, 0, 2), (1, 0, 3)],
        [(1, 0, 3), (0, 0, 3)],
        [(0, 0, 4)],
    ]
    keys = [Content(pieces).keys(4, 1)[0] for pieces in texts]
    assert len(set(keys)) == len(keys)


def test_the_same_block_behind_another_beginning_has_another_key():
    one, other = Content([(0, 0, 4), (2, 0, 4)]), Content([(1, 0, 4), (2, 0, 4)])
    assert one.keys(4, 2)[1] != other.keys(4, 2)[1]
    repeated = Content([(0, 0, 4), (0, 0, 4), (0, 0, 4)]).keys(4, 3)
    assert len(set(repeated)) == 3


@DERANDOMIZED
@given(PIECES, st.integers(0, 20), st.integers(0, 20), SIZES)
def test_head_and_without_cut_as_lists_do(pieces, start, n, size):
    content, text = Content(pieces), tokens(pieces)
    head, rest = content.head(start), content.without(start, start + n)
    assert tokens(head) == text[:start]
    assert tokens(rest) == text[:start] + text[start + n :]
    assert (head.n, rest.n) == (len(tokens(head)), len(tokens(rest)))
    assert rest.keys(size, 99) == Content(tokens_as_pieces(tokens(rest))).keys(size, 99)
    assert tokens(content) == text


@DERANDOMIZED
@given(PIECES, st.integers(0, 20))
def test_a_head_goes_its_own_way(pieces, n):
    content = Content(pieces)
    head = content.head(n)
    before = tokens(head)
    content.extend((8, 0, 5))
    head.extend((9, 0, 5))
    assert tokens(head) == before + tokens([(9, 0, 5)])
    assert tokens(content) == tokens(pieces) + tokens([(8, 0, 5)])


@DERANDOMIZED
@given(st.data(), PIECES, PIECES, st.integers(0, 20))
def test_common_prefixes_are_counted_token_by_token(data, one, other, cut):
    """Either any two texts, or two that are the same up to a cut."""
    if data.draw(st.booleans()):
        other = [*Content(one).head(cut), *other]
    mine, theirs = tokens(one), tokens(other)
    alike = accumulate((a == b for a, b in zip(mine, theirs, strict=False)), lambda so_far, same: so_far and same)
    same = sum(alike)
    assert Content(one).common_prefix(Content(other)) == same
    assert Content(other).common_prefix(Content(one)) == same
    assert Content(one).common_prefix(Content(one)) == len(mine)


def test_nothing_is_said_by_nothing():
    assert (NOTHING.n, list(NOTHING), NOTHING.keys(4, 3)) == (0, [], [])
    assert NOTHING.common_prefix(Content([(0, 0, 4)])) == 0
    assert list(NOTHING.head(3)) == list(NOTHING.without(1, 2)) == []


def tokens_as_pieces(text):
    return [(source, at, 1) for source, at in text]
