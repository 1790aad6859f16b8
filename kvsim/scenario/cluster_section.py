"""The section of a scenario that makes its server several, behind a router."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from kvsim.scenario.routers import ROUTERS
from kvsim.scenario.section import Section, entries
from kvsim.scenario.server_defaults import known_in

MOST_SERVERS = 1024
Role = Literal["both", "prefill", "decode"]
"""What a server does of a request."""
RouterName = Annotated[str, AfterValidator(partial(known_in, ROUTERS))]


class ServersSection(Section):
    """Equal servers of a cluster, and what is said of them alone."""

    count: Annotated[int, Field(ge=1, le=MOST_SERVERS)] = 1
    role: Role = "both"
    """``prefill``: they compute prompts, which those with ``decode`` read and go on from; all are one or the other."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """Keys of the section ``machine`` that these servers have otherwise than the scenario says."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Keys of the section ``server`` that these servers have otherwise than the scenario says."""
    cache: dict[str, Any] = Field(default_factory=dict)
    """Keys of the section ``cache`` that these servers have otherwise than the scenario says."""


class ClusterSection(Section):
    """Servers behind a router. All that the scenario says of a server, its slots or its cells, is of each of them."""

    replicas: Annotated[int, Field(ge=1, le=MOST_SERVERS)] = 1
    """Equal servers; unlike ones are listed in ``servers`` instead."""
    router: RouterName = "round-robin"
    """How the server of a request is chosen, or the one that prefills; ``docs/routers.md`` has the names."""
    decode_router: RouterName = "round-robin"
    """How the server that decodes is chosen, where that is another."""
    link_gb_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Bandwidth of the link over which decode servers read what prefill servers have computed, of each device and in
    each direction, 10**9 bytes/s; by default the data sheet's between devices, where one is named."""
    link_latency_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Seconds that such a read takes beside."""
    servers: Annotated[tuple[ServersSection, ...], entries(0, 64)] = ()
    """Groups of equal servers, which differ from group to group."""

    @model_validator(mode="after")
    def _one_way(self) -> ClusterSection:
        if self.servers and self.replicas != 1:
            raise ValueError("replicas: the groups in cluster.servers have a count each; leave one of them out")
        return self

    @model_validator(mode="after")
    def _both_kinds(self) -> ClusterSection:
        roles = {group.role for group in self.servers}
        if roles > {"both"} or roles in ({"prefill"}, {"decode"}):
            has = " and ".join(sorted(roles))
            raise ValueError(f"servers: roles are {has}; prefill needs decode, and decode prefill, and neither both")
        # A scenario that was written with all defaults has those.
        if not self.apart and (self.decode_router != "round-robin" or self.link_gb_s or self.link_latency_s):
            raise ValueError("decode_router, link_gb_s, link_latency_s: no server has role prefill or decode")
        return self

    @property
    def apart(self) -> bool:
        """Whether prefill and decode have servers of their own."""
        return any(group.role != "both" for group in self.servers)

    @property
    def behind(self) -> str:
        """What gives the servers their requests, in words."""
        return f"{self.router} to prefill and {self.decode_router} to decode" if self.apart else self.router

    @property
    def roles(self) -> tuple[Role, ...]:
        """What each server does."""
        groups = self.servers or (ServersSection(count=self.replicas),)
        return tuple(group.role for group in groups for _ in range(group.count))

    @property
    def size(self) -> int:
        """Number of servers."""
        return sum(group.count for group in self.servers) if self.servers else self.replicas
