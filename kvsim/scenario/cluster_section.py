"""The section of a scenario that makes its server several, behind a router."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from kvsim.scenario.routers import ROUTERS
from kvsim.scenario.section import Section, entries
from kvsim.scenario.server_defaults import known_in

MOST_SERVERS = 1024


class ServersSection(Section):
    """Equal servers of a cluster, and what is said of them alone."""

    count: Annotated[int, Field(ge=1, le=MOST_SERVERS)] = 1
    machine: dict[str, Any] = Field(default_factory=dict)
    """Keys of the section ``machine`` that these servers have otherwise than the scenario says."""
    server: dict[str, Any] = Field(default_factory=dict)
    """The same of the section ``server``."""
    cache: dict[str, Any] = Field(default_factory=dict)
    """The same of the section ``cache``."""


class ClusterSection(Section):
    """Servers behind a router. All that the scenario says of a server, its slots or its cells, is of each of them."""

    replicas: Annotated[int, Field(ge=1, le=MOST_SERVERS)] = 1
    """Equal servers; unlike ones are listed in ``servers`` instead."""
    router: Annotated[str, AfterValidator(partial(known_in, ROUTERS))] = "round-robin"
    """How the server of a request is chosen; ``docs/routers.md`` has the names."""
    servers: Annotated[tuple[ServersSection, ...], entries(0, 64)] = ()
    """Groups of equal servers, which differ from group to group."""

    @model_validator(mode="after")
    def _one_way(self) -> ClusterSection:
        if self.servers and "replicas" in self.model_fields_set:
            raise ValueError("replicas: the groups in cluster.servers have a count each; leave one of them out")
        return self

    @property
    def size(self) -> int:
        """Number of servers."""
        return sum(group.count for group in self.servers) if self.servers else self.replicas
