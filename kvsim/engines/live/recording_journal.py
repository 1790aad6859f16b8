"""What a recording has gathered so far, in a journal from which ``--resume`` goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvsim.calibration.journal import Journal, Line
from kvsim.engines.live.client import Answer
from kvsim.engines.live.prompts import Prompt, Vocabulary
from kvsim.engines.live.traffic import Exchange
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryRequests
from workloads import Workload
from workloads.request import conversations

_KEPT = ("id_slot", "truncated", "stop_type", "tokens_cached", "tokens_evaluated", "tokens_predicted")
_KEPT_TIMINGS = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


class Head(Line):
    """What is recorded; a run that resumes must be of the same."""

    journal: Literal["kvsim-journal"] = "kvsim-journal"
    asked: str
    """Digest of all requests."""
    seed: int
    texts: int
    """Which texts of that seed."""
    engine: str
    """As the server says it."""
    vocabulary: Vocabulary
    flags: tuple[str, ...] | None
    """What the server was started with, if it was said."""
    began: float
    """When the first part began: seconds since 1970."""


class Part(Line):
    """The recording goes on."""

    part_s: float


class Ended(Line):
    """A request has ended."""

    request: int
    due_s: float
    after: int | None
    prompt: Prompt
    answer: Answer


class RecordingJournal:
    """The exchanges of a recording, each kept as it ends; times are seconds since the beginning of the first part."""

    def __init__(self, path: Path, head: Head, exchanges: Sequence[Exchange] = (), parts: Sequence[float] = (0.0,)):
        self.head = head
        self.exchanges = list(exchanges)
        self.parts = tuple(parts)
        """When each part began: 0 of the first."""
        self._journal = _journal(path)

    @property
    def latest(self) -> dict[int, Exchange]:
        """By request, how it ended the last time that it was sent."""
        return {exchange.request.id: exchange for exchange in self.exchanges}

    @staticmethod
    def begin(path: Path, head: Head) -> RecordingJournal:
        """A new file. Raises ``UserError`` if there is one, or it cannot be written."""
        if path.exists():
            raise UserError(
                f"{path}: a recording was begun there; --resume goes on with it, or delete it to begin anew"
            )
        gathered = RecordingJournal(path, head)
        gathered._journal.begin(head)
        return gathered

    @staticmethod
    def head_of(path: Path) -> Head:
        """What a file is of. Raises ``UserError`` if it was not begun by a recording."""
        if not path.exists():
            raise UserError(f"{path}: there is no such file; nothing was begun that --resume could go on with")
        head = _journal(path).header()
        if head is None:
            raise UserError(f"{path}: not what kvsim record --url begins; delete it to begin anew")
        return head

    @staticmethod
    def resume(path: Path, requests: Workload) -> RecordingJournal:
        """A file that was begun, and goes on now. Raises ``UserError`` if it is none, or of other requests."""
        head = RecordingJournal.head_of(path)
        if head.asked != digest(requests):
            raise UserError(
                f"{path}: of other requests than these; the same scenario, seed and --requests are expected"
            )
        known = {request.id: request for request in requests}
        parts, exchanges = [0.0], []
        for entry in _journal(path).entries():
            if isinstance(entry, Part):
                parts.append(entry.part_s)
            else:
                request = known[entry.request]
                exchanges.append(Exchange(request, entry.prompt, entry.answer, entry.due_s, entry.after))
        now = Part(part_s=max(time.time() - head.began, 0.0))
        gathered = RecordingJournal(path, head, exchanges, [*parts, now.part_s])
        gathered._journal.add(now)
        return gathered

    def add(self, exchange: Exchange) -> None:
        """Add an exchange, whose times are since the beginning of this part. Raises ``UserError``."""
        moved = _later(exchange, self.parts[-1])
        self.exchanges.append(moved)
        answer = replace(moved.answer, result=kept_result(moved.answer.result))
        self._journal.add(
            Ended(request=moved.request.id, due_s=moved.due_s, after=moved.after, prompt=moved.prompt, answer=answer)
        )

    def remove(self) -> None:
        """Delete the file: all is done."""
        self._journal.remove()


def _journal(path: Path) -> Journal[Head, Part | Ended]:
    return Journal[Head, Part | Ended](path, Head, Part, Ended)


def remaining(workload: Workload, done: Collection[int]) -> InMemoryRequests:
    """What is left of a workload; the first request comes at once. Sessions that lack a turn begin anew.

    ``done``: requests that need not be sent again.
    """
    groups = [group for group in conversations(workload) if any(request.id not in done for request in group)]
    first_s = groups[0][0].arrival_s if groups else 0.0
    return InMemoryRequests(
        tuple(r._replace(arrival_s=max(r.arrival_s - first_s, 0.0)) for group in groups for r in group),
        users=workload.users,
        notes=tuple(workload.notes),
        prefixes=workload.prefixes,
    )


def done_requests(exchanges: dict[int, Exchange]) -> frozenset[int]:
    """Requests that were answered, or that the server would refuse again."""
    return frozenset(
        id
        for id, exchange in exchanges.items()
        if exchange.answer.error is None or _CLIENT_ERROR <= (exchange.answer.status or 0) < _SERVER_ERROR
    )


def digest(requests: Workload) -> str:
    """Equal for equal requests."""
    found = hashlib.sha256(repr(requests.users).encode())
    for request in requests:
        found.update(repr(tuple(request)).encode())
    return found.hexdigest()


def kept_result(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of llama-server's last message: without texts and settings."""
    told = {**result, **result.get("timings", {})}
    return {key: told[key] for key in (*_KEPT, *_KEPT_TIMINGS) if key in told}


def _later(exchange: Exchange, by_s: float) -> Exchange:
    """The exchange with all of its times later."""
    answer = exchange.answer
    moved = replace(
        answer,
        sent_s=answer.sent_s + by_s,
        headers_s=None if answer.headers_s is None else answer.headers_s + by_s,
        token_s=[t + by_s for t in answer.token_s],
        done_s=answer.done_s + by_s,
    )
    return replace(exchange, answer=moved, due_s=exchange.due_s + by_s)
