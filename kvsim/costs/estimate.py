"""Times of a model on a device that were not measured: physics, times what engines reach of it elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kvsim.costs.devices import Device, device_named
from kvsim.costs.efficiency import Efficiency, EngineEfficiency, efficiencies, engine_kind, storage_group
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.costs.pass_tables import Grid, Line, PassTables
from kvsim.costs.physics import Need, PassPhysics
from kvsim.costs.profile import CopyCost, Profile, Range, Source, exactly
from kvsim.costs.served import Served
from kvsim.costs.tables import FloatArray
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORED
from kvsim.model.memory_shapes import memory_shape

_TOKENS = tuple(sorted({round(2 ** (i / 4)) for i in range(65)}))
"""Tokens of the entries of tables: 1 to 65,536."""
_SEQUENCES = tuple(1 << i for i in range(13))
_CELLS = tuple(1 << i for i in range(4, 21))
_CHUNK = _TOKENS[::4]
_MEASURED_TOKENS, _MEASURED_CELLS, _MEASURED_SEQUENCES = 8192, 32768, 512
"""The largest passes that efficiencies were fitted to."""
_MAKES = {"datacentre": "nvidia", "consumer": "nvidia"}
"""Makes of devices by their kind, where they are not the kind's name."""


def estimated(of: Served) -> Profile:
    """The profile of what is served. Raises ``UserError`` for a model, device or type that is not known."""
    shape, device = memory_shape(of.model), device_named(of.device)
    weights = of.weights or shape.default_type
    physics = PassPhysics(device, shape, weights, of.type_k, of.type_v, of.tp, of.engine)
    fitted, make = _efficiency(of.engine, device)
    moe = shape.n_experts > 0
    errors = fitted.errors_of(_expert_type(physics) if moe else weights, experts=moe)
    moves, shift = physics.copies()
    return Profile(
        tables=_tables(physics, fitted),
        estimated=errors,
        samples=errors.passes,
        digest="",
        moves=CopyCost(per_run_s=exactly(0.0), per_cell_s=exactly(moves)),
        shift_per_cell_s=exactly(shift),
        name="-".join([device.name, re.sub(r"[^\w.-]", "-", shape.name), "estimate"]),
        engine="vllm" if of.engine == "vllm" else "llama.cpp",
        model=shape.name,
        type_k=of.type_k,
        type_v=of.type_v,
        measured="",
        tokens=Range(low=1, high=_MEASURED_TOKENS),
        cells=Range(low=1, high=_MEASURED_CELLS),
        sequences=_MEASURED_SEQUENCES,
        device=of.device,
        tensor_parallel=of.tp,
        weights=weights or None,
        source=Source(
            title=f"physics and the efficiency of {fitted.source}",
            url="",
            licence="",
            version="",
            notes=tuple(_notes(physics, fitted, make)),
        ),
    )


def adapted(measured: Profile, type_k: str, type_v: str) -> Profile:
    """The tables of a device with K and V in other types: attention takes as many times as long as by the estimates.

    Raises ``UserError`` for types that there are not, and for a profile without tables.
    """
    if measured.tables is None or measured.device is None or not {type_k, type_v} <= set(STORED):
        raise UserError(f"{measured.name}: it cannot be had with K in {type_k} and V in {type_v}; {', '.join(STORED)}")
    engine, device, shape = engine_kind(measured.engine), device_named(measured.device), memory_shape(measured.model)
    of = (measured.weights or shape.default_type, measured.type_k, measured.type_v, measured.tensor_parallel, engine)
    before = PassPhysics(device, shape, *of)
    after, found = replace(before, type_k=type_k, type_v=type_v), _efficiency(engine, device)[0]

    def scaled(grid: Grid, part: Efficiency, need: Callable[[PassPhysics, FloatArray, FloatArray], Need]) -> Grid:
        rows, columns = np.array(grid.rows, dtype=float)[:, None], np.array(grid.columns, dtype=float)[None, :]
        both = [part.seconds(need(physics, rows, columns), shape.n_layers) for physics in (after, before)]
        seconds = np.array(grid.seconds) * (both[0] / both[1])
        return grid.model_copy(update={"seconds": tuple(_plain(row) for row in seconds)})

    tables = measured.tables.model_copy(
        update={
            "decode": scaled(measured.tables.decode, found.decode, PassPhysics.decode),
            "prompt": scaled(measured.tables.prompt, found.prompt, PassPhysics.prompt),
        }
    )
    assert measured.source is not None
    title = f"{measured.source.title} (attention scaled from {measured.type_k} by what fewer bytes save)"
    update = {"tables": tables, "type_k": type_k, "type_v": type_v}
    return measured.model_copy(update=update | {"source": measured.source.model_copy(update={"title": title})})


