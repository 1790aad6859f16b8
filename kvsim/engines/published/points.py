"""Points that others measured on real servers: the table that NVIDIA's ``aiconfigurator-core`` has in its wheel.

``systems/silicon_sample.csv`` has a row for each server and load: a closed loop of so many clients with prompts and
answers of given lengths, and the time to the first token and per output token that they saw. It does not say whether
these are means or medians. ai-dynamo/aisimulate fills columns of the same names with means, and so are they read here.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import UserError, no_such
from kvsim.installation import install_extra
from kvsim.model.recorded_names import recorded_model

PACKAGE = "aiconfigurator-core"
_NEEDED = (
    *("id", "backend", "model_path", "system", "isl", "osl", "batch_size", "tp_size"),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
)
_OTHERS = (
    *("silicon_data_source", "backend_version", "precision", "mode", "gemm_quant_mode"),
    *("pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
    *(
        f"{half}_{name}"
        for half in ("prefill", "decode")
        for name in ("batch_size", "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_ep_size")
    ),
)
"""Columns that are read if they are there."""
_STORED = re.compile(r"-(fp8|nvfp4|fp4)$", re.IGNORECASE)
"""The end of a model's name that says how its weights are stored, as another column does."""


class Half(NamedTuple):
    """Equal servers that only prefill, or only decode; fields as of a ``Point``."""

    servers: int
    tp: int
    pp: int
    dp: int
    ep: int


@dataclass(frozen=True, slots=True)
class Point:
    """One server under one load, as it was measured; times in seconds."""

    id: str
    source: str
    """Where the file has the point from, in its words."""
    engine: str
    version: str
    """The engine's version; empty if it is not said."""
    model: str
    """The model by our name or, if we do not know it, by that of the file."""
    device: str
    precision: str
    """Storage type of the weights in the file's words; empty: the model's own."""
    weights: str
    """How matrices are multiplied, in the file's words; empty: in the model's own type."""
    isl: int
    """Tokens of a prompt."""
    osl: int
    """Tokens of an answer."""
    concurrency: int
    """Clients, each of which waits for its answer before it asks again."""
    tp: int
    pp: int
    dp: int
    """Schedulers that share the clients (attention data parallelism)."""
    ep: int
    """Devices over which whole experts are divided; 1: each expert is divided."""
    apart: bool
    """Whether prefill and decode have servers of their own; then ``tp``, ``pp``, ``dp``, ``ep`` are of the latter."""
    ttft_s: float
    tpot_s: float
    halves: tuple[Half, Half] | None = None
    """Where they are apart, the servers that prefill and those that decode."""

    @property
    def looked_at(self) -> bool:
        """Whether it is of the third of all points that may be looked at to choose what no source states."""
        return int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % 3 == 0

    @property
    def servers(self) -> str:
        """How many servers there are, and of which TP."""
        if self.halves is None:
            return f"TP{self.tp}"
        return " and ".join(f"{half.servers} x TP{half.tp}" for half in self.halves)

    @property
    def lengths(self) -> str:
        """Prompt and answer, such as 1024/128."""
        return f"{self.isl}/{self.osl}"


def published_file() -> Path:
    """The table in the installed package. Raises ``UserError`` if there is none."""
    found = find_spec("aiconfigurator_core")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "systems" / "silicon_sample.csv"
        if path.is_file():
            return path
    raise UserError(
        f"the measured points are in {PACKAGE}, which is not installed; install it with: {install_extra('gpu')}"
    )


def read_points(path: Path | None = None) -> list[Point]:
    """The points of a file in the format of the package's, by default of that one. Raises ``UserError``."""
    path = published_file() if path is None else path
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError:
        raise UserError(f"{path}: not a table of measured points: UTF-8 text is expected") from None
    table = csv.DictReader(io.StringIO(text))
    columns = table.fieldnames or []
    if missing := [name for name in _NEEDED if name not in columns]:
        raise UserError(f"{path}: no column {missing[0]!r}; needed are {', '.join(_NEEDED)}")
    return [_point(row, f"{path}, line {table.line_num}") for row in table]


