"""vLLM's scheduler with chunks in host memory: requests wait for loads, and stores go on beside the steps.

As of vLLM 0.32.0, whose ``Scheduler`` asks an ``OffloadingConnector`` (``--kv-offloading-size``):

- what a step computes of a prompt is stored, chunk by chunk, from the next step on;
- a waiting request whose text goes on in host memory behind what its blocks hold gets blocks for that too, and waits,
  without a slot, until they are loaded; whoever else needs a chunk that is being loaded or stored is looked up again
  with each step;
- the blocks of a request that has ended are free at once, but whoever is given one that is still being stored makes the
  next step wait for the copy; so does a preemption.

Copies of one direction follow each other over the link. A step sees the copies that have ended when it begins, and the
scheduler learns of them from its output. ``vllm_apart.py`` has the same with prompts that other servers have computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Final

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.disk import Disk
from kvsim.simulation.schedulers.offloading import ChunkCopy, Connector, Offloading, Part
from kvsim.simulation.schedulers.queues import Queue, queue_for
from kvsim.simulation.schedulers.vllm import Vllm
from kvsim.simulation.schedulers.vllm_async import AsyncVllm
from policies import Chunk, Policy
from policies.paging.disk_chunks import TieredChunks
from policies.placement.rule import PlacementRule

_EMPTY_STEP_S: Final = 0.001
"""Seconds of a step without tokens: that long vLLM sleeps while all that it has to do is wait for copies
(``EngineCore._process_engine_step``)."""

_READ_IN_VAIN: Final = 16
"""How often as much as host memory holds may be read from the disk without any request getting further."""


@dataclass(slots=True, eq=False)
class _Load:
    """A request that has blocks and no slot, since they are being loaded."""

    seq: int
    """The number of its sequence meanwhile."""
    tokens: int
    """Those that it will hold."""
    since_s: float
    """When it began to wait."""
    ended: bool = False
    """Whether the scheduler knows that they have come."""
    found: bool = False
    """Whether others can find them."""


class _Queues:
    """Waiting requests: first those that hold blocks, then all others, each in the server's order."""

    def __init__(self, holding: Queue, others: Queue):
        self.holding = holding
        self._others = others

    def __len__(self) -> int:
        return len(self.holding) + len(self._others)

    def __iter__(self) -> Iterator[Job]:
        return chain(self.holding, self._others)

    def add(self, job: Job) -> None:
        """Queue a new request."""
        self._others.add(job)

    def put_back(self, job: Job) -> None:
        """Queue a request that was preempted."""
        self._others.put_back(job)

    def hold(self, job: Job) -> None:
        """A waiting request has got blocks."""
        self._others.remove(job)
        self.holding.add(job)

    def arrange(self) -> None:
        """Put the requests in order."""
        self._others.arrange()

    def first(self) -> Job:
        """The request to be admitted next, if it can be."""
        return (self.holding or self._others).first()

    def remove(self, job: Job) -> None:
        """Take a request out of the queue."""
        (self.holding if job in self.holding else self._others).remove(job)


