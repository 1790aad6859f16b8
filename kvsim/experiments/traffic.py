"""Replications of a workload for a recommendation: several seeds, or windows of a trace, and their request lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from kvsim.errors import UserError, counted
from kvsim.experiments.length_tail import Headroom, headroom
from kvsim.scenario.named_workloads import named_section, scale_rate
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.trace_sections import TraceWorkload
from workloads import Prefixes, Request, Workload

DEFAULT_REQUESTS = 400
"""Default number of requests in the longest runs; for sessions, of conversations."""
_SEARCH_REPLICATIONS = 3
"""Replications used for the search."""
_SHORTEST_WINDOW = 50
"""Windows of a trace overlap rather than become shorter than this many requests."""


@dataclass(frozen=True)
class TrafficSummary:
    """Lengths of the requests of all replications, prompt and output together, in tokens."""

    requests: int
    longest: int
    p99: int
    p95: int
    mean: float
    reuse: bool | None
    """Whether prompts may share prefixes; None if the workload does not say."""
    room: Headroom | None = None
    """How long requests may become that a trace does not have; None for workloads that say how long they are."""

    @property
    def needed(self) -> int:
        """Tokens that a request may need."""
        return self.longest if self.room is None else self.room.tokens


@dataclass(frozen=True)
class OfferedLoad:
    """What arrives per second in the long run, however it is served."""

    requests_per_s: float
    output_tokens_per_s: float
    """Tokens that these requests ask for."""


@dataclass(frozen=True)
class InMemoryRequests:
    """A workload of requests that are in memory."""

    requests: tuple[Request, ...]
    users: int | None = None
    notes: tuple[str, ...] = ()
    prefixes: Prefixes = "tokens"

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class InMemoryScenario(Scenario):
    """A scenario whose requests are in memory, so that a trace need not be read for every run."""

    _requests: InMemoryRequests = PrivateAttr()

    @classmethod
    def of(cls, scenario: Scenario, requests: InMemoryRequests) -> InMemoryScenario:
        """Return the scenario with the given requests instead of its workload's."""
        made = cls.model_construct(**{name: getattr(scenario, name) for name in Scenario.model_fields})
        made._requests = requests
        return made

    def build_workload(self) -> Workload:
        """Return the requests in memory."""
        return self._requests


@dataclass(frozen=True)
class Traffic:
    """Replications of a workload."""

    scenario: Scenario
    """The scenario at the load asked about, with as many requests as the longest runs have."""
    requests: int
    """Number of requests in the longest runs; for sessions, of conversations."""
    windows: tuple[InMemoryRequests, ...]
    """One window per replication for a trace; empty if each replication has its own seed."""
    replications: int
    """Number of replications; a short trace may have fewer than asked for."""
    search_replications: tuple[int, ...]
    """Indices of the replications to search with. Where possible they are not those that the finalists are judged by,
    so that a setting is not judged by the same random numbers that it was selected for."""
    summary: TrafficSummary
    scalable: bool
    """Whether the workload has a load that can be changed."""
    note: str
    """What the replications are, for people."""
    remarks: tuple[str, ...] = ()
    """What was left out of a trace, corrected in it, or is not known of it, one line each."""
    largest_factor: float = math.inf
    """Largest multiple of the load that the requests can make; infinite where they arrive independently.

    A higher load of conversations is one in which they begin closer together. Once all of them are open at the same
    time, it does not rise any further. In a closed loop there are as many users as requests at most.
    """
    offered: OfferedLoad | None = None
    """At the load asked about; None in a closed loop, where requests come as others end, and where all come at once."""
    context: int | None = None
    """The most tokens that a request may need; longer ones are left out. None: all are served."""
    beyond: str = ""
    """What is left out because the model cannot hold it, in words; empty for nothing."""

    @property
    def users(self) -> int | None:
        """Number of users of a closed loop; None if requests arrive by themselves."""
        return getattr(self.scenario.workload, "users", None)

    def part(
        self, scenario: Scenario, replication: int, share: float, factor: float
    ) -> tuple[Scenario, InMemoryRequests | None]:
        """Give ``scenario`` the first ``share`` of a replication's requests at ``factor`` times the load.

        Returns the scenario, and the requests if they are in memory.
        """
        count = max(1, round(share * self.requests))
        if self.windows:
            kept = self.windows[replication].requests[:count]
            requests = tuple(r._replace(arrival_s=r.arrival_s / factor) for r in kept)
            return scenario, InMemoryRequests(requests, prefixes=self.windows[replication].prefixes)
        table = self.scenario.workload.model_dump()
        if self.scalable and factor != 1:
            table = scale_rate(table, factor)
        table[self.scenario.workload.count_key] = count
        scenario = load_scenario(scenario, workload=table, seed=(self.scenario.seed + replication) % 2**63)
        return scenario, None if self.context is None else _within(scenario.build_workload(), self.context)

    def within(self, context: int | None, whose: str) -> Traffic:
        """The traffic without requests that need more tokens than a model's context, with what is said of these.

        Raises ``UserError`` if none are left.
        """
        if context is None or self.summary.longest <= context:
            return self
        streams: Sequence[Workload] = self.windows or [
            load_scenario(self.scenario, seed=(self.scenario.seed + r) % 2**63).build_workload()
            for r in range(self.replications)
        ]
        needs = [(r.prompt_tokens, r.prompt_tokens + r.output_tokens) for stream in streams for r in stream]
        long = [prompt for prompt, needed in needs if needed > context]
        kept = [needed for _, needed in needs if needed <= context]
        prompts = sum(prompt >= context for prompt in long)
        said = (
            f"{len(long) / len(needs):.1%} of the requests ({len(long):,} of {len(needs):,}) need more than the "
            f"{context:,} tokens of {whose}, {prompts:,} for the prompt alone: no setting can serve them; what follows "
            "is of the rest"
        )
        if not kept:
            raise UserError(said.replace("; what follows is of the rest", ""))
        windows = tuple(_within(window, context) for window in self.windows)
        summary = _summary(kept, bool(self.summary.reuse), "unknown" if self.summary.reuse is None else "tokens")
        return replace(self, windows=windows, summary=summary, context=context, beyond=said)


