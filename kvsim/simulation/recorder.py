"""What is recorded while the server runs, and what is made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.simulation.distribution import TimeMean
from kvsim.simulation.job import Job
from kvsim.simulation.latency_stats import LatencyStats, QueueMonitor
from kvsim.simulation.rows import Rows
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import NO_MOVES, FastForward, MicroBatch, Moves, Policy, Transfer, Usage, Usages
from policies.fast_forward.lockstep import NextStepReads, PassSummary

FloatArray = NDArray[np.float64]

Progress = Callable[[int, float], None]
"""Called with the number of requests ended and the simulated time in seconds."""

Detail = Literal["requests", "cache", "tables"]
"""What is kept of a run: how its requests fared; also means over time of how full and how broken up the cache was; also
a table of all requests, of all forward passes, and of all that changed in the cache."""

DETAILS: tuple[Detail, ...] = get_args(Detail)

Frame = tuple[float, NDArray[np.int16]]
"""A picture of the cells: time in seconds, and the sequence in each cell of the first group (-1: none)."""

_SHARES = ("utilization", "external_fragmentation", "internal_fragmentation")
_PASSES = {"start_s": float, "seconds": float, "tokens": int, "chunks": int, "scores": int, "cells_read": int}
_USAGE = ("stored", "allocated", "placeable", "free_extents", "largest_free_extent", "span")
"""Of ``Usage``, what is recorded."""
_of = attrgetter(*_USAGE)
_MEANS = {
    **{f"{name}_mean": name for name in _SHARES},
    "stored_cells_mean": "stored",
    "span_cells_mean": "span",
    "free_extents_mean": "free_extents",
    "largest_free_run_mean": "largest_free_extent",
}
"""What a summary says of the cache, and of which state each is the mean over time."""
_COUNTS = ("stored", "allocated", "free", "span", "free_extents", "largest_free_extent")
_REQUEST_COUNTS = ("prompt_tokens", "output_tokens", "truncated", "cached_tokens", "preemptions")
_FRAMES = 400
"""A snapshots of the cells keeps between half as many pictures and as many."""


class Recorder:
    """Collects requests, forward passes and cache samples; times in seconds of the simulated clock."""

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        detail: Detail = "tables",
        digest: bool = False,
        snapshots: bool = False,
        time_breakdown: TimeBreakdown | None = None,
    ):
        """``time breakdown``: keeps on what the requests' seconds were spent, where tables are kept."""
        self._time_breakdown = time_breakdown if detail == "tables" else None
        self.detail: Detail = detail
        self.watches = snapshots or digest or detail != "requests"
        """Whether how full the cache is, is wanted after each step."""
        self.latencies = LatencyStats()
        self.queue = QueueMonitor()
        self.failed_allocations = 0
        self.batch_splits = 0
        self.moved_cells = 0
        self.move_runs = 0
        self.compactions = 0
        self.context_shifts = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Computed once more because a preemption had thrown them away."""
        self.prefix_looked_up = 0
        """Tokens of all sequences when they started."""
        self.prefix_found = 0
        """Those of them that were in the cache already."""
        self.to_host_cells = 0
        self.from_host_cells = 0
        self.prefetched_cells = 0
        self.prefetch_wait_s = 0.0
        """That steps waited for what was already on its way."""
        self.jobs: list[Job] = []
        """In the order in which they ended, where tables are kept."""
        self._states = TimeMean(list(_MEANS.values())) if detail != "requests" else None
        self._count = 0
        self._passes = Rows(_PASSES)
        self._samples = Rows({"time_s": float, **dict.fromkeys(_USAGE, int)})
        self._capacity = 0
        self.scores = 0
        """Scores computed by attention, in the first cache group."""
        self.useful_scores = 0
        """Those of them against a cell that the sequence can see."""
        self.frames: list[Frame] = []
        self._takes_snapshots = snapshots
        self._frame_every = 1
        self._steps = 0
        self._progress = progress
        self._digest = hashlib.blake2b(digest_size=16) if digest else None

    def forward(self, start_s: float, seconds: float, batch: MicroBatch) -> None:
        """A forward pass has been run."""
        reads = batch.reads
        scores = int(reads.tokens @ reads.scanned)
        self.scores += scores
        self.useful_scores += int(reads.tokens @ reads.useful)
        self._count += 1
        if self.detail == "tables":
            self._passes.add((start_s, seconds, batch.n_tokens, len(batch.chunks), scores, reads.span))
            if self._time_breakdown is not None:
                self._time_breakdown.forward(batch)
        for place in batch.places:
            self.moved(place.moves)
            self.transferred(place.transfers)
            if self._digest is not None:
                self._digest.update(place.cells.tobytes())
        if self._digest is not None:
            self._digest.update(repr(batch.chunks).encode())

    def arrived(self, job: Job) -> None:
        """A request has come to the server."""
        if self.queue.arrived == 0 and self._states is not None:
            self._states.begin(job.arrival_s)
        if self._time_breakdown is not None:
            self._time_breakdown.arrived(job)
        self.queue.arrive(self.latencies.ended)

    def mixed_step(self, summary: PassSummary, next_step_reads: NextStepReads) -> None:
        """A forward pass has been run in which a lockstep batch got its tokens beside some chunks."""
        scores = next_step_reads.scanned
        for tokens, scanned, _ in summary.chunk_reads:
            scores += tokens * scanned
        self.scores += scores
        self.useful_scores += scores
        self._count += 1
        if summary.moves is not NO_MOVES:
            self.moved(summary.moves)

    def lockstep_steps(self, steps: int, scores: int) -> None:
        """A lockstep batch has taken steps by itself."""
        self.scores += scores
        self.useful_scores += scores
        self._count += steps

    def fast_forward(
        self, starts_s: FloatArray, seconds: Sequence[FloatArray], fast_forward: FastForward, usages: Usages | None
    ) -> None:
        """So many steps have been run, one after another; ``seconds``: of each pass of a step. Arrays of shape
        (steps,)."""
        self._steps += fast_forward.steps
        self._count += fast_forward.steps * len(fast_forward.passes)
        for each in fast_forward.passes:
            self.scores += int(each.groups[0].scanned.sum())
            self.useful_scores += int(each.groups[0].useful.sum())
        if usages is None:
            return
        if self._states is not None:
            self._states.extend(starts_s, self._columns(usages))
        if self.detail == "tables":
            self._tabulate(starts_s, seconds, fast_forward, usages)
        if self._time_breakdown is not None:
            self._time_breakdown.fast_forward(fast_forward)

    def _tabulate(
        self, starts_s: FloatArray, seconds: Sequence[FloatArray], fast_forward: FastForward, usages: Usages
    ) -> None:
        passes: list[tuple[NDArray[Any], ...]] = []
        for took, each in zip(seconds, fast_forward.passes, strict=True):
            sums, tokens = each.groups[0], np.full(fast_forward.steps, each.tokens)
            start = passes[-1][0] + passes[-1][1] if passes else starts_s
            passes.append((start, took, tokens, tokens, sums.scanned, sums.span))
        self._passes.extend([np.stack(columns, axis=1).ravel() for columns in zip(*passes, strict=True)])
        self._samples.extend((starts_s, *(getattr(usages, name) for name in _USAGE)))

    def _columns(self, usages: Usages) -> list[NDArray[Any]]:
        """What is averaged over time, after each of some steps; the shares as ``Usage`` has them."""
        stored, allocated, free = usages.stored, usages.allocated, self._capacity - usages.allocated
        with np.errstate(divide="ignore", invalid="ignore"):
            outside = np.where(free > 0, 1.0 - usages.placeable / free, 0.0)
            inside = np.where(allocated > 0, 1.0 - stored / allocated, 0.0)
        shares = [stored / self._capacity, outside, inside]
        return [*shares, stored, usages.span, usages.free_extents, usages.largest_free_extent]

    @property
    def unobserved_steps(self) -> int:
        """Steps from now on that nobody looks at one by one; 0 where the next must be seen."""
        if self._digest is not None:
            return 0
        return -self._steps % self._frame_every if self._takes_snapshots else 1 << 62

    def moved(self, moves: Moves) -> None:
        """A compaction has been carried out."""
        if moves.n_runs:
            self.compactions += 1
            self.moved_cells += moves.n_cells
            self.move_runs += moves.n_runs
            if self._digest is not None:
                for array in (moves.src, moves.dst, moves.length):
                    self._digest.update(array.tobytes())

    def idled(self, start_s: float, seconds: float) -> None:
        """Moves were carried out while there was nothing else to do."""
        if self._time_breakdown is not None:
            self._time_breakdown.idled(start_s, seconds)

    def waited(self, seconds: float) -> None:
        """A step waited for copies that were on their way."""
        self.prefetch_wait_s += seconds
        if self._time_breakdown is not None:
            self._time_breakdown.waited(seconds)

    def split(self, tokens: int) -> None:
        """A batch, so many of whose tokens are not done yet, found no room, and will be tried in parts."""
        self.batch_splits += 1
        if self._time_breakdown is not None:
            self._time_breakdown.cut(tokens)

    def begun(self, job: Job, held: int) -> None:
        """A job takes a sequence that holds ``held`` of its tokens."""
        if self._time_breakdown is not None:
            self._time_breakdown.begun(job, held)
        if job.preemptions == 0:
            self.queue.let_in += 1
            job.cached = held
            self.prefix_looked_up += job.tokens
            self.prefix_found += held
        else:
            self.recomputed_tokens += max(job.furthest - held, 0)

    def preempted(self, job: Job) -> None:
        """A job has given up its sequence."""
        self.preemptions += 1
        if self._time_breakdown is not None:
            self._time_breakdown.preempted(job)

    def transferred(self, transfers: Sequence[Transfer], *, ahead: bool = False) -> None:
        """Copies between the cache and the host tier have been carried out; ``ahead`` of their use, or for a step."""
        for transfer in transfers:
            self.prefetched_cells += transfer.n if ahead and not transfer.to_host else 0
            if transfer.to_host:
                self.to_host_cells += transfer.n
            else:
                self.from_host_cells += transfer.n

    def cache(self, now: float, usage: Usage) -> None:
        """From ``now`` on the cache is in this state."""
        self._capacity = usage.capacity
        if self._states is not None:
            self._states.hold(
                now,
                (
                    usage.utilization,
                    usage.external_fragmentation,
                    usage.internal_fragmentation,
                    usage.stored,
                    usage.span,
                    usage.free_extents,
                    usage.largest_free_extent,
                ),
            )
        if self.detail == "tables":
            self._samples.add((now, *_of(usage)))

    def snapshot(self, now: float, policy: Policy) -> None:
        """Take a picture of the cells at every so many steps, at fewer the longer the run."""
        if not self._takes_snapshots:
            return
        if self._steps % self._frame_every == 0:
            self.frames.append((now, policy.first_owners().astype(np.int16)))
            if len(self.frames) == _FRAMES:
                self.frames = self.frames[::2]
                self._frame_every *= 2
        self._steps += 1

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        self.latencies.add(job)
        if job.started_s != job.started_s:
            self.queue.let_in += 1
        if self._time_breakdown is not None:
            self._time_breakdown.finish(job)
        if self.detail == "tables":
            self.jobs.append(job)
        if self._progress is not None:
            self._progress(self.latencies.ended, job.finished_s)

    @property
    def schedule_digest(self) -> str:
        """A hash of every chunk, cell and move in order: equal for runs that decided the same."""
        assert self._digest is not None, "the recorder was not asked for a digest"
        return self._digest.hexdigest()

    def tables(self) -> Tables | None:
        """All that was recorded, where tables are kept."""
        if self.detail != "tables":
            return None
        causes = None if self._time_breakdown is None else self._time_breakdown.table()
        return Tables(self.requests_table(), self.cache_table(), self.passes_table(), causes)

    def requests_table(self) -> pd.DataFrame:
        """One row for each request, in order of its number; times in seconds."""
        rows = [
            (
                job.request.id,
                job.status,
                job.arrival_s,
                job.started_s,
                job.first_token_s,
                job.finished_s,
                job.request.prompt_tokens,
                job.generated,
                job.truncated,
                job.cached,
                job.preemptions,
                job.error,
            )
            for job in self.jobs
        ]
        names = ["id", "status", "arrival_s", "started_s", "first_token_s", "finished_s"]
        table = pd.DataFrame(rows, columns=[*names, *_REQUEST_COUNTS, "error"])
        table["ttft_s"] = table["first_token_s"] - table["arrival_s"]
        table["e2e_s"] = table["finished_s"] - table["arrival_s"]
        several = table["output_tokens"] > 1
        spread = table["finished_s"] - table["first_token_s"]
        table["tpot_s"] = spread.where(several) / (table["output_tokens"] - 1).where(several)
        return table.sort_values("id", ignore_index=True)

    def cache_table(self) -> pd.DataFrame:
        """The state of the cache over time: one row for each change, valid until the next."""
        table = self._samples.table()
        stored, allocated, placeable = table["stored"], table["allocated"], table.pop("placeable")
        table.insert(3, "free", self._capacity - allocated)
        free = table["free"]
        table["utilization"] = stored / self._capacity
        table["external_fragmentation"] = (1.0 - placeable / free).where(free > 0, 0.0)
        table["internal_fragmentation"] = (1.0 - stored / allocated).where(allocated > 0, 0.0)
        table = table[["time_s", *_COUNTS, *_SHARES]]
        return table.drop_duplicates("time_s", keep="last", ignore_index=True)

    def passes_table(self) -> pd.DataFrame:
        """One row for each forward pass; with what it cost by term, where a time breakdown was kept (``time
        breakdown.TERMS``)."""
        table = self._passes.table()
        return table if self._time_breakdown is None else table.join(self._time_breakdown.terms())

    def cache_means(self) -> dict[str, float | None]:
        """Means over time, from the first arrival to the last change, of how full and how broken up the cache was; None
        where that was not watched, or no time passed."""
        means = self._states.means() if self._states is not None else None
        return dict.fromkeys(_MEANS) if means is None else {name: means[of] for name, of in _MEANS.items()}

    @property
    def forward_passes(self) -> int:
        """How many have been run."""
        return self._count


class Tables(NamedTuple):
    """What happened in a run, row by row; times in seconds."""

    requests: pd.DataFrame
    """One row for each request, in order of its number."""
    cache: pd.DataFrame
    """The state of the cache over time: one row for each change, valid until the next."""
    passes: pd.DataFrame
    """One row for each forward pass."""
    causes: pd.DataFrame | None = None
    """One row for each completed request: on what its seconds were spent (``Ledger.table``)."""


@dataclass(frozen=True)
class Result:
    """One finished run: the figures and, where they were asked for, the tables."""

    scenario: Any
    """The ``Scenario``."""
    policy: str
    summary: dict[str, Any]
    """The object that ``--json`` prints; its schema is in the README."""
    ended_s: float
    """Seconds of simulated time at the end."""
    tables: Tables | None = field(default=None, repr=False)
    frames: tuple[Frame, ...] = field(default=(), repr=False)
    """Pictures of the cells, where they were asked for."""
    warnings: tuple[str, ...] = ()
    """Where the prediction went beyond what the profile measured, what was left out of a trace or mended in it, and if
    arrivals outpaced service, a line each."""
    notes: tuple[str, ...] = ()
    """Those of the warnings that speak of the workload, and are the same under every policy."""

    @property
    def requests(self) -> pd.DataFrame:
        """The table of requests. Raises ``UserError`` where no tables were kept."""
        return self._tables.requests

    @property
    def cache(self) -> pd.DataFrame:
        """The table of the cache's states. Raises ``UserError`` where no tables were kept."""
        return self._tables.cache

    @property
    def passes(self) -> pd.DataFrame:
        """The table of forward passes. Raises ``UserError`` where no tables were kept."""
        return self._tables.passes

    @property
    def causes(self) -> pd.DataFrame:
        """On what each completed request's seconds were spent. Raises ``UserError`` where that was not kept."""
        if self._tables.causes is None:
            raise UserError(f"{self.policy}: no cost model was at hand to say what the seconds were spent on")
        return self._tables.causes

    @property
    def _tables(self) -> Tables:
        if self.tables is None:
            raise UserError(f'{self.policy}: no tables were kept of this run; ask for them with detail="tables"')
        return self.tables


