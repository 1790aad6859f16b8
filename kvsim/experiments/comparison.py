"""Compare several policies on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import Livelock, UserError
from kvsim.experiments.measures import (
    Measures,
    latency_sketches,
    share_of_requests,
    times_digest,
    whole_run_measures,
)
from kvsim.experiments.policy_code import plugins_used
from kvsim.experiments.pooled_percentiles import LatencySketches
from kvsim.experiments.shared_warnings import share_warnings
from kvsim.experiments.verdict import Verdict, judge
from kvsim.experiments.workers import Done, map_ordered
from kvsim.results import ResultsFolder, results_folder
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.summary import inferred_lines, sum_failures
from policies import PolicyFactory, PresetGroup, current_name, in_group

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvsim.simulation.recorder import Detail
    from kvsim.simulation.request_log import Progress
    from kvsim.simulation.result import Result

_WORTH_PROCESSES = 1000
"""Total number of simulated requests above which starting worker processes pays off."""
_MOST_REPLICATIONS = 1000
_OF_AN_EARLIER_ONE = (
    *("why.png", "why.csv", "replications.csv", "snapshots.npz", "films.npz"),
    *("comparison.png", "pareto.png", "cells.png", "cells-*.png", "requests-*.csv"),
)
"""What an earlier comparison, and ``why`` about it, may have left in the folder: it would pass for this one's."""


class RunOutcome(NamedTuple):
    """What is kept of each run of a comparison."""

    measures: Measures
    times: str
    """Digest of the times of all requests."""
    failures: list[dict[str, Any]]
    """Why requests failed, as in the run's summary."""
    warnings: tuple[str, ...]
    """The run's warnings, except those about its workload."""
    sketches: LatencySketches


