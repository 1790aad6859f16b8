"""What a router is told, and what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from policies.content import TextSegment


class Prompt(NamedTuple):
    """What a router sees of a request."""

    request: int
    """The number of the request."""
    text: tuple[TextSegment, ...]
    """The text of the prompt: equal segments are equal text."""
    tokens: int
    """Length of the text, tokens."""
    session: int | None = None
    """The conversation that it belongs to, as its header says; None: it has none."""


class ServerLoad(NamedTuple):
    """What a server says of itself when its router asks."""

    running: int
    """Requests that have a slot."""
    waiting: int
    """Requests that wait for one."""
    usage: float
    """Share of its cache that is taken, from 0 to 1."""


class Router(ABC):
    """Chooses the server of each request, from what the real router knows: never from what the caches hold."""

    sees_ends: ClassVar[bool] = True
    """Whether its choice depends on which requests have ended; servers can run ahead of one that does not look."""
    polls_s: ClassVar[float] = 0.0
    """Seconds between two looks at the servers' own loads; 0: it never looks."""

    def __init__(self, servers: int, rng: np.random.Generator):
        """``servers``: how many there are, at least 1; they are numbered from 0. ``rng``: for what is drawn."""
        self.servers = servers
        self.rng = rng

    def draw(self, among: Sequence[int]) -> int:
        """One of several servers, each as likely as the others."""
        return among[int(self.rng.integers(len(among)))] if len(among) > 1 else among[0]

    @abstractmethod
    def route(self, prompt: Prompt, now: float) -> int:
        """The server that gets the request, which has come at ``now`` seconds."""

    def ended(self, server: int, prompt: Prompt, now: float) -> None:  # noqa: B027  (most look at no ends)
        """A request that it had sent to a server has ended, ``now`` at the latest; told before the next is routed."""

    def polled(self, loads: Sequence[ServerLoad], now: float) -> None:  # noqa: B027  (most poll nothing)
        """What the servers said of themselves ``now``."""


class CountingRouter(Router):
    """Chooses by what it has sent to each server and what of that has not ended."""

    def __init__(self, servers: int, rng: np.random.Generator):
        super().__init__(servers, rng)
        self.in_flight = [0] * servers
        """Requests, by server."""

    def route(self, prompt: Prompt, now: float) -> int:
        server = self.choose(prompt, now)
        self.in_flight[server] += 1
        return server

    @abstractmethod
    def choose(self, prompt: Prompt, now: float) -> int:
        """The server that gets the request."""

    def ended(self, server: int, prompt: Prompt, now: float) -> None:
        self.in_flight[server] -= 1

    def least_loaded(self) -> int:
        """The server with the fewest requests in flight, the first of several."""
        return self.in_flight.index(min(self.in_flight))
