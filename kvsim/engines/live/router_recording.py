"""Recording what a real router decides, before workers of our own that answer when they are told to.

Requests are sent one after the other, each when the one before has come to a worker, and end one after the other, so
that the router decides in one order. The router ends with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import http_options
from kvsim.engines.recordings.recording_files import Record, check_target, write_recording
from kvsim.engines.recordings.router_replay import PACKAGES, our_router
from kvsim.errors import UserError
from policies.content import TextSegment

FOLDER = Path(sys.prefix, "routers")
"""The environment in which the routers are installed, unless the variable ``KVSIM_ROUTERS`` names another."""
START_S = 60.0
"""Seconds in which a router has to be ready."""
ANSWER_S = 20.0
"""Seconds in which a request has to come to a worker, or its answer to us."""
_SETTLE_S = 0.01
"""Seconds after an answer in which the router notes that the request has ended."""
_ASKED_S = 4.5
"""Seconds in which a worker says its load: smg waits for five."""
_NOTED_S = 0.2
"""Seconds after a report in which the router notes it."""
_MOST_AT_ONCE = 3
"""Requests at once for each worker, but for a burst."""
_BURST = 100
_CHARACTERS = 4
"""Characters of a token; all the same one, so that two tokens have none in common."""
_FIRST = 0x20000
"""The character of the first token; there are some hundred thousand from here on."""

_EVICTION = "--eviction-interval-secs"
_EVICTED = (b"eviction completed", b"Tree memory: ")
"""What routers log when they have forgotten what is oldest: at the level debug, and smg at info."""
_LACKING = {
    "report": "it asks for no loads",
    "evict": "it logs nothing of what it forgets; --log-level debug makes it, or info that of smg",
}
"""Why a router does not do what is waited for."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""What vLLM's ``/metrics`` say of its load."""

