"""A client of llama-server's ``/completion``: prompts of token ids, answers as a stream."""

import asyncio
import json
import time
from collections.abc import Sequence

from kvsim.engines.recordings.llama_server_join import SentRequest

_KEPT = ("id_slot", "truncated", "stop_type", "tokens_cached", "tokens_evaluated", "tokens_predicted")
_KEPT_TIMINGS = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")


def send(port: int, phases: Sequence[Sequence[SentRequest]], limit_s: float) -> None:
    """Send the requests of each phase at once, when all of the phase before have ended; fill in what came back.

    Raises ``TimeoutError`` if that takes longer than ``limit_s``.
    """
    asyncio.run(asyncio.wait_for(_send(port, phases), limit_s))


async def _send(port: int, phases: Sequence[Sequence[SentRequest]]) -> None:
    start = time.monotonic()
    for phase in phases:
        await asyncio.gather(*(_complete(port, request, start) for request in phase))


def _body(request: SentRequest) -> bytes:
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    fields = {
        "prompt": prompt,
        "n_predict": request.n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logit_bias": [[request.answer, 1000.0]],
        "mirostat_tau": request.mark,  # Not used without mirostat, but shown in the log.
        **request.params,
    }
    return json.dumps(fields).encode()


async def _complete(port: int, request: SentRequest, start: float) -> None:
    def now() -> float:
        return round(time.monotonic() - start, 6)

    request.mark = 100.0 + request.id  # The default, which other requests may have, is 5.
    body = _body(request)
    request.send_s = now()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(
            b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        request.status = int((await reader.readline()).split()[1])
        request.headers_s = now()
        chunked = False
        while (header := await reader.readline()) not in (b"\r\n", b""):
            chunked = chunked or header.lower().startswith(b"transfer-encoding: chunked")
        if chunked:
            await _read_stream(reader, request, now)
        else:
            _end(request, (await reader.read()).decode())
        request.done_s = now()
    finally:
        writer.close()


async def _read_stream(reader: asyncio.StreamReader, request: SentRequest, now) -> None:
    """Take in server-sent events, which may be cut anywhere by the chunks they come in."""
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *events, rest = rest.split(b"\n\n")
        for event in events:
            text = event.decode().partition(":")[2].strip()
            if '"stop":false' in text:
                request.token_s.append(now())
                request.tokens += json.loads(text)["tokens"]
            elif text and text != "[DONE]":
                _end(request, text)


def _end(request: SentRequest, text: str) -> None:
    """Take in the last message: a result or an error."""
    said = json.loads(text)
    if "error" in said or "code" in said:
        request.error = said.get("error", said)
        return
    timings = said.get("timings", {})
    request.result = {key: said[key] for key in _KEPT if key in said}
    request.result |= {key: timings[key] for key in _KEPT_TIMINGS if key in timings}
