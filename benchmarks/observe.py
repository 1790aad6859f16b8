"""How much later tokens come through ``kvsim observe``, and how many it passes on in a second.

    python -m benchmarks.observe [--pairs N] [--seconds S] [--most STREAMS] [--json]

A small server streams tokens, each with the time at which it was sent, to a client that notes how old they are when
they come, directly and through the proxy, in pairs whose order changes. What the proxy adds is the median over the
pairs of the difference between both; its interval is that of the sign test (at least 95 %). The proxy, with the process
that looks at what passes, has one processor, and server and client share another.

On a machine that others use, ``--first`` lets these processes go before all others (it takes root, and real-time
priority): what is measured is then the proxy, and not how long one has to wait for a processor.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Annotated, cast

import psutil
import typer
import uvloop

from benchmarks.speed import ROOT
from benchmarks.startup import sign_interval

LOADS = ((1, 5.0), (32, 5.0), (1000, 50.0), (200, 10.0), (200, 5.0))
"""Streams, and milliseconds from one token of a stream to its next."""
GOAL_MS = 1.0
"""At P99, with 20,000 tokens a second."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":%d,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_CREATED = re.compile(rb'"created":(\d+)')
_RAMP_S = 1.0
"""Over which streams begin."""


@dataclass(frozen=True)
class Added:
    """What the proxy adds; times in ms, those in tuples a median with its interval."""

    streams: int
    gap_ms: float
    tokens_per_s: float
    """That came through the proxy while all streams ran."""
    direct_p50_ms: float
    direct_p99_ms: float
    added_p50_ms: tuple[float, float, float]
    added_p99_ms: tuple[float, float, float]
    added_first_ms: tuple[float, float, float]
    """To the time from a request to its first token, at the median of the streams."""
    cpu_us: float
    """Of the proxy's process for each token."""


class _Server(asyncio.Protocol):
    """Streams as many tokens as a request asks for, at a pace of its own."""

    due: list[tuple[float, int, _Server]] = []  # noqa: RUF012

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._asked = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head, _, body = self._asked.partition(b"\r\n\r\n")
        if len(body) < int(re.search(rb"(?i)content-length: (\d+)", head)[1]):  # type: ignore[index]
            return
        asked = json.loads(body)
        self._left, self._gap, self._at = asked["max_tokens"], asked["gap_ms"] / 1e3, time.monotonic()
        self._transport.write(_HEAD)
        self.token()
        self._at += random.random() * self._gap

    def token(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        event = _EVENT % time.monotonic_ns() + (b"" if self._left else b"data: [DONE]\n\n")
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"" if self._left else b"0\r\n\r\n"))
        if self._left:
            self._at += self._gap
            heapq.heappush(self.due, (self._at, id(self), self))


async def serve() -> None:
    """Run the small server; its first line of output is its port."""
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        while _Server.due and _Server.due[0][0] <= time.monotonic():
            heapq.heappop(_Server.due)[2].token()
        await asyncio.sleep(0.001)


class Noted:
    """What the streams of one run had."""

    def __init__(self, seconds: float):
        self.ages: list[int] = []
        """Of tokens, in ns."""
        self.firsts_s: list[float] = []
        """Times from a request to its first token."""
        self.tokens = 0
        """That came while all streams ran."""
        self.ramp_s = min(_RAMP_S, seconds / 2)
        began = time.monotonic_ns()
        self.all_run = range(began + round(self.ramp_s * 1e9), began + round(seconds * 1e9))


class _Client(asyncio.Protocol):
    """Asks once, and notes how old each token is."""

    def __init__(self, body: bytes, noted: Noted):
        self._body, self._noted = body, noted
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._sent = cast(asyncio.Transport, transport), time.monotonic()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(self._body)
        self._transport.write(head + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        came = _CREATED.findall(data)
        self._noted.ages += [now - int(created) for created in came]
        self._noted.tokens += len(came) if now in self._noted.all_run else 0
        if came and self._first:
            self._noted.firsts_s.append(now / 1e9 - self._sent)
            self._first = False
        if data.endswith(b"\r\n0\r\n\r\n"):
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or EOFError())


