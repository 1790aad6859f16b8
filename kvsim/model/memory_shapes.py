"""Shapes of models for memory planning: what each layer caches, and how many weights there are.

They come from a shipped table of well-known models, from a ``config.json`` of the transformers library, or from the
header of a GGUF file. Models whose layers cache anything other than K and V are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.errors import UserError, did_you_mean
from kvsim.model.config_files import read_config, shipped_configs, text_part
from kvsim.model.engine_shapes import MODEL_NAMES, SHAPES, gguf_path
from kvsim.model.storage_types import row_bytes

Kind = Literal["full", "window", "latent"]

_LARGEST = 1 << 24
_LARGEST_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers with the same kind of KV cache."""

    kind: Kind
    """``full``: K and V of all tokens; ``window``: of the last ``window``; ``latent``: one vector that stands for both
    (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434)."""
    layers: int
    k_row: int
    """Numbers of K in one layer for one token: KV heads times their size; for a latent, rank plus rotated part."""
    v_row: int
    """Numbers of V in one layer for one token; 0 for a latent, in which V is part of K."""
    k_head: int
    """Size of a K head."""
    v_head: int
    """Size of a V head."""
    window: int | None = None
    """Tokens in the sliding window."""

    @property
    def title(self) -> str:
        """Description for tables, with the number of layers."""
        what = {"full": "full attention", "window": f"window of {self.window or 0:,}", "latent": "latent"}[self.kind]
        return f"{what}, {self.layers} layer{'s' * (self.layers != 1)}"


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """All that determines the memory of a model: its KV cache, its weights, and the widths of its buffers."""

    name: str
    source: str
    """The file, or the source of the shipped figures."""
    groups: tuple[AttentionGroup, ...]
    llamacpp_windows: bool
    """Whether llama.cpp uses a small cache for layers with a window; otherwise it caches all tokens."""
    d_model: int
    n_heads: int
    d_ff: int
    """Width of the widest feed-forward layer; in a mixture of experts, of all experts of one token together."""
    vocabulary: int
    context: int | None
    """Tokens of context that the model was trained for, if known."""
    parameters: dict[str, int]
    """Number of weights by storage type, if counted from the shape; ``default`` is the type that users may choose."""
    stored: dict[str, int]
    """Bytes of weights by storage type, if read from a GGUF file; either this or ``parameters`` is empty."""
    default_type: str
    """The type of ``default`` weights unless the user chooses another."""
    n_experts: int = 0
    """Experts in a layer, of which each token uses some; 0 without."""
    experts_per_token: int = 0
    qk_norm: bool = False
    """Whether queries and keys have norms of their own."""

    @property
    def titles(self) -> tuple[str, ...]:
        """A unique title for each group; with the widths of K and V if only they differ."""
        often = Counter(group.title for group in self.groups)
        return tuple(
            group.title if often[group.title] == 1 else f"{group.title} of {group.k_row} and {group.v_row}"
            for group in self.groups
        )

    @property
    def n_layers(self) -> int:
        """Number of layers that cache something."""
        return sum(group.layers for group in self.groups)

    def cell_bytes(self, type_k: str, type_v: str) -> int:
        """Bytes of one token's K and V in all layers, each as if it kept every token."""
        return self.key_bytes(type_k) + self.value_bytes(type_v)

    def key_bytes(self, kind: str) -> int:
        """Bytes of one token's K in all layers, stored as that type."""
        return sum(g.layers * row_bytes(kind, g.k_row) for g in self.groups)

    def value_bytes(self, kind: str) -> int:
        """Bytes of one token's V in all layers, stored as that type."""
        return sum(g.layers * row_bytes(kind, g.v_row) for g in self.groups)

    @property
    def n_parameters(self) -> int | None:
        """Number of weights, if counted from the shape."""
        return sum(self.parameters.values()) or None


