"""A stand-in for a server of language models, the proxy in a thread, and what the proxy wrote."""

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from contextlib import contextmanager
from unittest import mock

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvsim.engines.observing import observer
from kvsim.engines.observing.serving import Observation, observe

TEXT = ["Il", " pleut", " sur", " la", " ville"]
"""The words of an answer."""


def event(value):
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chat_events(words=TEXT, usage=True):
    """A stream as vLLM sends it; its last event has the counts if the request asked for them."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield event({"model": "tiny", "choices": [choice]})
    for word in words:
        yield event({"model": "tiny", "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
    yield event({"model": "tiny", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage:
        yield event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": len(words)}})
    yield event("[DONE]")


def whole_chat(words=TEXT):
    message = {"role": "assistant", "content": "".join(words)}
    usage = {"prompt_tokens": 11, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 4}}
    return {"model": "tiny", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


class Upstream:
    """What a request may ask of the stand-in, by ``model``; and what it saw."""

    def __init__(self):
        self.bodies = []
        """Of chats, parsed."""
        self.echoed = []
        """Targets of other requests."""
        self.peers = []
        """The ports that these came from."""
        self.cancelled = threading.Event()
        self.running = 0
        self.together = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/upload", self.upload, methods=["POST", "PUT"]),
                Route("/{path:path}", self.echo, methods=["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
            ]
        )

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        how = body.get("model", "")
        answer = getattr(self, f"_{how}", None)
        if answer is not None:
            return await answer(request, body)
        if not body.get("stream"):
            return JSONResponse(whole_chat())
        return StreamingResponse(slowly(chat_events(usage="stream_options" in body)), media_type="text/event-stream")

    async def _gzip(self, request, body):
        packed = gzip.compress(b"".join(chat_events()))
        headers = {"content-encoding": "gzip"}
        return StreamingResponse(slowly([packed[:40], packed[40:]]), media_type="text/event-stream", headers=headers)

    async def _unknown_packing(self, request, body):
        return Response(b"\x00" * 400, media_type="application/json", headers={"content-encoding": "br"})

    async def _refusing(self, request, body):
        error = {"error": {"message": "no secret words here", "code": 429}}
        return JSONResponse(error, 429, {"retry-after": "7"})

    async def _endless(self, request, body):
        async def events():
            try:
                while True:
                    yield b"".join(_text(8000, 8))
                    await asyncio.sleep(0)
            finally:
                self.cancelled.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _thinking(self, request, body):
        """Say nothing until the client has gone."""
        end = time.monotonic() + 20
        while not await request.is_disconnected() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.cancelled.set()
        return Response()

    async def _busy(self, request, body):
        """Wait until so many are there."""
        self.running += 1
        self.together = max(self.together, self.running)
        end = time.monotonic() + 20
        while self.together < body["n_clients"] and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.running -= 1
        return JSONResponse(whole_chat())

    async def _hanging(self, request, body):
        """Give a whole answer and do not end it."""
        return StreamingResponse(slowly([b"".join(chat_events()), b""], 5), media_type="text/event-stream")

    async def _nonsense(self, request, body):
        return StreamingResponse(
            slowly([b"data: {not json\n\n", b"\xff\xfe\n", event("[DONE]")]), media_type="text/event-stream"
        )

    async def tokenize(self, request):
        body = await request.json()
        words = body["content"].split()
        return JSONResponse({"tokens": list(range(len(words)))})

    async def upload(self, request):
        n = 0
        async for piece in request.stream():
            n += len(piece)
        return JSONResponse({"bytes": n})

    async def echo(self, request):
        """Say what came."""
        body = await request.body()
        target = (request.scope["raw_path"] + b"?" + request.scope["query_string"]).decode()
        self.echoed.append(target)
        self.peers.append(request.client.port)
        told = {
            "method": request.method,
            "target": target,
            "headers": [[name.decode(), value.decode("latin-1")] for name, value in request.scope["headers"]],
            "body": body.decode("latin-1"),
        }
        answer = JSONResponse(told, 203)
        answer.headers.append("set-cookie", "a=1")
        answer.headers.append("set-cookie", "b=2")
        if request.url.path == "/moved":
            return Response(status_code=307, headers={"location": "http://example.invalid/"})
        return answer


def _text(size, n):
    return [event({"choices": [{"index": 0, "delta": {"content": "x" * size}}]})] * n


async def slowly(pieces, pause_s=0.001):
    for piece in pieces:
        yield piece
        await asyncio.sleep(pause_s)


@contextmanager
def served(app, **settings):
    """The address of an application that is served in a thread; ``settings`` are uvicorn's."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so that asyncio sends at once
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    config = uvicorn.Config(
        app, log_config=None, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **settings
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def raw_server(answer):
    """The address of a server that lets ``answer`` have each connection, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(10)
                    answer(connection)

        threading.Thread(target=run, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def receive(connection):
    """Read a whole request, and return its head; the system throws the answer away of a server that closes before."""
    read = b""
    while b"\r\n\r\n" not in read:
        read += connection.recv(65536)
    head, _, body = read.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    length = 0 if found is None else int(found[1])
    while len(body) < length:
        body += connection.recv(65536)
    return head


def requests_of(lines):
    """Requests by what was last said of them, in the order in which it was first said."""
    known = {}
    for line in lines:
        if line["kind"] == "request":
            known[line["id"]] = line
        elif line["kind"] == "counts":
            known[line["id"]] |= line | {"kind": "request"}
    return list(known.values())


class Observed:
    """A proxy that runs, and what it has written when it has ended."""

    def __init__(self, out):
        self.out = out
        self.url = ""
        self.complaints = []
        self.listening = None
        self.summary = None

    def lines(self):
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def requests(self):
        """Lines of requests, with the counts that came later."""
        return requests_of(self.lines())


@contextmanager
def observing(upstream, out, *, grace_s=60.0, **settings):
    """Run the proxy in a thread; it has ended, and its file is whole, when the block is left.

    ``grace_s``: how long texts may take before a request has a line without them; long, so that it has but one.
    """
    observed, ready = Observed(out), threading.Event()

    def began(listening):
        observed.listening, observed.url = listening, listening.url
        ready.set()

    def run():
        what = Observation(upstream, out, port=0, **settings)
        # In a thread, so that tests can replace parts of it.
        observed.summary = observe(what, began, lambda line: observed.complaints.append(line), apart=False)

    thread = threading.Thread(target=run, daemon=True)
    with mock.patch.object(observer, "GRACE_S", grace_s):
        thread.start()
        assert ready.wait(10)
        try:
            yield observed
        finally:
            observed.listening.stop()
            thread.join(20)
            assert not thread.is_alive()
