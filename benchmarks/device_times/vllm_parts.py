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
from kvsim.model.cache_groups import PassWeights
from kvsim.model.config_shapes import model_config
from kvsim.model.layer_parts import latent
from kvsim.model.memory_shapes import config_fields, memory_shape

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
WEIGHTS = ("bf16", "fp8", "fp8_block", "nvfp4")
NAMED = (
    ("gpt-oss-20b", "openai/gpt-oss-20b", "bf16", (1,)),
    ("gpt-oss-120b", "openai/gpt-oss-120b", "bf16", (1, 2, 4, 8)),
    ("minimax-m2.5", "MiniMaxAI/MiniMax-M2.5", "fp8_block", (1, 2, 4)),
    ("minimax-m2.5", "nvidia/MiniMax-M2.5-NVFP4", "nvfp4", (1, 2, 4)),
    ("kimi-k2.5", "moonshotai/Kimi-K2.5", "bf16", (4, 8)),
    ("kimi-k2.5", "nvidia/Kimi-K2.5-NVFP4", "nvfp4", (4, 8)),
)
"""Models that are asked for by the package's names, since it is not handed their architecture; weights, and devices.
The attention of gpt-oss, of which half has windows, is left out."""
TOKENS = tuple(1 << i for i in range(14))
SEQUENCES = tuple(1 << i for i in range(10))
CELLS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MOST_CELLS = 1_100_000
PARTS = {
    "matrices": ("qkv_gemm", "proj_gemm", "gate_ffn1_gemm", "ffn2_gemm", "router_gemm"),
    "elementwise": ("embedding", "add_norm_1", "add_norm_2", "act_gate"),
    "experts": ("moe", "moe_overlap"),
    "exchange": ("embedding_ar", "ar_1", "ar_2", "moe_pre_dispatch", "moe_post_dispatch", "tp_allreduce"),
    "head": ("logits_gemm",),
    "attention": ("attention", "mla_block"),
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


def question_of(device: str, model: str, tp: int, weights: str, name: str | None) -> PackageModel:
    """What the package is asked; ``name``: its own of the model, if that is used. Raises ``UserError``."""
    if name is None:
        return ask(device, model, tp=tp, weights=weights)
    like = ask(device, "llama-3.1-8b", tp=tp)
    return replace(like, shape=memory_shape(model), weights=weights, weight_dtype=None)


def experts_of(question: PackageModel, name: str | None, handle: _Handle) -> _Handle:
    """What is asked for the experts: of gpt-oss on Blackwell as vLLM multiplies them there, with activations in MXFP8.

    The package has these kernels, which are FlashInfer's, as SGLang's only.
    """
    if question.shape.experts.kind != "mxfp4" or not question.device.tflops_fp4:
        return handle
    like = ask(question.device.name, "llama-3.1-8b", engine="sglang", tp=question.tp)
    other = replace(question, engine=like.engine, engine_version=like.engine_version)
    try:
        found = _Handle(other, name, moe_quant_mode="w4a8_mxfp4_mxfp8")
        found.decode(1, 512)
    except UserError:
        return handle
    return found


def rows_of(device: str, model: str, tp: int, weights: str, name: str | None = None) -> list[tuple[object, ...]]:
    """The rows of a model on a device. Raises ``UserError`` where the package lacks kernels."""
    question = question_of(device, model, tp, weights, name)
    handle, shape = _Handle(question, name), question.shape
    experts = experts_of(question, name, handle)
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
        if shape.n_experts:
            seconds = _by_part(experts.decode(n, 512))["experts"]
            add("experts", n, 0, physics.experts(n), layers, seconds, storage_group(physics.expert_type))
        add("exchange", n, 0, physics.exchange(n), 2 * layers + 1, taken["exchange"])
    # Matrices in blocks of fp8 are timed with their launches, so that whole passes are not those of a server.
    if len(shape.groups) > 1 or group == "fp8_block":
        return found
    latent = shape.groups[0].kind == "latent"
    for b in SEQUENCES:
        for c in (c for c in CELLS if b * c <= MOST_CELLS):
            seconds = _by_part(handle.decode(b, c))["attention"]
            if latent:
                seconds -= float(_attention_matrices(question, b).least_s)
            add("latent" if latent else "decode", b, c, physics.decode(b, c), layers, seconds)
    for n in () if latent else TOKENS[7:]:
        # Not of prompts with cached tokens, which the package prices by their share of the square.
        add("prompt", n, 0, physics.prompt(n, (n + 1) / 2), layers, _by_part(handle.prompt(n))["attention"])
    return found


def _attention_matrices(question: PackageModel, tokens: int) -> Need:
    """What the matrices of latent attention need, which the package has in one with it."""
    shape = question.shape
    fields = config_fields(shape.name)
    numbers = shape.n_layers * latent(model_config(fields, fields["model_type"])).numbers
    other = replace(shape, matrices=PassWeights(numbers))
    return PassPhysics(question.device, other, "bf16", tp=question.tp).matrices(tokens)


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
    asked = [(model, None, weights, sizes) for model, sizes in MODELS.items() for weights in WEIGHTS]
    for device in (device for device in devices().values() if device.package):
        for model, name, weights, sizes in (*asked, *NAMED):
            if weights == "nvfp4" and not device.tflops_fp4:
                continue
            for tp in sizes:
                try:
                    rows += rows_of(device.name, model, tp, weights, name)
                except UserError as e:
                    print(e, file=sys.stderr)
        pd.DataFrame(rows, columns=COLUMNS).to_csv(sys.argv[1], index=False)
