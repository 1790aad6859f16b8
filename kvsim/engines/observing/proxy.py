"""The proxy: for each connection of a client one to the server, between which bytes pass as they are.

Both directions are parsed beside the path, as far as it takes to know where requests and answers begin and end; what
they say goes to the observer, in a process of its own. A request goes on when its head is there in full and is one that
every server reads alike, since what could be taken for another request is refused. All else is the two ends' matter:
half-closed connections, redirects, cookies, other protocols after an ``Upgrade``.

Each request has a connection of its own to the server, unless it comes before the answer to the one before.
llama-server closes one after a stream without having said so, and a request that is sent on it just then has no answer:
of 150 streams that a client asked for directly, one after the other on a connection that it kept, 50 failed so. Through
here none does.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict, dataclass
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

from kvsim.engines.live.address import Address, is_loopback
from kvsim.engines.live.bounded import words_of
from kvsim.engines.observing import watch
from kvsim.engines.observing.answers import is_stream
from kvsim.engines.observing.handover import Handover, Kind
from kvsim.engines.observing.prompts import RECORDED
from kvsim.engines.observing.watch import Cause, End, Noted

HEAD_S = 30.0
"""How long a client may take for the head of a request."""
BODY_S = 600.0
"""How long it may take for the rest of it."""
IDLE_S = 75.0
"""For how long a connection may have no request: longer than clients keep theirs, so that none is closed in use."""
CONNECT_S = 30.0
LAG_S = 0.01
"""From which lag of the proxy's loop on the times of a request are distorted."""
_TICK_S = 0.02
SWEEP_S = 1.0
_LINGER_S = 2.0
"""How long a client that was refused may take to read why."""
_MOST_HEAD = 1 << 16
_NEVER = float("inf")
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Header Fields Too Large", 502: b"Bad Gateway"}
Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Exchange:
    """A request and its answer."""

    id: int | None
    """None: it is not recorded."""
    is_head: bool
    noted: Noted
    sent: bool = False
    """Whether the request has come in full."""
    begun: bool = False
    """Whether something of the answer has passed."""
    ended: bool = False


class Relay:
    """Passes requests on to ``upstream``, and tells ``handover`` of those that are recorded."""

    def __init__(self, upstream: Address, handover: Handover):
        self.upstream, self.handover = upstream, handover
        self.requests = self.passed_on = 0
        self.lag = 0.0
        """The most that the loop was late, since the last time it was not."""
        self.clients: set[Client] = set()
        to = urlsplit(upstream.url)
        self.host, self.port, self.tls = upstream.host, upstream.port, upstream.tls()
        self.at = self.host
        """The address at which it was reached, so that its name is looked up only once."""
        self.path = to.path.encode()
        # Servers elsewhere may serve several hosts. Those here may refuse web pages by the name that they use.
        self.name = None if is_loopback(self.host) else to.netloc.encode()
        self._running: dict[int, Noted] = {}
        """What is known so far of requests that are recorded."""
        self._due = _NEVER
        self._swept = 0.0

    def tick(self) -> None:
        """Send what waits, see how late this is, and drop clients that are too slow; again and again."""
        now = self.clock()
        self.lag = 0.0
        self.handover.flush()
        if now > self._swept + SWEEP_S:
            self._swept = now
            for client in [client for client in self.clients if client.deadline < now]:
                client.late()
        self._due = now + _TICK_S + LAG_S
        asyncio.get_running_loop().call_later(_TICK_S, self.tick)

    def clock(self) -> float:
        """The time; if the loop is late, that is noted of all requests before what has just happened."""
        now = time.monotonic()
        if now > self._due and (lag := now - self._due + LAG_S) > 1.5 * self.lag:
            self.lag = lag
            for noted in self._running.values():
                noted.lag = max(noted.lag, lag)
        return now

    def came(self, method: bytes, path: str) -> _Exchange:
        """Begin an exchange. ``path``: without the query, which is nobody's business."""
        now = self.clock()
        noted = Noted(path, now, self.lag)
        if method != b"POST" or path not in RECORDED:
            self.passed_on += 1
            return _Exchange(None, method == b"HEAD", noted)
        self._running[self.requests] = noted
        self.requests += 1
        return _Exchange(self.requests - 1, is_head=False, noted=noted)

    def rewritten(self, first: bytes, headers: Headers) -> bytes:
        """The head of a request to a server that has another name or path than the client took it for."""
        method, target, version = first.split(b" ")
        kept = [pair for pair in headers if pair[0].lower() not in (b"connection", b"host")]
        name = (b"Host", self.name or {key.lower(): value for key, value in headers}.get(b"host", b""))
        target = self.path + target if target.startswith(b"/") else target
        return _head(b" ".join((method, target, version)), [name, *kept, (b"Connection", b"close")])

    def end(self, exchange: _Exchange, end: End, cause: Cause | None = None) -> None:
        """Tell that an exchange has ended, the first time it does."""
        if exchange.id is not None and not exchange.ended:
            now, noted = self.clock(), self._running.pop(exchange.id)
            noted.end, noted.cause = end, cause
            self.handover.end(exchange.id, now, asdict(noted))
        exchange.ended = True


