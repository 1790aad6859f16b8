"""Traffic that ``kvsim observe`` wrote down as it passed: JSONL with times, tokens, and hashes of blocks of texts.

The format is that of ``workloads/traces/observed_lines.py``; what prompts say is worked out in ``observed_texts.py``.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workloads.request import Prefixes, Request, Segment, WorkloadError, answer_of
from workloads.traces.files import open_text, shown_path
from workloads.traces.jsonl import json_lines
from workloads.traces.observed_blocks import NONE, BlockTree, Call
from workloads.traces.observed_lines import (
    CANCELLED,
    EMPTY,
    FAILED,
    Counts,
    LineReader,
    RequestKey,
    Seen,
    without_torn,
)
from workloads.traces.observed_texts import Texts
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

_NAMED = 20
"""The most rows that a note lists."""
_LINE = 1 << 26
"""The most characters in a line; a block of 64 bytes takes 19."""


@dataclass(slots=True)
class _Tally:
    """What a file has, counted in its first reading."""

    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests by why they are left out."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by cause, where it is known."""
    estimated: int = 0
    distorted: int = 0
    """Requests while which the proxy was late."""
    lag_s: float = 0.0
    """The most that it was late."""
    missed: int = 0
    """Requests that the proxy has not looked at in full."""
    answers: int = 0
    """Requests whose answers have hashes."""
    shortened: int = 0
    """Turns in which much of the answer before them did not come back."""
    torn: list[int] = field(default_factory=list)
    """Numbers of the lines that are cut short."""

    def count(self, seen: Seen, sign: int = 1) -> None:
        """Add a request, or, with -1, take it out again."""
        if seen.left_out:
            self.left_out[seen.left_out] += sign
            self.failures[seen.cause] += sign * bool(seen.cause)
            return
        self.kept += sign
        self.estimated += sign * seen.estimated
        self.distorted += sign * (seen.distorted > 0)
        self.lag_s = max(self.lag_s, seen.distorted)
        self.missed += sign * seen.missed
        self.answers += sign * bool(seen.answer_blocks)

    def notes(self) -> Iterator[str]:
        """What a user should know."""
        for why in (FAILED, CANCELLED, EMPTY):
            if n := self.left_out[why]:
                requests = "request" if n == 1 else "requests"
                named = f"{why} {requests}" if why == FAILED else f"{requests} {why}"
                causes = ", ".join(f"{cause} ({count:,})" for cause, count in (+self.failures).most_common())
                yield f"{n:,} {named} left out{f': {causes}' if why == FAILED and causes else ''}"
        if self.estimated:
            yield f"{self.estimated:,} of {self.kept:,} requests: tokens estimated"
        if self.distorted:
            late = f"the proxy was late by up to {self.lag_s * 1e3:,.0f} ms, as on a busy machine"
            yield f"{self.distorted:,} of {self.kept:,} requests: times distorted, since {late}"
        if self.missed:
            yield f"{self.missed:,} of {self.kept:,} requests: the proxy was too busy to look at all of their texts"
        if self.shortened:
            turns = "1 turn repeats" if self.shortened == 1 else f"{self.shortened:,} turns repeat"
            yield f"{turns} little of the answer before (without its reasoning?): shared with it is only the prompt"
        if self.torn:
            rows = ", ".join(map(str, self.torn[:_NAMED])) + (", ..." if len(self.torn) > _NAMED else "")
            what = ("line", "row") if len(self.torn) == 1 else ("lines", "rows")
            yield f"{len(self.torn):,} {what[0]} cut short left out: {what[1]} {rows}"


