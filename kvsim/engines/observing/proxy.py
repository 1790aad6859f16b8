"""The proxy: an ASGI application that passes each request on to one server, and its answer back, piece by piece.

What passes is unchanged but for headers that are of one connection only (RFC 9110, section 7.6.1). Nothing is held
back: a piece goes on before it is looked at. Redirects and cookies are the client's matter, so the transport of httpx
is used and not its client.

Each request has a connection of its own to the server. llama-server closes one after a stream without having said so,
and a request that is sent on it just then has no answer: of 150 streams that a client asked for directly, one after the
other on a connection that it kept, 50 failed so. Through here none does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import httpx
from starlette.responses import JSONResponse

from kvsim.engines.live.address import Address, is_loopback
from kvsim.engines.observing.observer import Observer
from kvsim.engines.observing.prompts import RECORDED
from kvsim.engines.observing.watch import End, Watch

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]

_CONNECT_S = 30.0
_OF_A_CONNECTION = frozenset(
    {
        b"connection",
        b"expect",  # The ASGI server has answered it.
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class _ClientGone(Exception):
    """The client hung up before it had sent its request in full."""


class Proxy:
    """Passes requests on to ``upstream`` and shows them to ``observer``. An ASGI application."""

    def __init__(self, upstream: Address, observer: Observer):
        self._url = httpx.URL(upstream.url)
        self._upstream = upstream
        self._observer = observer
        # Settings of this user such as http_proxy would have others contacted.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits, retries=0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path: bytes = scope["raw_path"]
        watch = None
        if scope["method"] == "POST" and path.decode("latin-1") in RECORDED:
            watch = self._observer.watch(path.decode("latin-1"))
        else:
            self._observer.summary.passed_on += 1
        if not path.startswith(b"/") and path != b"*":  # A whole URL would ask the server to be a proxy to others.
            await _refuse(scope, receive, send, 400, "the target of a request has to begin with a slash")
            return
        end: End = "failed"
        try:
            end = await self._pass_on(scope, receive, send, watch)
        except asyncio.CancelledError:
            end = "cancelled"  # The proxy itself ends.
            raise
        except Exception as e:
            self._observer.fault(f"a request could not be passed on ({type(e).__name__})")
            raise
        finally:
            if watch is not None:
                watch.ended(end)
                self._observer.done(watch)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, watch: Watch | None) -> End:
        """Pass a request on until it is answered or the client hangs up, and say which."""
        body = _Body(receive, watch)
        request = self._request(scope, body)
        exchange = asyncio.create_task(self._exchange(request, scope, receive, send, body, watch))
        gone = asyncio.create_task(body.client_gone())
        try:
            await asyncio.wait({exchange, gone}, return_when=asyncio.FIRST_COMPLETED)
            # After the last piece, the ASGI server says that the client has gone, whether it has or not.
            return await exchange if exchange.done() or body.answered else "cancelled"
        finally:
            for task in (exchange, gone):
                task.cancel()
            # A cancelled exchange closes its connection, by which the server learns that the client has gone.
            await asyncio.gather(exchange, gone, return_exceptions=True)

    def _request(self, scope: Scope, body: _Body) -> httpx.Request:
        target: bytes = scope["raw_path"]
        if target.startswith(b"/"):
            target = self._url.raw_path.rstrip(b"/") + target
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = end_to_end(scope["headers"])
        if not is_loopback(self._url.host):
            # Servers elsewhere may serve several hosts. Those here may refuse web pages by the name that they use.
            headers = [(name, value) for name, value in headers if name != b"host"]
        if not any(name == b"host" for name, _ in headers):
            headers.insert(0, (b"host", self._url.netloc))
        chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        if chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        timeouts = {"connect": _CONNECT_S, "read": None, "write": None, "pool": None}
        has_body = chunked or any(name == b"content-length" for name, _ in headers)
        if not has_body:
            body.leave()
        # The target goes out as it came; a URL would be written anew.
        return httpx.Request(
            scope["method"],
            self._url,
            headers=headers,
            stream=body if has_body else httpx.ByteStream(b""),
            extensions={"timeout": timeouts, "target": target},
        )

    async def _exchange(
        self, request: httpx.Request, scope: Scope, receive: Receive, send: Send, body: _Body, watch: Watch | None
    ) -> End:
        try:
            answer = await self._transport.handle_async_request(request)
        except _ClientGone:
            return "cancelled"
        except httpx.TransportError as e:
            reached = (
                "cannot be reached" if isinstance(e, httpx.ConnectError | httpx.ConnectTimeout) else "gave no answer"
            )
            await _refuse(scope, receive, send, 502, f"the server {self._upstream} {reached} ({type(e).__name__})")
            return "failed"
        body.leave()
        try:
            return await self._answer(answer, send, body, watch)
        finally:
            await answer.aclose()

    async def _answer(self, answer: httpx.Response, send: Send, body: _Body, watch: Watch | None) -> End:
        headers = end_to_end(answer.headers.raw)
        if watch is not None:
            content_type, encoding = answer.headers.get("content-type", ""), answer.headers.get("content-encoding", "")
            watch.answered(answer.status_code, content_type, encoding)
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        try:
            async for piece in answer.stream:
                came = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if watch is not None:
                    watch.received(piece, came)
        except httpx.TransportError:
            return "failed"  # Without a last piece, the ASGI server closes the connection: the client sees it broken.
        body.answered = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "completed"


class _Body(httpx.AsyncByteStream):
    """The body of a request as it comes from the client, and after it the news that the client has gone."""

    def __init__(self, receive: Receive, watch: Watch | None):
        self._receive = receive
        self._watch = watch
        self._left = asyncio.Event()
        self.answered = False
        """Whether the answer has passed in full."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            more = message.get("more_body", False)
            data: bytes = message.get("body", b"")
            if data:
                yield data
                if self._watch is not None:
                    self._watch.sent(data)
        self.leave()

    def leave(self) -> None:
        """Say that no more of the body is wanted."""
        self._left.set()

    async def client_gone(self) -> None:
        """Wait until the client hangs up; what it still sends is thrown away."""
        await self._left.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Headers without those that are of one connection only."""
    named = {
        name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")
    }
    keys = {key.lower() for key, _ in headers}
    # Of two lengths, that of the chunks counts (RFC 9112, section 6.3).
    dropped = _OF_A_CONNECTION | named | ({b"content-length"} if b"transfer-encoding" in keys else set())
    return [(key, value) for key, value in headers if key.lower() not in dropped]


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, why: str) -> None:
    """Answer in the form of OpenAI's errors."""
    kind = "invalid_request_error" if status < 500 else "bad_gateway"
    error = {"message": f"kvsim observe: {why}", "type": kind, "param": None, "code": status}
    await JSONResponse({"error": error}, status)(scope, receive, send)
