"""What a llama-server was started with, as far as it or its log says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.advice.memory.command_line import engine_flags, whole
from kvsim.engines.live.settings import ServerSettings
from kvsim.errors import counted
from kvsim.scenario.server_defaults import AUTO_SLOTS

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
