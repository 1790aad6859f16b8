"""Profiles of models on devices: those that ship with kvsim, and those that users have made."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_data_path

from kvsim.costs.devices import device_named, devices
from kvsim.costs.shipped import shipped_names
from kvsim.errors import NoTimes
from kvsim.model.attention_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape

if TYPE_CHECKING:
    from kvsim.costs.profile import Profile


def own_profiles() -> Path:
    """The folder in which ``kvsim profile`` keeps the profiles that users make.

    The environment's ``KVSIM_PROFILES`` or, without it, the platform's folder for data of this user.
    """
    chosen = os.environ.get("KVSIM_PROFILES")
    return Path(chosen).expanduser().absolute() if chosen else user_data_path("kvsim", appauthor=False) / "profiles"


def profile_name(shape: MemoryShape, device: str, *, tp: int = 1, weights: str | None = None) -> str:
    """The name of the profile of a model on a device. Raises ``UserError`` if there is no such device.

    ``tp``: devices that share the model; ``weights``: their storage type unless it is the model's own.
    """
    parts = [device_named(device).name, re.sub(r"[^\w.-]", "-", shape.name)]
    parts += [f"tp{tp}"] if tp > 1 else []
    parts += [weights.lower()] if weights and weights.lower() != shape.default_type else []
    return "-".join(parts)


def find_profile(model: str, device: str, *, tp: int = 1, weights: str | None = None) -> str:
    """What ``load_profile`` takes to load the profile of a model on a device: the name of a shipped one, or a file.

    Raises ``UserError`` if there is no such model or device, and ``NoTimes`` if there is no such profile yet.
    """
    shape = memory_shape(model)
    name = profile_name(shape, device, tp=tp, weights=weights)
    own = own_profiles() / f"{name}.json"
    if own.is_file():
        return str(own)
    if name in shipped_names():
        return name
    options = "".join([f" --tp {tp}" if tp > 1 else "", f" --weights {weights}" if weights else ""])
    on = sorted(known.removeprefix(f"{device}-") for known in device_profiles() if known.startswith(f"{device}-"))
    have = f"; there are times on {device} for {', '.join(on)}" if on else ""
    how = f"make its profile with: kvsim profile make --device {device} --model {model}{options}"
    if device_named(device).package is None:
        options = f" --tp {tp} --link-gb-s N --link-latency-us N" if tp > 1 else ""
        how = (
            f"import tables of its kernels with: kvsim profile import FOLDER --device {device} --model {model}{options}"
        )
    raise NoTimes(f"no times for {shape.name} on {device}{options}: {how}{have}")


def find_device_profile(model: str, device: str, *, tp: int = 1, weights: str | None = None) -> Profile:
    """The profile of a model on a device. Raises as ``find_profile``."""
    from kvsim.costs.profile import load_profile

    return load_profile(find_profile(model, device, tp=tp, weights=weights))


def device_profiles() -> dict[str, str]:
    """What ``load_profile`` takes for each profile of a device, by name; a user's own comes before a shipped one."""
    of_devices = [name for name in shipped_names() if any(name.startswith(f"{device}-") for device in devices())]
    found = {name: name for name in of_devices}
    folder = own_profiles()
    if folder.is_dir():
        found |= {path.stem: str(path) for path in sorted(folder.glob("*.json"))}
    return found
