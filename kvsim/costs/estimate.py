"""Times of a model on a device that were not measured: physics, times what engines reach of it elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kvsim.costs.cpu_layers import COPYING, ERRORS, MIN_BATCH, READING, CpuSide, OnCpu
from kvsim.costs.devices import Device, device_named
from kvsim.costs.efficiency import (
    BUS_GB_S,
    Efficiency,
    EngineEfficiency,
    Errors,
    Unfused,
    efficiencies,
    engine_kind,
    make_of,
    storage_group,
)
from kvsim.costs.memory_settings import ENGINE_TITLES, Engine
from kvsim.costs.pass_tables import Grid, Line, PassTables
from kvsim.costs.physics import Need, PassPhysics
from kvsim.costs.profile import CopyCost, Profile, Range, Source, exactly
from kvsim.costs.served import Served
from kvsim.costs.tables import FloatArray
from kvsim.costs.under_load import BLOCKS, EXCHANGE, Longer
from kvsim.errors import LIMITS, UserError
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_shapes import STORED
from kvsim.model.memory_shapes import memory_shape

_TOKENS = tuple(sorted({round(2 ** (i / 4)) for i in range(65)}))
"""Tokens of the entries of tables: 1 to 65,536."""
_SEQUENCES = tuple(1 << i for i in range(13))
_CELLS = tuple(1 << i for i in range(4, 21))
_CHUNK = _TOKENS[::4]
_MEASURED_TOKENS, _MEASURED_CELLS, _MEASURED_SEQUENCES = 8192, 32768, 512
"""The largest passes that efficiencies were fitted to."""


def estimated(of: Served) -> Profile:
    """The profile of what is served. Raises ``UserError`` for a model, device or type that is not known."""
    shape, device = memory_shape(of.model), device_named(of.device)
    if shape.indices:
        raise UserError(
            f"{shape.name}: times of attention that an index makes sparse are not known; kvsim plan --model "
            f"{shape.name} says what memory it takes{LIMITS}"
        )
    weights = of.weights or shape.default_type
    physics = PassPhysics(device, shape, weights, of.type_k, of.type_v, of.tp, of.engine, of.flash_attn, of.ep)
    fitted, measured = _efficiency(of.engine, device)
    unfused = None if of.flash_attn else fitted.unfused or efficiencies()[of.engine]["nvidia"].unfused
    if unfused is not None:
        fitted = fitted.model_copy(update={"decode": unfused.decode, "prompt": unfused.prompt, "quantised": None})
    moe = shape.n_experts > 0
    errors = fitted.errors_of(physics.expert_type if moe else weights, experts=moe)
    if shape.states:
        # No error of others is theirs.
        errors = fitted.errors.get("states", Errors())
    on_cpu = OnCpu.of(shape, of.n_gpu_layers, of.n_cpu_moe)
    cpu = CpuSide.of(physics, of.cpu_gb_s) if on_cpu.experts or on_cpu.layers else None
    moves, shift = physics.copies() if cpu is None else cpu.copies(on_cpu.layers, physics.copies())
    return Profile(
        tables=_tables(physics, fitted, on_cpu, cpu),
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
        flash_attention=of.flash_attn,
        tensor_parallel=of.tp,
        expert_parallel=of.ep,
        weights=weights or None,
        source=Source(
            title=f"physics and the efficiency of {fitted.source}",
            url="",
            licence="",
            version="",
            notes=(
                *_notes(physics, fitted, measured),
                *([] if cpu is None else [_of_cpu(of, cpu, shape)]),
                *([] if unfused is None else [_without_flash_attention(fitted, unfused)]),
            ),
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

    def scaled(
        grid: Grid,
        part: Callable[[PassPhysics], Efficiency],
        need: Callable[[PassPhysics, FloatArray, FloatArray], Need],
    ) -> Grid:
        rows, columns = np.array(grid.rows, dtype=float)[:, None], np.array(grid.columns, dtype=float)[None, :]
        both = [part(of).seconds(need(of, rows, columns), of.attention_layers) for of in (after, before)]
        seconds = np.array(grid.seconds) * (both[0] / both[1])
        return grid.model_copy(update={"seconds": tuple(_plain(row) for row in seconds)})

    tables = measured.tables.model_copy(
        update={
            "decode": scaled(measured.tables.decode, found.decoding, PassPhysics.decode),
            "prompt": scaled(measured.tables.prompt, lambda _: found.prompt, PassPhysics.prompt),
        }
    )
    assert measured.source is not None
    title = f"{measured.source.title} (attention scaled from {measured.type_k} by what fewer bytes save)"
    update = {"tables": tables, "type_k": type_k, "type_v": type_v}
    return measured.model_copy(update=update | {"source": measured.source.model_copy(update={"title": title})})


def _efficiency(engine: Engine, device: Device) -> tuple[EngineEfficiency, bool]:
    """What was fitted for an engine on devices of this make, and whether that is so: of another, if there is none."""
    makes, make = efficiencies()[engine], make_of(engine, device)
    return makes.get(make) or makes["nvidia"], make in makes


def _notes(physics: PassPhysics, fitted: EngineEfficiency, measured: bool) -> Iterator[str]:
    """What was taken from something else because it was not measured, one sentence each."""
    shape, engine = physics.shape, ENGINE_TITLES[physics.engine]
    if not measured:
        yield (
            f"{engine} was not measured on devices such as {physics.device.title}: it is taken to reach as much of it "
            "as of NVIDIA's."
        )
    kinds = [("matrices", fitted.matrices, physics.weights)]
    if shape.n_experts:
        if (kind := physics.expert_type) != physics.weights:
            yield f"Experts are in {kind}, as the model has them."
        kinds.append(("experts", fitted.experts, physics.expert_type))
    for what, table, kind in kinds:
        group = fitted.of(table, kind)[1]
        if group != storage_group(kind):
            yield f"{engine}'s {what} in {kind} were not measured: they are priced with the efficiency of {group}."
    if physics.engine == "llamacpp" and physics.quantised and fitted.quantised is None:
        yield (
            f"Decoding over K in {physics.type_k} and V in {physics.type_v} was not measured on such devices, and is "
            "priced by its bytes; on an H200 it took longer than over f16."
        )
    if physics.ranks > 1:
        yield f"The link between the devices is taken to have {physics.device.link_gb_s:g} GB/s in each direction."
    yield from (str(each) for each, _ in _longer(physics))


def _longer(physics: PassPhysics) -> Iterator[tuple[Longer, float]]:
    """What takes longer in servers, and how often it is in a pass."""
    if physics.engine == "vllm" and physics.ranks > 1:
        yield EXCHANGE, physics.exchanges * np.log2(physics.ranks)
    if physics.engine == "vllm" and storage_group(physics.weights) == "fp8_block":
        yield BLOCKS, physics.shape.n_layers


def _without_flash_attention(fitted: EngineEfficiency, unfused: Unfused) -> str:
    """How well its attention is known, in a sentence."""
    where = "" if fitted.unfused == unfused else "NVIDIA's, as of these devices none was measured: "
    of = f"{unfused.devices} devices" if unfused.devices > 1 else "the one device of the fit"
    return (
        f"Without flash attention ({where}{of}), what longer contexts add to decode steps is "
        f"within ±{unfused.decode_median:.0%} (median) and ±{unfused.decode_p90:.0%} (P90), to prompts within "
        f"±{unfused.prompt_median:.0%} and ±{unfused.prompt_p90:.0%}."
    )


def _of_cpu(of: Served, cpu: CpuSide, shape: MemoryShape) -> str:
    """What is on the CPU, and at which rates, in a sentence."""
    n, ngl = shape.n_layers, of.n_gpu_layers
    what = (
        [] if ngl is None or ngl > n else [f"{n + 1 - max(ngl, 1)} of {n} layers{' and the head' if ngl == 0 else ''}"]
    )
    what += [f"the experts of {min(of.n_cpu_moe, n)} of {n} layers"] if of.n_cpu_moe else []
    decodes, prompts = ERRORS["decode"], ERRORS["prompt"]
    rate, bus = cpu.physics.device.bandwidth_gb_s, cpu.bus_gb_s
    copies = f"{COPYING * bus:g} GB/s" + (f" (experts: {bus:g})" if shape.n_experts else "")
    return (
        f"On the CPU: {' and '.join(what)}, read at {READING:.0%} of its memory's {rate:g} GB/s; micro-batches of "
        f"{MIN_BATCH} tokens or more have them copied to the device at {copies}. Decode steps of {decodes[0]} "
        f"published results with layers on the CPU are within ±{decodes[1]:.0%} (median) and ±{decodes[2]:.0%} (P90), "
        f"prompts of {prompts[0]} within ±{prompts[1]:.0%} and ±{prompts[2]:.0%}."
    )


def _tables(physics: PassPhysics, fitted: EngineEfficiency, on_cpu: OnCpu, cpu: CpuSide | None) -> PassTables:
    """Tables by physics and an engine's efficiencies; ``cpu``: None if nothing is there."""
    shape, layers, attending = physics.shape, physics.shape.n_layers, physics.attention_layers
    keeping = sum(group.layers for group in shape.states)
    # With layers on the CPU, a pass of one token more may be another.
    edge = () if cpu is None else (MIN_BATCH - 1,)
    token_axis, sequence_axis, chunk_axis = (tuple(sorted({*axis, *edge})) for axis in (_TOKENS, _SEQUENCES, _CHUNK))
    tokens, sequences = np.array(token_axis, dtype=float), np.array(sequence_axis, dtype=float)
    cells, chunk = np.array(_CELLS, dtype=float), np.array(chunk_axis, dtype=float)

    def part(
        found: Efficiency,
        numbers: FloatArray,
        need: Callable[[PassPhysics], Need],
        share: float,
        times: int = layers,
        copying: float = COPYING,
    ) -> FloatArray:
        """Seconds of a part of which a share is on the CPU."""
        seconds = found.seconds(need(physics), times)
        return seconds if cpu is None else cpu.spread(share, seconds, numbers, need, copying)

    work = part(fitted.of(fitted.matrices, physics.weights)[0], tokens, lambda p: p.matrices(tokens), on_cpu.layers)
    if fitted.elementwise is not None:
        work += fitted.elementwise.seconds(physics.elementwise(tokens), layers)
    if shape.n_experts:
        own = fitted.of(fitted.experts, physics.expert_type)[0]
        work += part(own, tokens, lambda p: p.experts(tokens), on_cpu.experts, copying=1.0)
    exchange = fitted.bus if physics.device.link_gb_s <= BUS_GB_S and fitted.bus else fitted.exchange
    if physics.ranks > 1 and exchange is not None:
        work += exchange.seconds(physics.exchange(tokens), physics.exchanges)
    work += sum(each.seconds * times for each, times in _longer(physics))
    head = part(fitted.head, sequences, lambda p: p.head(sequences), float(on_cpu.head), 1)
    rows = sequences[:, None]
    decode = part(fitted.decoding(physics), rows, lambda p: p.decode(rows, cells[None, :]), on_cpu.layers, attending)
    chunks = chunk[:, None]
    prompt = part(fitted.prompt, chunks, lambda p: p.prompt(chunks, cells[None, :]), on_cpu.layers, attending)
    if keeping:
        decode += part(fitted.decode, rows, lambda p: p.states(rows, rows), on_cpu.layers, keeping)
        one = np.ones_like(chunks)
        prompt += part(fitted.prompt, chunks, lambda p: p.states(one, chunks), on_cpu.layers, keeping)
    return PassTables(
        work=Line(at=token_axis, seconds=_plain(work)),
        head=Line(at=sequence_axis, seconds=_plain(head)),
        decode=Grid(rows=sequence_axis, columns=_CELLS, seconds=tuple(_plain(row) for row in decode)),
        prompt=Grid(rows=chunk_axis, columns=_CELLS, seconds=tuple(_plain(row) for row in prompt)),
    )


def _plain(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
