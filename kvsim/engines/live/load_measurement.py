"""Putting a designed load on a server, staircase after staircase, each kept in a journal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from urllib.parse import urlsplit

from kvsim import machine
from kvsim.engines.live import load
from kvsim.engines.live.address import Address, is_loopback
from kvsim.engines.live.bounded import Deadline, ServerFault
from kvsim.engines.live.client import TIME_OVER, Answer, Client, CompletionRequest
from kvsim.engines.live.load_runs import LoadJournal, LoadRequest, LoadRun, RunSamples, pace_of, samples_of
from kvsim.engines.live.prompts import Vocabulary
from kvsim.engines.live.served import LiveServer
from kvsim.engines.live.settings import Counters, ask_counters_of, ask_serving
from kvsim.engines.live.vocabulary import find_vocabulary
from kvsim.errors import counted
from kvsim.scenario.scenario import Scenario
from workloads import named_rng

Report = Callable[[float, str], None]
"""Called with the share of the time that is over, and what is being measured."""

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
_TOLD_S = 0.25
_SLOWER = 3.0
"""How many times as long a step must take as with like work before to be noticed."""


def limits_of(address: Address, scenario: Scenario) -> load.Limits:
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
    return load.Limits(requests, context - _LEAST_CONTEXT // 2, context, cells, batch, finds)


def _longest_answer(requests: int, batch: int) -> int:
    """Tokens of the first request of a staircase of short prompts."""
    return load.Staircase((1,) * (requests + load.PASSING), batch, load.PASSING).output_tokens[0]


@dataclass
class LoadMeasurement:
    """What was measured of a server so far."""

    server: LiveServer
    journal: LoadJournal
    runs: list[LoadRun]
    deadline: Deadline
    """When measuring ends, whatever the server does."""
    report: Report | None = None
    notice: Callable[[str], object] | None = None
    """Told at once what disturbs the measurement."""
    counts: bool = True
    """Whether the server counts its tokens, so that others who use it can be seen."""
    found: list[RunSamples] = field(default_factory=list)
    """What each run tells."""
    fault: str | None = None
    """Why the latest answers were of no use; None if they were."""
    silent_s: float = 0.0
    """For how long the server had said nothing when the time was over."""
    few: str = ""
    """What there is too little of, in words; empty if nothing is missing."""
    load_before: float = field(default_factory=machine.system_load)
    _doing: str = "what its prompts can be made of"
    _own: int = 0
    """Tokens that the server has computed for us since ``_start``."""
    _of_others: int = 0
    _start: Counters | None = None
    _noticed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scenario = self.server.served.scenario
        self.limits = limits_of(self.server.address, self.scenario)
        self.found = [samples_of(run, self.scenario) for run in self.runs]
        self.resumed = len(self.runs)

    @property
    def rounds(self) -> float:
        """Rounds of staircases that were climbed."""
        probed = sum(run.probe for run in self.runs)
        return (len(self.runs) - probed) / len(load.round_of(self.limits, 1, named_rng(0, "round")))

    @property
    def at_once(self) -> float:
        """Share of the steps whose tokens came at once with those of the next."""
        return sum(found.at_once for found in self.found) / max(
            1, sum(len(run.requests[0].token_s) for run in self.runs)
        )

    def measure(self, ended: Callable[[LoadMeasurement], bool]) -> None:
        """Climb staircases until ``ended`` or the time is over, by which the last one is cut.

        Raises ``ServerFault``; what was measured is then in the journal.
        """
        asyncio.run(self._measure(ended))

    async def _measure(self, ended: Callable[[LoadMeasurement], bool]) -> None:
        address, settings = self.server.address, self.server.settings
        told = asyncio.create_task(self._tell())
        try:
            async with Client(
                address, settings.api, settings.model, key=self.server.key, deadline=self.deadline
            ) as client:
                vocabulary = await find_vocabulary(client, settings)
                await self._look_for_others(client)
                await self._count_anew(client)
                await self._probe(client, vocabulary)
                while self.deadline.left_s > 0 and not ended(self):
                    await self._climb(client, vocabulary, self._next(), probe=False)
        except ServerFault as e:
            if self.deadline.left_s > 0:
                raise
            self.fault = self.fault or (None if str(e).endswith(TIME_OVER) else str(e))
        finally:
            told.cancel()

    async def _look_for_others(self, client: Client) -> None:
        """Notice requests that are there before ours: later, they may be ours that were cut."""
        if len(self.runs) == self.resumed and (serving := await ask_serving(client)):
            others = f"serves {counted(serving, 'request')} of others"
            self._notice("serving", f"{others}; what is measured beside them says little")

    async def _tell(self) -> None:
        """Report what goes on."""
        while self.report is not None:
            shared = sum(run.shared for run in self.runs)
            of_others = f", others beside {shared} of {counted(len(self.runs), 'measurement')}" if shared else ""
            left = f"{self.deadline.left_s:.0f} s left"
            share = min(1.0, self.deadline.elapsed_s / self.deadline.seconds)
            self.report(share, f"{self._doing}{of_others}, {left}")
            await asyncio.sleep(_TOLD_S)

    def _notice(self, kind: str, what: str) -> None:
        """Say once what disturbs the measurement."""
        if self.notice is not None and kind not in self._noticed:
            self.notice(f"{self.server.address}: {what}")
        self._noticed.add(kind)

    async def _probe(self, client: Client, vocabulary: Vocabulary) -> None:
        """Send longer and longer prompts until one takes long."""
        done = sum(run.probe for run in self.runs)
        if done and self._slow(next(run for run in reversed(self.runs) if run.probe)):
            return
        for stairs in load.probes(self.limits)[done:]:
            run = await self._climb(client, vocabulary, stairs, probe=True)
            if run is None or self._slow(run):
                return

    def _slow(self, run: LoadRun) -> bool:
        first = run.requests[0]
        return first.token_s[0] - first.sent_s > self.deadline.seconds / _PROBE_SHARE

    def _next(self) -> load.Staircase:
        """The next staircase of the endless row of rounds."""
        longest = max(run.requests[0].prompt_tokens for run in self.runs if run.probe)
        done = sum(not run.probe for run in self.runs)
        size = len(load.round_of(self.limits, 1, named_rng(0, "round")))
        number, place = divmod(done, size)
        return load.round_of(self.limits, longest, named_rng(0, f"server calibration round {number}"))[place]

    async def _climb(
        self, client: Client, vocabulary: Vocabulary, stairs: load.Staircase, *, probe: bool
    ) -> LoadRun | None:
        """Climb a staircase, again if that fails, and keep what was seen; None if the time was over before anything
        was. Raises ``ServerFault``.
        """
        rng = named_rng(len(self.runs), "server calibration prompts")
        kind = f"a prompt of {counted(stairs.prompts[0], 'token')} alone"
        self._doing = (
            kind if probe else f"measurement {len(self.runs) + 1}, of {counted(len(stairs.prompts), 'request')}"
        )
        for attempt in range(_FAULTS):
            before, clock = machine.processor_time(), time.monotonic()
            requests = load.completion_requests(stairs, vocabulary, client.api, rng)
            answers = await load.climb(client, requests, clock)
            if any(answer.error == TIME_OVER for answer in answers):
                latest = max(max(answer.token_s, default=answer.sent_s) for answer in answers)
                self.silent_s = max(self.silent_s, time.monotonic() - clock - latest)
                return self._keep_cut(answers, requests, probe)
            self.fault = load.fault_of(answers, stairs)
            if self.fault is None:
                busy = is_busy(self.server, before, machine.processor_time())
                shared = await self._shared(client, answers)
                return self._keep(tuple(map(_request, answers)), probe, shared=shared, busy=busy)
            # What the server computed for requests that failed is not known.
            await self._count_anew(client)
            if attempt:
                shorter = tuple(max(1, n // 2) for n in stairs.prompts)
                if len(answers) < len(shorter):  # A slow client, or a fast server: fewer can come in time.
                    stairs = replace(stairs, passing=0, goes_on=False)
                    shorter = shorter[: max(1, len(answers) // 2)]
                stairs = load.fitted(replace(stairs, prompts=shorter), self.limits)
        raise ServerFault(f"{self.server.address}: {self.fault}")

    def _keep_cut(
        self, answers: Sequence[Answer], requests: Sequence[CompletionRequest], probe: bool
    ) -> LoadRun | None:
        """Keep what was seen of a staircase until it was cut; None if that is nothing."""
        seen = load.begun(answers, requests)
        if not seen or probe:
            return None
        # Whether others were there meanwhile cannot be told while our own requests are.
        shared = bool(self.runs) and self.runs[-1].shared
        return self._keep(tuple(map(_request, seen)), probe, shared=shared, busy=False)

    def _keep(self, requests: tuple[LoadRequest, ...], probe: bool, *, shared: bool, busy: bool) -> LoadRun:
        run = LoadRun(origin=len(self.runs), requests=requests, probe=probe, shared=shared, busy=busy)
        self._look_at_pace(run)
        self.journal.add(run)
        self.runs.append(run)
        self.found.append(samples_of(run, self.scenario))
        return run

    def _look_at_pace(self, run: LoadRun) -> None:
        """Notice steps that take much longer than those of like work before."""
        pace, held = pace_of(run)
        like = [other for other, of in map(pace_of, self.runs) if other and held / 2 <= of <= 2 * held]
        if len(like) > 1 and pace > _SLOWER * (usual := median(like)):
            times = f"a step takes {pace / usual:.1f} times as long as those with like work before"
            self._notice("pace", f"{times}: others use the server, or other work its machine")

    async def _count_anew(self, client: Client) -> None:
        """Take the server's counters as they are now for the beginning."""
        if self.deadline.left_s > 0:
            self._own = self._of_others = 0
            self._start = await ask_counters_of(client)
            self.counts = self._start is not None

    async def _shared(self, client: Client, answers: list[Answer]) -> bool:
        """Whether the server's counters have moved by more than what we asked for, or it serves others now."""
        self._own += sum((a.prompt_tokens or 0) - (a.cached_tokens or 0) + a.output_tokens for a in answers)
        if self.deadline.left_s == 0:
            return False
        if self._start is None:
            serving = await ask_serving(client)
            if serving:
                self._notice("shared", f"serves {counted(serving, 'request')} of others beside ours")
            return bool(serving)
        now = await ask_counters_of(client)
        if now is None:
            return False
        # Counters may be behind; what is missing of ours is then seen later.
        others = now.tokens - self._start.tokens - self._own - self._of_others
        if others <= _FEW_TOKENS:
            return False
        self._of_others += others
        self._notice("shared", f"computed {counted(others, 'token')} for others beside ours, which then say little")
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
