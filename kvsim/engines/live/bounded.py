"""HTTP that ends: each answer of a server is bounded in bytes and in seconds, however it behaves.

httpx bounds the silence between two reads only, so that a server which drips a byte a second, or never ends its
headers, would hold a client for ever. Here the whole exchange has a time, connecting and headers included. Answers are
asked for unpacked, since a few packed bytes can stand for very many.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvsim.engines.live.address import Address
from kvsim.errors import UserError

MOST_BYTES = 4 << 20
"""Bytes of an answer that is no stream: many times what servers say of themselves."""
WITHIN_S = 10.0
"""Seconds that such an answer may take."""


class ServerFault(UserError):
    """A server did not do what was asked. The message is one line with its address."""

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(message)
        self.gone = gone
        """Whether it cannot be reached at all, so that asking it again now is of no use."""


@dataclass(frozen=True)
class Deadline:
    """When something has to be over."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self.began


@dataclass(frozen=True)
class Fetched:
    """An answer that came in full."""

    status: int
    headers: httpx.Headers
    content: bytes


def http_options(address: Address, key: str | None = None) -> dict[str, Any]:
    """Options of an httpx client that contacts this address alone: no proxy of the environment, no redirect."""
    headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    # Without TLS, there is nothing to verify.
    trust = {"verify": address.tls() or False, "trust_env": False}
    return {"base_url": address.url, "headers": headers, "follow_redirects": False, **trust}


def fetch(
    http: httpx.Client,
    method: str,
    path: str,
    *,
    json: Any = None,
    most_bytes: int = MOST_BYTES,
    within_s: float = WITHIN_S,
) -> Fetched:
    """Ask, and wait for the whole answer, on a connection of its own. ``http``: with ``http_options``.

    Raises ``ServerFault`` in one line if it is longer than ``most_bytes``, takes longer than ``within_s``, or breaks
    off.
    """
    reading, cut = _Reading(http, path, most_bytes, within_s), _Cut()
    timer = threading.Timer(within_s, cut.now)
    timer.daemon = True
    timer.start()
    try:
        with http.stream(method, path, json=json, **reading.options, extensions={"trace": cut.watch}) as response:
            reading.begin(response)
            for piece in response.iter_raw():
                reading.add(piece)
        if cut.due:  # An answer without a length ends where its connection does.
            raise reading.fault(TimeoutError(), late=True)
        return reading.done(response)
    except (httpx.HTTPError, httpx.StreamError) as e:
        raise reading.fault(e, late=cut.due) from None
    finally:
        timer.cancel()


async def fetch_async(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    *,
    json: Any = None,
    most_bytes: int = MOST_BYTES,
    within_s: float = WITHIN_S,
) -> Fetched:
    """As ``fetch``, without blocking."""
    reading = _Reading(http, path, most_bytes, within_s)
    try:
        async with (
            asyncio.timeout(within_s),
            http.stream(method, path, json=json, **reading.options) as response,
        ):
            reading.begin(response)
            async for piece in response.aiter_raw():
                reading.add(piece)
            return reading.done(response)
    except TimeoutError as e:
        raise reading.fault(e, late=True) from None
    except (httpx.HTTPError, httpx.StreamError) as e:
        raise reading.fault(e, late=False) from None


class _Reading:
    """The answer so far, and what to say of it."""

    def __init__(self, http: httpx.Client | httpx.AsyncClient, path: str, most_bytes: int, within_s: float):
        self._address = Address(str(http.base_url).rstrip("/"))
        self._path, self._most_bytes, self._within_s = path, most_bytes, within_s
        self._body = bytearray()
        # A connection that is kept open from an earlier answer would not be seen by ``_Cut``.
        self.options: dict[str, Any] = {"timeout": within_s, "headers": {"Connection": "close"}}

    def begin(self, response: httpx.Response) -> None:
        """Raises ``ServerFault`` if the answer cannot be read."""
        check_unpacked(self._address, response)

    def add(self, piece: bytes) -> None:
        """Take in a piece. Raises ``ServerFault`` if that makes it too long."""
        self._body += piece
        if len(self._body) > self._most_bytes:
            raise ServerFault(f"{self._address}{self._path}: answered by more than {self._most_bytes:,} bytes")

    def done(self, response: httpx.Response) -> Fetched:
        """The whole answer."""
        return Fetched(response.status_code, response.headers, bytes(self._body))

    def fault(self, e: Exception, *, late: bool) -> ServerFault:
        """The fault of what went wrong; ``late``: the time was over."""
        if late or isinstance(e, httpx.TimeoutException):
            asked = f"{self._address}{self._path}"
            return ServerFault(f"{asked}: not answered in full within {self._within_s:.3g} s", gone=True)
        if isinstance(e, httpx.ConnectError):
            return unreachable(self._address, e)
        return ServerFault(f"{self._address}{self._path}: the connection broke off: {words_of(e)}", gone=True)


class _Cut:
    """Ends an exchange whose time is over, by shutting its connection."""

    def __init__(self) -> None:
        self.due = False
        self._socket: socket.socket | None = None

    def watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the connection when it is made; httpx calls it as its extension ``trace``."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.due:
                self.now()

    def now(self) -> None:
        """End it."""
        self.due = True
        if self._socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # Of TLS too, without its farewell.


def check_unpacked(address: Address, response: httpx.Response) -> None:
    """Raises ``ServerFault`` if an answer is packed though it was asked for as it is."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServerFault(
            f"{address}: answers in {response.headers['content-encoding'][:40]!r}, which was not asked for"
        )


def unreachable(address: Address, e: Exception) -> ServerFault:
    """The fault of a server that cannot be reached."""
    return ServerFault(f"{address}: cannot be reached: {words_of(e)}", gone=True)


def about_key(headers: Mapping[str, str], status: int) -> str:
    """What to say where a server refuses for want of a key; ``headers``: those that it was asked with."""
    if "Authorization" in headers:
        return f"refuses the key that was given by --key-env (HTTP {status})"
    return f"wants a key (HTTP {status}); give it by --key-env NAME"


def words_of(e: Exception) -> str:
    """What went wrong with a connection, in a line and without the system's number for it."""
    said = re.sub(r"\[(Errno|SSL)[^]]*\] | \(_ssl.c:\d+\)", "", " ".join(str(e).split()))[:200]
    if said.startswith("certificate verify failed"):
        said += "; SSL_CERT_FILE=FILE.pem before the command names certificates to trust"
    return said[:1].lower() + said[1:] or type(e).__name__
