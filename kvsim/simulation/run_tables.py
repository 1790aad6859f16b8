"""What happened in a run, row by row: tables of requests, of the cache, of forward passes, and of causes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsim.simulation.job import Job
from kvsim.simulation.kept_states import KeptStates
from kvsim.simulation.rows import Rows, Table
from policies.placement.rule import PassReads

_PASSES = {"start_s": float, "seconds": float, "tokens": int, "chunks": int, "scores": int, "cells_read": int}
_REQUESTS = {
    "id": int,
    "status": object,
    "arrival_s": float,
    "started_s": float,
    "first_token_s": float,
    "finished_s": float,
    "prompt_tokens": int,
    "output_tokens": int,
    "truncated": bool,
    "cached_tokens": int,
    "preemptions": int,
    "error": object,
    "failure": object,
}


class Tables(NamedTuple):
    """What happened in a run, row by row; times in seconds."""

    requests: Table
    """One row for each request, in order of its number."""
    states: KeptStates
    """How full and how broken up the cache was, for means from the arrival of a request to the end of another; columns
    are fields of ``Usage``."""
    cache: Table | None = None
    """The state of the cache over time: one row for each change, valid until the next."""
    passes: Table | None = None
    """One row for each forward pass."""
    causes: Table | None = None
    """One row for each completed request: what its seconds were spent on (``TimeBreakdown.table``)."""


class PassLog:
    """A row for each forward pass."""

    def __init__(self) -> None:
        self._rows = Rows(_PASSES)

    def add(self, start_s: float, seconds: float, work: PassReads) -> None:
        """One pass."""
        group = work.groups[0]
        self._rows.add((start_s, seconds, int(work.tokens), int(work.chunks), group.scores, int(group.span)))

    def table(self) -> Table:
        """All passes, in the order in which they were run."""
        return self._rows.table()


def requests_table(jobs: Sequence[Job]) -> Table:
    """One row for each job that has ended, in order of its request's number; times in seconds."""
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
            job.failure.value,
        )
        for job in jobs
    ]
    columns = zip(*rows, strict=True) if rows else ((),) * len(_REQUESTS)
    table = Table(
        {name: np.array(column, dtype=kind) for (name, kind), column in zip(_REQUESTS.items(), columns, strict=True)}
    )
    arrived, first, finished, output = (
        table.columns[name] for name in ("arrival_s", "first_token_s", "finished_s", "output_tokens")
    )
    later = np.where(output > 1, output - 1, 1)
    latencies = {
        "ttft_s": first - arrived,
        "e2e_s": finished - arrived,
        "tpot_s": np.where(output > 1, (finished - first) / later, math.nan),
    }
    return table.with_columns(latencies).sorted_by("id")
