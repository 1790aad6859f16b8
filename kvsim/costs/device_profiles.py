"""Profiles of models on devices: those that ship with kvsim, and those that users have made."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_data_path

from kvsim.costs.devices import device_named, devices
from kvsim.costs.memory_settings import Engine
from kvsim.costs.served import Served
from kvsim.costs.shipped import shipped_names
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_shapes import Storage
from kvsim.model.memory_shapes import memory_shape, own_type

if TYPE_CHECKING:
    from kvsim.costs.profile import Profile


def own_profiles() -> Path:
    """The folder in which ``kvsim profile`` keeps the profiles that users make.

    The environment's ``KVSIM_PROFILES`` or, without it, the platform's folder for data of this user.
    """
    chosen = os.environ.get("KVSIM_PROFILES")
    return Path(chosen).expanduser().absolute() if chosen else user_data_path("kvsim", appauthor=False) / "profiles"


def profile_name(
    shape: MemoryShape,
    device: str,
    *,
    tp: int = 1,
    ep: int = 1,
    weights: str | None = None,
    engine: Engine = "vllm",
    type_k: str = "f16",
    type_v: str = "f16",
) -> str:
    """The name of the profile of a model on a device. Raises ``UserError`` if there is no such device.

    ``tp``: devices that share the model; ``ep``: those that divide its experts alone; ``weights``: their storage type
    unless it is the model's own.
    """
    parts = [device_named(device).name, re.sub(r"[^\w.-]", "-", shape.name)]
    parts += [f"tp{tp}"] if tp > 1 else []
    parts += [f"ep{ep}"] if ep > 1 else []
    parts += [chosen] if (chosen := _chosen(weights, shape)) else []
    parts += [engine] if engine != "vllm" else []
    parts += ["kv", *dict.fromkeys([type_k, type_v])] if (type_k, type_v) != ("f16", "f16") else []
    return "-".join(parts)


def _chosen(weights: str | None, shape: MemoryShape) -> str | None:
    """The type of weights that is chosen; None for the model's own: blocks of fp8, too, are had by asking for fp8."""
    weights, own = (weights or shape.default_type).lower(), own_type(shape)
    return None if weights == own or (weights, own) == ("fp8", "fp8_block") else weights


def find_profile(
    model: str,
    device: str,
    *,
    tp: int = 1,
    ep: int = 1,
    weights: str | None = None,
    engine: Engine = "vllm",
    type_k: Storage = "f16",
    type_v: Storage = "f16",
    own: bool = True,
    **placed: Any,
) -> str:
    """What ``load_profile`` takes to load the profile of a model on a device: a user's own, a shipped one, an estimate.

    Of a shipped model with K and V in other types than were measured, it is the shipped profile, adapted to them.
    ``own``: whether to look among the user's own. ``placed``: the other fields of ``Served``; with layers on the CPU or
    without flash attention nothing was measured. Raises ``UserError`` if there is no such model or device.
    """
    shape = memory_shape(model)
    weights = _chosen(weights, shape)
    file = Path(model).expanduser()
    model = str(file.absolute()) if file.exists() else model
    served = Served(engine, device, model, tp, weights, type_k, type_v, ep=ep, **placed)
    if served.only_llamacpp:
        return served.estimate
    profiles = device_profiles(own=own)
    of: dict[str, Any] = {"tp": tp, "ep": ep, "weights": weights, "engine": engine}
    known = profiles.get(profile_name(shape, device, type_k=type_k, type_v=type_v, **of))
    if known is not None:
        return known
    measured = profiles.get(profile_name(shape, device, **of))
    if measured in shipped_names() and not file.exists():
        return f"{measured}?k={type_k}&v={type_v}"
    return served.estimate


def find_device_profile(model: str, device: str, **more: Any) -> Profile:
    """The profile of a model on a device. Arguments and exceptions are those of ``find_profile``."""
    from kvsim.costs.load_profile import load_profile

    return load_profile(find_profile(model, device, **more))


def device_profiles(*, own: bool = True) -> dict[str, str]:
    """What ``load_profile`` takes for each profile of a device, by name; a user's own comes before a shipped one.

    ``own``: whether to look for these.
    """
    of_devices = [name for name in shipped_names() if any(name.startswith(f"{device}-") for device in devices())]
    found = {name: name for name in of_devices}
    folder = own_profiles()
    if own and folder.is_dir():
        found |= {path.stem: str(path) for path in sorted(folder.glob("*.json"))}
    return found
