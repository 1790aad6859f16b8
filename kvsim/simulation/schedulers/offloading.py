"""Which chunks are loaded and stored, and when: the scheduler's side of vLLM's ``OffloadingConnector``.

As of vLLM 0.32.0 (``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``), with one cache group of
full attention. It knows no clock: it says which copies begin with a step, and is told which have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvsim.simulation.job import Job
from policies import Policy, Transfer
from policies.content import Key
from policies.paging.host_chunks import Access, HostChunks
from policies.paging.host_offload import TransferLog


@dataclass(slots=True, eq=False)
class ChunkCopy:
    """Chunks on their way between the cache and host memory."""

    number: int
    job: Job
    to_host: bool
    slots: dict[Key, int]
    """The chunks' keys, and where in host memory they are."""
    blocks: list[int]
    """The blocks that are read or written, in order: those of all chunks, but for the first ones of a chunk whose
    beginning was found in blocks."""

    def transfers(self, block_size: int) -> tuple[Transfer, ...]:
        """The runs of cells that are copied."""
        log, slots = TransferLog(block_size), list(self.slots.values())
        per_chunk = -(-len(self.blocks) // len(slots))
        for at, block in enumerate(self.blocks, per_chunk * len(slots) - len(self.blocks)):
            log.add(block, slots[at // per_chunk] * per_chunk + at % per_chunk, to_host=self.to_host)
        return log.settle()


class StepCopies(NamedTuple):
    """What goes with one step."""

    loads: list[ChunkCopy]
    """Begin with the step."""
    stores: list[ChunkCopy]
    """Begin with the step after it."""
    flushed: set[int]
    """Numbers of the stores that must have ended before the step is run."""


@dataclass(slots=True, eq=False)
class _Request:
    """What is known of a request since it was first looked up."""

    keys: list[Key] = field(default_factory=list)
    """Keys of its full chunks."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks as of its last step, or when it ended."""
    stored: int = 0
    """Chunks from the first that need not be offered any more."""
    copies: set[int] = field(default_factory=set)
    """Numbers of the copies under way: one load, or stores."""
    access: Access = field(default_factory=Access)
    final: int = -1
    """Once it has ended, the tokens that were computed of it, as far as they count; -1 before."""


class Part(NamedTuple):
    """A request's part of a step."""

    job: Job
    seq: int
    stop: int
    """Tokens computed of it behind the step, of those that are known."""


class Connector(Protocol):
    """What a scheduler that loads and stores beside its steps asks (vLLM's ``KVConnectorBase_V1``)."""

    under_way: dict[int, ChunkCopy]
    """Copies by number, the oldest first."""

    @property
    def answers(self) -> bool:
        """Whether output tokens are stored too."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether steps of rows alone change nothing here."""
        ...

    @property
    def busy(self) -> bool:
        """Whether requests may wait for copies."""
        ...

    def look_up(self, job: Job, held: int) -> int | None:
        """Tokens that can be loaded behind the first ``held``; None if that is to be asked again with the next step."""
        ...

    def load(self, job: Job, seq: int, held: int, n: int) -> None:
        """The request has been given blocks for ``n`` tokens behind the first ``held``: load them."""
        ...

    def preempted(self, job: Job) -> None:
        """A request is preempted."""
        ...

    def ended(self, job: Job, computed: int) -> None:
        """A request is about to give up its blocks; ``computed``: its tokens that may be stored."""
        ...

    def note_blocks(self, job: Job, seq: int) -> None:
        """Take note of the blocks that a request was given while nobody looked."""
        ...

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """A step has been composed: what is loaded, stored and waited for with it."""
        ...

    def complete(self, numbers: Iterable[int]) -> list[Job]:
        """These copies have ended; the requests that have been loaded."""
        ...


class Offloading:
    """Looks up chunks behind what was found in blocks, and decides what is loaded, stored and waited for."""

    def __init__(self, policy: Policy, chunks: HostChunks, *, caching: bool):
        """``caching``: blocks that are loaded can be found by others, so that these wait for them."""
        self.chunks = chunks
        self.under_way: dict[int, ChunkCopy] = {}
        """Copies by number, the oldest first."""
        self.owing: set[Job] = set()
        """Requests with chunks that found no room, and are offered again with every step."""
        self.ended_since: list[Job] = []
        """Requests that have ended since the last step was composed."""
        self._policy = policy
        self._caching = caching
        self._size = policy.block_size * chunks.blocks_per_chunk
        """Tokens in a chunk."""
        self._requests: dict[Job, _Request] = {}
        self._begun = 0
        self._loads: list[ChunkCopy] = []
        self._flushed: set[int] = set()
        self._taken: set[int] = set()
        """Blocks that have been given out since the last step was composed."""
        self._loading: set[Key] = set()
        self._fenced: dict[int, set[int]] = {}
        """For blocks of ended requests that are still being stored: by which copies."""

    @property
    def answers(self) -> bool:
        """Whether output tokens are stored too."""
        return self.chunks.answers

    @property
    def quiet(self) -> bool:
        """Whether steps of rows alone change nothing here."""
        return not (self.busy or self.owing or self.ended_since or self.chunks.noted)

    @property
    def busy(self) -> bool:
        """Whether requests may wait for copies."""
        return bool(self.under_way) or self.chunks.busy

    def look_up(self, job: Job, held: int) -> int | None:
        """Tokens that can be loaded behind the first ``held``; None if that is to be asked again with the next step."""
        request = self._requests.setdefault(job, _Request())
        request.blocks.clear()
        if request.copies:
            return None
        keys, size = self._keys(job, request, job.tokens), self._size
        first, most = held // size, len(keys) * size
        if most - held < size:
            return 0
        hits, pending = 0, False
        for key in keys[first:]:
            there = self.chunks.is_there(key, request.access)
            if there is False:
                break
            pending = pending or there is None
            hits += 1
        found = (first + hits) * size - held
        if found < size and not pending:
            return 0
        if pending or not self._loading.isdisjoint(keys[first : first + hits]):
            return None
        return found

    def load(self, job: Job, seq: int, held: int, n: int) -> None:
        """The request has been given blocks for ``n`` tokens behind the first ``held``: load them."""
        request, blocks = self._requests[job], self._policy.table_of(seq)
        self._taken.update(blocks)
        request.stored = (held + n) // self._size
        keys = request.keys[held // self._size : request.stored]
        slots = dict(zip(keys, self.chunks.pin(keys, request.access), strict=True))
        copy = self._begin(job, request, slots, list(blocks[held // self._policy.block_size :]), to_host=False)
        self._loads.append(copy)
        if self._caching:
            self._loading.update(keys)

    def preempted(self, job: Job) -> None:
        """What is being stored of a request that is preempted must be waited for."""
        if job in self._requests:
            self._flushed |= self._requests[job].copies

    def ended(self, job: Job, computed: int) -> None:
        """A request is about to give up its blocks; ``computed``: its tokens that may be stored."""
        request = self._requests.get(job)
        if request is None or request.final >= 0:
            return
        request.final = computed
        self._keys(job, request, job.tokens)
        self.owing.discard(job)
        self.ended_since.append(job)
        for number in request.copies:
            self._fence(self.under_way[number])

    def note_blocks(self, job: Job, seq: int) -> None:
        """Take note of the blocks that a request was given while nobody looked."""
        self._requests[job].blocks = list(self._policy.table_of(seq))

    def compose(self, step: Iterable[Part]) -> StepCopies:
        """A step has been composed: what is loaded, stored and waited for with it."""
        parts = list(step)
        for job, seq, _ in parts:
            request = self._requests[job]
            new = self._policy.table_of(seq)[len(request.blocks) :]
            request.blocks += new
            self._taken.update(new)
        self.chunks.step_composed()
        for block in self._fenced.keys() & self._taken:
            self._flushed |= self._fenced[block]
        stores = [self._store(job, stop) for job, _, stop in parts]
        stores += [self._store(job, self._requests[job].final) for job in self.ended_since]
        for job in self.ended_since:
            request = self._requests[job]
            self.chunks.ended(request.keys, request.access)
            if not any(self.under_way[number].to_host for number in request.copies):
                self.chunks.forget(request.access)
            if not request.copies:
                del self._requests[job]
        found = StepCopies(self._loads, [copy for copy in stores if copy is not None], self._flushed)
        self._loads, self._flushed = [], set()
        self._taken.clear()
        self.ended_since.clear()
        return found

    def complete(self, numbers: Iterable[int]) -> list[Job]:
        """These copies have ended; the requests that have been loaded."""
        loaded = []
        for number in numbers:
            copy = self.under_way.pop(number)
            if copy.to_host:
                self.chunks.stored(copy.slots)
            else:
                self.chunks.unpin(copy.slots.keys())
                self._loading.difference_update(copy.slots)
                loaded.append(copy.job)
            for block in copy.blocks:
                if number in self._fenced.get(block, ()):
                    self._fenced[block].discard(number)
                    if not self._fenced[block]:
                        del self._fenced[block]
            request = self._requests[copy.job]
            request.copies.discard(number)
            if request.final >= 0 and not request.copies and copy.job not in self.ended_since:
                self.chunks.forget(request.access)
                del self._requests[copy.job]
        return loaded

    def _keys(self, job: Job, request: _Request, tokens: int) -> list[Key]:
        """The keys of the full chunks of a request's first ``tokens`` tokens: those of their last blocks."""
        per_chunk = self.chunks.blocks_per_chunk
        if tokens // self._size > len(request.keys):
            request.keys = job.content.keys(self._policy.block_size, tokens // self._policy.block_size)[
                per_chunk - 1 :: per_chunk
            ]
        return request.keys

    def _store(self, job: Job, computed: int) -> ChunkCopy | None:
        """Offer the chunks of a request that have been computed, and begin to store those that are to be."""
        request = self._requests[job]
        tokens = computed if self.chunks.answers else min(computed, job.request.prompt_tokens)
        per_chunk = self.chunks.blocks_per_chunk
        keys = self._keys(job, request, tokens)
        stop = min(tokens // self._size, len(request.blocks) // per_chunk, len(keys))
        self.owing.discard(job)
        if stop <= request.stored:
            return None
        offered = keys[request.stored : stop]
        slots = self.chunks.prepare_store(offered, request.access)
        if slots is None:
            if request.final < 0:
                self.owing.add(job)
            return None
        first, request.stored = request.stored, stop
        if not slots:
            return None
        blocks: list[int] = []
        for at, key in enumerate(offered, first):
            if key in slots:
                blocks += request.blocks[at * per_chunk : (at + 1) * per_chunk]
        copy = self._begin(job, request, slots, blocks, to_host=True)
        if request.final >= 0:
            self._fence(copy)
            if not self._taken.isdisjoint(blocks):
                self._flushed.add(copy.number)
        return copy

    def _begin(
        self, job: Job, request: _Request, slots: dict[Key, int], blocks: Sequence[int], *, to_host: bool
    ) -> ChunkCopy:
        copy = ChunkCopy(self._begun, job, to_host, slots, list(blocks))
        self._begun += 1
        self.under_way[copy.number] = copy
        request.copies.add(copy.number)
        return copy

    def _fence(self, copy: ChunkCopy) -> None:
        """A step that is given one of these blocks must wait for the copy."""
        for block in copy.blocks:
            self._fenced.setdefault(block, set()).add(copy.number)
