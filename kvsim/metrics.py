"""What is recorded while the server runs, and what is made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsim.job import Job
from kvsim.rows import Rows
from policies import NO_MOVES, Leap, MicroBatch, Moves, Policy, Transfer, Usage, Usages
from policies.crew import Ahead, Brief

FloatArray = NDArray[np.float64]

Progress = Callable[[int, float], None]
"""Called with the number of requests ended and the simulated time in seconds."""

Detail = Literal["requests", "cache", "tables"]
"""What is kept of a run: how its requests fared; also means over time of how full and how broken up the cache was; also
a table of all requests, of all forward passes, and of all that changed in the cache."""

Frame = tuple[float, NDArray[np.int16]]
"""A picture of the cells: time in seconds, and the sequence in each cell of the first group (-1: none)."""

_QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_SHARES = ("utilization", "external_fragmentation", "internal_fragmentation")
_PASSES = {"start_s": float, "seconds": float, "tokens": int, "chunks": int, "scores": int, "cells_read": int}
_USAGE = ("stored", "allocated", "placeable", "free_runs", "largest_free_run", "span")
"""Of ``Usage``, what is recorded."""
_of = attrgetter(*_USAGE)
_COUNTS = ("stored", "allocated", "free", "span", "free_runs", "largest_free_run")
_REQUEST_COUNTS = ("prompt_tokens", "output_tokens", "truncated", "cached_tokens", "preemptions")
_FRAMES = 400
"""A film of the cells keeps between half as many pictures and as many."""


class Recorder:
    """Collects requests, forward passes and cache samples; times in seconds of the simulated clock."""

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        detail: Detail = "tables",
        digest: bool = False,
        film: bool = False,
    ):
        self.watches = film or digest or detail != "requests"
        """Whether how full the cache is, is wanted after each step."""
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
        """In the order in which they ended."""
        self._count = 0
        self._passes = Rows(_PASSES)
        self._samples = Rows({"time_s": float, **dict.fromkeys(_USAGE, int)})
        self._capacity = 0
        self.scores = 0
        """Scores computed by attention, in the first cache group."""
        self.useful_scores = 0
        """Those of them against a cell that the sequence can see."""
        self.frames: list[Frame] = []
        self._film = film
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
        if self.watches:
            self._passes.add((start_s, seconds, batch.n_tokens, len(batch.chunks), scores, reads.span))
        for place in batch.places:
            self.moved(place.moves)
            self.transferred(place.transfers)
            if self._digest is not None:
                self._digest.update(place.cells.tobytes())
        if self._digest is not None:
            self._digest.update(repr(batch.chunks).encode())

    def beside(self, brief: Brief, ahead: Ahead) -> None:
        """A forward pass has been run in which a crew got its tokens beside some chunks."""
        scores = ahead.scanned
        for tokens, scanned, _ in brief.rows:
            scores += tokens * scanned
        self.scores += scores
        self.useful_scores += scores
        self._count += 1
        if brief.moves is not NO_MOVES:
            self.moved(brief.moves)

    def leap(self, starts_s: FloatArray, seconds: Sequence[FloatArray], leap: Leap, usages: Usages | None) -> None:
        """So many steps have been run, one after another; ``seconds``: of each pass of a step. Arrays of shape
        (steps,)."""
        self._steps += leap.steps
        self._count += leap.steps * len(leap.passes)
        passes: list[tuple[NDArray[Any], ...]] = []
        for took, each in zip(seconds, leap.passes, strict=True):
            sums = each.groups[0]
            self.scores += int(sums.scanned.sum())
            self.useful_scores += int(sums.useful.sum())
            if usages is None:
                continue
            tokens = np.full(leap.steps, each.tokens)
            start = passes[-1][0] + passes[-1][1] if passes else starts_s
            passes.append((start, took, tokens, tokens, sums.scanned, sums.span))
        if usages is None:
            return
        self._passes.extend([np.stack(columns, axis=1).ravel() for columns in zip(*passes, strict=True)])
        self._samples.extend((starts_s, *(getattr(usages, name) for name in _USAGE)))

    @property
    def blind_steps(self) -> int:
        """Steps from now on that nobody looks at one by one; 0 where the next must be seen."""
        if self._digest is not None:
            return 0
        return -self._steps % self._frame_every if self._film else 1 << 62

    def moved(self, moves: Moves) -> None:
        """A compaction has been carried out."""
        if moves.n_runs:
            self.compactions += 1
            self.moved_cells += moves.n_cells
            self.move_runs += moves.n_runs
            if self._digest is not None:
                for array in (moves.src, moves.dst, moves.length):
                    self._digest.update(array.tobytes())

    def begun(self, job: Job, held: int) -> None:
        """A job takes a sequence that holds ``held`` of its tokens."""
        if job.preemptions == 0:
            job.cached = held
            self.prefix_looked_up += job.tokens
            self.prefix_found += held
        else:
            self.recomputed_tokens += max(job.furthest - held, 0)

    def preempted(self, job: Job) -> None:
        """A job has given up its sequence."""
        self.preemptions += 1

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
        self._samples.add((now, *_of(usage)))

    def film(self, now: float, policy: Policy) -> None:
        """Take a picture of the cells at every so many steps, at fewer the longer the run."""
        if not self._film:
            return
        if self._steps % self._frame_every == 0:
            self.frames.append((now, policy.occupancy().first_owner().astype(np.int16)))
            if len(self.frames) == _FRAMES:
                self.frames = self.frames[::2]
                self._frame_every *= 2
        self._steps += 1

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        self.jobs.append(job)
        if self._progress is not None:
            self._progress(len(self.jobs), job.finished_s)

    @property
    def schedule_digest(self) -> str:
        """A hash of every chunk, cell and move in order: equal for runs that decided the same."""
        assert self._digest is not None, "the recorder was not asked for a digest"
        return self._digest.hexdigest()

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
        """One row for each forward pass."""
        return self._passes.table()

    @property
    def forward_passes(self) -> int:
        """How many have been run."""
        return self._count


@dataclass(frozen=True)
class Result:
    """One finished run: the figures, and the tables that they were made of."""

    scenario: Any
    """The ``Scenario``."""
    policy: str
    summary: dict[str, Any]
    """The object that ``--json`` prints; its schema is in the README."""
    requests: pd.DataFrame = field(repr=False)
    cache: pd.DataFrame = field(repr=False)
    passes: pd.DataFrame = field(repr=False)
    frames: tuple[Frame, ...] = field(default=(), repr=False)
    """Pictures of the cells, where they were asked for."""
    warnings: tuple[str, ...] = ()
    """Where the prediction went beyond what the profile measured, a line each."""


def summarize(recorder: Recorder, requests: pd.DataFrame, cache: pd.DataFrame, cell_bytes: float) -> dict[str, Any]:
    """The figures of a run; times in seconds, NaN-free: what cannot be said is None."""
    completed = requests[requests["status"] == "completed"]
    begin = requests["arrival_s"].min()
    makespan = float(requests["finished_s"].max() - begin) if len(requests) else 0.0
    tokens = int(completed["output_tokens"].sum())
    prompt_tokens = int(completed["prompt_tokens"].sum())
    return {
        "requests": len(requests),
        "completed": len(completed),
        "failed": int((requests["status"] == "failed").sum()),
        "truncated": int(completed["truncated"].sum()),
        "output_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "makespan_s": makespan,
        "throughput_tokens_per_s": tokens / makespan if makespan > 0 else None,
        **{name: _distribution(completed[name]) for name in ("ttft_s", "tpot_s", "e2e_s")},
        "cache": {
            **{f"{name}_mean": _time_mean(cache, name, begin) for name in _SHARES},
            "stored_cells_mean": _time_mean(cache, "stored", begin),
            "span_cells_mean": _time_mean(cache, "span", begin),
            "free_runs_mean": _time_mean(cache, "free_runs", begin),
            "largest_free_run_mean": _time_mean(cache, "largest_free_run", begin),
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


def _distribution(values: pd.Series[float]) -> dict[str, float | None]:
    known = values.dropna().to_numpy(dtype=float)
    if len(known) == 0:
        return dict.fromkeys(("mean", *_QUANTILES))
    quantiles = np.quantile(known, list(_QUANTILES.values())).tolist()
    return {"mean": float(known.mean()), **dict(zip(_QUANTILES, quantiles, strict=True))}


def _time_mean(cache: pd.DataFrame, name: str, begin: float) -> float | None:
    """Mean over time from the first arrival to the last change, each state weighted by how long it lasted."""
    times = np.maximum(cache["time_s"].to_numpy(dtype=float), begin)
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return float(np.average(cache[name].to_numpy(dtype=float)[:-1], weights=np.diff(times)))
