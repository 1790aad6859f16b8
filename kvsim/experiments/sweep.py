"""Run a sweep: every point under every policy, with replications; each finished run is stored at once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.experiments.estimates import check_precision
from kvsim.experiments.fingerprint import code_version, digest_of, scenario_parts
from kvsim.experiments.measures import measure_interval
from kvsim.experiments.policy_code import describe_code
from kvsim.experiments.store import DamageWarning, Row, Store, SweepPosition, Timing
from kvsim.experiments.sweep_file import Point, SweepPlan, plan_sweep
from kvsim.experiments.sweep_result import SweepResult
from kvsim.experiments.sweep_task import RunTask, RunTasks, one_line
from kvsim.experiments.workers import map_unordered, preload
from policies import PolicyFactory

SweepProgress = Callable[[int, int, int], None]
"""Called with the numbers of runs finished, of runs wanted so far, and of failed runs."""

_CHUNK_REQUESTS = 100
"""Requests sent to a worker at a time: tens of milliseconds of work for about one of overhead."""


def sweep(
    source: str | Path | dict[str, Any],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    dask: str | None = None,
    progress: SweepProgress | None = None,
    seed: int | None = None,
    requests: int | None = None,
    show: str | Sequence[str] | None = None,
    max_failed: float | str | None = None,
    policies: Sequence[str | PolicyFactory] | None = None,
    check: bool = False,
    **served: Any,
) -> SweepResult:
    """Run a sweep, given as a built-in name, a TOML file or its table (see ``sweep_file.SweepFile``).

    Runs that are already in ``out`` (by default ``results/NAME/sweep.sqlite``) are not repeated, so a sweep that was
    interrupted, or whose file was changed, continues where it can. ``workers``: number of processes, by default one per
    processor. ``dask``: the address of a dask scheduler whose workers execute the runs instead; they need the same
    kvsim and the same files at the same paths. Neither changes any result. ``check``: hold policies to their word at
    every step, as ``run`` does; stored runs that were not held to it are made again. All other arguments are those of
    ``plan_sweep``; ``show`` and ``max_failed`` need no new runs.

    A run that fails, or whose settings are invalid, is stored with its error and stops nothing. Raises ``UserError``
    and ``WorkloadError`` before anything is written if the sweep itself is invalid, and ``UserError`` if its store
    cannot be used or a worker dies. ``KeyboardInterrupt`` leaves the finished runs in the store.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers: {workers}; at least 1 is accepted")
    if workers is not None and dask is not None:
        raise UserError("workers: a dask cluster has its own; give either workers or dask")
    plan = plan_sweep(
        source,
        seed=seed,
        requests=requests,
        show=show,
        max_failed=max_failed,
        policies=policies,
        **served,
    )
    path = Path("results") / plan.name / "sweep.sqlite" if out is None else Path(out)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; a file is expected")
    if path.suffix in (".json", ".csv", ".png"):
        raise UserError(f"{path}: that name is used for tables and figures; FILE.sqlite is expected")
    with Store(path) as store:
        if (name := store.name()) not in (None, plan.name):
            raise UserError(f"{path}: holds the sweep {name!r}, this one is {plan.name!r}; name another with --out")
        for line in store.drop_damaged():
            warnings.warn(line, DamageWarning, stacklevel=2)
        tracker = _RunTracker(plan, store, progress, check)
        preload(point.scenario for point in plan.points if point.scenario is not None)
        while tasks := tracker.next_tasks():
            for finished in map_unordered(RunTasks(code_version(), tracker.plugins), _chunks(tasks), workers, dask):
                tracker.store_finished(finished)
        tracker.report_progress()
        return SweepResult(plan, tuple(store.rows()), path)