async def ask(port: int, streams: int, gap_ms: float, seconds: float) -> tuple[float, float, float, float]:
    """Run streams; tokens a second, how old tokens are at P50 and P99, and P50 of the time to the first, in ms."""
    loop, noted, clients = asyncio.get_running_loop(), Noted(seconds), []
    asked = {"stream": True, "max_tokens": max(2, round(seconds * 1e3 / gap_ms)), "gap_ms": gap_ms}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": "a word " * 300}]}).encode()
    for _ in range(streams):
        _, client = await loop.create_connection(lambda: _Client(body, noted), "127.0.0.1", port)
        clients.append(client.done)
        await asyncio.sleep(noted.ramp_s / streams)
    await asyncio.gather(*clients)
    ages = sorted(noted.ages)
    rate = noted.tokens / (len(noted.all_run) / 1e9)
    return rate, ages[len(ages) // 2] / 1e6, ages[int(0.99 * (len(ages) - 1))] / 1e6, median(noted.firsts_s) * 1e3


@contextmanager
def running(*words: str, processor: int, first: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of this project on one processor, and the first line that it says."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: prefer(processor, first),
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.wait()


def prefer(processor: int, first: bool) -> None:
    """Have this process on one processor, where there are several; before all others if ``first``."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[processor % len(allowed)]})
    if first:  # Processes that it starts itself are as others.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def measure(proxy: psutil.Process, direct: int, through: int, load: tuple[int, float], pairs: int, s: float) -> Added:
    """Run one load in pairs."""
    told: dict[int, list[tuple[float, float, float, float]]] = {direct: [], through: []}
    before = sum(proxy.cpu_times()[:2])
    for pair in range(pairs):
        for port in (direct, through) if pair % 2 else (through, direct):
            told[port].append(uvloop.run(ask(port, *load, s)))
    cpu_s = sum(proxy.cpu_times()[:2]) - before
    added = []
    for which in (1, 2, 3):
        differences = [b[which] - a[which] for a, b in zip(told[direct], told[through], strict=True)]
        added.append((median(differences), *sign_interval(differences)))
    p50, p99 = (median(round_[which] for round_ in told[direct]) for which in (1, 2))
    n_tokens = pairs * load[0] * max(2, round(s * 1e3 / load[1]))
    return Added(*load, median(r[0] for r in told[through]), p50, p99, *added, cpu_s / n_tokens * 1e6)


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of runs, directly and through the proxy.", min=6)] = 9,
    seconds: Annotated[float, typer.Option(help="For how long each stream goes on.", min=0.1)] = 2.0,
    most: Annotated[int, typer.Option(help="The most streams.")] = 1000,
    first: Annotated[bool, typer.Option("--first", help="Go before all other processes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    server: Annotated[bool, typer.Option("--server", hidden=True)] = False,
) -> None:
    """Measure what kvsim observe adds to the time of each token."""
    if server:
        uvloop.run(serve())
        return
    loads = [load for load in LOADS if load[0] <= most] if most >= LOADS[1][0] else [LOADS[0], (most, 5.0)]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "observed.jsonl")
        with running("-m", "benchmarks.observe", "--server", processor=1, first=first) as (_, port):
            words = f"-m kvsim observe --upstream http://127.0.0.1:{int(port)} --port 0 --out".split()
            with running(*words, out, "--json", processor=0, first=first) as (proxy, said):
                prefer(1, first)
                through = int(re.search(r"can now use http://127.0.0.1:(\d+)", said)[1])  # type: ignore[index]
                used = psutil.Process(proxy.pid)
                rows = [measure(used, int(port), through, load, pairs, seconds) for load in loads]
                proxy.send_signal(signal.SIGINT)
                recorded = json.loads(cast(IO[str], proxy.stdout).read())
    if as_json:
        print(json.dumps({"goal_ms": GOAL_MS, "rows": [asdict(row) for row in rows], "recorded": recorded}))
        return
    print(
        "streams gap ms tokens/s  direct P50, P99  added: P50            P99                    first token         CPU"
    )
    for row in rows:
        added = (row.added_p50_ms, row.added_p99_ms, row.added_first_ms)
        told = "  ".join(f"{middle:5.2f} ({low:.2f} to {high:.2f})" for middle, low, high in added)
        direct = f"{row.direct_p50_ms:6.2f} {row.direct_p99_ms:6.2f}"
        print(f"{row.streams:7,} {row.gap_ms:6g} {row.tokens_per_s:8,.0f} {direct}  {told}  {row.cpu_us:.0f} us")
    counts = "{requests} requests, {distorted} of them with distorted times, {missed} not looked at in full"
    print(f"recorded: {counts}".format(**recorded))
    load = f"load of the machine {os.getloadavg()[0]:.1f}"
    print(f"medians of {pairs} pairs, times in ms; {load}; goal: P99 {GOAL_MS:g} ms added at 20,000 tokens/s")


if __name__ == "__main__":
    typer.run(main)
