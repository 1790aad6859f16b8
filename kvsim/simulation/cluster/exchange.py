"""The network between servers that prefill and servers that decode: who reads what from whom, and when it has come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvsim.costs.devices import device_named
from kvsim.errors import UserError
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.cluster.replica import Replica, call_at
from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.vllm_apart import LOOK_S, ApartVllm
from policies import Policy
from policies.layouts.paged import PagedPolicy


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


def exchange_of(scenario: Scenario, policies: Sequence[Policy]) -> Exchange:
    """The network of a scenario's servers; ``policies``: one like that of each. Raises ``UserError``."""
    servers = scenario.servers
    for server, policy in zip(servers, policies, strict=True):
        fault = None
        if server.server.scheduler != "vllm":
            fault = f"server.scheduler is {server.server.scheduler}; prefill and decode apart are as in vllm"
        elif not isinstance(policy, PagedPolicy) or policy.window is not None or policy.chunks is not None:
            fault = f"{policy.name}: blocks of full attention, and none in host memory, are read from other servers"
        elif server.cache.host_cells:
            fault = "cache.host_cells: there is no tier behind blocks that are read from other servers"
        elif server.machine.expert_parallel > 1:
            fault = "machine.expert_parallel: servers of which some prefill do not divide their experts"
        elif (server.cache.block_size, server.cell_bytes) != (servers[0].cache.block_size, servers[0].cell_bytes):
            fault = "cache.block_size, cache.type_k, cache.type_v: servers that read each other's blocks have the same"
        if fault is not None:
            raise UserError(f"{scenario.name}: cluster.servers: {fault}")
    return Exchange(_gb_s(scenario), scenario.cluster.link_latency_s)


def _gb_s(scenario: Scenario) -> float:
    """What is said of the link, or its devices' data sheets, of which the slowest counts. Raises ``UserError``."""
    stated, named = scenario.cluster.link_gb_s, {server.machine.device for server in scenario.servers}
    if stated is not None:
        return stated
    if None in named:
        raise UserError(f"{scenario.name}: cluster.link_gb_s: say how fast the link is, since no device is named")
    return min(device_named(name).link_gb_s for name in named if name is not None)


def assumed_link(scenario: Scenario) -> str:
    """What is assumed of the link because the scenario does not say, in words; empty where it says everything."""
    said, devices = scenario.cluster.model_fields_set, scenario.servers
    names = ", ".join(dict.fromkeys(str(server.machine.device) for server in devices))
    rate = f"{_gb_s(scenario):g} GB/s of each device in each direction, as between devices of one server ({names})"
    words = {"link_gb_s": rate, "link_latency_s": "no latency"}
    left = [f"{words[key]} (cluster.{key})" for key in words if key not in said]
    return f"assumed of the link between servers: {', '.join(left)}" if left else ""


def apart_figures(scenario: Scenario, exchange: Exchange) -> dict[str, Any]:
    """What was read by all servers together, ready for JSON; times in seconds, summed up over requests."""
    readers = [m for m, role in zip(exchange.moved, scenario.cluster.roles, strict=True) if role == "decode"]
    holders = [m for m, role in zip(exchange.moved, scenario.cluster.roles, strict=True) if role == "prefill"]
    return {
        "decode_router": scenario.cluster.decode_router,
        "link_gb_s": _gb_s(scenario),
        "link_latency_s": scenario.cluster.link_latency_s,
        "reads": sum(moved.reads for moved in readers),
        "bytes": int(sum(moved.cells for moved in readers) * scenario.servers[0].cell_bytes),
        "block_wait_s": sum(moved.block_wait_s for moved in readers),
        "link_wait_s": sum(moved.link_wait_s for moved in readers),
        "link_s": sum(moved.link_s for moved in readers),
        "held_s": sum(moved.held_s for moved in holders),
    }


def of_link(replica: Replica, moved: Moved) -> dict[str, Any]:
    """What one server read, or others read from it, ready for JSON."""
    return {
        "bytes": int(moved.cells * replica.scenario.cell_bytes),
        **{name: getattr(moved, name) for name in ("reads", "block_wait_s", "link_wait_s", "link_s", "held_s")},
    }