def read_traffic(
    scenario: Scenario, replications: int, requests: int | None, factor: float, most: int = DEFAULT_REQUESTS
) -> Traffic:
    """Prepare replications of a scenario's workload at ``factor`` times its load.

    Each replication of a trace is a window of it; windows are evenly spread, begin with a request or session, and share
    no request if the trace is long enough. Replications of any other workload differ by seed. ``requests``: in each;
    None: as many as there are, but at most ``most``. Raises ``UserError`` and ``WorkloadError``.
    """
    scenario = _with_named_workloads_resolved(scenario)
    scalable = True
    try:
        table = scale_rate(scenario.workload.model_dump(), factor)
    except UserError:
        if factor != 1:
            raise
        scalable, table = False, scenario.workload.model_dump()
    scenario = load_scenario(scenario, workload=table)
    if isinstance(scenario.workload, TraceWorkload):
        return _of_trace(scenario, replications, requests, most)
    own = getattr(scenario.workload, scenario.workload.count_key)
    if requests is None:
        requests = most if own is None else min(own, most)
    changes: dict[str, Any] = {f"workload__{scenario.workload.count_key}": requests}
    scenario = load_scenario(scenario, **changes)
    search = tuple(range(replications, replications + _SEARCH_REPLICATIONS))
    streams = [
        load_scenario(scenario, seed=(scenario.seed + r) % 2**63).build_workload() for r in range(search[-1] + 1)
    ]
    first = scenario.seed
    note = (
        f"{counted(replications, 'replication')}: {_seeds(first, first + replications - 1)}; searched with "
        f"{_seeds(first + replications, first + search[-1])}"
    )
    largest = min(_largest_factor(stream, stream.users) for stream in streams)
    summary = _summarise(streams)
    offered = _offered(streams) if scalable else None
    return Traffic(
        scenario, requests, (), replications, search, summary, scalable, note, largest_factor=largest, offered=offered
    )


def _within(stream: Workload, context: int) -> InMemoryRequests:
    """The requests of a stream that need no more tokens than a context."""
    kept = tuple(r for r in stream if r.prompt_tokens + r.output_tokens <= context)
    return InMemoryRequests(kept, users=stream.users, prefixes=stream.prefixes)


def _seeds(first: int, last: int) -> str:
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def _with_named_workloads_resolved(scenario: Scenario) -> Scenario:
    """The scenario with named workloads replaced by their sections, so that their load can be changed."""
    table = scenario.workload.model_dump()
    if scenario.workload.kind == "named":
        return load_scenario(scenario, workload=_resolved(table))
    if scenario.workload.kind == "mix":
        return load_scenario(scenario, workload={**table, "parts": [_resolved(part) for part in table["parts"]]})
    return scenario


def _resolved(table: dict[str, Any]) -> dict[str, Any]:
    return named_section(table["name"], table["requests"], table["rate"]) if table["kind"] == "named" else table


