"""Why requests slow down: the causes that make late requests slower than early ones, and slow ones than fast ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.advice.why.contrast import (
    CAUSE_OF_WORK,
    CAUSES,
    COLUMNS,
    Contrast,
    across_text,
    contrast_of,
    difference_interval,
    over_time_text,
)
from kvsim.advice.why.remedies import FAILURES, REMEDIES, Remedy
from kvsim.errors import UserError, counted
from kvsim.results import results_folder
from kvsim.scenario.scenario import Scenario, load_scenario, table_of
from kvsim.simulation.job import FailureKind
from kvsim.simulation.run_tables import Table
from kvsim.simulation.summary import failure_lines, link_waits, lost_to_checkpoints, router_waits
from policies import current_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvsim.engines.live.engine_validation import Validation
    from kvsim.experiments.comparison import Comparison
    from kvsim.simulation.request_log import Progress
    from kvsim.simulation.result import Result

FEWEST_REQUESTS = 8
"""Minimum number of completed requests for a diagnosis; a quarter of them is two."""


@dataclass(frozen=True)
class Diagnosis:
    """What the requests of one run spent their time on, and why some of them took longer."""

    scenario: str
    """Name of the scenario."""
    source: str
    """Argument with which a command can run the scenario again."""
    policy: str
    measured: bool
    """Whether latencies were measured on the real engine rather than predicted."""
    failed: int
    """Number of failed requests; they are not in the fields below."""
    completed: Table
    """One row per completed request by arrival: id, arrival_s, e2e_s, and the seconds of each of ``CAUSES`` (its name
    with ``_s``), whose sum is e2e_s."""
    over_time: Contrast
    """The first quarter of requests to arrive against the last."""
    across: Contrast
    """The fastest quarter of requests against the slowest."""
    failures: Sequence[Mapping[str, Any]] = ()
    """Why they failed, as in a run's summary: an entry for each kind, most frequent first."""
    basis: str | None = None
    """What predicted times rest on (``Profile.basis``)."""
    host_cache: bool | None = None
    """Whether the server used a host cache; None if that is not known."""
    states: bool = False
    """Whether a request mostly holds blocks of states, rather than of tokens."""
    scheduler: str | None = None
    """The scheduler that ran; None where that was not asked."""
    on_device: bool = False
    """Whether a device computed, rather than processors."""
    router: str = ""
    """How much of the waiting another router could have spared, and what was waited for on the way between servers that
    prefill and servers that decode; empty of one server."""
    checkpoints: str = ""
    """What was computed again for want of a checkpoint, and which flag spares it; empty if nothing was."""
    note: str = ""
    """Why this policy was chosen, if it is neither the scenario's own nor the one asked for."""

    @property
    def requests(self) -> pd.DataFrame:
        """The completed requests as a pandas table."""
        return self.completed.frame

    @property
    def main(self) -> Contrast | None:
        """The contrast that shows the slowdown: over time or else across requests; None if neither does."""
        return next((each for each in (self.over_time, self.across) if each.slower), None)

    @property
    def sentence(self) -> str:
        """The diagnosis in plain words."""
        diagnosis = f"{over_time_text(self.over_time)} {across_text(self.across)}"
        if not self.failed:
            return diagnosis
        return f"{_failed(self.failed, len(self.completed), self.failures)}. Of the others: {diagnosis}"

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What to try, most promising first.

        First come remedies for failed requests, then those for the dominant cause. If that is waiting for a slot, they
        are preceded by those for the kind of work that takes most of the server's time, if it takes at least a fifth.
        Last come remedies for prefixes, if computing them again takes a tenth of the difference or of all time.
        """
        remedies = [remedy for each in self.failures for remedy in FAILURES.get(FailureKind(each["kind"]), ())]
        remedies += [remedy for cause in self._causes_to_remedy() for remedy in REMEDIES[cause]]
        suitable = (remedy for remedy in remedies if remedy.suits(self.policy, self.host_cache, states=self.states))
        return tuple(dict.fromkeys(self._here(suitable)))

    def _here(self, remedies: Iterable[Remedy]) -> Iterator[Remedy]:
        """Remedies with the scenario's name, and without options that change nothing on this hardware."""
        for remedy in remedies:
            options = tuple(option for option in remedy.options if not (option.cpu_only and self.on_device))
            yield remedy._replace(kvsim=remedy.kvsim.format(scenario=self.source), options=options)

    def _causes_to_remedy(self) -> list[str]:
        causes, main = [], self.main
        if main is not None and main.dominant is not None:
            causes.append(main.dominant)
            work = {term: main.server_work[term] for term in CAUSE_OF_WORK} if main.server_work else {}
            if causes == ["queueing"] and work and max(work.values()) >= 0.2:
                causes.insert(0, CAUSE_OF_WORK[max(work, key=work.__getitem__)])
        total_s = float(self.completed.columns["e2e_s"].sum())
        recomputed = float(self.completed.columns["prefix_s"].sum()) >= 0.1 * total_s > 0
        if recomputed or (main is not None and main.shares[list(CAUSES).index("prefix")] >= 0.1):
            causes.append("prefix")
        return list(dict.fromkeys(causes))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "scheduler": self.scheduler,
            "measured": self.measured,
            "basis": self.basis,
            "completed": len(self.completed),
            "failed": self.failed,
            "failures": [dict(each) for each in self.failures],
            "note": self.note or None,
            "router": self.router or None,
            "checkpoints": self.checkpoints or None,
            "diagnosis": self.sentence,
            "over_time": self.over_time.to_dict(),
            "across": self.across.to_dict(),
            "remedies": [
                {"what": remedy.what, "kvsim": remedy.kvsim, "engine": remedy.engine(self.policy)}
                for remedy in self.remedies
            ],
        }

    def plot(self) -> Figure:
        """Draw the causes over arrival time, and what they add to late and to slow requests."""
        from kvsim.reports.why_plots import why_figure

        return why_figure(self)

    def save(self, folder: str | Path, *, plots: bool = True) -> list[Path]:
        """Write why.csv and, with ``plots``, why.png to a folder and return the files. Raises ``UserError``."""
        with results_folder(folder) as out:
            out.picture("why.png", self.plot if plots else None)
            out.text("why.csv", self.completed.to_csv())
        return out.written


