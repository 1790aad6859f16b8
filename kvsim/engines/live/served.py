"""The scenario of a server that runs: what it says of itself, what its flags say, and what has to be assumed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from kvsim.advice.memory.command_line import engine_flags, llamacpp_keys, whole
from kvsim.engines.live.address import Address, address_of
from kvsim.engines.live.settings import ServerSettings, ask_settings, shares_cache
from kvsim.errors import UserError, counted
from kvsim.model.engine_shapes import gguf_path
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.recorded_names import model_of_file
from kvsim.scenario.scenario import Scenario, load_scenario

_VLLM_SEQUENCES = 256
"""Requests at the same time where vLLM is not told how many, and its memory is not known."""
_DTYPES = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "f16"}


@dataclass(frozen=True)
class Served:
    """A running server as a scenario."""

    scenario: Scenario
    threads: int
    assumed: tuple[str, ...]
    """What neither the server nor its flags say, one line each."""

    @property
    def keys(self) -> dict[str, Any]:
        """How the server is set, as changes for ``load_scenario``."""
        table = self.scenario.model_dump(include={"server", "cache"}, exclude_unset=True)
        keys = {f"{section}__{key}": value for section, part in table.items() for key, value in part.items()}
        # A scenario that is changed may say otherwise.
        return {**keys, "server__scheduler": self.scenario.server.scheduler}


@dataclass(frozen=True)
class LiveServer:
    """A server that was asked what it is."""

    address: Address
    settings: ServerSettings
    served: Served
    key: str | None = None

    @property
    def engine(self) -> str:
        """Engine and version."""
        return self.settings.engine

    @property
    def model(self) -> str:
        """The model's name in scenarios."""
        return self.served.scenario.model.name

    @property
    def served_as(self) -> tuple[str, ...]:
        """What the server calls the model: its file or folder, and the name that it answers to, each without a path."""
        names = [name for name in (self.settings.model_file, self.settings.model) if name]
        return tuple(dict.fromkeys(PurePath(name).name for name in names))


def find_server(
    url: str,
    *,
    model: str | None = None,
    flags: str = "",
    key: str | None = None,
    allow_remote: bool = False,
    within_s: float = 60.0,
) -> LiveServer:
    """Ask a server what it is. ``model``, ``flags`` as for ``served``. Raises ``UserError``."""
    address = address_of(url, allow_remote=allow_remote)
    settings = ask_settings(address, key=key, within_s=within_s)
    return LiveServer(address, settings, served(address, settings, model, flags), key)


def served(address: Address, settings: ServerSettings, model: str | None, flags: str = "") -> Served:
    """What a server serves, and how.

    ``model``: a name or a file, where the server's own cannot be read; ``flags``: what it was started with, as far as
    it matters. Raises ``UserError``.
    """
    try:
        typed = shlex.split(flags)
    except ValueError as e:
        raise UserError(f"--flags {flags!r:.80}: {e}") from None
    name = model_of(address, settings, model)
    is_llama = settings.api == "llama-server"
    given = _given(address, settings, engine_flags("llamacpp" if is_llama else "vllm", typed)[0])
    try:
        found = (_llama_server if is_llama else _vllm)(settings, given, name)
    except ValueError as e:
        raise UserError(f"{address}: {e}") from None
    if (threads := whole(given, "--threads", 0)) > 0:
        return replace(found, threads=threads)
    threads = os.cpu_count() or 1
    told = f"{counted(threads, 'thread')}, as many as this machine has cores ({_unsaid(settings, '--threads')})"
    return Served(found.scenario, threads, (*found.assumed, told))


def _given(address: Address, settings: ServerSettings, typed: Mapping[str, str]) -> Mapping[str, str]:
    """The flags of a server's command line, and those of ``--flags``. Raises ``UserError`` if these contradict."""
    if settings.started is None:
        return typed
    for flag, value in typed.items():
        if settings.started.flags.get(flag, value) != value:
            raise UserError(f"--flags says {flag} {value}, but of {address} {settings.started}")
    return {**settings.started.flags, **typed}


def _unsaid(settings: ServerSettings, *flags: str) -> str:
    """The end of a line about flags whose values nothing says."""
    where = "in --flags" if settings.started is None else "on its command line"
    return f"no {', '.join(flags)} {where}"