def _of_trace(scenario: Scenario, replications: int, requests: int | None, most: int) -> Traffic:
    stream = scenario.build_workload()
    total = stream.n_requests
    size = min(total, requests or most)
    disjoint = total // replications
    if requests is None and size > disjoint >= _SHORTEST_WINDOW:
        size = disjoint
    starts = sorted({round(r * (total - size) / max(replications - 1, 1)) for r in range(replications)})
    parts: list[list[Request]] = [[] for _ in starts]
    session: int | None = None
    lengths: list[int] = []
    reuse = False
    for index, request in enumerate(stream):
        lengths.append(request.prompt_tokens + request.output_tokens)
        reuse = reuse or bool(request.content) or request.session is not None
        begins_session = request.session is None or request.session != session
        session = request.session
        for start, part in zip(starts, parts, strict=True):
            # A window begins with a conversation, not within one.
            if index >= start and len(part) < size and (part or begins_session):
                part.append(request)
    windows = tuple(_window(part, stream.prefixes) for part in parts if part)
    if len(windows) == 1:
        note = f"one replication: all {total:,} requests of the trace, so nothing is known about chance"
    else:
        overlap = "" if size * len(windows) <= total else ", which overlap"
        note = (
            f"{len(windows)} replications: windows of {size:,} of the trace's {total:,} requests{overlap}; searched "
            "with the first of them"
        )
    unknown = (f"prefix hits: {UNKNOWN_PREFIXES}; it is assumed that none do",) if stream.prefixes == "unknown" else ()
    remarks = (*stream.notes, *unknown)
    scenario = load_scenario(scenario, workload__limit=size)
    search = tuple(range(min(_SEARCH_REPLICATIONS, len(windows))))
    return Traffic(
        scenario,
        size,
        windows,
        len(windows),
        search,
        _summary(lengths, reuse, stream.prefixes, of_trace=True),
        True,
        note,
        remarks,
        min(_largest_factor(window.requests, None) for window in windows),
        _offered(windows),
    )


def _offered(streams: Iterable[Workload]) -> OfferedLoad | None:
    """What arrives per second: requests over the time in which requests without a session, and sessions, begin."""
    requests = tokens = seconds = 0.0
    for stream in streams:
        if stream.users is not None:
            return None
        starts: dict[int | tuple[int], float] = {}
        n, asked = 0, 0
        for request in stream:
            n, asked = n + 1, asked + request.output_tokens
            # Requests without a session are told from sessions by a key of another type.
            starts.setdefault((request.id,) if request.session is None else request.session, request.arrival_s)
        # Between the first and the last of k starts lie k - 1 intervals.
        share = (len(starts) - 1) / len(starts)
        requests, tokens = requests + share * n, tokens + share * asked
        seconds += max(starts.values()) - min(starts.values())
    return OfferedLoad(requests / seconds, tokens / seconds) if seconds > 0 else None


def _largest_factor(requests: Iterable[Request], users: int | None) -> float:
    """Largest multiple of the load that the requests can make (see ``Traffic``), at least 1."""
    starts: dict[int, float] = {}
    alone, thinking_s = 0, 0.0
    for request in requests:
        if request.session is None:
            alone += 1
        else:
            starts.setdefault(request.session, request.arrival_s)
            thinking_s += request.think_s
    if users is not None:
        return max((alone + len(starts)) / users, 1.0)
    if not thinking_s:
        return math.inf
    # All conversations are open at once where they begin within the mean time that one lasts.
    return max((max(starts.values()) - min(starts.values())) / (thinking_s / len(starts)), 1.0)


def _window(requests: Sequence[Request], prefixes: Prefixes) -> InMemoryRequests:
    first = requests[0].arrival_s
    return InMemoryRequests(
        tuple(request._replace(arrival_s=max(request.arrival_s - first, 0.0)) for request in requests),
        prefixes=prefixes,
    )


def _summarise(streams: Sequence[Workload]) -> TrafficSummary:
    lengths, reuse = [], False
    prefixes: Prefixes = "unknown" if any(stream.prefixes == "unknown" for stream in streams) else "tokens"
    for stream in streams:
        for request in stream:
            lengths.append(request.prompt_tokens + request.output_tokens)
            reuse = reuse or bool(request.content) or request.session is not None
    return _summary(lengths, reuse, prefixes)


def _summary(lengths: Sequence[int], reuse: bool, prefixes: Prefixes, of_trace: bool = False) -> TrafficSummary:
    p95, p99 = np.quantile(lengths, (0.95, 0.99), method="higher").tolist()
    known = None if prefixes == "unknown" else reuse
    room = headroom(lengths) if of_trace else None
    return TrafficSummary(len(lengths), max(lengths), int(p99), int(p95), float(np.mean(lengths)), known, room)
