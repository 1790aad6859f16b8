"""What ``quantization_config`` in a config.json says: the type of the converted matrices, and those left in 16 bits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from kvsim.model.gguf_tensors import GgufTensor

_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
"""Keys that name what is not converted: AWQ, FBGEMM and transformers, compressed-tensors, AutoFP8, ModelOpt."""
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "other": "self_attn.latent",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in a layer of transformers, by kinds of tensors; those of a latent have one name."""


def stored_type(told: Mapping[str, Any]) -> str | None:
    """The type of ``--weights`` that a ``quantization_config`` means; None if it is not known here."""
    method = told.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if told.get("weight_block_size") else "fp8"
    if method in ("awq", "gptq"):
        return _of_integers(told.get("bits"), told.get("group_size"))
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(told.get("quant_algo")))
    groups = told.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, dict) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
        if weights.get("type") != "float":
            return _of_integers(weights.get("num_bits"), weights.get("group_size"))
        if weights.get("num_bits") == 8:
            return "fp8_block" if weights.get("strategy") == "block" else "fp8"
        return "nvfp4" if weights.get("num_bits") == 4 else None
    return None


def _of_integers(bits: Any, group: Any) -> str | None:
    return {4: "int4_g32" if group == 32 else "int4", 8: "int8"}.get(bits)


def kept_numbers(told: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> tuple[int, int]:
    """Weights of layers outside and inside experts that a ``quantization_config`` leaves in 16 bits.

    Names are compared as those who read them do: ``re:`` begins a regular expression (compressed-tensors), ``*`` stands
    for anything (ModelOpt), other names mean a module and all within it (vLLM, ``is_layer_skipped``).
    """
    entries = [str(entry) for key in _LISTS for entry in told.get(key) or () if "vis" not in str(entry)]
    patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    globs = [entry for entry in entries if "*" in entry and not entry.startswith("re:")]
    named = {entry[max(entry.find("layers."), 0) :] for entry in entries}

    def kept(kind: str, layer: int, experts: bool) -> bool:
        module = _MODULES[kind]
        module = module.replace("mlp.", "mlp.experts.0.") if experts else module
        name = f"model.layers.{layer}.{module}"
        parts = name.split(".")[1:]
        within = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
        found = not named.isdisjoint(within) or any(pattern.match(name) for pattern in patterns)
        return found or any(fnmatchcase(name, glob) for glob in globs)

    numbers = [0, 0]
    if entries:
        for tensor in tensors:
            if tensor.kind in _MODULES:
                layers = sum(kept(tensor.kind, layer, tensor.experts) for layer in tensor.layers)
                numbers[tensor.experts] += layers * tensor.numbers
    return numbers[0], numbers[1]
