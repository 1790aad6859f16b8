"""Shapes of models for memory planning from the header of a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import LIMITS, UserError
from kvsim.model.cache_groups import CacheGroup, Kind, MemoryShape, PassWeights
from kvsim.model.gguf_file import LARGEST, LARGEST_LAYERS, GgufHeader, read_header
from kvsim.model.gguf_states import STATE_NAMES, TAKE_BACK, Mixer, mixers_of, states_of

_PATTERNS: dict[str, int] = {
    **dict.fromkeys(("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi2", "phi3", "gemma", "starcoder2"), 0),
    **dict.fromkeys(("falcon", "stablelm", "granite", "granitemoe", "smollm3", "internlm2", "minicpm", "gpt2"), 0),
    "command-r": 0,
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa", "hy_v4", "minicpm3", "plm"), 0),
    "mistral4": 0,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "llama4": 4,
    **dict.fromkeys(STATE_NAMES, 0),
}
"""Architectures whose memory in llama.cpp is known here. Every n-th layer has full attention, the others a window
(``hparams.set_swa_pattern`` in llama.cpp); 0: no window, even if the header has one."""
_ONLY_LLAMACPP = ("plm", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "glm5-next", "qwen4exp")
"""Architectures that vLLM does not run, or caches otherwise."""
_CHUNK = 8192
"""Tokens in a chunk of Llama 4, which llama.cpp does not read from the file (``models/llama4.cpp``)."""
_OWN_CACHE = 20
"""Layers of Gemma 3n that cache, of those of any of its sizes (``models/gemma3n.cpp``)."""


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
    keys = Keys(header, arch)
    least = 0 if arch in STATE_NAMES else 1
    d_model, heads = keys.number("embedding_length"), keys.each("attention.head_count", least=least)
    kv_heads = keys.each("attention.head_count_kv", least=least) if keys.has("attention.head_count_kv") else heads
    usual = d_model // (max(heads) or d_model)
    k_head = keys.number("attention.key_length", usual)
    v_head = keys.number("attention.value_length", usual)
    width = keys.each("feed_forward_length", 4 * d_model, least)
    experts = used = 0
    if keys.has("expert_count"):
        experts, used = keys.number("expert_count"), keys.number("expert_used_count", 1)
        together = used * max(keys.each("expert_feed_forward_length", max(width)))
        width = [together] if arch != "deepseek2" else [*width, together]
    context = fields.get(f"{arch}.context_length")
    sizes = _sizes(header)
    return MemoryShape(
        name=name,
        source=str(path),
        groups=_groups(keys, kv_heads, k_head, v_head),
        n_layers=keys.n_layers,
        llamacpp_windows=True,
        takes_back=arch in TAKE_BACK,
        d_model=d_model,
        n_heads=max(*heads, 1),
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
        only="llamacpp" if arch in _ONLY_LLAMACPP else "",
        qk_norm=any(name.endswith(".attn_q_norm.weight") for name in header.tensors),
    )


class Keys:
    """The keys of one architecture in a GGUF header, checked as they are read."""

    def __init__(self, header: GgufHeader, arch: str):
        self.header, self.arch = header, arch
        # The layers of a head that drafts are counted too, and cache nothing where nothing is drafted.
        drafting = self.number("nextn_predict_layers", 0, LARGEST_LAYERS, least=0)
        self.n_layers = max(self.number("block_count", most=LARGEST_LAYERS) - drafting, 1)

    def has(self, key: str) -> bool:
        """Whether the header has a key."""
        return f"{self.arch}.{key}" in self.header.fields

    def number(self, key: str, default: int | None = None, most: int = LARGEST, least: int = 1) -> int:
        """A whole number from ``least`` to ``most``. Raises ``UserError``."""
        return self.header.whole(f"{self.arch}.{key}", default, most, least)

    def each(self, key: str, default: int | None = None, least: int = 1) -> list[int]:
        """A number for each layer; many files have one for all layers. Raises ``UserError``."""
        value = self.header.fields.get(f"{self.arch}.{key}", default)
        if not isinstance(value, list):
            return [self.number(key, default, least=least)] * self.n_layers
        fine = all(isinstance(x, int) and not isinstance(x, bool) and least <= x <= LARGEST for x in value)
        if len(value) < self.n_layers or not fine:
            raise UserError(
                f"{self.header.path}: {self.arch}.{key}: a list of {len(value)}; {self.n_layers} whole numbers from "
                f"{least} to {LARGEST} are accepted (layers without attention are planned of {', '.join(STATE_NAMES)})"
                f"{LIMITS}"
            )
        return value[: self.n_layers]


def _groups(keys: Keys, kv_heads: list[int], k_head: int, v_head: int) -> tuple[CacheGroup, ...]:
    """The groups of layers. Raises ``UserError`` for a pattern of windows that llama.cpp does not use."""
    arch, pattern, window = keys.arch, _PATTERNS[keys.arch], None
    if pattern:
        window = _CHUNK if arch == "llama4" else keys.number("attention.sliding_window")
        key = f"{arch}.attention.sliding_window_pattern"
        if (value := keys.header.fields.get(key, pattern)) != pattern:
            raise UserError(f"{keys.header.path}: {key} is {value!r:.40}; only {pattern} is accepted")
    # Files from before llama.cpp's PR 12801 (April 2025) have no latents: they cache K and V by head.
    latent = keys.has("attention.key_length_mla")
    expanded = keys.number("attention.key_length_mla") + keys.number("attention.value_length_mla", 128) if latent else 0
    local: Kind = "chunked" if arch == "llama4" else "window"
    found: Counter[tuple[Kind, int]] = Counter()
    readers: Counter[str] = Counter()
    mixers = mixers_of(keys, kv_heads)
    for i, kv in enumerate(kv_heads):
        kind: Kind = local if pattern > 0 and i % pattern < pattern - 1 else "full"
        if arch == "gemma3n" and i >= _OWN_CACHE:
            readers[kind] += 1
        elif mixers[i] in ("attention", "both"):
            found[kind, kv] += 1
    groups = [
        CacheGroup("latent", n, k_head, 0, k_head, 0, score_width=expanded)
        if latent
        else CacheGroup(
            kind, n, kv * k_head, kv * v_head, k_head, v_head, window if kind != "full" else None, readers=readers[kind]
        )
        for (kind, kv), n in sorted(found.items())
    ]
    return (*groups, *_indices(keys, mixers), *states_of(keys, mixers))


def _indices(keys: Keys, mixers: list[Mixer]) -> list[CacheGroup]:
    """The keys of indexers, of those layers that have one (``llama-kv-cache-dsa.cpp``, ``models/glm-dsa.cpp``)."""
    if not keys.number("attention.indexer.top_k", 0, least=0):
        return []
    # GLM 5.2, whose context is longer than that of 5 and 5.1, has one in every fourth layer.
    shared = keys.arch == "glm-dsa" and keys.number("context_length") >= 1 << 20
    own = keys.each("attention.indexer.types", 1, least=0)
    if shared and not keys.has("attention.indexer.types"):
        own = [int(i < 3 or i % 4 == 2) for i in range(keys.n_layers)]
    n = sum(bool(has) and mixer == "attention" for has, mixer in zip(own, mixers, strict=True))
    # GLM 5 Next caches a gate and a pooled key, too (``llama-memory-hybrid-idx.cpp``).
    row = keys.number("attention.indexer.key_length") * (3 if keys.has("attention.indexer.kpool") else 1)
    return [CacheGroup("index", n, row, 0, row)] if n else []


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