class ModelConfig(BaseModel):
    """The keys of a config.json that determine memory; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model_type: str
    num_hidden_layers: int = Field(ge=1, le=_LARGEST_LAYERS)
    hidden_size: int = Field(ge=1, le=_LARGEST)
    num_attention_heads: int = Field(ge=1, le=_LARGEST)
    num_key_value_heads: int | None = Field(None, ge=1, le=_LARGEST)
    head_dim: int | None = Field(None, ge=1, le=_LARGEST)
    intermediate_size: int = Field(ge=1, le=_LARGEST)
    vocab_size: int = Field(ge=1, le=_LARGEST)
    max_position_embeddings: int | None = Field(None, ge=1)
    tie_word_embeddings: bool | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: int | None = Field(None, ge=1)
    use_sliding_window: bool | None = None
    max_window_layers: int | None = Field(None, ge=0)
    sliding_window_pattern: int | None = Field(None, ge=1)
    layer_types: list[str] | None = None
    num_local_experts: int | None = Field(None, ge=1, le=_LARGEST)
    num_experts: int | None = Field(None, ge=1, le=_LARGEST)
    num_experts_per_tok: int | None = Field(None, ge=1, le=_LARGEST)
    moe_intermediate_size: int | None = Field(None, ge=1, le=_LARGEST)
    n_routed_experts: int | None = Field(None, ge=1, le=_LARGEST)
    n_shared_experts: int | None = Field(None, ge=0, le=_LARGEST)
    first_k_dense_replace: int = Field(0, ge=0)
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
    kv_lora_rank: int | None = Field(None, ge=1, le=_LARGEST)
    q_lora_rank: int | None = Field(None, ge=1, le=_LARGEST)
    qk_nope_head_dim: int | None = Field(None, ge=1, le=_LARGEST)
    qk_rope_head_dim: int | None = Field(None, ge=1, le=_LARGEST)
    v_head_dim: int | None = Field(None, ge=1, le=_LARGEST)
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that a ``model_type`` implies, beyond its config.json (transformers, ``modeling_*.py``)."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """RMSNorms of width ``hidden_size`` in a layer."""
    sinks: bool = False
    tied: bool = False
    pattern: int = 0
    """Every ``pattern``-th layer has full attention, the others a window; 0: all have the window, if there is one."""
    llamacpp_windows: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of keys that a config.json of this family may omit."""


_FAMILIES: dict[str, _Family] = {
    # llama.cpp runs Mistral as a Llama, without its window, and has switched off Phi's (PR 13676).
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True),
    "gemma2": _Family(norms=4, tied=True, pattern=2, llamacpp_windows=True),
    "gemma3_text": _Family(
        qk_norm=True,
        norms=4,
        tied=True,
        pattern=6,
        llamacpp_windows=True,
        defaults=(
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("vocab_size", 262208),
            ("max_position_embeddings", 131072),
        ),
    ),
    "gpt_oss": _Family(qkv_bias=True, o_bias=True, sinks=True, pattern=2, llamacpp_windows=True),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(),
}
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def model_names() -> list[str]:
    """Names of the models in the shipped table."""
    return list(shipped_configs())


def memory_shape(model: str) -> MemoryShape:
    """The shape of a shipped model, of ``smollm2``, of a ``config.json`` (or its folder) or of a GGUF file.

    The models of kvsim's own engine, ``tiny`` and ``small``, are accepted too. Raises ``UserError``.
    """
    if model in SHAPES:
        return _shape_of_own_model(model)
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if model.endswith(".gguf") or model == "smollm2":
        return _shape_of_gguf(model)
    if name.endswith(".json"):
        return _shape_of_file(Path(model))
    if name in shipped_configs():
        entry = dict(shipped_configs()[name])
        return shape_of_config(entry, name, entry.pop("source"))
    try:
        if (Path(model) / "config.json").is_file():
            return _shape_of_file(Path(model) / "config.json")
    except (OSError, ValueError):
        pass
    hint = did_you_mean(name, [*MODEL_NAMES, *model_names()])
    raise UserError(
        f"no model called {model!r:.80}; {f'{hint} There' if hint else 'there'} are {', '.join(MODEL_NAMES)}, those of "
        "kvsim plan --list, and any config.json or FILE.gguf"
    )


