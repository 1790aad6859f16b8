"""What llama.cpp needs at least for the rows of published benchmarks, and how long it took.

``llama_bench.csv`` and ``batched_bench.csv`` have facts from discussions and repositories, each row with its source and
licence; ``devices.csv`` has data sheets of their devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvsim.costs.devices import Device, device_named
from kvsim.costs.efficiency import make_of, storage_group
from kvsim.costs.physics import Need, PassPhysics
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape

FOLDER = Path(__file__).parent
UBATCH = 512

MODELS = {
    "llama 7B": "llama-2-7b",
    "llama 8B": "llama-3.1-8b",
    "llama-3.1-8b": "llama-3.1-8b",
    "llama-3.2-1b": "llama-3.2-1b",
    "llama 3B": "llama-3.2-3b",
    "llama-3.2-3b": "llama-3.2-3b",
    "llama 70B": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-small-3.1-24b": "mistral-small-24b-2501",
    "devstral-small-24b": "mistral-small-24b-2501",
    "llama 13B": "mistral-small-24b-2501",
    "gemma3 1B": "gemma-3-1b",
    "gemma-3-1b": "gemma-3-1b",
    "gemma3 4B": "gemma-3-4b",
    "gemma-3-4b": "gemma-3-4b",
    "gemma-3-12b": "gemma-3-12b",
    "gemma3 27B": "gemma-3-27b",
    "gemma-3-27b": "gemma-3-27b",
    "qwen2 1.5B": "qwen2.5-1.5b",
    "qwen2 7B": "qwen2.5-7b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "deepseek-r1-distill-7b": "qwen2.5-7b",
    "qwen2.5-coder-14b": "qwen2.5-14b",
    "deepseek-r1-distill-14b": "qwen2.5-14b",
    "qwen2 32B": "qwen2.5-32b",
    "qwen2.5-coder-32b": "qwen2.5-32b",
    "deepseek-r1-distill-32b": "qwen2.5-32b",
    "qwq-32b": "qwen2.5-32b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-1.7b": "qwen3-1.7b",
    "qwen3-4b": "qwen3-4b",
    "qwen3-8b": "qwen3-8b",
    "qwen3 14B": "qwen3-14b",
    "qwen3-14b": "qwen3-14b",
    "qwen3 32B": "qwen3-32b",
    "qwen3-32b": "qwen3-32b",
    "qwen3moe 30B.A3B": "qwen3-30b-a3b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3moe 235B.A22B": "qwen3-235b-a22b",
    "deepseek-v2-lite": "deepseek-v2-lite",
    "granite-4.0-h-small": "granite-4.0-h-small",
    "granite-4.0-h-tiny": "granite-4.0-h-tiny",
    "lfm2-8b-a1b": "lfm2-8b-a1b",
    "nemotron-h-8b": "nemotron-h-8b",
    "qwen3-next-80b-a3b": "qwen3-next-80b-a3b",
    "gpt-oss 20B": "gpt-oss-20b",
    "gpt-oss 120B": "gpt-oss-120b",
    "phi-4": "phi-4",
    "phi-4-reasoning": "phi-4",
    "phi-4-mini": "phi-4-mini",
    "phi-4-mini-reasoning": "phi-4-mini",
}
"""Shapes of the models that the rows name; of others the shape is not known here. A "llama 13B" of 23.57 billion
weights is Mistral Small, which has llama.cpp's architecture of that name."""


class BenchPass(NamedTuple):
    """A row: so many passes, what each needs, and what attention and states need in all of them together."""

    device: str
    make: str
    model: str
    group: str
    phase: str
    times: float
    layers: int
    matrices_reading_s: float
    matrices_computing_s: float
    matrices_unpacking_s: float
    experts_reading_s: float
    experts_computing_s: float
    experts_unpacking_s: float
    head_reading_s: float
    head_computing_s: float
    head_unpacking_s: float
    attention_reading_s: float
    attention_computing_s: float
    quantised_layers: int
    """Layers that decode over K and V in a quantised type; of other makes none was measured with a context."""
    seconds: float


def rows() -> pd.DataFrame:
    """All rows of known shapes on known devices, the fastest of each setting: of builds, backends and attention."""
    found = pd.DataFrame([*_llama_bench(), *_batched_bench()], columns=BenchPass._fields)
    keys = ["device", "model", "group", "phase", "times", "matrices_computing_s", "attention_reading_s"]
    return found.loc[found.groupby(keys)["seconds"].idxmin()].reset_index(drop=True)


def _llama_bench() -> Iterator[BenchPass]:
    table = pd.read_csv(FOLDER / "llama_bench.csv")
    for row in table.itertuples():
        kind, length = re.fullmatch(r"(pp|tg)(\d+)", str(row.test)).groups()  # type: ignore[union-attr]
        physics, scale = _physics(row)
        if physics is None or (row.depth and _windowed(physics.shape)):
            continue
        n, depth = int(length), int(row.depth)
        ubatch = UBATCH if np.isnan(row.n_ubatch) else int(row.n_ubatch)
        if kind == "tg":
            yield _pass(row, physics, scale, "decode", 1, 1, 1, depth + n / 2, 1 / row.tokens_per_s)
            continue
        if n < 64 and depth:
            # Never replayed from a graph, which was captured for the pass after it.
            continue
        ubatch = min(ubatch, n)
        seen, seconds = depth + (n + 1) / 2, n / row.tokens_per_s
        phase = "prompt" if ubatch >= 64 else "chunk"
        yield _pass(row, physics, scale, phase, n / ubatch, ubatch, 1, seen, seconds)


