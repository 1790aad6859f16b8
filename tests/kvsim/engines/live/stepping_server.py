"""A server whose steps take known times: it sleeps, then gives a token to every request that generates."""

import asyncio
import time
from dataclasses import dataclass, field

from tests.kvsim.engines.live.fake_server import FakeServer, _event

STEP_S, CHUNK_S, TOKEN_S, CELL_S = 8e-3, 1e-3, 1e-4, 5e-6
"""Seconds of each step, of each sequence and each token in it, and of each cell that a sequence holds."""


@dataclass
class Generating:
    """A request that is being served."""

    prompt: int
    wanted: int
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)
    sent: int = 0
    prompt_s: float = 0.0


@dataclass
class SteppingServer(FakeServer):
    """Batches continuously, as llama-server does."""

    steps: list = field(default_factory=list)
    """Of each step: tokens of prompts, contexts of the sequences, and the seconds that it really took."""
    factor: float = 1.0
    """Of all seconds; small where a test does not look at how exactly they are found again."""
    _waiting: list = field(default_factory=list)
    _serving: list = field(default_factory=list)
    _loop: asyncio.Task | None = None

    async def _stream(self, writer, asked, tokens, faulty):
        wanted = asked["n_predict"] if self.kind == "llama-server" else asked["max_tokens"]
        one = Generating(len(tokens), wanted)
        self._waiting.append(one)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._steps())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for i in range(wanted):
            await one.tokens.get()
            if faulty and self.cuts_at == i:
                return
            self.output_tokens += 1
            await _event(writer, self._token(7, len(tokens), i + 1))
        self.prompt_tokens += len(tokens) + self.others
        for event in self._last(len(tokens), 0, wanted, wanted):
            if isinstance(event, dict) and "timings" in event:
                event["timings"]["prompt_ms"] = 1e3 * one.prompt_s
            await _event(writer, event)

    def _seconds(self, chunks, contexts):
        """What a step takes whose sequences get so many tokens each, until they hold ``contexts``.

        llama-server makes passes in which all sequences get as many tokens, of 512 at most.
        """
        seconds = 0.0
        while chunks:
            each = min(*chunks, 512 // len(chunks)) if self.kind == "llama-server" else None
            now = [each or n for n in chunks]
            cells = sum(context - n + taken for context, n, taken in zip(contexts, chunks, now, strict=True))
            seconds += STEP_S + CHUNK_S * len(now) + TOKEN_S * sum(n for n in now if n > 1) + CELL_S * cells
            left = [(n - taken, context) for n, taken, context in zip(chunks, now, contexts, strict=True) if n > taken]
            chunks, contexts = [n for n, _ in left], [context for _, context in left]
        return seconds

    async def _steps(self):
        while self._waiting or self._serving:
            new, self._waiting = self._waiting, []
            serving = [*self._serving, *new]
            prompts = sum(one.prompt for one in new)
            contexts = [one.prompt + one.sent for one in serving]
            took = self._seconds([*[1] * len(self._serving), *(one.prompt for one in new)], contexts)
            began = time.monotonic()
            await asyncio.sleep(self.factor * took)
            took = time.monotonic() - began
            self.steps.append((prompts, contexts, took))
            for one in serving:
                one.sent += 1
                one.tokens.put_nowait(one.sent)
            for one in new:
                one.prompt_s = took
            self._serving = [one for one in serving if one.sent < one.wanted]
