"""Where a model may be served: devices, models, and how many devices share which types of weights, K and V."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import plan
from kvsim.costs.memory_settings import Engine
from kvsim.costs.served import Served
from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import STORED, Storage
from kvsim.model.memory_shapes import memory_shape

Table = tuple[dict[str, Any], str, Path]
"""A scenario's table, its name for messages, and the folder at which relative paths start (``scenario.table_of``)."""

Value = TypeVar("Value", str, int)


@dataclass(frozen=True)
class Place:
    """A model on a device, or on several that share it, and the types in which it is stored."""

    device: str
    model: str
    tensor_parallel: int = 1
    weights: str | None = None
    """Storage type of the weights; None: the model's own."""
    kv: str | None = None
    """Storage type of K and V; None: 16 bits, and narrower ones where they help."""
    profile: str | None = None
    """The profile that the scenario or the user chose for its device; None: found by model and device."""
    n_gpu_layers: int | None = None
    """llama.cpp: layers on the device; None: all."""
    n_cpu_moe: int = 0
    """llama.cpp: layers whose experts the CPU has."""
    cpu_gb_s: float | None = None
    """Bandwidth of the computer's memory, 10**9 bytes/s; None: the device's usual."""

    def served(self, engine: Engine) -> Served:
        """What is served under an engine, with K and V as named, or in 16 bits."""
        kv = stored_type("--kv", self.kv or "f16")
        placed = (self.n_gpu_layers, self.n_cpu_moe, self.cpu_gb_s)
        return Served(engine, self.device, self.model, self.tensor_parallel, self.weights, kv, kv, *placed)

    def name(self, among: Sequence[Place]) -> str:
        """What it is called in tables: its devices, and what else it does not have in common with the others."""
        parts = [self.device if self.tensor_parallel == 1 else f"{self.tensor_parallel} x {self.device}"]
        parts += [self.model] if _differ(among, "model") else []
        parts += [f"weights {self.weights or 'as they are'}"] if _differ(among, "weights") else []
        parts += [f"K/V {self.kv}"] if _differ(among, "kv") else []
        return ", ".join(parts)

    def file(self, among: Sequence[Place]) -> str:
        """The file of its best scenario: ``best-rtx4090.toml``, with what else differs."""
        parts = [self.device]
        parts += [re.sub(r"[^\w.]", "-", memory_shape(self.model).name)] if _differ(among, "model") else []
        parts += [f"tp{self.tensor_parallel}"] if _differ(among, "tensor_parallel") else []
        parts += [f"weights-{self.weights or 'own'}"] if _differ(among, "weights") else []
        parts += [f"kv-{self.kv}"] if _differ(among, "kv") else []
        return f"best-{'-'.join(parts)}.toml"


def _differ(among: Sequence[Place], key: str) -> bool:
    return len({getattr(place, key) for place in among}) > 1


def stored_type(option: str, name: str) -> Storage:
    """The storage type of that name. Raises ``UserError``."""
    if name not in STORED:
        raise UserError(f"{option}: {no_such('type', name, STORED)}")
    return name


def each_once(given: Value | Sequence[Value] | None, option: str) -> tuple[Value, ...]:
    """One value or several as a tuple. Raises ``UserError`` for one that is given twice."""
    values = (given,) if isinstance(given, str | int) else tuple(given or ())
    for at, value in enumerate(values):
        if value in values[:at]:
            raise UserError(f"{option}: {value} is given twice; each is asked about once")
    return values


def places_of(
    table: Table,
    devices: Sequence[str],
    models: Sequence[str],
    shared_by: Sequence[int],
    weights: Sequence[str],
    kv: Sequence[str],
    profile: str | None,
    **placed: float | None,
) -> tuple[Place, ...]:
    """Every combination of the options given; where they say nothing, of what the scenario says. Raises ``UserError``.

    ``shared_by``: numbers of devices that share the model. ``placed``: the fields of ``Place`` about layers on the CPU,
    each None if not given.
    """
    machine = table[0].get("machine") or {}
    models = models or tuple(filter(None, [(table[0].get("model") or {}).get("name")]))
    if not models:
        raise UserError("--device: name the model that is served (--model)")
    usual: dict[str, Any] = {"tp": 1, "weights": None, "kv": None}
    if not devices:
        usual["tp"] = machine.get("tensor_parallel", 1)
        usual["weights"] = machine.get("weights")
        usual["kv"] = (table[0].get("cache") or {}).get("type_k")
        profile = profile or machine.get("profile")
        devices = [machine["device"]]
        placed = {key: machine.get(key) if value is None else value for key, value in placed.items()}
    more: dict[str, Any] = {key: value for key, value in placed.items() if value is not None}
    # What is divided comes last, so that like is beside like.
    every = itertools.product(
        models, devices, weights or [usual["weights"]], kv or [usual["kv"]], shared_by or [usual["tp"]]
    )
    places = tuple(
        Place(device, model, tp, stored, types, profile, **more) for model, device, stored, types, tp in every
    )
    for place in places:
        # Raises ``UserError`` for what it does not know.
        plan(place.model, tensor_parallel=place.tensor_parallel, weights=place.weights)
    return places


def read_devices(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of devices that were given. Raises ``UserError`` for one that is not known, and for one given twice."""
    names = each_once(given, "--device")
    for name in names:
        device_named(name)
    return names


def read_prices(given: str | Mapping[str, float] | None, devices: Sequence[str]) -> dict[str, float]:
    """Prices of an hour by device, of a text such as ``rtx4090=0.4,a100_sxm=1.8``. Raises ``UserError``."""
    if given is None:
        return {}
    pairs = [part.partition("=")[::2] for part in given.split(",")] if isinstance(given, str) else list(given.items())
    prices: dict[str, float] = {}
    for name, price in ((str(name).strip(), str(price).strip()) for name, price in pairs):
        if not name or not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,2})?", price) or not 0 < float(price) < 1e9:
            raise UserError(
                f"--price: {f'{name}={price}'!r:.60}: a device and the price of an hour above 0 are expected, such as "
                "rtx4090=0.4,a100_sxm=1.8"
            )
        try:
            device_named(name)
        except UserError as e:
            raise UserError(f"--price: {e}") from None
        if name in prices:
            raise UserError(f"--price: {name} is given twice; one price for each device is accepted")
        if name not in devices:
            asked = ", ".join(devices) or "none"
            raise UserError(f"--price: {name} is not among the devices asked about (--device): {asked}")
        prices[name] = float(price)
    return prices


def own_device(table: Table) -> str | None:
    """The device that a scenario names itself."""
    machine = table[0].get("machine")
    device = machine.get("device") if isinstance(machine, dict) else None
    return device if isinstance(device, str) else None
