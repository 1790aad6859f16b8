"""What a server says of itself: ``/props``, ``/v1/models``, ``/version``, ``/metrics`` and ``/slots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvsim.advice.memory.command_line import engine_flags, whole
from kvsim.engines.live import schema
from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import WITHIN_S, Deadline, Fetched, ServerFault, about_key, fetch, http_options
from kvsim.engines.live.client import Api, Client
from kvsim.engines.live.listening import Started, started_at
from kvsim.errors import counted
from kvsim.scenario.server_defaults import AUTO_SLOTS

_COUNTED = {
    "llama-server": ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
    "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
}
"""Metrics that count tokens: of prompts, as far as they were computed, and of answers."""
_SERVING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Metrics that count requests that are there."""


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
    started: Started | None = None
    """Its command line, if it runs on this machine for this user."""

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM."""
        return self.engine.startswith("vllm")


@dataclass(frozen=True)
class Counters:
    """Tokens that a server has computed since it was started, for all of its clients together."""

    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of prompts and of answers."""
        return self.prompt_tokens + self.output_tokens


def ask_settings(
    address: Address, *, key: str | None = None, timeout_s: float = WITHIN_S, within_s: float = 4 * WITHIN_S
) -> ServerSettings:
    """Ask a server what it is, and the system how it was started.

    No page may take longer than ``timeout_s``, nor all of them than ``within_s``. Raises ``ServerFault``.
    """
    said = _asked(address, key, timeout_s, within_s)
    started = started_at(address)
    if started is None or (started.line.program == "llamacpp") is not (said.api == "llama-server"):
        return said
    file = said.model_file
    if file is not None and started.folder is not None and (started.folder / file).exists():
        file = str(started.folder / file)
    return replace(said, started=started, model_file=file)


def _asked(address: Address, key: str | None, timeout_s: float, within_s: float) -> ServerSettings:
    """What a server says of itself. Raises ``ServerFault``."""
    deadline = Deadline(within_s)
    with httpx.Client(**http_options(address, key)) as http:

        def page(path: str) -> Fetched:
            return fetch(http, "GET", path, within_s=min(timeout_s, deadline.left_s))

        props = _said(address, "/props", page("/props"), schema.Props, key)
        models = _said(address, "/v1/models", page("/v1/models"), schema.Models, key)
        first = models.data[0] if models is not None and models.data else None
        if props is not None and props.default_generation_settings is not None:
            return _llama_server(props, props.default_generation_settings.n_ctx, first)
        if first is None:
            raise ServerFault(f"{address}: neither llama-server's /props nor OpenAI's /v1/models is answered")
        version = _said(address, "/version", page("/version"), schema.Version, key)
        metrics = _text(address, page("/metrics"), key)
    name = "vllm" if first.owned_by == "vllm" or "vllm:" in metrics else first.owned_by or "unknown"
    return ServerSettings(
        api="openai",
        engine=f"{name} {'' if version is None else version.version}".strip(),
        model=first.id,
        model_file=first.root,
        context=first.max_model_len,
        cache=next((labels for name, labels, _ in schema.metrics_of(metrics) if name == "vllm:cache_config_info"), {}),
    )


def ask_counters(address: Address, *, key: str | None = None) -> Counters | None:
    """How many tokens a server has computed; None if it does not count them. Raises ``ServerFault``."""
    with httpx.Client(**http_options(address, key)) as http:
        return _counters(address, _text(address, fetch(http, "GET", "/metrics"), key))


async def ask_counters_of(client: Client) -> Counters | None:
    """As ``ask_counters``."""
    return _counters(client.address, _text(client.address, await client.fetch("GET", "/metrics"), client.key))


async def ask_serving(client: Client) -> int | None:
    """How many requests a server serves or holds at the moment; None if it does not say. Raises ``ServerFault``."""
    if client.api == "llama-server":
        slots = _said(client.address, "/slots", await client.fetch("GET", "/slots"), list[schema.Slot], client.key)
        return None if slots is None else sum(slot.is_processing for slot in slots)
    totals = _totals(client.address, _text(client.address, await client.fetch("GET", "/metrics"), client.key), _SERVING)
    return round(sum(totals.values())) if totals else None


def _counters(address: Address, metrics: str) -> Counters | None:
    for names in _COUNTED.values():
        totals = _totals(address, metrics, names)
        if len(totals) == len(names):
            return Counters(*(round(totals[name]) for name in names))
    return None


