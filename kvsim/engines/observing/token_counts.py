"""How many tokens a text has: as the server's ``/tokenize`` counts, or by an estimate.

llama-server's takes ``content``, vLLM's ``prompt`` or, for a chat, ``messages``, to which it applies the template;
each ignores what it does not know, so one request does for both. What llama-server counts of a chat is its canonical
text, without what its template adds to each message.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import httpx

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import ServerFault, fetch, http_options

Counted = Literal["server", "tokenizer", "estimate"]
"""How tokens were counted, the surest first: by the server in its answer, by its tokenizer later, or by an estimate."""
COUNTED: tuple[Counted, ...] = ("server", "tokenizer", "estimate")

_BYTES_PER_TOKEN = 4
"""About what English text has with today's vocabularies."""
_WITHIN_S = 5.0
LONGEST_TEXT = 1 << 20
"""Bytes of a text that a tokenizer is asked about."""
_MOST_TOKENS = 10**9
_PAUSE_S = 30.0
"""For how long a server that failed to count is not asked again."""


def estimated(n_bytes: int) -> int:
    """Tokens that a text of this many bytes may have: at least one, but of no text none."""
    return max(1, round(n_bytes / _BYTES_PER_TOKEN)) if n_bytes else 0


class Tokenizer:
    """The server's own count of a text's tokens, where it has one and wants no key. Not to be used by two threads."""

    def __init__(self, upstream: Address):
        self._client = httpx.Client(**http_options(upstream))
        self._not_before = 0.0

    def count(
        self, text: bytes | bytearray, *, model: str | None, messages: Any = None, answer: bool = False
    ) -> int | None:
        """Tokens of a text, or of a chat if ``messages`` are given; None if the server does not say.

        An ``answer`` has no tokens that mark a beginning.
        """
        if len(text) > LONGEST_TEXT or time.monotonic() < self._not_before:
            return None
        words = text.replace(b"\0", b"\n").decode("utf-8", "replace")
        asked: dict[str, Any] = {"content": words, "add_special": not answer, "add_special_tokens": not answer}
        if messages is not None:  # The template has the marks already.
            asked |= {"messages": messages, "add_special_tokens": False}
        else:
            asked |= {"prompt": words}
        asked |= {"model": model} if model is not None else {}
        try:
            told = fetch(self._client, "POST", "/tokenize", json=asked, within_s=_WITHIN_S)
        except (ServerFault, ValueError):
            self._not_before = time.monotonic() + _PAUSE_S
            return None
        if told.status != httpx.codes.OK:
            refused = told.status in (401, 403, 404, 405, 501)  # There is none, or none without a key.
            self._not_before = float("inf") if refused else time.monotonic() + _PAUSE_S
            return None
        return _count_in(told.content)

    def close(self) -> None:
        """Close connections."""
        self._client.close()


def _count_in(answer: bytes) -> int | None:
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    count, tokens = told.get("count"), told.get("tokens")
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_TOKENS:
        return count
    return len(tokens) if isinstance(tokens, list) else None
