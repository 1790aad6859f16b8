"""Compare predicted with measured times of the same schedule.

A machine's speed changes, on some twofold within seconds. Among the steps of every real run, passes that are
independent of the scenario are timed (``calibration.reference_passes``), and each step's prediction is scaled by the
pace at its moment; the errors of unscaled predictions are reported as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvsim import machine
from kvsim.calibration.llamacpp_session import LlamaCppSession
from kvsim.calibration.pace import median_seconds
from kvsim.calibration.reference_passes import known_seconds
from kvsim.costs.profile import NUMPY, Profile, is_llamacpp
from kvsim.engines.live.engine_runs import EngineRun, EngineRunner, LlamaCppRunner, NumpyRunner, run_and_predict
from kvsim.engines.recordings.settings_ranking import kendalls_tau, ranked_wrong
from kvsim.errors import UserError
from kvsim.experiments.comparison import choose
from kvsim.scenario.scenario import Scenario, load_scenario, shortened
from kvsim.simulation.request_log import Progress
from kvsim.simulation.set_up import build_policy
from policies import PolicyFactory, in_group

_MEASURES = ("ttft_s", "tpot_s", "e2e_s")
_STATISTICS = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True)
class Validation:
    """Predicted against measured times, for each policy and measure."""

    scenario: Scenario
    profile: Profile
    repeats: int
    table: pd.DataFrame
    """Columns policy, measure, statistic; predicted, measured (seconds; tokens/s for throughput; medians over the
    repeats); error (relative: predicted / measured - 1, the median over the repeats, each against its own
    prediction); low, high (the errors' range over the repeats); unscaled (the error of predictions not scaled by the
    machine's pace); spread (half the range of the measured values over their median)."""
    schedules: dict[str, str]
    """By policy: the digest of all placements and moves of the first repeat, equal in both runs."""
    moved_bytes: dict[str, int]
    """By policy: bytes moved by the first repeat's real run, as by the predicted one."""
    pace: dict[str, tuple[float, float]]
    """By policy: lowest and highest pace over the repeats, the ratio of the predicted seconds of all steps with the
    machine's pace to those without."""
    reference: tuple[float, float]
    """Median seconds of both reference passes, decode and prompt, over those in the profile."""
    cpu_share: dict[str, float]
    """By policy: lowest ratio over the repeats of processor to wall seconds of the real runs."""
    compared: dict[str, int]
    """On llama.cpp, by policy: dumps of llama.cpp's cells that were compared with the policy's, all equal."""
    causes: pd.DataFrame
    """One row for each policy, repeat and request that both runs completed: policy, repeat (from 1), id, arrival_s,
    e2e_s (measured), on what its seconds were spent as predicted without the machine's pace
    (``time_breakdown.SECONDS``), and machine_s: measured less predicted."""
    warnings: tuple[str, ...] = ()
    """A line for each prediction beyond the profile's measured range, and for each policy with failed requests."""

    @property
    def busy(self) -> bool:
        """Whether other work took so much of the machine that the figures cannot be trusted."""
        return min(self.cpu_share.values()) < machine.BUSY_BELOW

    @property
    def worst(self) -> float:
        """Largest absolute error of end-to-end latency at P50 or P99, over all policies."""
        return self._worst("error")

    @property
    def worst_unscaled(self) -> float:
        """``worst`` of the predictions not scaled by the machine's pace."""
        return self._worst("unscaled")

    @property
    def elsewhere(self) -> bool:
        """Whether the profile was measured on another processor."""
        return self.profile.measured_on.processor != machine.processor()

    def _worst(self, error: str) -> float:
        t = self.table
        return float(t[(t["measure"] == "e2e_s") & t["statistic"].isin(["p50", "p99"])][error].abs().max())

    @property
    def ranking(self) -> tuple[float | None, int]:
        """Kendall's tau between the policies' predicted and measured mean end-to-end latencies (None for fewer than
        two policies), and the number of pairs ranked differently although they differ by more than their spreads."""
        t = self.table
        means = t[(t["measure"] == "e2e_s") & (t["statistic"] == "mean")]
        if len(means) < 2:
            return None, 0
        return kendalls_tau(means), ranked_wrong(means)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        tau, wrong = self.ranking
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "model": self.scenario.model.name,
            "profile": self.profile.name,
            "engine": self.profile.engine,
            "repeats": self.repeats,
            "busy": self.busy,
            "worst_e2e_error": self.worst,
            "worst_e2e_error_unscaled": self.worst_unscaled,
            "profile_of_another_processor": self.elsewhere,
            "reference_decode": self.reference[0],
            "reference_prompt": self.reference[1],
            "kendall_tau": tau,
            "pairs_ranked_wrong": wrong,
            "warnings": list(self.warnings),
            "policies": [
                {
                    "policy": policy,
                    "schedule": digest,
                    "cpu_share": self.cpu_share[policy],
                    "pace": list(self.pace[policy]),
                    "moved_bytes": self.moved_bytes[policy],
                    "compared": self.compared.get(policy),
                    "causes": self.causes[self.causes["policy"] == policy].drop(columns="policy").to_dict("records"),
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
    repeats: int = 1,
    engine: str = NUMPY,
    library: Path | str | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], object] | None = None,
) -> Validation:
    """Run the scenario (its first ``requests``) on the real engine, then predict the same schedule.

    With ``engine="llamacpp"`` the real llama.cpp runs, with as many threads as the profile was measured with, and by
    default under the policies that describe its version (``library``: a folder with another llama-cpp-python). Its
    cells are compared after every step; in era B, where showing them takes time, in an additional untimed run along
    the script of the first.

    The real run decides by its own clock which requests have arrived before each step. The predicted run follows that
    script, so that both make the same decisions and place the same cells (checked), and differ only in the steps'
    times. With several ``repeats`` the policies alternate, so that slow moments of the machine affect all of them.
    Raises ``UserError`` if the scenario's decisions depend on the clock in other ways.
    """
    scenario = shortened(load_scenario(scenario), requests)
    if scenario.server.prefetch == "predictive":
        raise UserError(
            f"{scenario.name}: server.prefetch: 'predictive' follows the clock, and the two runs' clocks differ"
        )
    runner: EngineRunner
    if is_llamacpp(engine):
        session = LlamaCppSession(scenario, library=library, threads=profile.measured_on.threads)
        scenario = session.scenario
        chosen, left_out = choose(policies, session.policies, session.check)
        runner = LlamaCppRunner(session, profile)
    else:
        runner = NumpyRunner(scenario, profile)
        chosen, _ = choose(policies, in_group("standard"), lambda policy: build_policy(scenario, policy))
        left_out = ()
    runs: dict[str, list[EngineRun]] = {}
    try:
        for repeat in range(repeats):
            for choice in chosen:
                done = run_and_predict(scenario, profile, choice, runner, progress, announce, first=repeat == 0)
                runs.setdefault(done.policy, []).append(done)
            if announce is not None and repeats > 1:
                announce(f"repeat {repeat + 1} of {repeats} is done")
    finally:
        runner.shut_down()
    return _validation(scenario, profile, runs, repeats, left_out, compared=is_llamacpp(engine))


