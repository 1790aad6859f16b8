"""Schedulers: which tokens run in the next step, and what happens when they find no room."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import Scheduler, SchedulerBase, no_progress
from kvsim.simulation.schedulers.llama_server import EarlyLlamaServer, FairLlamaServer, LlamaServer
from kvsim.simulation.schedulers.static import Static
from kvsim.simulation.schedulers.vllm import Vllm
from kvsim.simulation.schedulers.vllm_async import AsyncVllm
from policies import Policy

Make = Callable[[Scenario, Policy, Backend, Recorder], Scheduler]
"""Makes the scheduler of a server."""


def apart(scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder) -> Scheduler:
    """The scheduler of a server that only prefills, or only decodes."""
    from kvsim.simulation.schedulers.vllm_apart import ApartVllm, AsyncApartVllm

    kind = AsyncApartVllm if scenario.server.async_scheduling else ApartVllm
    return kind(scenario, policy, backend, recorder)


def _vllm(scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder) -> Vllm:
    if policy.chunks is None:
        kind = AsyncVllm if scenario.server.async_scheduling else Vllm
    else:
        from kvsim.simulation.schedulers.vllm_offload import AsyncOffloadingVllm, OffloadingVllm

        kind = AsyncOffloadingVllm if scenario.server.async_scheduling else OffloadingVllm
    return kind(scenario, policy, backend, recorder)


SCHEDULERS: dict[str, Make] = {
    "llama-server": LlamaServer,
    "llama-server-fair": FairLlamaServer,
    "llama-server-b4875": EarlyLlamaServer,
    "vllm": _vllm,
    "static": Static,
}
"""Schedulers by the name that the scenario key ``server.scheduler`` gives."""

__all__ = [
    "SCHEDULERS",
    "AsyncVllm",
    "EarlyLlamaServer",
    "FairLlamaServer",
    "Job",
    "LlamaServer",
    "Scheduler",
    "SchedulerBase",
    "Static",
    "Vllm",
    "apart",
    "no_progress",
]
