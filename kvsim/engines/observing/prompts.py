"""What a request asks: its prompt in one canonical form, however it is spelt as JSON, and the few settings that count.

The canonical text of a chat is its messages one after the other: the role, a NUL, the content, a NUL. Parts of a
content that are text are put together; others (images, calls of tools) stand there as JSON with sorted keys. Tools
come first. Of a completion it is the prompt itself. It is not what the model reads, since the server's template is not
known, but two prompts that begin alike for one begin alike for the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT = frozenset({"/v1/chat/completions", "/chat/completions"})
"""Paths of requests with messages."""
INFILL = frozenset({"/infill"})
"""Paths of requests for what comes between two texts."""
RECORDED = CHAT | INFILL | {"/v1/completions", "/completions", "/completion"}
"""Paths of the requests that are recorded; all others, ``/v1/responses`` among them, are only passed on."""

_FIRST = ("tools", "functions", "system")
"""Fields that templates put before the messages."""
_OF_A_MESSAGE = ("name", "tool_call_id", "function_call")
"""Further fields of a message that a template may show."""
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_INFILL = ("input_prefix", "input_suffix", "prompt")


@dataclass(frozen=True)
class Prompt:
    """What a request asks. Neither text nor ids are to be shown in messages, so they are left out of ``repr``."""

    text: bytes = field(repr=False)
    """The canonical text; of a prompt of token ids, empty."""
    ids: tuple[int, ...] | None = field(default=None, repr=False)
    """Token ids, where the prompt was given so."""
    chat: bool = False
    messages: Any = field(default=None, repr=False)
    """A chat's messages as they were given."""
    continues: bool = True
    """Whether the next prompt may go on from this one and its answer: there is one prompt, and one answer to it."""
    max_tokens: int | None = None
    stream: bool = False
    model: str | None = field(default=None, repr=False)


def read_prompt(path: str, body: bytes | bytearray) -> Prompt:
    """What the body of a request to this path asks. Raises ``ValueError`` where it is no JSON object."""
    asked = json.loads(body)
    if not isinstance(asked, dict):
        raise ValueError("the body is no JSON object")
    limit = next((asked[key] for key in _LIMITS if _is_count(asked.get(key))), None)
    one = asked.get("n") in (None, 1)
    model = asked.get("model")
    settings: dict[str, Any] = {
        "max_tokens": limit,
        "stream": asked.get("stream") is True,
        "model": model if isinstance(model, str) else None,
    }
    if path in CHAT:
        messages = asked.get("messages")
        return Prompt(_chat_text(asked), chat=True, messages=messages, continues=one, **settings)
    if path in INFILL:
        return Prompt(_infill_text(asked), continues=False, **settings)
    given = asked.get("prompt", "")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, list) and all(_is_id(token) for token in given):
        return Prompt(b"", ids=tuple(given), continues=one, **settings)
    if isinstance(given, str):
        return Prompt(encoded(given), continues=one, **settings)
    return Prompt(canonical(given), continues=False, **settings)  # Several prompts, or ids and text mixed.


def canonical(value: Any) -> bytes:
    """A value as JSON that does not depend on the order of its keys or on spaces."""
    return encoded(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def encoded(text: str) -> bytes:
    """Text in UTF-8; halves of surrogate pairs, which JSON can spell, are kept as they are."""
    return text.encode("utf-8", "surrogatepass")


def message_text(role: Any, content: bytes | bytearray, calls: Any = None) -> bytes:
    """A message in canonical form. ``content`` is its text already; ``calls`` are calls of tools."""
    name = encoded(role) if isinstance(role, str) else canonical(role)
    return b"".join((name, b"\0", content, _calls_text(calls), b"\0"))


def _chat_text(asked: dict[str, Any]) -> bytes:
    pieces = [b"%b\0%b\0" % (key.encode(), canonical(asked[key])) for key in _FIRST if asked.get(key)]
    messages = asked.get("messages")
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict):
            pieces.append(canonical(message) + b"\0")
            continue
        content = _content_text(message.get("content"))
        more = {key: message[key] for key in _OF_A_MESSAGE if message.get(key) is not None}
        content += canonical(more) if more else b""
        pieces.append(message_text(message.get("role"), content, message.get("tool_calls")))
    return b"".join(pieces)


def _content_text(content: Any) -> bytes:
    if content is None:
        return b""
    parts = content if isinstance(content, list) else [content]
    return b"".join(_part_text(part) for part in parts)


def _part_text(part: Any) -> bytes:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return encoded(part["text"])
    return encoded(part) if isinstance(part, str) else canonical(part)


def _calls_text(calls: Any) -> bytes:
    """Calls of tools by their id, name and arguments: other fields come and go on their way through a client."""
    if not calls:
        return b""
    if not isinstance(calls, list):
        return canonical(calls)
    return b"".join(canonical(_call(call)) for call in calls)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [call.get("id"), function.get("name"), function.get("arguments")]


def _infill_text(asked: dict[str, Any]) -> bytes:
    """Further files first, then what is before and after the gap, as llama-server puts them together."""
    extra = asked.get("input_extra")
    pieces = [canonical(extra) if extra else b"", *(_content_text(asked.get(key)) for key in _INFILL)]
    return b"".join(piece + b"\0" for piece in pieces)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_id(value) and value >= 0