def shape_name(model: str) -> str:
    """The name of the shape that ``memory_shape`` finds for a model, without reading its file.

    Of a config.json that is its folder's name, of other files their own without the ending, of a name with a publisher
    the part after it, in lower case.
    """
    path = Path(model)
    if path.name == "config.json":
        return path.resolve().parent.name or path.name
    if path.suffix in (".json", ".gguf"):
        return path.stem
    if path.name.lower() in shipped_configs():
        return path.name.lower()
    return path.resolve().name if path.is_dir() else model


def _shape_of_own_model(name: str) -> MemoryShape:
    s = SHAPES[name]
    heads, kv_heads = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
    layer = 2 * s.d_model * (heads + kv_heads) + 3 * s.d_model * s.d_ff + 2 * s.d_model
    numbers = 2 * s.vocabulary * s.d_model + s.n_layers * layer + s.d_model
    return MemoryShape(
        name=name,
        source="built in",
        groups=(AttentionGroup("full", s.n_layers, kv_heads, kv_heads, s.d_head, s.d_head),),
        llamacpp_windows=False,
        d_model=s.d_model,
        n_heads=s.n_heads,
        d_ff=s.d_ff,
        vocabulary=s.vocabulary,
        context=None,
        parameters={"f32": numbers},
        stored={},
        default_type="f32",
    )


def _shape_of_file(path: Path) -> MemoryShape:
    return shape_of_config(read_config(path), shape_name(str(path)), str(path))


def shape_of_config(fields: dict[str, Any], name: str, source: str) -> MemoryShape:
    """The shape of a model by its config.json. Raises ``UserError``, which names ``source``."""
    fields = text_part(fields)
    kind = fields.get("model_type")
    kind = {"gemma3": "gemma3_text"}.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(f"{source}: model_type is {kind!r:.40}; its layers are not known here; accepted: {known}")
    family = _FAMILIES[kind]
    try:
        config = ModelConfig.model_validate({**dict(family.defaults), **fields, "model_type": kind})
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where, got = ".".join(map(str, first["loc"])), first["input"]
        said = first["msg"][0].lower() + first["msg"][1:]
        given = "" if first["type"] == "missing" else f", got {got!r:.40}"
        raise UserError(f"{source}: {where}: {said}{given}") from None
    _check(config, source)
    groups = _groups(config, family, source)
    numbers, experts = _count(config, family)
    parameters = {"default": numbers + experts}
    default = _DTYPES.get(config.torch_dtype or config.dtype or "bfloat16", "")
    method = (config.quantization_config or {}).get("quant_method")
    if method == "mxfp4":
        # Only the matrices of the experts are converted (modules_to_not_convert in the config).
        parameters = {"default": numbers, "mxfp4": experts} if experts else parameters
    elif method == "fp8":
        default = "fp8"
    elif method is not None:
        default = f"quant_method {method!r:.40}"
    elif not default:
        default = f"torch_dtype {config.torch_dtype or config.dtype!r:.40}"
    return MemoryShape(
        name=name,
        source=source,
        groups=groups,
        llamacpp_windows=family.llamacpp_windows,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_ff=_width(config),
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        parameters=parameters,
        stored={},
        default_type=default,
        n_experts=_experts(config),
        experts_per_token=(config.num_experts_per_tok or 1) if _experts(config) else 0,
        qk_norm=family.qk_norm,
    )


