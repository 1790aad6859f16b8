"""The scenario of a recorded vLLM: what its version does, and the limits that it said or must have had."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvsim.costs.devices import recorded_device
from kvsim.costs.memory_plan import plan
from kvsim.costs.profile import Profile
from kvsim.costs.under_load import ASYNCHRONOUS_SINCE
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.errors import LIMITS, UserError, counted
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.recorded_names import recorded_model
from kvsim.scenario.scenario import Scenario, load_scenario

_WHOLE_PROMPT_SINCE = (0, 19)
"""A request starts only where its whole prompt fits (pull request 37307, ``scheduler_reserve_full_isl``)."""
_PLAIN_FIRST_SINCE = (0, 23)
"""Blocks that hold nothing of use are handed out first; before, all blocks in the order of their release."""


class VllmBehaviour(NamedTuple):
    """What a version of vLLM's scheduler does unless told otherwise, as far as versions differ."""

    async_scheduling: bool
    reserve_full: bool
    plain_first: bool

    def __str__(self) -> str:
        steps = "steps are composed one ahead" if self.async_scheduling else "steps are composed one by one"
        fits = "its whole prompt fits" if self.reserve_full else "the first chunk of its prompt fits"
        order = "blocks are handed out in the order of their release"
        if self.plain_first:
            order = "blocks that hold nothing of use are handed out first"
        return f"{steps}; a request starts where {fits}; {order}"


class VllmLimits(NamedTuple):
    """The most that runs at once, and the cache."""

    sequences: int
    tokens: int
    """Tokens in a step."""
    context: int
    """Tokens of a sequence."""
    block_size: int
    blocks: int
    """The null block included."""


def vllm_behaviour(version: str) -> VllmBehaviour:
    """What a version of vLLM does by default. Raises ``UserError`` unless it is a version such as 0.19.0."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UserError(f"no version of vLLM is called {version!r:.40}; one such as 0.19.0 is expected")
    number = int(found[1]), int(found[2])
    return VllmBehaviour(
        number >= ASYNCHRONOUS_SINCE, number >= _WHOLE_PROMPT_SINCE, plain_first=number >= _PLAIN_FIRST_SINCE
    )


def vllm_scenario(
    behaviour: VllmBehaviour, limits: VllmLimits, *, prefix_cache: bool, cache: dict[str, Any], **sections: Any
) -> Scenario:
    """The scenario of a server with these limits; ``cache`` and ``sections``: what else is known.

    The policy is ``vllm`` or, for versions with another order of free blocks, ``paged`` with that order. vLLM's number
    of blocks includes the null block, and so do the cells of these policies.
    """
    order = {"policy": "vllm"} if behaviour.plain_first else {"policy": "paged", "free_order": "0.22.1"}
    cells = limits.blocks * limits.block_size
    server = {
        "scheduler": "vllm",
        "slots": limits.sequences,
        "n_batch": limits.tokens,
        "slot_context": min(limits.context, cells),
        "reserve_full": behaviour.reserve_full,
        "async_scheduling": behaviour.async_scheduling,
    }
    cache = {**order, "cells": cells, "block_size": limits.block_size, "prefix_cache": prefix_cache, **cache}
    return load_scenario({"name": "recorded", **sections, "server": server, "cache": cache})


def replay_scenario(
    recording: RecordedServer, profile: Profile, name: str | None = None
) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario of a recording of requests alone, and what was assumed, one line each.

    ``name``: what loads the profile, if anything does. Raises ``UserError`` where the recording lacks what cannot be
    assumed.
    """
    meta, path = recording.meta, recording.path
    if meta.engine.lower() != "vllm":
        raise UserError(f"{path}: engine {meta.engine!r:.40} cannot be simulated; accepted: vllm{LIMITS}")
    try:
        behaviour, model = vllm_behaviour(meta.version), recorded_model(meta.model)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    ranks = meta.data_parallel_size
    if ranks > 1 and memory_shape(model).n_experts and not meta.enable_expert_parallel:
        raise UserError(
            f"{path}: data_parallel_size {ranks} without enable_expert_parallel: vLLM then divides each expert, which "
            "cannot be simulated; accepted: both"
        )
    limits, assumed = _limits(recording, model, profile)
    if ranks > 1:
        together = ", which divide the experts and step together" if recording.expert_parallel > 1 else ""
        assumed = (f"{ranks} servers behind vLLM's own balancer{together}", *assumed)
    scenario = vllm_scenario(
        behaviour,
        limits,
        prefix_cache=meta.prefix_caching,
        cache={"type_k": profile.type_k, "type_v": profile.type_v},
        name=re.sub(r"[^\w.+=@-]", "_", recording.name).lstrip("._+=@-")[:100] or "recorded",
        workload={"kind": "recorded", "path": str(path.absolute())},
        model={"name": model},
        machine={"expert_parallel": recording.expert_parallel} | ({} if name is None else {"profile": name}),
        cluster={"replicas": ranks, "router": "vllm/data-parallel"},
    )
    return scenario, (f"defaults of vLLM {meta.version}: {behaviour}", *assumed)