def _efficiency(engine: str, device: Device) -> tuple[EngineEfficiency, str]:
    """What was fitted for an engine on devices of this make, and that make: another, if there is none."""
    makes = efficiencies()[engine]
    make = _MAKES.get(device.kind, device.kind)
    if make not in makes:
        make = "nvidia"
    return makes[make], make


def _notes(physics: PassPhysics, fitted: EngineEfficiency, make: str) -> Iterator[str]:
    """What was taken from something else because it was not measured, one sentence each."""
    shape, engine = physics.shape, ENGINE_TITLES[physics.engine]
    if _MAKES.get(physics.device.kind, physics.device.kind) != make:
        yield (
            f"{engine} was not measured on devices such as {physics.device.title}: it is taken to reach as much of it "
            "as of NVIDIA's."
        )
    kinds = [("matrices", fitted.matrices, physics.weights)]
    if shape.n_experts:
        if (kind := _expert_type(physics)) != physics.weights:
            yield f"Experts are in {kind}, as the model has them."
        kinds.append(("experts", fitted.experts, _expert_type(physics)))
    for what, table, kind in kinds:
        group = fitted.of(table, kind)[1]
        if group != storage_group(kind):
            yield f"{engine}'s {what} in {kind} were not measured: they are priced with the efficiency of {group}."
    if physics.tp > 1:
        yield f"The link between the devices is taken to have {physics.device.link_gb_s:g} GB/s in each direction."


def _tables(physics: PassPhysics, fitted: EngineEfficiency) -> PassTables:
    """Tables by physics and an engine's efficiencies."""
    shape, layers = physics.shape, physics.shape.n_layers
    tokens = np.array(_TOKENS, dtype=float)
    work = fitted.of(fitted.matrices, physics.weights)[0].seconds(physics.matrices(tokens), layers)
    if fitted.elementwise is not None:
        work += fitted.elementwise.seconds(physics.elementwise(tokens), layers)
    if shape.n_experts:
        work += fitted.of(fitted.experts, _expert_type(physics))[0].seconds(physics.experts(tokens), layers)
    if physics.tp > 1 and fitted.exchange is not None:
        work += fitted.exchange.seconds(physics.exchange(tokens), 2 * layers + 1)
    sequences, cells = np.array(_SEQUENCES, dtype=float), np.array(_CELLS, dtype=float)
    chunk = np.array(_CHUNK, dtype=float)
    decode = fitted.decode.seconds(physics.decode(sequences[:, None], cells[None, :]), layers)
    prompt = fitted.prompt.seconds(physics.prompt(chunk[:, None], cells[None, :]), layers)
    return PassTables(
        work=Line(at=_TOKENS, seconds=_plain(work)),
        head=Line(at=_SEQUENCES, seconds=_plain(fitted.head.seconds(physics.head(sequences), 1))),
        decode=Grid(rows=_SEQUENCES, columns=_CELLS, seconds=tuple(_plain(row) for row in decode)),
        prompt=Grid(rows=_CHUNK, columns=_CELLS, seconds=tuple(_plain(row) for row in prompt)),
    )


def _expert_type(physics: PassPhysics) -> str:
    """The storage type of a model's experts."""
    kind = physics.shape.experts.kind
    return physics.weights if kind == "default" else kind


def _plain(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
