"""Running the proxy: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsim.engines.live.address import address_of, is_loopback
from kvsim.engines.observing.fingerprints import new_salt, salt_of
from kvsim.engines.observing.handover import Handover
from kvsim.engines.observing.observer import DRAIN_S, Settings, Summary, observe_over
from kvsim.engines.observing.proxy import Client, Relay
from kvsim.errors import UserError

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

ROTATE_BYTES = 100_000_000
"""How large a file gets before the next is begun, unless it is said."""
_LEAST_ROTATE = 1000
_BACKLOG = 2048
_LAST_REQUESTS_S = 2
"""For how long requests that run may go on when the proxy is told to end."""
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
    what: Observation,
    began: Callable[[Listening], None],
    complain: Callable[[str], None] = lambda line: None,
    *,
    apart: bool = sys.platform != "win32",
) -> Summary:
    """Serve until SIGINT or SIGTERM, or until what was asked for is there.

    ``began`` is called when clients can connect, ``complain`` with a line for each kind of fault; a fault never ends or
    changes the traffic. Without ``apart``, what passes is looked at in a thread instead of a process. Raises
    ``UserError`` where an address or a file cannot be used.
    """
    upstream = address_of(what.upstream, allow_remote=what.allow_remote)
    if not what.allow_remote and not is_loopback(what.host):
        raise UserError(f"--host: {what.host}: others could connect; --allow-remote lets them")
    if what.rotate_bytes < _LEAST_ROTATE:
        raise UserError(f"--rotate: {what.rotate_bytes} bytes; at least {_LEAST_ROTATE} are accepted")
    with _listening(what.host, what.port) as listener:
        relay, url = Relay(upstream, Handover()), _url_of(listener)
        if relay.port == listener.getsockname()[1] and is_loopback(relay.host):
            raise UserError(f"{url} would pass requests on to itself; --upstream and --port must differ")
        salt = new_salt() if what.salt_file is None else salt_of(what.salt_file)
        if readers := _others_read(what.out):
            complain(f"{what.out}: was there before, and {readers}; chmod 600 keeps it to you")
        settings = Settings(upstream.url, str(what.out), salt.hex(), what.rotate_bytes, what.requests)
        _allow_connections()
        with _observer(settings, apart=apart) as ways, asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(what, relay, listener, ways, began, complain))


def _others_read(out: Path) -> str:
    """What others may do with a file that is there; empty if nothing."""
    try:
        mode = out.stat().st_mode
    except OSError:
        return ""
    return f"others may read or write it (mode {mode & 0o777:04o})" if mode & 0o066 else ""


async def _serve(
    what: Observation,
    relay: Relay,
    listener: socket.socket,
    ways: tuple[socket.socket, socket.socket],
    began: Callable[[Listening], None],
    complain: Callable[[str], None],
) -> Summary:
    """Serve until the end, and say what was observed."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    stops = 0

    def stop() -> None:
        nonlocal stops
        stops += 1
        ending.set()

    def stop_from_anywhere() -> None:
        with contextlib.suppress(RuntimeError):  # It has ended.
            loop.call_soon_threadsafe(stop)

    if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    transport, told = await loop.create_connection(lambda: _Told(complain, stop), sock=ways[0])
    await told.ready
    relay.handover.begin(transport, ways[1])
    relay.tick()
    server = await loop.create_server(lambda: Client(relay), sock=listener, backlog=_BACKLOG)
    began(Listening(_url_of(listener), str(relay.upstream), what.out, stop_from_anywhere))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ending.wait(), what.seconds)
    server.close()
    until = loop.time() + _LAST_REQUESTS_S
    while stops < 2 and loop.time() < until and any(client.exchanges for client in relay.clients):
        await asyncio.sleep(0.02)
    for client in list(relay.clients):
        if client.transport is not None:
            client.transport.abort()
    await asyncio.sleep(0)  # They end now.
    relay.handover.flush()
    ways[1].close()
    if not transport.is_closing():
        transport.write_eof()
    return await told.result(relay)


class _Told(asyncio.Protocol):
    """What the observer says: lines of JSON."""

    def __init__(self, complain: Callable[[str], None], stop: Callable[[], None]):
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Until the observer can write; has the ``UserError`` if it cannot."""
        self._summary: asyncio.Future[Summary] = loop.create_future()
        self._complain, self._stop = complain, stop
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Take in whole lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            self.ready.set_result(None)
        elif "error" in said:
            self.ready.set_exception(UserError(said["error"]))
        elif "enough" in said:
            self._stop()
        elif "fault" in said:
            with contextlib.suppress(Exception):  # Whoever should read it may be gone.
                self._complain(f"{said['fault']}; traffic is passed on all the same, and this is said only once")
        else:
            summary = Summary(**said["summary"])
            summary.files = list(map(Path, summary.files))
            for name in ("ends", "failures", "counted"):
                setattr(summary, name, Counter(getattr(summary, name)))
            self._summary.set_result(summary)

    def connection_lost(self, exc: Exception | None) -> None:
        """The observer has ended."""
        if not self.ready.done():
            self.ready.set_exception(UserError("the process that writes the file could not be started"))
        elif not self._summary.done():
            self._summary.cancel()
            self._take({"fault": "the process that writes the file has ended: nothing more is recorded"})

    async def result(self, relay: Relay) -> Summary:
        """What was observed, when it is all written, or cannot be."""
        try:
            summary = await asyncio.wait_for(self._summary, 3 * DRAIN_S)
        except (asyncio.CancelledError, TimeoutError):
            summary = Summary(faults=1)
        ended = sum(summary.ends.values())
        summary.lost += max(relay.requests - ended, 0)
        summary.passed_on = relay.passed_on
        return summary


@contextlib.contextmanager
def _observer(settings: Settings, *, apart: bool) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ways to an observer that runs, in a process or in a thread: of texts, and of ends. It ends when they do."""
    (ours, theirs), (ends, their_ends) = socket.socketpair(), socket.socketpair()
    for end in (ours, theirs, ends):
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    ours.sendall(json.dumps(asdict(settings)).encode() + b"\n")
    if not apart:
        thread = threading.Thread(target=observe_over, args=(theirs, their_ends), daemon=True)
        thread.start()
        with ours, ends:
            yield ours, ends
        thread.join(3 * DRAIN_S)
        return
    with theirs, their_ends:
        number = their_ends.fileno()
        words = [sys.executable, "-m", "kvsim.engines.observing.observer", str(number)]
        process = subprocess.Popen(
            words,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C in a terminal is for this process alone.
        )
    try:
        with ours, ends:
            yield ours, ends
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DRAIN_S)
        process.kill()
        process.wait()


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


def _allow_connections() -> None:
    """Allow this process as many connections as may be."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # There is no such limit, or it stays.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
