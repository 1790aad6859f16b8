"""What ``aiconfigurator-core`` can be asked about, by name."""

from __future__ import annotations

from kvsim.costs.devices import devices

SYSTEMS = {name: device.package for name, device in devices().items() if device.package is not None}
"""The package's names of the devices that it has kernels of."""

ENGINES = ("vllm", "sglang", "trtllm")

WEIGHTS = {
    "bf16": "bfloat16",
    "f16": "bfloat16",
    "fp8": "fp8",
    "fp8_static": "fp8_static",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "int8": "int8",
    "int4": "int4",
}
"""The package's names of types of weights; which of them it has depends on the device and the engine."""
