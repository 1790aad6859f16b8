"""Several policies on the same requests, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvsim.costs import load_profile
from kvsim.errors import UserError
from kvsim.metrics import Progress, Result
from kvsim.scenario import Scenario, load
from kvsim.simulation import run
from policies import PolicyFactory, available

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison:
    """The results of several policies on one scenario."""

    scenario: Scenario
    results: tuple[Result, ...]
    profile: str
    """One line: which machine profile the times come from, and where it was measured."""

    @property
    def table(self) -> pd.DataFrame:
        """One row for each policy; times in seconds, shares between 0 and 1."""
        return pd.DataFrame([_row(result.summary) for result in self.results]).set_index("policy")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where predictions went beyond what the profile measured."""
        return tuple(f"{r.policy}: {line}" for r in self.results for line in r.warnings)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "profile": self.results[0].summary["profile"],
            "wall_s": sum(result.summary["wall_s"] for result in self.results),
            "policies": [result.summary for result in self.results],
        }

    def plot(self) -> Figure:
        """Latency distributions and the cache over time."""
        from kvsim.plots import comparison_figure

        return comparison_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the picture, the tables and the scenario; returns the files. Raises ``UserError``."""
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
            written = [target / "comparison.json", target / "comparison.csv", target / "scenario.toml"]
            written[0].write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            self.table.to_csv(written[1])
            written[2].write_text(self.scenario.to_toml(), encoding="utf-8")
            for result in self.results:
                written.append(target / f"requests-{result.policy}.csv")
                result.requests.to_csv(written[-1], index=False)
            written.append(target / "comparison.png")
            self.plot().savefig(written[-1], dpi=130)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def compare(
    scenario: Scenario | str | Path,
    policies: Sequence[str | PolicyFactory] | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Run the scenario under each policy (all that are installed, by default): same requests, same arrivals."""
    scenario = load(scenario)
    chosen = list(policies) if policies is not None else list(available())
    if not chosen:
        raise UserError(f"no policies to compare; there are {', '.join(available())}")
    results = tuple(run(scenario, policy, progress=progress) for policy in chosen)
    return Comparison(scenario, results, load_profile(scenario.machine.profile, scenario.folder).describe())


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run, flat."""
    flat = {key: summary[key] for key in ("policy", "completed", "failed", "throughput_tokens_per_s")}
    for measure in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic, value in summary[measure].items():
            flat[f"{measure.removesuffix('_s')}_{statistic}_s"] = value
    return {**flat, **summary["cache"]}
