"""Why requests slow down: what makes late ones longer than early ones, and slow ones longer than fast ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from kvsim.advice.remedies import FAILURES, REMEDIES, Remedy, failure_kind
from kvsim.costs.tables import FloatArray
from kvsim.errors import UserError
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.recorder import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import run
from kvsim.simulation.time_breakdown import SECONDS
from policies import current_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvsim.engines.validation import Validation
    from kvsim.experiments.comparison import Comparison

LEAST = 8
"""Completed requests below which nothing is said: a quarter of them is two."""

NEGLIGIBLE = 0.05
"""A difference smaller than this share of the earlier (or faster) requests' mean is none."""

CAUSES: dict[str, str] = {
    "queueing": "waiting for a slot",
    "cells": "waiting for cells",
    "own": "their own tokens",
    "batch": "other requests' tokens in the same passes",
    "context": "attention over useful cells",
    "holes": "attention over cells that are not their own",
    "compaction": "compaction",
    "failures": "cut batches and preemptions",
    "prefix": "prompt tokens that an earlier request had computed",
    "transfers": "copies to and from the host",
    "machine": "the machine: measured less predicted",
}
"""What a request's seconds may be spent on; ``kvsim/accounts.py`` defines all but the last, which only measured runs
have."""

_COLUMNS = [*SECONDS, "machine_s"]
_DOING = {
    "fixed_s": "the fixed cost of passes",
    "matrix_s": "matrix work",
    "useful_s": "attention over useful cells",
    "holes_s": "attention over cells that are not the sequence's own",
    "moves_s": "compaction",
    "transfers_s": "copies to and from the host",
}
"""What a server may be doing while requests wait: the terms of ``time breakdown.TERMS``."""
_CURED = {"useful_s": "context", "holes_s": "holes", "moves_s": "compaction", "transfers_s": "transfers"}


@dataclass(frozen=True)
class Contrast:
    """Two groups of requests, a quarter each, and what makes up the difference between their mean latencies."""

    names: tuple[str, str]
    size: int
    """Requests in each."""
    table: pd.DataFrame
    """One row for each cause; the columns: each group's mean seconds under its name, difference (seconds), share
    (of the difference of the mean latencies; negative where a cause lessened it)."""
    interval_s: tuple[float, float] | None
    """Of the difference of the mean latencies, 95 %; None where the groups were chosen by latency itself."""
    doing: pd.Series[float]
    """What the server did while those of the second group waited for a slot or for cells: shares of ``time
    breakdown.TERMS``; empty where nobody waited, or that is not known."""

    @property
    def means_s(self) -> tuple[float, float]:
        """Mean latency of each group."""
        first, second = (float(self.table[name].sum()) for name in self.names)
        return first, second

    @property
    def difference_s(self) -> float:
        """Of the second group's mean latency over the first's."""
        return self.means_s[1] - self.means_s[0]

    @property
    def ratio(self) -> float:
        """Of the second group's mean latency to the first's; NaN where that is 0."""
        first, second = self.means_s
        return second / first if first > 0 else float("nan")

    @property
    def slower(self) -> bool:
        """Whether the second group is, by more than can be chance and more than is negligible."""
        sure = self.interval_s is None or self.interval_s[0] > 0
        return sure and self.difference_s > NEGLIGIBLE * self.means_s[0]

    @property
    def dominant(self) -> str | None:
        """The cause that most of the difference comes from; None where there is none."""
        return str(self.table["difference"].idxmax()) if self.slower else None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "groups": list(self.names),
            "requests_each": self.size,
            "means_s": list(self.means_s),
            "difference_s": self.difference_s,
            "interval_s": None if self.interval_s is None else list(self.interval_s),
            "slower": self.slower,
            "dominant": self.dominant,
            "causes": {str(cause): row for cause, row in self.table.astype(object).to_dict("index").items()},
            "server_meanwhile": {str(key): float(value) for key, value in self.doing.items()},
        }