def _check(c: ModelConfig, source: str) -> None:
    """Refuse inconsistent or incomplete keys."""
    if c.num_attention_heads % _kv_heads(c):
        raise UserError(
            f"{source}: num_key_value_heads is {c.num_key_value_heads}; a divisor of num_attention_heads "
            f"({c.num_attention_heads}) is accepted"
        )
    if c.head_dim is None and c.hidden_size % c.num_attention_heads:
        raise UserError(f"{source}: head_dim: field required where num_attention_heads does not divide hidden_size")
    needed: tuple[str, ...] = ()
    if c.model_type.startswith("deepseek"):
        needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if c.model_type in ("mixtral", "gpt_oss"):
        needed = ("num_local_experts", "num_experts_per_tok")
    if c.model_type == "qwen3_moe":
        needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    if c.n_routed_experts:
        needed += ("moe_intermediate_size", "num_experts_per_tok")
    for key in needed:
        if getattr(c, key) is None:
            raise UserError(f"{source}: {key}: field required where model_type is {c.model_type}")
    if c.decoder_sparse_step != 1 or c.moe_layer_freq != 1 or c.mlp_only_layers:
        raise UserError(
            f"{source}: decoder_sparse_step, moe_layer_freq and mlp_only_layers: only 1, 1 and [] are accepted"
        )


def _kv_heads(c: ModelConfig) -> int:
    return c.num_key_value_heads or c.num_attention_heads


def _d_head(c: ModelConfig) -> int:
    return c.head_dim or c.hidden_size // c.num_attention_heads


def _groups(c: ModelConfig, family: _Family, source: str) -> tuple[AttentionGroup, ...]:
    if c.kv_lora_rank is not None:
        row = c.kv_lora_rank + (c.qk_rope_head_dim or 0)
        return (AttentionGroup("latent", c.num_hidden_layers, row, 0, row, 0),)
    windowed = _windowed(c, family, source)
    head, row = _d_head(c), _kv_heads(c) * _d_head(c)
    groups = []
    if full := windowed.count(False):
        groups.append(AttentionGroup("full", full, row, row, head, head))
    if some := windowed.count(True):
        groups.append(AttentionGroup("window", some, row, row, head, head, c.sliding_window))
    return tuple(groups)


def _windowed(c: ModelConfig, family: _Family, source: str) -> list[bool]:
    """Whether each layer has a sliding window."""
    n = c.num_hidden_layers
    if c.layer_types is not None:
        if len(c.layer_types) != n:
            raise UserError(f"{source}: layer_types has {len(c.layer_types)} entries for {n} layers")
        other = set(c.layer_types) - {"full_attention", "sliding_attention"}
        if other:
            raise UserError(
                f"{source}: layer_types: {min(other)!r:.40} is not planned (recurrent, chunked or hybrid layers are "
                "not); full_attention and sliding_attention are accepted"
            )
        windowed = [kind == "sliding_attention" for kind in c.layer_types]
        if any(windowed) and c.sliding_window is None:
            raise UserError(f"{source}: sliding_window: field required where layer_types has sliding_attention")
        return windowed
    reaches = c.max_position_embeddings is not None and (c.sliding_window or 0) >= c.max_position_embeddings
    if c.sliding_window is None or reaches or c.model_type in ("llama", "mixtral"):
        return [False] * n
    if c.model_type.startswith("qwen"):
        # Layers from max_window_layers on have the window, if it is switched on.
        return [bool(c.use_sliding_window) and i >= (c.max_window_layers or 0) for i in range(n)]
    pattern = c.sliding_window_pattern or family.pattern
    return [i % pattern < pattern - 1 if pattern else True for i in range(n)]


def _experts(c: ModelConfig) -> int:
    return c.num_local_experts or c.num_experts or c.n_routed_experts or 0


def _width(c: ModelConfig) -> int:
    """Width of the widest feed-forward layer, for one token."""
    if not _experts(c):
        return c.intermediate_size
    one = c.moe_intermediate_size or c.intermediate_size
    used = one * ((c.num_experts_per_tok or 1) + (c.n_shared_experts or 0))
    return max(used, c.intermediate_size if c.first_k_dense_replace else 0)


