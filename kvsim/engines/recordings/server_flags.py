"""The scenario of a recorded llama-server: what its flags say, and what it said of itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvsim.engines.recordings.recording_files import Record
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.recorded_names import recorded_model
from kvsim.scenario.scenario import Scenario, load_scenario

_NUMBERS = {
    ("-np", "--parallel"): "slots",
    ("-b", "--batch-size"): "n_batch",
    ("-ub", "--ubatch-size"): "n_ubatch",
    ("-cram", "--cache-ram"): "cache_ram",
    ("--cache-reuse",): "cache_reuse",
    ("--keep",): "n_keep",
    ("-sps", "--slot-prompt-similarity"): "slot_prompt_similarity",
}
_SWITCHES = {
    ("--context-shift",): ("context_shift", True),
    ("--no-context-shift",): ("context_shift", False),
    ("--cache-idle-slots",): ("cache_idle_slots", True),
    ("--no-cache-idle-slots",): ("cache_idle_slots", False),
    ("--cache-prompt",): ("cache_prompt", True),
    ("--no-cache-prompt",): ("cache_prompt", False),
}
_TYPES = {("-ctk", "--cache-type-k"): "type_k", ("-ctv", "--cache-type-v"): "type_v"}
_QUANTIZATION = re.compile(r"[.-](i?q\d\w*|b?f16|f32|mxfp4)$", re.IGNORECASE)
"""The end of a GGUF file's name that says how its weights are stored."""


def scenario_of(header: Record) -> tuple[Scenario, bool]:
    """The scenario of a recording, and whether its model is known, so that bytes can be compared.

    Flags that decide nothing (threads, say) are passed over. Raises ``ValueError`` and ``UserError``.
    """
    said, flags = header["server"], [str(flag) for flag in header["flags"]]
    server: dict[str, Any] = {}
    for names, key in _NUMBERS.items():
        value = flag_value(flags, *names)
        if value is not None:
            server[key] = _number(names[-1], value, float if key == "slot_prompt_similarity" else int)
    for names, (key, on) in _SWITCHES.items():
        if any(name in flags for name in names):
            server[key] = on
    if server.get("slots", 0) < 1:
        server.pop("slots", None)  # -1: auto.
    cache: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "policy": f"llama.cpp-{PRESENT['llama.cpp'].version}"}
    for names, key in _TYPES.items():
        value = flag_value(flags, *names)
        if value is not None:
            cache[key] = value
    cells = int(_number("--ctx-size", flag_value(flags, "-c", "--ctx-size") or "0", int))
    cache["cells"] = cells or int(said["n_ctx"])
    if any(flag in flags for flag in ("-kvu", "--kv-unified")):
        cache["unified"] = True
    elif any(flag in flags for flag in ("-no-kvu", "--no-kv-unified")):
        cache["unified"] = False
    model = model_of_file(str(header.get("model", {}).get("file", "")))
    table = {"server": server, "cache": cache, "model": {} if model is None else {"name": model}}
    return load_scenario(table), model is not None


def _number(flag: str, text: str, kind: type[int] | type[float]) -> float:
    """The value of a flag. Raises ``ValueError`` if it is none."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{flag} {text!r:.40}: a number is expected") from None


def model_of_file(file: str) -> str | None:
    """The name here of a model file's model; None if it is not known."""
    try:
        return recorded_model(_QUANTIZATION.sub("", file.removesuffix(".gguf")))
    except UserError:
        return None


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """What stands behind the last of these flags, or behind its "="; None if none is there."""
    found = None
    for flag, following in zip(flags, [*flags, ""][1:], strict=True):
        name, equals, value = flag.partition("=")
        if name in names:
            found = value if equals else following
    return found
