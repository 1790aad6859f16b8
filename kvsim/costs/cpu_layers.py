"""Layers that llama.cpp keeps in the computer's memory, and what they take.

By llama.cpp's source (0c1e57098, October 2026): ``-ngl N`` puts the head and the last N - 1 layers on the device, each
with its K and V (``load_tensors`` in ``llama-model.cpp``); ``--n-cpu-moe N`` keeps the experts of the first N layers
off it (``common/arg.cpp``). What is left is computed by the CPU in micro-batches of fewer than 32 tokens. In larger
ones its weights, with K and V, are copied to the device, which computes as if they were there
(``ggml_backend_cuda_device_offload_op`` in ``ggml-cuda.cu``, likewise under Vulkan, SYCL and Metal), one matrix after
the other and not while it computes (``ggml_backend_sched_compute_splits`` in ``ggml-backend.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvsim.costs.devices import device_named
from kvsim.costs.physics import Need, PassPhysics
from kvsim.costs.served import Served
from kvsim.costs.tables import FloatArray
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape

MIN_BATCH = 32
"""Tokens of a micro-batch from which on the device computes all layers (``GGML_OP_OFFLOAD_MIN_BATCH``)."""
READING = 0.6
"""Share of the bandwidth of its memory at which a CPU reads weights: ``benchmarks/device_times/partly_on_cpu.py``."""
COPYING = 0.5
"""Share of ``bus_gb_s`` at which all but experts are copied: by one matrix at a time, each waited for."""
CPU_TFLOPS = 1.0
"""What a CPU computes with quantised weights, 10**12 operations/s: the median of LocalScore's desktop CPUs read
prompts of Llama 3.1 8B at 60 tokens/s (d893a/localscore-insights, a4f81747b3)."""
ERRORS = {"decode": (21, 0.054, 0.296), "prompt": (10, 0.086, 0.287)}
"""Published results with layers on the CPU, and the median and P90 of the errors of their estimates."""


@dataclass(frozen=True)
class OnCpu:
    """What of a model is in the computer's memory."""

    layers: float = 0.0
    """Share of the layers, with their K and V."""
    experts: float = 0.0
    """Share of the experts."""
    head: bool = False

    @staticmethod
    def of(shape: MemoryShape, n_gpu_layers: int | None, n_cpu_moe: int) -> OnCpu:
        """What these options leave there; ``n_gpu_layers``: None for all on the device."""
        n = shape.n_layers
        layers = 0 if n_gpu_layers is None else min(max(n + 1 - n_gpu_layers, 0), n)
        experts = max(layers, min(n_cpu_moe, n)) if shape.n_experts else 0
        return OnCpu(layers / n, experts / n, n_gpu_layers == 0)

    def weight_bytes(self, shape: MemoryShape, weights: str) -> int:
        """Bytes of the weights there, but for the table of embeddings."""
        found = self.layers * shape.matrices.bytes(weights) + self.experts * shape.experts.bytes(weights)
        return round(found + self.head * shape.head.bytes(weights))


@dataclass(frozen=True)
class CpuSide:
    """A computer whose CPU has a part of the layers."""

    physics: PassPhysics
    """The passes, as if the CPU took them whole."""
    bus_gb_s: float

    @staticmethod
    def of(physics: PassPhysics, cpu_gb_s: float | None) -> CpuSide:
        """The computer of a device; ``cpu_gb_s``: None for the device's usual."""
        device = physics.device
        rates = {"bandwidth_gb_s": cpu_gb_s or device.cpu_gb_s, "tflops": CPU_TFLOPS, "tops_int8": None}
        cpu = device.model_copy(update={"kind": "cpu", **rates})
        return CpuSide(replace(physics, device=cpu), device.bus_gb_s)

    def spread(
        self,
        share: float,
        on_device_s: FloatArray,
        tokens: FloatArray,
        need: Callable[[PassPhysics], Need],
        copying: float = COPYING,
    ) -> FloatArray:
        """Seconds of a part of which a share is here, where it would take ``on_device_s`` wholly on the device."""
        own = need(self.physics)
        computed_s = np.maximum(own.reading_s / READING, own.computing_s)
        copied_s = own.reading_s * (self.physics.device.bandwidth_gb_s / self.bus_gb_s / copying)
        here_s = np.where(tokens < MIN_BATCH, computed_s, on_device_s + copied_s)
        found: FloatArray = (1 - share) * on_device_s + share * here_s
        return found

    def copies(self, share: float, on_device_s: tuple[float, float]) -> tuple[float, float]:
        """Seconds to move one cell and to rotate its K, where they take ``on_device_s`` wholly on the device."""
        move, shift = (
            (1 - share) * d + share * c / READING for d, c in zip(on_device_s, self.physics.copies(), strict=True)
        )
        return move, shift


def check_served(of: Served) -> None:
    """Raise ``UserError`` for options that the engine, the device or the model has no use for."""
    option, device = of.only_llamacpp, device_named(of.device)
    if of.ep > 1 and of.engine == "llamacpp":
        raise UserError("--ep: vLLM has it and llama.cpp has not; give --engine vllm, or leave it out")
    if option is None:
        return
    if of.engine != "llamacpp":
        raise UserError(f"{option}: llama.cpp has it and vLLM has not; give --engine llamacpp, or leave it out")
    placed = option != "--no-flash-attn"
    if placed and device.kind in ("apple", "cpu"):
        raise UserError(f"{option}: {device.title} has one memory for CPU and GPU, so nothing is gained; leave it out")
    if of.n_cpu_moe and not memory_shape(of.model).n_experts:
        raise UserError(f"--n-cpu-moe: {of.model} has no experts; --ngl keeps whole layers on the CPU")
