"""Names and defaults of the keys that llama-server's flags give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.errors import no_such
from kvsim.model import engine_versions
from kvsim.model.engine_shapes import is_engine_model
from policies import current_name, engine_of
from policies.registry import Registry

SCHEDULERS = Registry(
    "scheduler",
    "kvsim.schedulers",
    "SCHEDULERS",
    engine_versions.SCHEDULERS,
    renamed={"no_slot": "on_out_of_cells"},
)
"""The names that ``server.scheduler`` accepts. What others add is called like ``SchedulerBase``."""


def known_in(registry: Registry, name: str) -> str:
    """Return the name. Raises ``ValueError`` with a line that lists what there is."""
    if name not in registry:
        raise ValueError(no_such(registry.kind, name, registry.names()))
    return name


TODAYS_SERVERS = ("llama-server", "llama-server-fair")
"""Schedulers with the flags of today's llama-server, and their defaults."""
AUTO = "auto"
_AUTO_FLAG = -1
"""How ``--parallel`` says "auto"."""
AUTO_SLOTS = 4
"""llama-server's slots where their number is left to it; they share one cache (llama.cpp, pull request 16736)."""

EARLY_SERVER = "llama-server-b4875"
EARLY_DEFAULTS: dict[str, tuple[Any, str]] = {
    "slots": (1, "1 slot (no --parallel)"),
    "context_shift": (True, "context shift (no --no-context-shift)"),
    "slot_prompt_similarity": (0.5, "slots chosen for half of what they hold (--slot-prompt-similarity)"),
}
"""What llama-server of early 2025 does otherwise than today's where no flag says (``common/common.h`` of b4875): keys
of the section ``server``, their values, and these in words."""

_NAMES = {
    ("server", "slot_similarity"): ("server", "slot_prompt_similarity"),
    ("server", "parallel"): ("server", "slots"),
    ("server", "kv_unified"): ("cache", "unified"),
    ("server", "batch_size"): ("server", "n_batch"),
    ("server", "ubatch_size"): ("server", "n_ubatch"),
    ("server", "ctx_size"): ("cache", "cells"),
    ("server", "cache_type_k"): ("cache", "type_k"),
    ("server", "cache_type_v"): ("cache", "type_v"),
    ("server", "keep"): ("server", "n_keep"),
}
"""Names of llama-server's flags, and former names, for keys that stand elsewhere or have another name."""


def present_name(keys: Sequence[str]) -> Sequence[str]:
    """The path of a key, with a flag's name or a former name replaced by the key's own."""
    return _NAMES.get((keys[0], keys[1]), keys) if len(keys) == 2 else keys


def other_names(section: str) -> list[str]:
    """Names that a section accepts beside those of its keys: of flags, and former ones."""
    return [name for owner, name in _NAMES if owner == section]


def without_other_names(data: dict[str, Any], keys: Sequence[str]) -> None:
    """Remove from a scenario's table other names of a key that is about to be set."""
    for (section, name), target in _NAMES.items():
        if target == tuple(keys) and isinstance(data.get(section), dict):
            data[section].pop(name, None)


def with_present_names(data: dict[str, Any]) -> dict[str, Any]:
    """The table of a scenario with flags' names and former names replaced by the keys' own.

    Raises ``ValueError`` where both names are there.
    """
    for (section, name), (owner, key) in _NAMES.items():
        given = data.get(section)
        if not isinstance(given, dict) or name not in given:
            continue
        target = data.get(owner, {})
        if not isinstance(target, dict):
            continue
        if key in target:
            raise ValueError(f"{section}.{name} is another name of {owner}.{key}, which is there too; leave one out")
        data = {**data, section: {k: v for k, v in given.items() if k != name}}
        data[owner] = {**data.get(owner, {}), key: given[name]}
    return data


def own_scheduler(policy: str) -> str | None:
    """The scheduler of the engine that a policy stands for; None for a layout of our own."""
    engine = engine_versions.ENGINE_VERSIONS.get(engine_of(current_name(policy)))
    return None if engine is None else engine.scheduler


def with_own_scheduler(data: dict[str, Any]) -> tuple[dict[str, Any], frozenset[tuple[str, str]]]:
    """The table of a scenario that names no scheduler, with that of the engine whose policy it names, and the keys
    that were filled in."""
    server, cache = data.get("server", {}), data.get("cache", {})
    if not (isinstance(server, dict) and isinstance(cache, dict)) or server.get("scheduler") is not None:
        return data, frozenset()
    own = own_scheduler(str(cache.get("policy", "")))
    return (
        ({**data, "server": {**server, "scheduler": own}}, frozenset({("server", "scheduler")}))
        if own
        else (data, frozenset())
    )


def with_types(data: dict[str, Any]) -> tuple[dict[str, Any], frozenset[tuple[str, str]]]:
    """The table of a scenario with K and V as engines keep them, and the keys that were filled in; those of models that
    the NumPy engine runs are as it keeps them."""
    model, cache = data.get("model", {}), data.get("cache", {})
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str) or is_engine_model(name) or not isinstance(cache, dict):
        return data, frozenset()
    found = {key: "f16" for key in ("type_k", "type_v") if cache.get(key) is None}
    return {**data, "cache": {**cache, **found}}, frozenset(("cache", key) for key in found)


def with_server_defaults(data: dict[str, Any]) -> tuple[dict[str, Any], frozenset[tuple[str, str]]]:
    """The table of a scenario with what a version of llama-server does by itself, and the keys that were filled in.

    Raises ``ValueError`` if another scheduler than today's is asked for "auto" slots, and for other words.
    """
    server = data.get("server", {})
    if not isinstance(server, dict):
        return data, frozenset()
    scheduler, found = server.get("scheduler", "llama-server"), dict[str, Any]()
    slots = server.get("slots", AUTO)
    if isinstance(slots, str) and slots != AUTO:
        raise ValueError(f'server.slots: a whole number or "auto" is expected, got {slots!r:.40}')
    if scheduler in TODAYS_SERVERS:
        if slots in (AUTO, _AUTO_FLAG):
            found = {"slots": AUTO_SLOTS}
    elif server.get("slots") == AUTO:
        raise ValueError(f'server.slots = "auto" is of the scheduler llama-server; say how many under {scheduler}')
    elif scheduler == EARLY_SERVER:
        found = {key: value for key, (value, _) in EARLY_DEFAULTS.items() if key not in server}
    return {**data, "server": {**server, **found}} if found else data, frozenset(("server", key) for key in found)
