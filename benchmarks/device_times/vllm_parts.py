"""Writes what parts of passes take by the kernels that aiconfigurator-core has, and what they need at least.

    python -m benchmarks.device_times.vllm_parts build/vllm-parts.csv.gz

Needs the extra gpu; takes some minutes. Columns: device, model, tp, weights (group of their types), kind (that of
these weights), part, a, b (tokens or sequences, cells), reading_s, computing_s (the least seconds), layers, seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from kvsim.calibration.published.package import PackageModel, _Handle, ask
from kvsim.costs.devices import devices
from kvsim.costs.efficiency import storage_group
from kvsim.costs.physics import Need, PassPhysics
from kvsim.errors import UserError
from kvsim.model.attention_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape

MODELS: dict[str, tuple[int, ...]] = {
    "llama-3.1-8b": (1, 2, 4),
    "llama-3.1-70b": (2, 4, 8),
    "qwen3-0.6b": (1,),
    "qwen3-1.7b": (1,),
    "qwen3-8b": (1, 2),
    "qwen3-32b": (1, 2, 4, 8),
    "qwen3-30b-a3b": (1, 2, 4),
    "qwen3-235b-a22b": (4, 8),
}
"""Models, and on how many devices they are asked for."""
NAMED = {"gpt-oss-20b": ("openai/gpt-oss-20b", (1,)), "gpt-oss-120b": ("openai/gpt-oss-120b", (1, 2, 4, 8))}
"""Models that are asked for by the package's names, since it is not handed their architecture. Their experts are in
mxfp4; their attention, of which half has windows, is left out."""
TOKENS = tuple(1 << i for i in range(14))
SEQUENCES = tuple(1 << i for i in range(10))
CELLS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MOST_CELLS = 1_100_000
PARTS = {
    "matrices": ("qkv_gemm", "proj_gemm", "gate_ffn1_gemm", "ffn2_gemm", "router_gemm"),
    "elementwise": ("embedding", "add_norm_1", "add_norm_2", "act_gate"),
    "experts": ("moe",),
    "exchange": ("embedding_ar", "ar_1", "ar_2", "moe_pre_dispatch", "moe_post_dispatch"),
    "head": ("logits_gemm",),
    "attention": ("attention",),
}
"""The package's operations by part."""
COLUMNS = (
    "device",
    "model",
    "tp",
    "weights",
    "kind",
    "part",
    "a",
    "b",
    "reading_s",
    "computing_s",
    "layers",
    "seconds",
)


def question_of(device: str, model: str, tp: int, weights: str) -> tuple[PackageModel, str | None]:
    """What the package is asked, and its own name of the model if that is used. Raises ``UserError``."""
    if model not in NAMED:
        return ask(device, model, tp=tp, weights=weights), None
    like = ask(device, "llama-3.1-8b", tp=tp)
    return replace(like, shape=memory_shape(model), weights=weights, weight_dtype=None), NAMED[model][0]


def rows_of(device: str, model: str, tp: int, weights: str) -> list[tuple[object, ...]]:
    """The rows of a model on a device. Raises ``UserError`` where the package lacks kernels."""
    question, name = question_of(device, model, tp, weights)
    handle, shape = _Handle(question, name), question.shape
    physics, layers = PassPhysics(question.device, shape, weights, tp=tp), shape.n_layers
    group, found = storage_group(weights), []

    def add(part: str, a: int, b: int, need: Need, times: int, seconds: float, kind: str = group) -> None:
        least = float(need.reading_s), float(need.computing_s)
        if seconds > 0:
            found.append((device, model, tp, group, kind, part, a, b, *least, times, seconds))

    for n in TOKENS:
        taken = _by_part(handle.decode(n, 512))
        add("matrices", n, 0, physics.matrices(n), layers, taken["matrices"])
        add("elementwise", n, 0, physics.elementwise(n), layers, taken["elementwise"])
        add("head", n, 0, physics.head(n), 1, taken["head"])
        add("experts", n, 0, physics.experts(n), layers, taken["experts"], expert_group(shape, weights))
        add("exchange", n, 0, physics.exchange(n), 2 * layers + 1, taken["exchange"])
    if len(shape.groups) > 1:
        return found
    for b in SEQUENCES:
        for c in (c for c in CELLS if b * c <= MOST_CELLS):
            add("decode", b, c, physics.decode(b, c), layers, _by_part(handle.decode(b, c))["attention"])
    for n in TOKENS[7:]:
        # Not of prompts with cached tokens, which the package prices by their share of the square.
        add("prompt", n, 0, physics.prompt(n, (n + 1) / 2), layers, _by_part(handle.prompt(n))["attention"])
    return found


def expert_group(shape: MemoryShape, weights: str) -> str:
    """The group of storage types of a model's experts."""
    return storage_group(weights if shape.experts.kind == "default" else shape.experts.kind)


def _by_part(operations: Iterable[Any]) -> dict[str, float]:
    """Seconds by part of the package's operations: names, milliseconds, and more."""
    taken = dict.fromkeys(PARTS, 0.0)
    for name, ms, *_ in operations:
        for part, names in PARTS.items():
            if name.split("_", 1)[1] in names:
                taken[part] += float(ms) / 1e3
    return taken


if __name__ == "__main__":
    rows: list[tuple[object, ...]] = []
    for device in (device.name for device in devices().values() if device.package):
        for model, sizes in (MODELS | {model: sizes for model, (_, sizes) in NAMED.items()}).items():
            for tp in sizes:
                for weights in ("bf16",) if model in NAMED else ("bf16", "fp8"):
                    try:
                        rows += rows_of(device, model, tp, weights)
                    except UserError as e:
                        print(e, file=sys.stderr)
        pd.DataFrame(rows, columns=COLUMNS).to_csv(sys.argv[1], index=False)
