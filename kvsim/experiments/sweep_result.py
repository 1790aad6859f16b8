"""What a sweep found: tables with intervals, the best policy of each point, pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvsim.errors import UserError
from kvsim.experiments.estimates import LEVEL, over_replications, stop
from kvsim.experiments.measures import MEASURES, MORE_IS_BETTER, WITHOUT_INTERVAL, over_runs
from kvsim.experiments.store import Row, written_names
from kvsim.experiments.sweep_file import SweepPlan
from kvsim.experiments.verdict import BOUND, Ranking, rank
from kvsim.results import writable
from kvsim.simulation.run import build_policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SweepResult:
    """All runs of a sweep."""

    plan: SweepPlan
    rows: tuple[Row, ...]
    """By number, policy and replication."""
    store: Path
    """The file that they are kept in."""

    @property
    def name(self) -> str:
        """What the sweep is called."""
        return self.plan.name

    @property
    def level(self) -> float:
        """Confidence of the intervals."""
        return self.plan.file.stop.level if self.plan.file.stop else LEVEL

    @property
    def measure(self) -> str:
        """The measure that is looked at first: the stopping rule's, or mean end-to-end latency."""
        return self.plan.file.stop.measure if self.plan.file.stop else "e2e_mean"

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each run that was made: number, policy, replication, the axes, all measures."""
        done = [row for row in self.rows if row.status == "done"]
        rows = [
            {
                "number": row.number,
                "policy": row.policy,
                "replication": row.replication,
                **json.loads(row.settings),
                **json.loads(row.measures),
            }
            for row in done
        ]
        columns = ["number", "policy", "replication", *self.plan.axes, *MEASURES]
        table = pd.DataFrame(rows, columns=columns)
        return table.astype(dict.fromkeys(MEASURES, float))

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each point: number, policy, the axes, ``replications`` and ``failed`` runs, each measure's mean
        over replications with ``_low`` and ``_high`` (see ``measures.over_runs``; infinite of one replication), and a
        ``verdict`` where the figures should not be trusted, or the stopping rule was not met. Flags and settings
        (``measures.WITHOUT_INTERVAL``) have no interval. Times in seconds; NaN where nothing can be said."""
        done = dict(iter(self.runs.groupby(["number", "policy"], sort=False)))
        failed: dict[tuple[int, str], int] = {}
        for row in self.rows:
            if row.status == "failed":
                failed[row.number or 0, row.policy] = failed.get((row.number or 0, row.policy), 0) + 1
        rows = []
        for point in self.plan.points:
            key = (point.number, point.policy)
            group, fell = done.get(key), failed.get(key, 0)
            if group is None and not fell:
                continue  # The same as another point.
            counts = {"replications": 0 if group is None else len(group), "failed": fell}
            row_: dict[str, Any] = {"number": point.number, "policy": point.policy, **point.settings, **counts}
            if group is not None:
                for measure in MEASURES:
                    row_ |= self._interval(measure, group[measure].to_numpy())
            said = filter(None, (self._unmet(group), _verdict(group, fell)))
            rows.append({**row_, "verdict": "; ".join(said)})
        ends = [
            f"{measure}{end}"
            for measure in MEASURES
            for end in (("",) if measure in WITHOUT_INTERVAL else ("", "_low", "_high"))
        ]
        return pd.DataFrame(
            rows, columns=["number", "policy", *self.plan.axes, "replications", "failed", *ends, "verdict"]
        )

    def _interval(self, measure: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
        known = values[~np.isnan(values)]
        if not len(known):
            return {}
        if measure in WITHOUT_INTERVAL:
            return {measure: float(known.mean())}
        found = over_runs(measure, known, self.level)
        return {measure: found.value, f"{measure}_low": found.low, f"{measure}_high": found.high}

    def _unmet(self, group: pd.DataFrame | None) -> str:
        """By how much a point's runs missed the stopping rule; empty where they met it, or there is none."""
        rule = self.plan.file.stop
        if rule is None or group is None:
            return ""
        values = group[rule.measure].to_numpy(dtype=float)
        if np.isnan(values).any():
            return f"{len(values)} runs, {rule.measure} unknown in {int(np.isnan(values).sum())}"
        if stop(values, rule.within, rule.level, max(self.plan.file.replications, 2), rule.most).precise:
            return ""
        return f"{len(values)} runs, still ±{100 * over_replications(values, rule.level).relative:.1f} %"

    @property
    def imprecise(self) -> int:
        """Points, each under each policy, whose runs did not meet the stopping rule."""
        groups = self.runs.groupby(["number", "policy"], sort=False)
        return sum(bool(self._unmet(group)) for _, group in groups)

    @cached_property
    def forgetful(self) -> tuple[str, ...]:
        """Policies that drop tokens."""
        found = {}
        for point in self.plan.points:
            if point.scenario is not None and point.policy not in found:
                try:
                    found[point.policy] = build_policy(point.scenario, point.policy).unbounded
                except UserError:
                    continue  # Here it cannot be built; elsewhere it may.
        return tuple(policy for policy, unbounded in found.items() if unbounded)

    @property
    def failures(self) -> pd.DataFrame:
        """A row for each run that failed: number, policy, replication, the axes, ``error``."""
        rows = [
            {
                "number": row.number,
                "policy": row.policy,
                "replication": row.replication,
                **json.loads(row.settings),
                "error": row.error,
            }
            for row in self.rows
            if row.status == "failed"
        ]
        return pd.DataFrame(rows, columns=["number", "policy", "replication", *self.plan.axes, "error"])

    def rankings(self, measure: str | None = None) -> dict[int, Ranking]:
        """Of each point, by number, the policies ranked by a measure, as far as they failed nothing and are stable;
        the oracle, which bounds them, is not among them. Raises ``UserError`` for an unknown measure."""
        measure = self._known(measure)
        aside = self._aside()
        fair = self.table[
            [
                policy != BOUND and policy not in aside.get(number, {})
                for number, policy in zip(self.table["number"], self.table["policy"], strict=True)
            ]
        ]
        ours = set(zip(fair["number"], fair["policy"], strict=True))
        values: dict[int, dict[str, list[float]]] = {}
        for key, group in self.runs.groupby(["number", "policy"], sort=False):
            each = group.sort_values("replication")[measure]
            if key in ours and each.notna().all():
                number, policy = int(str(key[0])), str(key[1])
                values.setdefault(number, {})[policy] = each.tolist()
        return {number: rank(found, measure, self.level) for number, found in values.items()}

    def _aside(self) -> dict[int, dict[str, str]]:
        """Of each point the policies that take no part in its ranking, and why; the oracle is not told of."""
        found: dict[int, dict[str, str]] = {}
        for row in self.table[self.table["policy"] != BOUND].to_dict("records"):
            if row["failed"]:
                why = "could not run"
            elif row["failed_share"] != 0:
                why = "failed requests"
            elif row["unstable"] != 0:
                why = "unstable"
            else:
                continue
            found.setdefault(row["number"], {})[row["policy"]] = why
        return found

    def best(self, measure: str | None = None) -> pd.DataFrame:
        """A row for each point: number, the axes, the ``best`` policy by a measure (by default ``self.measure``), its
        ``value``, the ``second``, by how much that is worse (``behind``, a share, with ``_low`` and ``_high``), whether
        the best ``holds`` against all others with the level, the ``rivals`` it had, and who was ``left_out`` and why.

        Policies that failed a request or are unstable take no part, nor does the oracle; with no rivals left nobody has
        won. Replications are compared in
        pairs, and Bonferroni's correction is for all rivals. Raises ``UserError`` for an unknown measure.
        """
        rows = []
        settings = {point.number: point.settings for point in self.plan.points}
        aside = self._aside()
        for number, found in self.rankings(measure).items():
            at = found.names.index(found.best)
            row = {"number": number, **settings[number], "best": found.best, "value": found.values[at]}
            if found.runner_up is not None:
                lead = found.found.ratios[found.names.index(found.runner_up)]
                sign = -1.0 if found.measure in MORE_IS_BETTER else 1.0
                low, high = sorted((sign * (lead.low - 1), sign * (lead.high - 1)))
                away = {"behind": sign * (lead.value - 1), "behind_low": low, "behind_high": high}
                row |= {"second": found.runner_up, **away}
            rivals = {"holds": found.holds and len(found.names) > 1, "rivals": len(found.names) - 1}
            left_out = "; ".join(f"{policy}: {why}" for policy, why in aside.get(number, {}).items())
            rows.append({**row, **rivals, "left_out": left_out})
        columns = ["best", "value", "second", "behind", "behind_low", "behind_high", "holds", "rivals", "left_out"]
        return pd.DataFrame(rows, columns=["number", *self.plan.axes, *columns])

    def conclusion(self, measure: str | None = None) -> str:
        """One line: who is best where, and at how many points that is more than chance."""
        measure = self._known(measure)
        best = self.best(measure)
        points = len({point.number for point in self.plan.points})
        if not len(best):
            return f"no conclusion: at none of {points} points did a policy fail nothing and keep up with its arrivals"
        if len({policy for policy in self.plan.policies if policy != BOUND}) == 1:
            alone = f"{self._called(best['best'].iloc[0])} has no rivals; name several policies to compare them"
            return "; ".join([alone, *self._not_precise()])
        side = "highest" if measure in MORE_IS_BETTER else "lowest"
        won = best[best["rivals"] > 0]
        parts = []
        if len(won):
            wins = won["best"].value_counts()
            parts.append(", ".join(f"{self._called(str(policy))} at {n}" for policy, n in wins.items()))
        else:
            parts.append("no conclusion, nobody had a rival")
        parts += self._alone(best, measure)
        if len(won) and self.runs["replication"].max() == 0:
            parts.append("of one run each: ask for replications to know whether they hold")
        elif len(won):
            holds = int(won["holds"].sum())
            parts.append(f"more than chance at {holds} of them, {self.level:.0%} each, by paired differences")
        return "; ".join([f"{side} {measure} of {points} points: {parts[0]}", *parts[1:], *self._not_precise()])

    def _alone(self, best: pd.DataFrame, measure: str) -> list[str]:
        """Where somebody had no rivals, where nobody was left, and where some were not, and why."""
        aside, lone = self._aside(), best[best["rivals"] == 0]
        parts = []
        for policy, at in lone.groupby("best", sort=False):
            why = _reasons([aside.get(number, {}) for number in at["number"]])
            name = str(policy) if (best[best["rivals"] > 0]["best"] == policy).any() else self._called(str(policy))
            parts.append(f"at {len(at)} {name} is alone{f' ({why})' if why else ''}")
        ranked, alone = set(best["number"]), set(lone["number"])
        nobody = [found for number, found in aside.items() if number not in ranked]
        if nobody:
            parts.append(f"at {len(nobody)} nobody is left ({_reasons(nobody)})")
        some = [found for number, found in aside.items() if number in ranked - alone]
        if some:
            parts.append(f"at {len(some)} some are left out ({_reasons(some)})")
        return parts

    def _called(self, policy: str) -> str:
        return f"{policy} (which forgets tokens)" if policy in self.forgetful else policy

    def _not_precise(self) -> list[str]:
        """The part of the conclusion that says where the stopping rule was not met, if it was not."""
        rule, missed = self.plan.file.stop, self.imprecise
        if rule is None or not missed:
            return []
        groups = self.runs.groupby(["number", "policy"]).ngroups
        return [f"not within {100 * rule.within:g} % after {rule.most} runs: {missed} of {groups} points and policies"]

    def plot(self, measure: str | None = None) -> Figure:
        """A measure over the axes, a colour for each policy, with intervals. Raises ``UserError``."""
        from kvsim.reports.sweep_plots import sweep_figure

        return sweep_figure(self.table, self.plan, self._known(measure))

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Write ``sweep.json`` (``to_dict``), ``sweep.csv``, ``runs.csv``, ``best.csv``, ``failures.csv`` where there
        are any, and ``sweep.png``, by default beside the store; returns the files. Of a store that is not called
        ``sweep.sqlite`` they carry its name (``store.written_names``). Raises ``UserError``."""
        target = writable(self.store.parent if folder is None else folder)
        names = written_names(self.store)
        tables = {names["csv"]: self.table, names["runs"]: self.runs, names["best"]: self.best()}
        if len(self.failures):
            tables[names["failures"]] = self.failures
        written = [target / name for name in (names["json"], *tables, names["png"])]
        try:
            text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
            written[0].write_text(text + "\n", encoding="utf-8")
            for name, table in tables.items():
                table.to_csv(target / name, index=False)
            self.plot().savefig(written[-1], dpi=130)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "name": self.name,
            "sweep": self.plan.to_dict(),
            "store": str(self.store),
            "runs": len(self.rows),
            "failed": sum(row.status == "failed" for row in self.rows),
            "measure": self.measure,
            "level": self.level,
            "conclusion": self.conclusion(),
            "forgetful": list(self.forgetful),
            "imprecise": self.imprecise,
            "points": _records(self.table),
            "best": _records(self.best()),
            "failures": _records(self.failures),
        }

    def _known(self, measure: str | None) -> str:
        measure = self.measure if measure is None else measure
        if measure not in MEASURES:
            raise UserError(f"there is no measure {measure!r}; there are {', '.join(MEASURES)}")
        return measure


def _reasons(aside: Iterable[Mapping[str, str]]) -> str:
    """Who takes no part, by reason: ``paged, contiguous failed requests; ring unstable``."""
    found: dict[str, list[str]] = {}
    for point in aside:
        for policy, why in point.items():
            if policy not in found.setdefault(why, []):
                found[why].append(policy)
    return "; ".join(f"{', '.join(policies)} {why}" for why, policies in found.items())


def _verdict(group: pd.DataFrame | None, failed: int) -> str:
    """Why a point's figures should not be trusted; empty where nothing speaks against them."""
    said = [f"failed: {failed} runs"] if failed else []
    if group is not None:
        n = len(group)
        for measure, why in (
            ("unstable", "unstable: arrivals outpace service"),
            ("too_short", "too short: latencies do not settle in the first half"),
        ):
            times = int(group[measure].sum())
            if times:
                said.append(f"{why}, in {times} of {n} runs")
        if (share := group["failed_share"].mean()) > 0:
            said.insert(0, f"failed: {share:.1%} of the requests")
        if n > 1 and group["e2e_mean"].nunique() == 1 and group["throughput_tokens_per_s"].nunique() == 1:
            said.append("no spread: seeds make no difference to this workload")
    return "; ".join(said)


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON can have them: what cannot be said, and what has no end, is None."""
    return [{str(key): _plain(value) for key, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
