"""Asking a server over HTTP, and noting when each token of an answer came.

Two kinds of servers are known: llama-server, by its own ``/completion``, and every server that speaks OpenAI's
``/v1/completions`` (vLLM among them). Both take prompts of token ids; one that does not is asked with text.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import (
    WITHIN_S,
    Deadline,
    Fetched,
    ServerFault,
    about_key,
    check_unpacked,
    fetch_async,
    http_options,
    unreachable,
    words_of,
)
from kvsim.engines.live.schema import LlamaEvent, OpenAiEvent, Tokenized, is_json, message_of, read_said

Api = Literal["llama-server", "openai"]
"""How a server is asked."""

_MOST_OF_EVENT = 1 << 20
"""Bytes of one event of a stream, at most: llama-server's last one repeats its prompt."""
_EVENTS, _EVENTS_PER_TOKEN = 1000, 4
"""Events of a stream, at most, and how many more for each token that was asked for."""
_MOST_OF_REFUSAL = 1 << 16
TIME_OVER = "the time was over"
"""``Answer.error`` of one that a deadline has cut."""
_FORCED = 1000.0
"""A bias that makes a token certain."""


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
    retry_after_s: float | None = None
    """Seconds after which to ask again, as a server says it that refused for now."""
    tries: int = 1
    """How often the request was sent; the answer is that to the last time."""

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

    def __init__(
        self,
        address: Address,
        api: Api,
        model: str | None,
        *,
        key: str | None = None,
        timeout_s: float = 60,
        deadline: Deadline | None = None,
    ):
        """``model``: the name that the server wants to be asked for; ``timeout_s``: the longest silence; ``deadline``:
        when every answer is cut.
        """
        self.address, self.api, self.model, self.key, self.deadline = address, api, model, key, deadline
        self._http = httpx.AsyncClient(
            **http_options(address, key),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10)),
            # llama-server closes a connection after a stream without saying so: none is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
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
            async with (
                asyncio.timeout(None if self.deadline is None else self.deadline.left_s),
                self._http.stream("POST", path, json=body) as response,
            ):
                answer.status, answer.headers_s = response.status_code, time.monotonic() - clock
                check_unpacked(self.address, response)
                if response.status_code != httpx.codes.OK:
                    answer.error = await self._refusal(response)
                    answer.retry_after_s = _retry_after_s(response)
                else:
                    await self._read(response, request, answer, clock, watch)
        except httpx.ConnectError as e:
            raise unreachable(self.address, e) from None
        except TimeoutError:
            answer.error, answer.timed_out = TIME_OVER, True
        except httpx.TimeoutException:
            answer.error, answer.timed_out = f"no answer for {self._http.timeout.read:g} s", True
        except httpx.TransportError as e:
            answer.error = f"the connection broke off: {words_of(e)}"
        answer.done_s = time.monotonic() - clock
        answer.output_tokens = answer.output_tokens or len(answer.token_s)
        return answer

    async def fetch(self, method: str, path: str, body: Any = None) -> Fetched:
        """An answer that is no stream, until the deadline at most. Raises ``ServerFault``."""
        left_s = WITHIN_S if self.deadline is None else self.deadline.left_s
        if left_s == 0:
            raise ServerFault(TIME_OVER)
        return await fetch_async(self._http, method, path, json=body, within_s=min(WITHIN_S, left_s))

    async def tokenize(self, text: str) -> list[int] | None:
        """The tokens of a text; None if the server does not say. Raises ``ServerFault``."""
        body: dict[str, Any] = {"content": text, "add_special": False}
        if self.api == "openai":
            body = {"prompt": text, "add_special_tokens": False}
            if self.model is not None:
                body["model"] = self.model
        said = await self.fetch("POST", "/tokenize", body)
        if said.status != httpx.codes.OK or not is_json(said.content):
            return None
        try:
            return read_said(Tokenized, said.content).tokens
        except ValueError as e:
            raise ServerFault(f"{self.address}/tokenize: {e}") from None

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

    async def _refusal(self, response: httpx.Response) -> str:
        """The server's reason in a line. Raises ``ServerFault`` if it wants a key."""
        status, said = response.status_code, b""
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServerFault(f"{self.address}: {about_key(self._http.headers, status)}")
        async for piece in response.aiter_raw():
            said += piece
            if len(said) > _MOST_OF_REFUSAL:
                break
        return f"HTTP {status}: {message_of(said[:_MOST_OF_REFUSAL])}"

    async def _read(
        self,
        response: httpx.Response,
        request: CompletionRequest,
        answer: Answer,
        clock: float,
        watch: Callable[[Answer], None] | None,
    ) -> None:
        """Take in a stream of events, up to the one that ends it."""
        kind = response.headers.get("content-type", "nothing")
        if not kind.startswith("text/event-stream"):
            answer.error = f"answered by {kind[:80]}, not by a stream of events"
            return
        ended, seen = False, 0
        async for event in _events(response, _EVENTS + _EVENTS_PER_TOKEN * request.output_tokens):
            now = time.monotonic() - clock
            if event == "[DONE]":
                ended = True
                continue
            try:
                tokens, ends = self._take(event, answer, seen)
            except ValueError as e:
                answer.error = answer.error or f"an event that is not of {self.api}: {e}"
                return
            seen += tokens
            if seen > request.output_tokens:
                answer.error = f"says that it made {seen:,} tokens where {request.output_tokens:,} were asked for"
                return
            answer.token_s += [now] * tokens
            ended = ended or ends
            if watch is not None and tokens:
                watch(answer)
        if not ended:
            answer.error = "the answer was cut off"

    def _take(self, event: str, answer: Answer, seen: int) -> tuple[int, bool]:
        """Note what an event says; how many tokens came with it, and whether it is the last one. Raises ``ValueError``,
        with the server's own error in ``Answer.error`` if it says one.
        """
        said: LlamaEvent | OpenAiEvent
        said = read_said(LlamaEvent, event) if self.api == "llama-server" else read_said(OpenAiEvent, event)
        if said.error is not None:
            answer.error = message_of(event)
            raise ValueError(answer.error)
        return _take_llama(said, answer, seen) if isinstance(said, LlamaEvent) else _take_openai(said, answer, seen)


