"""Recorded servers: what was asked of them, from JSONL with a line ``meta``, a line for each request, and others.

A line of kind ``request`` has ``arrival_s``, ``prompt`` and ``output_tokens``. The prompt is a list of segments
``[source, start, n]``: ``n`` tokens of the text called ``source`` from its token ``start`` on; equal segments are equal
tokens. What the server did with the requests is not read here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from workloads.generators.lengths import MAX_TOKENS
from workloads.request import Prefixes, Segment
from workloads.traces.bad_rows import FlawError
from workloads.traces.files import open_text
from workloads.traces.jsonl import MAX_ID, Object, check_keys, json_lines, parse, seconds, shown, tokens
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

LINES = ("meta", "request", "second")
"""The kinds of lines."""

NamedSegment = tuple[str, int, int]
"""``(source, start, n)``, where the source is a name."""

_KEYS = ("arrival_s", "prompt", "output_tokens")


class AskedRequest(NamedTuple):
    """What a recorded request asked for."""

    arrival_s: float
    prompt: tuple[NamedSegment, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all segments of the prompt."""
        return sum(n for _, _, n in self.prompt)


class RecordedTrace(Trace):
    """The requests of a recorded server, sorted by arrival; all are held while the file is read, in 20 bytes each.

    Each segment of a prompt takes 24 bytes more.
    """

    __slots__ = ()

    @property
    def prefixes(self) -> Prefixes:
        """The texts of all prompts; no prompt quotes an answer."""
        return "tokens"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        asked = _Asked()
        with open_text(self.path) as text:
            for request in self._bad_rows.sift(json_lines(self.path, text), _read):
                if request is not None:
                    asked.add(request)
        yield from in_batches(asked.rows())


class _Asked:
    """Requests by column."""

    def __init__(self) -> None:
        self._arrivals, self._outputs = array("d"), array("i")
        self._ends, self._segments = array("q", [0]), array("q")
        """Where the segments of each request end; source, start and length of each segment."""
        self._sources: dict[str, int] = {}
        """The number of each text, in order of the file."""

    def add(self, request: AskedRequest) -> None:
        """Add a request."""
        self._arrivals.append(request.arrival_s)
        self._outputs.append(request.output_tokens)
        for name, start, n in request.prompt:
            self._segments.extend((self._sources.setdefault(name, len(self._sources)), start, n))
        self._ends.append(len(self._segments))

    def rows(self) -> Iterator[Row]:
        """The requests in order of arrival; texts are numbered in this order."""
        arrivals = np.array(self._arrivals)
        order = np.argsort(arrivals, kind="stable").tolist()
        numbers: dict[int, int] = {}
        for k in order:
            flat = self._segments[self._ends[k] : self._ends[k + 1]]
            content = tuple(
                Segment(numbers.setdefault(source, len(numbers)), start, n)
                for source, start, n in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
            )
            since_first = self._arrivals[k] - self._arrivals[order[0]]
            yield Row(since_first, sum(flat[2::3]), self._outputs[k], content)


def kind_of_line(row: Object) -> str:
    """The kind of a line. Raises ``FlawError`` unless there is such a kind."""
    kind = check_keys("", row, ("kind",))["kind"]
    if kind not in LINES:
        raise FlawError(f"kind {shown(kind)}; expected {', '.join(LINES)}")
    return str(kind)


def asked_request(row: Object) -> AskedRequest:
    """What a line of kind ``request`` asks for. Raises ``FlawError``."""
    check_keys("", row, _KEYS)
    prompt = _segments(row["prompt"])
    asked = AskedRequest(seconds(row, "arrival_s"), prompt, tokens(row, "output_tokens"))
    if asked.prompt_tokens > MAX_TOKENS:
        raise FlawError(f"prompt of {asked.prompt_tokens} tokens is out of range; expected 1 to {MAX_TOKENS}")
    return asked


def _read(number: int, line: str) -> AskedRequest | None:
    """The request of a line; None if it is of another kind. Raises ``FlawError``."""
    row = parse(line, ("kind",))
    return asked_request(row) if kind_of_line(row) == "request" else None


def _segments(value: Any) -> tuple[NamedSegment, ...]:
    if not isinstance(value, list) or not value:
        raise FlawError(f"prompt {shown(value)} is not a list of segments [source, start, n]")
    return tuple(map(_segment, value))


def _segment(value: Any) -> NamedSegment:
    if isinstance(value, list) and len(value) == 3:
        source, start, n = value
        whole = type(start) is int and type(n) is int
        if isinstance(source, str | int) and whole and 0 <= start <= MAX_ID and 1 <= n <= MAX_TOKENS:
            return str(source), start, n
    text = shown(value) if not isinstance(value, list) else "[" + ", ".join(map(shown, value[:4])) + "]"
    raise FlawError(f"prompt: {text:.60} is not a segment [source, start, n], a name and two numbers")
