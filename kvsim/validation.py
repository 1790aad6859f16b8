"""The same schedule under two stopwatches: what the engine took, and what was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvsim import machine
from kvsim.backend import SimulatedBackend
from kvsim.comparison import choose
from kvsim.costs import Profile
from kvsim.errors import UserError
from kvsim.metrics import Progress, Recorder
from kvsim.model import SHAPES
from kvsim.scenario import Scenario, load
from kvsim.simulation import build_policy, cost_model, drive
from policies import PolicyFactory
from real_engine import Engine, Transformer

_MEASURES = ("ttft_s", "tpot_s", "e2e_s")
_STATISTICS = ("mean", "p50", "p95", "p99")


class ScheduleMismatch(Exception):
    """The predicted run placed other cells than the real one: a fault of ours."""


@dataclass(frozen=True)
class Validation:
    """Predicted against measured, for each policy and measure."""

    scenario: Scenario
    profile: Profile
    table: pd.DataFrame
    """Columns policy, measure, statistic, predicted, measured (seconds; tokens/s for throughput), error
    (relative: predicted / measured - 1)."""
    schedules: dict[str, str]
    """Of each policy: the digest of all placements and moves, the same in both runs."""
    cpu_share: dict[str, float]
    """Of each policy: processor seconds per wall second of the real run."""

    @property
    def busy(self) -> bool:
        """Whether other work took so much of the machine that the figures cannot be trusted."""
        return min(self.cpu_share.values()) < machine.BUSY_BELOW

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "model": self.scenario.model.name,
            "profile": self.profile.name,
            "busy": self.busy,
            "policies": [
                {
                    "policy": policy,
                    "schedule": digest,
                    "cpu_share": self.cpu_share[policy],
                    "measures": json.loads(
                        self.table[self.table["policy"] == policy].drop(columns="policy").to_json(orient="records")
                    ),
                }
                for policy, digest in self.schedules.items()
            ],
        }


def validate(
    scenario: Scenario | str | Path,
    profile: Profile,
    policies: Sequence[str | PolicyFactory] | None = None,
    *,
    requests: int | None = 60,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Validation:
    """Run the scenario (its first ``requests``) on the real engine, then predict the same schedule.

    The real run decides by its own clock what has arrived at each turn; the predicted run follows its script, so
    both take the same decisions and place the same cells (checked), and differ only in how long each step took.
    Raises ``UserError`` where the scenario's decisions depend on more than that.
    """
    scenario = _shortened(load(scenario), requests)
    if scenario.server.prefetch == "predictive":
        raise UserError(
            f"{scenario.name}: server.prefetch: 'predictive' follows the clock, and the two runs' clocks differ"
        )
    model = Transformer.random(SHAPES[scenario.model.name], scenario.seed)
    rows: list[tuple[str, str, str, float | None, float | None]] = []
    schedules: dict[str, str] = {}
    shares: dict[str, float] = {}
    for choice in choose(scenario, policies)[0]:
        costs = cost_model(scenario, profile)
        policy = build_policy(scenario, choice, costs)
        if announce is not None:
            announce(policy.name)
        engine = Engine(model, policy.groups, policy.kernel, scenario.seed)
        measured = Recorder(progress, digest=True)
        with machine.measuring() as watch:
            real, script = drive(scenario, policy, engine, measured, None)
        again = build_policy(scenario, choice, costs)
        predicted = Recorder(digest=True)
        backend = SimulatedBackend(costs, again.kernel, again.groups)
        simulated, _ = drive(scenario, again, backend, predicted, profile.name, script)
        if predicted.schedule_digest != measured.schedule_digest:
            raise ScheduleMismatch(f"{policy.name}: the predicted run placed other cells than the real one")
        schedules[policy.name], shares[policy.name] = measured.schedule_digest, watch.cpu_share
        for measure in _MEASURES:
            for statistic in _STATISTICS:
                pair = (simulated.summary[measure][statistic], real.summary[measure][statistic])
                rows.append((policy.name, measure, statistic, *pair))
        throughput = "throughput_tokens_per_s"
        rows.append((policy.name, throughput, "mean", simulated.summary[throughput], real.summary[throughput]))
    table = pd.DataFrame(rows, columns=["policy", "measure", "statistic", "predicted", "measured"])
    table["error"] = table["predicted"] / table["measured"] - 1
    return Validation(scenario, profile, table, schedules, shares)


def _shortened(scenario: Scenario, requests: int | None) -> Scenario:
    if requests is None:
        return scenario
    key = scenario.workload.count_key
    now = getattr(scenario.workload, key)
    return load(scenario, **{f"workload__{key}": requests if now is None else min(now, requests)})