def _validation(
    scenario: Scenario,
    profile: Profile,
    runs: dict[str, list[EngineRun]],
    repeats: int,
    left_out: Sequence[str],
    *,
    compared: bool,
) -> Validation:
    beyond = dict.fromkeys(line for own in runs.values() for run in own for line in _warnings(run))
    return Validation(
        scenario,
        profile,
        repeats,
        _summary([(policy, *row) for policy, own in runs.items() for run in own for row in _measures(run)]),
        schedules={policy: own[0].digest for policy, own in runs.items()},
        moved_bytes={policy: own[0].real.summary["cache"]["moved_bytes"] for policy, own in runs.items()},
        pace={policy: (min(r.pace for r in own), max(r.pace for r in own)) for policy, own in runs.items()},
        reference=_reference([run for own in runs.values() for run in own], profile),
        cpu_share={policy: min(r.cpu_share for r in own) for policy, own in runs.items()},
        compared={policy: sum(r.compared for r in own) for policy, own in runs.items() if compared},
        causes=pd.concat(
            [_causes(r).assign(policy=r.policy, repeat=i) for own in runs.values() for i, r in enumerate(own, 1)],
            ignore_index=True,
        ),
        warnings=(*left_out, *beyond),
    )


def _reference(runs: Sequence[EngineRun], profile: Profile) -> tuple[float, float]:
    """``Validation.reference``."""
    now, then = median_seconds([run.ticks for run in runs]), known_seconds(profile)
    return now[0] / then[0], now[1] / then[1]


def _warnings(run: EngineRun) -> Iterator[str]:
    for line in run.unscaled.warnings:
        yield f"{run.policy}: {line}"
    failed, requests = run.real.summary["failed"], run.real.summary["requests"]
    if failed:
        yield f"{run.policy}: {failed:,} of {requests:,} requests failed; the errors are of those that were left"


def _causes(run: EngineRun) -> pd.DataFrame:
    """Rows of ``Validation.causes``, without policy and repeat."""
    real = run.real.requests[["id", "e2e_s"]].rename(columns={"e2e_s": "measured_s"})
    both = run.unscaled.causes.merge(real, on="id")
    both["machine_s"] = both["measured_s"] - both["e2e_s"]
    return both.drop(columns="e2e_s").rename(columns={"measured_s": "e2e_s"})


def _measures(run: EngineRun) -> Iterator[tuple[str, str, float | None, float | None, float | None]]:
    """Rows of measure, statistic, predicted, predicted without the pace, measured."""
    results = (run.predicted, run.unscaled, run.real)
    for measure in _MEASURES:
        for statistic in _STATISTICS:
            predicted, unscaled, measured = (result.summary[measure][statistic] for result in results)
            yield measure, statistic, predicted, unscaled, measured
    throughput = "throughput_tokens_per_s"
    predicted, unscaled, measured = (result.summary[throughput] for result in results)
    yield throughput, "mean", predicted, unscaled, measured


def _summary(rows: Sequence[tuple[str, str, str, float | None, float | None, float | None]]) -> pd.DataFrame:
    """``Validation.table`` from the rows of all repeats."""
    keys = ["policy", "measure", "statistic"]
    each = pd.DataFrame(rows, columns=[*keys, "predicted", "unscaled", "measured"])
    for column, prediction in (("error", "predicted"), ("unscaled", "unscaled")):
        each[column] = each[prediction] / each["measured"] - 1
    by = each.groupby(keys, sort=False)
    table = by[["predicted", "measured", "error", "unscaled"]].median()
    table["low"], table["high"] = by["error"].min(), by["error"].max()
    table["spread"] = (by["measured"].max() - by["measured"].min()) / 2 / by["measured"].median()
    return table.reset_index()
