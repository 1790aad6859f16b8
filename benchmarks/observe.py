"""How much later the first token comes through ``kvsim observe``.

    python -m benchmarks.observe [--pairs N] [--json]

A small server streams short answers to one client, directly and through the proxy, in pairs whose order changes, so
that a busy machine slows both alike. Server and proxy are processes of their own. What the proxy adds is the median
over the pairs of the difference between both times to the first event; its interval is that of the sign test (at least
95 %). Exits with 1 if the median is over the goal.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer

from benchmarks.speed import ROOT
from benchmarks.startup import sign_interval

GOAL_MS = 2.0
PATH = "/v1/chat/completions"
_PROMPT_S = 0.005
_TOKEN_S = 0.001
_UNCOUNTED = 20
"""Pairs at the start that are not counted: code is loaded, and buffers grow."""


@dataclass(frozen=True)
class Added:
    """What the proxy adds to the time to the first token, in ms."""

    prompt_bytes: int
    others: int
    """Other requests that run meanwhile."""
    direct_ms: float
    added_ms: float
    low_ms: float
    high_ms: float
    pairs: int


def serve(tokens: int) -> None:
    """Run the small server; its first line of output is its port."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(_PROMPT_S)
        for _ in range(tokens):
            yield b'data: {"choices": [{"index": 0, "delta": {"content": " word"}}]}\n\n'
            await asyncio.sleep(_TOKEN_S)
        yield b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 9}}\n\ndata: [DONE]\n\n'

    async def chat(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    # asyncio sends small pieces at once only on sockets that say that they are TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    app = Starlette(routes=[Route(PATH, chat, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off")).run([listener])


@contextmanager
def running(*words: str) -> Iterator[str]:
    """A process of this project, and the first line that it says on standard error or output."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.terminate()
        process.communicate()


def first_event_s(client: httpx.Client, url: str, body: bytes) -> float:
    """Seconds until the first event of an answer."""
    began = time.perf_counter()
    with client.stream("POST", url + PATH, content=body) as told:
        pieces = told.iter_raw()
        next(pieces)
        took = time.perf_counter() - began
        for _ in pieces:
            pass
    return took


def measure(direct: str, through: str, prompt_bytes: int, pairs: int, others: int) -> Added:
    """Times of requests in pairs, while ``others`` run through the proxy."""
    body = json.dumps(
        {"stream": True, "messages": [{"role": "user", "content": "a word " * (prompt_bytes // 7)}]}
    ).encode()
    times: list[tuple[float, float]] = []
    words = ("-m", "benchmarks.observe", "--load", through, "--others", str(others))
    with running(*words) if others else nullcontext("running\n") as said:
        assert said == "running\n", said
        with httpx.Client(trust_env=False, timeout=60) as client:
            for pair in range(_UNCOUNTED + pairs):
                order = (direct, through) if pair % 2 else (through, direct)
                taken = {url: first_event_s(client, url, body) for url in order}
                times.append((taken[direct], taken[through]))
    counted = times[_UNCOUNTED:]
    added = [(through_s - direct_s) * 1e3 for direct_s, through_s in counted]
    low, high = sign_interval(added)
    return Added(prompt_bytes, others, median(d for d, _ in counted) * 1e3, median(added), low, high, pairs)


async def load(url: str, others: int) -> None:
    """Keep so many requests running through the proxy."""

    async def keep_asking(client: httpx.AsyncClient) -> None:
        body = {"stream": True, "messages": [{"role": "user", "content": "a word " * 300}]}
        while True:
            async with client.stream("POST", url + PATH, json=body) as told:
                async for _ in told.aiter_raw():
                    pass

    print("running", flush=True)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        await asyncio.gather(*(keep_asking(client) for _ in range(others)))
        await asyncio.Event().wait()


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of requests, directly and through the proxy.", min=6)] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    server: Annotated[bool, typer.Option("--server", hidden=True)] = False,
    tokens: Annotated[int, typer.Option(hidden=True)] = 10,
    load_url: Annotated[str | None, typer.Option("--load", hidden=True)] = None,
    others: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure what kvsim observe adds to the time to the first token."""
    if server:
        serve(tokens)
        return
    if load_url is not None:
        asyncio.run(load(load_url, others))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder, running("-m", "benchmarks.observe", "--server") as port:
        direct = f"http://127.0.0.1:{int(port)}"
        out = str(Path(folder) / "observed.jsonl")
        words = ("-m", "kvsim", "observe", "--upstream", direct, "--port", "0", "--out", out)
        with running(*words) as said:
            through = said.split("can now use ")[1].split(";")[0]
            for prompt_bytes, n_others in ((2_000, 0), (100_000, 0), (2_000, 4)):
                found.append(measure(direct, through, prompt_bytes, pairs, n_others))
    if as_json:
        print(json.dumps({"goal_ms": GOAL_MS, "rows": [asdict(row) for row in found]}))
    else:
        print(f"{'prompt bytes':>12} {'others':>6} {'direct ms':>9} {'added ms':>8} {'95 % interval':>16}")
        for row in found:
            interval = f"{row.low_ms:.2f} to {row.high_ms:.2f}"
            print(f"{row.prompt_bytes:12,} {row.others:6} {row.direct_ms:9.2f} {row.added_ms:8.2f} {interval:>16}")
        print(f"medians of {pairs} pairs; goal: {GOAL_MS:g} ms without others")
    if any(row.added_ms > GOAL_MS for row in found if not row.others):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