def why(
    source: Scenario | str | Path | dict[str, Any] | Result | Validation | Comparison,
    policy: str | None = None,
    *,
    progress: Progress | None = None,
    **served: Any,
) -> Diagnosis:
    """Diagnose what each completed request's time was spent on, and why some requests took longer.

    ``source``: a scenario, its name, table or file, or a folder that ``kvsim compare`` wrote; it is run (again) under
    its own policy or the one given. Or a result with tables, a comparison, a validation, or a file with the output of
    ``kvsim validate --json``; the latencies of the last two are measured. For a comparison, the default policy is the
    scenario's own or, if that was not compared, the slowest by mean end-to-end latency. ``served``: of a scenario, what
    is replaced in it, such as ``model`` and ``device`` (``load_scenario``). Raises ``UserError``, among others if fewer
    than ``FEWEST_REQUESTS`` requests were completed.
    """
    from kvsim.experiments.comparison import Comparison
    from kvsim.simulation.result import Result
    from kvsim.simulation.run import run

    note, policy = "", policy if policy is None else current_name(policy)
    if served and str(source).endswith(".json"):
        raise UserError(f"{source}: --model, --device: a scenario is expected; a recorded result stays as it is")
    if isinstance(source, (str, Path)) and str(source).endswith(".json"):
        return _diagnose_file(Path(source), policy)
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        source = Path(source) / "scenario.toml"
        if not source.is_file():
            raise UserError(f"{source.parent}: no scenario.toml in it; a folder that kvsim compare wrote is expected")
        if policy is None:
            policy, note = _policy_of_folder(source)
    if isinstance(source, (str, Path, Scenario, dict)):
        name = str(source) if isinstance(source, (str, Path)) else table_of(source)[1]
        diagnosis = diagnose(run(load_scenario(source, **served), policy, detail="tables", progress=progress), name)
        return replace(diagnosis, note=note)
    if isinstance(source, Comparison):
        return _diagnose_comparison(source, policy, progress)
    if isinstance(source, Result):
        if policy not in (None, source.policy):
            raise UserError(f"the result is of policy {source.policy!r}, not {policy!r}")
        return diagnose(source, source.scenario.name)
    name = source.scenario.name
    causes = source.causes
    if source.scenario.server.scheduler == "static":
        causes = causes.assign(**_without_free_slots(causes))
    return _diagnose_measured(name, {str(p): rows for p, rows in causes.groupby("policy", sort=False)}, policy)