def _limits(recording: RecordedServer, model: str, profile: Profile) -> tuple[VllmLimits, tuple[str, ...]]:
    """The limits of the server, and what had to be assumed, one line each."""
    meta = recording.meta
    sequences, tokens, context = meta.max_num_seqs, meta.max_num_batched_tokens, meta.max_model_len
    assumed = []
    if sequences is None or tokens is None:
        device = recorded_device(meta.device)
        default = serve_defaults(meta.device_memory_bytes or device.memory_bytes, device.name)
        tokens, sequences = tokens or default[0], sequences or default[1]
        assumed.append(
            f"{counted(tokens, 'token')} in a step, {counted(sequences, 'sequence')}: vLLM's own, if not said"
        )
    if context is None:
        context = memory_shape(model).context
        if context is None:
            raise UserError(f"{model}: neither the recording nor the model says how long a sequence may be")
        assumed.append(f"sequences of at most {counted(context, 'token')}, as the model was trained for")
    limits = VllmLimits(sequences, tokens, context, meta.block_size, meta.num_gpu_blocks or 0)
    planned = []
    if meta.num_gpu_blocks is None:
        limits = limits._replace(blocks=_planned_blocks(recording, model, limits, profile))
        if limits.blocks < 2:
            raise UserError(f"{recording.path}: {model} leaves no room for blocks in the memory of {meta.device}")
        of = f" of {meta.tensor_parallel_size} devices" if meta.tensor_parallel_size > 1 else ""
        planned.append(f"{limits.blocks:,} blocks of {meta.block_size}, as the memory plan{of} has it: not recorded")
    cells = limits.blocks * meta.block_size
    if context > cells:
        assumed.append(f"sequences of at most {counted(cells, 'token')}, which is all that the blocks hold")
    return limits, (*assumed, *planned)


def _planned_blocks(recording: RecordedServer, model: str, limits: VllmLimits, profile: Profile) -> int:
    """The number of blocks that the memory plan has for the device, the null block included."""
    meta = recording.meta
    device = None if meta.device_memory_bytes else recorded_device(meta.device)
    memory = meta.device_memory_bytes if device is None else device.memory_bytes
    assert memory is not None
    made = plan(
        model,
        ctx=limits.context,
        parallel=limits.sequences,
        engine="vllm",
        batch=limits.tokens,
        block_size=meta.block_size,
        gpu_memory_utilization=meta.gpu_memory_utilization,
        type_k=profile.type_k,
        type_v=profile.type_v,
        tensor_parallel=meta.tensor_parallel_size,
        expert_parallel=recording.expert_parallel,
        vllm_version=meta.version.removeprefix("v"),
        memory=memory if device is None else None,
        device=None if device is None else device.name,
    )
    return made.vllm_blocks(memory)
