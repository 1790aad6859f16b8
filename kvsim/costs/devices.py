"""The devices that scenarios and commands can name, with their memory and bandwidth."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kvsim.errors import UserError, no_such


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, as its maker and those who measured it describe it."""

    name: str
    """The name in scenarios and commands."""
    title: str
    """The maker's name."""
    memory_bytes: int
    """All of its memory, as CUDA reports it."""
    memory_source: str
    """Where the figure of the memory comes from."""
    bandwidth_gb_s: float
    """Memory bandwidth by the data sheet, 10**9 bytes/s."""
    titles: tuple[str, ...]
    """Parts of the names that recordings give it, in lower case, letters and digits only."""
    package: str | None = None
    """The name that aiconfigurator-core has for it; None if it has no kernels of it."""


@cache
def devices() -> dict[str, Device]:
    """All devices by name."""
    text = (resources.files("kvsim.costs") / "devices.toml").read_text(encoding="utf-8")
    return {
        name: Device(name=name, **{**table, "titles": tuple(table["titles"])})
        for name, table in tomllib.loads(text).items()
    }


def device_named(name: str) -> Device:
    """The device of that name. Raises ``UserError`` with the nearest names."""
    try:
        return devices()[name]
    except KeyError:
        raise UserError(no_such("device", name, devices())) from None


def recorded_device(title: str) -> Device:
    """The device that a recording names in its own way, such as "NVIDIA GeForce RTX 4090". Raises ``UserError``."""
    plain = re.sub(r"[^a-z0-9]", "", title.lower())
    for device in devices().values():
        # Of those on SXM boards there are slower forms, on cards of their own.
        other_form = device.name.endswith("_sxm") and re.search("pcie|nvl", plain)
        if any(part in plain for part in device.titles) and not other_form:
            return device
    raise UserError(no_such("device", title, devices()))