def diagnose(result: Result, source: str) -> Diagnosis:
    """Diagnose a finished run that kept tables; ``source`` is how to run it again. Raises ``UserError``."""
    rows = result.table_of_causes
    rows = rows.with_columns({"machine_s": np.zeros(len(rows))})
    if result.scenario.server.scheduler == "static":
        rows = rows.with_columns(_without_free_slots(rows.columns))
    failures = result.summary["failures"]
    diagnosis = _diagnosis(result.scenario.name, source, result.policy, rows, result.table_of_passes, failures)
    saves = result.summary["host"]["saves"]
    scheduler, on_device = result.scenario.server.scheduler, result.scenario.machine.device is not None
    cluster = result.summary["cluster"]
    router = "" if cluster is None else "; ".join(filter(None, [router_waits(cluster), link_waits(cluster)]))
    lost = lost_to_checkpoints(result.summary, result.scenario.server.ctx_checkpoints)
    known = replace(diagnosis, router=router, checkpoints=lost, basis=result.summary["basis"], host_cache=saves > 0)
    return replace(known, scheduler=scheduler, on_device=on_device, states=_mostly_states(result))


def _mostly_states(result: Result) -> bool:
    """Whether the mean request has more blocks of states than of tokens."""
    groups, summary = result.scenario.cache.groups, result.summary
    tokens = (summary["prompt_tokens"] + summary["output_tokens"]) / summary["requests"]
    of_tokens: float = sum(tokens / group.block_size for group in groups if group.kind != "state")
    return sum(group.kind == "state" for group in groups) > of_tokens


def _without_free_slots(columns: Mapping[str, Any] | pd.DataFrame) -> dict[str, Any]:
    """Waiting as it is under static batching, where empty slots of a batch are not free."""
    waited = columns["queueing_s"] + columns["cells_s"] + columns["steps_s"]
    return {"queueing_s": waited, "cells_s": 0.0 * waited, "steps_s": 0.0 * waited}


def _failed(failed: int, completed: int, failures: Sequence[Mapping[str, Any]]) -> str:
    """How many requests failed, and why, in words."""
    reasons = failures[0]["reason"] if len(failures) == 1 else "; ".join(failure_lines(failures))
    return f"{failed:,} of {failed + completed:,} requests failed: {reasons}"


def _policy_of_folder(scenario_file: Path) -> tuple[str | None, str]:
    """The policy to diagnose in a folder that ``kvsim compare`` wrote, and a note if it is not the scenario's own."""
    path = scenario_file.parent / "comparison.json"
    if not path.is_file():
        return None, ""
    try:
        policies = json.loads(path.read_text(encoding="utf-8"))["policies"]
        means = {current_name(str(row["policy"])): row["e2e_s"]["mean"] for row in policies}
        means = {name: None if mean is None else float(mean) for name, mean in means.items()}
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not what kvsim compare writes") from None
    return _choose_policy(load_scenario(scenario_file).cache.policy, means)