def _count(c: ModelConfig, family: _Family) -> tuple[int, int]:
    """Number of weights outside and inside the matrices of experts (transformers, ``modeling_*.py``)."""
    d, n, heads, ff = c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.intermediate_size
    tied = family.tied if c.tie_word_embeddings is None else c.tie_word_embeddings
    outside = c.vocab_size * d * (1 if tied else 2) + d
    if c.kv_lora_rank is not None:
        nope, rope, v = c.qk_nope_head_dim or 0, c.qk_rope_head_dim or 0, c.v_head_dim or 0
        q = heads * (nope + rope)
        attention = d * q if c.q_lora_rank is None else c.q_lora_rank * (d + 1 + q)
        attention += d * (c.kv_lora_rank + rope) + c.kv_lora_rank * (1 + heads * (nope + v)) + heads * v * d
    else:
        q, kv = heads * _d_head(c), _kv_heads(c) * _d_head(c)
        attention = 2 * d * q + 2 * d * kv
        attention += (q + 2 * kv) * (family.qkv_bias or bool(c.attention_bias))
        attention += d * (family.o_bias or bool(c.attention_bias and c.model_type in ("llama", "qwen3", "qwen3_moe")))
        attention += 2 * _d_head(c) * family.qk_norm + heads * family.sinks
    attention += family.norms * d
    dense = 3 * d * ff + (2 * ff + d) * c.mlp_bias
    n_experts = _experts(c)
    if not n_experts:
        return outside + n * (attention + dense), 0
    one = c.moe_intermediate_size or ff
    first = min(c.first_k_dense_replace, n)
    sparse = d * n_experts + 3 * d * one * (c.n_shared_experts or 0)
    if c.model_type == "deepseek_v3":
        sparse += n_experts
    if c.model_type == "gpt_oss":
        sparse += n_experts * (1 + 2 * one + d)
    return outside + n * attention + first * dense + (n - first) * sparse, (n - first) * n_experts * 3 * d * one


# GGUF files


