"""``kvsim recommend --verify``: start the recommended server, send it the traffic, and see whether the level is met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvsim.advice.memory.engine_flags import Flags
from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.slo import LATENCY_MEASURES, SHARES, Bound, Slo
from kvsim.advice.recommend.trials import run_requests
from kvsim.engines.live.client import Client
from kvsim.engines.live.prompts import Prompts, Vocabulary
from kvsim.engines.live.settings import ServerSettings
from kvsim.engines.live.started_server import START_S, ServerCommand, started
from kvsim.engines.live.traffic import Exchange, send_traffic
from kvsim.engines.live.vocabulary import find_vocabulary
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.model.engine_versions import LLAMACPP_B4666

REQUESTS = 60
"""Requests that are sent unless another number is asked for."""
_SILENCE_S = 120.0
"""Seconds of silence after which a request has failed."""
_SEND_S = 600.0
"""Seconds that the sending may take beyond the last arrival."""


class CheckedBound(NamedTuple):
    """A bound of the service level, predicted and measured; seconds, or shares between 0 and 1."""

    bound: Bound
    predicted: float | None
    measured: float | None

    @property
    def met(self) -> bool:
        """Whether the bound was met by what was measured."""
        return self.bound.met(self.measured)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        said = {"measure": self.bound.measure, "limit": self.bound.limit, "text": self.bound.text or None}
        return {**said, "predicted": self.predicted, "measured": self.measured, "met": self.met}


@dataclass(frozen=True)
class Verification:
    """What the recommended server did with the traffic."""

    place: int
    """The setting's place among the best."""
    typed: tuple[str, ...]
    """The words of the command that started the server."""
    url: str
    engine: str
    """What the server says that it is."""
    requests: int
    seconds: float
    """From the first request to the last answer."""
    checked: tuple[CheckedBound, ...]
    first_error: str | None
    """Why the first request failed that did."""

    @property
    def met(self) -> bool:
        """Whether every bound was met."""
        return all(each.met for each in self.checked)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds."""
        told = {
            key: getattr(self, key) for key in ("place", "url", "engine", "requests", "seconds", "met", "first_error")
        }
        return {**told, "command": list(self.typed), "bounds": [each.to_dict() for each in self.checked]}


def verify(
    found: Recommendation,
    command: ServerCommand,
    *,
    requests: int = REQUESTS,
    start_s: float = START_S,
    progress: Callable[[float], None] | None = None,
) -> Verification:
    """Start the best setting that the command's engine has, and send it the first requests at the load asked about.

    What is predicted is of the same requests. ``start_s``: seconds in which the server has to be ready. ``progress`` is
    told the share of requests that have ended. Raises ``UserError``, ``SendingStopped`` among them, in one line.
    """
    place, finalist = _chosen(found, command)
    scenario, sent = _traffic(found, finalist, requests)
    flags = finalist.candidate.flags
    predicted = run_requests(scenario, sent, open_loop=found.traffic.scalable and sent.users is None)
    with started(command, flags, start_s=start_s) as settings:
        exchanges = _send(command, settings, sent, scenario.seed, progress)
    return _verification(place, flags, command, settings, found.slo, predicted.measures, exchanges)


def _chosen(found: Recommendation, command: ServerCommand) -> tuple[int, Finalist]:
    """The best setting whose options the command takes, and its place. Raises ``UserError``."""
    for place, finalist in enumerate(found.best, 1):
        c = finalist.candidate
        early = c.scenario.engine == LLAMACPP_B4666
        if c.flags and not early and command.engine in (None, c.engine):
            return place, finalist
    of = f" of {command.words[0]}" if command.engine else ""
    raise UserError(f"--verify: nothing{of} is among the best, so that there is nothing to start")


def _traffic(found: Recommendation, finalist: Finalist, most: int) -> tuple[Any, InMemoryRequests]:
    """The setting's scenario, and the first requests of its first replication."""
    scenario, requests = found.traffic.part(finalist.candidate.scenario, 0, 1.0, 1.0)
    workload = scenario.build_workload() if requests is None else requests
    return scenario, InMemoryRequests(tuple(islice(workload, most)), users=workload.users, prefixes=workload.prefixes)


def _send(
    command: ServerCommand,
    settings: ServerSettings,
    sent: InMemoryRequests,
    seed: int,
    progress: Callable[[float], None] | None,
) -> list[Exchange]:
    """Send the requests and wait for their ends. Raises ``UserError``."""

    def client() -> Client:
        return Client(command.address, settings.api, settings.model, timeout_s=_SILENCE_S)

    async def vocabulary() -> Vocabulary:
        async with client() as opened:
            return await find_vocabulary(opened, settings)

    ended = 0

    def note(exchange: Exchange) -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended / sent.n_requests)

    # Its few questions also wake the server up.
    prompts = Prompts(seed, asyncio.run(vocabulary()))
    limit_s = max(request.arrival_s for request in sent) + _SEND_S
    return send_traffic(client, sent, prompts, limit_s=limit_s, on_end=note)


def _verification(
    place: int,
    flags: Flags,
    command: ServerCommand,
    settings: ServerSettings,
    slo: Slo,
    predicted: dict[str, float | None],
    exchanges: Sequence[Exchange],
) -> Verification:
    measured = measures_of(exchanges)
    errors = (exchange.error for exchange in sorted(exchanges, key=lambda e: e.answer.sent_s))
    return Verification(
        place,
        tuple(command.with_flags(flags)),
        command.address.url,
        settings.engine,
        len(exchanges),
        max(e.answer.done_s for e in exchanges) - min(e.answer.sent_s for e in exchanges),
        tuple(CheckedBound(b, predicted.get(b.measure), measured.get(b.measure)) for b in slo.bounds),
        next(filter(None, errors), None),
    )


def measures_of(exchanges: Sequence[Exchange]) -> dict[str, float | None]:
    """Latencies in seconds and shares of requests, as the measures of a run are named; None without any value.

    Latencies are of the requests that were answered in full, as in a run.
    """
    answers = [exchange.answer for exchange in exchanges if exchange.error is None]
    values: dict[str, list[float | None]] = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers],
        "e2e": [answer.e2e_s for answer in answers],
    }
    measures: dict[str, float | None] = {}
    for measure in LATENCY_MEASURES:
        latency, statistic = measure.split("_")
        known = [value for value in values[latency] if value is not None]
        measures[measure] = _statistic(known, statistic) if known else None
    truncated = sum(bool(exchange.answer.result.get("truncated")) for exchange in exchanges)
    failed = len(exchanges) - len(answers) - truncated
    for name, count in (("failed", failed), ("truncated", truncated)):
        measures[SHARES[name]] = max(count, 0) / len(exchanges) if exchanges else None
    return measures


def _statistic(values: Sequence[float], name: str) -> float:
    return float(np.mean(values) if name == "mean" else np.percentile(values, int(name.removeprefix("p"))))
