"""Results of a sweep: tables with intervals, the best policy at each point, figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.costs.load_profile import load_profile
from kvsim.errors import UserError, counted
from kvsim.experiments.conclusions import conclude_sweep
from kvsim.experiments.estimates import LEVEL, check_precision
from kvsim.experiments.measures import MEASURES, MORE_IS_BETTER, WITHOUT_INTERVAL, measure_called, measure_interval
from kvsim.experiments.policy_code import plugins_used
from kvsim.experiments.pooled_percentiles import LatencySketches
from kvsim.experiments.ranking import (
    BOUND,
    NotRanked,
    Ranking,
    identical_groups,
    rank,
    reason_not_to_rank,
)
from kvsim.experiments.shared_warnings import share_assumptions, share_warnings
from kvsim.experiments.store import Row, written_names
from kvsim.experiments.sweep_file import SweepPlan
from kvsim.results import results_folder
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.without_effect import effect_lines, without_effect
from kvsim.simulation.summary import failure_lines, servers_behind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_DRAWN = 4
"""Maximum number of measures in the saved figure."""

_USUAL = ("e2e_mean", "ttft_p95", "e2e_p95", "throughput_tokens_per_s")
"""Measures in every table for which no others were asked."""


@dataclass(frozen=True)
class SweepResult:
    """All runs of a sweep."""

    plan: SweepPlan
    rows: tuple[Row, ...]
    """Sorted by number, policy and replication."""
    store: Path
    """The file that holds them."""

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.plan.name

    @property
    def level(self) -> float:
        """Confidence level of the intervals."""
        return self.plan.file.stop.level if self.plan.file.stop else LEVEL

    @property
    def measure(self) -> str:
        """The default measure: the stopping rule's, or else mean end-to-end latency."""
        return self.plan.file.stop.measure if self.plan.file.stop else "e2e_mean"

    @property
    def shown(self) -> tuple[str, ...]:
        """The measures of the printed table: the default measure, and those asked for or else the usual ones."""
        usual = (*_USUAL, *(("goodput_requests_per_s", "slo_share") if self.plan.file.slo is not None else ()))
        return tuple(dict.fromkeys((self.measure, *(self.plan.file.show or usual))))

    @property
    def drawn(self) -> tuple[str, ...]:
        """The measures of the saved figure: the first of those asked for, or else the default measure."""
        return tuple(self.plan.file.show or (self.measure,))[:MOST_DRAWN]

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What the runs warned of and why requests failed, each once, with the number of runs and the policies."""
        runs = []
        for row in self.rows:
            failures = json.loads(row.summary).get("failures", ())
            runs.append((row.policy, [*json.loads(row.warnings), *failure_lines(failures)]))
        return tuple(shared.line_of_runs(len(runs)) for shared in share_warnings(runs))

    @cached_property
    def assumed(self) -> tuple[str, ...]:
        """What the runs assumed of engines because the sweep does not say, a line for each."""
        scenarios = [point.scenario for point in self.plan.points if point.scenario is not None]
        lines = (line for scenario in scenarios for line in assumptions(scenario))
        idle = effect_lines((scenario.cache.policy, without_effect(scenario)) for scenario in scenarios)
        return (*share_assumptions(lines), *dict.fromkeys(idle))

    @property
    def schedulers(self) -> dict[str, list[str]]:
        """The policies that run under each scheduler."""
        found: dict[str, list[str]] = {}
        for scenario in (point.scenario for point in self.plan.points if point.scenario is not None):
            policies = found.setdefault(scenario.server.scheduler, [])
            if scenario.cache.policy not in policies:
                policies.append(scenario.cache.policy)
        return found

    @property
    def servers(self) -> tuple[str, ...]:
        """How many servers there are behind which routers, where there are several."""
        found: dict[str, list[int]] = {}
        for cluster in (point.scenario.cluster for point in self.plan.points if point.scenario is not None):
            found.setdefault(cluster.behind, []).append(cluster.size)
        return tuple(
            servers_behind(max(sizes), router, least=min(sizes)) for router, sizes in found.items() if max(sizes) > 1
        )

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per finished run: number, policy, replication, the axes, all measures."""
        done = (row for row in self.rows if row.status == "done")
        table = _table(((row, json.loads(row.measures)) for row in done), [*self.plan.axes, *MEASURES])
        return table.astype(dict.fromkeys(MEASURES, float))

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per point and policy, with intervals over its replications.

        The columns are number, policy, the axes, the numbers of ``replications`` and of ``failed`` runs, each
        measure with ``_low`` and ``_high`` (``measures.measure_interval``; infinite for one replication), and a
        ``verdict``, which says why a row should not be trusted or missed the stopping rule. Flags and settings
        (``measures.WITHOUT_INTERVAL``) have no interval. Times are in seconds; unknown values are NaN.
        """
        import pandas as pd

        done = dict(iter(self.runs.groupby(["number", "policy"], sort=False)))
        failed = Counter((row.number or 0, row.policy) for row in self.rows if row.status == "failed")
        rows = []
        for point in self.plan.points:
            key = (point.number, point.policy)
            group, n_failed = done.get(key), failed[key]
            if group is None and not n_failed:
                continue  # This point is the same as another one.
            counts = {"replications": 0 if group is None else len(group), "failed": n_failed}
            row_: dict[str, Any] = {"number": point.number, "policy": point.policy, **point.settings, **counts}
            if group is not None:
                latencies = self._latencies_of(group)
                for measure in MEASURES:
                    known = group[measure].dropna().to_numpy()
                    if measure in WITHOUT_INTERVAL and len(known):
                        row_[measure] = float(known.mean())
                    elif len(known):
                        row_ |= measure_interval(measure, known, self.level, latencies).columns(measure)
            remarks = filter(None, (self._missed_precision(group), _verdict(group, n_failed)))
            rows.append({**row_, "verdict": "; ".join(remarks)})
        ends = [
            f"{measure}{end}"
            for measure in MEASURES
            for end in (("",) if measure in WITHOUT_INTERVAL else ("", "_low", "_high"))
        ]
        return pd.DataFrame(
            rows, columns=["number", "policy", *self.plan.axes, "replications", "failed", *ends, "verdict"]
        )

    def _latencies_of(self, group: pd.DataFrame) -> list[LatencySketches]:
        """The latencies of each of a point's runs."""
        return self._latencies[int(group["number"].iloc[0]), str(group["policy"].iloc[0])]

    @cached_property
    def _latencies(self) -> dict[tuple[int, str], list[LatencySketches]]:
        """The latencies of each finished run, by number and policy of its point."""
        found: dict[tuple[int, str], list[LatencySketches]] = {}
        for row in self.rows:
            if row.status == "done":
                found.setdefault((row.number or 0, row.policy), []).append(row.latencies())
        return found

    def _missed_precision(self, group: pd.DataFrame | None) -> str:
        """By how much a point's runs missed the stopping rule; empty if they met it, or there is none."""
        rule = self.plan.file.stop
        if rule is None or group is None:
            return ""
        values = group[rule.measure].to_numpy(dtype=float)
        if np.isnan(values).any():
            return f"{counted(len(values), 'run')}, {rule.measure} unknown in {int(np.isnan(values).sum())}"
        interval = measure_interval(rule.measure, values, rule.level, self._latencies_of(group))
        least = max(self.plan.file.replications, 2)
        if check_precision(interval, len(values), rule.within, least, rule.most).precise:
            return ""
        return f"{counted(len(values), 'run')}, still ±{100 * interval.relative:.1f} %"

    @property
    def imprecise(self) -> int:
        """Number of points, counted per policy, that did not meet the stopping rule."""
        groups = self.runs.groupby(["number", "policy"], sort=False)
        return sum(bool(self._missed_precision(group)) for _, group in groups)

    @cached_property
    def forgetful(self) -> tuple[str, ...]:
        """Policies that drop tokens."""
        from kvsim.simulation.set_up import build_policy

        drops: dict[str, bool] = {}
        for point in self.plan.points:
            if point.scenario is not None and point.policy not in drops:
                policy = self.plan.factories.get(point.policy, point.policy)
                try:
                    drops[point.policy] = build_policy(point.scenario, policy).drops_tokens
                except UserError:
                    continue  # It may be possible at another point.
        return tuple(policy for policy, dropped in drops.items() if dropped)

    @property
    def failures(self) -> pd.DataFrame:
        """One row per failed run: number, policy, replication, the axes, ``error``."""
        failed = (row for row in self.rows if row.status == "failed")
        return _table(((row, {"error": row.error}) for row in failed), [*self.plan.axes, "error"])

    def rankings(self, measure: str | None = None) -> dict[int, Ranking]:
        """Rank the policies at each point by a measure; keyed by number.

        Policies that failed more requests than ``max_failed`` allows, or are unstable, are left out, and so is the
        oracle. Of policies that are identical in every request only the first is ranked. Raises ``UserError`` for an
        unknown measure.
        """
        measure = self.measure if measure is None else measure_called(measure)
        left_out = self.left_out
        repeated = {(n, p) for n, groups in self._identical.items() for group in groups for p in group[1:]}
        values: dict[int, dict[str, list[float]]] = {}
        for key, group in self.runs.groupby(["number", "policy"], sort=False):
            number, policy = int(str(key[0])), str(key[1])
            if policy == BOUND or policy in left_out.get(number, {}) or (number, policy) in repeated:
                continue
            replications = group.sort_values("replication")[measure]
            if replications.notna().all():
                values.setdefault(number, {})[policy] = replications.tolist()
        return {number: rank(by_policy, measure, self.level) for number, by_policy in values.items()}

    @cached_property
    def left_out(self) -> dict[int, dict[str, NotRanked]]:
        """The policies that are not ranked, with the reason, by number of the point; the oracle is not listed."""
        reasons: dict[int, dict[str, NotRanked]] = {}
        done = dict(iter(self.runs.groupby(["number", "policy"], sort=False)))
        for row in self.table[self.table["policy"] != BOUND].to_dict("records"):
            why: NotRanked | None = NotRanked("could not run")
            if not row["failed"]:
                runs = _records(done[row["number"], row["policy"]])
                why = reason_not_to_rank(runs, self.plan.file.max_failed)
            if why is not None:
                reasons.setdefault(row["number"], {})[row["policy"]] = why
        return reasons

    @cached_property
    def _identical(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        """Groups of policies that are identical in every request of every run, by number of the point."""
        times: dict[int, dict[str, list[str]]] = {}
        for row in self.rows:
            if row.number is not None and row.policy not in self.left_out.get(row.number, {}):
                times.setdefault(row.number, {}).setdefault(row.policy, []).append(row.times)
        return {number: identical_groups(by_policy) for number, by_policy in times.items()}

    def best(self, measure: str | None = None) -> pd.DataFrame:
        """One row per point: the best policy by a measure (by default ``self.measure``), and its lead.

        The columns are number, the axes, the ``best`` policy, those ``identical`` to it in every request (with commas
        between them), its ``value``, the ``second``, how much worse that is
        (``behind``, a share, with ``_low`` and ``_high``), whether the best ``holds`` against all others at the level,
        the number of ``rivals``, and the policies ``left_out``, with reasons: those that failed more requests than
        ``max_failed`` allows, or are unstable. The oracle is not ranked. A policy without rivals has won nothing.
        Replications are compared in pairs, with Bonferroni's correction for all rivals. Raises ``UserError`` for an
        unknown measure.
        """
        import pandas as pd

        rows = []
        settings = {point.number: point.settings for point in self.plan.points}
        left_out = self.left_out
        measure = self.measure if measure is None else measure_called(measure)
        values = self.table.set_index(["number", "policy"])[measure].to_dict()
        for number, ranking in self.rankings(measure).items():
            groups = self._identical.get(number, ())
            alike = [p for group in groups if ranking.best in group for p in group if p != ranking.best]
            row = {"number": number, **settings[number], "best": ranking.best, "identical": ", ".join(alike)}
            row["value"] = values[number, ranking.best]
            if ranking.runner_up is not None:
                ratio = ranking.comparison.ratios[ranking.names.index(ranking.runner_up)]
                sign = -1.0 if ranking.measure in MORE_IS_BETTER else 1.0
                low, high = sorted((sign * (ratio.low - 1), sign * (ratio.high - 1)))
                row |= {"second": ranking.runner_up, "behind": sign * (ratio.value - 1)}
                row |= {"behind_low": low, "behind_high": high}
            rivals = {"holds": ranking.holds and len(ranking.names) > 1, "rivals": len(ranking.names) - 1}
            reasons = "; ".join(f"{policy} {reason.why}" for policy, reason in left_out.get(number, {}).items())
            rows.append({**row, **rivals, "left_out": reasons})
        behind = ("second", "behind", "behind_low", "behind_high")
        columns = ("best", "identical", "value", *behind, "holds", "rivals", "left_out")
        return pd.DataFrame(rows, columns=["number", *self.plan.axes, *columns])

    def conclusion(self, measure: str | None = None) -> str:
        """Say in one line which policy is best at how many points, and how often that is more than chance."""
        return conclude_sweep(self, self.measure if measure is None else measure_called(measure))

    def plot(self, *measures: str) -> Figure:
        """Draw measures (by default ``drawn``) over the axes, with a colour per policy and intervals.

        Raises ``UserError``.
        """
        from kvsim.reports.sweep_plots import sweep_figure

        return sweep_figure(self.table, self.plan.file, [measure_called(m) for m in measures or self.drawn])

    def save(self, folder: str | Path | None = None, *, plots: bool = True) -> list[Path]:
        """Write the tables and, with ``plots``, the figure, by default beside the store, and return the files.

        They are ``sweep.json`` (``to_dict``), ``sweep.csv``, ``runs.csv``, ``best.csv``, ``failures.csv`` if any run
        failed, and with ``plots`` ``sweep.png``; if the store is not called ``sweep.sqlite``, they contain its name
        instead (``store.written_names``). Raises ``UserError``.
        """
        names = written_names(self.store)
        with results_folder(self.store.parent if folder is None else folder) as out:
            out.json(names["json"], self.to_dict())
            out.table(names["csv"], self.table)
            out.table(names["runs"], self.runs)
            out.table(names["best"], self.best())
            if len(self.failures):
                out.table(names["failures"], self.failures)
            out.picture(names["png"], self.plot if plots else None)
        return out.written

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "name": self.name,
            "sweep": self.plan.to_dict(),
            "store": str(self.store),
            "runs": len(self.rows),
            "failed": sum(row.status == "failed" for row in self.rows),
            "measure": self.measure,
            "shown": list(self.shown),
            "level": self.level,
            "basis": basis_of(self.plan),
            "schedulers": self.schedulers,
            "servers": list(self.servers),
            "assumed": list(self.assumed),
            "conclusion": self.conclusion(),
            "warnings": list(self.warnings),
            "plugins": plugins_used(self.plan.policies),
            "forgetful": list(self.forgetful),
            "imprecise": self.imprecise,
            "points": _records(self.table),
            "best": _records(self.best()),
            "failures": _records(self.failures),
        }


