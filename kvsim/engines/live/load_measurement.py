"""Putting a designed load on a server, staircase after staircase, each kept in a journal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from kvsim import machine
from kvsim.engines.live.address import Address, is_loopback
from kvsim.engines.live.client import Answer, Client, ServerFault
from kvsim.engines.live.load import (
    PASSING,
    Limits,
    Staircase,
    climb,
    completion_requests,
    fault_of,
    fitted,
    probes,
    round_of,
)
from kvsim.engines.live.load_runs import LoadJournal, LoadRequest, LoadRun, RunSamples, samples_of
from kvsim.engines.live.prompts import Vocabulary
from kvsim.engines.live.served import LiveServer
from kvsim.engines.live.settings import Counters, ask_counters
from kvsim.engines.live.vocabulary import find_vocabulary
from kvsim.scenario.scenario import Scenario
from workloads import named_rng

Report = Callable[[float], None]
"""Called with the share of the work done."""

_MOST_REQUESTS = 32
"""Requests that generate together, at most: beyond, steps are extrapolated."""
_PROBE_SHARE = 30
"""No prompt is longer than what the server computes in this part of the time."""
_LEAST_CONTEXT = 64
_FEW_TOKENS = 8
"""Tokens of others that change nothing, or were counted late."""
_IDLE = 0.1
"""Processors that must be idle, of those that the server leaves free, or other work is thought to disturb it."""
_FAULTS = 3
"""Staircases that may fail in a row."""


def limits_of(address: Address, scenario: Scenario) -> Limits:
    """What a server can be asked for. Raises ``UserError`` if that is too little."""
    context = scenario.slot_context
    if context < _LEAST_CONTEXT:
        raise ServerFault(f"{address}: a context of {context} tokens; at least {_LEAST_CONTEXT} are needed")
    requests, batch = min(scenario.server.slots, _MOST_REQUESTS), scenario.n_batch
    # Short contexts cannot hold what the first request generates while many others begin.
    while requests > 1 and _longest_answer(requests, batch) > context // 2:
        requests -= 1
    shared = scenario.unified or scenario.server.scheduler == "vllm"
    cells = scenario.cache.cells if shared else requests * context
    finds = scenario.server.scheduler == "llama-server"
    return Limits(requests, context - _LEAST_CONTEXT // 2, context, cells, batch, finds)


def _longest_answer(requests: int, batch: int) -> int:
    """Tokens of the first request of a staircase of short prompts."""
    return Staircase((1,) * (requests + PASSING), batch, PASSING).output_tokens[0]


@dataclass
class LoadMeasurement:
    """What was measured of a server so far."""

    server: LiveServer
    journal: LoadJournal
    runs: list[LoadRun]
    seconds: float
    """The time budget."""
    report: Report | None = None
    counts: bool = True
    """Whether the server counts its tokens, so that others who use it can be seen."""
    found: list[RunSamples] = field(default_factory=list)
    """What each run tells."""
    _own: int = 0
    """Tokens that the server has computed for us since ``_start``."""
    _of_others: int = 0
    _start: Counters | None = None

    def __post_init__(self) -> None:
        self.scenario = self.server.served.scenario
        self.limits = limits_of(self.server.address, self.scenario)
        self.found = [samples_of(run, self.scenario) for run in self.runs]
        self.resumed = len(self.runs)

    @property
    def rounds(self) -> float:
        """Rounds of staircases that were climbed."""
        probed = sum(run.probe for run in self.runs)
        return (len(self.runs) - probed) / len(round_of(self.limits, 1, named_rng(0, "round")))

    def measure(self, ended: Callable[[LoadMeasurement, float], bool]) -> None:
        """Climb staircases until ``ended``, which is asked with the seconds since the beginning.

        Raises ``ServerFault``; what was measured is then in the journal.
        """
        asyncio.run(self._measure(ended))

    async def _measure(self, ended: Callable[[LoadMeasurement, float], bool]) -> None:
        began = time.monotonic()
        address, settings = self.server.address, self.server.settings
        async with Client(address, settings.api, settings.model, key=self.server.key) as client:
            vocabulary = await find_vocabulary(client, settings)
            self._count_anew()
            await self._probe(client, vocabulary)
            while not ended(self, elapsed := time.monotonic() - began):
                if self.report is not None:
                    self.report(min(1.0, elapsed / self.seconds))
                await self._climb(client, vocabulary, self._next(), probe=False)

    async def _probe(self, client: Client, vocabulary: Vocabulary) -> None:
        """Send longer and longer prompts until one takes long."""
        done = sum(run.probe for run in self.runs)
        if done and self._slow(next(run for run in reversed(self.runs) if run.probe)):
            return
        for stairs in probes(self.limits)[done:]:
            if self._slow(await self._climb(client, vocabulary, stairs, probe=True)):
                return

    def _slow(self, run: LoadRun) -> bool:
        first = run.requests[0]
        return first.token_s[0] - first.sent_s > self.seconds / _PROBE_SHARE

    def _next(self) -> Staircase:
        """The next staircase of the endless row of rounds."""
        longest = max(run.requests[0].prompt_tokens for run in self.runs if run.probe)
        done = sum(not run.probe for run in self.runs)
        size = len(round_of(self.limits, 1, named_rng(0, "round")))
        number, place = divmod(done, size)
        return round_of(self.limits, longest, named_rng(0, f"server calibration round {number}"))[place]

    async def _climb(self, client: Client, vocabulary: Vocabulary, stairs: Staircase, *, probe: bool) -> LoadRun:
        """Climb a staircase, again if that fails, and keep what was seen. Raises ``ServerFault``."""
        rng = named_rng(len(self.runs), "server calibration prompts")
        for attempt in range(_FAULTS):
            before = machine.processor_time()
            requests = completion_requests(stairs, vocabulary, client.api, rng)
            answers = await climb(client, requests, time.monotonic())
            fault = fault_of(answers, stairs)
            if fault is None:
                busy = is_busy(self.server, before, machine.processor_time())
                return self._keep(answers, probe, busy=busy)
            # What the server computed for requests that failed is not known.
            self._count_anew()
            if attempt:
                shorter = tuple(max(1, n // 2) for n in stairs.prompts)
                stairs = fitted(replace(stairs, prompts=shorter), self.limits)
        raise ServerFault(f"{self.server.address}: {fault}")

    def _keep(self, answers: list[Answer], probe: bool, *, busy: bool) -> LoadRun:
        run = LoadRun(
            origin=len(self.runs),
            requests=tuple(map(_request, answers)),
            probe=probe,
            shared=self._shared(answers),
            busy=busy,
        )
        self.journal.add(run)
        self.runs.append(run)
        self.found.append(samples_of(run, self.scenario))
        return run

    def _count_anew(self) -> None:
        """Take the server's counters as they are now for the beginning."""
        self._own = self._of_others = 0
        self._start = ask_counters(self.server.address, key=self.server.key)
        self.counts = self._start is not None

    def _shared(self, answers: list[Answer]) -> bool:
        """Whether the server's counters have moved by more than what we asked for."""
        self._own += sum((a.prompt_tokens or 0) - (a.cached_tokens or 0) + a.output_tokens for a in answers)
        now = ask_counters(self.server.address, key=self.server.key) if self.counts else None
        if now is None or self._start is None:
            return False
        counted = now.prompt_tokens + now.output_tokens - self._start.prompt_tokens - self._start.output_tokens
        # Counters may be behind; what is missing of ours is then seen later.
        if counted - self._own <= self._of_others + _FEW_TOKENS:
            return False
        self._of_others = counted - self._own
        return True


def is_busy(server: LiveServer, before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """Whether the processors that a server on this machine leaves free were taken by other work.

    ``before``, ``after``: of ``machine.processor_time``. False where that cannot be known.
    """
    threads = server.served.threads
    free = (os.cpu_count() or 1) - threads
    local = is_loopback(urlsplit(server.address.url).hostname or "")
    if before is None or after is None or after[1] <= before[1] or free < 1 or not local:
        return False
    idle = (after[0] - before[0]) / (after[1] - before[1])
    return idle * (free + threads) < _IDLE * free


def _request(answer: Answer) -> LoadRequest:
    prompt_ms = (answer.result.get("timings") or {}).get("prompt_ms")
    return LoadRequest(
        prompt_tokens=answer.prompt_tokens or 0,
        sent_s=round(answer.sent_s, 6),
        token_s=tuple(round(t, 6) for t in answer.token_s),
        prompt_s=None if prompt_ms is None else prompt_ms / 1e3,
        cached=answer.cached_tokens or 0,
    )
