"""The memory that vLLM allocates for a model, part by part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvsim.costs import vllm_blocks
from kvsim.costs.drafter import HEAD, drafter_parts, drafter_shape
from kvsim.costs.memory_settings import Part, PlanSettings, weight_parts
from kvsim.costs.vllm_blocks import BlockGroups, cached_groups, token_bytes
from kvsim.costs.vllm_profile import profile_parts, profile_run, version_numbers
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.storage_types import VLLM_CACHE_TYPES


def parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """Everything that vLLM keeps in memory; sizes in bytes."""
    found = weight_parts("vllm", shape, s) + drafter_parts(partial(weight_parts, "vllm"), shape, s)
    groups = BlockGroups.of(shape, s)
    titles = replace(shape, groups=groups.groups).titles
    for group, title, tables, blocks in zip(groups.groups, titles, groups.tables, groups.blocks, strict=True):
        n = s.parallel * tables * blocks
        detail = f"{n:,} blocks of {groups.block_bytes:,} bytes"
        found.append(
            Part("vllm", "kv", f"{'state' if group.state else 'KV'}, {title}", n * groups.block_bytes, False, detail)
        )
    found.append(Part("vllm", "kv", "KV, the null block", groups.block_bytes, False))
    return found + profile_parts(shape, s)


def why_not(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why vLLM would refuse the settings; None if it would not."""
    if shape.vllm_until and version_numbers(s.vllm_version) > version_numbers(shape.vllm_until):
        return f"{shape.name}: vLLM {shape.vllm_until} was the last that served it; --vllm-version says which it is"
    if s.n_gpu_layers is not None or s.n_cpu_moe:
        return f"{'--n-cpu-moe' if s.n_gpu_layers is None else '--ngl'}: llama.cpp has it and vLLM has not"
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in VLLM_CACHE_TYPES:
            return f"{option}: vLLM has no {kind} cache; it has {', '.join(VLLM_CACHE_TYPES)}"
    if shape.indices and s.type_k == "fp8":
        return f"--cache-type-k: the size of fp8 latents of {shape.name} depends on the GPU, and is not planned"
    if s.type_k != s.type_v:
        return f"--cache-type-v: vLLM stores K and V in one type, not in {s.type_k} and {s.type_v}"
    ranks = s.tensor_parallel
    if s.expert_parallel > 1 and (not shape.n_experts or shape.stored or shape.n_experts % s.expert_parallel):
        what = f"{s.expert_parallel} does not divide its {shape.n_experts} experts" if shape.n_experts else "no experts"
        return f"--ep: {shape.name}: {'not of a GGUF file' if shape.stored else what}"
    if s.expert_parallel > 1 and ranks > 1:
        return "--tp, --ep: experts that are divided beside layers are not simulated; give one of them"
    if shape.n_heads % ranks:
        return f"--tp: vLLM divides heads over GPUs; {ranks} does not divide the {shape.n_heads} heads of {shape.name}"
    if any(group.kv_heads % ranks and ranks % group.kv_heads for group in shape.cells):
        return f"--tp: {ranks} and the {shape.cells[0].kv_heads} KV heads of {shape.name} do not divide each other"
    if any(group.state and group.state.recurrent % ranks for group in shape.states):
        return f"--tp: {ranks} does not divide the states of {shape.name}"
    if s.drafter not in ("", HEAD):
        both = (*cached_groups(shape), *cached_groups(drafter_shape(shape, s.drafter)))
        if len({(group.kind, group.window, group.state) for group in both}) > 1 or both[0].state is not None:
            return f"--drafter: {s.drafter} beside {shape.name}: planned for vLLM where all their layers cache alike"
    if len({token_bytes(group, s) for group in cached_groups(shape) if group.state is None}) > 1:
        return f"{shape.source}: layers of different widths cannot be planned for vLLM"
    return None


def notes(shape: MemoryShape, s: PlanSettings) -> list[str]:
    """Behaviour of vLLM with this model that may be unexpected."""
    found = []
    run, ranks = profile_run(s.vllm_version), s.tensor_parallel
    if run.version != s.vllm_version:
        found.append(
            f"vLLM {s.vllm_version} is planned as {run.version}, the last version before it that is known here"
        )
    if ranks > 1:
        kept = ["norms", "the rotary table"]
        if any(group.kv_heads < ranks for group in shape.cells):
            kept.append(
                "latents" if shape.cells[0].kind == "latent" else "KV heads, of which there are fewer than GPUs"
            )
        found.append(
            f"--tp {ranks}: memory is that of one of {ranks} GPUs, over which vLLM divides matrices, embeddings and KV "
            f"heads; each keeps {', '.join(kept)}"
        )
    return found + vllm_blocks.notes(shape, s)
