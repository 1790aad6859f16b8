"""What a sweep found: tables with intervals, the best policy of each point, pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvsim.errors import UserError
from kvsim.estimates import LEVEL, over_replications
from kvsim.measures import MEASURES, MORE_IS_BETTER
from kvsim.results import writable
from kvsim.store import Row
from kvsim.sweep_file import SweepPlan
from kvsim.verdict import BOUND, Ranking, rank

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
        over replications with ``_low`` and ``_high`` (a t interval; infinite of one replication), and a ``verdict``
        where the figures should not be trusted. Times in seconds; NaN where nothing can be said."""
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
            rows.append({**row_, "verdict": _verdict(group, fell)})
        ends = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low", "_high")]
        return pd.DataFrame(
            rows, columns=["number", "policy", *self.plan.axes, "replications", "failed", *ends, "verdict"]
        )

    def _interval(self, measure: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
        known = values[~np.isnan(values)]
        if not len(known):
            return {}
        found = over_replications(known, self.level)
        return {measure: found.value, f"{measure}_low": found.low, f"{measure}_high": found.high}

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
        fair = self.table[(self.table["failed"] == 0) & (self.table["policy"] != BOUND)]
        fair = fair[(fair["failed_share"] == 0) & (fair["unstable"] == 0)]
        ours = set(zip(fair["number"], fair["policy"], strict=True))
        values: dict[int, dict[str, list[float]]] = {}
        for key, group in self.runs.groupby(["number", "policy"], sort=False):
            each = group.sort_values("replication")[measure]
            if key in ours and each.notna().all():
                number, policy = int(str(key[0])), str(key[1])
                values.setdefault(number, {})[policy] = each.tolist()
        return {number: rank(found, measure, self.level) for number, found in values.items()}

    def best(self, measure: str | None = None) -> pd.DataFrame:
        """A row for each point: number, the axes, the ``best`` policy by a measure (by default ``self.measure``), its
        ``value``, the ``second``, by how much that is worse (``behind``, a share, with ``_low`` and ``_high``), whether
        the best ``holds`` against all others with the level, and the ``rivals`` it had.

        Policies that failed a request or are unstable take no part, nor does the oracle. Replications are compared in
        pairs, and Bonferroni's correction is for all rivals. Raises ``UserError`` for an unknown measure.
        """
        rows = []
        settings = {point.number: point.settings for point in self.plan.points}
        for number, found in self.rankings(measure).items():
            at = found.names.index(found.best)
            row = {"number": number, **settings[number], "best": found.best, "value": found.values[at]}
            if found.runner_up is not None:
                lead = found.found.ratios[found.names.index(found.runner_up)]
                sign = -1.0 if found.measure in MORE_IS_BETTER else 1.0
                low, high = sorted((sign * (lead.low - 1), sign * (lead.high - 1)))
                away = {"behind": sign * (lead.value - 1), "behind_low": low, "behind_high": high}
                row |= {"second": found.runner_up, **away}
            rows.append({**row, "holds": found.holds and len(found.names) > 1, "rivals": len(found.names) - 1})
        columns = ["best", "value", "second", "behind", "behind_low", "behind_high", "holds", "rivals"]
        return pd.DataFrame(rows, columns=["number", *self.plan.axes, *columns])

    def conclusion(self, measure: str | None = None) -> str:
        """One line: who is best where, and at how many points that is more than chance."""
        measure = self._known(measure)
        best = self.best(measure)
        points = len({point.number for point in self.plan.points})
        if not len(best):
            return f"no conclusion: at none of {points} points did a policy fail nothing and keep up with its arrivals"
        if best["rivals"].max() == 0:
            return f"{best['best'].iloc[0]} has no rivals; name several policies to compare them"
        side = "highest" if measure in MORE_IS_BETTER else "lowest"
        wins = best["best"].value_counts()
        said = ", ".join(f"{policy} at {n}" for policy, n in wins.items())
        if self.runs["replication"].max() == 0:
            sure = "of one run each: ask for replications to know whether they hold"
        else:
            sure = (
                f"more than chance at {int(best['holds'].sum())} of them, {self.level:.0%} each, by paired differences"
            )
        return f"{side} {measure} of {points} points: {said}; {sure}"

    def plot(self, measure: str | None = None) -> Figure:
        """A measure over the axes, a colour for each policy, with intervals. Raises ``UserError``."""
        from kvsim.sweep_plots import sweep_figure

        return sweep_figure(self.table, self.plan, self._known(measure))

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Write ``sweep.json`` (``to_dict``), ``sweep.csv``, ``runs.csv``, ``best.csv``, ``failures.csv`` where there
        are any, and ``sweep.png``, by default beside the store; returns the files. Raises ``UserError``."""
        target = writable(self.store.parent if folder is None else folder)
        tables = {"sweep.csv": self.table, "runs.csv": self.runs, "best.csv": self.best()}
        if len(self.failures):
            tables["failures.csv"] = self.failures
        written = [target / name for name in ("sweep.json", *tables, "sweep.png")]
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
            "points": _records(self.table),
            "best": _records(self.best()),
            "failures": _records(self.failures),
        }

    def _known(self, measure: str | None) -> str:
        measure = self.measure if measure is None else measure
        if measure not in MEASURES:
            raise UserError(f"there is no measure {measure!r}; there are {', '.join(MEASURES)}")
        return measure


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
