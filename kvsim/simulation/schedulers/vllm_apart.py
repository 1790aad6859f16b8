"""vLLM's scheduler where prefill and decode have servers of their own: prompts are read from where they were computed.

As of vLLM 0.32.0, whose ``Scheduler`` asks a ``NixlConnector`` (``kv_connector/v1/nixl/pull_scheduler.py``):

- a prefill server is asked for one token (``do_remote_decode``). When it has it, the request's blocks stay its own
  until they have been read; of that, too, a scheduler learns from the output of a step. There is a lease of 30 s, which
  a server that means to read renews: it never runs out here;
- a decode server looks its own blocks up, takes blocks for all of the prompt, and reads those that it lacks, the last
  one too even if it is not full. Until they have come the request waits without a slot, as for loads from host memory;
- then the last token of the prompt is computed once more: what it says comes out of it;
- a request that is preempted later computes its prompt itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.offloading import ChunkCopy, Connector, Part, StepCopies
from kvsim.simulation.schedulers.vllm_offload import AsyncOffloadingVllm, OffloadingVllm
from policies import Chunk, Policy

LOOK_S: Final = 0.0005
"""Seconds after which a server that has nothing to compute sees that a read has ended, on average: it sleeps a
millisecond between two looks (``EngineCore._process_engine_step``)."""

Read = Callable[[Job, Job, int, float], float]
"""Begins to read blocks of another server: for which job, of which job there, how many, and from when on; when all have
come, seconds."""


class RemoteReads:
    """Decides what is read from other servers. It knows no clock."""

    answers = False

    def __init__(self, policy: Policy):
        self.under_way: dict[int, ChunkCopy] = {}
        """Reads by number, the oldest first."""
        self.sources: dict[int, Job] = {}
        """By number, the job on the other server whose blocks are read."""
        self._policy = policy
        self._begun = 0
        self._composed: list[ChunkCopy] = []

    @property
    def quiet(self) -> bool:
        """Whether steps of rows alone change nothing here."""
        return not self.busy

    @property
    def busy(self) -> bool:
        """Whether requests may wait for reads."""
        return bool(self.under_way)

    def look_up(self, job: Job, held: int) -> int:
        """Tokens that are to be read behind the first ``held``: all others of the prompt, as long as they are there."""
        return 0 if job.source is None else job.request.prompt_tokens - held

    def load(self, job: Job, seq: int, held: int, n: int) -> None:
        """The request has been given blocks for its prompt: read those behind the first ``held`` tokens."""
        assert job.source is not None
        blocks = list(self._policy.table_of(seq)[held // self._policy.block_size :])
        copy = self.under_way[self._begun] = ChunkCopy(self._begun, job, False, {}, blocks)
        self.sources[self._begun], job.source = job.source, None
        self._begun += 1
        self._composed.append(copy)

    def preempted(self, job: Job) -> None:
        """Nothing is stored that would have to be waited for."""

    def ended(self, job: Job, computed: int) -> None:
        """Nothing is stored."""

    def note_blocks(self, job: Job, seq: int) -> None:
        """Nothing is stored."""

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """What is read from the step on that has been composed."""
        found, self._composed = StepCopies(self._composed, [], set()), []
        return found

    def complete(self, numbers: Iterable[int]) -> list[Job]:
        """These reads have ended; the requests whose prompts have come."""
        return [self.under_way.pop(number).job for number in numbers]


class ApartVllm(OffloadingVllm):
    """``Scheduler`` with a ``NixlConnector``, of a server that only prefills, or only decodes."""

    read: Read
    """Set by who knows the other servers."""

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self.held: dict[Job, int] = {}
        """Jobs that have ended and whose blocks are still to be read, with the numbers of their sequences."""
        self._read_s: dict[Job, float] = {}
        """When the blocks of jobs have been read, as far as that is known."""
        self.tokens_read = 0
        """Tokens that came from other servers, and were not computed once more."""
        self._found: dict[Job, int] = {}
        """Tokens of prompts that were found in blocks when the rest began to be read."""

    def _connector(self, scenario: Scenario) -> Connector:
        self.reads = RemoteReads(self._policy)
        return self.reads

    def was_read(self, job: Job, at_s: float) -> None:
        """The blocks of a job that has ended, or will have by then, are read until ``at_s`` seconds."""
        self._read_s[job] = at_s

    def schedule(self, now: float) -> Sequence[Chunk]:
        """Give up what has been read, and compose a step. Raises ``Livelock``."""
        seen = self._seen_s(now)
        self.give_up([job for job, at_s in self._read_s.items() if at_s <= seen and job in self.held])
        self._rows_ran = False  # Which blocks rows are given is of no interest: they need not leave.
        return super().schedule(now)

    def give_up(self, jobs: Iterable[Job]) -> None:
        """The output of a step says that the blocks of these jobs have been read."""
        for job in jobs:
            self._read_s.pop(job, None)
            self._drop(self.held.pop(job))

    def _waits_for_copies(self, now: float) -> bool:
        """Whether prompts have come, or reads have ended of which it has not learned: for all others it is called."""
        unseen = any(at_s <= now for at_s in chain(self._ends_s.values(), self._read_s.values()))
        return unseen or any(load.ended for load in self._loads.values())

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        """Wait until blocks have been read. Raises ``Livelock`` if there are none that will be."""
        return () if self.held else super()._nothing_composed(now)

    def _launch_copies(self, copies: Iterable[ChunkCopy], at_s: float) -> None:
        size = self._policy.block_size
        for copy in copies:
            prompt = copy.job.request.prompt_tokens
            self._found[copy.job] = (-(-prompt // size) - len(copy.blocks)) * size
            source = self.reads.sources.pop(copy.number)
            self._ends_s[copy.number] = self.read(copy.job, source, len(copy.blocks), at_s)

    def _start(self, seq: int, job: Job, held: int, now: float) -> None:
        super()._start(seq, job, held, now)
        # What was read was not found in this server's own cache.
        read = held - self._found.pop(job, held)
        self.tokens_read += read
        self._recorder.counts.prefix.found -= read
        job.cached -= read

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone: nobody will read what it has computed."""
        job.prefill_only = False
        super().cancel(job, now)

    def _let_go(self, job: Job) -> None:
        """Take back the slot of a job that has ended; keep what is still to be read of it."""
        if job.prefill_only:
            self.held[job] = self._new_number()
            self._policy.rename(job.slot, self.held[job])
        super()._let_go(job)


class AsyncApartVllm(ApartVllm, AsyncOffloadingVllm):
    """A server apart that composes one step ahead."""