def _retry_after_s(response: httpx.Response) -> float | None:
    """When a server that is overloaded wants to be asked again (RFC 9110, 10.2.3); None if it does not say."""
    said = response.headers.get("retry-after", "").strip()
    if response.status_code not in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return None
    if re.fullmatch(r"\d{1,9}", said, re.ASCII):
        return float(said)
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _take_llama(said: LlamaEvent, answer: Answer, seen: int) -> tuple[int, bool]:
    if said.stop is None:
        raise ValueError("no stop in it")
    if said.stop:
        if said.tokens_evaluated is None or said.tokens_predicted is None:
            raise ValueError("no tokens_evaluated or tokens_predicted at its end")
        answer.result = said.model_dump(exclude_none=True, exclude={"error", "content", "tokens", "stop"})
        answer.prompt_tokens, answer.output_tokens = said.tokens_evaluated, said.tokens_predicted
        answer.cached_tokens = None if said.timings is None else said.timings.cache_n
        return 0, True
    answer.output += said.tokens
    answer.text += said.content
    if said.tokens_evaluated:
        answer.prompt_tokens = said.tokens_evaluated
    return 1 if said.tokens_predicted is None else max(0, said.tokens_predicted - seen), False


def _take_openai(said: OpenAiEvent, answer: Answer, seen: int) -> tuple[int, bool]:
    ids, text = (said.choices[0].token_ids or [], said.choices[0].text or "") if said.choices else ([], "")
    answer.output += ids
    answer.text += text
    if said.usage is None:
        return len(ids) or int(bool(text)), False
    answer.prompt_tokens, answer.output_tokens = said.usage.prompt_tokens, said.usage.completion_tokens or 0
    if said.usage.prompt_tokens_details is not None and said.usage.prompt_tokens_details.cached_tokens is not None:
        answer.cached_tokens = said.usage.prompt_tokens_details.cached_tokens
    return max(0, answer.output_tokens - seen), False


async def _events(response: httpx.Response, most: int) -> AsyncIterator[str]:
    """The data of each server-sent event of an answer, which may be cut anywhere by the pieces it comes in.

    ``most``: events, comments among them, before the stream is given up.
    """
    rest = b""
    async for piece in response.aiter_raw():
        *events, rest = (rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        most -= len(events)
        if len(rest) > _MOST_OF_EVENT:
            raise httpx.RemoteProtocolError(f"an event of more than {_MOST_OF_EVENT:,} bytes")
        if most < 0:
            raise httpx.RemoteProtocolError("more events than its tokens can take")
        for event in events:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"".join(data).decode("utf-8", "replace")
            elif event.startswith(b"error:"):
                yield json.dumps({"error": event[6:].decode("utf-8", "replace").strip()})