@dataclass(frozen=True)
class Diagnosis:
    """On what the requests of one run spent their time, and why some of them took longer."""

    scenario: str
    """Its name."""
    source: str
    """What a command must be given to run it again."""
    policy: str
    measured: bool
    """Whether latencies were measured on the real engine, or predicted."""
    failed: int
    """Requests that were not completed, and are not in what follows."""
    requests: pd.DataFrame
    """One row for each completed request, in order of arrival: id, arrival_s, e2e_s, and for each of ``CAUSES`` its
    seconds (with ``_s`` behind its name), which make up e2e_s."""
    over_time: Contrast
    """The first quarter to arrive against the last."""
    across: Contrast
    """The fastest quarter against the slowest."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Of the failed: how many for each reason, the commonest first."""
    note: str = ""
    """Why this policy, where it is not the scenario's own and nobody asked for it."""

    @property
    def main(self) -> Contrast | None:
        """Where the slowdown is: over time, else between requests; None where there is none."""
        return next((contrast for contrast in (self.over_time, self.across) if contrast.slower), None)

    @property
    def sentence(self) -> str:
        """What there is to say, in plain words."""
        said = f"{_over_time(self.over_time)} {_across(self.across)}"
        if not self.failed:
            return said
        return f"{_failures(self.failed, len(self.requests), self.errors)}. Of the others: {said}"

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What to try, the likeliest first: against what made requests fail; then by the dominant cause; where that is
        waiting for a slot, before it by what most keeps the server from being faster, if that is a fifth of its time;
        last by prefixes, if computing them again takes a tenth of the difference or of all seconds."""
        kinds = dict.fromkeys(failure_kind(error) for error in self.errors)
        found = [remedy for kind in kinds for remedy in FAILURES[kind]]
        found += [remedy for cause in self._causes() for remedy in REMEDIES[cause]]
        return tuple(dict.fromkeys(r._replace(kvsim=r.kvsim.format(scenario=self.source)) for r in found))

    def _causes(self) -> list[str]:
        """Those to do something about."""
        causes, main = [], self.main
        if main is not None and main.dominant is not None:
            causes.append(main.dominant)
            busy_with = main.doing[list(_CURED)] if len(main.doing) else main.doing
            if causes == ["queueing"] and len(busy_with) and busy_with.max() >= 0.2:
                causes.insert(0, _CURED[str(busy_with.idxmax())])
        seconds_in_all = float(self.requests["e2e_s"].sum())
        again = float(self.requests["prefix_s"].sum()) >= 0.1 * seconds_in_all > 0
        if again or (main is not None and float(main.table["share"]["prefix"]) >= 0.1):
            causes.append("prefix")
        return list(dict.fromkeys(causes))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "measured": self.measured,
            "completed": len(self.requests),
            "failed": self.failed,
            "errors": dict(self.errors),
            "note": self.note or None,
            "diagnosis": self.sentence,
            "over_time": self.over_time.to_dict(),
            "across": self.across.to_dict(),
            "remedies": [remedy._asdict() for remedy in self.remedies],
        }

    def plot(self) -> Figure:
        """Causes over arrival time, and what they add to the late and the slow."""
        from kvsim.reports.why_plots import why_figure

        return why_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write why.png and why.csv; returns the files. Raises ``UserError``."""
        target = writable(folder)
        written = [target / "why.png", target / "why.csv"]
        try:
            self.plot().savefig(written[0], dpi=130)
            self.requests.to_csv(written[1], index=False)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def why(
    source: Scenario | str | Path | Result | Validation | Comparison,
    policy: str | None = None,
    *,
    progress: Progress | None = None,
) -> Diagnosis:
    """On what each completed request's time was spent, and why some took longer.

    ``source``: a scenario, its name or its file, or a folder that ``kvsim compare`` wrote: it is run (again), under its
    own policy or another. Or a result that kept tables, or a comparison, or a validation (or the file of what ``kvsim
    validate --json`` printed), whose latencies are measured. Of a comparison, the policy is the scenario's own, or if
    that was not compared, the one with the slowest mean end-to-end latency. Raises ``UserError`` where fewer than
    ``LEAST`` requests were completed.
    """
    from kvsim.experiments.comparison import Comparison

    note, policy = "", policy if policy is None else current_name(policy)
    if isinstance(source, (str, Path)) and str(source).endswith(".json"):
        return _of_file(Path(source), policy)
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        source = Path(source) / "scenario.toml"
        if not source.is_file():
            raise UserError(f"{source.parent}: no scenario.toml in it; a folder that kvsim compare wrote is expected")
        if policy is None:
            policy, note = _compared(source)
    if isinstance(source, (str, Path, Scenario)):
        name = source.name if isinstance(source, Scenario) else str(source)
        found = diagnose(run(load_scenario(source), policy, detail="tables", progress=progress), name)
        return replace(found, note=note)
    if isinstance(source, Comparison):
        return _of_comparison(source, policy, progress)
    if isinstance(source, Result):
        if policy not in (None, source.policy):
            raise UserError(f"the result is of policy {source.policy!r}, not {policy!r}")
        return diagnose(source, source.scenario.name)
    name = source.scenario.name
    causes = _slots_only(source.causes) if source.scenario.server.scheduler == "static" else source.causes
    return _measured(name, name, {str(p): rows for p, rows in causes.groupby("policy", sort=False)}, policy)