class OffloadingVllm(Vllm):
    """``Scheduler`` with an ``OffloadingConnector``; the policy must have room for chunks (``Policy.chunks``)."""

    _outputs_behind = 1
    """How many steps ago, counted from the one that is composed, the last one began whose output is known."""

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self.offload = self._connector(scenario)
        self.waiting = self._queues = _Queues(queue_for(scenario.server, policy), queue_for(scenario.server, policy))
        self._requeue = self.waiting.add if scenario.server.requeue == "back" else self.waiting.put_back
        self._loads: dict[Job, _Load] = {}
        self._numbers, self._free_numbers = count(scenario.server.slots), list[int]()
        """Of sequences without a slot: those that were never used, and those that are free again."""
        self._prefilling: dict[Job, None] = {}
        """Requests in slots of which more is to be composed than one step had room for."""
        self._composed: list[ChunkCopy] = []
        """Stores that begin with the next step."""
        self._composed_s = 0.0
        self._link_free_s = {True: 0.0, False: 0.0}
        """When the link is free, to the host and back, seconds."""
        self._ends_s: dict[int, float] = {}
        """By number: when a copy ends that has begun."""
        self._began_s = [0.0] * self._outputs_behind
        """When each of the last steps began that had tokens."""
        self._stepped_s = 0.0
        """When the last of them ended."""
        self._rows_ran = False
        """Whether rows may have been given blocks since anyone looked."""
        self._disk = None
        if isinstance(policy.chunks, TieredChunks):
            tokens = policy.block_size * policy.chunks.blocks_per_chunk
            self._disk = Disk(policy.chunks, scenario.machine, tokens, scenario.cell_bytes, recorder)
        self._read_before = 0
        """Cells that had been read from the disk when a request last got further."""
        self._looked_up: dict[Job, int | None] = {}
        """What was looked up for this step: to do so twice may fetch more from the disk."""
        self._sought_s: dict[Job, float] = {}
        """When those were first looked up that are looked up again with every step."""

    def _connector(self, scenario: Scenario) -> Connector:
        """What says what is loaded and stored."""
        chunks = self._policy.chunks
        assert chunks is not None
        self._recorder.counts.host.chunks.servers = 1
        return Offloading(self._policy, chunks, caching=scenario.cache.prefix_cache)

    # Steps and copies

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let requests that only decode be rows, unless their answers are stored."""
        super().use_rule(None if self.offload.answers else rule)

    def decode_only_steps(self) -> int:
        """One while copies are under way, or requests wait, since to look them up may fetch chunks from the disk."""
        steps = super().decode_only_steps()
        return steps if self.offload.quiet and not (self._disk and self.waiting) else 1

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next step, perhaps one without tokens in which copies go on. Raises ``Livelock``."""
        step = self._compose_step(now)
        if not step and self.rule is None and self._waits_for_copies(now):
            self._copies_s += _EMPTY_STEP_S
        return step

    def _waits_for_copies(self, now: float) -> bool:
        """Whether a server that has nothing to compute goes on looking for copies that have ended."""
        return bool(self.waiting and (self.offload.busy or self._loads))

    def _compose_step(self, now: float) -> Sequence[Chunk]:
        return super().compose(now)

    def schedule(self, now: float) -> Sequence[Chunk]:
        """Compose a step, and what is copied with it. Raises ``Livelock``."""
        offload, running = self.offload, self._running
        self._looked_up.clear()
        self._launch_copies(self._composed, max(self._composed_s, self._stepped_s))
        seen = self._seen_to_end(now)
        self.learn(seen, now)
        if self._disk is not None:
            self._disk.begin(max(seen.values(), default=now))
            self._disk.proceed(now)
        if self._rows_ran and not offload.quiet:
            self._leave_all_rows()
            for job in running.jobs:
                offload.note_blocks(job, job.slot)
            self._rows_ran = False
        step = super().schedule(now)
        ran = [(running.by_slot[seq], start + n) for seq, start, n, _ in step]
        for job, stop in ran:
            if stop >= job.tokens:
                self._prefilling.pop(job, None)
        copies = offload.compose([Part(job, job.slot, min(stop, self._tokens_known(job))) for job, stop in ran])
        if self._disk is not None:
            self._disk.begin(now)
        self._launch_copies([copy for copy in copies.stores if copy.number in copies.flushed], now)
        began = max([now, *(self._ends_s[number] for number in copies.flushed)])
        self._launch_copies(copies.loads, began)
        self._copies_s = max(self._copies_s, began - now)
        self._recorder.counts.host.chunks.store_wait_s += began - now
        self._composed = [copy for copy in copies.stores if copy.number not in copies.flushed]
        self._composed_s = now
        if step or self.rule is not None:
            self._began_s = [*self._began_s[1:], began]
            self._rows_ran = self._rows_ran or self.rule is not None
        return step

    def learn(self, numbers: Iterable[int], now: float) -> None:
        """The output of a step says that these copies have ended."""
        for job in self.offload.complete(numbers):
            load = self._loads[job]
            load.ended = True
            self._recorder.loaded(job, now - load.since_s)
            if job.ended:
                self._drop(self._loads.pop(job).seq)

    def _seen_to_end(self, now: float) -> dict[int, float]:
        """The copies that had ended when the last step began whose output is known, and when that was known."""
        seen, stepped = self._seen_s(now), now == self._stepped_s
        ended = {number: now if stepped else at for number, at in self._ends_s.items() if at <= seen}
        for number in ended:
            del self._ends_s[number]
        return ended

    def _seen_s(self, now: float) -> float:
        """When the last step began whose output is known."""
        return self._began_s[0] if now == self._stepped_s else now

    def _launch_copies(self, copies: Iterable[ChunkCopy], at_s: float) -> None:
        """Let copies begin, one after another in each direction."""
        for copy in copies:
            transfers = copy.transfers(self._policy.block_size)
            began_s = max(self._link_free_s[copy.to_host], at_s)
            self._ends_s[copy.number] = self._link_free_s[copy.to_host] = began_s + self._backend.transfer(transfers)
            self._recorder.counts.host.transferred(transfers)

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        if step or self.rule is not None:
            self._stepped_s = now
        super()._complete(step, now)

    def _count_step(self, progressed: bool, now: float) -> None:
        """Raise ``Livelock`` if no request will ever get further; waiting for copies is no sign of that, unless chunks
        that are read from the disk displace each other for ever, since host memory cannot hold those of one text."""
        read = self._recorder.counts.disk.cells_in
        if progressed:
            self._read_before = read
        if not self.offload.busy or read - self._read_before > _READ_IN_VAIN * self._policy.groups[0].host_cells:
            super()._count_step(progressed, now)

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        """Wait for copies, or for whoever has been loaded. Raises ``Livelock`` if there are none."""
        return () if self.offload.busy or self._loads else super()._nothing_composed(now)

    # Requests

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone; blocks that are being loaded are given up when they have come."""
        self._end_of(job, job.computed)
        if (load := self._loads.get(job)) is None:
            super().cancel(job, now)
            return
        self._queues.remove(job)
        self._fail(job, now, FailureKind.CANCELLED, "cancelled")
        if load.ended:
            self._drop(self._loads.pop(job).seq)

    def _admit_waiting(self, step: dict[int, Chunk], now: float) -> None:
        """Add chunks for requests that have been loaded, then for waiting ones, in order, until one finds no room.

        What must wait for copies is passed over.
        """
        budget, policy, running = self._left, self._policy, self._running
        passed = self._unready()
        if budget > 0 and running.free_slots:
            self.waiting.arrange()
        while budget > 0 and running.free_slots:
            job = next((job for job in self.waiting if job not in passed), None)
            if job is None:
                return
            others_run, tokens = bool(running.jobs), job.tokens
            entry = self._entry_of(job, others_run, now)
            if entry is None:
                self._recorder.held_back(True)
                return
            if not entry.ended:
                passed.add(job)
                continue
            held = min(entry.tokens, tokens - 1)
            n = min(tokens - held, self._most_of_one)
            cut = n > budget
            chunk, whole = Chunk(entry.seq, held, min(n, budget)), tokens if self._reserve_full else 0
            unfit = cut and not self._chunked
            if unfit or not policy.reserve(chunk, whole=whole, waits=others_run):
                self._recorder.held_back(not unfit)
                if job not in self._loads:
                    self._drop(entry.seq)
                return
            self.waiting.remove(job)
            slot = running.admit(job)
            policy.rename(entry.seq, slot)
            self._free_numbers.append(entry.seq)
            self._loads.pop(job, None)
            self._start(slot, job, held, now)
            step[slot] = chunk = chunk._replace(seq=slot)
            budget -= chunk.n
            if held + chunk.n < tokens:
                self._prefilling[job] = None

    def _unready(self) -> set[Job]:
        """Waiting requests that cannot be admitted for other reasons."""
        return set()

    def _entry_of(self, job: Job, others_run: bool, now: float) -> _Load | None:
        """What a waiting request can start from, or begin to load; None where there is no room for that."""
        policy, entry = self._policy, self._loads.get(job)
        if entry is not None:
            if entry.ended and not entry.found:
                entry.found = True
                policy.arrive(entry.seq, entry.tokens)
            return entry
        seq = self._new_number()
        held = policy.match(seq, job.content, job.tokens)
        if job not in self._looked_up:
            self._looked_up[job] = self.offload.look_up(job, held)
        more = self._looked_up[job]
        if more is None:
            self._sought_s.setdefault(job, now)
        else:
            self._recorder.counts.host.chunks.lookup_wait_s += now - self._sought_s.pop(job, now)
        policy.open(seq, self._plan(job))
        entry = _Load(seq, held, now, ended=more == 0, found=True)
        if more is None:
            self._drop(seq)
        elif more:
            whole = job.tokens if self._reserve_full else 0
            if not policy.expect(Chunk(seq, held, more), whole=whole, waits=others_run, besides=self._promised()):
                self._drop(seq)
                return None
            self.offload.load(job, seq, held, more)
            self._loads[job] = _Load(seq, held + more, now)
            self._queues.hold(job)
            self._recorder.loading(job, more)
        return entry

    def _promised(self) -> int:
        """Blocks that requests which have begun still need for all tokens that are known of them."""
        size, table_of = self._policy.block_size, self._policy.table_of
        begun = [(job, load.seq) for job, load in self._loads.items() if not job.ended]
        begun += [(job, job.slot) for job in self._prefilling]
        return sum([max(0, -(-min(job.tokens, self._context) // size) - len(table_of(seq))) for job, seq in begun])

    def _new_number(self) -> int:
        """The number of a sequence without a slot."""
        return self._free_numbers.pop() if self._free_numbers else next(self._numbers)

    def _drop(self, seq: int) -> None:
        """Give up a sequence without a slot."""
        self._policy.free(seq)
        self._free_numbers.append(seq)

    def _preempt(self, job: Job) -> None:
        self.offload.preempted(job)
        self._prefilling.pop(job, None)
        super()._preempt(job)

    def _let_go(self, job: Job) -> None:
        self._end_of(job, max(job.request.prompt_tokens, job.tokens - 1))
        super()._let_go(job)

    def _end_of(self, job: Job, computed: int) -> None:
        self._prefilling.pop(job, None)
        self._sought_s.pop(job, None)
        self.offload.ended(job, computed)


class _StillInFlight(Exception):
    """The request to be preempted is in a step in flight, so that its blocks would not be free at once."""


class AsyncOffloadingVllm(OffloadingVllm, AsyncVllm):
    """vLLM's scheduler with offloading, one step composed ahead.

    Unlike without a connector, blocks that a step in flight writes are not given to others before its output has come:
    copies are not ordered behind it. So no request in flight is preempted; whoever finds no room waits a step.
    """

    _outputs_behind = 2

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self._to_free: list[list[int]] = []
        """Sequences of cancelled requests, and how many outputs must come before they are freed."""
        self._held_up = False
        """Whether a request has found no room, and could have only what steps in flight write."""

    def _compose_step(self, now: float) -> Sequence[Chunk]:
        self._held_up = False
        step = super()._compose_step(now)
        if not step and self.rule is None and self._held_up:
            self._catch_up(0)
            step = self.schedule(now)
        return step

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        return () if self._held_up and self.flights else super()._nothing_composed(now)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone; what steps in flight write is freed behind them."""
        behind = max(
            (at for at, flight in enumerate(self.flights, 1) if any(part.job is job for part in flight)), default=0
        )
        if behind and self._running.by_slot.get(job.slot) is job:
            self._end_of(job, job.computed)
            seq = self._new_number()
            self._policy.rename(job.slot, seq)
            self._to_free.append([seq, behind])
        super().cancel(job, now)

    def collect(self) -> None:
        """See the outcome of the oldest step in flight."""
        for waiting in list(self._to_free):
            waiting[1] -= 1
            if not waiting[1]:
                self._to_free.remove(waiting)
                self._drop(waiting[0])
        super().collect()

    def _reserve(self, job: Job, chunk: Chunk) -> bool:
        if super()._reserve(job, chunk):
            return True
        if max(self.running, key=self._last_to_stay) in self._in_flight:
            raise _StillInFlight
        return False

    def _serve_running(self, step: dict[int, Chunk]) -> bool:
        preempted = self._recorder.counts.preemptions
        try:
            return super()._serve_running(step)
        except _StillInFlight:
            self._held_up = True
            self._left = self._budget - sum([chunk.n for chunk in step.values()])
            return self._recorder.counts.preemptions == preempted

    def _serve_others(self, step: dict[int, Chunk], left: int) -> int | None:
        try:
            return super()._serve_others(step, left)
        except _StillInFlight:
            return None

    def _unready(self) -> set[Job]:
        return set(self._stale)