def _totals(address: Address, metrics: str, names: tuple[str, ...]) -> dict[str, float]:
    """Metrics of these names, added up where there are several, as of several engines behind one server."""
    totals = dict[str, float]()
    try:
        for name, _, value in schema.metrics_of(metrics):
            if name in names:
                totals[name] = totals.get(name, 0.0) + schema.total_of(name, value)
    except ValueError as e:
        raise ServerFault(f"{address}/metrics: {e}") from None
    return totals


def _llama_server(props: schema.Props, context: int | None, model: schema.ModelEntry | None) -> ServerSettings:
    return ServerSettings(
        api="llama-server",
        engine=f"llama-server {props.build_info}".strip(),
        model=None if model is None else model.id,
        model_file=props.model_path,
        slots=props.total_slots,
        context=context,
        vocabulary=None if model is None or model.meta is None else model.meta.n_vocab,
    )


def _content(address: Address, said: Fetched, key: str | None) -> bytes | None:
    """What a page says; None if there is no such page. Raises ``ServerFault``."""
    if said.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ServerFault(f"{address}: {about_key({} if key is None else {'Authorization': key}, said.status)}")
    if said.status == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServerFault(f"{address}: not ready (HTTP 503); is it still loading its model?")
    return said.content if said.status == httpx.codes.OK else None


def _said(address: Address, path: str, said: Fetched, kind: type[schema.SaidT], key: str | None) -> schema.SaidT | None:
    """What a page says in JSON; None if there is no such page. Raises ``ServerFault``."""
    content = _content(address, said, key)
    if content is None or not schema.is_json(content):
        return None
    try:
        return schema.read_said(kind, content)
    except ValueError as e:
        raise ServerFault(f"{address}{path}: {e}") from None


def _text(address: Address, said: Fetched, key: str | None) -> str:
    """What a page says; nothing if there is no such page. Raises ``ServerFault``."""
    return (_content(address, said, key) or b"").decode("utf-8", "replace")


_NO_LIMIT = "no limit"


def flags_of_log(about: Mapping[str, Any]) -> tuple[list[str], str]:
    """The flags that give what a log says while the server loads, and what had to be assumed."""
    flags = ["-np", str(about["slots"])]
    for flag, key in (
        ("-c", "n_ctx"),
        ("-b", "n_batch"),
        ("-ub", "n_ubatch"),
        ("-ctk", "kv_type_k"),
        ("-ctv", "kv_type_v"),
    ):
        if key in about:
            flags += [flag, str(about[key])]
    flags.append("--kv-unified" if about.get("kv_unified") == "true" else "--no-kv-unified")
    memory = about.get("host_cache_mib", 0)
    flags += ["--cache-ram", "-1" if memory == _NO_LIMIT else str(memory)]
    if memory != 0:
        flags.append("--cache-idle-slots" if "idle_slots" in about else "--no-cache-idle-slots")
    rest = "--slot-prompt-similarity, --cache-reuse, --context-shift and --keep"
    return flags, f"flags as the log says them; {rest}, which it does not say, as by default"


def flags_of_server(said: ServerSettings) -> tuple[list[str], str]:
    """The flags of a server's command line, else those that give what it says over HTTP, and what had to be assumed."""
    if said.started is not None:
        return said.started.words, ""
    if said.slots is None or said.context is None:
        return [], "flags as by default: the server says nothing of them"
    slots = f"{counted(said.slots, 'slot')} of {counted(said.context, 'token')}"
    shared = shares_cache(said, {})
    kind = "one cache for all" if shared else "a cache that is divided"
    flags = ["-np", str(said.slots), "-c", str(said.context * (1 if shared else said.slots))]
    if shared:
        flags.append("--kv-unified")
    return flags, f"{slots}, as the server says; {kind}, and all other flags as by default"


def shares_cache(said: ServerSettings, typed: Mapping[str, str]) -> bool:
    """Whether all slots share one cache: by the flags, else if they are as many as llama-server makes by itself."""
    if "--kv-unified" in typed:
        return True
    return "--no-kv-unified" not in typed and whole(typed, "--parallel", 0) < 1 and said.slots == AUTO_SLOTS


def about_server(said: ServerSettings, flags: Sequence[str]) -> dict[str, Any]:
    """What a llama-server says of itself, by the names of its log."""
    typed = engine_flags("llamacpp", flags)[0]
    about: dict[str, Any] = {"version": [f"build: {said.engine.removeprefix('llama-server').strip()}"]}
    if said.slots is not None and said.context is not None:
        about |= {
            "n_ctx": said.context * (1 if shares_cache(said, typed) else said.slots),
            "slots": said.slots,
            "n_ctx_slot": said.context,
        }
    return about
