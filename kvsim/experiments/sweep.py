"""Many runs: every point of a sweep under every policy, as often as asked for, each finished run kept at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.experiments.estimates import stop
from kvsim.experiments.fingerprint import code_version, digest_of, scenario_parts
from kvsim.experiments.store import Place, Row, Store, Timing
from kvsim.experiments.sweep_file import Point, SweepPlan, plan_sweep
from kvsim.experiments.sweep_result import SweepResult
from kvsim.experiments.sweep_task import Make, Task, one_line
from kvsim.experiments.workers import each

SweepProgress = Callable[[int, int, int], None]
"""Called with the number of runs finished, of runs wanted so far, and of those that failed."""

_CHUNK_REQUESTS = 100
"""Requests worth handing to a worker at a time: some tens of milliseconds, beside one for the way there and back."""


def sweep(
    source: str | Path | dict[str, Any],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    dask: str | None = None,
    progress: SweepProgress | None = None,
    seed: int | None = None,
    requests: int | None = None,
) -> SweepResult:
    """Run a sweep: a built-in one by name, a TOML file or its table (see ``sweep_file.SweepFile``).

    Runs that ``out`` (by default ``results/NAME/sweep.sqlite``) has already are not made again, so that a sweep that
    was cut short, or whose file was changed, goes on where it can. ``workers``: processes, by default one for each
    processor; ``dask``: the address of a dask scheduler whose workers make the runs instead, with the same kvsim
    installed and files at the same paths. Neither changes any result. ``seed`` and ``requests`` replace the scenario's.

    A run that cannot be made, or fails, is kept with its error and stops nothing. Raises ``UserError`` and
    ``WorkloadError`` before anything is written where the sweep cannot be, and ``UserError`` where its file cannot be
    used or a worker dies; ``KeyboardInterrupt`` leaves what is finished.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers: {workers}; at least 1 is accepted")
    if workers is not None and dask is not None:
        raise UserError("workers: a dask cluster has its own; give either workers or dask")
    planned = plan_sweep(source, seed=seed, requests=requests)
    path = default_store(planned) if out is None else Path(out)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; a file is expected")
    if path.suffix in (".json", ".csv", ".png"):
        raise UserError(f"{path}: tables and pictures have such names; FILE.sqlite is expected")
    with Store(path) as store:
        if (name := store.name()) not in (None, planned.name):
            raise UserError(f"{path}: keeps the sweep {name!r}, this one is {planned.name!r}; name another with --out")
        time_breakdown = _Ledger(planned, store, progress)
        while tasks := time_breakdown.missing():
            for finished in each(Make(code_version()), _chunks(tasks), workers, dask):
                time_breakdown.keep(finished)
        time_breakdown.tell()
        return SweepResult(planned, tuple(store.rows()), path)


def default_store(planned: SweepPlan) -> Path:
    """Where a sweep is kept, if nobody says."""
    return Path("results") / planned.name / "sweep.sqlite"


