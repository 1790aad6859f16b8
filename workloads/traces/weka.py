"""Traces of coding agents in the format of WEKA's kv-cache-tester: JSONL with a whole session in each line.

Public at github.com/callanjfox/kv-cache-tester under Apache-2.0. A session has ``requests``, each with ``t`` (seconds
from its start), ``in`` and ``out`` (tokens), ``hash_ids`` (of the full blocks of 64 tokens of the prompt; ids are
local to their session, and each stands for all text up to the end of its block), ``api_time`` and ``think_time``
(seconds). An entry of type ``subagent`` has requests of its own, with a clock that starts at its ``t``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from workloads.request import Prefixes, Segment
from workloads.rng import named_rng
from workloads.traces.bad_rows import FlawError
from workloads.traces.files import open_text
from workloads.traces.jsonl import Object, check_chain, check_keys, ids, json_lines, parse, seconds, shown, tokens
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

BLOCK_TOKENS = 64
"""Tokens that one hash id stands for."""

_LINE = 1 << 26
"""The most characters in a line; published sessions have some millions."""
_MAX_ID = 2**32
_DEPTH = 4
"""The deepest nesting of subagents; published traces have one level."""

_KEYS = ("t", "in", "out", "hash_ids")


class _Turn(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    think_s: float
    ids: list[int]


class _AgentSession(NamedTuple):
    """The requests of one agent, in order."""

    offset_s: float
    """Seconds from the start of the session in the line to the first request of this agent."""
    turns: list[_Turn]


@dataclass(frozen=True, slots=True)
class WekaTrace(Trace):
    """Sessions of coding agents; equal ids in one line are equal blocks of content.

    Sessions have no common clock, so they start by a Poisson process. A subagent is a session of its own that shares
    the ids of its parent; its start relative to that of the parent is in the trace. All requests of a session are
    adjacent and have its start as arrival time, which the time window, ``keep`` and the order refer to. ``limit``
    counts requests, and may cut off the last turns of the last session. A row is a line; a bad row is left out with
    all its subagents.

    Memory holds one line at a time, and the sessions of subagents until they start.
    """

    rate: float = 0.01
    """New sessions/s, not counting subagents."""

    @property
    def prefixes(self) -> Prefixes:
        """Prompts name all of their full blocks; answers come back as blocks of later prompts, under other names."""
        return "tokens"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        """Rows in order of the starts of sessions; without content while the file is checked."""
        rng, now, session, request = named_rng(self.seed, "session-gaps"), 0.0, 0, 0
        waiting: list[tuple[float, int, list[Row]]] = []
        with open_text(self.path) as text:
            for line, sessions in enumerate(self._bad_rows.sift(json_lines(self.path, text, _LINE), _read)):
                now += float(rng.exponential(1 / self.rate))
                while waiting and waiting[0][0] <= now:
                    yield from heapq.heappop(waiting)[2]
                for agent in sessions:
                    start_s, rows = now + agent.offset_s, []
                    for turn in agent.turns:
                        content = () if check_all else _content(turn, line, request)
                        rows.append(
                            Row(start_s, turn.prompt_tokens, turn.output_tokens, content, turn.think_s, session)
                        )
                        request += 1
                    heapq.heappush(waiting, (start_s, session, rows))
                    session += 1
        while waiting:
            yield from heapq.heappop(waiting)[2]


def _content(turn: _Turn, line: int, request: int) -> tuple[Segment, ...]:
    """The content of a prompt: runs of consecutive blocks, then a partial block, which is unique to this prompt."""
    segments = []
    if turn.ids:
        numbers = np.array(turn.ids, dtype=np.int64)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
        counts = np.diff(firsts, append=len(numbers))
        for first, count in zip(numbers[firsts].tolist(), counts.tolist(), strict=True):
            segments.append(Segment(2 * line, first * BLOCK_TOKENS, count * BLOCK_TOKENS))
    if rest := turn.prompt_tokens % BLOCK_TOKENS:
        segments.append(Segment(2 * request + 1, 0, rest))
    return tuple(segments)


def _read(number: int, line: str) -> list[_AgentSession]:
    """Parse a line into sessions. Raises ``FlawError``."""
    row = parse(line, ("requests",))
    for key, only in (("block_size", BLOCK_TOKENS), ("hash_id_scope", "local")):
        if key in row and row[key] != only:
            raise FlawError(f"{key} {shown(row[key])} is not read; expected {shown(only)}")
    parents: dict[int, int | None] = {}
    sessions = list(_sessions("", row["requests"], 0.0, parents, 0))
    if not sessions:
        raise FlawError("requests: none")
    return sessions


def _sessions(
    where: str, entries: Any, start_s: float, parents: dict[int, int | None], depth: int
) -> Iterator[_AgentSession]:
    """The session of these entries, after those of its subagents. Raises ``FlawError``."""
    if not isinstance(entries, list):
        raise FlawError(f"{where}requests {shown(entries)} is not a list")
    if depth > _DEPTH:
        raise FlawError(f"{where}requests: subagents of subagents, more than {_DEPTH} deep")
    turns: list[_Turn] = []
    first = last = answered = 0.0
    for k, entry in enumerate(entries):
        here = f"{where}requests[{k}]: "
        if isinstance(entry, dict) and entry.get("type") == "subagent":
            check_keys(here, entry, ("t", "requests"))
            begins = start_s + seconds(entry, "t", here)
            yield from _sessions(f"{here[:-2]}.", entry["requests"], begins, parents, depth + 1)
            continue
        request = check_keys(here, entry, _KEYS)
        now = seconds(request, "t", here)
        if turns and now < last:
            raise FlawError(f"{here}t {now} is earlier than the request before")
        first, last = (first if turns else now), now
        think_s = _thinking(here, request, now - answered) if turns else 0.0
        answered = now + (seconds(request, "api_time", here) if request.get("api_time") is not None else 0.0)
        turns.append(_turn(here, request, think_s, parents))
    if turns:
        yield _AgentSession(start_s + first, turns)


def _thinking(where: str, request: Object, since_s: float) -> float:
    """Seconds between the previous answer and this request: its ``think_time``, else the difference of the times."""
    return seconds(request, "think_time", where) if request.get("think_time") is not None else max(0.0, since_s)


def _turn(where: str, request: Object, think_s: float, parents: dict[int, int | None]) -> _Turn:
    prompt, output = tokens(request, "in", where), tokens(request, "out", where)
    blocks, found = prompt // BLOCK_TOKENS, ids(f"{where}hash_ids", request["hash_ids"], _MAX_ID)
    if len(found) != blocks:
        raise FlawError(
            f"{where}{len(found)} hash_ids for in {prompt}; expected {blocks}, one for each full {BLOCK_TOKENS} tokens"
        )
    if found:
        check_chain(found, parents, where)
    return _Turn(prompt, output, think_s, found)