def _choose_policy(own: str, means: Mapping[str, float | None]) -> tuple[str, str]:
    """The scenario's own policy if it was compared, otherwise the slowest, with a note."""
    if own in means or not means:
        return own, ""
    slowest = max(means, key=lambda name: -1.0 if (mean := means[name]) is None else mean)
    return slowest, f"{own}, the scenario's own policy, was not compared; {slowest} is the slowest of those that were"


def _diagnose_comparison(comparison: Comparison, policy: str | None, progress: Progress | None) -> Diagnosis:
    """Diagnose one of its results; a policy that was not compared is run."""
    from kvsim.simulation.run import run

    results, note = {result.policy: result for result in comparison.results}, ""
    if policy is None:
        means = {name: result.summary["e2e_s"]["mean"] for name, result in results.items()}
        policy, note = _choose_policy(comparison.scenario.cache.policy, means)
    result = results.get(policy)
    if result is None or result.tables is None or result.tables.causes is None:
        result = run(comparison.scenario, policy, detail="tables", progress=progress)
    return replace(diagnose(result, comparison.scenario.name), note=note)


def _diagnose_file(path: Path, policy: str | None) -> Diagnosis:
    """Diagnose the output of ``kvsim validate --json``."""
    import pandas as pd

    wrong = f"{path}: not what kvsim validate --json prints"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        name = str(saved["scenario"])
        runs = {current_name(str(p["policy"])): pd.DataFrame(p["causes"]) for p in saved["policies"]}
        for rows in runs.values():
            if "queueing_s" in rows:  # Earlier versions did not separate these.
                for column in {"cells_s", "steps_s"} - set(rows):
                    rows[column] = 0.0
            rows[["id", "repeat", "arrival_s", "e2e_s", *COLUMNS]].astype(float)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(wrong) from None
    if not runs:
        raise UserError(wrong)
    return _diagnose_measured(name, runs, policy)


def _diagnose_measured(name: str, runs: Mapping[str, pd.DataFrame], policy: str | None) -> Diagnosis:
    """Diagnose measured latencies, averaged over the repeats of each request."""
    chosen = next(iter(runs)) if policy is None else policy
    if chosen not in runs:
        raise UserError(f"{name}: policy {chosen!r} was not measured; accepted: {', '.join(runs)}")
    means = runs[chosen].groupby("id", as_index=False)[["arrival_s", "e2e_s", *COLUMNS]].mean()
    return _diagnosis(name, name, chosen, Table({str(column): means[column].to_numpy() for column in means}), None)


def _diagnosis(
    name: str,
    source: str,
    policy: str,
    causes: Table,
    passes: Table | None,
    failures: Sequence[Mapping[str, Any]] = (),
) -> Diagnosis:
    """Contrast the groups of requests; ``passes`` are those of a simulated run, None if latencies were measured."""
    failed = sum(each["count"] for each in failures)
    requests = causes.sorted_by("arrival_s", "id")
    if len(requests) < FEWEST_REQUESTS:
        because = f"; {_failed(failed, len(requests), failures)}" if failed else ""
        few = f"{counted(len(requests), 'completed request')} under {policy}; at least {FEWEST_REQUESTS} are needed"
        raise UserError(f"{name}: {few}{because}")
    quarter = len(requests) // 4
    by_latency = requests.sorted_by("e2e_s", "arrival_s", "id")
    early, late = requests[:quarter], requests[-quarter:]
    fast, slow = by_latency[:quarter], by_latency[-quarter:]
    interval = difference_interval(requests.columns["e2e_s"], quarter)
    over_time = contrast_of(("early", "late"), early, late, interval, passes)
    across = contrast_of(("fast", "slow"), fast, slow, None, passes)
    return Diagnosis(name, source, policy, passes is None, failed, requests, over_time, across, failures)