def _point(row: dict[str, str | None], where: str) -> Point:
    told = {name: (row.get(name) or "").strip() for name in (*_NEEDED, *_OTHERS)}

    def number(name: str, default: int | None = None) -> int:
        if default is not None and not told[name]:
            return default
        return int(_positive(told[name], name, where, least=0 if default is not None else 1))

    apart = told["mode"] not in ("", "agg")

    def half(of: str) -> Half:
        names = ("num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_ep_size")
        return Half(*(max(1, number(f"{of}_{name}", 1)) for name in names))

    halves = (half("prefill"), half("decode")) if apart and told["decode_num_workers"] else None
    of_half = "decode_" if apart else ""
    tp, ep = number(f"{of_half}tp_size", 1), max(1, number(f"{of_half}moe_ep_size", 1))
    # Where it is not said, those who share the experts of a layer also share its attention, or are several schedulers.
    shared = max(1, number("moe_tp_size", 1)) * ep
    dp = number("attention_dp_size", max(1, shared // max(1, tp))) if halves is None else halves[1].dp
    return Point(
        id=told["id"],
        source=told["silicon_data_source"],
        engine=told["backend"],
        version=told["backend_version"],
        model=_model(told["model_path"]),
        device=told["system"],
        precision=told["precision"],
        weights=told["gemm_quant_mode"],
        isl=number("isl"),
        osl=number("osl"),
        # Where it is not said for servers apart, it is the product that it is where it is said.
        concurrency=_clients(told) if apart else number("batch_size"),
        tp=tp,
        pp=number("pp_size", 1) if halves is None else halves[1].pp,
        dp=dp,
        ep=ep,
        apart=apart,
        ttft_s=_positive(told["silicon_ttft_ms"], "silicon_ttft_ms", where) / 1e3,
        tpot_s=_positive(told["silicon_tpot_ms"], "silicon_tpot_ms", where) / 1e3,
        halves=halves,
    )


def _clients(told: Mapping[str, str]) -> int:
    """The clients of servers that are apart; where that is not said, the product that it is wherever it is."""
    said = re.search(r"silicon_concurrency=(\d+)", told["silicon_data_source"])
    if said is not None:
        return int(said[1])
    numbers = [told[f"decode_{name}"] for name in ("batch_size", "num_workers")]
    return prod(int(number) if number.isdigit() else 0 for number in numbers)


def _positive(text: str, name: str, where: str, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e12:
        raise UserError(f"{where}: {name} is {text!r:.40}; a number of at least {least:g} is expected")
    return value


@cache
def _model(path: str) -> str:
    """Our name of a model; that of the file if we do not know it."""
    try:
        return recorded_model(_STORED.sub("", path))
    except UserError:
        return path


_KEYS: dict[str, Callable[[Point], object]] = {
    "model": lambda point: point.model,
    "device": lambda point: point.device,
    "engine": lambda point: point.engine,
    "version": lambda point: point.version,
    "precision": lambda point: point.precision,
    "tp": lambda point: point.tp,
    "isl": lambda point: point.isl,
    "osl": lambda point: point.osl,
    "concurrency": lambda point: point.concurrency,
    "id": lambda point: point.id,
}
"""What points can be chosen by."""


def chosen_points(points: Sequence[Point], only: Sequence[str]) -> list[Point]:
    """The points that have all that ``only`` says: texts such as ``model=qwen3-32b,tp=2``.

    Of a key that is given several times, any value is enough. Raises ``UserError`` for keys that there are not, and
    where no point is left.
    """
    wanted: dict[str, set[str]] = {}
    for text in [part.strip() for each in only for part in each.split(",")]:
        key, equals, value = text.partition("=")
        if not equals or key not in _KEYS:
            raise UserError(f"--only: {text!r:.60}; KEY=VALUE is accepted, with a key of {', '.join(_KEYS)}")
        wanted.setdefault(key, set()).add(value)
    left = list(points)
    for key, values in wanted.items():
        have = sorted({str(_KEYS[key](point)) for point in left})
        left = [point for point in left if str(_KEYS[key](point)) in values]
        if not left:
            raise UserError(f"--only: {no_such(f'{key} of these points', ' or '.join(sorted(values)), have)}")
    return left
