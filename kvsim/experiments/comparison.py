"""Several policies on the same requests, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvsim.costs.profile import load_profile
from kvsim.errors import Livelock, UserError
from kvsim.experiments.measures import Measures, of_whole
from kvsim.experiments.verdict import Verdict, judge
from kvsim.experiments.workers import in_order
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.recorder import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import build_policy, cost_model, run
from kvsim.simulation.snapshots import FILE as SNAPSHOTS
from kvsim.simulation.snapshots import save_snapshots
from policies import PolicyFactory, available, current_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WORTH_PROCESSES = 1000
"""Requests to simulate in all, from which on it is worth starting processes."""
_MOST_REPLICATIONS = 1000


@dataclass(frozen=True)
class Comparison:
    """The results of several policies on one scenario."""

    scenario: Scenario
    results: tuple[Result, ...]
    profile: str
    """One line: which machine profile the times come from, and where it was measured."""
    left_out: tuple[str, ...] = ()
    """Policies that cannot serve the scenario, and why, a line each."""
    runs: Mapping[str, Sequence[Measures]] = field(default_factory=dict, repr=False)
    """Of each policy the measures of its replications, the first of which is in ``results``."""
    forgetful: tuple[str, ...] = ()
    """Policies that drop tokens."""

    @property
    def replications(self) -> int:
        """How often each policy was run, with another seed each time."""
        return max((len(runs) for runs in self.runs.values()), default=1)

    @cached_property
    def verdict(self) -> Verdict:
        """What the numbers support: the conclusion in one line, intervals, differences in pairs."""
        return judge(self.runs or {r.policy: [of_whole(r)] for r in self.results}, self.forgetful)

    @property
    def table(self) -> pd.DataFrame:
        """One row for each policy; times in seconds, shares between 0 and 1."""
        table = pd.DataFrame([_row(result.summary) for result in self.results]).set_index("policy")
        table["e2e_mean_over_oracle"] = pd.Series(against_oracle(self.results), dtype=float)
        return table

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out of a trace, policies left out, and where predictions went beyond what was measured."""
        beyond = (f"{r.policy}: {line}" for r in self.results for line in r.warnings if line not in r.notes)
        return (*self.results[0].notes, *self.left_out, *beyond)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "profile": self.results[0].summary["profile"],
            "wall_s": sum(result.summary["wall_s"] for result in self.results),
            "e2e_mean_over_oracle": against_oracle(self.results) or None,
            "policies": [result.summary for result in self.results],
            **self.verdict.to_dict(),
        }

    @property
    def replications_table(self) -> pd.DataFrame:
        """A row for each run: policy, replication, seed, all measures."""
        rows = [
            {"policy": policy, "replication": r, "seed": self.scenario.seed + r, **found}
            for policy, runs in self.runs.items()
            for r, found in enumerate(runs)
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """Latency distributions and the cache over time."""
        from kvsim.reports.plots import comparison_figure

        return comparison_figure(self)

    def plot_cells(self) -> Figure:
        """The cells of every policy over time, side by side, where the run kept pictures of them."""
        from kvsim.reports.plots import cell_maps_figure

        return cell_maps_figure(self.results)

    def plot_pareto(self) -> Figure:
        """Mean end-to-end latency against memory, a dot for each policy, intervals where there are replications."""
        from kvsim.reports.sweep_plots import pareto_figure

        judged = self.verdict
        return pareto_figure(
            judged.trade(), judged.front, f"{self.scenario.name}: latency against memory", judged.failing
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write the pictures, the tables and the scenario; returns the files. Raises ``UserError``."""
        from kvsim.reports.plots import cell_maps_figure

        target = writable(folder)
        try:
            written = [target / "comparison.json", target / "comparison.csv", target / "scenario.toml"]
            written[0].write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            self.table.to_csv(written[1])
            written[2].write_text(self.scenario.to_toml(), encoding="utf-8")
            for result in self.results:
                written.append(target / f"requests-{result.policy}.csv")
                result.requests.to_csv(written[-1], index=False)
            written.append(target / "comparison.png")
            self.plot().savefig(written[-1], dpi=130)
            written.append(target / "pareto.png")
            self.plot_pareto().savefig(written[-1], dpi=130)
            if self.replications > 1:
                written.append(target / "replications.csv")
                self.replications_table.to_csv(written[-1], index=False)
            with_snapshots = [result for result in self.results if result.frames]
            if with_snapshots:
                written.append(target / "cells.png")
                cell_maps_figure(with_snapshots).savefig(written[-1], dpi=110)
                written.append(target / SNAPSHOTS)
                save_snapshots(written[-1], [(result.policy, result.frames) for result in with_snapshots])
            for result in with_snapshots:
                written.append(target / f"cells-{result.policy}.png")
                cell_maps_figure([result]).savefig(written[-1], dpi=110)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def compare(
    scenario: Scenario | str | Path,
    policies: str | Sequence[str | PolicyFactory] | None = None,
    *,
    progress: Progress | None = None,
    snapshots: bool = True,
    fast_forward: bool = True,
    replications: int = 1,
) -> Comparison:
    """Run the scenario under each policy (all that are installed, by default): same requests, same arrivals.

    ``snapshots`` keeps pictures of the cells. ``fast-forward``: as for ``run``. With several ``replications`` all are
    run again with
    the seeds that follow the scenario's, the same for each policy, for intervals around the figures and around the
    differences; results and tables are those of the first. Raises ``UserError`` and ``WorkloadError``.
    """
    if type(replications) is not int or not 1 <= replications <= _MOST_REPLICATIONS:
        said = f"a whole number from 1 to {_MOST_REPLICATIONS} is accepted"
        raise UserError(f"replications: {replications!r:.40}; {said}")
    scenario = load_scenario(scenario)
    seeds = [scenario.seed + r for r in range(1, replications)]
    if seeds and seeds[-1] >= 2**63:
        raise UserError(f"replications: seed {scenario.seed} leaves no room for further ones")
    profile = load_profile(scenario.machine.profile, scenario.folder)
    costs = cost_model(scenario, profile)
    chosen, left_out = choose(policies, available(), lambda policy: build_policy(scenario, policy, costs))
    ran = list(_run_all(scenario, chosen, progress, snapshots, fast_forward))
    results = tuple(result for result in ran if isinstance(result, Result))
    stuck = tuple(f"left out {reason}" for reason in ran if isinstance(reason, str))
    if not results:
        raise UserError("\n".join(stuck))
    alive = [(p, r) for p, r in zip(chosen, ran, strict=True) if isinstance(r, Result)]
    runs = {result.policy: [of_whole(result)] for _, result in alive}
    counted = _counting_on(progress, len(ran) * scenario.build_workload().n_requests)
    for (_, result), found in zip(
        [pair for _ in seeds for pair in alive], _replicate(scenario, seeds, alive, fast_forward, counted), strict=True
    ):
        if isinstance(found, str):
            stuck += (f"no intervals for {found}",)
            runs.pop(result.policy, None)
        elif result.policy in runs:
            runs[result.policy].append(found)
    forgetful = tuple(result.policy for policy, result in alive if build_policy(scenario, policy).unbounded)
    return Comparison(scenario, results, profile.describe(), left_out + stuck, runs, forgetful)


def choose(
    policies: str | Sequence[str | PolicyFactory] | None,
    every: Iterable[str],
    fits: Callable[[str | PolicyFactory], object],
) -> tuple[list[str | PolicyFactory], tuple[str, ...]]:
    """The policies named, each once, or of ``every`` one those that ``fits`` raises no ``UserError`` for; and who was
    left out.

    Raises ``UserError`` where one that was named does not fit, or none does.
    """
    policies = [policies] if isinstance(policies, str) else policies
    if policies is not None:
        policies = [current_name(policy) if isinstance(policy, str) else policy for policy in policies]
    known = list(every)
    can: list[str | PolicyFactory] = []
    left_out: list[str] = []
    for policy in dict.fromkeys(known if policies is None else policies):
        try:
            fits(policy)
        except UserError as e:
            if policies is not None:
                raise
            left_out.append(f"left out {policy}: {e}")
        else:
            can.append(policy)
    if not can:
        why = left_out[0] if left_out else f"there are {', '.join(known)}"
        raise UserError(f"no policies to compare; {why}")
    return can, tuple(left_out)


def _run_all(
    scenario: Scenario,
    policies: Sequence[str | PolicyFactory],
    progress: Progress | None,
    snapshots: bool,
    fast_forward: bool,
) -> Iterator[Result | str]:
    """One after another where there is little to do, else on all cores; the results are the same.

    In place of the result of a run that could not go on: the reason.
    """
    n_requests = scenario.build_workload().n_requests
    ended = 0
    if n_requests * len(policies) < _WORTH_PROCESSES:
        for policy in policies:
            yield _attempt(scenario, snapshots, fast_forward, policy, _counting_on(progress, ended))
            ended += n_requests
        return
    for result in in_order(partial(_attempt, scenario, snapshots, fast_forward), policies):
        ended += n_requests
        if progress is not None:
            progress(ended, 0.0 if isinstance(result, str) else result.ended_s)
        yield result


def _replicate(
    scenario: Scenario,
    seeds: Sequence[int],
    alive: Sequence[tuple[str | PolicyFactory, Result]],
    fast_forward: bool,
    progress: Progress | None,
) -> Iterator[Measures | str]:
    """The measures of each policy's run with each seed, seed by seed; in place of those of a run that could not go on:
    the reason."""
    calls = [(scenario.model_copy(update={"seed": seed}), policy) for seed in seeds for policy, _ in alive]
    if not calls:
        return
    n_requests, ended = scenario.build_workload().n_requests, 0
    worth = n_requests * len(calls) >= _WORTH_PROCESSES
    for found in in_order(partial(_measured, fast_forward), calls, processes=worth):
        ended += n_requests
        if progress is not None:
            progress(ended, 0.0)
        yield found


def _measured(fast_forward: bool, call: tuple[Scenario, str | PolicyFactory]) -> Measures | str:
    scenario, policy = call
    found = _attempt(scenario, False, fast_forward, policy)
    return f"{found} (seed {scenario.seed})" if isinstance(found, str) else of_whole(found)


def _attempt(
    scenario: Scenario,
    snapshots: bool,
    fast_forward: bool,
    policy: str | PolicyFactory,
    progress: Progress | None = None,
) -> Result | str:
    try:
        return run(scenario, policy, detail="tables", snapshots=snapshots, fast_forward=fast_forward, progress=progress)
    except Livelock as e:
        return str(e)


def _counting_on(progress: Progress | None, ended: int) -> Progress | None:
    """Progress that counts from ``ended`` requests on."""
    if progress is None:
        return None
    return lambda done, simulated_s: progress(ended + done, simulated_s)


def against_oracle(results: Sequence[Result]) -> dict[str, float]:
    """Of each policy: its mean end-to-end latency over the oracle's, where both are known and the oracle ran."""
    means = {result.policy: result.summary["e2e_s"]["mean"] for result in results}
    bound = means.get("oracle")
    return {policy: mean / bound for policy, mean in means.items() if mean is not None} if bound else {}


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run, flat."""
    flat = {key: summary[key] for key in ("policy", "completed", "failed", "throughput_tokens_per_s")}
    for measure in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic, value in summary[measure].items():
            flat[f"{measure.removesuffix('_s')}_{statistic}_s"] = value
    flat |= {"prefix_hit_rate": summary["prefix"]["hit_rate"], "preemptions": summary["preemptions"]}
    return {**flat, **summary["cache"]}
