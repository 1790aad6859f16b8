"""Import of kernel tables: from a folder of tables to the profile of a model on a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.calibration.published.device_fit import DeviceFit, Subject, device_fit
from kvsim.calibration.published.layer_tables import LayerTables, Link, read_layer_tables
from kvsim.costs.devices import Device, device_named, recorded_device
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.profile import Source
from kvsim.costs.under_load import Host
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.recorded_names import recorded_model

_EXPERTS = ("Tokens are assumed to choose their experts evenly.",)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the tables do not say, or what is to be taken instead of what they say."""

    model: str | None = None
    device: str | None = None
    vllm_version: str | None = None
    tp: int = 1
    ep: int = 1
    """Devices that divide the experts; the tables are of all on one."""
    link_gb_s: float | None = None
    """Bandwidth between the devices that share the model, in each direction, 10**9 bytes/s."""
    link_latency_us: float | None = None
    host_ms: float | None = None
    """What the host adds to each step; by default what the engine's version is known to."""
    source: str | None = None
    """Source of the tables: a person, project or paper."""
    url: str = ""
    licence: str = "not stated"
    notes: tuple[str, ...] = ()
    """What else a reader should know, one sentence each."""


def import_tables(folder: str | Path, options: ImportOptions = ImportOptions()) -> DeviceFit:
    """Fit the profile of a model on a device to tables of the kernels of one layer (``layer_tables``).

    Model, device and version are those of the folder's ``meta.yaml`` unless ``options`` say otherwise. Raises
    ``UserError``.
    """
    tables = read_layer_tables(folder)
    meta = tables.meta
    device = _device(tables.folder, meta, options.device)
    tables, model, inferred = _tables_of(tables, options.model)
    shape = memory_shape(model)
    version = options.vllm_version or _said(tables.folder, meta, "vllm_version", "vllm-version")
    if not re.fullmatch(r"v?\d+\.\d+(\.\w+)*", version):
        raise UserError(
            f"{tables.folder}: no version of vLLM is called {version!r:.40}; one such as 0.19.0 is expected"
        )
    cells = default_cells(model, device.name, tp=options.tp, ep=options.ep)
    parts, tested = tables.parts(shape, most_cells=cells, link=_link(options))
    source = Source(
        title=options.source or f"kernel tables in {tables.folder.name}",
        url=options.url,
        licence=options.licence,
        version=_version(meta),
        notes=(*_notes(options), *inferred, *_EXPERTS[: min(shape.n_experts, 1)], *options.notes),
    )
    subject = Subject(device, shape, f"vllm {version}", options.tp, ep=options.ep)
    return device_fit(subject, parts, tested, source, given_host(options.host_ms))


def _tables_of(tables: LayerTables, model: str | None) -> tuple[LayerTables, str, tuple[str, ...]]:
    """The tables of a model, by default of the measured one; its name, and what had to be inferred."""
    if model is not None and "model" not in tables.meta:
        return tables, model, ()
    measured = recorded_model(_said(tables.folder, tables.meta, "model", "model"))
    shape, own = memory_shape(model or measured), memory_shape(measured)
    if shape.name == own.name:
        return tables, model or measured, ()
    adapted, inferred = tables.adapted(own, shape)
    return adapted, model or measured, inferred


def _device(folder: Path, meta: dict[str, Any], name: str | None) -> Device:
    """The device that was asked for, which must be the measured one, or that one. Raises ``UserError``."""
    if name is None:
        return recorded_device(_said(folder, meta, "gpu", "device"))
    device, title = device_named(name), meta.get("gpu")
    if isinstance(title, str) and recorded_device(title) != device:
        raise UserError(f"--device {name}: the tables of {folder} are of another one, {title}")
    return device


def _said(folder: Path, meta: dict[str, Any], key: str, option: str) -> str:
    value = meta.get(key)
    if not isinstance(value, str):
        raise UserError(f"{folder}: meta.yaml does not say {key}; give --{option}")
    return value


def _version(meta: dict[str, Any]) -> str:
    day = str(meta.get("profiled_at", "")).split("T")[0]
    return f"of {day}" if re.fullmatch(r"\d{4}-\d\d-\d\d", day) else "of an unknown date"


def given_host(host_ms: float | None) -> Host | None:
    """What the host adds to each step, if it is given."""
    return None if host_ms is None else Host(seconds=host_ms * 1e-3, source="given with --host-ms")


def _link(options: ImportOptions) -> Link | None:
    """The link between the devices. Raises ``UserError`` unless it is given where there are several, and only there."""
    given = (options.link_gb_s, options.link_latency_us)
    if options.tp > 1 and options.ep > 1:
        raise UserError("--tp, --ep: experts that are divided beside layers are not known; give one of them")
    option, devices = ("--ep", options.ep) if options.ep > 1 else ("--tp", options.tp)
    if devices == 1:
        if given != (None, None):
            raise UserError("--link-gb-s, --link-latency-us: only with --tp or --ep, 2 or more")
        return None
    if options.link_gb_s is None or options.link_latency_us is None:
        raise UserError(
            f"{option} {devices}: the tables say nothing of the link between the devices; give --link-gb-s and "
            "--link-latency-us"
        )
    return Link(devices, options.link_gb_s, options.link_latency_us, experts=options.ep > 1)


def _notes(options: ImportOptions) -> tuple[str, ...]:
    notes = ["Passes are put together from the kernels of one layer, each timed alone and without CUDA graphs."]
    if options.ep > 1:
        notes.append(
            f"The experts are divided over {options.ep} devices, all of which are taken to have as many tokens: each "
            "computes those of its experts for the tokens of all."
        )
    if (devices := max(options.tp, options.ep)) > 1:
        what = "all-reduce" if options.tp > 1 else "exchange of the tokens"
        notes.append(
            f"The {what} between the {devices} devices is computed, not measured: {options.link_gb_s:g} GB/s in "
            f"each direction, {options.link_latency_us:g} µs a message."
        )
    return tuple(notes)
