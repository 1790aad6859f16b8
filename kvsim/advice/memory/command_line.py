"""Command lines of llama-server, ``vllm serve`` and ``ollama serve``: what they set of what is planned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from kvsim.advice.memory import flag_names as names
from kvsim.advice.memory.engine_flags import padded
from kvsim.costs.memory_settings import PLAN_ENGINES, Engine
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError, did_you_mean
from kvsim.model.engine_versions import PRESENT
from kvsim.model.recorded_names import model_and_weights
from kvsim.model.storage_types import VLLM_CACHE_TYPES
from kvsim.scenario.server_defaults import AUTO_SLOTS, present_name

Program = Literal["llamacpp", "vllm", "ollama"]
PROGRAM_TITLES = {"llamacpp": "llama-server", "vllm": "vllm serve", "ollama": "ollama serve"}

_KNOWN = {"llamacpp": names.LLAMACPP, "vllm": names.VLLM}
_OTHERS = {"llamacpp": names.LLAMACPP_OTHERS, "vllm": names.VLLM_OTHERS}
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]+)=(.*)", re.DOTALL)
_ARGUMENTS = {"N_PARALLEL": "--parallel", "BATCH": "--batch-size", "UBATCH": "--ubatch-size"}
"""What follows ``LLAMA_ARG_`` where it is not the flag's name."""
_OFF = ("off", "0", "false", "disabled")
_GIB = 1 << 30
_OLLAMA_CONTEXT = ((47 * _GIB, 262144), (23 * _GIB, 32768), (0, 4096))
"""Ollama's tokens for a request, by the least memory (``server/routes.go``)."""
_QUANTIZATION = {"awq": "int4", "gptq": "int4", "awq_marlin": "int4", "gptq_marlin": "int4", "mxfp4": "mxfp4"}
"""vLLM's ``--quantization`` as a type of weights."""

_SETS: dict[str, tuple[str, ...]] = {
    "--ctx-size": ("ctx", "parallel", "kv_unified"),
    "--parallel": ("parallel",),
    "--kv-unified": ("kv_unified",),
    "--no-kv-unified": ("kv_unified",),
    "--batch-size": ("batch",),
    "--ubatch-size": ("ubatch",),
    "--cache-type-k": ("type_k",),
    "--cache-type-v": ("type_v",),
    "--flash-attn": ("flash_attn",),
    "--swa-full": ("swa_full",),
    "--n-gpu-layers": ("n_gpu_layers",),
    "--n-cpu-moe": ("n_cpu_moe",),
    "--max-model-len": ("ctx",),
    "--max-num-seqs": ("parallel",),
    "--max-num-batched-tokens": ("batch",),
    "--kv-cache-dtype": ("type_k", "type_v"),
    "--tensor-parallel-size": ("tensor_parallel",),
    "--quantization": ("weights",),
}
"""Arguments of ``kvsim.plan`` that a flag sets; other options of ``kvsim plan`` have the engine's own name."""

_NUMBERS = (
    *("--ctx-size", "--parallel", "--batch-size", "--ubatch-size", "--cache-ram", "--cache-reuse", "--keep"),
    *("--ctx-checkpoints", "--checkpoint-min-step"),
)
_TEXTS = ("--cache-type-k", "--cache-type-v")
_SWITCHES = ("--kv-unified", "--context-shift", "--cache-idle-slots", "--cache-prompt")
"""llama-server's flags that have a key in a scenario."""
_VLLM_KEYS = {
    "--max-num-seqs": "server__slots",
    "--max-num-batched-tokens": "server__n_batch",
    "--max-model-len": "server__slot_context",
    "--block-size": "cache__block_size",
}