class _RunTracker:
    """Keeps track of which runs are wanted, which are stored, and which are still missing."""

    def __init__(self, plan: SweepPlan, store: Store, progress: SweepProgress | None, check: bool):
        self._plan = plan
        self._check = check
        self._store = store
        self._progress = progress
        named = {name: describe_code(name) for name in plan.policies if name not in plan.factories}
        self.plugins = {name: code for name, code in named.items() if code is not None}
        """What the code of each plug-in is that the sweep uses by name."""
        self._codes = {name: describe_code(factory) for name, factory in plan.factories.items()}
        """What the code of each policy is that was given as a callable."""
        self._settings = {point.number: json.dumps(point.settings) for point in plan.points}
        self._stored = store.digests()
        self._replications = dict.fromkeys(range(len(plan.points)), 0)
        """Number of replications wanted so far, by index of the point."""
        self._requested: set[str] = set()
        """Digests of all runs wanted so far."""
        invalid = [self._invalid_row(point) for point in plan.points if point.scenario is None]
        first = self._further_tasks()
        done = [_position(task) for task in first if task.digest in self._stored]
        meta = {"name": plan.name, "sweep": json.dumps(plan.to_dict()), "code": code_version()}
        store.begin(meta, [*done, *(SweepPosition(row.digest, row.number or 0, 0, row.settings) for row in invalid)])
        store.add([row for row in invalid if row.digest not in self._stored])
        self._done, self._failed = len(invalid) + len(done), len(invalid)
        self._total = len(invalid) + len(first)
        self._first: list[RunTask] | None = [task for task in first if task.digest not in self._stored]
        self.report_progress()

    def next_tasks(self) -> list[RunTask]:
        """Return the runs to execute next; none when the sweep is finished.

        With a stopping rule, the next runs depend only on the results of all runs so far, not on the order in which
        they finished.
        """
        if self._first is not None:
            missing, self._first = self._first, None
            if missing:
                return missing
        while self._plan.file.stop is not None and (more := self._further_tasks()):
            done = [_position(task) for task in more if task.digest in self._stored]
            self._store.adopt(done)
            self._done += len(done)
            self._total += len(more)
            missing = [task for task in more if task.digest not in self._stored]
            if missing:
                return missing
        return []

    def store_finished(self, finished: Sequence[tuple[Row, Timing]]) -> None:
        """Store runs that have been executed."""
        self._store.add([row for row, _ in finished], [timing for _, timing in finished])
        self._done += len(finished)
        self._failed += sum(row.status == "failed" for row, _ in finished)
        self._stored |= {row.digest for row, _ in finished}
        self.report_progress()

    def report_progress(self) -> None:
        """Call the progress function with the current counts."""
        if self._progress is not None:
            self._progress(self._done, self._total, self._failed)

    def _further_tasks(self) -> list[RunTask]:
        """Further replications: first the number in the file, then a quarter more where precision is not reached."""
        measured = self._measured() if any(self._replications.values()) else {}
        tasks = []
        for index, point in enumerate(self._plan.points):
            if point.scenario is None:
                continue
            have = self._replications[index]
            more = self._further_replications(have, measured.get((point.number, point.policy)))
            for r in range(have, have + more):
                task = self._task(point, r)
                if task.digest not in self._requested:  # Two points may amount to the same run.
                    self._requested.add(task.digest)
                    tasks.append(task)
            self._replications[index] += more
        return tasks

    def _further_replications(self, have: int, runs: list[Row] | None) -> int:
        """How many replications to add to a point that has some; ``runs``: None if the measure is unknown in one."""
        file = self._plan.file
        if not have:
            return file.replications
        if file.stop is None or runs is None:
            return 0
        rule, least = file.stop, max(file.replications, 2)
        values = [json.loads(row.measures)[rule.measure] for row in runs]
        interval = measure_interval(rule.measure, values, rule.level, [row.latencies() for row in runs])
        if check_precision(interval, len(runs), rule.within, least, rule.most).done:
            return 0
        return min(max(have // 4, 1), rule.most - have)

    def _measured(self) -> dict[tuple[int, str], list[Row]]:
        """The runs, by number and policy, of each point where all have the stopping rule's measure."""
        if self._plan.file.stop is None:
            return {}
        measure = self._plan.file.stop.measure
        by_point: dict[tuple[int, str], list[Row]] = {}
        unknown = set()
        for row in self._store.rows():
            key = (row.number or 0, row.policy)
            by_point.setdefault(key, []).append(row)
            if json.loads(row.measures).get(measure) is None:
                unknown.add(key)
        return {key: rows for key, rows in by_point.items() if key not in unknown}

    def _task(self, point: Point, r: int) -> RunTask:
        scenario, file = point.replication(r), self._plan.file
        slo = None if file.slo is None else file.slo.model_dump()
        parts = scenario_parts(scenario, self._codes.get(point.policy))
        digest = digest_of(code_version(), parts, file.warmup, slo, *(["check"] if self._check else []))
        settings = self._settings[point.number]
        factory = self._plan.factories.get(point.policy)
        return RunTask(
            digest, point.number, r, point.policy, settings, scenario, file.warmup, file.slo, factory, self._check
        )

    def _invalid_row(self, point: Point) -> Row:
        """The stored row of a point with invalid settings."""
        settings = self._settings[point.number]
        digest = digest_of(code_version(), "fault", point.policy, settings, point.fault)
        error = one_line(point.fault)
        return Row(digest, point.number, 0, point.policy, settings, "", "failed", error=error)


def _position(task: RunTask) -> SweepPosition:
    return SweepPosition(task.digest, task.number, task.replication, task.settings)


def _chunks(tasks: Sequence[RunTask]) -> list[list[RunTask]]:
    """Group small runs; large ones stay alone."""
    chunks: list[list[RunTask]] = []
    room = 0
    for task in tasks:
        workload = task.scenario.workload
        # Only its reader knows how many requests a trace or a mix has; usually many.
        requests = getattr(workload, workload.count_key, None) or _CHUNK_REQUESTS
        if room < requests:
            chunks.append([])
            room = _CHUNK_REQUESTS
        chunks[-1].append(task)
        room -= requests
    return chunks
