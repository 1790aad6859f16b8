"""What prompts say: random texts where the workload has its own, and what the server answered where it is quoted.

A text is a row of units, each of one token: token ids, or words for servers that take no ids. Equal segments of a
workload are equal units, and different texts are drawn apart, so that two prompts begin alike as far as the workload
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.engines.live.client import Answer, Question
from kvsim.scenario.content import content_of
from workloads import Request, named_rng
from workloads.request import SOURCES

Unit = int | str
Piece = tuple[int, int, int]
"""``(source, start, n)``, as in the workload."""


@dataclass(frozen=True)
class Vocabulary:
    """What texts are drawn from."""

    units: Sequence[int] | Sequence[str]
    """Ordinary token ids, or words that are a token each behind a space."""
    answers: tuple[int, ...] = ()
    """Tokens that answers shall consist of, one for each answer; none where the server cannot be made to."""
    tokens_per_word: float = 1.0
    """Of words: how many tokens the server counts for each."""
    extra_tokens: int = 0
    """Of words: tokens that the server adds to each prompt."""

    @property
    def is_text(self) -> bool:
        """Whether prompts are sent as text, not as token ids."""
        return isinstance(self.units[0], str)

    @property
    def is_exact(self) -> bool:
        """Whether a prompt has as many tokens as were asked for, by the server's own count."""
        return not self.is_text or self.tokens_per_word == 1.0


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is sent."""

    said: tuple[int, ...] | str
    """Token ids, or text."""
    pieces: tuple[Piece, ...]
    """The texts that it consists of, as the workload numbers them."""
    answer: int | None = None
    """The token that the answer shall consist of."""

    def question(self, request: Request) -> Question:
        """What the server is asked."""
        own = {"n_keep": request.n_keep, "n_discard": request.n_discard, "cache_prompt": request.cache_prompt}
        params = {key: value for key, value in own.items() if value is not None}
        return Question(self.said, request.output_tokens, self.answer, params)


class Prompts:
    """Writes the prompts of a workload, and remembers the answers that later ones quote."""

    def __init__(self, seed: int, vocabulary: Vocabulary):
        self.seed, self.vocabulary = seed, vocabulary
        self._texts: dict[int, list[Unit]] = {}
        self._answers: dict[int, list[Unit]] = {}
        """What came back, by the source that the workload gives to it."""

    def of(self, request: Request) -> Prompt:
        """The prompt of a request, of as many tokens as it says."""
        pieces = tuple(content_of(request).head(request.prompt_tokens))
        answers = self.vocabulary.answers
        answer = answers[request.id % len(answers)] if answers else None
        units = [unit for piece in pieces for unit in self._segment(*piece)]
        if not self.vocabulary.is_text:
            return Prompt(tuple(int(unit) for unit in units), pieces, answer)
        words = round((request.prompt_tokens - self.vocabulary.extra_tokens) / self.vocabulary.tokens_per_word)
        return Prompt("".join(str(unit) for unit in units[: max(1, words)]), pieces, answer)

    def answered(self, request: Request, answer: Answer) -> None:
        """Note an answer, for prompts that quote it. One of which no tokens are known is quoted as a random text."""
        if self.vocabulary.is_text:
            # Tokens of a text cannot be told apart: it stands whole in the place of its first one.
            said: list[Unit] = [answer.text, *[""] * (answer.output_tokens - 1)] if answer.text else []
        else:
            said = list(answer.output)
        self._answers[request.answer.source] = said

    def _segment(self, source: int, start: int, n: int) -> list[Unit]:
        """The units of a piece. An answer that ended early goes on with a random text, so that lengths are kept."""
        said = self._answers.get(source, []) if source >= SOURCES else []
        drawn = self._text(source, start + n)[max(start, len(said)) : start + n] if start + n > len(said) else []
        return [*said[start : start + n], *drawn]

    def _text(self, source: int, n: int) -> list[Unit]:
        """The text of a source, at least its first n units. However long, it begins the same."""
        text = self._texts.get(source, [])
        if len(text) < n:
            units = self.vocabulary.units
            drawn = named_rng(self.seed, f"text {source}").integers(0, len(units), size=max(n, 2 * len(text)))
            text = self._texts[source] = [units[i] for i in np.asarray(drawn).tolist()]
        return text
