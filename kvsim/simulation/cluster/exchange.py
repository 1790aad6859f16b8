"""The network between servers that prefill and servers that decode: who reads what from whom, and when it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kvsim.simulation.cluster.replica import Replica, call_at
from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.vllm_apart import LOOK_S, ApartVllm


@dataclass(slots=True)
class Moved:
    """What one server has read, or others have read from it; times in seconds, summed up over requests."""

    reads: int = 0
    cells: int = 0
    block_wait_s: float = 0.0
    """From a request's arrival at a decode server until it has been given blocks for its prompt."""
    link_wait_s: float = 0.0
    """From then on until both servers' cards were free."""
    link_s: float = 0.0
    """In which its blocks were on the link."""
    held_s: float = 0.0
    """From a request's end at a prefill server until its blocks had been read."""


class Exchange:
    """Reads follow one another over the network card of each server, in the order in which they begin.

    A read has the cards of both servers to itself, from when both are free. It takes the latency and then its bytes at
    the link's rate; the latency passes beside other reads. All servers must be on one clock.
    """

    def __init__(self, gb_s: float, latency_s: float):
        """``gb_s``: 10**9 bytes/s of each device of a server, in each direction; ``latency_s``: seconds of a read."""
        self._bytes_per_s = gb_s * 1e9
        self._latency_s = latency_s
        self._replicas: list[Replica] = []
        self._block_bytes = 0.0
        """Bytes of a block, which all servers have alike; 0 until it is asked for."""
        self._free_s: list[float] = []
        """When each server's card is free."""
        self.moved: list[Moved] = []
        """By server."""
        self._holders: dict[Job, int] = {}
        """The server that holds the blocks of a job that has ended."""

    def join(self, replica: Replica) -> None:
        """Connect a server, which gets the next number."""
        scheduler = replica.server.scheduler
        assert isinstance(scheduler, ApartVllm)
        scheduler.read = partial(self._read, len(self._replicas))
        self._replicas.append(replica)
        # Once, since it takes longer to work out than a read to simulate.
        self._block_bytes = self._block_bytes or replica.scenario.cache.block_size * replica.scenario.cell_bytes
        self._free_s.append(-math.inf)
        self.moved.append(Moved())

    def hold(self, job: Job, number: int) -> None:
        """The blocks of a job that has ended stay at a server until they have been read."""
        self._holders[job] = number

    def seconds(self, blocks: int, by: int, of: int) -> float:
        """Seconds that blocks are on the link: a server with several devices has as many links."""
        links = min(self._replicas[number].scenario.machine.tensor_parallel for number in (by, of))
        return blocks * self._block_bytes / (self._bytes_per_s * links)

    def _read(self, by: int, job: Job, source: Job, blocks: int, at_s: float) -> float:
        """Read blocks of another server from ``at_s`` on; when they have come, seconds."""
        of = self._holders.pop(source)
        began_s = max(at_s, self._free_s[by], self._free_s[of])
        link_s = self.seconds(blocks, by, of)
        self._free_s[by] = self._free_s[of] = began_s + link_s
        ends_s = began_s + link_s + self._latency_s
        self._tell(of, source, ends_s)
        self._call(by, ends_s)
        cells = blocks * self._replicas[of].scenario.cache.block_size
        for number in (by, of):
            moved = self.moved[number]
            moved.reads += 1
            moved.cells += cells
            moved.link_wait_s += began_s - at_s
            moved.link_s += link_s + self._latency_s
        self.moved[by].block_wait_s += at_s - job.arrival_s
        self.moved[of].held_s += ends_s - source.finished_s
        return ends_s

    def release(self, source: Job, at_s: float) -> None:
        """A request has ended before anything of it was read: the blocks need not be held from ``at_s`` on."""
        self._tell(self._holders.pop(source), source, at_s)

    def _tell(self, of: int, source: Job, at_s: float) -> None:
        """Tell a server that blocks of its need be held no longer than that."""
        scheduler = self._replicas[of].server.scheduler
        assert isinstance(scheduler, ApartVllm)
        scheduler.was_read(source, at_s)
        self._call(of, at_s)

    def _call(self, number: int, at_s: float) -> None:
        """Have a server look, should it have nothing to compute when a read ends."""
        replica = self._replicas[number]
        call_at(replica.env, at_s + LOOK_S, replica.inbox.call)
