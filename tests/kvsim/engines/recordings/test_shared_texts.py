"""Which prompts begin alike: as segments, exactly as far as their tokens do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engines.recordings.from_llama_server import SharedTexts
from workloads.request import SOURCES, answer_of

TEXTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.lists(st.integers(0, 2), max_size=4)),
    min_size=1,
    max_size=8,
)


def units(segments):
    """A text as single tokens of segments: equal units are equal tokens."""
    return [(source, start + i) for source, start, n in segments for i in range(n)]


def common(one, other):
    """How many units two texts share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.slow
@given(TEXTS)
def test_each_prompt_shares_as_much_with_earlier_texts_as_its_tokens_do(asked):
    texts, told, seen = SharedTexts(), [], []
    for number, (prompt, answer) in enumerate(asked):
        content = texts.add(number, prompt, answer)
        assert sum(segment.n for segment in content) == len(prompt)
        own = units(content)
        longest = max((common(prompt, earlier) for earlier in told), default=0)
        assert max((common(own, earlier) for earlier in seen), default=0) == longest
        # Nothing is said to be equal that is not.
        assert all(common(own, other) <= common(prompt, tokens) for other, tokens in zip(seen, told, strict=True))
        told.append([*prompt, *answer])
        seen.append(own + units([answer_of(number, len(answer))]) if answer else own)


def test_a_turn_quotes_the_answer_before_it():
    texts = SharedTexts()
    first = texts.add(4, [1, 2, 3], [9, 9])
    later = texts.add(7, [1, 2, 3, 9, 9, 5], [8])
    assert later[: len(first)] == first
    assert later[len(first)] == (SOURCES + 4, 0, 2)
    assert sum(segment.n for segment in later) == 6
