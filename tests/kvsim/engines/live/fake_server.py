"""A server that answers at once as llama-server or vLLM would, with faults to switch on.

It speaks HTTP/1.1 with a connection for each request, on a free port of this machine, in a thread of its own.
"""

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

BUILD = "b1-fake"
CONTEXT, SLOTS = 4096, 2
VLLM = "0.32.0"


@dataclass
class FakeServer:
    """What the server is, what goes wrong, and what it was asked."""

    kind: str = "llama-server"
    """Or ``vllm``, or ``plain``: OpenAI's protocol and nothing beyond it."""
    vocabulary: int = 49152
    """Larger token ids are refused; llama-server says so itself."""
    key: str | None = None
    """Wanted in each request."""
    takes_ids: bool = True
    name: str = "fake"
    """The model's, of servers other than llama-server."""
    extra_tokens: int = 0
    """Tokens that it puts before each prompt of words."""
    tokens_per_word: int = 1
    token_s: float = 0.0
    """Seconds between two tokens."""
    retry_after: str | None = None
    """With a refusal; every second request is then refused."""
    refuses: int | None = None
    """A status to refuse completions with; from the ``faulty_from``-th on, as all that follows."""
    is_gone: bool = False
    """The server goes, and all connections with it."""
    is_silent: bool = False
    """It takes requests and says nothing."""
    cuts_at: int | None = None
    """The stream breaks off behind so many tokens."""
    answers_at_most: int | None = None
    """It ends answers by itself."""
    says: str | None = None
    """``html`` instead of events, or ``whole`` answers without a stream, or ``nonsense`` as events."""
    faulty_from: int = 0
    """Completions that are answered well before the faults begin."""
    others: int = 0
    """Tokens that it computes for others meanwhile with each completion."""
    counts: bool = True
    """Whether it has /metrics."""
    asked: list[dict] = field(default_factory=list)
    """The bodies of all completions."""
    port: int = 0
    prompt_tokens: int = 0
    """Of prompts, computed."""
    output_tokens: int = 0
    most_at_once: int = 0
    _texts: list[list] = field(default_factory=list)
    _open: int = 0
    _server: asyncio.Server | None = None
    _gone: bool = False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader, writer):
        """Answer one request."""
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            lines = request.decode().split("\r\n")
            method, path, _ = lines[0].split()
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if self._gone:
                return
            if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
                await _send(writer, 401, {"error": {"message": "Invalid API Key", "code": 401}})
            else:
                await self.answer(writer, method, path, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, writer, method, path, body):
        """Answer a request that has the key."""
        if method == "GET":
            await self._page(writer, path)
        elif path == "/tokenize":
            await self._tokenize(writer, json.loads(body))
        elif path == ("/completion" if self.kind == "llama-server" else "/v1/completions"):
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            try:
                await self._complete(writer, json.loads(body))
            finally:
                self._open -= 1
        else:
            await _send(writer, 404, {"error": "no such page"})

    async def _page(self, writer, path):
        model = {"id": self.name, "owned_by": "vllm" if self.kind == "vllm" else "somebody", "max_model_len": CONTEXT}
        if self.kind == "llama-server":
            model = {"id": "fake.gguf", "owned_by": "llamacpp", "meta": {"n_vocab": self.vocabulary}}
        pages = {"/v1/models": {"object": "list", "data": [model]}}
        if self.kind == "llama-server":
            settings = {"n_ctx": CONTEXT // SLOTS}
            pages["/props"] = {
                "default_generation_settings": settings,
                "total_slots": SLOTS,
                "model_path": "/models/fake.gguf",
                "build_info": BUILD,
            }
        if self.kind == "vllm":
            pages["/version"] = {"version": VLLM}
        if self.counts and self.kind != "plain":
            pages["/metrics"] = self._metrics()
        await _send(writer, 200 if path in pages else 404, pages.get(path, {"error": "no such page"}))

    def _metrics(self):
        prompt, output = "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"
        labels, cache = "", ""
        if self.kind == "vllm":
            prompt, output = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
            labels, cache = '{model_name="fake"}', 'vllm:cache_config_info{block_size="16",num_gpu_blocks="256"} 1.0\n'
        return f"# TYPE\n{cache}{prompt}{labels} {self.prompt_tokens}\n{output}{labels} {self.output_tokens}\n"

    async def _tokenize(self, writer, asked):
        tokens = self._tokens(asked.get("content", asked.get("prompt", "")))
        await _send(writer, 404 if self.kind == "plain" else 200, {"tokens": tokens, "count": len(tokens)})

    def _tokens(self, prompt):
        if not isinstance(prompt, str):
            return list(prompt)
        words = [zlib.crc32(word.encode()) % self.vocabulary for word in prompt.split()]
        return [0] * self.extra_tokens + [token for word in words for token in [word] * self.tokens_per_word]

    async def _complete(self, writer, asked):
        faulty = len(self.asked) >= self.faulty_from
        self.asked.append(asked)
        tokens = self._tokens(asked["prompt"])
        if faulty and self.is_gone:
            self._gone = True
            self._server.close()
            return
        if faulty and self.is_silent:
            await asyncio.sleep(60)
        later = self.retry_after
        if faulty and self.refuses is not None:
            if later is not None:
                self.faulty_from += 2
            said = {"error": {"message": "no, not this one", "code": self.refuses}}
            await _send(writer, self.refuses, said, more="" if later is None else f"Retry-After: {later}\r\n")
        elif not isinstance(asked["prompt"], str) and not self.takes_ids:
            await _send(writer, 422, {"detail": "prompt: a string is expected"})
        elif any(token >= self.vocabulary for token in tokens):
            await _send(writer, 400, {"error": {"message": "token id is out of vocabulary", "code": 400}})
        elif faulty and self.says == "html":
            await _send(writer, 200, "<html><body>Welcome</body></html>", "text/html")
        elif faulty and self.says == "whole":
            await _send(writer, 200, {"content": "all", "stop": True, "choices": [{"text": "all"}]})
        elif faulty and self.says == "nonsense":
            await _send(writer, 200, 'data: {"what": 1}\n\n', "text/event-stream")
        else:
            await self._stream(writer, asked, tokens, faulty)

    async def _stream(self, writer, asked, tokens, faulty):
        wanted = asked["n_predict"] if self.kind == "llama-server" else asked["max_tokens"]
        n = wanted if self.answers_at_most is None or not faulty else min(wanted, self.answers_at_most)
        bias = asked.get("logit_bias")
        answer = [bias[0][0] if bias else 7] * n
        cached = max((_common(tokens[:-1], text) for text in self._texts), default=0)
        if not asked.get("cache_prompt", True):  # The same first token by chance is no hit then.
            cached = 0
        self._texts.append([*tokens, *answer[:-1]])
        self.prompt_tokens += len(tokens) - (cached if self.kind == "llama-server" else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for i, token in enumerate(answer):
            if faulty and self.cuts_at == i:
                return
            await asyncio.sleep(self.token_s)
            self.output_tokens += 1
            await _event(writer, self._token(token, len(tokens), i + 1))
        for event in self._last(len(tokens), cached, n, wanted):
            await _event(writer, event)
        self.prompt_tokens += self.others

    def _token(self, token, prompt, sent):
        if self.kind == "llama-server":
            return {"content": f" t{token}", "tokens": [token], "stop": False}
        event = {"choices": [{"text": f" t{token}", "finish_reason": None}]}
        if self.kind == "vllm":
            event["choices"][0]["token_ids"] = [token]
            event["usage"] = {"prompt_tokens": prompt, "completion_tokens": sent}
        return event

    def _last(self, prompt, cached, n, wanted):
        if self.kind == "llama-server":
            timings = {"cache_n": cached, "prompt_n": prompt - cached, "prompt_ms": 1.0}
            timings |= {"predicted_n": n, "predicted_ms": 2.0}
            truncated = {"truncated": n < wanted, "stop_type": "limit", "id_slot": 0, "tokens_cached": prompt + n - 1}
            counts = {"tokens_evaluated": prompt, "tokens_predicted": n}
            return [{"content": "", "tokens": [], "stop": True, **truncated, **counts, "timings": timings}]
        usage = {"prompt_tokens": prompt, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": cached}}
        return [{"choices": [], "usage": usage}, "[DONE]"]


@contextmanager
def fake_server(server: FakeServer | None = None, **keys) -> Iterator[FakeServer]:
    """A server that runs while the block does; ``keys`` are the fields of ``FakeServer``."""
    server = server or FakeServer(**keys)
    loop = asyncio.new_event_loop()

    async def start():
        server._server = await asyncio.start_server(server.serve, "127.0.0.1", server.port)
        server.port = server._server.sockets[0].getsockname()[1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(lambda: _stop(loop, server))
        thread.join(5)
        loop.close()


def _stop(loop, server):
    server._server.close()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: loop.stop())


async def _event(writer, said):
    text = said if isinstance(said, str) else json.dumps(said)
    writer.write(f"data: {text}\n\n".encode())
    await writer.drain()


async def _send(writer, status, said, kind="application/json", more=""):
    body = (said if isinstance(said, str) else json.dumps(said)).encode()
    length = f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\n{length}"
    writer.write(head.encode() + body)
    await writer.drain()


def _common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