def model_of(address: Address, settings: ServerSettings, model: str | None) -> str:
    """The model that a server has, by a name that scenarios accept. Raises ``UserError``."""
    if model is not None:
        shape = memory_shape(model)
        own = None if settings.model_file is None else model_of_file(PurePath(settings.model_file).name)
        if own is not None and own != shape.name and model_of_file(PurePath(model).name) not in (own, None):
            raise UserError(f"--model {model}: {address} serves {settings.model_file}")
        return str(Path(model).expanduser().absolute()) if model.endswith(".gguf") else model
    file = settings.model_file
    if file is not None:
        path = Path(file)
        if path.suffix == ".gguf" and path.is_file():  # Whatever model is called like it.
            return "smollm2" if _is_smollm2(path) else str(path.absolute())
        if path.is_absolute() and (path / "config.json").is_file():
            return str(path / "config.json")
    for title in (file, settings.model):
        if title is not None and (name := model_of_file(title)) is not None:
            return name
    raise UserError(
        f"{address}: serves {file or settings.model or 'a model without a name'!r:.100}, which cannot be read here; "
        "say what it is by --model FILE.gguf, a config.json, or a name of kvsim plan --list"
    )


def _is_smollm2(path: Path) -> bool:
    try:
        own = gguf_path("smollm2")
    except UserError:
        return False
    return own is not None and own.samefile(path)


def _llama_server(settings: ServerSettings, given: Mapping[str, str], model: str) -> Served:
    """The scenario of a llama-server; what its command line leaves out is as by default, not assumed. Raises
    ``UserError`` where the flags are not its own.
    """
    slots, context = settings.slots or 1, settings.context
    if context is None:
        raise UserError("it does not say how long its context is")
    assumed = []
    typed = whole(given, "--parallel", 0)
    if typed > 0 and typed != slots:
        raise UserError(f"--flags says {counted(typed, 'slot')} (--parallel), but the server has {slots}")
    unified = shares_cache(settings, given)
    known = settings.started is not None
    if not known and not unified and typed < 1:
        assumed.append("a cache for each slot (no --parallel in --flags)")
    elif not known and unified and "--kv-unified" not in given:
        assumed.append("one cache for all slots (no --parallel in --flags)")
    cells = whole(given, "--ctx-size", 0) or (context if unified else slots * context)
    if "--flash-attn" not in given:
        assumed.append(f"flash attention ({_unsaid(settings, '--flash-attn')})")
    keys = llamacpp_keys({**given, "--parallel": str(slots), "--ctx-size": str(cells)})
    table = {"cache": {"type_k": "f16", "type_v": "f16"}, "model": {"name": model}}
    scenario = load_scenario(table, **keys | {"cache__unified": unified, "server__slot_context": context})
    if not known and not {"--cache-type-k", "--cache-type-v"} <= given.keys():
        kept = scenario.cache
        assumed.append(f"K in {kept.type_k}, V in {kept.type_v} (no --cache-type-k, --cache-type-v in --flags)")
    if not known and not {"--batch-size", "--ubatch-size"} <= given.keys():
        assumed.append(f"batch {scenario.n_batch:,}/{scenario.n_ubatch:,} (no --batch-size, --ubatch-size in --flags)")
    return Served(scenario, 1, tuple(assumed))


def _vllm(settings: ServerSettings, given: Mapping[str, str], model: str) -> Served:
    """The scenario of a vLLM, or of another server that is taken for one."""
    assumed, usual = [], PRESENT["vLLM"]
    if not settings.is_vllm:
        assumed.append(f"batches as vLLM composes them: what {settings.engine} does is not known here")
    slots = whole(given, "--max-num-seqs", _VLLM_SEQUENCES)
    if "--max-num-seqs" not in given:
        assumed.append(f"at most {counted(slots, 'request')} at once ({_unsaid(settings, '--max-num-seqs')})")
    batch = whole(given, "--max-num-batched-tokens", usual.n_batch)
    if "--max-num-batched-tokens" not in given:
        assumed.append(f"at most {counted(batch, 'token')} in a step ({_unsaid(settings, '--max-num-batched-tokens')})")
    context = settings.context or memory_shape(model).context
    if context is None:
        raise UserError("neither the server nor its model says how long a sequence may be")
    size = _whole(settings.cache.get("block_size")) or usual.block_size
    blocks = _whole(settings.cache.get("num_gpu_blocks"))
    if blocks is None:
        blocks = -(-context // size) * min(slots, 8)
        assumed.append(f"{counted(blocks, 'block')} of {counted(size, 'token')} (no metrics of its cache)")
    dtype = given.get("--dtype")
    if dtype is None:
        assumed.append(f"K and V in 16 bits ({_unsaid(settings, '--dtype')})")
    kept = _DTYPES.get(dtype or "", "f16")
    table = {
        "model": {"name": model},
        "server": {"scheduler": "vllm", "slots": slots, "n_batch": batch, "slot_context": min(context, blocks * size)},
        "cache": {"policy": "vllm", "block_size": size, "cells": blocks * size, "type_k": kept, "type_v": kept},
    }
    return Served(load_scenario(table), 1, tuple(assumed))


def _whole(text: str | None) -> int | None:
    """A whole number that can be; None for all else."""
    return int(text) if text is not None and re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None
