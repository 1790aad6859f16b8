"""Which prompts begin alike, by their tokens: texts become segments that are equal where their tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workloads import Segment
from workloads.request import answer_of

_Tokens = NDArray[np.int64]


class SharedTexts:
    """Prompts in the order in which they were sent, each with its answer.

    A prompt consists of the segments of the earlier prompt and answer that it shares most tokens with, as far as the
    tokens are the same, and of a text of its own behind. All texts are held, and compared with each new prompt that
    begins with the same token.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[tuple[_Tokens, tuple[Segment, ...]]]] = {}
        """Tokens and segments of prompts with their answers, by their first token."""
        self._own = 0

    def add(self, number: int, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of a prompt; ``number``: of its request, ``answer``: what it was answered."""
        tokens = np.asarray([*prompt, *answer], dtype=np.int64)
        alike = self._texts.setdefault(int(tokens[0]), [])
        shared, found = 0, tuple[Segment, ...]()
        for other, segments in alike:
            common = _common(tokens[: len(prompt)], other)
            if common > shared:
                shared, found = common, segments
        content = _head(found, shared)
        if shared < len(prompt):
            content = (*content, Segment(self._own, 0, len(prompt) - shared))
            self._own += 1
        said = (answer_of(number, len(answer)),) if len(answer) else ()
        alike.append((tokens, (*content, *said)))
        return content


def _common(one: _Tokens, other: _Tokens) -> int:
    """How many tokens two texts have in common at their beginning."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def _head(segments: Sequence[Segment], n: int) -> tuple[Segment, ...]:
    """The first ``n`` tokens of some segments."""
    found = []
    for segment in segments:
        if n <= 0:
            break
        found.append(segment._replace(n=min(n, segment.n)))
        n -= segment.n
    return tuple(found)
