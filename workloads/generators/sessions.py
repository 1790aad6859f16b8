"""Generated conversations: several turns, each prompt quoting all that was said before, under shared system prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.generators.gaps import Gaps, moments
from workloads.generators.lengths import FloatArray, IntArray, Lengths
from workloads.request import Request, Segment, answer_of
from workloads.rng import named_rng

MAX_TURNS = 1000
"""No session has more: each prompt lists all turns before it, so that a session's size grows with their square."""

BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]

_PAGE = 4096
"""Sessions drawn at a time. Part of what a seed means: another value would give other requests."""
_TURNS = 8192
"""Turns drawn at a time, unless a single session has more. Not part of what a seed means."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Turns that bring a tool's result instead of a user's message, as in an agent's loop."""

    share: float
    """Of the turns after the first; each is a tool's with this probability."""
    result_tokens: Lengths
    """Tokens of each result."""
    wait_s: float
    """Mean of the exponential time, in seconds, between an answer that calls a tool and the tool's result."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """``sessions`` conversations; all requests of one follow one another, in order of the sessions' arrival.

    The prompt of turn k is the system prompt, user message 1, answer 1, user message 2, and so on to user message k.
    An answer is quoted whole, even if a full slot should have cut it short. Each turn's ``arrival_s`` is its
    session's start; turns after the first have a ``think_s``. With ``tools``, the conversations are agents' loops: a
    message after the first may be a tool's result.

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
    tools: Tools | None = None
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_requests", sum(int(plan.kept.sum()) for plan in self._plans()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing: there is no source that could need mending."""
        return ()

    def __iter__(self) -> Iterator[Request]:
        number = session = 0
        openings = self._openings()
        for plan in self._plans():
            users, outputs, thinks = plan.users.tolist(), plan.outputs.tolist(), plan.thinks.tolist()
            rows = zip(
                plan.starts_s.tolist(),
                plan.systems.tolist(),
                plan.firsts.tolist(),
                (plan.firsts + plan.kept).tolist(),
                strict=True,
            )
            for start_s, system, first, end in rows:
                said = list(openings[system : system + 1])
                prompt = sum(segment.n for segment in said)
                turns = zip(users[first:end], outputs[first:end], thinks[first:end], strict=True)
                for user, output, think_s in turns:
                    # The sources before belong to the system prompts; each request brings one new message.
                    said.append(Segment(self.system_prompts + number, 0, user))
                    prompt += user
                    yield Request(number, start_s, prompt, output, think_s, tuple(said), session)
                    said.append(answer_of(number, output))
                    prompt += output
                    number += 1
                session += 1

    def _plans(self) -> Iterator[_Plan]:
        gaps, counts = self.gaps(named_rng(self.seed, "session-gaps")), named_rng(self.seed, "session-turns")
        choices, thinking = named_rng(self.seed, "session-systems"), named_rng(self.seed, "turn-think-times")
        users, outputs = named_rng(self.seed, "turn-user-lengths"), named_rng(self.seed, "turn-output-lengths")
        by_tool = None if self.tools is None else _ByTool(self.seed, self.tools)
        opened = np.array([segment.n for segment in self._openings()] or [0])
        now = 0.0
        for page in range(0, self.sessions, _PAGE):
            n = min(_PAGE, self.sessions - page)
            starts_s = moments(now, gaps(n))
            now = float(starts_s[-1])
            systems = self._choose(choices, n)
            turns = np.minimum(self.turns.draw(counts, n), MAX_TURNS)
            for part in _parts(turns):
                total, firsts = int(turns[part].sum()), np.cumsum(turns[part]) - turns[part]
                user, output = self.user_tokens.draw(users, total), self.output_tokens.draw(outputs, total)
                thinks = np.zeros(total)
                later = np.ones(total, dtype=np.bool_)
                later[firsts] = False
                thinks[later] = thinking.exponential(self.think_s, total - len(firsts))
                if by_tool is not None:
                    by_tool.replace(user, thinks, later)
                # Cut only after everything is drawn: later sessions must not depend on where one ends.
                kept = self._kept(opened[systems[part]], turns[part], firsts, user + output)
                yield _Plan(starts_s[part], systems[part], firsts, kept, user, output, thinks)

    def _choose(self, rng: np.random.Generator, n: int) -> IntArray:
        """Numbers of ``n`` system prompts; the most popular is 0."""
        weights = np.cumsum(np.arange(1, max(1, self.system_prompts) + 1, dtype=np.float64) ** -self.popularity)
        return np.searchsorted(weights / weights[-1], rng.random(n), side="right")

    def _kept(self, opened: IntArray, turns: IntArray, firsts: IntArray, tokens: IntArray) -> IntArray:
        """How many turns of each session fit into the context; each adds so many tokens, message and answer together.

        ``opened``: tokens of the sessions' system prompts, ``turns`` and ``firsts`` as in a ``_Plan``, shape
        (sessions,); ``tokens``: shape (turns,).
        """
        if self.max_context is None:
            return turns
        reached = np.cumsum(tokens)
        before = reached[firsts] - tokens[firsts] - opened
        fits = reached - np.repeat(before, turns) <= self.max_context
        return np.maximum(1, np.add.reduceat(fits, firsts, dtype=np.int64))

    def _openings(self) -> tuple[Segment, ...]:
        """The system prompts, the most popular first."""
        tokens = self.system_tokens.draw(named_rng(self.seed, "system-lengths"), self.system_prompts)
        return tuple(Segment(source, 0, n) for source, n in enumerate(tokens.tolist()))


class _ByTool:
    """Draws which turns are tools', how long they wait and what they bring; of every turn, whoever is chosen."""

    def __init__(self, seed: int, tools: Tools):
        self._tools = tools
        self._choices, self._waits = named_rng(seed, "turn-tools"), named_rng(seed, "turn-tool-times")
        self._results = named_rng(seed, "turn-result-lengths")

    def replace(self, users: IntArray, thinks: FloatArray, later: BoolArray) -> None:
        """Puts tools' results in the place of users' messages. All of shape (turns,); ``later``: not a first turn."""
        n = len(users)
        chosen = later & (self._choices.random(n) < self._tools.share)
        results, waits = self._tools.result_tokens.draw(self._results, n), self._waits.exponential(size=n)
        users[chosen] = results[chosen]
        thinks[chosen] = self._tools.wait_s * waits[chosen]


class _Plan(NamedTuple):
    """Several sessions; their turns one after another."""

    starts_s: FloatArray
    """Shape (sessions,), as the next three."""
    systems: IntArray
    """Number of each one's system prompt."""
    firsts: IntArray
    """Where each one's turns begin in the arrays below."""
    kept: IntArray
    """Turns that are sent."""
    users: IntArray
    """Tokens of each message; shape (turns,), as the next two."""
    outputs: IntArray
    thinks: FloatArray
    """Seconds before each turn."""


def _parts(turns: IntArray) -> Iterator[slice]:
    """Stretches of sessions with some ``_TURNS`` turns in all, so that long sessions are not held by the page."""
    ends, low = np.cumsum(turns), 0
    while low < len(turns):
        before = int(ends[low] - turns[low])
        high = max(low + 1, int(np.searchsorted(ends, before + _TURNS, side="right")))
        yield slice(low, high)
        low = high
