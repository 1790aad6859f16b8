"""The link between servers that prefill and servers that decode: which scenarios can have one, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.costs.devices import device_named
from kvsim.errors import UserError
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.cluster.exchange import Exchange, Moved
from kvsim.simulation.cluster.replica import Replica
from policies import Policy
from policies.layouts.paged import PagedPolicy


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