def diagnose(result: Result, source: str) -> Diagnosis:
    """The same of a finished run that kept tables. Raises ``UserError``."""
    rows, requests = result.causes.assign(machine_s=0.0), result.requests
    if result.scenario.server.scheduler == "static":
        rows = _slots_only(rows)
    errors = _grouped(requests.loc[requests["status"] == "failed", "error"].astype(str))
    return _diagnosis(result.scenario.name, source, result.policy, rows, result.passes, errors)


def _slots_only(causes: pd.DataFrame) -> pd.DataFrame:
    """The same where a batch is served before the next: its empty slots are not free, so nobody waits for cells."""
    return causes.assign(queueing_s=causes["queueing_s"] + causes["cells_s"], cells_s=0.0)


def _grouped(errors: pd.Series[str]) -> dict[str, int]:
    """How many there are of each, the commonest first; those that differ in figures alone are one, with N for them."""
    alike = errors.groupby(errors.map(lambda text: re.sub(r"\d+", "N", text)))
    groups = {rows.iloc[0] if rows.nunique() == 1 else str(text): len(rows) for text, rows in alike}
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def _failures(failed: int, completed: int, errors: Mapping[str, int]) -> str:
    """How many, and why."""
    texts = [text.strip().rstrip(".") or "no reason given" for text in errors]
    why_so = (
        texts[0]
        if len(texts) == 1
        else ", ".join(f"{n:,} {text!r}" for n, text in zip(errors.values(), texts, strict=True))
    )
    return f"{failed:,} of {failed + completed:,} requests failed: {why_so}"


def _compared(scenario_file: Path) -> tuple[str | None, str]:
    """Of a folder that ``kvsim compare`` wrote: the policy to look at, and why, where it is not the scenario's own."""
    path = scenario_file.parent / "comparison.json"
    if not path.is_file():
        return None, ""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["policies"]
        means = {current_name(str(row["policy"])): row["e2e_s"]["mean"] for row in told}
        means = {name: None if mean is None else float(mean) for name, mean in means.items()}
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not what kvsim compare writes") from None
    return _choose(load_scenario(scenario_file).cache.policy, means)


def _choose(own: str, means: Mapping[str, float | None]) -> tuple[str, str]:
    """The scenario's own policy if it was compared, else the slowest; and a line that says so."""
    if own in means or not means:
        return own, ""
    slowest = max(means, key=lambda name: -1.0 if (mean := means[name]) is None else mean)
    return slowest, f"{own}, the scenario's own policy, was not compared; {slowest} is the slowest of those that were"


def _of_comparison(comparison: Comparison, policy: str | None, progress: Progress | None) -> Diagnosis:
    """Of one of its results, or of a policy that it does not have, which is run."""
    results, note = {result.policy: result for result in comparison.results}, ""
    if policy is None:
        means = {name: result.summary["e2e_s"]["mean"] for name, result in results.items()}
        policy, note = _choose(comparison.scenario.cache.policy, means)
    result = results.get(policy)
    if result is None or result.tables is None:
        result = run(comparison.scenario, policy, detail="tables", progress=progress)
    return replace(diagnose(result, comparison.scenario.name), note=note)


