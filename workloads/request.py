"""Requests, the text segments that they consist of, and the interface of every workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

SOURCES = 1 << 48
"""The first source number of an answer; the texts of prompts have smaller ones."""


_TURN_KINDS = 15

Prefixes = Literal["tokens", "blocks", "unknown"]
"""What a workload says about which prompts begin alike. ``tokens``: the texts of all prompts and answers. ``blocks``:
the texts of prompts only, in named blocks of which the last may be partial. ``unknown``: nothing."""


class Segment(NamedTuple):
    """A piece of text, known only by its source: equal segments are equal tokens, different ones share none."""

    source: int
    """Number of the text: a system prompt, a message or an answer. Below 2**48, except for answers."""
    start: int
    """Index of the segment's first token in that text."""
    n: int
    """Tokens."""


class Request(NamedTuple):
    """One call to the server."""

    id: int
    """Its number in the workload, from 0."""
    arrival_s: float
    """Seconds from the start of the run; 0 in a closed loop, where a request is sent when a user is ready."""
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, at least 1; the first one comes at the end of prefill."""
    think_s: float = 0.0
    """Seconds that the user waits before sending it, in a closed loop or after the previous turn of a session."""
    content: tuple[Segment, ...] = ()
    """The text of the prompt, ``prompt_tokens`` tokens or more; empty if it shares no text with other requests, or if
    the workload does not say."""
    session: int | None = None
    """The conversation that it belongs to. Its turns are adjacent in the workload; each is sent ``think_s`` after the
    answer to the previous one."""
    priority: int = 0
    """Smaller values are more urgent, under schedulers that have priorities."""
    n_keep: int | None = None
    """First tokens that context shifts keep, -1 for the whole prompt; None: as the server has it."""
    n_discard: int | None = None
    """Tokens that a context shift discards, 0 for half of the rest; None: as the server has it."""
    cache_prompt: bool | None = None
    """Whether it begins with what its slot holds of its prompt; None: as the server has it."""
    max_output_tokens: int | None = None
    """The most tokens that its client lets be generated (``max_tokens``), at least ``output_tokens``; None: as many as
    its sequence has room for."""
    kind: int = 0
    """What kind of request it is, as a server could be told: its turn in a conversation (``turn_kind``), and in a mix
    its part too; 0: unknown."""
    user_starts: tuple[int, ...] = ()
    """Tokens before each message of a user in the prompt, ascending, as far as a server is told of messages."""

    @property
    def answer(self) -> Segment:
        """The text of its answer, as later prompts quote it."""
        return answer_of(self.id, self.output_tokens)


def turn_kind(turn: int) -> int:
    """The kind of a conversation's request: its turn, from 1; from the fifteenth on they are of one kind."""
    return min(turn, _TURN_KINDS)


def answer_of(request: int, tokens: int) -> Segment:
    """The first ``tokens`` tokens of the answer to the request with this number."""
    return Segment(SOURCES + request, 0, tokens)


class Workload(Protocol):
    """A source of requests, which gives the same ones in every iteration."""

    @property
    def n_requests(self) -> int:
        """The number of requests."""
        ...

    @property
    def users(self) -> int | None:
        """The number of users of a closed loop; None if every request has an arrival time."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was left out of the source or corrected in it, one line each."""
        ...

    @property
    def prefixes(self) -> Prefixes:
        """What it says about which prompts begin alike."""
        ...

    def __iter__(self) -> Iterator[Request]: ...


def timed(requests: Iterable[Request]) -> Iterator[tuple[float, Request]]:
    """Each request with its arrival in seconds, in the order given, in which sessions are adjacent.

    Later turns of a session arrive after the start of the session plus all think times; the time that the server takes
    for answers is not included.
    """
    session, now = None, 0.0
    for request in requests:
        later = request.session is not None and request.session == session
        now = now + request.think_s if later else request.arrival_s
        session = request.session
        yield now, request


def conversations(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """The requests of each session together, and single ones alone; sessions are adjacent in what is given."""
    group: list[Request] = []
    for request in requests:
        if group and (request.session is None or request.session != group[0].session):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


class WorkloadError(ValueError):
    """The user's input cannot be read. The message is one line: file, row or key, fault, what is accepted."""


class MissingExtraError(WorkloadError):
    """A file cannot be read without a package that is optional; ``extra`` is the extra of kvsim that installs it."""

    def __init__(self, what: str, extra: str):
        super().__init__(what, extra)
        self.what = what
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.what}, which comes with the extra kvsim[{self.extra}]"


class BadRowError(WorkloadError):
    """A row of a file is wrong; the rows before and after it may be good."""

    def __init__(self, path: Path, row: int, what: str):
        # Not the message: exceptions are pickled for another process by their arguments.
        super().__init__(path, row, what)
        self.path = path
        self.row = row
        """Number of the row, from 1; a header does not count."""
        self.what = what
        """The message without the file and the row."""

    def __str__(self) -> str:
        return f"{self.path}: row {self.row}: {self.what}"
