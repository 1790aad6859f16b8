"""A client and the stand-in that it measures in one loop, on a clock of their own.

Neither waiting nor work takes time there, so that what is measured depends neither on luck nor on other work.
"""

import asyncio
import selectors
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import httpx

from kvsim import machine
from kvsim.engines.live import bounded, client, load_measurement
from tests.kvsim.engines.live import stepping_server


class _Loop(asyncio.SelectorEventLoop):
    """Goes on to the next moment at which something happens, rather than wait for it."""

    def __init__(self):
        self.now = time.monotonic()  # Deadlines may have been set.
        super().__init__(self._Selector(self))

    def time(self):
        return self.now

    class _Selector(selectors.DefaultSelector):
        def __init__(self, loop):
            super().__init__()
            self._loop = loop

        def select(self, timeout=None):
            self._loop.now += timeout or 0.0
            return super().select(None if timeout is None else 0)


class _Transport(httpx.AsyncBaseTransport):
    """Hands requests to the stand-in, without sockets."""

    def __init__(self, server):
        self._server = server

    async def handle_async_request(self, request):
        if self._server._gone:
            raise httpx.ConnectError("all connection attempts failed")
        asked, answer = asyncio.StreamReader(), asyncio.StreamReader()
        fields = [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"]
        fields += [f"{name}: {value}" for name, value in request.headers.items()]
        asked.feed_data("\r\n".join([*fields, "\r\n"]).encode() + await request.aread())
        asked.feed_eof()
        writer = SimpleNamespace(write=answer.feed_data, drain=lambda: asyncio.sleep(0), close=answer.feed_eof)
        serving = asyncio.create_task(self._server.serve(asked, writer))
        try:
            head = await answer.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.") from None
        status, *fields = head.decode().split("\r\n")[:-2]
        headers = [tuple(field.split(": ", 1)) for field in fields]
        return httpx.Response(int(status.split()[1]), headers=headers, stream=_Body(answer, serving))


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer, serving):
        self._answer, self._serving = answer, serving

    async def __aiter__(self):
        while piece := await self._answer.read(1 << 16):
            yield piece

    async def aclose(self):
        self._serving.cancel()


@contextmanager
def own_time(server):
    """A context in which ``measure_server`` and all that calls it measure this stand-in so."""
    loops = []

    def new_loop():
        loops.append(_Loop())
        return loops[-1]

    clock = SimpleNamespace(monotonic=lambda: loops[-1].now if loops else time.monotonic(), time=time.time)
    options = client.http_options
    with ExitStack() as stack:
        for module in (bounded, client, load_measurement, stepping_server):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(
            patch.object(client, "http_options", lambda *which: {**options(*which), "transport": _Transport(server)})
        )
        stack.enter_context(patch.object(asyncio.events, "new_event_loop", new_loop))
        stack.enter_context(patch.object(machine, "processor_time", lambda: None))
        yield
