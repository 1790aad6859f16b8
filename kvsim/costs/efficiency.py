"""How near engines come to what a device could do: fitted shares of bandwidth and peak by part of a pass.

``efficiencies.json`` has them by engine, make of device and storage type, with the errors that were found on devices
and models left out of the fit. ``benchmarks/device_times`` makes it, and says of what.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import Field

from kvsim.costs.devices import Device
from kvsim.costs.memory_settings import Engine
from kvsim.costs.physics import Need, PassPhysics
from kvsim.costs.records import Record, Seconds
from kvsim.costs.tables import FloatArray

Share = Annotated[float, Field(gt=0, le=1)]
BUS_GB_S = 64.0
"""What a bus has at most, PCIe 5.0 with 16 lanes; links between devices have more."""


def engine_kind(engine: str) -> Engine:
    """Whose times those of an engine, with its version, are: all but llama.cpp's are taken as vLLM's."""
    return "llamacpp" if engine.startswith("llama.cpp") else "vllm"


def make_of(engine: Engine, device: Device) -> str:
    """Devices of which an engine reaches alike much: a key of ``efficiencies``, or a kind that was not measured."""
    if device.kind not in ("datacentre", "consumer"):
        return device.kind
    if engine == "vllm":
        return "blackwell" if device.tflops_fp4 else "nvidia"
    # Their peak takes instructions that llama.cpp has none of (wgmma, tcgen05); what has no HBM has the older ones.
    hopper = device.kind == "datacentre" and device.tflops_fp8 and device.bandwidth_gb_s > 1800
    return "hopper" if hopper else "nvidia"


class Efficiency(Record):
    """One part of a pass, by the share of the device's bandwidth and of its peak that an engine's kernels reach."""

    reading: Share
    computing: Share
    sharpness: Annotated[float, Field(ge=1, le=100)] = 2.0
    """How well reading and computing overlap: the part takes the norm of this order of both, which is their sum at 1
    and the longer of the two at infinity."""
    unpacking: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Operations for each weight that is unpacked, by the device's rate in 16 bits, besides those of products."""
    layer_s: Seconds = 0.0
    """What each layer takes whatever is read or computed: launches of kernels."""

    def seconds(self, need: Need, layers: int) -> FloatArray:
        """Seconds of the part in all layers."""
        p = self.sharpness
        read = need.reading_s / self.reading + need.unpacking_s * self.unpacking
        both = read**p + (need.computing_s / self.computing) ** p
        found: FloatArray = both ** (1 / p) + layers * self.layer_s
        return found


class Errors(Record):
    """Relative errors of estimates on devices and models that were left out of the fit; None where none is known."""

    decode_median: float | None = None
    decode_p90: float | None = None
    prompt_median: float | None = None
    prompt_p90: float | None = None
    passes: int = 0
    """How many measurements these are of."""


class Unfused(Record):
    """Attention without flash attention, as separate products and a softmax."""

    decode: Efficiency
    prompt: Efficiency
    decode_median: float
    """Error of what a longer context adds to a step, on devices left out of the fit where there are several."""
    decode_p90: float
    prompt_median: float
    prompt_p90: float
    devices: int
    """How many it was fitted to."""


class EngineEfficiency(Record):
    """What was fitted for one engine on devices of one make."""

    matrices: dict[str, Efficiency]
    """By group of storage types of the weights."""
    experts: dict[str, Efficiency]
    head: Efficiency
    elementwise: Efficiency | None = None
    """Norms and activations; None: with the matrices."""
    exchange: Efficiency | None = None
    """Between devices: the share of the link's bandwidth, and the seconds of a message; None: one device only."""
    bus: Efficiency | None = None
    """Exchanges between devices that have no link but the bus (``BUS_GB_S``); None: as with a link."""
    decode: Efficiency
    """Attention of sequences that decode."""
    latent: Efficiency | None = None
    """That of latents; None: as of any other."""
    quantised: Efficiency | None = None
    """Attention of sequences that decode over K or V in fewer than 16 bits, other than latents; None: as ``decode``."""
    prompt: Efficiency
    """Attention of prompts."""
    unfused: Unfused | None = None
    """None: not measured."""
    errors: dict[str, Errors]
    """By group of storage types; "experts" after the group is of mixtures of experts, "states" of models with
    layers that keep a state, and "all" of everything."""
    source: str
    """What it was fitted to."""

    def of(self, table: dict[str, Efficiency], kind: str) -> tuple[Efficiency, str]:
        """The efficiency for weights of a type, and the group that it was fitted to: that of the nearest size."""
        group = storage_group(kind)
        if group not in table:
            group = min(table, key=lambda known: (abs(_BITS[known] - _BITS[group]), known))
        return table[group], group

    def decoding(self, physics: PassPhysics) -> Efficiency:
        """The efficiency of attention of sequences that decode."""
        if any(group.kind == "latent" for group in physics.shape.groups):
            return self.latent or self.decode
        return (self.quantised if physics.quantised else None) or self.decode

    def errors_of(self, kind: str, *, experts: bool) -> Errors:
        """The errors that were found for weights of a type, or on the whole if there were too few."""
        return self.errors.get(storage_group(kind) + (" experts" if experts else ""), self.errors["all"])


STORAGE_GROUPS = {
    "f16": ("f16", "bf16", "f32"),
    "fp8": ("fp8", "fp8_static", "int8"),
    "fp8_block": ("fp8_block",),
    "q8_0": ("q8_0",),
    "q4_0": ("q4_0", "q4_1", "iq4_nl", "iq4_xs", "q5_0", "q5_1"),
    "int4": ("int4", "int4_g32"),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}
"""Storage types whose kernels are alike; all others are llama-quantize's mixtures."""
_GROUP = {kind: group for group, kinds in STORAGE_GROUPS.items() for kind in kinds}
_BITS = {
    "f16": 16.0,
    "fp8": 8.0,
    "fp8_block": 8.0,
    "q8_0": 8.5,
    "k": 5.0,
    "q4_0": 4.5,
    "int4": 4.5,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}


def storage_group(kind: str) -> str:
    """The group of a storage type of weights; "k" for mixtures."""
    return _GROUP.get(kind, "k")


@cache
def efficiencies() -> dict[str, dict[str, EngineEfficiency]]:
    """All that was fitted, by engine and make of device."""
    text = (resources.files("kvsim.costs") / "efficiencies.json").read_text(encoding="utf-8")
    return {
        engine: {make: EngineEfficiency.model_validate(table) for make, table in makes.items()}
        for engine, makes in json.loads(text).items()
    }