class _Ledger:
    """Which runs are wanted, which there are, and which are missing."""

    def __init__(self, planned: SweepPlan, store: Store, progress: SweepProgress | None):
        self._plan = planned
        self._store = store
        self._progress = progress
        self._settings = {point.number: json.dumps(point.settings) for point in planned.points}
        self._known = store.digests()
        self._wanted = dict.fromkeys(range(len(planned.points)), 0)
        """Of each point its replications so far."""
        self._asked: set[str] = set()
        self._done = self._failed = 0
        faults = [self._fault(point) for point in planned.points if point.scenario is None]
        first = self._ask()
        meta = {"name": planned.name, "sweep": json.dumps(planned.to_dict()), "code": code_version()}
        there = [_place(task) for task in first if task.digest in self._known]
        store.begin(meta, [*there, *(Place(row.digest, row.number or 0, 0, row.settings) for row in faults)])
        store.add([row for row in faults if row.digest not in self._known])
        self._done, self._failed = len(faults) + len(there), len(faults)
        self._total = len(faults) + len(first)
        self._missing: list[Task] | None = [task for task in first if task.digest not in self._known]
        self.tell()

    def missing(self) -> list[Task]:
        """The runs to be made next; none when the sweep is finished.

        With a stopping rule, what is made next depends on what all runs so far have said, and on nothing else: not on
        which of them ended first.
        """
        if self._missing is not None:
            missing, self._missing = self._missing, None
            if missing:
                return missing
        while self._plan.file.stop is not None and (more := self._ask()):
            there = [_place(task) for task in more if task.digest in self._known]
            self._store.adopt(there)
            self._done += len(there)
            self._total += len(more)
            missing = [task for task in more if task.digest not in self._known]
            if missing:
                return missing
        return []

    def keep(self, finished: Sequence[tuple[Row, Timing]]) -> None:
        """These have been made."""
        self._store.add([row for row, _ in finished], [timing for _, timing in finished])
        self._done += len(finished)
        self._failed += sum(row.status == "failed" for row, _ in finished)
        self._known |= {row.digest for row, _ in finished}
        self.tell()

    def tell(self) -> None:
        """How far the sweep is."""
        if self._progress is not None:
            self._progress(self._done, self._total, self._failed)

    def _ask(self) -> list[Task]:
        """Further replications: at first as many as the file says, then a quarter more of what is not precise."""
        file = self._plan.file
        found = self._values() if any(self._wanted.values()) else {}
        tasks = []
        for at, point in enumerate(self._plan.points):
            if point.scenario is None:
                continue
            have = self._wanted[at]
            if not have:
                more = file.replications
            elif file.stop is None or (values := found.get((point.number, point.policy))) is None:
                continue
            else:
                rule, least = file.stop, max(file.replications, 2)
                if stop(values, rule.within, rule.level, least, rule.most).done:
                    continue
                more = min(max(have // 4, 1), rule.most - have)
            for r in range(have, have + more):
                task = self._task(point, r)
                if task.digest not in self._asked:  # Two points may come to the same.
                    self._asked.add(task.digest)
                    tasks.append(task)
            self._wanted[at] += more
        return tasks

    def _values(self) -> dict[tuple[int, str], list[float]]:
        """The stopping rule's measure of each point whose runs all have one, by number and policy."""
        assert self._plan.file.stop is not None
        measure = self._plan.file.stop.measure
        found: dict[tuple[int, str], list[float | None]] = {}
        for row in self._store.rows():
            found.setdefault((row.number or 0, row.policy), []).append(json.loads(row.measures).get(measure))
        return {key: [v for v in values if v is not None] for key, values in found.items() if None not in values}

    def _task(self, point: Point, r: int) -> Task:
        scenario, file = point.replication(r), self._plan.file
        slo = None if file.slo is None else file.slo.model_dump()
        digest = digest_of(code_version(), scenario_parts(scenario), file.warmup, slo)
        settings = self._settings[point.number]
        return Task(digest, point.number, r, point.policy, settings, scenario, file.warmup, file.slo)

    def _fault(self, point: Point) -> Row:
        settings = self._settings[point.number]
        digest = digest_of(code_version(), "fault", point.policy, settings, point.fault)
        error = one_line(point.fault)
        return Row(digest, point.number, 0, point.policy, settings, "", "failed", error=error)


def _place(task: Task) -> Place:
    return Place(task.digest, task.number, task.replication, task.settings)


def _chunks(tasks: Sequence[Task]) -> list[list[Task]]:
    """Small runs together, large ones alone."""
    chunks: list[list[Task]] = []
    room = 0
    for task in tasks:
        workload = task.scenario.workload
        # How many requests a trace or a mix has only its reader knows; they are seldom few.
        requests = getattr(workload, workload.count_key, None) or _CHUNK_REQUESTS
        if room < requests:
            chunks.append([])
            room = _CHUNK_REQUESTS
        chunks[-1].append(task)
        room -= requests
    return chunks
