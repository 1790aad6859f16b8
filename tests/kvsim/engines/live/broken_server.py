"""A server that misbehaves by name: one way for each in which servers keep a client waiting, or fill it."""

import asyncio
from dataclasses import dataclass, field

from tests.kvsim.engines.live.fake_server import FakeServer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"content": " a", "tokens": [7], "stop": false}\n\n'


async def _said(writer, data):
    writer.write(data)
    await writer.drain()


async def _again(writer, begin, piece, every_s):
    await _said(writer, begin)
    while True:
        await _said(writer, piece)
        await asyncio.sleep(every_s)


WAYS = {
    "drips a body of known length": lambda w: _again(w, HEAD + b"Content-Length: 100000\r\n\r\n", b" ", 0.02),
    "drips a body without end": lambda w: _again(w, HEAD + b"\r\n", b" ", 0.02),
    "drips its headers": lambda w: _again(w, HEAD, b"X-More: a\r\n", 0.02),
    "says nothing": lambda w: asyncio.sleep(60),
    "never ends its body": lambda w: _again(w, HEAD + b"\r\n", b" " * 65536, 0),
    "never ends its headers": lambda w: _again(w, HEAD, b"X-More: a\r\n" * 1000, 0),
    "never ends a refusal": lambda w: _again(w, b"HTTP/1.1 500 No\r\n\r\n", b"no " * 20000, 0),
    "packs its answer": lambda w: _said(w, HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
    "breaks off": lambda w: _said(w, HEAD + b"Content-Length: 100\r\n\r\n{"),
    "speaks no HTTP": lambda w: _said(w, b"220 mail.example ESMTP\r\n"),
    "hangs up": lambda w: _said(w, b""),
    "never ends a stream": lambda w: _again(w, STREAM, TOKEN, 0.005),
    "never ends an event": lambda w: _again(w, STREAM, b"data: " + b"x" * 65536, 0),
    "comments without end": lambda w: _again(w, STREAM, b": still here\n\n" * 1000, 0),
    "stops in its stream": lambda w: _again(w, STREAM, b"", 60),
}
"""What it does instead of an answer."""


@dataclass
class BrokenServer(FakeServer):
    """A server that misbehaves on some of its pages."""

    ways: dict = field(default_factory=dict)
    """By path: the name of a way, or the bytes that it says."""
    after: int = 0
    """Completions that are answered well before."""

    async def answer(self, writer, method, path, body):
        """Answer one request, or misbehave."""
        way = self.ways.get(path)
        if isinstance(way, bytes):
            kind = b"text/event-stream" if way.startswith(b"data:") else b"application/json"
            await _said(writer, b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nConnection: close\r\n\r\n" + way)
        elif way is not None and (len(self.asked) >= self.after or method == "GET"):
            await WAYS[way](writer)
        else:
            await super().answer(writer, method, path, body)
