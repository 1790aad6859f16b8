"""Which header the states have that a llama-server saves to host memory, by the sizes in its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.run import build_policy
from kvsim.simulation.schedulers.host_prompt_cache import MIB, STATE_HEADER, StateSize

EARLIER_STATE_HEADER = 20
"""Bytes of a saved state's header in llama-server 0.5.0-dev."""


def state_header(scenario: Scenario, records: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the header: today's, unless only the earlier one gives the recorded sizes of the whole host cache."""
    groups = build_policy(scenario).groups
    held: list[tuple[list[int], float]] = []
    for record in records:
        if record.get("kind") == "host_cache":
            held.append(([], record["mib"]))
        elif record.get("kind") == "host_entry" and held:
            held[-1][0].append(record["tokens"])
    for header in (STATE_HEADER, EARLIER_STATE_HEADER):
        size = StateSize(scenario, groups, header)
        if all(float(f"{sum(map(size.of, tokens)) / MIB:.3f}") == mib for tokens, mib in held):
            return header
    return STATE_HEADER
