"""Which model, device, weights and engine the rows of benchmarks are of, and whether that is what was asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsim.calibration.bench_files.points import BenchPoint
from kvsim.costs.devices import Device, device_named, recorded_device
from kvsim.costs.memory_settings import Engine
from kvsim.errors import UserError, counted, no_such
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_shapes import STORED, Storage
from kvsim.model.memory_shapes import config_fields, memory_shape, model_names
from kvsim.model.recorded_names import recorded_model
from kvsim.model.storage_types import WEIGHT_TYPES, weight_bytes

_SAME_COUNT = 0.005
"""Counts of parameters that differ by no more are of one model; those of neighbours differ by 2 %."""
_SAME_BYTES = 0.15
"""Sizes of files that differ by no more may be of one type of weights, whose mixtures vary with the shape."""

_LONGER = 0.1
"""How much longer than one that did more a row may have taken."""


@dataclass(frozen=True)
class BenchOptions:
    """What the user says of the files; None: as they say."""

    model: str | None = None
    device: str | None = None
    engine: Engine | None = None
    weights: str | None = None
    tp: int = 1
    type_k: str | None = None
    type_v: str | None = None
    flags: str = ""
    """What the tools were started with, as far as their files do not say."""


@dataclass(frozen=True)
class BenchSubject:
    """What rows are of, and those that are of it."""

    model: str
    device: Device
    device_name: str
    """As users name it: a name or a file."""
    engine: Engine
    weights: str | None
    type_k: Storage
    type_v: Storage
    points: Sequence[BenchPoint]
    notes: tuple[str, ...]
    """What was left out or taken for granted, one sentence each."""


def subject_of(points: Sequence[BenchPoint], asked: BenchOptions) -> BenchSubject:
    """What the rows are of. Raises ``UserError`` where that contradicts what was asked for, or is not said."""
    model, points, notes = _of_model(points, asked.model)
    shape = memory_shape(model)
    notes += [note for point in points[:1] if (note := _partly(points, shape)) is not None]
    points = [point for point in points if _is_whole(point, shape)]
    # Servers run with flash attention unless they are told otherwise.
    points = _only(points, "without flash attention", lambda s: s.flash, (True, False, None), notes)
    threads = Counter(point.set_up.threads for point in points)
    most = [count for count, _ in threads.most_common()]
    points = _only(points, "with other numbers of threads", lambda s: s.threads, most, notes)
    for option, name, given in (
        ("--cache-type-k", "type_k", asked.type_k),
        ("--cache-type-v", "type_v", asked.type_v),
        ("--weights", "weights", asked.weights),
        ("--engine", "engine", asked.engine),
    ):
        points = _one(points, option, name, given)
    points = _plausible(points, notes)
    first = points[0].set_up
    device_name = _device(points, asked)
    engine: Engine = asked.engine or _said(points, "engine") or "vllm"
    weights = _weights(points, asked.weights, shape)
    if asked.engine is None and _said(points, "engine") is None:
        notes.append(f"{first.tool} does not say which engine it asked: vllm was taken (--engine).")
    return BenchSubject(
        model,
        device_named(device_name),
        device_name,
        engine,
        weights,
        _storage("--cache-type-k", asked.type_k or _said(points, "type_k") or "f16"),
        _storage("--cache-type-v", asked.type_v or _said(points, "type_v") or "f16"),
        points,
        tuple(notes),
    )


def _plausible(points: list[BenchPoint], notes: list[str]) -> list[BenchPoint]:
    """The rows but those that took longer than one that did the same and more, as those of a cold device do."""
    kept = []
    for point in points:
        more = next((other for other in points if _did_more(other, point)), None)
        if more is None:
            kept.append(point)
        else:
            notes.append(f"Left out: {point.title} ({point.where}), which took longer than {more.title}.")
    return kept or points


def _did_more(one: BenchPoint, other: BenchPoint) -> bool:
    """Whether one row did all that another did and more, but took clearly less time."""
    if one.kind == "serve" or (one.kind, one.set_up.tool, one.ubatch) != (other.kind, other.set_up.tool, other.ubatch):
        return False
    sizes = [(each.sequences, each.depth, each.prompt, each.new) for each in (one, other)]
    return (
        sizes[0] != sizes[1]
        and all(a >= b for a, b in zip(*sizes, strict=True))
        and one.seconds < (1 - _LONGER) * other.seconds
    )


def _storage(option: str, kind: str) -> Storage:
    """The type of K or V. Raises ``UserError`` if there are no times of it."""
    for known in STORED:
        if known == kind:
            return known
    raise UserError(f"{option}: {no_such('type', kind, STORED)}")


def _said(points: Iterable[BenchPoint], name: str) -> Any:
    """What the first set-up that says anything says."""
    return next((value for point in points if (value := getattr(point.set_up, name)) is not None), None)


def _one(points: Sequence[BenchPoint], option: str, name: str, given: Any) -> list[BenchPoint]:
    """The points of the value that was given, or of the only one. Raises ``UserError``."""
    said = {value for point in points if (value := getattr(point.set_up, name)) is not None}
    wanted = given if given is not None and said else next(iter(said)) if len(said) == 1 else None
    if wanted is None and said:
        raise UserError(
            f"{points[0].where}: the rows are of several values of {name}: {', '.join(sorted(map(str, said)))}; "
            f"choose by {option}"
        )
    kept = [point for point in points if getattr(point.set_up, name) in (wanted, None)]
    if said and wanted not in said:
        raise UserError(
            f"{points[0].where}: {option} is {given}, but the rows are of {', '.join(sorted(map(str, said)))}"
        )
    return kept


def _only(
    points: list[BenchPoint], what: str, value: Callable[[Any], Any], order: Iterable[Any], notes: list[str]
) -> list[BenchPoint]:
    """The points of the first of these values that there is, with a note if others are left out."""
    said = {value(point.set_up) for point in points}
    first = next(each for each in order if each in said)
    kept = [point for point in points if value(point.set_up) in (first, None)]
    if len(kept) < len(points):
        notes.append(f"Left out: {counted(len(points) - len(kept), 'row')} {what}.")
    return kept


def _of_model(points: Sequence[BenchPoint], name: str | None) -> tuple[str, list[BenchPoint], list[str]]:
    """The model that is meant, and the rows of it. Raises ``UserError`` if there are none, or several may be meant."""
    if name is None:
        fitting = {fit for point in points for fit in models_like(point)}
        titles = ", ".join(dict.fromkeys(_title(point) for point in points))
        known = f"; by its size it may be {' or '.join(sorted(fitting))}" if fitting else ""
        raise UserError(f"{points[0].where}: say by --model which model this is: {titles or 'not named'}{known}")
    shape = memory_shape(name)
    kept = [point for point in points if _fits(point, name, shape)]
    if not kept:
        first, own = points[0], shape.n_parameters
        like = sorted(models_like(first))
        known = f"; it may be {' or '.join(like)}" if like else ""
        has = f", which has {own / 1e9:.2f} B parameters" if own else ""
        raise UserError(f"{first.where} is of {_title(first)}, not of {name}{has}{known}")
    notes = []
    if len(kept) < len(points):
        others = dict.fromkeys(_title(point) for point in points if point not in kept)
        notes.append(f"Left out: {counted(len(points) - len(kept), 'row')} of other models, {'; '.join(others)}.")
    unknown = dict.fromkeys(each.set_up.model for each in kept if each.set_up.parameters is None and each.set_up.model)
    notes += [f"{title!r} was taken to be {name}." for title in unknown if _named(title) is None]
    return name, kept, notes


def models_like(point: BenchPoint) -> list[str]:
    """The shipped models that a row may be of, by its name or its number of parameters."""
    if point.set_up.parameters is None:
        return [found] if (found := _named(point.set_up.model)) is not None else []
    return [name for name in model_names() if _fits(point, name, memory_shape(name))]


def _named(title: str) -> str | None:
    """The model that servers name so; None if it is not known."""
    try:
        return recorded_model(title)
    except UserError:
        return None


def _title(point: BenchPoint) -> str:
    said = point.set_up
    count = f", {said.parameters / 1e9:.2f} B parameters" if said.parameters else ""
    return f"{said.model!r}{count}" if said.model else ""


def _fits(point: BenchPoint, name: str, shape: MemoryShape) -> bool:
    """Whether a row may be of a model, as far as it says: by its parameters or bytes and family, or by its name."""
    said = point.set_up
    if said.parameters is not None:
        if shape.n_parameters is None:
            stored = sum(shape.stored.values())
            return said.model_bytes is None or abs(said.model_bytes / stored - 1) <= 0.02
        return abs(said.parameters / shape.n_parameters - 1) <= _SAME_COUNT and _same_family(said.model, name)
    titled = _named(said.model) if said.model else None
    return titled is None or titled == name or _alike(memory_shape(titled), shape)


def _alike(one: MemoryShape, other: MemoryShape) -> bool:
    return replace(one, name="", source="", context=None) == replace(other, name="", source="", context=None)


def _same_family(title: str, model: str) -> bool:
    """False for models of equal size whose families differ by their number, as Qwen2.5 14B and Qwen3 14B do, or that
    llama.cpp does not run as a Llama where the title says that it did."""
    try:
        kind = str(config_fields(model).get("model_type", ""))
    except UserError:
        return True
    if title.lower().startswith("llama ") and kind not in ("llama", "mistral", "mixtral"):
        return False
    one, other = (re.match(r"([a-z]+)(\d+)", text.lower().replace("_", "")) for text in (title, kind))
    return one is None or other is None or one[1] != other[1] or one[2] == other[2]


def _is_whole(point: BenchPoint, shape: MemoryShape) -> bool:
    layers = point.set_up.gpu_layers
    return layers is None or layers >= shape.n_layers


def _partly(points: Sequence[BenchPoint], shape: MemoryShape) -> str | None:
    """A note on rows of a model that is partly on the processor. Raises ``UserError`` if all are."""
    partly = [point for point in points if not _is_whole(point, shape)]
    if len(partly) == len(points):
        raise UserError(
            f"{points[0].where}: {points[0].set_up.gpu_layers} of {shape.n_layers} layers were on the device; rows of "
            "a model that is whole on its device are needed (-ngl 99)"
        )
    return f"Left out: {counted(len(partly), 'row')} with layers on the processor." if partly else None


def _device(points: Sequence[BenchPoint], asked: BenchOptions) -> str:
    """The device, as users name it. Raises ``UserError``."""
    point = next((each for each in points if each.set_up.device), points[0])
    title = point.set_up.device
    titles = {each.strip() for each in (title or "").split(",") if each.strip()} if asked.tp == 1 else set()
    several = "," in (title or "") and point.set_up.engine == "llamacpp"
    if several:
        raise UserError(
            f"{point.where}: {title}: llama.cpp divided the model's layers between these; rows of one device are needed"
        )
    found = None
    if title is not None and len(titles) <= 1:
        try:
            found = recorded_device(title)
        except UserError:
            found = None
    if asked.device is None:
        if found is not None:
            return found.name
        what = f"{title!r} is none of the devices that are known" if title else "does not say which device it is of"
        raise UserError(
            f"{point.where}: {what}; name it by --device: one that kvsim knows, or a file of your own such as "
            "my-machine.toml, with kind, memory_bytes, bandwidth_gb_s and tflops"
        )
    device = device_named(asked.device)
    if found is not None and found.name != device.name and not asked.device.endswith(".toml"):
        raise UserError(f"{point.where}: timed on {title}, not on {asked.device}; --device {found.name} would be that")
    if point.set_up.threads is not None and device.kind != "cpu":
        raise UserError(
            f"{point.where}: computed by a processor, {title or 'of unknown name'}, not by {device.title}; "
            'describe it in a file such as my-machine.toml (kind = "cpu")'
        )
    return asked.device


def _weights(points: Sequence[BenchPoint], given: str | None, shape: MemoryShape) -> str | None:
    """The storage type of the weights; None: the model's own. Raises ``UserError``."""
    if shape.stored:
        return None  # Its file says.
    found, size = given or _said(points, "weights"), _said(points, "model_bytes")
    if given is None and size is not None and found == shape.experts.kind != "default":
        # A file is named after its experts; what else it has is of another type.
        return min(("bf16", "q8_0"), key=lambda kind: abs(_bytes(shape, kind) - size))
    if found is None and size is not None and shape.n_parameters is not None:
        raise UserError(
            f"{points[0].where}: {points[0].set_up.model!r} does not say a type of weights that is known; say the "
            f"nearest by --weights: {', '.join(WEIGHT_TYPES)}"
        )
    if given and size is not None and shape.n_parameters and given.lower() in WEIGHT_TYPES:
        expected = _bytes(shape, given.lower())
        if abs(size / expected - 1) > _SAME_BYTES:
            raise UserError(
                f"{points[0].where}: the file of the model has {size / 1e9:.2f} GB, where {shape.name} in {given} has "
                f"{expected / 1e9:.2f}; say its type by --weights"
            )
    return str(found).lower() if found is not None else None


def _bytes(shape: MemoryShape, weights: str) -> int:
    """The size of a model's weights, where ``weights`` is the type of those that users may choose."""
    return sum(weight_bytes(weights if kind == "default" else kind, n) for kind, n in shape.parameters.items())
