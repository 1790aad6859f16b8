"""Generated conversations: several turns, each prompt quoting what came before, under shared system prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.generators.gaps import Gaps, moments
from workloads.generators.lengths import FloatArray, IntArray, Lengths
from workloads.request import Prefixes, Request, Segment, answer_of, turn_kind
from workloads.rng import named_rng

MAX_TURNS = 1000
"""The most turns of a session: each prompt lists all turns before it, so memory grows with the square of the turns."""

BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]

_BATCH = 4096
"""Sessions drawn at a time. Another value would change the requests of a seed."""
_TURNS = 8192
"""Turns drawn at a time, unless a single session has more. The value does not change the requests of a seed."""


@dataclass(frozen=True, slots=True)
class Tools:
    """How often a turn brings the result of a tool instead of a user's message, as in the loop of an agent."""

    share: float
    """Probability that a turn after the first brings the result of a tool."""
    result_tokens: Lengths
    """Tokens of each result."""
    wait_s: float
    """Mean seconds between an answer that calls a tool and the result of the tool; exponential."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations in order of their arrival; the requests of each are adjacent.

    The prompt of turn k is the system prompt, user message 1, answer 1, user message 2, and so on to user message k.
    An answer is quoted whole, even if the server ended it early in a full slot. The ``arrival_s`` of each turn is the
    start of its session; turns after the first have a ``think_s``, and with ``users`` first turns too. With
    ``tools``, the conversations are loops of agents: a message after the first may be the result of a tool.

    The distribution of one length does not change any other draw, but the number of turns of a session changes the
    lengths in later sessions.
    """

    seed: int
    sessions: int
    gaps: Gaps
    """Gaps between the starts of sessions."""
    turns: Lengths
    """Number of turns in a session, at most ``MAX_TURNS``."""
    system_prompts: int
    """Number of different system prompts that the sessions share; 0: no session has one."""
    system_tokens: Lengths
    """Tokens of each system prompt, drawn once."""
    popularity: float
    """Zipf's exponent, at least 0: the k-th system prompt is chosen in proportion to ``k ** -popularity``."""
    user_tokens: Lengths
    """Tokens of each user message."""
    output_tokens: Lengths
    think_s: float
    """Mean seconds between an answer and the next message; exponential, 0: at once."""
    max_context: int | None = None
    """A session ends before the first turn whose prompt and output together would exceed this many tokens. Its first
    turn is always sent."""
    tools: Tools | None = None
    first_tokens: Lengths | None = None
    """Tokens of the first message of each session; None: as of the others."""
    users: int | None = None
    """The number of users, each of whom begins the next session ``think_s`` after the one before has ended; None:
    sessions begin by the clock."""
    n_requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_requests", sum(int(batch.kept.sum()) for batch in self._session_batches()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Empty: a generator reads no file from which rows could be left out."""
        return ()

    @property
    def prefixes(self) -> Prefixes:
        """All texts are known."""
        return "tokens"

    def __iter__(self) -> Iterator[Request]:
        number = session = 0
        system_tokens = self._system_tokens()
        for batch in self._session_batches():
            users, outputs, thinks = batch.users.tolist(), batch.outputs.tolist(), batch.thinks.tolist()
            rows = zip(
                batch.starts_s.tolist(),
                batch.systems.tolist(),
                batch.firsts.tolist(),
                (batch.firsts + batch.kept).tolist(),
                strict=True,
            )
            for start_s, system, first, end in rows:
                prompt = int(system_tokens[system]) if len(system_tokens) else 0
                content = [Segment(system, 0, prompt)] if len(system_tokens) else []
                starts: list[int] = []
                turns = zip(
                    users[first:end],
                    outputs[first:end],
                    thinks[first:end],
                    batch.by_tool[first:end].tolist(),
                    strict=True,
                )
                for turn, (user, output, think_s, by_tool) in enumerate(turns, 1):
                    # Sources count the system prompts first, then one new message for each request.
                    content.append(Segment(self.system_prompts + number, 0, user))
                    if not by_tool:
                        starts.append(prompt)
                    prompt += user
                    yield Request(
                        number,
                        start_s,
                        prompt,
                        output,
                        think_s,
                        tuple(content),
                        session,
                        kind=turn_kind(turn),
                        user_starts=tuple(starts),
                    )
                    content.append(answer_of(number, output))
                    prompt += output
                    number += 1
                session += 1

    def _session_batches(self) -> Iterator[_SessionBatch]:
        gaps, counts = self.gaps(named_rng(self.seed, "session-gaps")), named_rng(self.seed, "session-turns")
        choices, thinking = named_rng(self.seed, "session-systems"), named_rng(self.seed, "turn-think-times")
        users, outputs = named_rng(self.seed, "turn-user-lengths"), named_rng(self.seed, "turn-output-lengths")
        opening = named_rng(self.seed, "session-first-lengths")
        tool_turns = None if self.tools is None else _ToolTurns(self.seed, self.tools)
        opened = self._system_tokens() if self.system_prompts else np.zeros(1, dtype=np.int64)
        now = 0.0
        for first in range(0, self.sessions, _BATCH):
            n = min(_BATCH, self.sessions - first)
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
                waits = later if self.users is None else np.ones_like(later)
                thinks[waits] = thinking.exponential(self.think_s, int(waits.sum()))
                if self.first_tokens is not None:
                    user[firsts] = self.first_tokens.draw(opening, len(firsts))
                by_tool = np.zeros(total, np.bool_) if tool_turns is None else tool_turns.replace(user, thinks, later)
                # Cut only after everything is drawn: later sessions must not depend on where this one ends.
                kept = self._kept(opened[systems[part]], turns[part], firsts, user + output)
                yield _SessionBatch(starts_s[part], systems[part], firsts, kept, user, output, thinks, by_tool)

    def _choose(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw the system prompts of ``n`` sessions by number; 0 is the most popular."""
        weights = np.cumsum(np.arange(1, max(1, self.system_prompts) + 1, dtype=np.float64) ** -self.popularity)
        return np.searchsorted(weights / weights[-1], rng.random(n), side="right")

    def _kept(self, opened: IntArray, turns: IntArray, firsts: IntArray, tokens: IntArray) -> IntArray:
        """Number of turns of each session that fit into ``max_context``; shape (sessions,).

        ``opened``: tokens of the system prompt of each session; ``firsts``: as in ``_SessionBatch``; ``tokens``:
        message and answer of each turn together, shape (turns,).
        """
        if self.max_context is None:
            return turns
        reached = np.cumsum(tokens)
        before = reached[firsts] - tokens[firsts] - opened
        fits = reached - np.repeat(before, turns) <= self.max_context
        return np.maximum(1, np.add.reduceat(fits, firsts, dtype=np.int64))

    def _system_tokens(self) -> IntArray:
        """Tokens of each system prompt, starting with the most popular."""
        return self.system_tokens.draw(named_rng(self.seed, "system-lengths"), self.system_prompts)


class _ToolTurns:
    """Draws which turns bring the result of a tool, how long the tools take, and the lengths of the results.

    Waits and lengths are drawn for every turn, so that they do not depend on which turns are chosen."""

    def __init__(self, seed: int, tools: Tools):
        self._tools = tools
        self._choices, self._waits = named_rng(seed, "turn-tools"), named_rng(seed, "turn-tool-times")
        self._results = named_rng(seed, "turn-result-lengths")

    def replace(self, users: IntArray, thinks: FloatArray, later: BoolArray) -> BoolArray:
        """Replace some messages by results of tools, in place, and say which. All have shape (turns,); ``later``: not a
        first turn."""
        n = len(users)
        chosen = later & (self._choices.random(n) < self._tools.share)
        results, waits = self._tools.result_tokens.draw(self._results, n), self._waits.exponential(size=n)
        users[chosen] = results[chosen]
        thinks[chosen] = self._tools.wait_s * waits[chosen]
        return chosen


class _SessionBatch(NamedTuple):
    """Several sessions, with the turns of all of them in the same arrays."""

    starts_s: FloatArray
    """Shape (sessions,), like the next three."""
    systems: IntArray
    """Number of the system prompt of each session."""
    firsts: IntArray
    """Index of the first turn of each session in the arrays below."""
    kept: IntArray
    """Number of turns that are sent."""
    users: IntArray
    """Tokens of each message; shape (turns,), like the next two."""
    outputs: IntArray
    thinks: FloatArray
    """Seconds before each turn."""
    by_tool: BoolArray
    """Whether its message is the result of a tool."""


def _parts(turns: IntArray) -> Iterator[slice]:
    """Slices of sessions with about ``_TURNS`` turns each, which bounds memory when sessions are long."""
    ends, low = np.cumsum(turns), 0
    while low < len(turns):
        before = int(ends[low] - turns[low])
        high = max(low + 1, int(np.searchsorted(ends, before + _TURNS, side="right")))
        yield slice(low, high)
        low = high
