"""What is printed of failed requests: how many, why, and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvsim.simulation.failures import failure_lines
from kvsim.simulation.job import FailureKind


def show_failures(console: Console, runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], scenario: str) -> None:
    """Print a line for each way in which requests failed, given as (policy, ``failures`` of its summary)."""
    if not any(failures for _, failures in runs):
        return
    from kvsim.advice.why.remedies import FAILURES
    from kvsim.experiments.shared_warnings import share_warnings

    lines = [shared.line() for shared in share_warnings((policy, failure_lines(each)) for policy, each in runs)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    kinds = dict.fromkeys(FailureKind(group["kind"]) for _, failures in runs for group in failures)
    for remedy in dict.fromkeys(remedy for kind in kinds for remedy in FAILURES.get(kind, ())[:1]):
        tried = remedy.kvsim.format(scenario=scenario)
        console.print(f"to try: {remedy.what} ({tried})", highlight=False, markup=False, soft_wrap=True)
