"""What is recorded while the server runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.cache_states import CacheStates
from kvsim.simulation.job import Job
from kvsim.simulation.latency_stats import LatencyStats, QueueMonitor
from kvsim.simulation.run_tables import PassLog, Tables, requests_table
from kvsim.simulation.snapshots import HostPrompts, SnapshotTaker
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import NO_MOVES, FastForward, HostCopy, MicroBatch, Moves, Policy, Transfer, Usage, Usages
from policies.compiled import mypyc_attr
from policies.fast_forward.lockstep import NextStepReads, PassSummary

FloatArray = NDArray[np.float64]

Progress = Callable[[int, float], None]
"""Called with the number of requests that have ended and the simulated time in seconds."""

Detail = Literal["requests", "cache", "rows", "states", "tables"]
"""What is kept of a run. ``requests``: how its requests fared. ``cache``: also means over time of how full and how
broken up the cache was. ``rows``: also a table of all requests, and those means from the arrival of any of them on.
``states``: also a table of all changes of the cache. ``tables``: also a table of all forward passes, and what each
second was spent on."""

DETAILS: tuple[Detail, ...] = get_args(Detail)


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """Hears of every event of a run, counts it, and hands it to the tables that are kept; times in seconds."""

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        detail: Detail = "tables",
        digest: bool = False,
        snapshots: bool = False,
        time_breakdown: TimeBreakdown | None = None,
        ended: Callable[[Job], None] | None = None,
    ):
        """``digest``: hash all decisions; ``time_breakdown``: what says what the requests' seconds were spent on, used
        where passes are kept; ``ended`` is called with each request that has ended."""
        tables = detail == "tables"
        states = tables or detail == "states"
        self._keeps_jobs = states or detail == "rows"
        self.detail: Detail = detail
        self.watches = snapshots or digest or detail != "requests"
        """Whether the state of the cache is wanted after each step."""
        self.can_sum_up = not (snapshots or digest or states)
        """Whether sums over many steps tell all that is wanted of them."""
        self.latencies = LatencyStats()
        self.queue = QueueMonitor()
        self.cache_states = CacheStates(averages=detail != "requests", keeps=self._keeps_jobs)
        self.snapshots = SnapshotTaker() if snapshots else None
        self.jobs: list[Job] = []
        """In the order in which they ended, where tables are kept."""
        self.forward_passes = 0
        self.scores = 0
        """Scores computed by attention, in the first cache group."""
        self.useful_scores = 0
        """Scores against a cell that the token's sequence can see."""
        self.failed_allocations = 0
        self.batch_splits = 0
        self.moved_cells = 0
        self.move_runs = 0
        self.mapped_pages = 0
        """Pages of virtual memory that passes waited for."""
        self.compactions = 0
        self.context_shifts = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens computed once more because a preemption had discarded them."""
        self.prefix_looked_up = 0
        """Tokens of all sequences when they first started."""
        self.prefix_found = 0
        """Tokens among them that were in the cache already."""
        self.to_host_cells = 0
        self.from_host_cells = 0
        self.host_prompts: HostPrompts | None = None
        """What host memory holds of whole sequences; None where there is no place for them."""
        self.host_saves = 0
        """Whole sequences that were copied to the host."""
        self.host_loads = 0
        """Whole sequences that were copied back."""
        self.host_copy_s = 0.0
        """Seconds that the server spent on these copies."""
        self.prefetched_cells = 0
        self.prefetch_wait_s = 0.0
        """Seconds that steps waited for prefetches under way."""
        self._time_breakdown = time_breakdown if tables else None
        self._passes = PassLog() if tables else None
        self._progress = progress
        self._ended = ended
        self._digest = hashlib.blake2b(digest_size=16) if digest else None

    def arrived(self, job: Job) -> None:
        """A request has come to the server."""
        if self.queue.arrived == 0:
            self.cache_states.begin(job.arrival_s)
        if self._time_breakdown is not None:
            self._time_breakdown.arrived(job)
        self.queue.arrive(self.latencies.ended)

    def begun(self, job: Job, held: int) -> None:
        """A job was given a slot; ``held`` of its tokens are in the cache already."""
        if self._time_breakdown is not None:
            self._time_breakdown.begun(job, held)
        if job.preemptions == 0:
            self.queue.admitted += 1
            job.cached = held
            self.prefix_looked_up += job.tokens
            self.prefix_found += held
        else:
            self.recomputed_tokens += max(job.furthest - held, 0)

    def preempted(self, job: Job) -> None:
        """A job has given up its slot and its cells."""
        self.preemptions += 1
        if self._time_breakdown is not None:
            self._time_breakdown.preempted(job)

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        self.latencies.add(job)
        if job.started_s != job.started_s:
            self.queue.admitted += 1
        if self._time_breakdown is not None:
            self._time_breakdown.finish(job)
        if self._keeps_jobs:
            self.jobs.append(job)
        if self._progress is not None:
            self._progress(self.latencies.ended, job.finished_s)
        if self._ended is not None:
            self._ended(job)

    def forward(self, start_s: float, seconds: float, batch: MicroBatch) -> None:
        """A forward pass has been run."""
        reads = batch.reads
        scores = int(reads.tokens @ reads.scanned)
        self.scores += scores
        self.useful_scores += int(reads.tokens @ reads.useful)
        self.forward_passes += 1
        if self._passes is not None:
            self._passes.add(start_s, seconds, batch, scores)
            if self._time_breakdown is not None:
                self._time_breakdown.forward(batch)
        for place in batch.places:
            self.moved(place.moves)
            self.transferred(place.transfers)
            self.mapped_pages += place.mapped
            if self._digest is not None:
                self._digest.update(place.cells.tobytes())
        if self._digest is not None:
            self._digest.update(repr(batch.chunks).encode())

    def mixed_step(self, chunks: PassSummary, reads: NextStepReads) -> None:
        """A forward pass has been run in which a lockstep batch got its tokens beside some chunks."""
        scores = reads.scanned
        for tokens, scanned, _ in chunks.chunk_reads:
            scores += tokens * scanned
        if chunks.useful is None:
            useful = scores
        else:
            useful = reads.scanned if reads.useful is None else reads.useful
            for (tokens, _, _), seen in zip(chunks.chunk_reads, chunks.useful, strict=True):
                useful += tokens * seen
        self.lockstep_steps(1, scores, useful)
        for each in (chunks, *chunks.further):
            if each.moves is not NO_MOVES:
                self.moved(each.moves)
            if each.transfers:
                self.transferred(each.transfers)
            self.mapped_pages += each.mapped

    def lockstep_steps(self, passes: int, scores: int, useful: int) -> None:
        """A lockstep batch has taken steps alone, in so many passes; ``useful`` of its ``scores`` were."""
        self.scores += scores
        self.useful_scores += useful
        self.forward_passes += passes

    def fast_forward(
        self, starts_s: FloatArray, seconds: Sequence[FloatArray], steps: FastForward, usages: Usages | None
    ) -> None:
        """Planned decode steps have been run; ``seconds``: of each pass of a step. Arrays of shape (steps,)."""
        if self.snapshots is not None:
            self.snapshots.pass_over(steps.steps)
        self.forward_passes += steps.steps * len(steps.passes)
        for each in steps.passes:
            self.scores += int(each.groups[0].scanned.sum())
            self.useful_scores += int(each.groups[0].useful.sum())
        if usages is not None:
            self.cache_states.extend(starts_s, usages)
        if self._passes is not None:
            self._passes.extend(starts_s, seconds, steps)
        if self._time_breakdown is not None:
            self._time_breakdown.fast_forward(steps)

    @property
    def unobserved_steps(self) -> int:
        """Number of steps from now on that need not be seen one by one; 0 if the next must be."""
        if self._digest is not None:
            return 0
        return 1 << 62 if self.snapshots is None else self.snapshots.steps_until_next

    def moved(self, moves: Moves) -> None:
        """A compaction has been carried out."""
        if moves.n_runs:
            self.compactions += 1
            self.moved_cells += moves.n_cells
            self.move_runs += moves.n_runs
            if self._digest is not None:
                for array in (moves.src, moves.dst, moves.length):
                    self._digest.update(array.tobytes())

    def transferred(self, transfers: Sequence[Transfer], *, ahead: bool = False) -> None:
        """Copies between the cache and the host tier have been carried out; ``ahead`` of their use, or for a step."""
        for transfer in transfers:
            self.prefetched_cells += transfer.n if ahead and not transfer.to_host else 0
            if transfer.to_host:
                self.to_host_cells += transfer.n
            else:
                self.from_host_cells += transfer.n

    def copied(self, copies: Sequence[HostCopy], shares: Sequence[float]) -> None:
        """A whole sequence was copied to or from the host tier; a copy for each cache group, and its share of a cell.

        With several groups what is counted is as many whole cells as have the same bytes.
        """
        to_host = any(copy.to_host for copy in copies)
        self.host_saves += to_host
        self.host_loads += not to_host
        for copy in copies:
            self.moved(copy.moves)
        cells = round(sum(share * copy.cells for copy, share in zip(copies, shares, strict=True)))
        if to_host:
            self.to_host_cells += cells
        else:
            self.from_host_cells += cells
        if self._digest is not None:
            self._digest.update(repr([tuple(copy.transfers) for copy in copies]).encode())

    def copying(self, seconds: float) -> None:
        """The server spent seconds on copies of whole sequences, before a step."""
        self.host_copy_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.waited(seconds)

    def split(self, tokens: int) -> None:
        """A batch found no room and will be tried in parts; ``tokens`` of it are still to be run."""
        self.batch_splits += 1
        if self._time_breakdown is not None:
            self._time_breakdown.cut(tokens)

    def idled(self, start_s: float, seconds: float) -> None:
        """Moves were carried out while there was nothing else to do."""
        if self._time_breakdown is not None:
            self._time_breakdown.idled(start_s, seconds)

    def waited(self, seconds: float) -> None:
        """A step waited for prefetches under way."""
        self.prefetch_wait_s += seconds
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
        states = self.cache_states
        cache = None if self.can_sum_up else states.table()
        return Tables(requests_table(self.jobs), states.kept(), cache, passes, causes)