def _of_file(path: Path, policy: str | None) -> Diagnosis:
    """Of what ``kvsim validate --json`` printed."""
    wanted = f"{path}: not what kvsim validate --json prints"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        name = str(told["scenario"])
        runs = {current_name(str(p["policy"])): pd.DataFrame(p["causes"]) for p in told["policies"]}
        for rows in runs.values():
            if "cells_s" not in rows and "queueing_s" in rows:  # what earlier versions printed knows of slots alone
                rows["cells_s"] = 0.0
            rows[["id", "repeat", "arrival_s", "e2e_s", *_COLUMNS]].astype(float)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(wanted) from None
    if not runs:
        raise UserError(wanted)
    return _measured(name, name, runs, policy)


def _measured(name: str, source: str, runs: Mapping[str, pd.DataFrame], policy: str | None) -> Diagnosis:
    """Of measured latencies, each request's the mean over the repeats."""
    chosen = next(iter(runs)) if policy is None else policy
    if chosen not in runs:
        raise UserError(f"{name}: policy {chosen!r} was not measured; there are {', '.join(runs)}")
    rows = runs[chosen].groupby("id", as_index=False)[["arrival_s", "e2e_s", *_COLUMNS]].mean()
    return _diagnosis(name, source, chosen, rows, None)


def _diagnosis(
    name: str,
    source: str,
    policy: str,
    causes: pd.DataFrame,
    passes: pd.DataFrame | None,
    errors: Mapping[str, int] | None = None,
) -> Diagnosis:
    """``passes``: of a simulated run; None: the latencies were measured. ``errors``: of those that failed."""
    errors = errors or {}
    failed = sum(errors.values())
    requests = causes.sort_values(["arrival_s", "id"], ignore_index=True)
    if len(requests) < LEAST:
        because = f"; {_failures(failed, len(requests), errors)}" if failed else ""
        few = f"{len(requests)} requests were completed under {policy}; at least {LEAST} are needed"
        raise UserError(f"{name}: {few}{because}")
    quarter = len(requests) // 4
    by_latency = requests.sort_values(["e2e_s", "arrival_s", "id"], ignore_index=True)
    early, late = requests.head(quarter), requests.tail(quarter)
    fast, slow = by_latency.head(quarter), by_latency.tail(quarter)
    interval = difference_interval(requests["e2e_s"].to_numpy(dtype=float), quarter)
    over_time = _contrast(("early", "late"), early, late, interval, passes)
    across = _contrast(("fast", "slow"), fast, slow, None, passes)
    return Diagnosis(name, source, policy, passes is None, failed, requests, over_time, across, errors)


def _contrast(
    names: tuple[str, str],
    first: pd.DataFrame,
    second: pd.DataFrame,
    interval: tuple[float, float] | None,
    passes: pd.DataFrame | None,
) -> Contrast:
    table = pd.DataFrame({name: rows[_COLUMNS].mean() for name, rows in zip(names, (first, second), strict=True)})
    table.index = pd.Index(list(CAUSES), name="cause")
    table["difference"] = table[names[1]] - table[names[0]]
    total = float(table["difference"].sum())
    table["share"] = table["difference"] / total if total else 0.0
    doing = pd.Series(dtype=float) if passes is None else _meanwhile(second, passes)
    return Contrast(names, len(first), table, interval, doing)


