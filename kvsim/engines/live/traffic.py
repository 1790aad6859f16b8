"""Sending a workload to a server: who asks when, as in the simulator (``kvsim/simulation/arrivals.py``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvsim.engines.live.bounded import ServerFault
from kvsim.engines.live.client import Answer, Client
from kvsim.engines.live.prompts import Prompt, Prompts
from kvsim.errors import UserError, counted
from workloads import Request, Workload
from workloads.request import conversations

_IN_A_ROW = 3
"""Failures after which a server is given up: of the first requests for any reason, of later ones for its silence."""
_TRIES, _LEAST_WAIT_S = 8, 0.05
"""How often a request is sent that the server wants to be asked for again later, and how long it waits at least."""


@dataclass(frozen=True)
class Exchange:
    """A request as it was sent, and what came back; times in seconds since the sending began."""

    request: Request
    prompt: Prompt
    answer: Answer
    due_s: float
    """When it was to be sent."""
    after: int | None = None
    """The request whose end it waited for, and then for ``Request.think_s``; None if it came by the clock."""

    @property
    def error(self) -> str | None:
        """Why it failed or was answered other than asked; None if it was answered in full."""
        answer, asked = self.answer, self.request.output_tokens
        if answer.error is not None:
            return answer.error
        if answer.output_tokens == asked:
            return None
        why = "; the server cut the answer" if answer.result.get("truncated") else ""
        return f"{answer.output_tokens} of {counted(asked, 'token')} came back{why}"


class SendingStopped(UserError):
    """The sending ended before its end. The message is one line."""

    def __init__(self, message: str, exchanges: Sequence[Exchange], *, interrupted: bool = False):
        super().__init__(message)
        self.exchanges = list(exchanges)
        """What had ended by then."""
        self.interrupted = interrupted
        """Whether the user stopped it."""


OnEnd = Callable[[Exchange], None]


def send_traffic(
    client: Callable[[], Client],
    workload: Workload,
    prompts: Prompts,
    *,
    limit_s: float,
    on_end: OnEnd | None = None,
) -> list[Exchange]:
    """Send all requests of a workload and wait for their ends, in the order in which they ended.

    ``client`` makes the client. A request that fails is kept, with its error. Raises ``SendingStopped``: the server is
    gone or wants a key, refuses the first three requests, is silent for three in a row, the sending takes longer than
    ``limit_s``, or the user presses Ctrl-C.
    """
    opened, ended = client(), list[Exchange]()

    def note(exchange: Exchange) -> None:
        ended.append(exchange)
        if on_end is not None:
            on_end(exchange)

    async def run() -> None:
        async with opened, asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            _Sending(opened, prompts, note, limit_s).begin(group, workload)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        raise SendingStopped("interrupted", ended, interrupted=True) from None
    except TimeoutError:
        stopped = f"{opened.address}: not done after {limit_s:g} s"
    except ExceptionGroup as failed:
        fault = failed.exceptions[0]
        if not isinstance(fault, ServerFault):
            raise fault from None
        stopped = str(fault)
    else:
        return ended
    raise SendingStopped(stopped, ended)


class _Sending:
    """A workload on its way."""

    def __init__(self, client: Client, prompts: Prompts, on_end: OnEnd, limit_s: float):
        self._client, self._prompts, self._on_end = client, prompts, on_end
        self._clock, self._limit_s = time.monotonic(), limit_s
        self._answered = False
        self._row = 0
        """Failures since the last success."""
        self._silent = 0
        """Latest failures in a row for which the server was silent."""

    def begin(self, group: asyncio.TaskGroup, workload: Workload) -> None:
        """Start the clients: one for arrivals by the clock, or one for each user of a closed loop."""
        talks = conversations(workload)
        if workload.users is None:
            group.create_task(self._arrivals(group, talks))
        else:
            for _ in range(workload.users):
                group.create_task(self._user(chain.from_iterable(talks), None, 0.0))

    async def _arrivals(self, group: asyncio.TaskGroup, talks: Iterator[list[Request]]) -> None:
        """Every request at its time; of a session the first turn, the others follow it."""
        for first, *later in talks:
            await self._sleep_until(first.arrival_s)
            group.create_task(self._talk(first, later))

    async def _talk(self, first: Request, later: Sequence[Request]) -> None:
        """A session, or a single request."""
        exchange = await self._ask(first, first.arrival_s, None)
        await self._user(iter(later), first.id, exchange.answer.done_s)

    async def _user(self, requests: Iterator[Request], before: int | None, ended_s: float) -> None:
        """One request after the other, each ``think_s`` after the end of the one before."""
        for request in requests:
            due_s = ended_s + request.think_s
            await self._sleep_until(due_s)
            exchange = await self._ask(request, due_s, before)
            before, ended_s = request.id, exchange.answer.done_s

    async def _sleep_until(self, at_s: float) -> None:
        wait = at_s - (time.monotonic() - self._clock)
        if wait > 0:
            await asyncio.sleep(wait)

    async def _ask(self, request: Request, due_s: float, after: int | None) -> Exchange:
        prompt = self._prompts.of(request)
        for tries in range(1, _TRIES + 1):
            answer = await self._client.ask(prompt.completion_request(request), self._clock)
            answer.tries, wait_s = tries, answer.retry_after_s
            if wait_s is None or tries == _TRIES:
                break
            if answer.done_s + wait_s >= self._limit_s:
                answer.error = (
                    f"{answer.error}; it wants to be asked again in {wait_s:,.0f} s, after the end of --limit"
                )
                break
            await asyncio.sleep(max(wait_s, _LEAST_WAIT_S))
        self._prompts.answered(request, answer)
        exchange = Exchange(request, prompt, answer, due_s, after)
        self._on_end(exchange)
        self._judge(exchange)
        return exchange

    def _judge(self, exchange: Exchange) -> None:
        """Raises ``ServerFault`` if asking on is of no use."""
        error = exchange.answer.error
        if error is None:
            self._answered, self._row, self._silent = True, 0, 0
            return
        self._row += 1
        self._silent = self._silent + 1 if exchange.answer.timed_out else 0
        if self._silent == _IN_A_ROW or (self._row == _IN_A_ROW and not self._answered):
            raise ServerFault(f"{self._client.address}: {_IN_A_ROW} requests in a row failed: {error}")
