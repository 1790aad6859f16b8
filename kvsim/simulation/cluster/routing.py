"""A router at work: what it is told of the servers that it chooses among, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import simpy

from kvsim.scenario.content import PRIVATE
from kvsim.simulation.cluster.replica import Replica, call_at
from kvsim.simulation.cluster.routers import Prompt, Router
from kvsim.simulation.cluster.routers.clairvoyant import Truth
from policies import Content
from policies.content import TextSegment
from workloads import Request


class Routing:
    """Asks a router for the server of each request, and tells it of ends and loads when it would hear of them."""

    def __init__(
        self, env: simpy.Environment, router: Callable[[Truth], Router], look: Callable[[], Sequence[Replica]]
    ):
        """``env``: the clients' clock; ``router`` makes one, which may look at what servers really hold; ``look`` lets
        servers run until now, and gives those among which the router chooses."""
        self._env = env
        self._look = look
        self._router = router(self._truth)
        self._prompts: dict[int, Prompt] = {}
        """Requests that have not ended, where the router hears of their ends."""
        self._ends: list[tuple[float, int, Prompt]] = []
        """Ends that the router has not heard of: when, at which server, and of which request; a heap."""
        self._polls = False
        """Whether the router will look at the servers' loads again."""

    @property
    def sees_ends(self) -> bool:
        """Whether the router's choice depends on which requests have ended."""
        return self._router.sees_ends

    def choose(self, request: Request) -> int:
        """The number of the server, among those of the router, that gets a request which has come now."""
        now, router = self._env.now, self._router
        prompt = prompt_of(request)
        chosen = router.route(prompt, now)
        if router.sees_ends:
            self._prompts[request.id] = prompt
        return chosen

    def poll_soon(self) -> None:
        """A request has been given to its server: look at the loads from now on, if the router does."""
        if self._router.polls_s and not self._polls:
            self._polls = True
            call_at(self._env, self._env.now + self._router.polls_s, self._poll)

    def ended(self, number: int, request: int, at_s: float) -> None:
        """A request ends at a server at ``at_s``, which the router will hear of then."""
        prompt = self._prompts.pop(request, None)
        if prompt is not None:
            heappush(self._ends, (at_s, number, prompt))

    def tell_ends(self) -> None:
        """Tell the router of the requests that have ended by now."""
        ends, now = self._ends, self._env.now
        while ends and ends[0][0] <= now:
            at_s, number, prompt = heappop(ends)
            self._router.ended(number, prompt, at_s)

    def _truth(self, prompt: Prompt) -> list[tuple[int, int]]:
        """For each server the tokens of a prompt that its cache holds, and those of requests that wait there."""
        content = Content(prompt.text)
        return [replica.truth(content, prompt.tokens) for replica in self._look()]

    def _poll(self) -> None:
        """Let the router look at the servers' loads, and again as long as there is any.

        A server that is in the middle of a step says what will be when it ends.
        """
        servers = self._look()
        self.tell_ends()
        loads = [replica.load for replica in servers]
        self._router.polled(loads, self._env.now)
        self._polls = any(load.running or load.waiting for load in loads)
        if self._polls:
            call_at(self._env, self._env.now + self._router.polls_s, self._poll)


def prompt_of(request: Request) -> Prompt:
    """What a router sees of a request."""
    left, text = request.prompt_tokens, list[TextSegment]()
    for source, start, n in request.content or ((PRIVATE + request.id, 0, left),):
        if left <= 0:
            break
        text.append((source, start, min(n, left)))
        left -= n
    return Prompt(request.id, tuple(text), request.prompt_tokens, request.session)
