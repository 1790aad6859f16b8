"""Shapes of models for memory planning from the header of a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import LIMITS, UserError
from kvsim.model.attention_groups import AttentionGroup, MemoryShape, PassWeights
from kvsim.model.gguf_file import LARGEST, LARGEST_LAYERS, GgufHeader, read_header

_PATTERNS: dict[str, int] = {
    **dict.fromkeys(("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi2", "phi3", "gemma", "starcoder2"), 0),
    **dict.fromkeys(("falcon", "stablelm", "granite", "granitemoe", "smollm3", "internlm2", "minicpm", "gpt2"), 0),
    "command-r": 0,
    "deepseek2": 0,
    "gemma2": 2,
    "gemma3": 6,
    "gpt-oss": 2,
    "cohere2": 4,
}
"""Architectures that cache only K and V in llama.cpp. Every n-th layer has full attention, the others a window
(``hparams.set_swa_pattern`` in llama.cpp); 0: no window, even if the header has one."""


def shape_of_gguf(path: Path, name: str) -> MemoryShape:
    """The shape of the model in a GGUF file. Raises ``UserError``."""
    header = read_header(path, vocabulary=False)
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise UserError(f"{path}: architecture {arch!r:.40}: its layers are not known here; accepted: {known}{LIMITS}")
    if fields.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: split.count is {fields['split.count']!r:.40}; a file in one piece is accepted")
    keys = _Keys(header, arch)
    d_model, heads = keys.number("embedding_length"), keys.each("attention.head_count")
    kv_heads = keys.each("attention.head_count_kv") if keys.has("attention.head_count_kv") else heads
    k_head = keys.number("attention.key_length", d_model // heads[0])
    v_head = keys.number("attention.value_length", d_model // heads[0])
    width = keys.each("feed_forward_length", 4 * d_model)
    experts = used = 0
    if keys.has("expert_count"):
        experts, used = keys.number("expert_count"), keys.number("expert_used_count", 1)
        together = used * keys.number("expert_feed_forward_length", max(width))
        width = [together] if arch != "deepseek2" else [*width, together]
    context = fields.get(f"{arch}.context_length")
    sizes = _sizes(header)
    return MemoryShape(
        name=name,
        source=str(path),
        groups=_groups(keys, kv_heads, k_head, v_head),
        llamacpp_windows=True,
        d_model=d_model,
        n_heads=max(heads),
        d_ff=max(width),
        vocabulary=header.vocabulary(),
        context=context if isinstance(context, int) and context > 0 else None,
        parameters={},
        stored=_by_type(sizes),
        default_type="",
        matrices=_by_use(sizes, "matrices"),
        experts=_by_use(sizes, "experts"),
        head=_by_use(sizes, "head"),
        n_experts=experts,
        experts_per_token=used,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
    )


class _Keys:
    """The keys of one architecture in a GGUF header, checked as they are read."""

    def __init__(self, header: GgufHeader, arch: str):
        self.header, self.arch = header, arch
        self.n_layers = self.number("block_count", most=LARGEST_LAYERS)

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.header.fields

    def number(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to ``most``. Raises ``UserError``."""
        return self.header.whole(f"{self.arch}.{key}", default, most)

    def each(self, key: str, default: int | None = None) -> list[int]:
        """A number for each layer; many files have one for all layers. Raises ``UserError``."""
        value = self.header.fields.get(f"{self.arch}.{key}", default)
        if not isinstance(value, list):
            return [self.number(key, default)] * self.n_layers
        fine = all(isinstance(x, int) and not isinstance(x, bool) and 1 <= x <= LARGEST for x in value)
        if len(value) != self.n_layers or not fine:
            raise UserError(
                f"{self.header.path}: {self.arch}.{key}: a list of {len(value)}; {self.n_layers} whole numbers from 1 "
                f"to {LARGEST} are accepted (layers without attention, as in hybrid models, are not planned){LIMITS}"
            )
        return value


def _groups(keys: _Keys, kv_heads: list[int], k_head: int, v_head: int) -> tuple[AttentionGroup, ...]:
    """The groups of layers. Raises ``UserError`` for a pattern of windows that llama.cpp does not use."""
    pattern, window = _PATTERNS[keys.arch], None
    if pattern:
        window = keys.number("attention.sliding_window")
        key = f"{keys.arch}.attention.sliding_window_pattern"
        if (value := keys.header.fields.get(key, pattern)) != pattern:
            raise UserError(f"{keys.header.path}: {key} is {value!r:.40}; only {pattern} is accepted")
    # Files from before llama.cpp's PR 12801 (April 2025) have no latents: they cache K and V by head.
    latent = keys.arch == "deepseek2" and keys.has("attention.key_length_mla")
    expanded = keys.number("attention.key_length_mla") + keys.number("attention.value_length_mla", 128) if latent else 0
    found: Counter[tuple[bool, int]] = Counter()
    for i in range(keys.n_layers):
        found[pattern > 0 and i % pattern < pattern - 1, kv_heads[i]] += 1
    groups = [
        AttentionGroup("latent", n, k_head, 0, k_head, 0, score_width=expanded)
        if latent
        else AttentionGroup(
            "window" if some else "full", n, kv * k_head, kv * v_head, k_head, v_head, window if some else None
        )
        for (some, kv), n in sorted(found.items())
    ]
    return tuple(groups)


class _Tensor(NamedTuple):
    """The size of a tensor, and what a pass does with it."""

    use: str
    kind: str
    numbers: int
    bytes: int


def _sizes(header: GgufHeader) -> list[_Tensor]:
    """The sizes of all tensors. Raises ``UserError``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = []
    for name, tensor in header.tensors.items():
        what = f"{header.path}: tensor {name!r:.60}"
        try:
            kind = GGMLQuantizationType(tensor.kind)
        except ValueError:
            raise UserError(f"{what} has the type {tensor.kind}, which is not known here") from None
        block, size = GGML_QUANT_SIZES[kind]
        if tensor.dims[0] % block:
            raise UserError(f"{what} has rows of {tensor.dims[0]} numbers, not a multiple of its blocks of {block}")
        numbers = math.prod(tensor.dims)
        if numbers > 1 << 50:
            raise UserError(f"{what} claims {numbers} numbers")
        found.append(_Tensor(_use(name, header), kind.name.lower(), numbers, numbers // block * size))
    return found


def _use(name: str, header: GgufHeader) -> str:
    """What a pass does with a tensor: it looks rows of embeddings up, unless they are the head too."""
    if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in header.tensors):
        return "head"
    if name == "token_embd.weight":
        return "embeddings"
    return "experts" if "_exps." in name else "matrices"


def _by_type(sizes: list[_Tensor]) -> dict[str, int]:
    """Bytes of all tensors by storage type, most first."""
    found: Counter[str] = Counter()
    for tensor in sizes:
        found[tensor.kind] += tensor.bytes
    return dict(found.most_common())


def _by_use(sizes: list[_Tensor], use: str) -> PassWeights:
    own = [tensor for tensor in sizes if tensor.use == use]
    return PassWeights(sum(t.numbers for t in own), stored=sum(t.bytes for t in own))
