"""The simulator's own schedulers of vLLM, driven call by call: what they decide is logged, and nothing takes time."""

from __future__ import annotations

from typing import Any

from kvsim.engines.conformance.zero_time import ZeroTimeBackend
from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.vllm import Vllm
from kvsim.simulation.schedulers.vllm_async import AsyncVllm
from policies import Chunk, Content, MicroBatch
from policies.layouts.paged import PagedPolicy


class CallLoggingPolicy(PagedPolicy):
    """The paged policy, logging the scheduler's calls."""

    calls: list[list[Any]]
    name_of: dict[Content, str]

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Look up a prefix, and log it."""
        hit = super().match(seq, content, tokens)
        self.calls.append(["L", self.name_of[content], hit, self.found(seq)])
        return hit

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, lookahead: int = 0, in_flight: int = 0
    ) -> bool:
        """Reserve blocks, and log it."""
        s = self.tables[chunk.seq]
        held = len(s.blocks) or chunk.start // self.block_size
        computed, hit = (chunk.start, 0) if s.blocks else (0, chunk.start)
        done = super().reserve(chunk, whole=whole, waits=waits, lookahead=lookahead, in_flight=in_flight)
        new = list(s.blocks[held:]) if done else None
        self.calls.append(["A", self.name_of[s.content], computed, chunk.n, hit, new])
        return done


class Driven(Vllm):
    """vLLM's scheduler without our checks: like the original, it refuses no request, and waits for ever."""

    def __init__(self, scenario: Scenario, policy: CallLoggingPolicy, max_tokens: int):
        super().__init__(scenario, policy, ZeroTimeBackend(), Recorder())
        self._context, self._limit = max_tokens, max_tokens - 1
        self._log = policy
        self.let_go: list[Job] = []
        """Jobs whose blocks were freed at their end, since the list was last cleared."""
        self.preempted: list[Job] = []
        """Jobs that were preempted, since the list was last cleared."""
        self.placed: tuple[tuple[Chunk, ...], tuple[MicroBatch, ...]] = ((), ())
        """The last step and its micro-batches."""
        self._gone: set[Job] = set()

    def submit(self, job: Job, now: float) -> None:
        """Queue a request."""
        self.waiting.add(job)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone, unless its blocks were freed before."""
        if job not in self._gone:
            super().cancel(job, now)
            self._freed(job)

    def schedule(self, now: float) -> list[Chunk]:
        """Compose a step; empty where the original schedules nothing, and waits."""
        try:
            return list(super().schedule(now))
        except Livelock:
            return []

    def take_step(self, step: list[Chunk]) -> None:
        """Place a composed step and run it, so that its outcome can be seen."""
        self.placed = tuple(step), tuple(self._policy.allocate(step))
        self.commit(step, 1, 0.0)

    def _preempt(self, job: Job) -> None:
        super()._preempt(job)
        self.preempted.append(job)
        self._log.calls.append(["P", self._log.name_of[job.content]])

    def _let_go(self, job: Job) -> None:
        super()._let_go(job)
        self.let_go.append(job)
        self._freed(job)

    def _freed(self, job: Job) -> None:
        if job not in self._gone:
            self._gone.add(job)
            self._log.calls.append(["F", self._log.name_of[job.content]])

    def _refusal(self, job: Job) -> None:
        """Refuses nothing."""

    def _check_progress(self, now: float) -> None:
        """Never raise ``Livelock``."""


class DrivenAsync(Driven, AsyncVllm):
    """The asynchronous scheduler without our checks; the replay calls ``collect``."""


def build_scheduler(
    policy: CallLoggingPolicy, server: dict[str, Any], max_tokens: int, *, asynchronous: bool
) -> Driven:
    """The scheduler with these keys of ``[server]``. ``max_tokens``: of a sequence."""
    table = {"scheduler": "vllm", "async_scheduling": asynchronous, **server}
    scenario = load_scenario({"server": table, "cache": {"cells": policy.groups[0].cells}})
    return (DrivenAsync if asynchronous else Driven)(scenario, policy, max_tokens)
