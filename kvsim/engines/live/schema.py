"""What servers say over HTTP, as far as it is read here, with bounds: nothing that they say is used before.

A count is a whole number in JSON: ``"7"``, ``7.5`` and ``true`` are none. What else an answer has is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MOST_TOKENS = 1 << 24
"""Tokens of a sequence or of a vocabulary, at most."""
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Positive = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Tokens = Annotated[list[Count], Field(max_length=1 << 20)]

_METRIC = re.compile(r"([a-zA-Z_:][\w:]{0,200})(?:\{(.{0,10000})\})?[ \t]+(\S{1,100})[ \t]*")
_LABEL = re.compile(r'(\w{1,100})="((?:[^"\\]|\\.){0,1000})"')
_TOTAL = TypeAdapter(Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)])


class Said(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class GenerationSettings(Said):
    """The settings that ``/props`` says each slot begins with."""

    n_ctx: Positive | None = None


class Props(Said):
    """llama-server's ``/props``. Another server's has no ``default_generation_settings``."""

    default_generation_settings: GenerationSettings | None = None
    total_slots: Annotated[int, Field(ge=1, le=4096)] | None = None
    model_path: Name | None = None
    build_info: Name = ""


class Slot(Said):
    """An entry of llama-server's ``/slots``."""

    is_processing: bool = False


class ModelMeta(Said):
    """What llama-server adds to an entry of ``/v1/models``."""

    n_vocab: Positive | None = None


class ModelEntry(Said):
    """An entry of ``/v1/models``."""

    id: Name
    owned_by: Name | None = None
    root: Name | None = None
    max_model_len: Positive | None = None
    meta: ModelMeta | None = None


class Models(Said):
    """``/v1/models``."""

    data: Annotated[list[ModelEntry], Field(max_length=10_000)] = []


class Version(Said):
    """``/version``."""

    version: Name = ""


class Tokenized(Said):
    """``/tokenize``."""

    tokens: Tokens


class Timings(Said):
    """llama-server's own clock, in an answer's last event."""

    cache_n: Count | None = None
    prompt_n: Count | None = None
    prompt_ms: Milliseconds | None = None
    predicted_n: Count | None = None
    predicted_ms: Milliseconds | None = None


class LlamaEvent(Said):
    """An event of llama-server's ``/completion``."""

    error: Any = None
    content: str = ""
    tokens: Tokens = []
    stop: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, le=4096)] | None = None
    truncated: bool | None = None
    stop_type: Name | None = None
    tokens_cached: Count | None = None
    tokens_evaluated: Count | None = None
    tokens_predicted: Count | None = None
    timings: Timings | None = None


class PromptDetails(Said):
    """What ``Usage`` says of the prompt: tokens that were found in a cache."""

    cached_tokens: Count | None = None


class Usage(Said):
    """OpenAI's count of tokens."""

    prompt_tokens: Count
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class Choice(Said):
    """One answer of an ``OpenAiEvent``."""

    text: str | None = None
    token_ids: Tokens | None = None


class OpenAiEvent(Said):
    """An event of ``/v1/completions``."""

    error: Any = None
    choices: Annotated[list[Choice], Field(max_length=1000)] = []
    usage: Usage | None = None


SaidT = TypeVar("SaidT")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The reader of a kind, which takes longer to make than to use."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def read_said(kind: type[SaidT], content: bytes | str) -> SaidT:
    """What JSON says. Raises ``ValueError`` in a short line if it is none, or not of this kind."""
    try:
        found: SaidT = _adapter(kind).validate_json(content)
        return found
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False)[0]
        at = ".".join(map(str, first["loc"]))
        said = first["msg"][:1].lower() + first["msg"][1:]
        got = "" if first["type"] in ("json_invalid", "missing") else f", got {first['input']!r:.60}"
        raise ValueError(f"{at}{': ' if at else ''}{said}{got}") from None


def is_json(content: bytes) -> bool:
    """Whether it is JSON at all, and not nested beyond reason."""
    try:
        _adapter(object).validate_json(content)
    except ValidationError:
        return False
    return True


def message_of(said: bytes | str) -> str:
    """The reason in an error's body, in a line of at most 200 characters."""
    try:
        found: Any = read_said(dict[str, Any], said)
    except ValueError:
        found = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, dict) else found
    text = found if isinstance(found, str) else repr(found)
    shown = "".join(c for c in " ".join(text[:2000].split()) if c.isprintable())
    return shown[:200] or "no reason given"


def metrics_of(text: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """Name, labels and value of each line of a ``/metrics`` that is a measurement."""
    for line in text.splitlines():
        if found := _METRIC.fullmatch(line):
            yield found[1], dict(_LABEL.findall(found[2] or "")), found[3]


def total_of(name: str, value: str) -> float:
    """The value of a counter or gauge. Raises ``ValueError`` in a short line if it is none."""
    try:
        return _TOTAL.validate_python(float(value))
    except ValueError:
        raise ValueError(f"{name}: {value!r:.60} where a number from 0 is expected") from None
