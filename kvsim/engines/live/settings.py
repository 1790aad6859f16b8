"""What a server says of itself: ``/props``, ``/v1/models``, ``/version`` and ``/metrics``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvsim.engines.live.address import Address
from kvsim.engines.live.client import Api, ServerFault, about_key, http_options, unreachable

_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)\s*$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_COUNTED = {
    "llama-server": ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
    "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
}
"""Metrics that count tokens: of prompts, as far as they were computed, and of answers."""


@dataclass(frozen=True)
class ServerSettings:
    """What a server says of itself; None for what it does not say."""

    api: Api
    engine: str
    """Engine and version, such as ``vllm 0.32.0``."""
    model: str | None = None
    """The name that it wants to be asked for."""
    model_file: str | None = None
    """The path of the model's file or folder on the server's machine."""
    slots: int | None = None
    """llama-server: requests at the same time."""
    context: int | None = None
    """The most tokens of a sequence."""
    vocabulary: int | None = None
    """Number of token ids."""
    cache: dict[str, str] = field(default_factory=dict)
    """vLLM: what it says of its cache, such as ``block_size`` and ``num_gpu_blocks``."""

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM."""
        return self.engine.startswith("vllm")


@dataclass(frozen=True)
class Counters:
    """Tokens that a server has computed since it was started, for all of its clients together."""

    prompt_tokens: int
    output_tokens: int


def ask_settings(address: Address, *, key: str | None = None, timeout_s: float = 10.0) -> ServerSettings:
    """Ask a server what it is. Raises ``ServerFault``."""
    with _http(address, key, timeout_s) as http:
        props = _json(http, address, "/props")
        models = _json(http, address, "/v1/models")
        first = _first_model(models)
        if isinstance(props, dict) and "default_generation_settings" in props:
            return _llama_server(props, first)
        if first is None:
            raise ServerFault(f"{address}: neither llama-server's /props nor OpenAI's /v1/models is answered")
        version = _json(http, address, "/version")
        metrics = _text(http, address, "/metrics") or ""
    vllm = first.get("owned_by") == "vllm" or "vllm:" in metrics
    number = version.get("version", "") if isinstance(version, dict) else ""
    return ServerSettings(
        api="openai",
        engine=f"{'vllm' if vllm else first.get('owned_by') or 'unknown'} {number}".strip(),
        model=str(first.get("id")),
        model_file=first.get("root"),
        context=first.get("max_model_len"),
        cache=_labels(metrics, "vllm:cache_config_info"),
    )


def ask_counters(address: Address, *, key: str | None = None, timeout_s: float = 10.0) -> Counters | None:
    """How many tokens a server has computed; None if it does not count them. Raises ``ServerFault``."""
    with _http(address, key, timeout_s) as http:
        said = _text(http, address, "/metrics")
    values = {name: float(value) for name, _, value in _METRIC.findall(said or "")}
    for prompt, output in _COUNTED.values():
        if prompt in values and output in values:
            return Counters(int(values[prompt]), int(values[output]))
    return None


def _llama_server(props: dict[str, Any], model: dict[str, Any] | None) -> ServerSettings:
    meta = (model or {}).get("meta") or {}
    return ServerSettings(
        api="llama-server",
        engine=f"llama-server {props.get('build_info', '')}".strip(),
        model=None if model is None else str(model.get("id")),
        model_file=props.get("model_path"),
        slots=props.get("total_slots"),
        context=props["default_generation_settings"].get("n_ctx"),
        vocabulary=meta.get("n_vocab"),
    )


def _http(address: Address, key: str | None, timeout_s: float) -> httpx.Client:
    return httpx.Client(**http_options(address, key), timeout=timeout_s)


def _get(http: httpx.Client, address: Address, path: str) -> httpx.Response | None:
    """The answer; None if there is no such page. Raises ``ServerFault``."""
    try:
        response = http.get(path)
    except httpx.TimeoutException:
        raise ServerFault(f"{address}{path}: no answer within {http.timeout.read:g} s", gone=True) from None
    except httpx.TransportError as e:
        raise unreachable(address, e) from None
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ServerFault(f"{address}: {about_key(http.headers, response.status_code)}")
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServerFault(f"{address}: not ready (HTTP 503); is it still loading its model?")
    return response if response.status_code == httpx.codes.OK else None


def _json(http: httpx.Client, address: Address, path: str) -> Any:
    text = _text(http, address, path)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def _text(http: httpx.Client, address: Address, path: str) -> str | None:
    response = _get(http, address, path)
    return None if response is None else response.text


def _first_model(said: Any) -> dict[str, Any] | None:
    models = said.get("data") if isinstance(said, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    return first if isinstance(first, dict) else None


def _labels(metrics: str, name: str) -> dict[str, str]:
    """The labels of a metric; empty if it is not there."""
    for found, labels, _ in _METRIC.findall(metrics):
        if found == name:
            return dict(_LABEL.findall(labels))
    return {}