def _meanwhile(requests: pd.DataFrame, passes: pd.DataFrame) -> pd.Series[float]:
    """What passes spent their time on while these requests waited for a slot or for cells."""
    waited = (requests["queueing_s"] + requests["cells_s"]).to_numpy(dtype=float)
    if not waited.sum() > 0 or not len(passes):
        return pd.Series(dtype=float)
    starts = passes["start_s"].to_numpy(dtype=float)
    edges = np.stack([starts, starts + passes["seconds"].to_numpy(dtype=float)], axis=1).ravel()
    begun = requests["arrival_s"].to_numpy(dtype=float)
    ended = begun + waited
    spent = {}
    for term in _DOING:
        after = passes[term].to_numpy(dtype=float).cumsum()
        known = np.stack([np.concatenate([[0.0], after[:-1]]), after], axis=1).ravel()
        spent[term] = float((np.interp(ended, edges, known) - np.interp(begun, edges, known)).sum())
    total = sum(spent.values())
    return pd.Series({term: seconds / total for term, seconds in spent.items()} if total > 0 else {}, dtype=float)


def difference_interval(values: FloatArray, n: int) -> tuple[float, float]:
    """95 % interval for the mean of the last ``n`` values less that of the first ``n``; ``values`` in order, of shape
    (N,), N at least 2 n, n at least 2.

    Welch's, of what strays from the straight line through all values, so that a steady rise is no noise; where
    neighbours are alike, they count for fewer (``_effective``).
    """
    groups = values[:n], values[-n:]
    at = np.arange(len(values), dtype=float)
    slope = float(np.polyfit(at, values, 1)[0])
    strays = [group - slope * at[:n] for group in groups]
    counts = [_effective(stray) for stray in strays]
    parts = [float(stray.var(ddof=1)) / count for stray, count in zip(strays, counts, strict=True)]
    difference, variance = float(groups[1].mean() - groups[0].mean()), sum(parts)
    if variance <= (1e-9 * float(np.abs(values).max())) ** 2:
        return difference, difference
    freedom = variance**2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    reach = float(student.ppf(0.975, freedom)) * variance**0.5
    return difference - reach, difference + reach


def _effective(values: FloatArray) -> float:
    """How many independent values say as much about the mean, if each depends on the one before it alone: n (1 - r) /
    (1 + r), r the correlation between neighbours; at least 2."""
    away = values - values.mean()
    square = float(away @ away)
    r = float(away[1:] @ away[:-1]) / square if square > 0 else 0.0
    return max(len(values) * (1 - r) / (1 + r), 2.0) if r > 0 else float(len(values))


def _over_time(c: Contrast) -> str:
    low, high = c.interval_s or (c.difference_s, c.difference_s)
    sizes = (
        f"{seconds(c.means_s[0])} for the first {c.size} requests, {seconds(c.means_s[1])} for the last {c.size}; "
        f"difference {seconds(c.difference_s)}, 95 % interval {seconds(low)} to {seconds(high)}"
    )
    if not c.slower:
        faster = high < 0 and c.difference_s < -NEGLIGIBLE * c.means_s[0]
        if faster:
            return f"no slowdown: late requests are faster ({sizes})."
        chance = " beyond chance" if c.difference_s > NEGLIGIBLE * c.means_s[0] else ""
        return f"flat: no slowdown over time{chance} ({sizes})."
    return f"Late requests take {c.ratio:.2f} times as long as early ones ({sizes}). {_blame(c)}"


def _across(c: Contrast) -> str:
    sizes = f"{seconds(c.means_s[0])} and {seconds(c.means_s[1])}"
    if not c.slower:
        return f"Slow requests take about as long as fast ones ({sizes})."
    return f"The slowest quarter takes {c.ratio:.2f} times as long as the fastest ({sizes}). {_blame(c)}"


def _blame(c: Contrast) -> str:
    ranked = c.table["share"].sort_values(ascending=False)
    most = f"{ranked.iloc[0]:.0%} of that is {CAUSES[str(ranked.index[0])]}"
    if ranked.iloc[1] >= 0.1:
        most += f", {ranked.iloc[1]:.0%} {CAUSES[str(ranked.index[1])]}"
    if c.dominant in ("queueing", "cells") and len(c.doing):
        term = str(c.doing.idxmax())
        most += f"; while they waited, {c.doing.max():.0%} of the server's time went to {_DOING[term]}"
    return f"{most}."


def seconds(value: float) -> str:
    """With three digits and a unit."""
    if abs(value) < 1e-12:
        return "0 s"
    if abs(value) >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"