@dataclass(frozen=True)
class ServerLine:
    """What is set by a command line."""

    program: Program
    flags: Mapping[str, str]
    """Values by flag, each under its long name; empty for a switch."""
    title: str | None = None
    """The model as it is named there."""
    remarks: tuple[str, ...] = ()
    """Flags that are unknown or without effect, a line each."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Ollama's variables."""

    @property
    def engine(self) -> Engine:
        """The engine that serves; Ollama has a llama-server."""
        return "vllm" if self.program == "vllm" else "llamacpp"

    @property
    def sets(self) -> frozenset[str]:
        """The arguments of ``kvsim.plan`` that are said here; of Ollama all, whose defaults depend on the memory."""
        if self.program == "ollama":
            return frozenset(("ctx", "parallel", "kv_unified", "type_k", "type_v", "flash_attn"))
        return frozenset(key for flag in self.flags for key in _SETS.get(flag, ()))

    def plan_arguments(
        self, context: int | None, memory: int | None, device: str | None = None, slots: int = -1
    ) -> dict[str, Any]:
        """The arguments of ``kvsim.plan`` that give the same.

        ``context``: the model's, in tokens; ``slots``: of llama-server, where no flag says. Raises ``UserError``.
        """
        if self.program == "vllm":
            return _vllm_arguments(self.flags, context, memory, device)
        flags = self.flags
        if self.program == "ollama":
            flags = {**flags, **_of_ollama(self.variables, context, memory)}
        return _llamacpp_arguments(flags, context, slots)

    def scenario_keys(self, context: int | None, memory: int | None) -> dict[str, Any]:
        """How the server is set, as changes for ``load_scenario``; what is not said is left to the device or the model.

        ``context``, ``memory``: as for ``plan_arguments``. Raises ``UserError``.
        """
        if self.program == "vllm":
            return {"server__scheduler": "vllm", "cache__policy": "vllm", **_vllm_keys(self.flags)}
        ollama = self.program == "ollama"
        keys = llamacpp_keys(_of_ollama(self.variables, context, memory) if ollama else self.flags)
        # A scenario that is changed may say otherwise.
        auto = {"server__slots": AUTO_SLOTS, "cache__unified": "server__slots" not in keys}
        return {"server__scheduler": "llama-server", **auto, **keys}


def titled_model(title: str) -> tuple[str | None, str | None]:
    """The model of that title by a name that is known here, or the file; and the type of its weights, if it says so."""
    return (title, None) if Path(title).exists() else model_and_weights(title)


def read_command(text: str) -> ServerLine:
    """Read a command line, with the variables before it and whatever starts it (docker, sudo). Raises ``UserError``."""
    try:
        tokens = shlex.split(text.replace("\\\n", " "))
    except ValueError as e:
        raise UserError(f"the command {text!r:.60}: {e}") from None
    variables = {}
    for i, token in enumerate(tokens):
        last, following = PurePath(token).name.removesuffix(".exe"), tokens[i + 1 :]
        if found := _VARIABLE.fullmatch(token):
            variables[found[1]] = found[2]
        elif last == "llama-server":
            return _line("llamacpp", following, variables)
        elif last == "vllm" and following[:1] == ["serve"]:
            return _line("vllm", following[1:], variables)
        elif token == "vllm.entrypoints.openai.api_server":
            return _line("vllm", following, variables)
        elif last == "ollama" and following[:1] in (["serve"], ["run"]):
            return _line("ollama", following[1:], variables)
    if variables and all(name.startswith("OLLAMA_") for name in variables):
        return _line("ollama", [], variables)
    raise UserError(
        f"{text!r:.60}: no llama-server, vllm serve or ollama serve in it, as in "
        "'llama-server -m x.gguf -c 65536 -np 12'"
    )


def _line(program: Program, tokens: Sequence[str], variables: Mapping[str, str]) -> ServerLine:
    engine: Engine = "vllm" if program == "vllm" else "llamacpp"
    flags, remarks, titles = engine_flags(engine, tokens)
    if engine == "llamacpp":
        # What is typed takes precedence over the environment.
        flags = {**_of_environment(variables), **flags}
    title = flags.get("--hf-file") or flags.get("--hf-repo") or flags.get("--model") or (titles[0] if titles else None)
    own = {name: value for name, value in variables.items() if name.startswith("OLLAMA_")}
    known = [*names.OLLAMA, *(f"OLLAMA_{name}" for name in names.OLLAMA_OTHERS)]
    if program == "ollama":
        remarks += [f"{name}: {_unknown(name, known, 'Ollama')}" for name in own if name not in known]
        remarks += [f"{flag}: ollama has no such flag; its variables set it" for flag in flags if flag.startswith("-")]
    return ServerLine(program, flags, title, tuple(remarks), own)


