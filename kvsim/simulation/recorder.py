"""What is recorded while the server runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np

from kvsim.simulation.job import Job
from kvsim.simulation.request_log import Progress, QueueMonitor, RequestLog
from kvsim.simulation.run_tables import SHARES, STATES, KeptStates, PassLog, Tables, requests_table
from kvsim.simulation.snapshots import HostPrompts, SnapshotTaker
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import HostCopy, MicroBatch, Moves, Policy, Transfer, Usage
from policies.compiled import i64, mypyc_attr, vec
from policies.placement.rule import PassReads, PlacementRule

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
        self.checkpoints_made = 0
        self.checkpoints_restored = 0
        """Prompts that went on from a checkpoint."""
        self.checkpoint_lost_tokens = 0
        """Tokens that slots held of their prompts, and that were computed again since no checkpoint was near enough."""
        self.checkpoint_spared_tokens = 0
        """Tokens among them that a checkpoint at a message of a user would have spared."""
        self.prefetched_cells = 0
        self.prefetch_wait_s = 0.0
        """Seconds that steps waited for prefetches under way."""
        self.offloads = False
        """Whether chunks are copied to host memory and back beside the steps."""
        self.chunk_loads = 0
        """Times that a request waited for chunks to be loaded."""
        self.chunk_tokens = 0
        """Tokens that were found in them."""
        self.load_wait_s = 0.0
        """Seconds that the requests waited for them, summed up."""
        self.store_wait_s = 0.0
        """Seconds that steps waited until blocks had been stored that were given to others."""
        self.lookup_wait_s = 0.0
        """Seconds that requests were looked up again, before it was known what can be loaded of them."""
        self.to_disk_cells = 0
        self.from_disk_cells = 0
        self.checks = 0
        """Drafts that were checked."""
        self.drafted_tokens = 0
        """Tokens of these drafts."""
        self.accepted_tokens = 0
        """Tokens among them that were accepted."""
        self.drafting_s = 0.0
        """Seconds of the drafter's passes."""
        self._time_breakdown = time_breakdown if tables else None
        self._passes = PassLog() if tables else None
        self._digest = hashlib.blake2b(digest_size=16) if digest else None

    def add(self, other: Recorder) -> None:
        """Count what another server has done as well; states and tables stay as they are."""
        self.offloads = self.offloads or other.offloads
        for name in (*_COUNTS, *(_COUNTS_OF_CHUNKS if other.offloads else ())):
            setattr(self, name, getattr(self, name) + getattr(other, name))

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
            self.prefix_looked_up += job.tokens
            self.prefix_found += held
        else:
            self.recomputed_tokens += max(job.furthest - held, 0)

    def loading(self, job: Job, tokens: int) -> None:
        """A request waits from now on until chunks with so many of its tokens have been loaded."""
        self.chunk_loads += 1
        self.chunk_tokens += tokens
        if self._time_breakdown is not None:
            self._time_breakdown.loading(job)

    def loaded(self, job: Job, seconds: float) -> None:
        """A request has waited so long for chunks, and need wait for them no more."""
        self.load_wait_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.loaded(job, seconds)

    def found_checkpoint(self, held: int, found: int, message: int) -> None:
        """Of ``held`` tokens that a slot had of its prompt, a checkpoint lets it use ``found``, 0 if there is none.

        ``message``: tokens before the last message of a user that begins within ``held``.
        """
        self.checkpoints_restored += found > 0
        self.checkpoint_lost_tokens += held - found
        self.checkpoint_spared_tokens += max(message - found, 0)

    def held_back(self, by_cells: bool) -> None:
        """Whether the next request in the queue, if there is one, was not admitted for want of cells."""
        if self._time_breakdown is not None:
            self._time_breakdown.short_of_cells = by_cells

    def preempted(self, job: Job) -> None:
        """A job has given up its slot and its cells."""
        self.preemptions += 1
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
        self.forward_passes += 1
        first = work.groups[0]
        self.scores += first.scores
        self.useful_scores += first.useful_scores
        for group in work.groups:
            if group.prepares:
                self.moved(group.moves)
                self.transferred(group.transfers)
                self.mapped_pages += group.mapped
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

    def filed(self, cells: int, *, to_disk: bool) -> None:
        """Chunks are written to files from host memory, or read."""
        if to_disk:
            self.to_disk_cells += cells
        else:
            self.from_disk_cells += cells

    def copied(self, copies: Sequence[HostCopy], shares: Sequence[float], *, whole: bool = True) -> None:
        """A sequence was copied to or from the host tier; a copy for each cache group, and its share of a cell.

        Not ``whole``: a checkpoint, which is not counted as a sequence that was saved or loaded.

        With several groups what is counted is as many whole cells as have the same bytes.
        """
        to_host = any(copy.to_host for copy in copies)
        self.host_saves += whole and to_host
        self.host_loads += whole and not to_host
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

    def verified(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was checked, of which some were accepted."""
        self.checks += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def drafting(self, seconds: float) -> None:
        """The drafter ran for so long beside a step."""
        self.drafting_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.drafted(seconds)

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
        states = self.cache_states.kept()
        cache = states.table() if self._keeps_states else None
        return Tables(requests_table(self.requests.jobs), states, cache, passes, causes)


_COUNTS = (
    *("forward_passes", "scores", "useful_scores", "failed_allocations", "batch_splits", "moved_cells", "move_runs"),
    *("mapped_pages", "compactions", "context_shifts", "preemptions", "recomputed_tokens", "prefix_looked_up"),
    *("prefix_found", "to_host_cells", "from_host_cells", "host_saves", "host_loads", "host_copy_s"),
    *("prefetched_cells", "prefetch_wait_s", "checks", "drafted_tokens", "accepted_tokens", "drafting_s"),
    *("checkpoints_made", "checkpoints_restored", "to_disk_cells", "from_disk_cells"),
    *("checkpoint_lost_tokens", "checkpoint_spared_tokens"),
)
"""Counts of a recorder that add up over servers."""
_COUNTS_OF_CHUNKS = ("chunk_loads", "chunk_tokens", "load_wait_s", "store_wait_s", "lookup_wait_s")
"""Those that do where they are of host memory, and not of blocks that are read from other servers."""
_MEANS = {
    **{f"{name}_mean": name for name in SHARES},
    "stored_cells_mean": "stored",
    "allocated_cells_mean": "allocated",
    "span_cells_mean": "span",
    "free_extents_mean": "free_extents",
    "largest_free_extent_mean": "largest_free_extent",
}
"""Keys of the summary, and the state that each is the mean over time of."""
_FIELDS: Final[i64] = 9
"""Numbers kept of a state: when it began, and ``STATES``."""
_BLOCK: Final = 9 << 12
"""Numbers that are collected before they become an array."""


class CacheStates:
    """States of the first cache group as they change, and their means from the first arrival to the last change."""

    def __init__(self, *, keeps: bool):
        """``keeps``: keep all states."""
        self.capacity = 0
        """Cells that can hold tokens."""
        self._keeps = keeps
        self._pending = vec[float]([])
        """Start and fields of each kept state that is in no block yet, flat, and room for others."""
        self._n_pending: i64 = 0
        """Numbers in it."""
        self._blocks: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]] = []
        self._begin = self._seconds = 0.0
        self._since = math.inf
        """When the state that holds began; before the first there is none."""
        self._utilization = self._external = self._internal = 0.0
        self._stored = self._allocated = self._span = self._extents = self._largest = 0.0
        """The state that holds, whose fields are shares or cells."""
        self._sum_utilization = self._sum_external = self._sum_internal = 0.0
        self._sum_stored = self._sum_allocated = self._sum_span = self._sum_extents = self._sum_largest = 0.0
        """Sums over the states before it, each times the seconds that it held."""

    def begin(self, now: float) -> None:
        """Means are taken from here on: the first request arrives."""
        self._begin = now

    def hold(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self.capacity = usage.capacity
        largest = usage.largest_free_extent
        self._hold(now, usage.stored, usage.allocated, usage.placeable, usage.free_extents, largest, usage.span)

    def hold_state(self, now: float, rule: PlacementRule) -> None:
        """From ``now`` on the cache is in the state that a placement rule has looked at."""
        self._hold(
            now,
            float(rule.stored),
            float(rule.allocated),
            float(rule.placeable),
            float(rule.free_extents),
            float(rule.largest_free_extent),
            float(rule.span),
        )

    def _hold(
        self,
        now: float,
        stored: float,
        allocated: float,
        placeable: float,
        extents: float,
        largest: float,
        span: float,
    ) -> None:
        since = self._since
        if since < self._begin:
            since = self._begin
        lasted = now - since
        if lasted > 0:
            self._seconds += lasted
            self._sum_utilization += lasted * self._utilization
            self._sum_external += lasted * self._external
            self._sum_internal += lasted * self._internal
            self._sum_stored += lasted * self._stored
            self._sum_allocated += lasted * self._allocated
            self._sum_span += lasted * self._span
            self._sum_extents += lasted * self._extents
            self._sum_largest += lasted * self._largest
        free = self.capacity - allocated
        self._since = now
        self._utilization = stored / self.capacity
        self._external = 1.0 - placeable / free if free > 0 else 0.0
        self._internal = 1.0 - stored / allocated if allocated > 0 else 0.0
        self._stored, self._allocated, self._span = stored, allocated, span
        self._extents, self._largest = extents, largest
        if self._keeps:
            self._keep()

    def _keep(self) -> None:
        """Keep the state that holds."""
        at, pending = self._n_pending, self._pending
        if at == len(pending):
            self._settle()
            self._pending = pending = vec[float]([0.0] * _BLOCK)
            at = 0
        pending[at], pending[at + 1], pending[at + 2] = self._since, self._utilization, self._external
        pending[at + 3], pending[at + 4], pending[at + 5] = self._internal, self._stored, self._allocated
        pending[at + 6], pending[at + 7], pending[at + 8] = self._span, self._extents, self._largest
        self._n_pending = at + _FIELDS

    def means(self) -> dict[str, float | None]:
        """Means over time, from the first arrival to the last change; None where none were kept or no time passed."""
        if self._seconds <= 0:
            return dict.fromkeys(_MEANS)
        sums = (
            *(self._sum_utilization, self._sum_external, self._sum_internal, self._sum_stored),
            *(self._sum_allocated, self._sum_span, self._sum_extents, self._sum_largest),
        )
        by_state = {state: total / self._seconds for state, total in zip(STATES, sums, strict=True)}
        return {key: by_state[state] for key, state in _MEANS.items()}

    def kept(self) -> KeptStates:
        """All states, which must be kept."""
        assert self._keeps, "states are kept"
        self._settle()
        self._blocks = [np.concatenate(self._blocks or [np.zeros((0, int(_FIELDS)))])]
        return KeptStates(self._blocks[0], self.capacity)

    def _settle(self) -> None:
        if self._n_pending:
            kept = np.asarray(self._pending, dtype=np.float64)[: self._n_pending]
            self._blocks.append(kept.reshape(-1, int(_FIELDS)))
        self._pending, self._n_pending = vec[float]([]), 0
