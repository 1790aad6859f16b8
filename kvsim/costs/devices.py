"""The devices that scenarios and commands can name, with their memory, bandwidth and rate of operations."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.errors import UserError, no_such
from kvsim.results import MEGABYTE, text_of

Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
USUAL_BUS = "PCIe 4.0 x16"
DeviceKind = Literal["datacentre", "consumer", "apple", "amd", "instinct", "cpu"]
"""Kinds of devices: NVIDIA's for data centres and others, Apple's, AMD's and its Instinct ones, processors."""


def carried_gb_s(bus: str, memory_gb_s: float) -> float:
    """What a bus carries in each direction, 10**9 bytes/s: PCIe 4.0 x16 what was measured of it, other versions and
    widths of PCIe in proportion to it, and a unified memory its own ``memory_gb_s``; what is unknown, PCIe 4.0 x16."""
    if bus == "unified memory":
        return memory_gb_s
    found = re.fullmatch(r"PCIe (\d)\.0 x(\d+)", bus)
    return 24.0 * 2.0 ** (int(found[1]) - 4) * int(found[2]) / 16 if found else 24.0


class Device(BaseModel):
    """A GPU or processor, as its maker and those who measured it describe it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,40}$")]
    """The name in scenarios and commands."""
    title: str
    """The maker's name."""
    kind: DeviceKind
    memory_bytes: Annotated[int, Field(ge=2**28, le=2**44)]
    """The memory that an engine can use, as the device reports it."""
    memory_source: str
    """Where the figure of the memory comes from."""
    bandwidth_gb_s: Rate
    """Memory bandwidth by the data sheet, 10**9 bytes/s."""
    tflops: Rate
    """Dense peak of matrix products in 16 bits with sums in 32, 10**12 operations/s."""
    tflops_fp8: Rate | None = None
    """Dense peak in FP8, 10**12 operations/s; None: it has no such products, and computes in 16 bits."""
    tflops_fp4: Rate | None = None
    """Dense peak in FP4, 10**12 operations/s; None: as for FP8."""
    tops_int8: Rate | None = None
    """Dense peak in INT8, 10**12 operations/s; None: it has no such products."""
    link_gb_s: Rate = 32.0
    """Bandwidth to the other devices that share a model, in each direction, 10**9 bytes/s."""
    cpu_gb_s: Rate = 89.6
    """Bandwidth of the computer's own memory, 10**9 bytes/s, which llama.cpp's layers on the CPU are read from; unless
    said, that of two channels of DDR5-5600 (JESD79-5: 8 bytes * 5,600 million/s each)."""
    bus: str = USUAL_BUS
    """What connects it to that memory, by the data sheet."""
    bus_gb_s: Rate = Field(default_factory=lambda said: carried_gb_s(said["bus"], said["bandwidth_gb_s"]))
    """Bandwidth of copies over it in each direction, 10**9 bytes/s; unless said, ``carried_gb_s``."""
    source: str = ""
    """The data sheet, or who states the figures."""
    titles: tuple[str, ...] = ()
    """Parts of the names that recordings give it, in lower case, letters and digits only."""
    package: str | None = None
    """The name that aiconfigurator-core has for it; None if it has no kernels of it."""

    def peak_s(self, weights: str, engine: str = "vllm") -> float:
        """Operations per second at most of products with weights of a type, as an engine computes them.

        vLLM computes in the type of the weights if the device can, else in 16 bits, and with MXFP4 at the rate of FP8,
        in which activations are. llama.cpp multiplies quantised weights as INT8 where the device can, and those in 16
        bits with sums in 16, at which GeForce is twice as fast.
        """
        rate = self.tflops
        if engine == "llamacpp":
            int8 = self.tops_int8 or rate
            rate = max(rate, int8 / 2 if weights in ("f16", "bf16") else int8)
        elif weights in ("fp8", "fp8_block", "fp8_static"):
            rate = self.tflops_fp8 or rate
        elif weights == "nvfp4":
            rate = self.tflops_fp4 or rate
        elif weights == "mxfp4" and self.tflops_fp4:
            rate = self.tflops_fp8 or rate
        return rate * 1e12


@cache
def devices() -> dict[str, Device]:
    """All shipped devices by name."""
    text = (resources.files("kvsim.costs") / "devices.toml").read_text(encoding="utf-8")
    return {name: Device(name=name, **table) for name, table in tomllib.loads(text).items()}


def device_named(name: str) -> Device:
    """The device of that name, or that of a file such as my.toml. Raises ``UserError`` with the nearest names."""
    if name.endswith(".toml"):
        return _device_of_file(Path(name))
    try:
        return devices()[name]
    except KeyError:
        raise UserError(f"{no_such('device', name, devices())}, or a file such as my-device.toml") from None


def _device_of_file(path: Path) -> Device:
    """The device that a TOML file describes by the keys of ``Device``. Raises ``UserError``."""
    try:
        table: dict[str, Any] = tomllib.loads(text_of(path, MEGABYTE))
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not TOML: {e!s:.120}") from None
    try:
        return Device.model_validate({"name": path.stem, "title": path.stem, "memory_source": str(path), **table})
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        accepted = ", ".join(field for field in Device.model_fields if field not in ("package", "titles"))
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg'].lower()}; keys are {accepted}") from None


def recorded_device(title: str) -> Device:
    """The device that a recording names in its own way, such as "NVIDIA GeForce RTX 4090". Raises ``UserError``."""
    text, found = title.lower(), []
    for device in devices().values():
        # Of those on SXM boards there are slower forms, on cards of their own.
        if device.name.endswith("_sxm") and re.search("pcie|nvl", text):
            continue
        # Whatever stands between the characters, but no further digit behind them: an A100 is no A10.
        found += [
            (len(part), device) for part in device.titles if re.search(r"[^a-z0-9]*".join(part) + r"(?!\d)", text)
        ]
    if not found:
        raise UserError(no_such("device", title, devices()))
    # The longest part: an RTX 4070 SUPER is no RTX 4070.
    return max(found, key=lambda each: each[0])[1]
