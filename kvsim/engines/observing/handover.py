"""What the relay tells the observer: frames, each of a kind, a request, a time and bytes, on two ways.

On the way of the texts, frames wait until there are many, a request ends, or the relay's clock ticks, since each write
wakes the observer. They never wait for the observer: when it is far behind, texts are dropped. What the relay itself
knows of a request is sent at its end on a second way too, at once and past all texts, so that it is with the system
before the client has the end of its answer: a relay that is killed then takes none of it along.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from asyncio import WriteTransport
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

_HEAD = struct.Struct("<BQdI")
_BATCH = 1 << 15
"""Bytes of frames that are sent at once."""
_FULL = 2 << 20
"""Bytes on their way, from which on texts are dropped; from eight times as many on, all is."""
SPOOL_BYTES = 32 << 20
"""Bytes that the observer takes in while it looks at as many."""


class Kind(IntEnum):
    """What a frame says; what is in braces are its bytes."""

    SENT = 0
    """The client sent of the request's body {this}."""
    ANSWERED = 1
    """The server's answer begins {JSON: content type, encoding}."""
    RECEIVED = 2
    """The server sent of the answer's body {this}."""
    ENDED = 3
    """The request has ended {JSON: the fields of ``Noted``}."""


class Frame(NamedTuple):
    """One thing that was noted."""

    kind: Kind
    request: int
    when: float
    """Seconds on ``time.monotonic``, which all processes of a machine share."""
    data: bytes


class Handover:
    """The relay's end."""

    def __init__(self) -> None:
        self._transport: WriteTransport | None = None
        self._waiting: list[bytes] = []
        self._size = 0
        self._missed: dict[int, int] = {}
        """Bytes of texts that were dropped, by the request; of that, no more is sent, since it would make no sense."""
        self._past_texts: socket.socket | None = None
        self._ends = bytearray()
        """Ends for which there was no room on their way yet."""

    def begin(self, transport: WriteTransport, past_texts: socket.socket) -> None:
        """Send over these from now on, all or only ends."""
        self._transport, self._past_texts = transport, past_texts
        transport.set_write_buffer_limits(4 * _FULL)
        past_texts.setblocking(False)

    def text(self, kind: Kind, request: int, when: float, data: bytes) -> None:
        """Send bytes of a request or of its answer, unless the observer is far behind."""
        if request in self._missed or self._behind() > _FULL:
            self._missed[request] = self._missed.get(request, 0) + len(data)
        else:
            self._add(_HEAD.pack(kind, request, when, len(data)), data)

    def end(self, request: int, when: float, noted: dict[str, Any]) -> None:
        """Send what is known of a request that has ended."""
        data = json.dumps(noted | {"missed": self._missed.pop(request, 0)}).encode()
        head = _HEAD.pack(Kind.ENDED, request, when, len(data))
        if len(self._ends) < _FULL:
            self._ends += head + data
        self._add(head, data)
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._ends and self._past_texts is not None:
            try:
                del self._ends[: self._past_texts.send(self._ends)]
            except BlockingIOError:
                pass
            except OSError:  # The observer is gone.
                self._ends.clear()
        to = self._transport
        if self._waiting and to is not None and not to.is_closing() and self._behind() <= 8 * _FULL:
            to.write(b"".join(self._waiting))
        self._waiting.clear()
        self._size = 0

    def _behind(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _add(self, head: bytes, data: bytes) -> None:
        self._waiting += (head, data)
        self._size += len(data)
        if self._size > _BATCH:
            self.flush()


def frames_of(pieces: Iterable[bytes | bytearray]) -> Iterator[Frame]:
    """The frames in bytes that come piece by piece; a last one that is cut short is left out."""
    data = bytearray()
    for piece in pieces:
        data += piece
        at = 0
        while at + _HEAD.size <= len(data):
            kind, request, when, size = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + size
            if end > len(data):
                break
            yield Frame(Kind(kind), request, when, bytes(data[at + _HEAD.size : end]))
            at = end
        del data[:at]


class Spool:
    """The observer's end of the texts' way: a thread takes all that comes, so that few are dropped in a burst."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._held = bytearray()
        self._over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._fill, name="spool", daemon=True).start()

    def pieces(self) -> Iterator[bytearray]:
        """All that comes until the relay ends it, or ends itself."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._over)
                if not self._held:
                    return
                data, self._held = self._held, bytearray()
                self._changed.notify()
            yield data

    def _fill(self) -> None:
        for data in received(self._channel):
            with self._changed:
                self._changed.wait_for(lambda: len(self._held) < SPOOL_BYTES)
                self._held += data
                self._changed.notify()
        with self._changed:
            self._over = True
            self._changed.notify()


def received(channel: socket.socket) -> Iterator[bytes]:
    """What comes over a socket, until its other end is closed."""
    try:
        while data := channel.recv(1 << 20):
            yield data
    except OSError:
        return
