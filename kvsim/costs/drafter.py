"""What drafts beside a model, and takes memory of its own: a smaller model, or a head of one layer.

Sources. vLLM 0.33: a drafter's layers share the blocks of the model's (``v1/spec_decode/llm_base_proposer.py``).
llama.cpp 0c1e570: a context of as many cells, K and V in types of its own (``common_base_params_to_speculative``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvsim.costs.memory_settings import Part, PlanSettings
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape, PassWeights
from kvsim.model.memory_shapes import memory_shape

HEAD = "head"
"""One layer more, as EAGLE and MTP have; embeddings and the head of the model are its own too."""


def drafter_shape(shape: MemoryShape, drafter: str) -> MemoryShape:
    """The shape of what drafts for a model. Raises ``UserError`` if that is not known, or has no head."""
    if drafter != HEAD:
        return memory_shape(drafter)
    if not shape.cells:
        raise UserError(f"--drafter: {shape.name} has no attention, of which a drafting head is made; name a model")
    whole = [group for group in shape.cells if group.window is None and group.kind != "index"] or shape.cells
    matrices, experts = (_of_layer(weights, shape.n_layers) for weights in (shape.matrices, shape.experts))
    parameters = {experts.kind: experts.numbers} if experts.numbers else {}
    parameters[matrices.kind] = parameters.get(matrices.kind, 0) + matrices.numbers
    return replace(
        shape,
        name="the drafting head",
        groups=tuple(replace(group, layers=1, readers=0) for group in (*whole[:1], *shape.indices)),
        n_layers=1,
        # A GGUF file has the layers that draft among its own.
        parameters={} if shape.stored else parameters,
        stored={},
        matrices=matrices,
        experts=experts,
        head=PassWeights(0),
        tensors=(),
    )


def drafter_parts(
    parts: Callable[[MemoryShape, PlanSettings], list[Part]], shape: MemoryShape, s: PlanSettings
) -> list[Part]:
    """What an engine keeps of a drafter, by its ``parts`` of a model; empty where nothing drafts."""
    if not s.drafter:
        return []
    head = s.drafter == HEAD
    # A model that drafts has its own type of weights; llama.cpp's has K and V in f16 by default.
    own = replace(s, drafter="", type_k="f16", type_v="f16", n_gpu_layers=None, n_cpu_moe=0)
    found = parts(drafter_shape(shape, s.drafter), own if head else replace(own, weights=None))
    return [replace(p, name=f"drafter: {p.name}", estimate=p.estimate or (head and p.kind == "weights")) for p in found]


def _of_layer(weights: PassWeights, layers: int) -> PassWeights:
    stored = None if weights.stored is None else weights.stored // layers
    return replace(weights, numbers=weights.numbers // layers, kept=weights.kept // layers, stored=stored)
