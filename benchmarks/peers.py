"""How fast other simulators are, scaled to this machine; they are not run here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WHERE = "in autumn 2026 on two cores of an AMD EPYC, medians of 3"
BARE_THERE = 1.52e6
"""Timeouts per second of bare SimPy, one process, on the machine of these figures."""


@dataclass(frozen=True)
class Peer:
    """Another simulator on 10,000 requests like those of the Azure conversation trace, as measured ``WHERE``."""

    name: str
    requests_per_s: float
    tokens_per_s: float | None
    """Tokens of prompts and answers; None: not measured."""
    peak_mb: float | None


PEERS = (
    Peer("BLIS, cache-signal delay 0", 3890, 5.6e6, None),
    Peer("splitwise-sim, light load", 1553, 2.27e6, 207),
    Peer("TokenSim, cost model stubbed", 1034, 1.42e6, 504),
    Peer("Vidur, vLLM scheduler, no plots, after its start", 709, None, 987),
    Peer("Vidur, vLLM scheduler, no plots", 560, 0.76e6, 987),
    Peer("BLIS, defaults, 24,000 blocks", 547, 0.78e6, 407),
    Peer("Vidur, default output", 288, 0.39e6, 987),
    Peer("splitwise-sim, overloaded", 14, 0.02e6, 209),
)


def machines(bare: Sequence[float]) -> float:
    """How many times as fast this machine is as that of the figures, by bare SimPy's timeouts per second here."""
    return statistics.median(bare) / BARE_THERE