def engine_flags(engine: Engine, tokens: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Values by long name, a line for each flag that is unknown or does nothing, and what belongs to no flag."""
    long = {alias: name for name, aliases in _KNOWN[engine].items() for alias in (name, *aliases)}
    flags, remarks, rest, i = dict[str, str](), list[str](), list[str](), 0
    while i < len(tokens):
        name, equals, value = tokens[i].partition("=")
        i += 1
        # vLLM takes underscores too.
        name = name.replace("_", "-") if engine == "vllm" else name
        if not name.startswith("-"):
            rest.append(tokens[i - 1])
            continue
        takes = name not in names.SWITCHES and not equals and i < len(tokens) and not _is_flag(tokens[i])
        if takes:
            value, i = tokens[i], i + 1
        if name in names.NOT_COUNTED:
            remarks.append(f"{name}: {names.NOT_COUNTED[name]}")
        elif name in names.WITHOUT_EFFECT:
            remarks.append(f"{name}: {names.WITHOUT_EFFECT[name]}")
        elif name in long:
            flags[long[name]] = value
        elif name not in _OTHERS[engine]:
            remarks.append(f"{name}: {_unknown(name, (*long, *_OTHERS[engine]), PROGRAM_TITLES[engine])}")
    return flags, remarks, rest


def _is_flag(token: str) -> bool:
    return token.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", token)


def _unknown(name: str, known: Sequence[str], whose: str) -> str:
    hint = did_you_mean(name, known)
    return f"no flag of {whose} that is known here; {hint or 'it is taken to change nothing of memory'}"


def read_flags(tokens: Sequence[str], engine: str | None) -> ServerLine:
    """Read flags of the engine, or of whichever has them all, and variables of Ollama. Raises ``UserError``."""
    variables = {found[1]: found[2] for token in tokens if (found := _VARIABLE.fullmatch(token))}
    rest = [token for token in tokens if not _VARIABLE.fullmatch(token)]
    if engine == "ollama" or variables:
        programs: list[Program] = ["ollama"]
    else:
        programs = [name for name in PLAN_ENGINES if name == (engine or name)]
    faults: list[str] = []
    for program in programs:
        line = _line(program, rest, variables)
        strays = engine_flags(line.engine, rest)[2]
        if not strays and not line.remarks:
            return line
        faults += [*(f"{token!r:.40} belongs to no option" for token in strays), *line.remarks]
    raise UserError(faults[0])


def _llamacpp_arguments(flags: Mapping[str, str], context: int | None, slots: int) -> dict[str, Any]:
    """The arguments of ``kvsim.plan`` for flags of llama-server, whose context is that of all slots.

    Without ``--parallel`` there are four slots that share it. Raises ``UserError``.
    """
    typed = whole(flags, "--parallel", slots)
    slots = typed if typed > 0 else AUTO_SLOTS
    shared = "--kv-unified" in flags or (typed < 1 and "--no-kv-unified" not in flags)
    total = whole(flags, "--ctx-size", 0) or context or 4096
    kinds = {"type_k": flags.get("--cache-type-k"), "type_v": flags.get("--cache-type-v")}
    sizes = {"batch": whole(flags, "--batch-size", 0), "ubatch": whole(flags, "--ubatch-size", 0)}
    sizes["n_cpu_moe"] = whole(flags, "--n-cpu-moe", 0)
    layers = -1 if flags.get("--n-gpu-layers") in ("auto", "all") else whole(flags, "--n-gpu-layers", -1)
    return {
        "ctx": max(total // slots, 1) if shared else padded(max(total // slots, 1)),
        "parallel": slots,
        "engine": "llamacpp",
        "kv_unified": shared,
        "swa_full": "--swa-full" in flags,
        "n_gpu_layers": layers if layers >= 0 else None,
        "flash_attn": flags.get("--flash-attn", "auto").lower() not in _OFF,
        **{key: value for key, value in (kinds | sizes).items() if value},
    }


def _vllm_arguments(
    flags: Mapping[str, str], context: int | None, memory: int | None, device: str | None
) -> dict[str, Any]:
    batch, sequences = serve_defaults(memory, device)
    given: dict[str, Any] = {
        "ctx": whole(flags, "--max-model-len", 0) or context or 8192,
        "parallel": whole(flags, "--max-num-seqs", sequences),
        "batch": whole(flags, "--max-num-batched-tokens", batch),
        "block_size": whole(flags, "--block-size", 16),
        "tensor_parallel": whole(flags, "--tensor-parallel-size", 1),
        "engine": "vllm",
    }
    if "--gpu-memory-utilization" in flags:
        given["gpu_memory_utilization"] = _share(flags, "--gpu-memory-utilization")
    if flags.get("--kv-cache-dtype", "auto").startswith("fp8"):
        given |= {"type_k": "fp8", "type_v": "fp8"}
    if kind := flags.get("--quantization"):
        given["weights"] = _QUANTIZATION.get(kind, kind)
    return given


def llamacpp_keys(flags: Mapping[str, str]) -> dict[str, Any]:
    """What flags of llama-server set, as changes for ``load_scenario``. Raises ``UserError``."""
    said: dict[str, Any] = {flag: whole(flags, flag, 0) for flag in _NUMBERS if flag in flags}
    said |= {flag: flags[flag] for flag in _TEXTS if flag in flags}
    said |= {flag: flag in flags for flag in _SWITCHES if flag in flags or flag.replace("--", "--no-", 1) in flags}
    for flag in ("--ctx-size", "--parallel"):
        if said.get(flag, 1) < 1:
            del said[flag]  # Left to it.
    if "--slot-prompt-similarity" in flags:
        said["--slot-prompt-similarity"] = _share(flags, "--slot-prompt-similarity")
    names = {flag: present_name(("server", flag[2:].replace("-", "_"))) for flag in said}
    kernel = {"cache__kernel": "masked"} if flags.get("--flash-attn", "").lower() in _OFF else {}
    policy = {"cache__policy": f"llama.cpp-{PRESENT['llama.cpp'].version}"}
    return {"__".join(names[flag]): value for flag, value in said.items()} | kernel | policy


def _vllm_keys(flags: Mapping[str, str]) -> dict[str, Any]:
    """What flags of vLLM set, as changes for ``load_scenario``. Raises ``UserError``."""
    keys: dict[str, Any] = {key: whole(flags, flag, 0) for flag, key in _VLLM_KEYS.items() if flag in flags}
    kind = flags.get("--kv-cache-dtype", "auto")
    if kind.startswith("fp8"):
        keys |= {"cache__type_k": "fp8", "cache__type_v": "fp8"}
    elif kind not in ("auto", *VLLM_CACHE_TYPES, "bfloat16", "float16"):
        raise UserError(f"--kv-cache-dtype {kind!r:.40}; auto and fp8 are accepted")
    off = {
        "--no-enable-prefix-caching": "cache__prefix_cache",
        "--no-enable-chunked-prefill": "server__chunked_prefill",
    }
    return keys | {key: False for flag, key in off.items() if flag in flags}


def _of_ollama(variables: Mapping[str, str], context: int | None, memory: int | None) -> dict[str, str]:
    """The flags with which Ollama starts its llama-server (``llm/llama_server.go``)."""
    usual = next(tokens for least, tokens in _OLLAMA_CONTEXT if (memory or 0) >= least)
    tokens = min(whole(variables, "OLLAMA_CONTEXT_LENGTH", 0) or usual, context or 1 << 30)
    slots = whole(variables, "OLLAMA_NUM_PARALLEL", 1) or 1
    flags = {"--ctx-size": str(tokens * slots), "--parallel": str(slots), "--no-kv-unified": ""}
    if kind := variables.get("OLLAMA_KV_CACHE_TYPE"):
        flags |= {"--cache-type-k": kind.lower(), "--cache-type-v": kind.lower()}
    if flash := variables.get("OLLAMA_FLASH_ATTENTION"):
        flags["--flash-attn"] = "off" if flash.lower() in _OFF else "on"
    return flags


def _of_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The flags that variables ``LLAMA_ARG_...`` stand for."""
    found = {}
    for name, value in variables.items():
        rest = name.removeprefix("LLAMA_ARG_")
        flag = _ARGUMENTS.get(rest, f"--{rest.lower().replace('_', '-')}")
        if rest != name and flag in names.LLAMACPP and not (flag in names.SWITCHES and value.lower() in _OFF):
            found[flag] = value
    return found


def whole(flags: Mapping[str, str], name: str, otherwise: int) -> int:
    """The whole number of a flag; vLLM's may end in k (1,000) or K (1,024). Raises ``UserError``."""
    text = flags.get(name)
    if text in (None, "auto"):
        return otherwise
    found = re.fullmatch(r"(-?\d{1,12})([kK]?)", text or "")
    if found is None:
        raise UserError(f"{name} {text!r:.40}: a whole number is expected")
    return int(found[1]) * {"": 1, "k": 1000, "K": 1024}[found[2]]


def _share(flags: Mapping[str, str], name: str) -> float:
    try:
        return float(flags[name])
    except ValueError:
        raise UserError(f"{name} {flags[name]!r:.40}: a number from 0 to 1 is expected") from None
