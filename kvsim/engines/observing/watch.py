"""What is noted of one request while it passes. Nothing here waits, and nothing that fails here reaches the traffic."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, Literal, ParamSpec

from kvsim.engines.observing.answers import AnswerReader

End = Literal["completed", "cancelled", "failed"]
"""How a request ended: answered in full, given up by the client, or by a fault or a status from 400 on."""

BODY_BYTES = 8 << 20
"""Bytes of a request's body that are looked at; of a longer one, neither blocks nor settings are known."""
REQUEST_BYTES = 2 * BODY_BYTES
"""Bytes that are held of one request and its answer at a time."""
ROOM_BYTES = 64 << 20
"""Bytes of prompts and answers that are held at a time, over all requests; what finds no room is not looked at."""

P = ParamSpec("P")


class Room:
    """How many bytes may still be held in memory. Threads may share one."""

    def __init__(self, size: int = ROOM_BYTES):
        self._left = size
        self._lock = threading.Lock()

    def take(self, n: int) -> bool:
        """Take room for ``n`` bytes, if there is."""
        with self._lock:
            if n > self._left:
                return False
            self._left -= n
            return True

    def give(self, n: int) -> None:
        """Give room back."""
        with self._lock:
            self._left += n


def _fails_open(method: Callable[Concatenate[Watch, P], None]) -> Callable[Concatenate[Watch, P], None]:
    """Catch every fault of a method: it is told, and the request is looked at no more."""

    @functools.wraps(method)
    def guarded(self: Watch, /, *args: P.args, **keys: P.kwargs) -> None:
        if self.fault is not None:
            return
        try:
            method(self, *args, **keys)
        except Exception as e:
            self.fault = e

    return guarded


@dataclass
class Watch:
    """One request that is recorded. Times are seconds on ``time.monotonic``."""

    id: int
    path: str
    room: Room = field(repr=False)
    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first event of a stream with text came."""
    last: float = 0.0
    """When the last of the answer came, or when the request was given up or failed."""
    status: int | None = None
    """The server's; None if it gave none."""
    end: End = "failed"
    body: bytearray | None = field(default_factory=bytearray, repr=False)
    """What the client sent; None if it is too long to be looked at."""
    body_bytes: int = 0
    reader: AnswerReader | None = field(default=None, repr=False)
    answer_bytes: int = 0
    fault: Exception | None = field(default=None, repr=False)
    """Why the request could not be looked at to the end; its message may have text of the request."""
    _taken: int = 0

    @_fails_open
    def sent(self, data: bytes) -> None:
        """Note bytes of the request's body."""
        self.body_bytes += len(data)
        if self.body is not None:
            if len(self.body) + len(data) <= BODY_BYTES and self._take(len(data)):
                self.body += data
            else:
                self.body = None

    @_fails_open
    def answered(self, status: int, content_type: str, encoding: str) -> None:
        """Note how the answer begins."""
        self.status = status
        self.reader = AnswerReader(content_type, encoding.strip().lower(), self._take)

    @_fails_open
    def received(self, data: bytes, now: float) -> None:
        """Note bytes of the answer's body that came at this time."""
        self.answer_bytes += len(data)
        self.last = now
        if self.reader is not None and self.reader.feed(data) and self.first is None:
            self.first = now

    def ended(self, end: End) -> None:
        """Note how the request ended."""
        answer = None if self.reader is None else self.reader.answer
        refused = self.status is None or self.status >= 400
        if end == "cancelled" and answer is not None and answer.ended:
            end = "completed"  # Clients hang up when they have read the last event.
        if end != "completed" or not self.last:
            self.last = time.monotonic()
        self.end = "failed" if end == "completed" and (refused or (answer is not None and answer.failed)) else end

    def forget(self) -> None:
        """Let go of all text."""
        self.body = self.reader = None
        self.room.give(self._taken)
        self._taken = 0

    def _take(self, n: int) -> bool:
        taken = self._taken + n <= REQUEST_BYTES and self.room.take(n)
        self._taken += n if taken else 0
        return taken
