"""What a file of a benchmark says: rows of what was timed, and the tool, machine and model it was timed on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.errors import UserError
from kvsim.model.storage_types import WEIGHT_TYPES

Kind = Literal["prompt", "decode", "batch", "serve"]
"""What was timed: prompts, steps that decode, prompts and then their decodes, or a token of a server under load."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a file says of itself; None or "" where it says nothing."""

    tool: str
    build: str = ""
    engine: str | None = None
    """``llamacpp`` or ``vllm``."""
    device: str | None = None
    """The device or processor in the tool's words."""
    model: str = ""
    """The model in the tool's words."""
    model_bytes: int | None = None
    parameters: float | None = None
    weights: str | None = None
    """Storage type of the weights, of ``WEIGHT_TYPES``."""
    type_k: str | None = None
    type_v: str | None = None
    flash: bool | None = None
    """Whether flash attention was on; llama.cpp's "auto" counts as on."""
    gpu_layers: int | None = None
    """Layers that were on the device; None: all of them."""
    threads: int | None = None
    """The threads of a processor that computed everything."""


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One thing that was timed."""

    where: str
    """File and row."""
    set_up: SetUp
    kind: Kind
    seconds: float
    """What all passes took together; if ``kind`` is "serve", from one token of a request to the next on the mean."""
    spread: float = 0.0
    """Standard deviation of a repetition over the mean."""
    sequences: float = 1.0
    """Sequences at a time; of ``serve``, those that were decoding on the mean."""
    depth: int = 0
    """Cells of each sequence beforehand."""
    prompt: int = 0
    """Tokens of each prompt."""
    new: int = 0
    """Tokens that each sequence generates."""
    ubatch: int | None = None
    """Tokens in a pass at most; None: the engine's own limit."""
    prompts_per_step: float = 0.0
    """Prompts of other requests that begin during a step on the mean, if ``kind`` is "serve"."""

    @property
    def title(self) -> str:
        """What was timed, in the words of llama-bench."""
        many = f"{self.sequences:.3g} x " if self.sequences != 1 else ""
        behind = f" @ d{self.depth}" if self.depth else ""
        if self.kind == "serve":
            return f"TPOT of {self.prompt}/{self.new}, {self.sequences:.3g} decoding"
        what = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.new}"] * (self.new > 0)
        return f"{many}{'+'.join(what)}{behind}"

    @property
    def same(self) -> tuple[object, ...]:
        """What two points have in common that tell the same."""
        return self.kind, round(self.sequences, 1), self.depth, self.prompt, self.new, self.ubatch


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A row of a file, as its keys and values."""

    where: str
    """File and row."""
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchText:
    """A file that is to be read: its records, if it has any, and its lines."""

    name: str
    records: Sequence[FileRecord]
    lines: Sequence[str]
    flags: str
    """What the tool was started with, as far as the user says."""


MOST_TOKENS, MOST_SEQUENCES = 1 << 24, 1 << 16
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""Tokens."""
Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Few = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
"""Sequences, or tokens of a pass."""
Rate = Annotated[float, Field(gt=1e-6, lt=1e12, allow_inf_nan=False)]


class Row(BaseModel):
    """Base of what is read of a row; what else it has is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


RowT = TypeVar("RowT", bound=Row)


def read_row(kind: type[RowT], values: Any, where: str) -> RowT:
    """The row of these keys and values. Raises ``UserError`` with the first key that is missing or wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "row"
        given = first.get("input")
        got = "" if first["type"] == "missing" or isinstance(given, dict | list) else f", got {given!r:.40}"
        raise UserError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ').lower()}{got}") from None


_WEIGHTS = re.compile(r"\b(all F32|BF16|F16|MXFP4|I?Q\d_(?:K|XXS|XS|S|M|NL|0|1))\b(?: - (Small|Medium|Large))?")


def gguf_weights(description: str) -> str | None:
    """The storage type that llama.cpp describes as "llama 8B Q4_K - Medium" or "qwen3 8B Q8_0"; None if not known."""
    if (found := _WEIGHTS.search(description)) is None:
        return None
    name = found[1].lower().removeprefix("all ")
    size = f"_{found[2][0].lower()}" if found[2] else ""
    return next((each for each in (name + size, name) if each in WEIGHT_TYPES), None)


def records_of(name: str, text: str) -> list[FileRecord]:
    """The objects of a file that is one JSON value, or that has one on each of some lines; none of other files."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        return [FileRecord(name, whole)]
    if isinstance(whole, list):
        return [FileRecord(f"{name}: row {i}", row) for i, row in enumerate(whole, 1) if isinstance(row, dict)]
    found = []
    for i, line in enumerate(text.splitlines(), 1):
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{name}: line {i}: not JSON, though it begins with a brace") from None
        found.append(FileRecord(f"{name}: line {i}", row))
    return found


_DEEP = 8
"""Levels of nesting at which a key is looked for."""


def values_of(data: Any, key: str, depth: int = _DEEP) -> Iterator[Any]:
    """All values of a key in JSON, wherever a version of a tool keeps it."""
    if isinstance(data, dict | list) and depth:
        if isinstance(data, dict) and key in data:
            yield data[key]
        for value in data.values() if isinstance(data, dict) else data:
            yield from values_of(value, key, depth - 1)


def first_text(data: Any, *keys: str) -> str:
    """The first value of these keys that is a text, or a list that begins with one; "" if there is none."""
    for key in keys:
        for value in values_of(data, key):
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, str) and first:
                return first[:200]
    return ""