# The process is killed when the thread dies that has started it (Linux; the packages are for no other system).
_RUN = (
    "import ctypes, runpy, sys; ctypes.CDLL(None).prctl(1, 9); "
    "runpy.run_module(sys.argv.pop(1) + '.launch_router', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class RouterRecording:
    """What was recorded."""

    file: str
    package: str
    version: str
    policy: str
    workers: int
    requests: int


def record_router(
    package: str,
    policy: str,
    path: Path,
    *,
    workers: int = 3,
    requests: int = 400,
    seed: int = 0,
    flags: Sequence[str] = (),
    loads: bool = False,
) -> RouterRecording:
    """Start a router of a package before ``workers``, send it requests, and write which worker got each.

    ``flags``: of the router, besides its policy and addresses; ``loads``: workers report loads, as vLLM does. Raises
    ``UserError`` in one line.
    """
    our_router(package, policy)
    check_target(path)
    folder = Path(os.environ.get("KVSIM_ROUTERS") or FOLDER)
    python = folder / "bin" / "python"
    if not python.exists():
        raise UserError(f"{folder}: no routers are installed there; make test-routers does it, or set KVSIM_ROUTERS")
    found = subprocess.run(
        [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise UserError(f"{folder}: {package} is not installed there")
    version = found.stdout.strip()
    steps = list(script(workers, requests, seed, loads=loads, evicts=_EVICTION in flags))
    asks = ["--load-monitor-interval", "1"] if loads else []
    names, records = asyncio.run(_record(python, package, policy, workers, [*asks, *flags], steps))
    header: Record = {"type": "meta", "kind": "router", "package": package, "version": version, "policy": policy}
    header |= {"workers": workers, "names": names, "flags": list(flags), "requests": requests, "seed": seed}
    write_recording(path, [header, *records, {"do": "check"}])
    return RouterRecording(str(path), package, version, policy, workers, requests)


def script(workers: int, requests: int, seed: int, *, loads: bool = False, evicts: bool = False) -> Iterator[Record]:
    """Starts and ends of requests, in order: some one by one, some at once, and a burst of one beginning.

    ``loads``: now and then, workers report requests and a share of their cache; ``evicts``: now and then, what has
    been used longest ago is forgotten, and there is no burst, which could take longer than until the next time.
    """
    rng = random.Random(seed)
    texts = _texts(rng)
    running: list[int] = []
    number = 0

    def start(at_most: int, text: Iterator[list[TextSegment]]) -> Iterator[Record]:
        nonlocal number
        for _ in range(min(at_most, requests - number)):
            running.append(number)
            yield {"do": "start", "request": number, "text": next(text), "session": rng.randrange(40)}
            number += 1

    def end(leave: int) -> Iterator[Record]:
        while len(running) > leave:
            yield {"do": "end", "request": running.pop(rng.randrange(len(running)))}

    burst_at = requests if evicts else requests // 2
    while number < requests:
        if number >= burst_at:
            burst_at = requests
            beginning = (2_000, 0, 260)
            yield from start(_BURST, ([beginning, (3_000 + i, 0, rng.randrange(1, 60))] for i in range(_BURST)))
            yield from end(rng.randrange(_BURST // 2))
        most = rng.choice([0, 0, workers, _MOST_AT_ONCE * workers])
        if evicts:
            yield {"do": "evict"}
        if loads:
            report = [[rng.randrange(8), rng.choice([0, 0, 3, 9]), round(rng.random(), 3)] for _ in range(workers)]
            yield {"do": "report", "loads": report}
        for _ in range(rng.randrange(5, 30)):
            yield from end(rng.randrange(most + 1))
            yield from start(1, texts)
        yield from end(0)


def _texts(rng: random.Random) -> Iterator[list[TextSegment]]:
    """Prompts: of families with a beginning in common, conversations that grow, and some that are like no other."""
    families = [[(source, 0, rng.randrange(10, 300))] for source in range(8)]
    source = 100
    conversations: list[list[TextSegment]] = []
    while True:
        source += 1
        kind = rng.random()
        tail = (source, 0, rng.randrange(1, 300))
        if kind < 0.15:
            yield [tail]
        elif kind < 0.6 or not conversations:
            family = rng.choice(families)
            text = [*family, tail]
            if rng.random() < 0.3:  # Cut within the beginning.
                text = [(family[0][0], 0, rng.randrange(1, family[0][2])), tail]
            if rng.random() < 0.3:
                conversations = [*conversations[-9:], list(text)]
            yield text
        else:
            conversation = rng.choice(conversations)
            if sum(n for _, _, n in conversation) < 800:
                conversation.append(tail)
            yield list(conversation)


def prompt_text(text: Sequence[TextSegment], known: dict[tuple[int, int], str]) -> str:
    """The characters of a text; ``known``: those of each token so far."""
    tokens = ((source, start + i) for source, start, n in text for i in range(n))
    return "".join(known.setdefault(token, chr(_FIRST + len(known)) * _CHARACTERS) for token in tokens)


class _Workers:
    """Workers that say where each request has come, and answer it when they are told to."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[tuple[int, asyncio.Event]] = asyncio.Queue()
        """The worker that a request has come to, and what has to happen before it is answered."""
        self._asked: dict[int, asyncio.Future[Sequence[float]]] | None = None
        """The workers whose load the router has asked for, and what they are to say: running and waiting requests, and
        the share of the cache. None before the first report: until then they say nothing."""

    async def report(self, loads: Sequence[Sequence[float]]) -> None:
        """Answer the router when it has asked all workers for their loads; from then on it has to wait for the next."""
        self._asked = {} if self._asked is None else self._asked
        while len(self._asked) < len(loads):
            await asyncio.sleep(_SETTLE_S)
        for worker, asked in self._asked.items():
            if asked.done():
                raise UserError("this machine is too slow: the router has waited too long for a report")
            asked.set_result(loads[worker])
        self._asked = {}

    async def listen(self, stack: AsyncExitStack, workers: int) -> list[str]:
        """Listen at as many ports as there are workers; their addresses."""
        urls = []
        for worker in range(workers):
            server = await asyncio.start_server(partial(self._serve, worker), "127.0.0.1", 0)
            await stack.enter_async_context(server)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return urls

    async def _serve(self, worker: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, ValueError, IndexError, TimeoutError, asyncio.CancelledError):
            while True:
                first, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                lengths = [line.split(":")[1] for line in headers if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                status, answer = await self._answer(worker, first.split(" ")[1], body)
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                await writer.drain()
        writer.close()

    async def _answer(self, worker: int, path: str, body: bytes) -> tuple[str, Any]:
        if path == "/health":
            return "200 OK", {}
        if path == "/v1/models":
            return "200 OK", {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}
        if path == "/v1/completions/render":  # As vLLM makes tokens of a prompt.
            return "200 OK", [{"token_ids": [ord(c) for c in json.loads(body)["prompt"][::_CHARACTERS]]}]
        if path == "/v1/completions":
            go_on = asyncio.Event()
            self.came.put_nowait((worker, go_on))
            await go_on.wait()
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            return "200 OK", {"id": "a", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
        if path == "/metrics" and self._asked is not None:
            asked = self._asked[worker] = asyncio.get_running_loop().create_future()
            values = zip(_GAUGES, await asyncio.wait_for(asked, _ASKED_S), strict=True)
            return "200 OK", "".join(f"vllm:{name} {value}\n" for name, value in values)
        return "404 Not Found", {}


async def _record(
    python: Path, package: str, policy: str, workers: int, flags: Sequence[str], steps: Sequence[Record]
) -> tuple[list[str], list[Record]]:
    """The workers' addresses in the order in which the router has them, and the steps with the worker of each."""
    async with AsyncExitStack() as stack:
        fakes = _Workers()
        urls = await fakes.listen(stack, workers)
        said = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        port, other = _free_ports(2)
        words = [str(python), "-c", _RUN, PACKAGES[package], "--host", "127.0.0.1", "--port", str(port)]
        words += ["--prometheus-port", str(other), "--policy", policy, "--worker-urls", *urls, *flags]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said
        )
        address = Address(f"http://127.0.0.1:{port}")
        try:
            options = http_options(address) | {"timeout": None, "limits": httpx.Limits(max_connections=None)}
            async with httpx.AsyncClient(**options) as http:
                await _ready(http, process, workers, said)
                known = (await http.get("/workers", timeout=ANSWER_S)).json()["workers"]
                if package == "smg":  # It lists them in another order than that in which they came and are looked at.
                    known.sort(key=lambda worker: worker["id"])
                names = [worker["url"] for worker in known]
                return names, await _send(http, fakes, [names.index(url) for url in urls], steps, said)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _free_ports(n: int) -> list[int]:
    """Ports of this machine at which nothing listens now."""
    sockets = [socket.socket() for _ in range(n)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def _evicted(said: IO[bytes], before: int) -> int:
    """Wait until the router has forgotten once more what is oldest; how often it has. Raises ``UserError``."""
    first = None
    while True:
        log = os.pread(said.fileno(), os.fstat(said.fileno()).st_size, 0)
        times = max(log.count(words) for words in _EVICTED)
        first = times if first is None else first
        if before and first > before:
            raise UserError("this machine is too slow: the router has forgotten something meanwhile")
        if times > first:
            return times
        await asyncio.sleep(_SETTLE_S)


async def _ready(http: httpx.AsyncClient, process: asyncio.subprocess.Process, workers: int, said: Any) -> None:
    """Wait until a router knows all of its workers. Raises ``UserError`` if it ends, or is not ready in time."""
    until = asyncio.get_running_loop().time() + START_S
    while process.returncode is None and asyncio.get_running_loop().time() < until:
        with suppress(httpx.HTTPError, ValueError):
            answer = await http.get("/readiness", timeout=2.0)
            if answer.status_code == 200 and answer.json().get("healthy_workers") == workers:
                return
        await asyncio.sleep(0.1)
    said.seek(0)
    lines = [line for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"not ready after {START_S:g} s" if process.returncode is None else f"ended with code {process.returncode}"
    raise UserError(f"the router: {how}; it said last: {lines[-1][:200] if lines else 'nothing'}")


async def _arrival(fakes: _Workers, task: asyncio.Task[httpx.Response]) -> tuple[int, asyncio.Event]:
    """Wait until a request has come to a worker. Raises ``UserError`` if it is answered before, or not in time."""
    coming = asyncio.create_task(fakes.came.get())
    await asyncio.wait({task, coming}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
    if coming.done():
        return coming.result()
    coming.cancel()
    why = f"HTTP {task.result().status_code}: {task.result().text[:200]}" if task.done() else "no answer"
    task.cancel()
    raise UserError(f"the router: a request came to no worker: {why}")


async def _send(
    http: httpx.AsyncClient, fakes: _Workers, numbers: Sequence[int], steps: Sequence[Record], said: IO[bytes]
) -> list[Record]:
    """The steps with the worker of each; ``numbers``: what the router's order has for each of the workers."""
    known: dict[tuple[int, int], str] = {}
    running: dict[int, tuple[asyncio.Task[httpx.Response], asyncio.Event]] = {}
    records = []
    evictions = 0
    try:
        for step in steps:
            if step["do"] == "end":
                task, go_on = running.pop(step["request"])
                go_on.set()
                (await asyncio.wait_for(task, ANSWER_S)).raise_for_status()
                await asyncio.sleep(_SETTLE_S)
            elif step["do"] == "evict":
                evictions = await asyncio.wait_for(_evicted(said, evictions), ANSWER_S)
            elif step["do"] == "report":
                await asyncio.wait_for(fakes.report([step["loads"][number] for number in numbers]), ANSWER_S)
                await asyncio.sleep(_NOTED_S)
            else:
                body = {"model": "m", "prompt": prompt_text(step["text"], known), "max_tokens": 1}
                headers = {"x-session-id": str(step["session"])}
                task = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
                worker, go_on = await _arrival(fakes, task)
                running[step["request"]] = task, go_on
                step = {**step, "server": numbers[worker]}
            records.append(step)
    except (httpx.HTTPError, TimeoutError) as e:
        why = _LACKING.get(step["do"], f"{type(e).__name__}: {e}".rstrip(": "))
        raise UserError(f"the router: step {len(records)} ({step['do']}): {why}") from None
    finally:
        for task, _ in running.values():
            task.cancel()
    return records
