"""Replay recordings of vLLM: its cache manager call by call, its scheduler step by step, and its server in time."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.engines.conformance.recordings import Record, Replay
from kvsim.engines.conformance.vllm.manager import ManagerReplay
from kvsim.engines.conformance.vllm.scheduler import SchedulerReplay
from kvsim.engines.conformance.vllm.server import ServerReplay


def vllm_replay(header: Record) -> Replay:
    """The replay of a recording, by its header. Raises ``ValueError`` if it is not one of vLLM's."""
    kinds: dict[str, Callable[[Record], Replay]] = {"manager": ManagerReplay, "scheduler": SchedulerReplay}
    if header.get("type") == "meta" and "engine" in header:
        return ServerReplay(header)
    if header.get("kind") not in kinds:
        raise ValueError(
            "not a vLLM recording's header; a JSON object with 'kind' (manager or scheduler), "
            "or of type 'meta' with an 'engine', is expected"
        )
    return kinds[header["kind"]](header)