def _batched_bench() -> Iterator[BenchPass]:
    for row in pd.read_csv(FOLDER / "batched_bench.csv").itertuples():
        physics, scale = _physics(row)
        if physics is None or _windowed(physics.shape) or row.TG == 0:
            continue
        b, context = int(row.B), row.PP + row.TG / 2
        yield _pass(row, physics, scale, "decode", 1, b, b, context, b / row.S_TG)


def _pass(
    row: Any,
    physics: PassPhysics,
    scale: float,
    phase: str,
    times: float,
    tokens: int,
    sequences: int,
    seen: float,
    seconds: float,
) -> BenchPass:
    shape = physics.shape
    matrices, experts = physics.matrices(tokens), physics.experts(tokens)
    # Of a prompt, one row of logits is computed, which counts where it is short.
    short = phase == "decode" or (phase == "chunk" and times == 1)
    head = physics.head(sequences) if short else Need(np.float64(0), np.float64(0))
    attention = physics.decode(sequences, seen) if phase == "decode" else physics.prompt(tokens, seen)
    states = physics.states(sequences, tokens)
    make = make_of("llamacpp", physics.device)
    latent = any(group.kind == "latent" for group in shape.groups)
    quantised = phase == "decode" and physics.quantised and make == "hopper" and not latent
    return BenchPass(
        physics.device.name,
        make,
        shape.name,
        storage_group(physics.weights),
        phase,
        times,
        shape.n_layers,
        *(value for need in (matrices, experts, head) for value in _seconds(need, scale)),
        times * float(attention.reading_s + states.reading_s),
        times * float(attention.computing_s + states.computing_s),
        physics.attention_layers if quantised else 0,
        seconds,
    )


def _seconds(need: Need, scale: float) -> tuple[float, float, float]:
    return scale * float(need.reading_s), float(need.computing_s), float(need.unpacking_s)


def _physics(row: Any) -> tuple[PassPhysics | None, float]:
    """The row's physics, and how many times as large its file is as the estimate; None where something is not known."""
    model, device = MODELS.get(row.model), row_devices().get(row.device)
    slow = str(row.flash_attn) in ("0", "0.0") and getattr(row, "depth", 1)  # Without a context it hardly matters.
    if model is None or device is None or slow or "CPU" in str(row.backend):
        return None, 1.0
    shape, weights = memory_shape(model), _weights(str(row.quant))
    if weights is None:
        return None, 1.0
    if model.startswith("gpt-oss"):
        weights = "q8_0"  # All but the experts.
    type_k, type_v = (str(getattr(row, key, "f16")) for key in ("type_k", "type_v"))
    types = [kind if kind in ("f16", "q8_0", "q4_0") else "f16" for kind in (type_k, type_v)]
    physics = PassPhysics(device, shape, weights, *types, engine="llamacpp")
    size = getattr(row, "size_gib", float("nan"))
    planned = sum(part.bytes(weights) for part in (shape.matrices, shape.experts, shape.head))
    return physics, 1.0 if np.isnan(size) or size <= 0 else min(max(size * 2**30 / planned, 0.7), 1.4)


def _weights(quant: str) -> str | None:
    """kvsim's name of a type of weights."""
    name = quant.lower().split(" - ")[0].split("-")[0].replace("mxfp4 moe", "mxfp4").strip().replace(" ", "_")
    if " - medium" in quant.lower():
        name += "_m"
    name = {"bf16": "bf16", "q4_k": "q4_k_m", "q2_k_m": "q2_k", "q3_k_m": "q3_k_l", "q5_k": "q5_k_m"}.get(name, name)
    known = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "iq4_nl", "iq4_xs", "mxfp4", "q2_k", "q3_k_s", "q3_k_l")
    return name if name in (*known, "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k") else None


def _windowed(shape: MemoryShape) -> bool:
    return any(group.kind == "window" for group in shape.groups)


def row_devices() -> dict[str, Device]:
    """The devices of the rows, by their names there."""
    if not _DEVICES:
        sheet = pd.read_csv(FOLDER / "devices.csv").set_index("device")
        names = pd.read_csv(FOLDER / "device_alias.csv").set_index("device")["device_in_devices_csv"]
        for name, own in names.items():
            if own in sheet.index and (found := _device(str(own), sheet.loc[own])) is not None:
                _DEVICES[str(name)] = found
        _DEVICES["GB10"] = device_named("gb10")
        _DEVICES.update({name: device_named(name) for name in ("h100_sxm", "h200_sxm")})
    return _DEVICES


_DEVICES: dict[str, Device] = {}
_OLD = "Tesla|V100|RTX 20|GTX|Quadro|Vega|RX 6"
"""Devices before 2020, whose kernels are others."""


def _device(name: str, sheet: Any) -> Device | None:
    bandwidth, tflops, int8 = (
        pd.to_numeric(sheet[key], errors="coerce")
        for key in ("bandwidth_gb_s", "fp16_bf16_tflops_fp32acc", "int8_tops")
    )
    if np.isnan(bandwidth) or np.isnan(tflops) or re.search(_OLD, name):
        return None
    kind = "consumer"
    if re.match(r"M\d", name):
        kind = "apple"
    elif name.startswith("MI"):
        kind = "instinct"
    elif re.search(r"RX \d|Radeon|Strix", name):
        kind = "amd"
    return Device(
        name=re.sub(r"[^\w.-]+", "-", name)[:40].strip("-"),
        title=name,
        kind=kind,
        memory_bytes=2**33,
        memory_source="",
        bandwidth_gb_s=bandwidth,
        tflops=tflops,
        tops_int8=None if np.isnan(int8) else int8,
    )
