"""The requests that a recommendation is tried on: what they need, and several stretches of them that share nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from kvsim.errors import UserError
from kvsim.scenario.named_workloads import named_section
from kvsim.scenario.rate_scaling import scale_rate
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.trace_sections import TraceWorkload
from workloads import Request, Workload

DEFAULT_REQUESTS = 400
"""Requests (of sessions: conversations) in the longest runs, where nobody says."""
_SCOUTS = 3
"""Replications to search with."""
_FEW = 50
"""Requests below which windows of a trace overlap rather than get shorter."""


@dataclass(frozen=True)
class Needs:
    """How long requests are, prompt and output together, in tokens; over all that are tried."""

    requests: int
    longest: int
    p99: int
    p95: int
    mean: float
    reuse: bool
    """Whether some prompts may begin as others did."""


@dataclass(frozen=True)
class Held:
    """Requests in memory, as a workload."""

    requests: tuple[Request, ...]
    users: None = None
    notes: tuple[str, ...] = ()

    @property
    def n_requests(self) -> int:
        """How many."""
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class HeldScenario(Scenario):
    """A scenario whose requests are in memory, so that a trace need not be read for every run."""

    _held: Held = PrivateAttr()

    @classmethod
    def of(cls, scenario: Scenario, held: Held) -> HeldScenario:
        """The scenario with these requests in place of its workload's."""
        made = cls.model_construct(**{name: getattr(scenario, name) for name in Scenario.model_fields})
        made._held = held
        return made

    def build_workload(self) -> Workload:
        """Those requests."""
        return self._held


@dataclass(frozen=True)
class Traffic:
    """A workload, as replications of itself."""

    scenario: Scenario
    """At the load that is asked about, with as many requests as the longest runs have."""
    requests: int
    """In the longest runs; of sessions, conversations."""
    windows: tuple[Held, ...]
    """Of a trace: a window for each replication. Empty: each replication has a seed of its own."""
    replications: int
    """That there are: of a short trace, fewer than were asked for."""
    scouts: tuple[int, ...]
    """Replications to search with: others than those that the best are judged by, where there are any, so that nobody
    is praised for the luck that it was chosen for."""
    needs: Needs
    scalable: bool
    """Whether there is a load that could be changed."""
    note: str
    """What the replications are."""

    def stretch(
        self, scenario: Scenario, replication: int, share: float, factor: float
    ) -> tuple[Scenario, Held | None]:
        """A setting's scenario with the first ``share`` of a replication's requests, at ``factor`` times the load; and
        the requests where they are in memory."""
        count = max(1, round(share * self.requests))
        if self.windows:
            kept = self.windows[replication].requests[:count]
            return scenario, Held(tuple(r._replace(arrival_s=r.arrival_s / factor) for r in kept))
        table = self.scenario.workload.model_dump()
        if self.scalable and factor != 1:
            table = scale_rate(table, factor)
        table[self.scenario.workload.count_key] = count
        return load_scenario(scenario, workload=table, seed=(self.scenario.seed + replication) % 2**63), None


def read_traffic(scenario: Scenario, replications: int, requests: int | None, factor: float) -> Traffic:
    """The traffic of a scenario at ``factor`` times its load. Raises ``UserError`` and ``WorkloadError``.

    Of a trace as many windows are kept as there are replications, evenly spread over it, each from the beginning of a
    request or session on; they share no request where the trace is long enough. Everything else has a seed for each.
    """
    scenario = _resolved(scenario)
    scalable = True
    try:
        table = scale_rate(scenario.workload.model_dump(), factor)
    except UserError:
        if factor != 1:
            raise
        scalable, table = False, scenario.workload.model_dump()
    scenario = load_scenario(scenario, workload=table)
    if isinstance(scenario.workload, TraceWorkload):
        return _of_trace(scenario, replications, requests)
    own = getattr(scenario.workload, scenario.workload.count_key)
    if requests is None:
        requests = DEFAULT_REQUESTS if own is None else min(own, DEFAULT_REQUESTS)
    scenario = load_scenario(scenario, **{f"workload__{scenario.workload.count_key}": requests})
    scouts = tuple(range(replications, replications + _SCOUTS))
    streams = [
        load_scenario(scenario, seed=(scenario.seed + r) % 2**63).build_workload() for r in range(scouts[-1] + 1)
    ]
    first = scenario.seed
    note = (
        f"{replications} replications: seeds {first} to {first + replications - 1}; searched with seeds "
        f"{first + replications} to {first + scouts[-1]}"
    )
    return Traffic(scenario, requests, (), replications, scouts, _needs(streams), scalable, note)


def _resolved(scenario: Scenario) -> Scenario:
    """With named workloads in their own words, so that their load can be changed."""
    table = scenario.workload.model_dump()
    if scenario.workload.kind == "named":
        return load_scenario(scenario, workload=_spelt_out(table))
    if scenario.workload.kind == "mix":
        return load_scenario(scenario, workload={**table, "parts": [_spelt_out(part) for part in table["parts"]]})
    return scenario


def _spelt_out(table: dict[str, Any]) -> dict[str, Any]:
    return named_section(table["name"], table["requests"], table["rate"]) if table["kind"] == "named" else table


def _of_trace(scenario: Scenario, replications: int, requests: int | None) -> Traffic:
    stream = scenario.build_workload()
    total = stream.n_requests
    size = min(total, requests or DEFAULT_REQUESTS)
    apart = total // replications
    if requests is None and size > apart >= _FEW:
        size = apart
    starts = sorted({round(r * (total - size) / max(replications - 1, 1)) for r in range(replications)})
    kept: list[list[Request]] = [[] for _ in starts]
    session: int | None = None
    totals: list[int] = []
    reuse = False
    for at, request in enumerate(stream):
        totals.append(request.prompt_tokens + request.output_tokens)
        reuse = reuse or bool(request.content) or request.session is not None
        fresh = request.session is None or request.session != session
        session = request.session
        for start, window in zip(starts, kept, strict=True):
            # A window begins with a conversation, not within one.
            if at >= start and len(window) < size and (window or fresh):
                window.append(request)
    windows = tuple(_window(window) for window in kept if window)
    if len(windows) == 1:
        note = f"one replication: all {total:,} requests of the trace, so that nothing can be said of chance"
    else:
        overlap = "" if size * len(windows) <= total else ", which overlap"
        note = (
            f"{len(windows)} replications: windows of {size:,} of the trace's {total:,} requests{overlap}; searched "
            "with the first of them"
        )
    scenario = load_scenario(scenario, workload__limit=size)
    scouts = tuple(range(min(_SCOUTS, len(windows))))
    return Traffic(scenario, size, windows, len(windows), scouts, _of_totals(totals, reuse), True, note)


def _window(requests: Sequence[Request]) -> Held:
    first = requests[0].arrival_s
    return Held(tuple(request._replace(arrival_s=max(request.arrival_s - first, 0.0)) for request in requests))


def _needs(streams: Sequence[Workload]) -> Needs:
    totals, reuse = [], False
    for stream in streams:
        for request in stream:
            totals.append(request.prompt_tokens + request.output_tokens)
            reuse = reuse or bool(request.content) or request.session is not None
    return _of_totals(totals, reuse)


def _of_totals(totals: Sequence[int], reuse: bool) -> Needs:
    p95, p99 = np.quantile(totals, (0.95, 0.99), method="higher").tolist()
    return Needs(len(totals), max(totals), int(p99), int(p95), float(np.mean(totals)), reuse)
