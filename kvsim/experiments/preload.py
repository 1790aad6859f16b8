"""What runs need, imported once before processes are forked from this one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kvsim.errors import UserError
from kvsim.experiments.forked import can_fork
from kvsim.scenario.scenario import Scenario


def preload(scenarios: Iterable[Scenario]) -> None:
    """Import here what runs of these scenarios need, rather than in each process that is forked from this one."""
    if not can_fork():
        return
    from kvsim.simulation.run import build_policy

    for scenario in {scenario.cache.policy: scenario for scenario in scenarios}.values():
        with suppress(UserError):  # The run itself will say so.
            build_policy(scenario)
