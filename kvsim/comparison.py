"""Several policies on the same requests, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import pandas as pd

from kvsim.costs import load_profile
from kvsim.errors import Livelock, UserError
from kvsim.films import FILE as FILMS
from kvsim.films import save_films
from kvsim.metrics import Progress, Result
from kvsim.results import writable
from kvsim.scenario import Scenario, load
from kvsim.simulation import build_policy, run
from policies import PolicyFactory, available

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WORTH_PROCESSES = 1000
"""Requests to simulate in all, from which on it is worth starting processes."""


@dataclass(frozen=True)
class Comparison:
    """The results of several policies on one scenario."""

    scenario: Scenario
    results: tuple[Result, ...]
    profile: str
    """One line: which machine profile the times come from, and where it was measured."""
    left_out: tuple[str, ...] = ()
    """Policies that cannot serve the scenario, and why, a line each."""

    @property
    def table(self) -> pd.DataFrame:
        """One row for each policy; times in seconds, shares between 0 and 1."""
        table = pd.DataFrame([_row(result.summary) for result in self.results]).set_index("policy")
        table["e2e_mean_over_oracle"] = pd.Series(against_oracle(self.results), dtype=float)
        return table

    @property
    def warnings(self) -> tuple[str, ...]:
        """Policies left out, and where predictions went beyond what the profile measured."""
        beyond = (f"{r.policy}: {line}" for r in self.results for line in r.warnings)
        return (*self.left_out, *beyond)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "profile": self.results[0].summary["profile"],
            "wall_s": sum(result.summary["wall_s"] for result in self.results),
            "e2e_mean_over_oracle": against_oracle(self.results) or None,
            "policies": [result.summary for result in self.results],
        }

    def plot(self) -> Figure:
        """Latency distributions and the cache over time."""
        from kvsim.plots import comparison_figure

        return comparison_figure(self)

    def plot_cells(self) -> Figure:
        """The cells of every policy over time, side by side, where the run kept pictures of them."""
        from kvsim.plots import cell_maps_figure

        return cell_maps_figure(self.results)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the pictures, the tables and the scenario; returns the files. Raises ``UserError``."""
        from kvsim.plots import cell_maps_figure

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
            filmed = [result for result in self.results if result.frames]
            if filmed:
                written.append(target / "cells.png")
                cell_maps_figure(filmed).savefig(written[-1], dpi=110)
                written.append(target / FILMS)
                save_films(written[-1], filmed)
            for result in filmed:
                written.append(target / f"cells-{result.policy}.png")
                cell_maps_figure([result]).savefig(written[-1], dpi=110)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def compare(
    scenario: Scenario | str | Path,
    policies: Sequence[str | PolicyFactory] | None = None,
    *,
    progress: Progress | None = None,
    film: bool = True,
    leap: bool = True,
) -> Comparison:
    """Run the scenario under each policy (all that are installed, by default): same requests, same arrivals.

    ``film`` keeps pictures of the cells. ``leap``: as for ``run``. Raises ``UserError`` and ``WorkloadError``.
    """
    scenario = load(scenario)
    chosen, left_out = choose(scenario, policies)
    ran = list(_run_all(scenario, chosen, progress, film, leap))
    results = tuple(result for result in ran if isinstance(result, Result))
    stuck = tuple(f"left out {reason}" for reason in ran if isinstance(reason, str))
    if not results:
        raise UserError("\n".join(stuck))
    profile = load_profile(scenario.machine.profile, scenario.folder)
    return Comparison(scenario, results, profile.describe(), left_out + stuck)


def choose(
    scenario: Scenario, policies: Sequence[str | PolicyFactory] | None
) -> tuple[list[str | PolicyFactory], tuple[str, ...]]:
    """The policies named, each once, or all that are installed and can serve the scenario; and who was left out.

    Raises ``UserError`` where one that was named cannot serve it, or none can.
    """
    named = list(dict.fromkeys(available() if policies is None else policies))
    can: list[str | PolicyFactory] = []
    left_out: list[str] = []
    for policy in named:
        try:
            build_policy(scenario, policy)
        except UserError as e:
            if policies is not None:
                raise
            left_out.append(f"left out {policy}: {e}")
        else:
            can.append(policy)
    if not can:
        why = left_out[0] if left_out else f"there are {', '.join(available())}"
        raise UserError(f"no policies to compare; {why}")
    return can, tuple(left_out)


def _run_all(
    scenario: Scenario, policies: Sequence[str | PolicyFactory], progress: Progress | None, film: bool, leap: bool
) -> Iterator[Result | str]:
    """One after another where there is little to do, else on all cores; the results are the same.

    In place of the result of a run that could not go on: the reason.
    """
    n_requests = scenario.build_workload().n_requests
    ended = 0
    if n_requests * len(policies) < _WORTH_PROCESSES:
        for policy in policies:
            yield _attempt(scenario, policy, film, leap, _counting_on(progress, ended))
            ended += n_requests
        return
    jobs = (joblib.delayed(_attempt)(scenario, policy, film, leap) for policy in policies)
    for result in joblib.Parallel(n_jobs=-1, return_as="generator")(jobs):
        ended += n_requests
        if progress is not None:
            progress(ended, 0.0 if isinstance(result, str) else result.ended_s)
        yield result


def _attempt(
    scenario: Scenario, policy: str | PolicyFactory, film: bool, leap: bool, progress: Progress | None = None
) -> Result | str:
    try:
        return run(scenario, policy, detail="tables", film=film, leap=leap, progress=progress)
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
