"""Compares a scenario under several lengths of drafts, and without any, at several loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.scenario.named_workloads import scale_rate
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.run import run
from policies import PolicyFactory

_WORTH = 0.01
"""A share of the time per token below which drafts gain nothing."""


@dataclass(frozen=True)
class DraftCounts:
    """What drafts of several lengths give, on the same requests."""

    scenario: Scenario
    policy: str
    rows: Sequence[Mapping[str, Any]]
    """For each load and, in it, each number of drafted tokens: ``load``, ``tokens`` and what the run's summary says of
    latencies (seconds), throughput and drafts."""
    basis: str | None
    """What the times rest on."""

    @property
    def loads(self) -> list[float]:
        """Multiples of the scenario's own load."""
        return list(dict.fromkeys(row["load"] for row in self.rows))

    def at(self, load: float) -> list[Mapping[str, Any]]:
        """The rows of a load."""
        return [row for row in self.rows if row["load"] == load]

    def best(self, load: float) -> Mapping[str, Any]:
        """The row of a load with the shortest mean time per token; of equals the fewest tokens."""
        return min(self.at(load), key=lambda row: (row["tpot_s"]["mean"], row["tokens"]))

    def gain(self, load: float) -> float | None:
        """By what share of the mean time per token the best is faster than no drafts; None if these were not tried."""
        without = next((row for row in self.at(load) if row["tokens"] == 0), None)
        return None if without is None else 1 - self.best(load)["tpot_s"]["mean"] / without["tpot_s"]["mean"]

    @property
    def sentences(self) -> list[str]:
        """What to draft at each load, and what that gains."""
        found = []
        for load in self.loads:
            best, gain = self.best(load), self.gain(load)
            at = f"At {load:g} times the load" if len(self.loads) > 1 else "Here"
            if not best["tokens"] or (gain is not None and gain < _WORTH):
                most = max(self.at(load), key=lambda row: float(row["tokens"]))
                costs = most["tpot_s"]["mean"] / min(row["tpot_s"]["mean"] for row in self.at(load)) - 1
                found.append(f"{at} drafts gain nothing: {most['tokens']} tokens make each token {costs:.0%} slower.")
                continue
            faster = "" if gain is None else f", {gain:.0%} less time for each token than without"
            wasted = best["wasted_tokens"] / best["drafted_tokens"]
            found.append(
                f"{at} drafts of {best['tokens']} tokens are best{faster}: {best['tokens_per_draft']:.2f} tokens a "
                f"draft, {wasted:.0%} of what is drafted wasted."
            )
        lengths = [self.best(load)["tokens"] for load in self.loads]
        cells = [row["cells"] for row in self.rows]
        if min(cells) < max(cells):
            found.append(f"What drafts takes memory: with it {min(cells):,} cells are left, without {max(cells):,}.")
        if any(later < earlier for earlier, later in pairwise(lengths)):
            found.append("The busier the server, the less room a pass has for tokens that may be rejected.")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "scenario": self.scenario.name,
            "policy": self.policy,
            "method": self.scenario.speculation.method,
            "basis": self.basis,
            "runs": [dict(row) for row in self.rows],
            "best": [
                {"load": load, "tokens": self.best(load)["tokens"], "gain": self.gain(load)} for load in self.loads
            ],
            "conclusions": self.sentences,
        }


def compare_drafts(
    scenario: Scenario | str | Path,
    tokens: Sequence[int],
    policy: str | PolicyFactory | None = None,
    *,
    loads: Sequence[float] = (1.0,),
) -> DraftCounts:
    """Run a scenario with drafts of each of ``tokens`` tokens (0: none), at each multiple of its load.

    Raises ``UserError``, also where the scenario does not say how drafts are made and accepted.
    """
    base = load_scenario(scenario)
    if base.speculation.method == "none":
        raise UserError(
            f"{base.name}: how tokens are drafted, and how many are accepted, is not said: give [speculation] a method "
            "and an acceptance"
        )
    rows, name, basis = list[dict[str, Any]](), "", None
    for load in loads:
        workload = scale_rate(base.workload.model_dump(mode="json", exclude_none=True), load)
        for n in dict.fromkeys(tokens):
            result = run(load_scenario(base, workload=workload, speculation__tokens=n), policy, detail="requests")
            s, name, basis = result.summary, result.policy, result.summary["basis"]
            if not s["completed"]:
                raise UserError(f"{base.name}: no request was completed with drafts of {n} tokens")
            latencies = {key: s[key] for key in ("ttft_s", "tpot_s", "e2e_s")}
            of_run = {
                key: s[key] for key in ("cells", "throughput_tokens_per_s", "failed", "preemptions", "makespan_s")
            }
            rows.append({"load": load, "tokens": n, **latencies, **of_run, **s["speculation"]})
    return DraftCounts(base, name, rows, basis)