def summarize(recorder: Recorder, cell_bytes: float) -> dict[str, Any]:
    """The figures of a run; times in seconds, NaN-free: what cannot be said is None."""
    return {
        **recorder.latencies.summary(),
        "queue": recorder.queue.summary(),
        "cache": {
            **recorder.cache_means(),
            "scored_useful": recorder.useful_scores / recorder.scores if recorder.scores else None,
            "failed_allocations": recorder.failed_allocations,
            "batch_splits": recorder.batch_splits,
            "compactions": recorder.compactions,
            "move_runs": recorder.move_runs,
            "moved_cells": recorder.moved_cells,
            "moved_bytes": int(recorder.moved_cells * cell_bytes),
        },
        "context_shifts": recorder.context_shifts,
        "preemptions": recorder.preemptions,
        "recomputed_tokens": recorder.recomputed_tokens,
        "prefix": {
            "tokens": recorder.prefix_looked_up,
            "found": recorder.prefix_found,
            "hit_rate": recorder.prefix_found / recorder.prefix_looked_up if recorder.prefix_looked_up else None,
        },
        "host": {
            "bytes_out": int(recorder.to_host_cells * cell_bytes),
            "bytes_in": int(recorder.from_host_cells * cell_bytes),
            "bytes_prefetched": int(recorder.prefetched_cells * cell_bytes),
            "prefetch_wait_s": recorder.prefetch_wait_s,
        },
        "forward_passes": recorder.forward_passes,
    }