@dataclass(frozen=True)
class Comparison:
    """The results of several policies on one scenario."""

    scenario: Scenario
    results: tuple[Result, ...]
    """One per policy, of its first replication."""
    profile: str
    """The machine profiles that the times come from and where they were measured, in one line."""
    left_out: tuple[str, ...] = ()
    """Policies that cannot serve the scenario, each with the reason, in one line."""
    outcomes: Mapping[str, Sequence[RunOutcome]] = field(default_factory=dict, repr=False)
    """Each policy's replications; the first is the one in ``results``."""
    forgetful: tuple[str, ...] = ()
    """Policies that drop tokens."""
    max_failed: float = 0.0
    """Share of its requests that a policy may have failed and still be ranked."""
    clairvoyant: tuple[str, ...] = ()
    """Policies that know what no server knows, the oracle included."""

    @property
    def runs(self) -> dict[str, list[Measures]]:
        """Measures of each policy's replications."""
        return {policy: [outcome.measures for outcome in each] for policy, each in self.outcomes.items()}

    @property
    def failures(self) -> dict[str, list[dict[str, Any]]]:
        """Why requests of each policy failed, in all of its replications together; keys as in a run's summary."""
        return {p: sum_failures([outcome.failures for outcome in each]) for p, each in self.outcomes.items()}

    @property
    def replications(self) -> int:
        """Number of runs of each policy, each with its own seed."""
        return max((len(each) for each in self.outcomes.values()), default=1)

    @cached_property
    def verdict(self) -> Verdict:
        """What the results support: a one-line conclusion, intervals, and paired differences."""
        times = {policy: [outcome.times for outcome in each] for policy, each in self.outcomes.items()}
        sketches = {policy: [outcome.sketches for outcome in each] for policy, each in self.outcomes.items()}
        return judge(
            self.runs,
            self.forgetful,
            clairvoyant=self.clairvoyant,
            max_failed=self.max_failed,
            times=times,
            sketches=sketches,
        )

    @property
    def inferred(self) -> tuple[str, ...]:
        """What was priced without a measurement, a line for each kind with the policies that it concerns."""
        return inferred_lines([result.summary for result in self.results])

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the runs assumed of engines because the scenario does not say, a line for each engine."""
        return tuple(dict.fromkeys(line for result in self.results for line in result.summary["assumed"]))

    @property
    def table(self) -> pd.DataFrame:
        """One row per policy; times in seconds, shares between 0 and 1."""
        import pandas as pd

        table = pd.DataFrame([_flat_summary(result.summary) for result in self.results]).set_index("policy")
        table["e2e_mean_over_oracle"] = pd.Series(against_oracle(self.results), dtype=float)
        return table

    @property
    def warnings(self) -> tuple[str, ...]:
        """Rows left out of a trace, policies left out, and what runs warned of, once for all policies that did."""
        runs = [(policy, outcome.warnings) for policy, each in self.outcomes.items() for outcome in each]
        return (*self.results[0].notes, *self.left_out, *(shared.line() for shared in share_warnings(runs)))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "profile": self._of_all("profile", "; "),
            "basis": self._of_all("basis", " "),
            "inferred": list(self.inferred),
            "wall_s": sum(result.summary["wall_s"] for result in self.results),
            "e2e_mean_over_oracle": against_oracle(self.results) or None,
            "policies": [result.summary for result in self.results],
            "plugins": plugins_used(result.policy for result in self.results),
            **self.verdict.to_dict(),
        }

    def _of_all(self, key: str, between: str) -> str | None:
        """What the runs' summaries say under a key, each once; None if none says anything."""
        return between.join(dict.fromkeys(filter(None, (result.summary[key] for result in self.results)))) or None

    @property
    def replications_table(self) -> pd.DataFrame:
        """One row per run: policy, replication, seed and all measures."""
        import pandas as pd

        rows = [
            {"policy": policy, "replication": r, "seed": self.scenario.seed + r, **measures}
            for policy, runs in self.runs.items()
            for r, measures in enumerate(runs)
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """Draw latency distributions and the cache over time."""
        from kvsim.reports.comparison_plots import comparison_figure

        return comparison_figure(self)

    def plot_cells(self) -> Figure:
        """Draw the cells of every policy over time, side by side; the runs must have kept snapshots."""
        from kvsim.reports.comparison_plots import cell_maps_figure

        return cell_maps_figure(self.results)

    def plot_pareto(self) -> Figure:
        """Draw mean end-to-end latency against memory: a point per policy, with intervals over replications."""
        from kvsim.reports.sweep_plots import pareto_figure

        verdict = self.verdict
        title = f"{self.scenario.name}: latency against memory"
        return pareto_figure(verdict.latency_and_memory(), verdict.front, title, verdict.failing)

    def save(self, folder: str | Path, *, plots: bool = True) -> list[Path]:
        """Write the tables, the scenario and, with ``plots``, the figures to a folder and return the files.

        Raises ``UserError``.
        """
        with results_folder(folder) as out:
            if (out.path / "comparison.json").is_file():
                for earlier in [file for pattern in _OF_AN_EARLIER_ONE for file in out.path.glob(pattern)]:
                    earlier.unlink()
            out.json("comparison.json", self.to_dict())
            out.table("comparison.csv", self.table, index=True)
            out.text("scenario.toml", self.scenario.to_toml(left_open=True))
            for result in self.results:
                out.table(f"requests-{result.policy}.csv", result.requests)
            if self.replications > 1:
                out.table("replications.csv", self.replications_table)
            if plots:
                self.plot_to(out)
        return out.written

    def plot_to(self, out: ResultsFolder) -> None:
        """Write the figures and, where snapshots were kept, those of the cells. Raises ``OSError``."""
        from kvsim.reports.comparison_plots import cell_maps_figure
        from kvsim.simulation.snapshots import FILE, save_snapshots

        out.picture("comparison.png", self.plot)
        out.picture("pareto.png", self.plot_pareto)
        with_snapshots = [result for result in self.results if result.frames]
        if with_snapshots:
            out.picture("cells.png", partial(cell_maps_figure, with_snapshots), dpi=110)
            save_snapshots(out.add(FILE), [(result.policy, result.frames) for result in with_snapshots])
        for result in with_snapshots:
            out.picture(f"cells-{result.policy}.png", partial(cell_maps_figure, [result]), dpi=110)


def compare(
    scenario: Scenario | str | Path,
    policies: str | Sequence[str | PolicyFactory] | None = None,
    *,
    progress: Progress | None = None,
    snapshots: bool = True,
    detail: Detail = "tables",
    replications: int = 1,
    max_failed: float | str = 0.0,
    group: PresetGroup = "standard",
    check: bool = False,
) -> Comparison:
    """Run the scenario under each policy on the same requests and arrivals.

    By default these are the policies of a ``group``: ``standard`` (what engines do, ideas of our own, and plug-ins) or
    ``papers`` (ideas from papers, and the policies that they are compared with).

    ``snapshots`` keeps pictures of the cells, where there is one server. ``check`` and ``detail`` are as for ``run``,
    the latter at least ``rows``. With several ``replications``, every policy is run again with the seeds that follow
    the scenario's, which gives intervals for the measures and for the differences; results and tables are those of the
    first replication. Policies that failed more than a share ``max_failed`` of their requests (0.05 or "5%") are not
    ranked. Raises ``UserError`` and ``WorkloadError``.
    """
    from kvsim.simulation.set_up import priced, profile_of

    if type(replications) is not int or not 1 <= replications <= _MOST_REPLICATIONS:
        accepted = f"a whole number from 1 to {_MOST_REPLICATIONS} is accepted"
        raise UserError(f"replications: {replications!r:.40}; {accepted}")
    ranked_up_to = share_of_requests("max_failed", max_failed)
    scenario = load_scenario(scenario)
    seeds = [scenario.seed + r for r in range(1, replications)]
    if seeds and seeds[-1] >= 2**63:
        raise UserError(f"replications: seed {scenario.seed} leaves no room for further ones")
    profile_of(scenario)  # What is wrong for every policy is reported once.
    chosen, left_out = choose(policies, in_group(group), lambda policy: priced(scenario, policy))
    outcomes = list(_run_all(_run_one, [_Asked(scenario, p, snapshots, detail, check) for p in chosen], 0, progress))
    stuck = tuple(f"left out {reason}" for reason in outcomes if isinstance(reason, str))
    served = [(p, result) for p, result in zip(chosen, outcomes, strict=True) if not isinstance(result, str)]
    if not served:
        raise UserError("\n".join(stuck))
    runs = {result.policy: [_outcome(result)] for _, result in served}
    seeded = [scenario.model_copy(update={"seed": seed}) for seed in seeds]
    further = [_Asked(each, policy, False, "rows", check) for each in seeded for policy, _ in served]
    names = [result.policy for _ in seeds for _, result in served]
    ended = len(outcomes) * scenario.build_workload().n_requests if further else 0
    for name, outcome in zip(names, _run_all(_measure_one, further, ended, progress), strict=True):
        if isinstance(outcome, str):
            stuck += (f"no intervals for {outcome}",)
            runs.pop(name, None)
        elif name in runs:
            runs[name].append(outcome)
    results = tuple(result for _, result in served)
    each = {result.policy: priced(scenario, policy) for policy, result in served}
    forgetful = tuple(name for name, (*_, policy) in each.items() if policy.drops_tokens)
    clairvoyant = tuple(name for name, (*_, policy) in each.items() if policy.clairvoyant)
    profiles = "; ".join(dict.fromkeys(costs.profile.describe() for _, costs, _ in each.values()))
    return Comparison(scenario, results, profiles, left_out + stuck, runs, forgetful, ranked_up_to, clairvoyant)


def choose(
    policies: str | Sequence[str | PolicyFactory] | None,
    known: Iterable[str],
    check: Callable[[str | PolicyFactory], object],
) -> tuple[list[str | PolicyFactory], tuple[str, ...]]:
    """Choose the policies to run: those named, or all known ones for which ``check`` raises no ``UserError``.

    Returns them, each once, and a line for each that was left out. Raises ``UserError`` if a named policy fails the
    check, or no policy remains.
    """
    policies = [policies] if isinstance(policies, str) else policies
    if policies is not None:
        policies = [current_name(policy) if isinstance(policy, str) else policy for policy in policies]
    names = list(known)
    chosen: list[str | PolicyFactory] = []
    left_out: list[str] = []
    for policy in dict.fromkeys(names if policies is None else policies):
        try:
            check(policy)
        except UserError as e:
            if policies is not None:
                raise
            left_out.append(f"left out {policy}: {e}")
        else:
            chosen.append(policy)
    if not chosen:
        why = left_out[0] if left_out else f"there are {', '.join(names)}"
        raise UserError(f"no policies to compare; {why}")
    return chosen, tuple(left_out)


class _Asked(NamedTuple):
    """One run of a comparison."""

    scenario: Scenario
    policy: str | PolicyFactory
    snapshots: bool
    detail: Detail
    check: bool


def _run_all(
    work: Callable[..., Done], runs: Sequence[_Asked], ended: int, progress: Progress | None
) -> Iterator[Done]:
    """Do all runs, in this process or on all cores; progress counts requests on from those that have ``ended``."""
    n_requests = runs[0].scenario.build_workload().n_requests if runs else 0
    if n_requests * len(runs) < _WORTH_PROCESSES:
        for number, asked in enumerate(runs):
            yield work(asked, _counting_from(ended + number * n_requests, progress))
        return
    for number, done in enumerate(map_ordered(partial(work, progress=None), runs), 1):
        if progress is not None:
            progress(ended + number * n_requests, getattr(done, "ended_s", 0.0))
        yield done


def _run_one(asked: _Asked, progress: Progress | None) -> Result | str:
    """The result, or the reason why the run could not finish."""
    from kvsim.simulation.run import run
    from kvsim.simulation.set_up import NothingFits

    scenario, policy, snapshots, detail, check = asked
    try:
        return run(
            scenario,
            policy,
            detail=detail,
            snapshots=snapshots and scenario.cluster.size == 1,
            progress=progress,
            check=check,
        )
    except (Livelock, NothingFits) as e:
        return str(e)


def _measure_one(asked: _Asked, progress: Progress | None) -> RunOutcome | str:
    result = _run_one(asked, progress)
    return f"{result} (seed {asked.scenario.seed})" if isinstance(result, str) else _outcome(result)


def _outcome(result: Result) -> RunOutcome:
    warnings = tuple(line for line in result.warnings if line not in result.notes)
    failures, sketches = result.summary["failures"], latency_sketches(result)
    return RunOutcome(whole_run_measures(result), times_digest(result), failures, warnings, sketches)


def _counting_from(ended: int, progress: Progress | None) -> Progress | None:
    """Progress that starts counting at ``ended`` requests."""
    if progress is None:
        return None
    return lambda done, simulated_s: progress(ended + done, simulated_s)


def against_oracle(results: Sequence[Result]) -> dict[str, float]:
    """Return each policy's mean end-to-end latency divided by the oracle's; empty if the oracle did not run."""
    means = {result.policy: result.summary["e2e_s"]["mean"] for result in results}
    bound = means.get("oracle")
    return {policy: mean / bound for policy, mean in means.items() if mean is not None} if bound else {}


def _flat_summary(summary: dict[str, Any]) -> dict[str, Any]:
    flat = {key: summary[key] for key in ("policy", "completed", "failed", "throughput_tokens_per_s")}
    for measure in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic, value in summary[measure].items():
            flat[f"{measure.removesuffix('_s')}_{statistic}_s"] = value
    flat |= {"prefix_hit_rate": summary["prefix"]["hit_rate"], "preemptions": summary["preemptions"]}
    return {**flat, **summary["cache"]}
