"""Asking a server over HTTP, and noting when each token of an answer came.

Two kinds of servers are known: llama-server, by its own ``/completion``, and every server that speaks OpenAI's
``/v1/completions`` (vLLM among them). Both take prompts of token ids; one that does not is asked with text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from kvsim.engines.live.address import Address
from kvsim.errors import UserError

Api = Literal["llama-server", "openai"]
"""How a server is asked."""

_MAX_EVENT = 1 << 24
"""The most bytes of one event of a stream."""
_FORCED = 1000.0
"""A bias that makes a token certain."""


class ServerFault(UserError):
    """A server did not do what was asked. The message is one line with its address."""

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(message)
        self.gone = gone
        """Whether it cannot be reached at all, so that asking it again now is of no use."""


@dataclass(frozen=True)
class CompletionRequest:
    """What a server is asked: to go on from a prompt for a number of tokens, whatever they are."""

    prompt: tuple[int, ...] | str
    """Token ids, or text for servers that take no ids."""
    output_tokens: int
    answer: int | None = None
    """The token that the answer shall consist of, where the server can be made to; None: whatever it generates."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body."""


@dataclass
class Answer:
    """What came back; times in seconds on the client's clock."""

    sent_s: float
    headers_s: float | None = None
    """When the status line came."""
    token_s: list[float] = field(default_factory=list)
    """When each token came; tokens that came in one event have the same time."""
    done_s: float = 0.0
    status: int | None = None
    prompt_tokens: int | None = None
    """Tokens of the prompt, by the server's count."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in a cache; None if the server does not say."""
    output: list[int] = field(default_factory=list)
    """Token ids of the answer, where the server gives them."""
    text: str = ""
    """The answer in words."""
    output_tokens: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    """What llama-server says at the end, ``timings`` among it; empty of others."""
    error: str | None = None
    """Why it failed, in the server's words or ours; None if it was answered in full."""
    timed_out: bool = False
    """Whether it failed since nothing came for too long."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two."""
        n = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (n - 1) if n > 1 else None

    @property
    def e2e_s(self) -> float:
        """Seconds until the end."""
        return self.done_s - self.sent_s


