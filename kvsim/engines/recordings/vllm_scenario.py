"""The scenario that serves what a recorded server was asked, as that server would have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.costs.devices import recorded_device
from kvsim.costs.memory_plan import plan
from kvsim.costs.profile import Profile
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.engines.recordings.recorded_server import RecordedServer, ServerMeta
from kvsim.errors import UserError, counted
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.recorded_names import recorded_model
from kvsim.scenario.scenario import Scenario, load_scenario

_ASYNCHRONOUS_SINCE = (0, 14)
"""vLLM composes steps ahead by default (``SchedulerConfig.async_scheduling``)."""
_WHOLE_PROMPT_SINCE = (0, 19)
"""A request starts only where its whole prompt fits (pull request 37307, ``scheduler_reserve_full_isl``)."""
_PLAIN_FIRST_SINCE = (0, 23)
"""Blocks that hold nothing of use are handed out first; before, all blocks in the order of their release."""


class VllmBehaviour(NamedTuple):
    """What a version of vLLM's scheduler does unless told otherwise, as far as versions differ."""

    async_scheduling: bool
    reserve_full: bool
    plain_first: bool


class _Limits(NamedTuple):
    """The most that runs at once."""

    sequences: int
    tokens: int
    """Tokens in a step."""
    context: int
    """Tokens of a sequence."""


@dataclass(frozen=True)
class Replay:
    """A recorded server's traffic on our simulator."""

    scenario: Scenario
    assumed: tuple[str, ...]
    """What the recording does not say, one line each."""


def vllm_behaviour(version: str) -> VllmBehaviour:
    """What a version of vLLM does by default. Raises ``UserError`` unless it is a version such as 0.19.0."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UserError(f"no version of vLLM is called {version!r:.40}; one such as 0.19.0 is expected")
    number = int(found[1]), int(found[2])
    return VllmBehaviour(
        number >= _ASYNCHRONOUS_SINCE, number >= _WHOLE_PROMPT_SINCE, plain_first=number >= _PLAIN_FIRST_SINCE
    )


def replay(recording: RecordedServer, profile: Profile, name: str | None = None) -> Replay:
    """Make the scenario of a recording. Raises ``UserError`` where the recording lacks what cannot be assumed.

    The policy is ``vllm`` or, for versions with another order of free blocks, ``paged`` with that order. vLLM's number
    of blocks includes the null block, and so do the cells of these policies. ``name``: where the profile can be loaded
    from, if anywhere.
    """
    meta, path = recording.meta, recording.path
    if meta.engine.lower() != "vllm":
        raise UserError(f"{path}: engine {meta.engine!r:.40} cannot be simulated; accepted: vllm")
    try:
        behaviour, model = vllm_behaviour(meta.version), recorded_model(meta.model)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    limits, assumed = _limits(meta, model)
    blocks, told = _blocks(recording, model, limits, profile)
    cells = blocks * meta.block_size
    if limits.context > cells:
        assumed += (f"sequences of at most {counted(cells, 'token')}, which is all that the blocks hold",)
    order = {"policy": "vllm"} if behaviour.plain_first else {"policy": "paged", "free_order": "0.22.1"}
    table: dict[str, Any] = {
        "name": re.sub(r"[^\w.+=@-]", "_", recording.name).lstrip("._+=@-")[:100] or "recorded",
        "workload": {"kind": "recorded", "path": str(path.absolute())},
        "model": {"name": model},
        "machine": {} if name is None else {"profile": name},
        "server": {
            "scheduler": "vllm",
            "slots": limits.sequences,
            "n_batch": limits.tokens,
            "slot_context": min(limits.context, cells),
            "reserve_full": behaviour.reserve_full,
            "async_scheduling": behaviour.async_scheduling,
        },
        "cache": {
            **order,
            "cells": cells,
            "block_size": meta.block_size,
            "prefix_cache": meta.prefix_caching,
            "type_k": profile.type_k,
            "type_v": profile.type_v,
        },
    }
    return Replay(load_scenario(table), (_described(meta, behaviour), *assumed, *told))


def _limits(meta: ServerMeta, model: str) -> tuple[_Limits, tuple[str, ...]]:
    """The limits of the server, and what had to be assumed, one line each."""
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
    return _Limits(sequences, tokens, context), tuple(assumed)


def _blocks(recording: RecordedServer, model: str, limits: _Limits, profile: Profile) -> tuple[int, tuple[str, ...]]:
    """The number of blocks, the null block included, and where it is from if not from the recording."""
    meta = recording.meta
    if meta.num_gpu_blocks is not None:
        return meta.num_gpu_blocks, ()
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
        vllm_version=meta.version.removeprefix("v"),
        memory=memory if device is None else None,
        device=None if device is None else device.name,
    )
    blocks = made.vllm_blocks(memory)
    if blocks < 2:
        raise UserError(f"{recording.path}: {model} leaves no room for blocks in the memory of {meta.device}")
    devices = f" of {meta.tensor_parallel_size} devices" if meta.tensor_parallel_size > 1 else ""
    return blocks, (f"{blocks:,} blocks of {meta.block_size}, as the memory plan{devices} has it: not recorded",)


def _described(meta: ServerMeta, behaviour: VllmBehaviour) -> str:
    """The behaviour that was assumed from the version."""
    steps = "steps are composed one ahead" if behaviour.async_scheduling else "steps are composed one by one"
    fits = "its whole prompt fits" if behaviour.reserve_full else "the first chunk of its prompt fits"
    order = (
        "blocks that hold nothing of use are handed out first"
        if behaviour.plain_first
        else ("blocks are handed out in the order of their release")
    )
    return f"defaults of vLLM {meta.version}: {steps}; a request starts where {fits}; {order}"
