"""vLLM's schedulers as replays drive them: without our checks, logging what they decide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsim.engines.recordings.recording_files import Record
from kvsim.engines.recordings.replay import ZeroTimeBackend
from kvsim.engines.recordings.vllm_blocks import PolicyStates
from kvsim.engines.recordings.vllm_groups import GroupCallLog
from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.offloading import ChunkCopy, Offloading, Part, StepCopies
from kvsim.simulation.schedulers.vllm import Vllm
from kvsim.simulation.schedulers.vllm_apart import ApartVllm, AsyncApartVllm, RemoteReads
from kvsim.simulation.schedulers.vllm_async import AsyncVllm
from kvsim.simulation.schedulers.vllm_offload import AsyncOffloadingVllm, OffloadingVllm
from policies import Chunk, Content, MicroBatch
from policies.layouts.paged import PagedPolicy


class CallLog(PagedPolicy):
    """The paged policy, logging the scheduler's calls."""

    calls: list[list[Any]]
    name_of: dict[Content, str]

    def tables_of(self, seq: int) -> list[int]:
        """The blocks that a sequence has."""
        return list(self.tables[seq].blocks)

    def content_of(self, seq: int) -> Content:
        """What a sequence says."""
        return self.tables[seq].content

    def states(self) -> PolicyStates:
        """Its states in the fields of recordings."""
        return PolicyStates(self.pool, self.block_size, lookahead=self.blocks.key_lookahead)

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Look up a prefix, and log it."""
        hit = super().match(seq, content, tokens)
        self.calls.append(["L", self.name_of[content], hit, self.admission.found(seq)])
        return hit

    def reserve(
        self,
        chunk: Chunk,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Reserve blocks, and log it."""
        s = self.tables[chunk.seq]
        held = len(s.blocks) or chunk.start // self.block_size
        computed, hit = (chunk.start, 0) if s.blocks else (0, chunk.start)
        done = super().reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known, lookahead=lookahead)
        new = list(s.blocks[held:]) if done else None
        self.calls.append(["A", self.name_of[s.content], computed, chunk.n, hit, new])
        return done


class Driven(Vllm):
    """vLLM's scheduler without our checks: like the original, it refuses no request, and waits for ever."""

    def __init__(self, scenario: Scenario, policy: CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, ZeroTimeBackend(), Recorder())
        self._context, self._limit = max_tokens, max_tokens - 1
        self._log = policy
        self.let_go: list[Job] = []
        """Jobs whose blocks were freed at their end, since the list was last cleared."""
        self.preempted: list[Job] = []
        """Jobs that were preempted, since the list was last cleared."""
        self.placed: tuple[MicroBatch, ...] = ()
        """The micro-batches of the last step."""
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
        self.placed = tuple(self._policy.allocate(step))
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

    def _refuses(self, job: Job, now: float) -> bool:
        return False

    def _count_step(self, progressed: bool, now: float) -> None:
        """Never raise ``Livelock``."""


class DrivenAsync(Driven, AsyncVllm):
    """The asynchronous scheduler without our checks; the replay calls ``collect``."""


class _OffloadLog(Offloading):
    """Decides what is copied, and logs it."""

    looks: list[list[Any]]
    copies: StepCopies

    def look_up(self, job: Job, held: int) -> int | None:
        """Look up chunks, and log it."""
        found = super().look_up(job, held)
        self.looks.append([f"r{job.request.id}", held, found])
        return found

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """Say what is copied, and log it."""
        self.copies = super().compose(step)
        return self.copies


class DrivenOffloading(Driven, OffloadingVllm):
    """The scheduler with chunks in host memory, without our checks; the replay says when copies have ended."""

    def __init__(self, scenario: Scenario, policy: CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, max_tokens)
        assert policy.chunks is not None
        self.offload = self.log = _OffloadLog(policy, policy.chunks, caching=scenario.cache.prefix_cache)
        self.log.looks = []
        self._disk = None

    def _seen_to_end(self, now: float) -> dict[int, float]:
        return {}


class DrivenAsyncOffloading(DrivenOffloading, AsyncOffloadingVllm):
    """The offloading scheduler with asynchronous steps; the replay calls ``collect``."""


class RecordedDrafts(Drafts):
    """What was drafted and accepted in a recorded step."""

    def __init__(self, scenario: Scenario, *, are_noted: bool):
        super().__init__(scenario, None, Recorder())
        self.are_noted = are_noted
        self.accepted: dict[str, int] = {}
        """By request."""
        self._next: dict[str, int] | None = None

    def follow(self, record: Record) -> None:
        """Draft and accept as in a record's step."""
        self.accepted = {name: accepted for name, _, accepted in record.get("drafts", ())}
        self._next = dict(record["next"]) if "next" in record else None

    def propose(self, job: Job, most: int) -> int:
        """What was drafted behind the step; as much as is asked for where that is not recorded."""
        return most if self._next is None else self._next.get(f"r{job.request.id}", 0)

    def verify(self, job: Job, drafted: int, *, hopeless: bool = False) -> int:
        """What was accepted of a draft in the step."""
        return min(self.accepted.get(f"r{job.request.id}", 0), drafted)


class _ReadLog(RemoteReads):
    """Decides what is read from other servers, and logs it."""

    looks: list[list[Any]]
    composed: list[ChunkCopy]

    def look_up(self, job: Job, held: int) -> int:
        """Say what is to be read, and log it."""
        found = super().look_up(job, held)
        self.looks.append([f"r{job.request.id}", held, found])
        return found

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """Say what is read, and log it."""
        found = super().compose(step)
        self.composed = found.loads
        return found


class DrivenApart(Driven, ApartVllm):
    """The scheduler of a server that prefills for others and reads from others; the replay says when reads end."""

    def __init__(self, scenario: Scenario, policy: CallLog | GroupCallLog, max_tokens: int):
        super().__init__(scenario, policy, max_tokens)
        self.offload = self.reads = self.log = _ReadLog(policy)
        self.log.looks, self.log.composed = [], []
        self.read = lambda *_: 0.0
        self.now_held: list[Job] = []
        """Jobs whose blocks are held since the list was last cleared."""

    def _seen_to_end(self, now: float) -> dict[int, float]:
        return {}

    def _let_go(self, job: Job) -> None:
        super()._let_go(job)
        if job in self.held:
            self.now_held.append(job)


class DrivenAsyncApart(DrivenApart, AsyncApartVllm):
    """Driven by a recording whose steps were composed ahead; the replay calls ``collect``."""