def _table(rows: Iterable[tuple[Row, dict[str, Any]]], columns: Iterable[str]) -> pd.DataFrame:
    """Runs as a table: which each is, and of its axes and what is told of it these columns."""
    import pandas as pd

    told = [
        {"number": row.number, "policy": row.policy, "replication": row.replication, **json.loads(row.settings), **more}
        for row, more in rows
    ]
    return pd.DataFrame(told, columns=["number", "policy", "replication", *columns])


def _verdict(group: pd.DataFrame | None, failed: int) -> str:
    """Why a point's results should not be trusted; empty if nothing speaks against them."""
    remarks = [f"failed: {counted(failed, 'run')}"] if failed else []
    if group is not None:
        n = len(group)
        for measure, why in (
            ("unstable", "unstable: arrivals outpace service"),
            ("too_short", "too short: latencies do not settle in the first half"),
        ):
            times = int(group[measure].sum())
            if times:
                remarks.append(f"{why}, in {times} of {n} runs")
        if (share := group["failed_share"].mean()) > 0:
            remarks.insert(0, f"failed: {share:.1%} of the requests")
        if n > 1 and group["e2e_mean"].nunique() == 1 and group["throughput_tokens_per_s"].nunique() == 1:
            remarks.append("no spread: this workload does not depend on the seed")
    return "; ".join(remarks)


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON; unknown and infinite values are None."""
    return [{str(key): _plain(value) for key, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def basis_of(plan: SweepPlan) -> list[str]:
    """What the times of a sweep rest on (``Profile.basis``), a line for each machine profile that can be read."""
    lines = []
    for name, folder in dict.fromkeys(
        (p.scenario.machine.profile, p.scenario.folder) for p in plan.points if p.scenario
    ):
        try:
            lines.append(load_profile(name, folder).basis)
        except UserError:
            continue  # The runs with this profile have failed and tell why.
    return lines
