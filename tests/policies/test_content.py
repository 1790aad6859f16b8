"""Contents against plain lists of tokens, each identified by its text and its place there."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Content

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=75)
SEGMENTS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 2, 4]), st.integers(0, 7)), max_size=5)
"""Few texts and few places to start from, so that many contents begin alike."""
SIZES = st.integers(1, 5)
BEHIND = st.integers(0, 2)
"""Tokens behind a block that its key covers."""


def tokens(segments):
    return [(source, start + i) for source, start, n in segments for i in range(n)]


def prefixes(text, size, behind=0):
    """For each full block, all tokens up to its end, and those behind it that its key covers."""
    return [tuple(text[: end + behind]) for end in range(size, len(text) - behind + 1, size)]


def recut(draw, text):
    """Equal tokens in segments that are cut in other places, a few of them empty."""
    segments = []
    for source, at in text:
        if segments and segments[-1][0] == source and sum(segments[-1][1:]) == at and draw(st.booleans()):
            segments[-1] = (source, segments[-1][1], segments[-1][2] + 1)
        else:
            segments += [(source, at, 0)] * draw(st.integers(0, 1)) + [(source, at, 1)]
    return segments


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(SEGMENTS, min_size=2, max_size=4), SIZES, BEHIND)
def test_two_blocks_have_the_same_key_exactly_if_all_tokens_that_it_covers_are_the_same(texts, size, behind):
    prefix_of, key_of = {}, {}
    for segments in texts:
        content, found = Content(segments), prefixes(tokens(segments), size, behind)
        keys = content.keys(size, len(found) + 1, behind)
        assert len(keys) == len(found)
        for key, prefix in zip(keys, found, strict=True):
            assert prefix_of.setdefault(key, prefix) == prefix
            assert key_of.setdefault(prefix, key) == key


@pytest.mark.slow
@DERANDOMIZED
@given(st.data(), SEGMENTS, SIZES)
def test_how_a_text_is_cut_into_segments_does_not_matter(data, segments, size):
    text = tokens(segments)
    one, other = Content(segments), Content(recut(data.draw, text))
    assert one.n == other.n == len(text)
    assert list(one) == list(other)
    assert one.keys(size, 99) == other.keys(size, 99)


def test_segments_that_continue_each_other_are_merged():
    content = Content([(7, 0, 3), (7, 3, 2), (7, 6, 1), (7, 7, 0), (8, 7, 1)])
    assert list(content) == [(7, 0, 5), (7, 6, 1), (8, 7, 1)]
    assert content.n == 7


@pytest.mark.slow
@DERANDOMIZED
@given(SEGMENTS, st.lists(st.tuples(SIZES, st.integers(0, 8), BEHIND), max_size=12))
def test_a_content_that_grows_between_questions_answers_as_one_built_at_once(segments, questions):
    """Segments and questions alternate, and the block size changes now and then; then all questions come again."""
    growing = Content()
    for at in range(max(len(segments), len(questions))):
        if at < len(segments):
            growing.extend(segments[at])
        if at < len(questions):
            assert growing.keys(*questions[at]) == Content(segments[: at + 1]).keys(*questions[at])
    for question in questions:
        assert growing.keys(*question) == Content(segments).keys(*question)


@pytest.mark.slow
@DERANDOMIZED
@given(SEGMENTS, SIZES, st.integers(0, 9))
def test_there_are_as_many_keys_as_asked_for_or_as_full_blocks(segments, size, n):
    content = Content(segments)
    full = content.n // size
    every = list(Content(segments).keys(size, full))
    assert content.keys(size, n) == every[:n]
    assert len(every) == full
    assert content.keys(size, full + 3) == every


@pytest.mark.slow
@DERANDOMIZED
@given(SEGMENTS, st.integers(0, 20), st.integers(0, 20), SIZES)
def test_head_and_without_cut_as_lists_do(segments, start, n, size):
    content, text = Content(segments), tokens(segments)
    head, rest = content.head(start), content.without(start, start + n)
    assert tokens(head) == text[:start]
    assert tokens(rest) == text[:start] + text[start + n :]
    assert (head.n, rest.n) == (len(tokens(head)), len(tokens(rest)))
    assert rest.keys(size, 99) == Content(as_segments(tokens(rest))).keys(size, 99)
    assert tokens(content) == text


@pytest.mark.slow
@DERANDOMIZED
@given(SEGMENTS, st.integers(0, 20))
def test_a_head_is_independent_of_the_text_it_was_cut_from(segments, n):
    content = Content(segments)
    head = content.head(n)
    before = tokens(head)
    content.extend((8, 0, 5))
    head.extend((9, 0, 5))
    assert tokens(head) == before + tokens([(9, 0, 5)])
    assert tokens(content) == tokens(segments) + tokens([(8, 0, 5)])


@pytest.mark.slow
@DERANDOMIZED
@given(st.data(), SEGMENTS, SEGMENTS, st.integers(0, 20))
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


def as_segments(text):
    return [(source, at, 1) for source, at in text]


def longest_run(one, other):
    """By going through all pairs of tokens (``common_lcs`` of llama.cpp)."""
    longest, before = 0, [0] * (len(other) + 1)
    for token in one:
        now = [0] + [before[i] + 1 if token == each else 0 for i, each in enumerate(other)]
        longest, before = max(longest, *now), now
    return longest


@pytest.mark.slow
@DERANDOMIZED
@given(SEGMENTS, SEGMENTS)
def test_the_longest_common_run_may_begin_anywhere_and_go_through_segments(one, other):
    assert Content(one).longest_common_run(Content(other)) == longest_run(tokens(one), tokens(other))