class _Side(asyncio.Protocol, ABC):
    """One of two connections. The other one waits while this one is full."""

    transport: asyncio.Transport | None = None
    full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)

    @abstractmethod
    def other(self) -> _Side | None:
        """The other one, if there is one."""

    def pause_writing(self) -> None:
        """Take no more."""
        self.full = True
        if (other := self.other()) is not None:
            other.read(False)

    def resume_writing(self) -> None:
        """Take more."""
        self.full = False
        if (other := self.other()) is not None:
            other.read(True)

    def read(self, on: bool) -> None:
        """Go on reading, or wait."""
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.resume_reading if on else self.transport.pause_reading)()


class Client(_Side):
    """A client's connection. Methods named ``on_...`` are called by the parser of its requests."""

    def __init__(self, relay: Relay):
        self.relay = relay
        self.deadline = relay.clock() + IDLE_S
        self.exchanges: deque[_Exchange] = deque()
        """Requests that are not done, with their answers, the oldest first."""
        self.server: Server | None = None
        self.raw = False
        """Whether both ends have changed to another protocol."""
        self._hung_up = False
        """Whether nothing more comes from the client; it may still want its answer."""
        self._held = b""
        """What came of a request whose head is not complete, or whose server is still being connected."""
        self.last = False
        """Whether one of the ends has said that this exchange is the last on its connection."""
        self._in_head = self._over = False
        self._refusal: tuple[int, str] | None = None
        self._parser = HttpRequestParser(self)
        self._connecting: asyncio.Task[None] | None = None

    def other(self) -> _Side | None:
        """The server."""
        return self.server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self.relay.clients.add(self)

    def data_received(self, data: bytes) -> None:
        """Look at what came, and pass it on."""
        now = self.relay.clock()
        if self._over:
            return
        if not self.raw:
            was_in_head, n_before = self._in_head, len(self.exchanges)
            self._parse(data)
            self._held += data
            if self._refusal is not None:
                self.refuse(*self._refusal)
            elif self._in_head:
                self.deadline = self.deadline if was_in_head else now + HEAD_S
                if len(self._held) > _MOST_HEAD:
                    self.refuse(431, "the head of a request is too long")
            elif not self.exchanges:
                self._held = b""  # Empty lines between requests.
            else:
                if not n_before and (self.relay.name or self.relay.path):
                    rest = self._held.partition(b"\r\n\r\n")[2]
                    self._held = self.relay.rewritten(self._first, self._headers) + rest
                self.deadline = _NEVER if self.exchanges[-1].sent else self.deadline
                self.pass_on()
        else:
            self._held += data
            self.pass_on()

    def pass_on(self) -> None:
        """Send on what is held, when there is a server."""
        to = None if self.server is None else self.server.transport
        if self.server is None:
            self.server = Server(self)
            self._connecting = asyncio.ensure_future(self._connect(self.server))
        elif to is None:
            if len(self._held) > _MOST_HEAD:
                self.read(False)
        elif not to.is_closing():
            if self._held:
                to.write(self._held)
                self._held = b""
            if self._hung_up and to.can_write_eof():
                to.write_eof()

    async def _connect(self, server: Server) -> None:
        relay, loop = self.relay, asyncio.get_running_loop()
        name = None if relay.tls is None else relay.host
        try:
            async with asyncio.timeout(CONNECT_S):
                made, _ = await loop.create_connection(
                    lambda: server, relay.at, relay.port, ssl=relay.tls, server_hostname=name
                )
            if relay.name is None:
                relay.at = made.get_extra_info("peername")[0]
        except OSError as e:  # TimeoutError is one.
            relay.at = relay.host
            cause: Cause = "timeout" if isinstance(e, TimeoutError) else "unreachable"
            self.refuse(502, f"the server {relay.upstream} cannot be reached: {words_of(e)}", cause)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as e:
            # The parser takes what follows for another protocol, which it is not before the server says so.
            self._parser = HttpRequestParser(self)
            kept = [pair for pair in self._headers if pair[0].lower() not in (b"connection", b"upgrade")]
            self._parse(_head(self._first, kept) + data[e.args[0] :])
        except HttpParserError:
            self._refusal = self._refusal or (400, "this is no request of HTTP/1 that all servers read alike")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        self._target = b""
        self._headers: Headers = []

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """A head is complete."""
        parser, method = self._parser, self._parser.get_method()
        self._first = b"%b %b HTTP/%b" % (method, self._target, parser.get_http_version().encode())
        if not self._target.startswith(b"/") and self._target != b"*":
            # A whole URL would ask the server to be a proxy to others.
            self._refusal = 400, "the target of a request has to begin with a slash"
        elif not parser.should_upgrade():  # Else it is parsed again.
            self._in_head = False
            self.exchanges.append(self.relay.came(method, self._target.partition(b"?")[0].decode("latin-1")))
            self.deadline = self.relay.clock() + BODY_S
            self.last |= not parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        if self._refusal is not None:
            return
        exchange = self.exchanges[-1]
        exchange.noted.body_bytes += len(data)
        if exchange.id is not None and exchange.noted.body_bytes <= watch.BODY_BYTES:
            self.relay.handover.text(Kind.SENT, exchange.id, 0.0, data)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self._in_head:
            self.exchanges[-1].sent = True

    def done(self) -> None:
        """Let go of exchanges that are done, and with the last of them of the connection to the server."""
        while self.exchanges and self.exchanges[0].sent and self.exchanges[0].ended:
            self.exchanges.popleft()
        if not self.exchanges and not self.raw and self.transport is not None:
            if self.server is not None:
                self.server.leave()
            self.deadline = self.relay.clock() + IDLE_S
            if self._hung_up or self.last:
                self.transport.close()

    def eof_received(self) -> bool:
        """The client sends no more: half-closed, or gone. Which of the two it is, the server has to guess as ever."""
        if not self.raw and (self._in_head or not self.exchanges or not self.exchanges[-1].sent):
            return False
        self._hung_up = True
        self.pass_on()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whomever."""
        self.relay.clients.discard(self)
        self._give_up("cancelled")

    def late(self) -> None:
        """The deadline is over."""
        if self._over or not (self._in_head or self.exchanges):
            self.close()
        else:
            self.refuse(408, "the request did not come in full in time", "timeout")

    def server_gone(self, *, whole: bool) -> None:
        """The server has closed its connection; ``whole``: by which it says that its answer ends here."""
        exchange = None if self.raw or not self.exchanges else self.exchanges[0]
        if exchange is None or exchange.ended or whole:
            if exchange is not None:
                self.relay.end(exchange, "completed")
            self.close()
        else:
            cause: Cause = "cut_short" if exchange.begun else "no_answer"
            self.refuse(502, f"the server {self.relay.upstream} gave no answer", cause)

    def refuse(self, status: int, why: str, cause: Cause | None = None) -> None:
        """Answer in the form of OpenAI's errors, and close the connection; only that if another answer has begun."""
        begun = bool(self.exchanges) and self.exchanges[0].begun
        self._give_up("cancelled" if self._hung_up and status == 502 else "failed", cause)
        if self.transport is None or self.transport.is_closing():
            return
        if begun:
            self.transport.close()
            return
        kind = "invalid_request_error" if status < 500 else "bad_gateway"
        error = {"message": f"kvsim observe: {why}", "type": kind, "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        length = (b"Content-Length", b"%d" % len(body))
        headers = [(b"Content-Type", b"application/json"), length, (b"Connection", b"close")]
        self.transport.write(_head(b"HTTP/1.1 %d %b" % (status, _REASONS[status]), headers) + body)
        self.transport.write_eof()
        # What the client still sends is read, so that it gets to read the answer.
        self.read(True)
        self._over, self.deadline = True, self.relay.clock() + _LINGER_S

    def close(self) -> None:
        """Close the connection when all is sent."""
        if self.transport is not None:
            self.transport.close()

    def _give_up(self, end: End, cause: Cause | None = None) -> None:
        for exchange in self.exchanges:
            self.relay.end(exchange, end, None if end == "cancelled" else cause)
        self.exchanges.clear()
        self._held = b""
        if self._connecting not in (None, asyncio.current_task()):
            self._connecting.cancel()
        if self.server is not None:
            self.server.leave()


class Server(_Side):
    """A connection to the server. Methods named ``on_...`` are called by the parser of its answers."""

    def __init__(self, client: Client):
        self._client, self._relay = client, client.relay
        self._parser = HttpResponseParser(self)
        self._exchange: _Exchange | None = None
        """The one whose answer comes."""
        self._left = self._unreadable = False
        self._now = 0.0

    def other(self) -> _Side | None:
        """The client."""
        return self._client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        super().connection_made(transport)
        client, to = self._client, self._client.transport
        if self._left or to is None or to.is_closing():
            self.leave()
            return
        self.read(not client.full)
        client.read(True)
        client.pass_on()

    def data_received(self, data: bytes) -> None:
        """Pass on what came, and tell the observer. The loop sends when this returns, so looking first is no delay."""
        client, to = self._client, self._client.transport
        self._now = self._relay.clock()
        if not client.raw and not self._unreadable:
            self._parse(data)
        if self._left or to is None:
            return
        to.write(data)
        if client.exchanges:
            client.exchanges[0].begun = True
        client.done()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if not self._left:
            whole = exc is None and self._exchange is not None and self._until_close
            self.leave()
            self._client.server_gone(whole=whole)

    def leave(self) -> None:
        """Close it, since nothing more is wanted of it."""
        self._left = True
        self._client.server = None
        if self.transport is not None:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._client.raw = True
        except HttpParserError:
            self._unreadable = True
            exchange = next((each for each in self._client.exchanges if not each.ended), None)
            if exchange is not None and not exchange.begun:
                self._client.refuse(502, f"the server {self._relay.upstream} gave no answer of HTTP/1", "no_answer")
            elif exchange is not None:
                self._relay.end(exchange, "failed", "cut_short")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._said = {b"content-type": b"", b"content-encoding": b""}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._said[name.lower()] = value

    def on_headers_complete(self) -> None:
        """A head is complete."""
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            return  # Another follows.
        self._exchange = exchange = next((each for each in self._client.exchanges if not each.ended), None)
        self._client.last |= not self._parser.should_keep_alive()
        self._until_close = not {b"content-length", b"transfer-encoding"} & self._said.keys()
        if exchange is not None and exchange.id is not None:
            content_type, encoding = (
                self._said[key].decode("latin-1") for key in (b"content-type", b"content-encoding")
            )
            exchange.noted.status, exchange.noted.stream = status, is_stream(content_type)
            said = json.dumps([content_type, encoding]).encode()
            self._relay.handover.text(Kind.ANSWERED, exchange.id, self._now, said)
        if exchange is not None and exchange.is_head:
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        exchange = self._exchange
        if exchange is not None and exchange.id is not None:
            exchange.noted.received(self._now, data)
            self._relay.handover.text(Kind.RECEIVED, exchange.id, self._now, data)

    def on_message_complete(self) -> None:
        """An answer is complete."""
        if self._exchange is not None:
            self._relay.end(self._exchange, "completed")
            self._exchange = None


def _head(first: bytes, headers: Headers) -> bytes:
    return b"\r\n".join((first, *(b"%b: %b" % pair for pair in headers), b"", b""))
