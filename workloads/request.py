"""A request, and what hands requests out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

SOURCES = 1 << 48
"""Sources of texts end before this; from here on they are what requests answer."""


class Segment(NamedTuple):
    """A stretch of text, told by where it comes from: equal segments are equal tokens, all others differ."""

    source: int
    """Number of a text: a system prompt, a user's message, an answer; from 0 to 2**48 - 1 but for answers."""
    start: int
    """Offset of the first token in that text."""
    n: int
    """Tokens."""


class Request(NamedTuple):
    """One call to the server."""

    id: int
    """Its number in the stream, from 0."""
    arrival_s: float
    """Seconds from the start of the run. In a closed loop, 0: it is sent when a user is ready."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will generate, the first of them at the end of prefill; at least 1."""
    think_s: float = 0.0
    """Closed loops and later turns of a session: seconds that the user waits before sending it."""
    content: tuple[Segment, ...] = ()
    """What the prompt says, at least ``prompt_tokens`` tokens of it; empty: something that no other request says."""
    session: int | None = None
    """The conversation that it belongs to; its turns follow one another in the stream, each sent ``think_s`` after
    the one before has been answered."""
    priority: int = 0
    """The smaller, the more urgent, where the scheduler heeds it."""

    @property
    def answer(self) -> Segment:
        """What it will say; a later prompt that quotes it begins its prefix with this segment."""
        return answer_of(self.id, self.output_tokens)


def answer_of(request: int, tokens: int) -> Segment:
    """The first ``tokens`` tokens that the request of that number answers."""
    return Segment(SOURCES + request, 0, tokens)


class Workload(Protocol):
    """A stream of requests, the same at every iteration."""

    @property
    def n_requests(self) -> int:
        """How many requests the stream holds."""
        ...

    @property
    def users(self) -> int | None:
        """Closed loop: how many users send them by turns. None: each comes at its own arrival time."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was left out of the source or mended in it, a line each; nothing is mended without one."""
        ...

    def __iter__(self) -> Iterator[Request]: ...


class WorkloadError(ValueError):
    """What the user gave cannot be read. The message is one line: file, row or key, what, what is accepted."""


class BadRowError(WorkloadError):
    """A row of a file is wrong; those before and after it may be good."""

    def __init__(self, path: Path, row: int, what: str):
        # Not the message: exceptions are told to another process by their arguments.
        super().__init__(path, row, what)
        self.path = path
        self.row = row
        """Of the rows of data, the first of which is 1."""
        self.what = what
        """The message without the file and the row."""

    def __str__(self) -> str:
        return f"{self.path}: row {self.row}: {self.what}"