class Client:
    """A client of one server. An asynchronous context manager; a request has a connection of its own."""

    def __init__(self, address: Address, api: Api, model: str | None, *, key: str | None = None, timeout_s: float = 60):
        """``model``: the name that the server wants to be asked for; ``timeout_s``: the longest silence."""
        self.address, self.api, self.model = address, api, model
        self._http = httpx.AsyncClient(
            **http_options(address, key),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(None, None, None)

    async def ask(
        self, request: CompletionRequest, clock: float = 0.0, watch: Callable[[Answer], None] | None = None
    ) -> Answer:
        """Send a request and wait for the end of the answer; times are seconds since ``clock`` (``monotonic``).

        ``watch`` is called with what has come so far whenever there are further tokens.
        What goes wrong with the one request is in ``Answer.error``. Raises ``ServerFault`` if the server is gone, or
        wants a key.
        """
        answer = Answer(time.monotonic() - clock)
        path, body = self._body(request)
        try:
            async with self._http.stream("POST", path, json=body) as response:
                answer.status, answer.headers_s = response.status_code, time.monotonic() - clock
                if response.status_code != httpx.codes.OK:
                    answer.error = self._refusal(response.status_code, await response.aread())
                else:
                    await self._read(response, answer, clock, watch)
        except httpx.ConnectError as e:
            raise unreachable(self.address, e) from None
        except httpx.TimeoutException:
            answer.error, answer.timed_out = f"no answer for {self._http.timeout.read:g} s", True
        except httpx.TransportError as e:
            answer.error = f"the connection broke off: {_words_of(e)}"
        answer.done_s = time.monotonic() - clock
        answer.output_tokens = answer.output_tokens or len(answer.token_s)
        return answer

    async def tokenize(self, text: str) -> list[int] | None:
        """The tokens of a text; None if the server does not say. Raises ``ServerFault`` if it is gone."""
        body: dict[str, Any] = {"content": text, "add_special": False}
        if self.api == "openai":
            body = {"prompt": text, "add_special_tokens": False}
            if self.model is not None:
                body["model"] = self.model
        try:
            response = await self._http.post("/tokenize", json=body)
            said = response.json() if response.status_code == httpx.codes.OK else None
        except httpx.ConnectError as e:
            raise unreachable(self.address, e) from None
        except (httpx.HTTPError, ValueError):
            return None
        tokens = said.get("tokens") if isinstance(said, dict) else None
        whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        return tokens if whole else None

    def _body(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True}
        if self.api == "llama-server":
            body |= {"n_predict": request.output_tokens, "return_tokens": True}
            if request.answer is not None:
                body["logit_bias"] = [[request.answer, _FORCED]]
            return "/completion", body | dict(request.params)
        # What vLLM knows beyond OpenAI's fields; others ignore it.
        told = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"max_tokens": request.output_tokens, "stream_options": told, "return_token_ids": True}
        if self.model is not None:
            body["model"] = self.model
        return "/v1/completions", body | dict(request.params)

    def _refusal(self, status: int, said: bytes) -> str:
        """The server's reason in a line. Raises ``ServerFault`` if it wants a key."""
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServerFault(f"{self.address}: {about_key(self._http.headers, status)}")
        return f"HTTP {status}: {_message_of(said)}"

    async def _read(
        self, response: httpx.Response, answer: Answer, clock: float, watch: Callable[[Answer], None] | None
    ) -> None:
        """Take in a stream of events, up to the one that ends it."""
        kind = response.headers.get("content-type", "nothing")
        if not kind.startswith("text/event-stream"):
            answer.error = f"answered by {kind[:80]}, not by a stream of events"
            return
        ended, seen = False, 0
        async for event in _events(response):
            now = time.monotonic() - clock
            if event == "[DONE]":
                ended = True
                continue
            try:
                said = json.loads(event)
                if not isinstance(said, dict):
                    raise ValueError("no object")
                if "error" in said:
                    answer.error = _message_of(event.encode())
                    return
                tokens, ends = self._take(said, answer, seen)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                answer.error = f"an event that is not of {self.api}: {event[:80]!r}"
                return
            answer.token_s += [now] * tokens
            seen += tokens
            ended = ended or ends
            if watch is not None and tokens:
                watch(answer)
        if not ended:
            answer.error = "the answer was cut off"

    def _take(self, said: dict[str, Any], answer: Answer, seen: int) -> tuple[int, bool]:
        """Note what an event says; how many tokens came with it, and whether it is the last one."""
        if self.api == "llama-server":
            if said["stop"]:
                answer.result = said
                answer.prompt_tokens, answer.output_tokens = said["tokens_evaluated"], said["tokens_predicted"]
                answer.cached_tokens = said.get("timings", {}).get("cache_n")
                return 0, True
            answer.output += said.get("tokens", [])
            answer.text += said.get("content", "")
            return said["tokens_predicted"] - seen if "tokens_predicted" in said else 1, False
        usage = said.get("usage") or {}
        choices = said.get("choices") or [{}]
        ids = choices[0].get("token_ids") or []
        answer.output += ids
        answer.text += choices[0].get("text") or ""
        if usage:
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage.get("completion_tokens", 0)
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", answer.cached_tokens)
            return max(0, answer.output_tokens - seen), False
        return len(ids) or int(bool(choices[0].get("text"))), False


def http_options(address: Address, key: str | None = None) -> dict[str, Any]:
    """Options of an httpx client that contacts this address alone: no proxy of the environment, no redirect."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"base_url": address.url, "headers": headers, "trust_env": False, "follow_redirects": False}


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event of an answer, which may be cut anywhere by the pieces it comes in."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = (rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(rest) > _MAX_EVENT:
            raise httpx.RemoteProtocolError(f"an event of more than {_MAX_EVENT} bytes")
        for event in events:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"".join(data).decode("utf-8", "replace")
            elif event.startswith(b"error:"):
                yield json.dumps({"error": event[6:].decode("utf-8", "replace").strip()})


def _message_of(said: bytes) -> str:
    """The reason in an error's body, in a line of at most 200 characters."""
    try:
        found = json.loads(said)
        for key in ("error", "message", "detail"):
            found = found.get(key, found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        text = said.decode("utf-8", "replace")
    return " ".join(text.split())[:200] or "no reason given"


def unreachable(address: Address, e: Exception) -> ServerFault:
    """The fault of a server that cannot be reached."""
    return ServerFault(f"{address}: cannot be reached: {_words_of(e)}", gone=True)


def about_key(headers: Mapping[str, str], status: int) -> str:
    """What to say where a server refuses for want of a key; ``headers``: those that it was asked with."""
    if "Authorization" in headers:
        return f"refuses the key that was given by --key-env (HTTP {status})"
    return f"wants a key (HTTP {status}); give it by --key-env NAME"


def _words_of(e: Exception) -> str:
    """What went wrong with a connection, in a line and without the system's number for it."""
    said = re.sub(r"\[Errno -?\d+\] ", "", " ".join(str(e).split()))
    return said[:1].lower() + said[1:] or type(e).__name__
