"""What is recorded while the server runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

from kvsim.simulation.cache_states import CacheStates
from kvsim.simulation.counts import Counts
from kvsim.simulation.job import Job
from kvsim.simulation.request_log import Progress, QueueMonitor, RequestLog
from kvsim.simulation.run_tables import PassLog, Tables, requests_table
from kvsim.simulation.snapshots import HostPrompts, SnapshotTaker
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import HostCopy, MicroBatch, Moves, Policy, Usage
from policies.compiled import mypyc_attr
from policies.placement.rule import PassReads

Detail = Literal["requests", "cache", "rows", "states", "tables"]
"""What is kept of a run. ``requests``: how its requests fared. ``cache``: also means over time of how full and how
broken up the cache was. ``rows``: also a table of all requests, and those means from the arrival of any of them on.
``states``: also a table of all changes of the cache. ``tables``: also a table of all forward passes, and what each
second was spent on."""

DETAILS: tuple[Detail, ...] = get_args(Detail)


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """Hears of every event of one server, counts it, and hands it to the tables that are kept; times in seconds."""

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        detail: Detail = "tables",
        digest: bool = False,
        snapshots: bool = False,
        time_breakdown: TimeBreakdown | None = None,
        requests: RequestLog | None = None,
    ):
        """``digest``: hash all decisions; ``time_breakdown``: what says what the requests' seconds were spent on, used
        where passes are kept; ``requests``: where those that end are logged, which other servers may share; a log of
        its own unless there is one."""
        tables = detail == "tables"
        states = tables or detail == "states"
        self._keeps_jobs = states or detail == "rows"
        self.detail: Detail = detail
        self.watches = snapshots or digest or detail != "requests"
        """Whether the state of the cache is wanted after each step."""
        self._keeps_states = states
        self.requests = requests or RequestLog(progress, keeps=self._keeps_jobs)
        self.queue = QueueMonitor()
        self.cache_states = CacheStates(keeps=self._keeps_jobs)
        self.snapshots = SnapshotTaker() if snapshots else None
        self.counts = Counts()
        self.host_prompts: HostPrompts | None = None
        """What host memory holds of whole sequences; None where there is no place for them."""
        self._time_breakdown = time_breakdown if tables else None
        self._passes = PassLog() if tables else None
        self._digest = hashlib.blake2b(digest_size=16) if digest else None

    def arrived(self, job: Job) -> None:
        """A request has come to the server."""
        if self.queue.arrived == 0:
            self.cache_states.begin(job.arrival_s)
        if self._time_breakdown is not None:
            self._time_breakdown.arrived(job)
        self.queue.arrive(self.requests.latencies.ended)

    def begun(self, job: Job, held: int) -> None:
        """A job was given a slot; ``held`` of its tokens are in the cache already."""
        if self._time_breakdown is not None:
            self._time_breakdown.begun(job, held)
        if job.preemptions == 0:
            self.queue.admitted += 1
            job.cached = held
            self.counts.prefix.tokens += job.tokens
            self.counts.prefix.found += held
        else:
            self.counts.recomputed_tokens += max(job.furthest - held, 0)

    def loading(self, job: Job, tokens: int) -> None:
        """A request waits from now on until chunks with so many of its tokens have been loaded."""
        self.counts.host.chunks.loads += 1
        self.counts.host.chunks.tokens += tokens
        if self._time_breakdown is not None:
            self._time_breakdown.loading(job)

    def loaded(self, job: Job, seconds: float) -> None:
        """A request has waited so long for chunks, and need wait for them no more."""
        self.counts.host.chunks.load_wait_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.loaded(job, seconds)

    def held_back(self, by_cells: bool) -> None:
        """Whether the next request in the queue, if there is one, was not admitted for want of cells."""
        if self._time_breakdown is not None:
            self._time_breakdown.short_of_cells = by_cells

    def preempted(self, job: Job) -> None:
        """A job has given up its slot and its cells."""
        self.counts.preemptions += 1
        if self._time_breakdown is not None:
            self._time_breakdown.preempted(job)

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        if job.started_s != job.started_s:
            self.queue.admitted += 1
        if self._time_breakdown is not None:
            self._time_breakdown.finish(job)
        self.requests.finish(job)

    def passed(self, start_s: float, seconds: float, work: PassReads) -> None:
        """A forward pass has been run."""
        counts, first = self.counts, work.groups[0]
        counts.forward_passes += 1
        counts.cache.scores += first.scores
        counts.cache.useful_scores += first.useful_scores
        for group in work.groups:
            if group.prepares:
                self.moved(group.moves)
                counts.host.transferred(group.transfers)
                counts.cache.mapped_pages += group.mapped
        if self._passes is not None:
            self._passes.add(start_s, seconds, work)
            if self._time_breakdown is not None:
                self._time_breakdown.forward(work)

    def digested(self, batch: MicroBatch) -> None:
        """A micro-batch has been placed chunk by chunk: hash its cells, where a digest was asked for."""
        if self._digest is not None:
            for place in batch.places:
                self._digest.update(place.cells.tobytes())
            self._digest.update(repr(batch.chunks).encode())

    @property
    def hears_each_pass(self) -> bool:
        """Whether sums over passes do not tell all that is kept of them."""
        return self._passes is not None or self.snapshots is not None

    @property
    def wants_chunks(self) -> bool:
        """Whether every step must be placed chunk by chunk, since a digest is made of its cells."""
        return self._digest is not None

    def moved(self, moves: Moves) -> None:
        """A compaction has been carried out."""
        if moves.n_runs:
            counts = self.counts.cache
            counts.compactions += 1
            counts.moved_cells += moves.n_cells
            counts.move_runs += moves.n_runs
            if self._digest is not None:
                for array in (moves.src, moves.dst, moves.length):
                    self._digest.update(array.tobytes())

    def copied(self, copies: Sequence[HostCopy], shares: Sequence[float], *, whole: bool = True) -> None:
        """A sequence was copied to or from the host tier; a copy for each cache group, and its share of a cell.

        Not ``whole``: a checkpoint, which is not counted as a sequence that was saved or loaded. With several groups
        what is counted is as many whole cells as have the same bytes.
        """
        counts, to_host = self.counts.host, any(copy.to_host for copy in copies)
        counts.saves += whole and to_host
        counts.loads += whole and not to_host
        for copy in copies:
            self.moved(copy.moves)
        counts.copied(round(sum(share * copy.cells for copy, share in zip(copies, shares, strict=True))), to_host)
        if self._digest is not None:
            self._digest.update(repr([tuple(copy.transfers) for copy in copies]).encode())

    def copying(self, seconds: float) -> None:
        """The server spent seconds on copies of whole sequences, before a step."""
        self.counts.host.copy_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.waited(seconds)

    def drafting(self, seconds: float) -> None:
        """The drafter ran for so long beside a step."""
        self.counts.speculation.drafting_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.drafted(seconds)

    def out_of_cells(self) -> None:
        """A step found no room."""
        self.counts.cache.failed_allocations += 1

    def split(self, tokens: int) -> None:
        """A batch found no room and will be tried in parts; ``tokens`` of it are still to be run."""
        self.counts.cache.batch_splits += 1
        if self._time_breakdown is not None:
            self._time_breakdown.cut(tokens)

    def idled(self, start_s: float, seconds: float) -> None:
        """Moves were carried out while there was nothing else to do."""
        if self._time_breakdown is not None:
            self._time_breakdown.idled(start_s, seconds)

    def waited(self, seconds: float) -> None:
        """A step waited for prefetches under way."""
        self.counts.host.prefetch_wait_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.waited(seconds)

    def cache(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self.cache_states.hold(now, usage)

    def snapshot(self, now: float, policy: Policy) -> None:
        """A step has been placed: take a snapshot of the cells if one is due."""
        if self.snapshots is not None:
            self.snapshots.step(now, policy, self.host_prompts)

    @property
    def schedule_digest(self) -> str:
        """A hash of every chunk, cell and move in order: equal for runs that made the same decisions."""
        assert self._digest is not None, "the recorder was not asked for a digest"
        return self._digest.hexdigest()

    def tables(self) -> Tables | None:
        """All that was recorded row by row; None if tables are not kept."""
        if not self._keeps_jobs:
            return None
        passes, causes = None if self._passes is None else self._passes.table(), None
        if passes is not None and self._time_breakdown is not None:
            passes = passes.with_columns(self._time_breakdown.terms().columns)
            causes = self._time_breakdown.table()
        states = self.cache_states.kept()
        cache = states.table() if self._keeps_states else None
        return Tables(requests_table(self.requests.jobs), states, cache, passes, causes)
