"""What a server answered: its text, its own counts of tokens and how it ended, read from a copy while it passes.

Three forms are read, as far as they are there: OpenAI's chat and completion with ``usage``, and llama-server's own,
whose last event has ``timings`` (``cache_n`` tokens of the prompt found in the cache, ``prompt_n`` others,
``predicted_n`` generated) and ``tokens_evaluated``. llama-server's ``tokens_cached`` is no count of tokens found in a
cache but of those in there at the end, so it is not used. Memory is bounded however long an answer gets.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from kvsim.engines.live.schema import MOST_TOKENS
from kvsim.engines.observing.prompts import encoded

Api = Literal["llama-server", "openai"]

_WORD = re.compile(r"[a-z_]{1,32}")
_STOP_TYPES = {"eos": "stop", "word": "stop", "limit": "length"}
_LONGEST_NAME = 200
_ID_BYTES = 40
"""What a token id takes in a list."""
_MOST_CALLS = 128
"""Calls of tools in an answer that are put together from the pieces of a stream."""
_LONGEST_LINE = 1 << 20
"""Bytes of a line of a stream; a longer one is not read."""
_LONGEST_WHOLE = 8 << 20
"""Bytes of an answer that is no stream; a longer one is not read."""
_UNPACKED_AT_ONCE = 1 << 16
_MOST_UNPACKED = 200
"""Times as many bytes as came packed: more than text becomes, less than what is made to keep a reader busy."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass
class Answer:
    """What is known of an answer so far. Counts are the server's; None where it has not told."""

    take_room: Callable[[int], bool] = field(repr=False, default=lambda n: True)
    """Asked before this many bytes more are kept; where it says no, they are not."""
    text: bytearray = field(default_factory=bytearray, repr=False)
    """The answer's text, without what the model thought before: clients do not send that back."""
    ids: list[int] = field(default_factory=list, repr=False)
    """Token ids, where the server gives them."""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)
    """Calls of tools."""
    role: str = "assistant"
    whole: bool = True
    """Whether all text could be kept."""
    text_events: int = 0
    """Events of a stream that had text of any kind."""
    bytes_of_text: int = 0
    """Bytes of text of all kinds, thoughts and calls included."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    ended: bool = False
    """Whether the server has said that this is the end."""
    failed: bool = False
    """Whether the server has said that it failed."""
    api: Api | None = None
    model: str | None = None

    def take(self, event: Any) -> bool:
        """Add an event of a stream, or a whole answer, as parsed JSON; say whether it had text."""
        if not isinstance(event, dict):
            return False
        before = self.bytes_of_text
        self.failed |= bool(event.get("error"))
        choices = event.get("choices")
        if isinstance(choices, list):
            self.api = self.api or "openai"
            for choice in choices:
                if isinstance(choice, dict):
                    self._take_choice(choice)
        elif "content" in event:
            self._take_own_form(event)
        self._take_counts(event)
        self.model = self.model or _model_name(event.get("model"))
        had_text = self.bytes_of_text > before
        self.text_events += had_text
        return had_text

    def _take_choice(self, choice: dict[str, Any]) -> None:
        message = _object(choice.get("delta", choice.get("message")))
        first = choice.get("index") in (0, None)
        self._add_text(choice.get("text"), kept=first)
        self._add_text(message.get("content"), kept=first)
        for thoughts in ("reasoning_content", "reasoning"):
            self._add_text(message.get(thoughts), kept=False)
        calls = message.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._add_call(call, position, kept=first)
        if first:
            self._add_ids(choice.get("token_ids"))
            self._end(choice.get("finish_reason"))

    def _take_own_form(self, event: dict[str, Any]) -> None:
        """Take an answer in llama-server's own form."""
        self._add_text(event["content"], kept=True)
        self._add_ids(event.get("tokens"))
        if event.get("stop") is True:
            self.ended = True
            limit = "limit" if event.get("stopped_limit") else None  # As it was said before there were types.
            stop_type = event.get("stop_type", limit)
            self._end(_STOP_TYPES.get(stop_type) if isinstance(stop_type, str) else "stop")

    def _take_counts(self, event: dict[str, Any]) -> None:
        timings, usage = _object(event.get("timings")), _object(event.get("usage"))
        if "timings" in event:
            self.api = "llama-server"
        found, others = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
        both = None if found is None or others is None else found + others
        counts = {
            # The last of them that is there counts.
            "prompt_tokens": (both, event.get("tokens_evaluated"), usage.get("prompt_tokens")),
            "output_tokens": (
                timings.get("predicted_n"),
                event.get("tokens_predicted"),
                usage.get("completion_tokens"),
            ),
            "cached_tokens": (
                None if both is None else found,
                _object(usage.get("prompt_tokens_details")).get("cached_tokens"),
            ),
        }
        for name, told in counts.items():
            for count in map(_count, told):
                if count is not None:
                    setattr(self, name, count)

    def _add_text(self, text: Any, *, kept: bool) -> None:
        if not isinstance(text, str) or not text:
            return
        added = encoded(text)
        self.bytes_of_text += len(added)
        if kept and self.whole:
            self.whole = self.take_room(len(added))
            if self.whole:
                self.text += added

    def _add_call(self, call: dict[str, Any], position: int, *, kept: bool) -> None:
        """Add a call, or a piece of one: in a stream, its arguments come bit by bit."""
        given = _object(call.get("function"))
        pieces = {key: value for key in ("name", "arguments") if isinstance(value := given.get(key), str)}
        size = sum(len(encoded(piece)) for piece in pieces.values())
        self.bytes_of_text += size
        at = call.get("index", position)
        if not kept or not self.whole or not isinstance(at, int):
            return
        self.whole = (at in self.calls or len(self.calls) < _MOST_CALLS) and self.take_room(size)
        if self.whole:
            known = self.calls.setdefault(at, {"id": None, "name": [], "arguments": []})
            known["id"] = known["id"] or call.get("id")
            for key, piece in pieces.items():
                known[key].append(piece)

    def _add_ids(self, ids: Any) -> None:
        if isinstance(ids, list) and ids and all(_count(token) is not None for token in ids):
            self.whole = self.whole and self.take_room(_ID_BYTES * len(ids))
            if self.whole:
                self.ids += ids

    def _end(self, reason: Any) -> None:
        if isinstance(reason, str) and _WORD.fullmatch(reason):
            self.finish = reason

    @property
    def all_ids(self) -> bool:
        """Whether the ids are the whole answer: llama-server leaves out tokens that are a part of a letter."""
        return bool(self.ids) and len(self.ids) >= (self.output_tokens or 0) - 1  # The last may end the text.

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools as a client sends them back."""
        return [
            {"id": call["id"], "function": {"name": "".join(call["name"]), "arguments": "".join(call["arguments"])}}
            for _, call in sorted(self.calls.items())
        ]


def is_stream(content_type: str) -> bool:
    """Whether an answer of this type is a stream of events."""
    return content_type.lower().startswith("text/event-stream")


def _model_name(told: Any) -> str | None:
    """A model's name without the folder that it is in, which may bear a user's name; None if it is no name."""
    if not isinstance(told, str) or len(told) > _LONGEST_NAME or not told.isprintable():
        return None
    is_file = told.lower().endswith(".gguf") or told.startswith(("/", "~", ".")) or "\\" in told
    return (re.split(r"[/\\]", told.rstrip("/\\"))[-1] if is_file else told) or None


def _count(value: Any) -> int | None:
    """A number of tokens; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None


def _object(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one for all else."""
    return value if isinstance(value, dict) else {}


class AnswerReader:
    """Reads the bytes of one answer as they come.

    ``take_room`` is asked before bytes are kept; where it says no, the answer's text is not known in the end.
    Raises ``ValueError`` or ``zlib.error`` from ``feed`` where the answer is not what its headers say.
    """

    def __init__(self, content_type: str, encoding: str, take_room: Callable[[int], bool]):
        self.answer = Answer(take_room)
        self.stream = is_stream(content_type)
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
        return self.answer.take(_parsed(value))


def _parsed(data: bytes) -> Any:
    """What JSON says, four times as fast as ``json`` does it. Raises ``ValueError``."""
    try:
        return from_json(data)
    except ValueError:  # Also for halves of surrogate pairs, which ``json`` takes.
        return json.loads(data)