_GGUF_PATTERNS: dict[str, int] = {
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


def _shape_of_gguf(model: str) -> MemoryShape:
    from kvsim.model.gguf_file import read_header

    path = gguf_path(model)
    assert path is not None
    header = read_header(path, vocabulary=False)
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in _GGUF_PATTERNS:
        known = ", ".join(_GGUF_PATTERNS)
        raise UserError(f"{path}: architecture {arch!r:.40}: its layers are not known here; accepted: {known}")
    if fields.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: split.count is {fields['split.count']!r:.40}; a file in one piece is accepted")
    keys = _GgufKeys(path, arch, fields)
    d_model, heads = keys.number("embedding_length"), keys.each("attention.head_count")
    kv_heads = keys.each("attention.head_count_kv") if keys.has("attention.head_count_kv") else heads
    k_head = keys.number("attention.key_length", d_model // heads[0])
    v_head = keys.number("attention.value_length", d_model // heads[0])
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2 or not 1 <= embedding.dims[1] <= _LARGEST:
        raise UserError(f"{path}: it has no table of embeddings (token_embd.weight, of two dimensions)")
    groups = _gguf_groups(keys, kv_heads, k_head, v_head)
    width = keys.each("feed_forward_length", 4 * d_model)
    if keys.has("expert_count"):
        used = keys.number("expert_used_count", 1) * keys.number("expert_feed_forward_length", max(width))
        width = [used] if arch != "deepseek2" else [*width, used]
    context = fields.get(f"{arch}.context_length")
    return MemoryShape(
        name=path.stem if model != "smollm2" else "smollm2",
        source=str(path),
        groups=groups,
        llamacpp_windows=True,
        d_model=d_model,
        n_heads=max(heads),
        d_ff=max(width),
        vocabulary=embedding.dims[1],
        context=context if isinstance(context, int) and context > 0 else None,
        parameters={},
        stored=_stored(path, {name: (tensor.kind, tensor.dims) for name, tensor in header.tensors.items()}),
        default_type="",
        n_experts=keys.number("expert_count") if keys.has("expert_count") else 0,
        experts_per_token=keys.number("expert_used_count", 1) if keys.has("expert_count") else 0,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
    )


class _GgufKeys:
    """The keys of one architecture in a GGUF header, checked as they are read."""

    def __init__(self, path: Path, arch: str, fields: Mapping[str, Any]):
        self.path, self.arch, self._fields = path, arch, fields
        self.n_layers = self.number("block_count", most=_LARGEST_LAYERS)

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self._fields

    def number(self, key: str, default: int | None = None, most: int = _LARGEST) -> int:
        """A whole number from 1 to ``most``. Raises ``UserError``."""
        value = self._fields.get(f"{self.arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UserError(
                f"{self.path}: {self.arch}.{key} is {value!r:.40}; a whole number from 1 to {most} is expected"
            )
        return value

    def expect(self, key: str, only: int) -> None:
        """Raise ``UserError`` if the key has another value."""
        value = self._fields[f"{self.arch}.{key}"]
        if value != only:
            raise UserError(f"{self.path}: {self.arch}.{key} is {value!r:.40}; only {only} is accepted")

    def each(self, key: str, default: int | None = None) -> list[int]:
        """A number for each layer; many files have one for all layers. Raises ``UserError``."""
        value = self._fields.get(f"{self.arch}.{key}", default)
        if not isinstance(value, list):
            return [self.number(key, default)] * self.n_layers
        fine = all(isinstance(x, int) and not isinstance(x, bool) and 1 <= x <= _LARGEST for x in value)
        if len(value) != self.n_layers or not fine:
            raise UserError(
                f"{self.path}: {self.arch}.{key}: a list of {len(value)}; {self.n_layers} whole numbers from 1 to "
                f"{_LARGEST} are accepted (layers without attention, as in hybrid models, are not planned)"
            )
        return value


def _gguf_groups(keys: _GgufKeys, kv_heads: list[int], k_head: int, v_head: int) -> tuple[AttentionGroup, ...]:
    """The groups of layers. Raises ``UserError`` for a pattern of windows that llama.cpp does not use."""
    pattern, window = _GGUF_PATTERNS[keys.arch], None
    if pattern:
        window = keys.number("attention.sliding_window")
        if keys.has("attention.sliding_window_pattern"):
            keys.expect("attention.sliding_window_pattern", pattern)
    # Files from before llama.cpp's PR 12801 (April 2025) have no latents: they cache K and V by head.
    latent = keys.arch == "deepseek2" and keys.has("attention.key_length_mla")
    found: Counter[tuple[bool, int]] = Counter()
    for i in range(keys.n_layers):
        found[pattern > 0 and i % pattern < pattern - 1, kv_heads[i]] += 1
    groups = [
        AttentionGroup("latent", n, k_head, 0, k_head, 0)
        if latent
        else AttentionGroup(
            "window" if some else "full", n, kv * k_head, kv * v_head, k_head, v_head, window if some else None
        )
        for (some, kv), n in sorted(found.items())
    ]
    return tuple(groups)


def _stored(path: Path, tensors: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Bytes of all tensors by storage type. Raises ``UserError``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: dict[str, int] = {}
    for name, (kind, dims) in tensors.items():
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(f"{path}: tensor {name!r:.60} has the type {kind}, which is not known here") from None
        block, size = GGML_QUANT_SIZES[known]
        if dims[0] % block:
            raise UserError(
                f"{path}: tensor {name!r:.60} has rows of {dims[0]} numbers, not a multiple of its blocks of {block}"
            )
        numbers = 1
        for n in dims:
            numbers *= n
        if numbers > 1 << 50:
            raise UserError(f"{path}: tensor {name!r:.60} claims {numbers} numbers")
        sizes[known.name.lower()] = sizes.get(known.name.lower(), 0) + numbers // block * size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
