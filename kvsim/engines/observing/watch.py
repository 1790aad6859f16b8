"""What is noted of one request while it passes. Nothing here waits, and nothing that fails here reaches the traffic."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Literal

from kvsim.engines.observing.answers import AnswerReader
from kvsim.engines.observing.handover import Frame, Kind

End = Literal["completed", "cancelled", "failed"]
"""How a request ended: answered in full, given up by the client, or by a fault or a status from 400 on."""
Cause = Literal["unreachable", "timeout", "no_answer", "cut_short", "http_4xx", "http_5xx", "error_event"]
"""Why a request failed: the server could not be reached, or not in time; it gave no answer, or broke it off; it
answered with such a status, or with an error in a stream. One that its client did not send in full and in time is a
``timeout`` too."""

BODY_BYTES = 8 << 20
"""Bytes of a request's body that are looked at; of a longer one, neither blocks nor settings are known."""
REQUEST_BYTES = 2 * BODY_BYTES
"""Bytes that are held of one request and its answer at a time."""
ROOM_BYTES = 64 << 20
"""Bytes of prompts and answers that are held at a time, over all requests; what finds no room is not looked at."""


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


@dataclass(slots=True)
class Noted:
    """What the relay itself knows of a request. Times are seconds on ``time.monotonic``."""

    path: str
    arrival: float
    lag: float = 0.0
    """The most that the relay was late while the request ran, in seconds; 0 where it was in time."""
    status: int | None = None
    """The server's; None if it gave none."""
    stream: bool = False
    """Whether the answer is a stream of events."""
    first: float | None = None
    """When the first of the answer came, after its head."""
    last: float = 0.0
    """When the last of the answer came, or when the request was given up or failed."""
    body_bytes: int = 0
    answer_bytes: int = 0
    events: int = 0
    """Events of a stream, whatever they say; 0 if it is packed."""
    end: End = "failed"
    cause: Cause | None = None
    """Why it failed."""
    missed: int = 0
    """Bytes of request and answer that were not looked at, since observing was far behind."""

    def received(self, when: float, data: bytes) -> None:
        """Note that this came of the answer's body."""
        if self.first is None:
            self.first = when
        self.last = when
        self.answer_bytes += len(data)
        self.events += self.stream and data.count(b"data:")


@dataclass
class Watch:
    """One request that is recorded."""

    id: int
    room: Room = field(repr=False)
    noted: Noted = field(default_factory=lambda: Noted("", 0.0))
    """Known when it has ended, and corrected by what the answer says."""
    first: float | None = None
    """When the first event of a stream with text came, on ``time.monotonic``."""
    body: bytearray | None = field(default_factory=bytearray, repr=False)
    """What the client sent; None if it is too long to be looked at."""
    reader: AnswerReader | None = field(default=None, repr=False)
    fault: Exception | None = field(default=None, repr=False)
    """Why the request could not be looked at to the end; its message may have text of the request."""
    _taken: int = 0

    def take(self, frame: Frame) -> None:
        """Note what a frame says; where that fails, the request is looked at no more."""
        if frame.kind is Kind.ENDED:
            self._ended(frame.when, Noted(**json.loads(frame.data)))
            return
        if self.fault is None:
            try:
                _NOTED[frame.kind](self, frame)
            except Exception as e:  # Whatever it is: the texts are others', and the request gets its line all the same.
                self.fault = e

    def _sent(self, frame: Frame) -> None:
        if self.body is not None:
            if len(self.body) + len(frame.data) <= BODY_BYTES and self._take(len(frame.data)):
                self.body += frame.data
            else:
                self.body = None

    def _answered(self, frame: Frame) -> None:
        content_type, encoding = json.loads(frame.data)
        self.reader = AnswerReader(content_type, encoding.strip().lower(), self._take)

    def _received(self, frame: Frame) -> None:
        if self.reader is not None and self.reader.feed(frame.data) and self.first is None:
            self.first = frame.when

    def _ended(self, when: float, noted: Noted) -> None:
        answer = None if self.reader is None else self.reader.answer
        if self.body is not None and len(self.body) < noted.body_bytes:
            self.body = None
        if self.first is None and noted.missed and noted.stream:
            self.first = noted.first
        if noted.end == "cancelled" and answer is not None and answer.ended:
            noted.end = "completed"  # Clients hang up when they have read the last event.
        if noted.end != "completed" or not noted.last:
            noted.last = when
        if noted.end == "completed" and (noted.status is None or noted.status >= 400):
            noted.end, noted.cause = "failed", "http_4xx" if noted.status and noted.status < 500 else "http_5xx"
        elif noted.end == "completed" and answer is not None and answer.failed:
            noted.end, noted.cause = "failed", "error_event"
        self.noted = noted

    def forget(self) -> None:
        """Let go of all text."""
        self.body = self.reader = None
        self.room.give(self._taken)
        self._taken = 0

    def _take(self, n: int) -> bool:
        taken = self._taken + n <= REQUEST_BYTES and self.room.take(n)
        self._taken += n if taken else 0
        return taken


_NOTED = {Kind.SENT: Watch._sent, Kind.ANSWERED: Watch._answered, Kind.RECEIVED: Watch._received}
