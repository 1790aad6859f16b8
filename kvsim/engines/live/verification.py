"""``kvsim recommend --verify``: start the recommended server, send it the traffic, and see whether the level is met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.slo import SHARES, Bound
from kvsim.advice.recommend.trials import latencies_and_shares
from kvsim.costs.load_profile import load_profile
from kvsim.engines.live.address import Address
from kvsim.engines.live.client import Client
from kvsim.engines.live.held import CheckedBound, Held, pace_of, statistics_of
from kvsim.engines.live.processor_share import ProcessorWatch
from kvsim.engines.live.prompts import Prompts, Vocabulary
from kvsim.engines.live.settings import ServerSettings
from kvsim.engines.live.started_server import START_S, ServerCommand, started
from kvsim.engines.live.traffic import Exchange, send_traffic
from kvsim.engines.live.vocabulary import find_vocabulary
from kvsim.engines.recordings.prediction import simulate
from kvsim.engines.recordings.run_pace import step_times
from kvsim.engines.recordings.seen_steps import SeenRequest, seen_steps
from kvsim.errors import UserError, counted
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.model.durations import about
from kvsim.model.engine_versions import LLAMACPP_B4666
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.set_up import build_policy, cost_model
from workloads import Workload

REQUESTS = 60
"""Requests that are sent unless another number is asked for."""
_SILENCE_S = 120.0
"""Seconds of silence after which a request has failed."""
_SEND_S = 600.0
"""Seconds that the sending may take beyond the last arrival."""


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
    held: Held
    first_error: str | None
    """Why the first request failed that did."""

    @property
    def met(self) -> bool | None:
        """Whether the service level was met; None: no verdict, since other work kept the server from its processors."""
        return self.held.met

    @property
    def checked(self) -> tuple[CheckedBound, ...]:
        """Each bound of the service level."""
        return self.held.checked

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds."""
        told = {key: getattr(self, key) for key in ("place", "url", "engine", "requests", "seconds", "first_error")}
        return {**told, "command": list(self.typed), **self.held.to_dict()}


def verify(
    found: Recommendation,
    command: ServerCommand,
    *,
    requests: int = REQUESTS,
    start_s: float = START_S,
    told: Callable[[str], object] = lambda line: None,
    progress: Callable[[float], None] | None = None,
) -> Verification:
    """Start the best setting that the command's engine has, and send it the first requests at the load asked about.

    What is predicted is of the same requests. ``start_s``: seconds in which the server has to be ready. ``told`` hears
    how long it will take, and ``progress`` the share of requests that have ended. Raises ``UserError``,
    ``SendingStopped`` among them, in one line.
    """
    place, finalist = _chosen(found, command)
    scenario, sent = _traffic(found, finalist, requests)
    flags = finalist.candidate.flags
    told(f"starting {command.words[0]}")
    with started(command, flags, start_s=start_s) as (settings, process):
        server = ServerTried(command.address, settings, process)
        tried = try_server(server, scenario, sent, found.slo.bounds, told, progress)
    return Verification(
        place,
        tuple(command.with_flags(flags)),
        command.address.url,
        settings.engine,
        len(tried.exchanges),
        max(e.answer.done_s for e in tried.exchanges) - min(e.answer.sent_s for e in tried.exchanges),
        tried.held,
        tried.first_error,
    )


class ServerTried(NamedTuple):
    """A server that is sent traffic."""

    address: Address
    settings: ServerSettings
    process: int | None
    """Its process on this machine, as far as that is known."""
    key: str | None = None


class Tried(NamedTuple):
    """What a server did with traffic, beside what was predicted."""

    exchanges: list[Exchange]
    held: Held

    @property
    def first_error(self) -> str | None:
        """Why the first request failed that did."""
        errors = (exchange.error for exchange in sorted(self.exchanges, key=lambda e: e.answer.sent_s))
        return next(filter(None, errors), None)


def try_server(
    server: ServerTried,
    scenario: Scenario,
    sent: InMemoryRequests,
    bounds: Sequence[Bound] = (),
    told: Callable[[str], object] = lambda line: None,
    progress: Callable[[float], None] | None = None,
) -> Tried:
    """Send requests to a server, and hold what it did against the prediction for it; ``scenario`` is how it is set.

    ``told``, ``progress``: as for ``verify``. Raises ``UserError``.
    """
    costs = cost_model(scenario, load_profile(scenario.machine.profile, scenario.folder))
    before = simulate(scenario, costs, sent).summary
    told(f"sending {counted(sent.n_requests, 'request')} to {server.address}: {about(before['makespan_s'])}")
    watch = ProcessorWatch(server.process)
    exchanges = _send(server, sent, scenario.seed, progress)
    processors = watch.share()
    predicted, measured = latencies_and_shares(before), measures_of(exchanges)
    steps = seen_steps([_seen(e) for e in exchanges if e.error is None], scenario)
    slowdown = step_times(steps, build_policy(scenario).kernel, costs).slowdown
    pace = pace_of(slowdown, predicted, measured)
    at_pace = {} if pace is None else latencies_and_shares(simulate(scenario, costs, sent, pace=pace).summary)
    return Tried(exchanges, Held(predicted, measured, at_pace, pace, processors, bounds))


def first_requests(workload: Workload, most: int) -> InMemoryRequests:
    """The first requests of a workload."""
    return InMemoryRequests(tuple(islice(workload, most)), users=workload.users, prefixes=workload.prefixes)


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
    return scenario, first_requests(workload, most)


def _send(
    server: ServerTried, sent: InMemoryRequests, seed: int, progress: Callable[[float], None] | None
) -> list[Exchange]:
    """Send the requests and wait for their ends. Raises ``UserError``."""
    settings = server.settings

    def client() -> Client:
        return Client(server.address, settings.api, settings.model, key=server.key, timeout_s=_SILENCE_S)

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


def _seen(exchange: Exchange) -> SeenRequest:
    """A request that was answered, as its client saw it."""
    request, answer = exchange.request, exchange.answer
    prompt_ms = (answer.result.get("timings") or {}).get("prompt_ms")
    return SeenRequest(
        answer.prompt_tokens or request.prompt_tokens,
        answer.cached_tokens or 0,
        answer.sent_s,
        answer.token_s,
        answer.result.get("id_slot"),
        None if prompt_ms is None else prompt_ms / 1e3,
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
    measures = statistics_of(values)
    truncated = sum(bool(exchange.answer.result.get("truncated")) for exchange in exchanges)
    failed = len(exchanges) - len(answers) - truncated
    for name, count in (("failed", failed), ("truncated", truncated)):
        measures[SHARES[name]] = max(count, 0) / len(exchanges) if exchanges else None
    return measures
