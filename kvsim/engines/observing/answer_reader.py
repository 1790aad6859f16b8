"""Reading a copy of an answer while it passes: unpacking, lines, events. Memory is bounded however long it gets."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from kvsim.engines.observing.answers import Answer

_LONGEST_LINE = 1 << 20
"""Bytes of a line of a stream; a longer one is not read."""
_LONGEST_WHOLE = 8 << 20
"""Bytes of an answer that is no stream; a longer one is not read."""
_UNPACKED_AT_ONCE = 1 << 16
_MOST_UNPACKED = 200
"""Times as many bytes as came packed: more than text becomes, less than what is made to keep a reader busy."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class AnswerReader:
    """Reads the bytes of one answer as they come.

    ``take_room`` is asked before bytes are kept; where it says no, the answer's text is not known in the end.
    Raises ``ValueError`` or ``zlib.error`` from ``feed`` where the answer is not what its headers say.
    """

    def __init__(self, content_type: str, encoding: str, take_room: Callable[[int], bool]):
        self.answer = Answer(take_room)
        self.stream = content_type.lower().startswith("text/event-stream")
        """Whether the answer is a stream of events."""
        self.readable = encoding in ("", "identity", "gzip", "x-gzip", "deflate")
        """Whether it is packed in no way that cannot be read; of others only the bytes are counted."""
        packed = encoding not in ("", "identity")
        self._unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if packed and self.readable else None
        self._take_room = take_room
        self._kept = bytearray()
        self._skipping = False
        self._may_unpack = _LONGEST_LINE

    def feed(self, data: bytes) -> bool:
        """Read further bytes; say whether a stream had text in them."""
        if not self.readable:
            return False
        had_text = False
        for piece in self._unpacked(data):
            if self.stream:
                had_text |= self._feed_lines(piece)
            elif not self._skipping:
                self._keep(piece, _LONGEST_WHOLE)
        return had_text

    def finish(self) -> Answer:
        """What was answered, after the last byte. Raises ``ValueError`` where it is no JSON."""
        if self.stream or self._skipping or not self.readable:
            self.answer.whole = self.answer.whole and self.stream and self.readable
        elif self._kept:
            self.answer.take(json.loads(self._kept))
        self._kept = bytearray()
        return self.answer

    def _unpacked(self, data: bytes) -> Iterator[bytes]:
        if self._unpack is None:
            yield data
            return
        self._may_unpack += _MOST_UNPACKED * len(data)
        while data:  # In pieces, since a few bytes can stand for very many.
            piece = self._unpack.decompress(data, _UNPACKED_AT_ONCE)
            self._may_unpack -= len(piece)
            if self._may_unpack < 0:
                raise ValueError("the answer unpacks to very much")
            yield piece
            data = self._unpack.unconsumed_tail

    def _feed_lines(self, data: bytes) -> bool:
        had_text = False
        *lines, rest = data.split(b"\n")
        for line in lines:
            if not self._skipping:
                had_text |= self._take_line(bytes(self._kept) + line if self._kept else line)
            self._kept.clear()
            self._skipping = False
        if not self._skipping:
            self._keep(rest, _LONGEST_LINE)
        return had_text

    def _keep(self, data: bytes, most: int) -> None:
        fits = len(self._kept) + len(data) <= most
        # A line is given up again at its end, so only whole answers count for all room.
        if fits and (self.stream or self._take_room(len(data))):
            self._kept += data
        else:
            self._kept.clear()
            self._skipping, self.answer.whole = True, False

    def _take_line(self, line: bytes) -> bool:
        field, _, value = line.strip().partition(b":")
        if field == b"error":  # llama-server has had errors in a field of their own.
            self.answer.failed = True
        if field != b"data":
            return False
        if value.strip() == b"[DONE]":
            self.answer.ended = True
            return False
        event: Any = json.loads(value)
        return self.answer.take(event)