@dataclass(frozen=True, slots=True)
class ObservedTrace(Trace):
    """The requests of observed traffic; equal hashes are equal texts, and prompts quote the answers before them.

    All requests are held in memory while the file is read, in about 500 bytes each, and the blocks of their texts, in
    about 150 bytes for each different one. Failed requests, and those that were cancelled before their first token, are
    left out; others that were cancelled have the tokens that they got. Runs of the proxy are put on one axis by their
    start. A line that a killed proxy left unfinished is left out.

    A later turn of a session comes ``think_s`` after the answer before it; the time window and ``keep`` refer to
    sessions, ``limit`` to requests.
    """

    sessions: bool = True
    """Whether requests that go on from an earlier answer are turns of its session; if not, each comes when it did."""
    _tally: _Tally = field(default_factory=_Tally, init=False, repr=False, compare=False)

    @property
    def prefixes(self) -> Prefixes:
        """The texts of all prompts, and of answers where the file has their hashes."""
        return "tokens"

    def __iter__(self) -> Iterator[Request]:
        # Answers are named by the request's number in the workload, which only now is known.
        numbers: dict[int, int] = {}
        for request in Trace.__iter__(self):
            *quoted, own = request.content
            numbers[own.source + 1] = request.id
            content = (*(_named(segment, numbers) for segment in quoted), *([own] if own.n else []))
            yield request._replace(content=content)

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        tally = self._tally if check_all else _Tally()
        tree, requests = self._read(tally)
        if not requests and not self._bad_rows.because():
            left_out = "; ".join(tally.notes())
            raise WorkloadError(f"{shown_path(self.path)}: no request yet{f': {left_out}' if left_out else ''}")
        requests.sort(key=lambda request: request.arrival_ns)
        texts = Texts(tree, requests, only_sessions=check_all)
        tally.shortened = len(texts.unreturned)
        yield from in_batches(self._rows(requests, texts, check_all=check_all))

    def _read(self, tally: _Tally) -> tuple[BlockTree, list[Call]]:
        """The requests of the file, in its order, and the blocks of their texts."""
        tree, lines = BlockTree(), LineReader(self.path)
        requests: list[Call | None] = []
        unsure: dict[RequestKey, tuple[int, Seen]] = {}
        """Requests that a later line may know better, and their places in the list."""

        def read(number: int, line: str) -> None:
            seen = lines.read(number, line)
            if seen is None:
                return
            at, before = unsure.get(seen.key, (-1, None))
            if isinstance(seen, Counts):  # The request may be in an older part of the file.
                if before is None or not before.estimated:
                    return
                call = before.call._replace(prompt_tokens=seen.prompt_tokens, output_tokens=seen.output_tokens)
                seen = before._replace(call=call, estimated=seen.estimated)
            else:
                if not seen.left_out:
                    seen = seen._replace(call=_placed(seen, tree), blocks=[], answer_blocks=seen.answer_blocks[:1])
                if before is None or not before.missed or before.call.arrival_ns != seen.call.arrival_ns:
                    at, before = len(requests), None
                    requests.append(None)
            if before is not None:
                tally.count(before, -1)
            tally.count(seen)
            requests[at] = None if seen.left_out else seen.call
            if seen.missed or seen.estimated:
                unsure[seen.key] = at, seen

        with open_text(self.path) as text:
            whole = without_torn(json_lines(self.path, text, _LINE), tally.torn)
            for _ in self._bad_rows.sift(whole, read):
                pass
        return tree, [request for request in requests if request is not None]

    def _rows(self, requests: list[Call], texts: Texts, *, check_all: bool) -> Iterator[Row]:
        """Rows in order of the starts of sessions; without content while the file is checked."""
        talks = texts.sessions() if self.sessions else ([number] for number in range(len(requests)))
        session = 0
        for turns in talks:
            start_s = (requests[turns[0]].arrival_ns - requests[0].arrival_ns) / 1e9
            for turn in turns:
                request, before = requests[turn], texts.before[turn] if turn != turns[0] else NONE
                think_s = 0.0 if before == NONE else (request.arrival_ns - requests[before].ended_ns) / 1e9
                content = () if check_all else texts.content(turn)
                lengths = request.prompt_tokens, request.output_tokens
                yield Row(start_s, *lengths, content, think_s, session if len(turns) > 1 else None)
            session += len(turns) > 1

    def _remarks(self) -> tuple[str, ...]:
        notes = list(self._tally.notes())
        if self._tally.kept and not self._tally.answers:
            notes.append("no hashes of answers, so nothing is known of sessions")
        if older := _older_parts(self.path):
            parts = " ".join(shown_path(path.name) for path in older)
            notes.append(
                f"older parts beside it are not read; put together by: cat {parts} {self.path.name} > all.jsonl"
            )
        return tuple(f"{shown_path(self.path)}: {note}" for note in notes)


def _placed(seen: Seen, tree: BlockTree) -> Call:
    """A request, with its blocks added to the tree. Raises ``FlawError``."""
    blocks = tree.add(seen.blocks + seen.answer_blocks)
    last = blocks[len(seen.blocks) - 1] if seen.blocks else NONE
    return seen.call._replace(last=last, end=blocks[-1] if blocks else NONE)


def _named(segment: Segment, numbers: dict[int, int]) -> Segment:
    """The segment, as an answer of this workload if it is one; ``numbers``: requests by the source of their answers."""
    number = numbers.get(segment.source)
    return segment if number is None else answer_of(number, segment.n)


def _older_parts(path: Path) -> list[Path]:
    """The files ``NAME.1.jsonl``, ``NAME.2.jsonl``, ... beside ``NAME.jsonl``, oldest first."""
    name = path.name.removesuffix(path.suffix)
    try:
        found = list(path.parent.glob(f"{glob.escape(name)}.*{glob.escape(path.suffix)}"))
    except (OSError, ValueError):
        return []
    numbers = {p.name[len(name) + 1 :].removesuffix(path.suffix): p for p in found}
    return [numbers[n] for n in sorted((n for n in numbers if n.isascii() and n.isdigit()), key=int)]
