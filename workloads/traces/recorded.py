"""Recorded servers: what was asked of them, from JSONL with a line ``meta``, a line for each request, and others.

A line of kind ``request`` has ``arrival_s``, ``prompt`` and ``output_tokens``. The prompt is a list of segments
``[source, start, n]``: ``n`` tokens of the text called ``source`` from its token ``start`` on; equal segments are equal
tokens. What the server did with the requests is not read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
    """The requests of a recorded server, sorted by arrival; all are held in memory while the file is read."""

    __slots__ = ()

    @property
    def prefixes(self) -> Prefixes:
        """The texts of all prompts; no prompt quotes an answer."""
        return "tokens"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        with open_text(self.path) as text:
            found = self._bad_rows.sift(json_lines(self.path, text), _read)
            asked = [request for request in found if request is not None]
        asked.sort(key=lambda request: request.arrival_s)
        yield from in_batches(_rows(asked))


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


def _read(line: str) -> AskedRequest | None:
    """The request of a line; None if it is of another kind. Raises ``FlawError``."""
    row = parse(line, ("kind",))
    return asked_request(row) if kind_of_line(row) == "request" else None


def _rows(asked: Iterable[AskedRequest]) -> Iterator[Row]:
    first_s: float | None = None
    sources: dict[str, int] = {}
    for request in asked:
        first_s = request.arrival_s if first_s is None else first_s
        content = tuple(Segment(sources.setdefault(name, len(sources)), start, n) for name, start, n in request.prompt)
        yield Row(request.arrival_s - first_s, request.prompt_tokens, request.output_tokens, content)


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
