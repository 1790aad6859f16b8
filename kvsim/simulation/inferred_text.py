"""What results price without a measurement, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {"host_copies": "copies to host memory", "mapping": "mapping pages"}
"""What is printed for keys that are no words."""


def inferred_lines(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each thing that was inferred, with the policies that it concerns; ``summaries`` of runs."""
    policies: dict[tuple[str, str], dict[str, None]] = {}
    for summary in summaries:
        for what, how in summary.get("inferred", {}).items():
            policies.setdefault((what, how), {})[summary["policy"]] = None
    return tuple(
        f"inferred, not measured: {_WORDS.get(what, what)} of {', '.join(concerned)}, {how}"
        for (what, how), concerned in policies.items()
    )
