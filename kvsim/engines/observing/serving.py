"""Running the proxy: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from kvsim.engines.live.address import address_of, is_loopback
from kvsim.engines.observing.fingerprints import new_salt, salt_of
from kvsim.engines.observing.observer import Observer, Summary
from kvsim.engines.observing.proxy import Proxy
from kvsim.errors import UserError

ROTATE_BYTES = 100_000_000
"""How large a file gets before the next is begun, unless it is said."""
_LEAST_ROTATE = 1000
_BACKLOG = 2048
_KEEP_ALIVE_S = 75.0
"""Longer than clients keep idle connections, so that none is closed just when it is used."""
_LAST_REQUESTS_S = 2
"""For how long requests that run may go on when the proxy is told to end."""
_SWITCH_S = 0.0005
"""After how long the thread that hashes lets the traffic go first."""
_FILES = 8192
"""Open files and connections that are asked for: two for each client."""


@dataclass(frozen=True)
class Observation:
    """What to observe, and where to."""

    upstream: str
    """The server's address, such as ``http://127.0.0.1:8080``."""
    out: Path
    """The file to write."""
    host: str = "127.0.0.1"
    port: int = 8090
    """0: any that is free."""
    salt_file: Path | None = None
    """Where the salt is kept for runs that are to be joined; None: in memory only."""
    rotate_bytes: int = ROTATE_BYTES
    requests: int | None = None
    """End after this many recorded requests."""
    seconds: float | None = None
    """End after this long."""
    allow_remote: bool = False
    """Whether the server may be elsewhere, and clients too."""


@dataclass(frozen=True)
class Listening:
    """A proxy that has begun to listen."""

    url: str
    """Where clients reach it."""
    upstream: str
    out: Path
    stop: Callable[[], None]
    """Ends it; from any thread."""


def observe(
    what: Observation, began: Callable[[Listening], None], complain: Callable[[str], None] = lambda line: None
) -> Summary:
    """Serve until SIGINT or SIGTERM, or until what was asked for is there.

    ``began`` is called when clients can connect, ``complain`` with a line for each kind of fault; a fault never ends or
    changes the traffic. Raises ``UserError`` where an address or a file cannot be used.
    """
    upstream = address_of(what.upstream, allow_remote=what.allow_remote)
    if not what.allow_remote and not is_loopback(what.host):
        raise UserError(f"--host: {what.host}: others could connect; --allow-remote lets them")
    if what.rotate_bytes < _LEAST_ROTATE:
        raise UserError(f"--rotate: {what.rotate_bytes} bytes; at least {_LEAST_ROTATE} are accepted")
    with _listening(what.host, what.port) as listener, _often_switching():
        url = _url_of(listener)
        if (at := httpx.URL(upstream.url)).port == listener.getsockname()[1] and is_loopback(at.host):
            raise UserError(f"{url} would pass requests on to itself; --upstream and --port must differ")
        salt = new_salt() if what.salt_file is None else salt_of(what.salt_file)

        def wrote(done: int) -> None:
            if what.requests is not None and done >= what.requests:
                server.stop()

        observer = Observer(what.out, upstream, salt, rotate_bytes=what.rotate_bytes, complain=complain, wrote=wrote)
        try:
            server = _Server(Proxy(upstream, observer))
            listening = Listening(url, str(upstream), what.out, server.stop)
            server.serve_on(listener, what.seconds, lambda: began(listening))
        finally:
            summary = observer.close()
    return summary


class _Server(uvicorn.Server):
    """uvicorn's server of one proxy, with signals of its own: uvicorn's would be raised again at the end, and kill."""

    def __init__(self, proxy: Proxy):
        super().__init__(
            uvicorn.Config(
                proxy,
                loop="auto",  # uvloop where it is installed
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # Whether an answer was whole is in its line.
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=int(_KEEP_ALIVE_S),
                timeout_graceful_shutdown=_LAST_REQUESTS_S,
            )
        )
        self._proxy = proxy

    def stop(self) -> None:
        """End soon; a second time, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to ``serve_on``."""
        yield

    def serve_on(self, listener: socket.socket, seconds: float | None, began: Callable[[], None]) -> None:
        """Serve until it is stopped, or for so many seconds."""

        async def run() -> None:
            loop = asyncio.get_running_loop()
            if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self.stop)
            timer = None if seconds is None else loop.call_later(seconds, self.stop)
            began()
            try:
                await self.serve(sockets=[listener])
            finally:
                if timer is not None:
                    timer.cancel()
                await self._proxy.close()

        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(run())


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at an address. Raises ``UserError`` if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once only on sockets that say that they are TCP; others hold them back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":  # There it would let two listen at one port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise UserError(f"--host {host} --port {port}: {e.strerror or e}") from None
    with listener:
        yield listener


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _often_switching() -> Iterator[None]:
    """Let the threads of this process take turns often, and allow it as many connections as may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.suppress(ImportError, OSError, ValueError):  # There is no such limit, or it stays.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
