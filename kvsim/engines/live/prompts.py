"""What prompts say: random texts where the workload has its own, and what the server answered where it is quoted.

A text is a row of units, each of one token: token ids, or words for servers that take no ids. Equal segments of a
workload are equal units, and different texts are drawn apart, so that two prompts begin alike as far as the workload
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from kvsim.engines.live.client import Answer, CompletionRequest
from kvsim.scenario.content import content_of
from workloads import Request, named_rng
from workloads.request import SOURCES

Unit = int | str
Ids = Annotated[
    range,
    PlainValidator(lambda said: said if isinstance(said, range) else range(*said)),
    PlainSerializer(lambda ids: [ids.start, ids.stop]),
]
"""Token ids in a row; in JSON the first, and the one behind the last."""
Piece = tuple[int, int, int]
"""``(source, start, n)``, as in the workload."""

_COMMON = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my way may down day get come
over new take only little work know place year back give most very after thing our just name good
"""
WORDS = tuple(f" {word}" for word in _COMMON.split())
"""Words so common that they are one token each in most vocabularies."""
FIRST_MARK = 100.0
"""Marks begin well above 5, which is what requests have that are not marked."""


@dataclass(frozen=True)
class Vocabulary:
    """What texts are drawn from."""

    ids: Ids | None
    """Ordinary token ids; None: words, for a server that takes no ids."""
    answers: tuple[int, ...] = ()
    """Tokens that answers shall consist of, one for each answer; none where the server cannot be made to."""
    tokens_per_word: float = 1.0
    """Tokens that the server counts for each word."""
    extra_tokens: int = 0
    """Tokens that the server adds to each prompt of words."""

    @property
    def units(self) -> Sequence[Unit]:
        """Units of a token each, or nearly."""
        return WORDS if self.ids is None else self.ids

    @property
    def is_text(self) -> bool:
        """Whether prompts are sent as text, not as token ids."""
        return self.ids is None

    def words(self, tokens: int) -> int:
        """How many words have so many tokens, as the server counts."""
        return max(1, round((tokens - self.extra_tokens) / self.tokens_per_word))

    def draw(self, tokens: int, rng: np.random.Generator) -> tuple[int, ...] | str:
        """A random prompt of so many tokens."""
        n = self.words(tokens) if self.is_text else tokens
        drawn = [self.units[i] for i in rng.integers(0, len(self.units), n).tolist()]
        return "".join(map(str, drawn)) if self.is_text else tuple(map(int, drawn))


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is sent."""

    said: tuple[int, ...] | str
    """Token ids, or text."""
    pieces: tuple[Piece, ...]
    """The texts that it consists of, as the workload numbers them."""
    answer: int | None = None
    """The token that the answer shall consist of."""
    mark: float | None = None
    """What tells the request from others in llama-server's log: its ``mirostat_tau``, of no effect without mirostat."""

    def completion_request(self, request: Request) -> CompletionRequest:
        """What the server is asked."""
        own: dict[str, float | bool | None] = {
            "n_keep": request.n_keep,
            "n_discard": request.n_discard,
            "cache_prompt": request.cache_prompt,
        }
        own["mirostat_tau"] = self.mark
        params = {key: value for key, value in own.items() if value is not None}
        return CompletionRequest(self.said, request.output_tokens, self.answer, params)


class Prompts:
    """Writes the prompts of a workload, and remembers the answers that later ones quote."""

    def __init__(self, seed: int, vocabulary: Vocabulary, *, texts: int = 0, first_mark: int | None = None):
        """``texts``: another number, other texts of the same lengths. ``first_mark``: number the requests in
        llama-server's log, the first one with this number; None: do not.
        """
        self.seed, self.vocabulary = seed, vocabulary
        self._first_mark = first_mark
        self._named = "text" if texts == 0 else f"text of {texts}"
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
            mark = None if self._first_mark is None else FIRST_MARK + self._first_mark + request.id
            return Prompt(tuple(int(unit) for unit in units), pieces, answer, mark)
        words = self.vocabulary.words(request.prompt_tokens)
        return Prompt("".join(str(unit) for unit in units[:words]), pieces, answer)

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
            drawn = named_rng(self.seed, f"{self._named} {source}").integers(0, len(units), size=max(n, 2 * len(text)))
            text = self._texts[source] = [units[i] for i in np.asarray(drawn).tolist()]
        return text
