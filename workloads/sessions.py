"""Generated conversations: several turns, each prompt quoting all that was said before, under shared system prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.lengths import IntArray, Lengths
from workloads.request import Request, Segment, answer_of
from workloads.streams import stream
from workloads.synthetic import Gaps

MAX_TURNS = 1000
"""No session has more: each prompt lists all turns before it, so that a session's size grows with their square."""

_PAGE = 4096
"""Sessions drawn at a time. Part of what a seed means: another value would give other requests."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """``sessions`` conversations; all requests of one follow one another, in order of the sessions' arrival.

    The prompt of turn k is the system prompt, user message 1, answer 1, user message 2, and so on to user message k.
    An answer is quoted whole, even if a full slot should have cut it short. Each turn's ``arrival_s`` is its
    session's start; turns after the first have a ``think_s``.

    How long something is does not change what else is drawn, in this session or another; the number of turns of a
    session does change the lengths of later ones.
    """

    seed: int
    sessions: int
    gaps: Gaps
    """Between the starts of sessions."""
    turns: Lengths
    """Turns in a session, cut at ``MAX_TURNS``."""
    system_prompts: int
    """How many different ones the sessions share; 0: none has any."""
    system_tokens: Lengths
    """Tokens of each system prompt, drawn once."""
    popularity: float
    """Zipf's exponent, at least 0: the k-th system prompt is chosen in proportion to ``k ** -popularity``."""
    user_tokens: Lengths
    """Tokens of each user message."""
    output_tokens: Lengths
    think_s: float
    """Mean of the exponential time, in seconds, between an answer and the next message; 0: at once."""
    max_context: int | None = None
    """A session ends before the first turn whose prompt and output would exceed this many tokens together; its first
    turn is sent, as it is, in any case."""
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_requests", sum(len(plan.outputs) for plan in self._plans()))

    def __iter__(self) -> Iterator[Request]:
        number = 0
        for session, plan in enumerate(self._plans()):
            content = plan.opening
            prompt = sum(segment.n for segment in content)
            for user, output, think_s in zip(plan.users, plan.outputs, plan.thinks, strict=True):
                # The sources before belong to the system prompts; each request brings one new message.
                content = (*content, Segment(self.system_prompts + number, 0, user))
                prompt += user
                yield Request(number, plan.start_s, prompt, output, think_s, content, session)
                content = (*content, answer_of(number, output))
                prompt += output
                number += 1

    def _plans(self) -> Iterator[_Plan]:
        gaps, counts = stream(self.seed, "session-gaps"), stream(self.seed, "session-turns")
        choices, thinking = stream(self.seed, "session-systems"), stream(self.seed, "turn-think-times")
        users, outputs = stream(self.seed, "turn-user-lengths"), stream(self.seed, "turn-output-lengths")
        openings, now = self._openings(), 0.0
        for first in range(0, self.sessions, _PAGE):
            n = min(_PAGE, self.sessions - first)
            rows = zip(
                self.gaps(gaps, n).tolist(),
                self._choose(choices, n),
                np.minimum(self.turns.draw(counts, n), MAX_TURNS).tolist(),
                strict=True,
            )
            for gap, system, turns in rows:
                now += gap
                opening = openings[system : system + 1]
                user, output = self.user_tokens.draw(users, turns), self.output_tokens.draw(outputs, turns)
                thinks = [0.0, *thinking.exponential(self.think_s, turns - 1).tolist()]
                # Cut only after everything is drawn: later sessions must not depend on where this one ends.
                kept = self._kept(opening, user + output)
                yield _Plan(now, opening, user[:kept].tolist(), output[:kept].tolist(), thinks[:kept])

    def _choose(self, rng: np.random.Generator, n: int) -> list[int]:
        """Numbers of ``n`` system prompts; the most popular is 0."""
        weights = np.cumsum(np.arange(1, max(1, self.system_prompts) + 1, dtype=np.float64) ** -self.popularity)
        chosen: list[int] = np.searchsorted(weights / weights[-1], rng.random(n), side="right").tolist()
        return chosen

    def _kept(self, opening: tuple[Segment, ...], tokens: IntArray) -> int:
        """How many turns fit into the context; each adds so many tokens, message and answer together."""
        if self.max_context is None:
            return len(tokens)
        room = self.max_context - sum(segment.n for segment in opening)
        return max(1, int(np.searchsorted(np.cumsum(tokens), room, side="right")))

    def _openings(self) -> tuple[Segment, ...]:
        """The system prompts, the most popular first."""
        tokens = self.system_tokens.draw(stream(self.seed, "system-lengths"), self.system_prompts)
        return tuple(Segment(source, 0, n) for source, n in enumerate(tokens.tolist()))


class _Plan(NamedTuple):
    """One session: its start, and the tokens and think times of its turns."""

    start_s: float
    opening: tuple[Segment, ...]
    """Its system prompt, if it has one."""
    users: list[int]
    outputs: list[int]
    thinks: list[float]
    """Seconds before each turn."""
