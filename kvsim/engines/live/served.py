"""The scenario of a server that runs: what it says of itself, what its flags say, and what has to be assumed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from kvsim.engines.live.address import Address, address_of
from kvsim.engines.live.settings import ServerSettings, ask_settings
from kvsim.engines.live.started_with import shares_cache
from kvsim.engines.recordings.server_flags import flag_value, model_of_file, scenario_of
from kvsim.errors import UserError, counted
from kvsim.model.engine_shapes import gguf_path
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.scenario import Scenario, load_scenario

_OFF = ("off", "0", "false", "disabled")
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


def find_server(
    url: str, *, model: str | None = None, flags: str = "", key: str | None = None, allow_remote: bool = False
) -> LiveServer:
    """Ask a server what it is. ``model``, ``flags`` as for ``served``. Raises ``UserError``."""
    address = address_of(url, allow_remote=allow_remote)
    settings = ask_settings(address, key=key)
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
    build = _llama_server if settings.api == "llama-server" else _vllm
    try:
        found = build(settings, typed, name)
    except ValueError as e:
        raise UserError(f"{address}: {e}") from None
    threads = _number(typed, "-t", "--threads")
    if threads is not None:
        return replace(found, threads=threads)
    threads = os.cpu_count() or 1
    told = f"{counted(threads, 'thread')}, as many as this machine has cores (no --threads in --flags)"
    return Served(found.scenario, threads, (*found.assumed, told))


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
        if path.suffix == ".gguf" and path.is_absolute() and path.is_file():
            return "smollm2" if _is_smollm2(path) else str(path)
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


def _llama_server(settings: ServerSettings, flags: Sequence[str], model: str) -> Served:
    """The scenario of a llama-server. Raises ``UserError`` where the flags are not its own."""
    slots, context = settings.slots or 1, settings.context
    if context is None:
        raise UserError("it does not say how long its context is")
    typed, assumed = _number(flags, "-np", "--parallel"), []
    if typed is not None and typed > 0 and typed != slots:
        raise UserError(f"--flags says {counted(typed, 'slot')} (--parallel), but the server has {slots}")
    unified = shares_cache(settings, flags)
    if not unified and (typed is None or typed < 1):
        assumed.append("a cache for each slot (no --parallel in --flags)")
    elif unified and not any(flag in flags for flag in ("-kvu", "--kv-unified")):
        assumed.append("one cache for all slots (no --parallel in --flags)")
    cells = _number(flags, "-c", "--ctx-size") or (context if unified else slots * context)
    own = [*flags, "-np", str(slots), "-c", str(cells), "-kvu" if unified else "-no-kvu"]
    scenario, _ = scenario_of({"server": {"n_ctx": cells}, "flags": own})
    off = (flag_value(flags, "-fa", "--flash-attn") or "").lower() in _OFF
    keys: dict[str, Any] = {"model__name": model, "server__slot_context": context}
    if off:
        keys["cache__kernel"] = "masked"
    elif flag_value(flags, "-fa", "--flash-attn") is None:
        assumed.append("flash attention (no --flash-attn in --flags)")
    scenario = load_scenario(scenario, **keys)
    if flag_value(flags, "-ctk", "--cache-type-k") is None or flag_value(flags, "-ctv", "--cache-type-v") is None:
        kept = scenario.cache
        assumed.append(f"K in {kept.type_k}, V in {kept.type_v} (no --cache-type-k, --cache-type-v in --flags)")
    if _number(flags, "-b", "--batch-size") is None or _number(flags, "-ub", "--ubatch-size") is None:
        assumed.append(f"batch {scenario.n_batch:,}/{scenario.n_ubatch:,} (no --batch-size, --ubatch-size in --flags)")
    return Served(scenario, 1, tuple(assumed))


def _vllm(settings: ServerSettings, flags: Sequence[str], model: str) -> Served:
    """The scenario of a vLLM, or of another server that is taken for one."""
    assumed, usual = [], PRESENT["vLLM"]
    if not settings.is_vllm:
        assumed.append(f"batches as vLLM composes them: what {settings.engine} does is not known here")
    slots = _number(flags, "--max-num-seqs")
    if slots is None:
        slots = _VLLM_SEQUENCES
        assumed.append(f"at most {counted(slots, 'request')} at once (no --max-num-seqs in --flags)")
    batch = _number(flags, "--max-num-batched-tokens")
    if batch is None:
        batch = usual.n_batch
        assumed.append(f"at most {counted(batch, 'token')} in a step (no --max-num-batched-tokens in --flags)")
    context = settings.context or memory_shape(model).context
    if context is None:
        raise UserError("neither the server nor its model says how long a sequence may be")
    size = _whole(settings.cache.get("block_size")) or usual.block_size
    blocks = _whole(settings.cache.get("num_gpu_blocks"))
    if blocks is None:
        blocks = -(-context // size) * min(slots, 8)
        assumed.append(f"{counted(blocks, 'block')} of {counted(size, 'token')} (no metrics of its cache)")
    dtype = flag_value(flags, "--dtype")
    if dtype is None:
        assumed.append("K and V in 16 bits (no --dtype in --flags)")
    kept = _DTYPES.get(dtype or "", "f16")
    table = {
        "model": {"name": model},
        "server": {"scheduler": "vllm", "slots": slots, "n_batch": batch, "slot_context": min(context, blocks * size)},
        "cache": {"policy": "vllm", "block_size": size, "cells": blocks * size, "type_k": kept, "type_v": kept},
    }
    return Served(load_scenario(table), 1, tuple(assumed))


def _number(flags: Sequence[str], *names: str) -> int | None:
    """The whole number behind the last of these flags; None if none is there. Raises ``UserError``."""
    text = flag_value(flags, *names)
    if text is None:
        return None
    if (number := _whole(text)) is None:
        raise UserError(f"--flags: {names[-1]} {text!r:.40}: a whole number is expected")
    return number


def _whole(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
