"""What memory planning must know of a model: which layers keep what, and how many weights there are.

Read from a shipped table of well-known models, from a ``config.json`` of the transformers library, or from the header
of a GGUF file. A model whose layers keep something other than keys and values of attention is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.errors import UserError

Kind = Literal["full", "window", "latent"]

_MOST = 1 << 24
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that keep the same."""

    kind: Kind
    """``full``: K and V of all tokens; ``window``: of the last ``window``; ``latent``: one vector that stands for both
    (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434)."""
    layers: int
    k_row: int
    """Numbers of K that a layer keeps of a token: heads of keys times their size; of a latent its rank and the rotated
    part."""
    v_row: int
    """Numbers of V likewise; 0 for a latent, in which V is a part of K."""
    k_head: int
    """Numbers of a head of K."""
    v_head: int
    """Numbers of a head of V."""
    window: int | None = None
    """Tokens."""

    @property
    def title(self) -> str:
        """In words, with the number of layers."""
        what = {"full": "full attention", "window": f"window of {self.window or 0:,}", "latent": "latent"}[self.kind]
        return f"{what}, {self.layers} layer{'s' * (self.layers != 1)}"


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """A model, as far as its memory goes."""

    name: str
    source: str
    """The file, or where the shipped figures come from."""
    groups: tuple[AttentionGroup, ...]
    llamacpp_windows: bool
    """Whether llama.cpp keeps a small cache for the layers with a window; otherwise it keeps all of their tokens."""
    d_model: int
    n_heads: int
    d_ff: int
    """Numbers between the matrices of a feed-forward layer: the widest, of a mixture of experts all that a token
    uses."""
    vocabulary: int
    context: int | None
    """Tokens that the model was made for, where it says so."""
    parameters: dict[str, int]
    """Numbers of weights by storage type, where they are counted by shape; ``default`` stands for the type that the
    user may choose."""
    stored: dict[str, int]
    """Bytes of weights by storage type, where a GGUF file states them; one of the two is empty."""
    default_type: str
    """What ``default`` stands for unless the user chooses."""

    @property
    def titles(self) -> tuple[str, ...]:
        """A title for each group, no two alike: where only the widths of K and V differ, they are named too."""
        often = Counter(group.title for group in self.groups)
        return tuple(
            group.title if often[group.title] == 1 else f"{group.title} of {group.k_row} and {group.v_row}"
            for group in self.groups
        )

    @property
    def n_parameters(self) -> int | None:
        """Weights in all, where they are counted by shape."""
        return sum(self.parameters.values()) or None


class ModelConfig(BaseModel):
    """The keys of a config.json that count; the others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model_type: str
    num_hidden_layers: int = Field(ge=1, le=_MOST_LAYERS)
    hidden_size: int = Field(ge=1, le=_MOST)
    num_attention_heads: int = Field(ge=1, le=_MOST)
    num_key_value_heads: int | None = Field(None, ge=1, le=_MOST)
    head_dim: int | None = Field(None, ge=1, le=_MOST)
    intermediate_size: int = Field(ge=1, le=_MOST)
    vocab_size: int = Field(ge=1, le=_MOST)
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
    num_local_experts: int | None = Field(None, ge=1, le=_MOST)
    num_experts: int | None = Field(None, ge=1, le=_MOST)
    num_experts_per_tok: int | None = Field(None, ge=1, le=_MOST)
    moe_intermediate_size: int | None = Field(None, ge=1, le=_MOST)
    n_routed_experts: int | None = Field(None, ge=1, le=_MOST)
    n_shared_experts: int | None = Field(None, ge=0, le=_MOST)
    first_k_dense_replace: int = Field(0, ge=0)
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
    kv_lora_rank: int | None = Field(None, ge=1, le=_MOST)
    q_lora_rank: int | None = Field(None, ge=1, le=_MOST)
    qk_nope_head_dim: int | None = Field(None, ge=1, le=_MOST)
    qk_rope_head_dim: int | None = Field(None, ge=1, le=_MOST)
    v_head_dim: int | None = Field(None, ge=1, le=_MOST)
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    """What a ``model_type`` implies that its config.json need not say (transformers, ``modeling_*.py``)."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """RMSNorms of the model's width in a layer."""
    sinks: bool = False
    tied: bool = False
    pattern: int = 0
    """Of so many layers the last sees everything and the others a window; 0: all have the window, if there is one."""
    llamacpp_windows: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()
    """Of keys that a config.json of this family may leave out."""


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


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("kvsim.model") / "models.toml").read_text(encoding="utf-8"))


def model_names() -> list[str]:
    """The models whose shapes are shipped."""
    return list(_table())


def memory_shape(model: str) -> MemoryShape:
    """The shape of a shipped model, of ``smollm2``, of a ``config.json`` (or its folder) or of a GGUF file.

    Raises ``UserError``.
    """
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if model.endswith(".gguf") or model == "smollm2":
        return _shape_of_gguf(model)
    if name.endswith(".json"):
        return _shape_of_file(Path(model))
    if name in _table():
        entry = dict(_table()[name])
        return shape_of_config(entry, name, entry.pop("source"))
    try:
        if (Path(model) / "config.json").is_file():
            return _shape_of_file(Path(model) / "config.json")
    except (OSError, ValueError):
        pass
    close = get_close_matches(name, model_names(), n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "kvsim plan --list has them all"
    raise UserError(f"--model: no model called {model!r:.80}; {hint} A config.json or FILE.gguf is accepted too")


def _shape_of_file(path: Path) -> MemoryShape:
    if not path.is_file():
        raise UserError(f"{str(path)!r}: no such file; a config.json is expected")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise UserError(f"{str(path)!r}: not a config.json: {reason:.120}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: not a config.json: an object is expected, got {type(loaded).__name__}")
    return shape_of_config(loaded, path.parent.name or path.name, str(path))


def shape_of_config(fields: dict[str, Any], name: str, source: str) -> MemoryShape:
    """The shape that a config.json states. Raises ``UserError`` with ``source`` in front."""
    text = fields.get("text_config")
    if isinstance(text, dict):
        # A multimodal model; its towers are not counted.
        outer = ("torch_dtype", "dtype", "quantization_config", "model_type")
        fields = {**{key: value for key, value in fields.items() if key in outer}, **text}
    kind = fields.get("model_type")
    kind = {"gemma3": "gemma3_text"}.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(f"{source}: model_type is {kind!r:.40}; its layers are not known here; accepted are {known}")
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
        # Only the matrices of the experts (the config's modules_to_not_convert).
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
    )


def _check(c: ModelConfig, source: str) -> None:
    """Refuse what does not fit together."""
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
        raise UserError(f"{source}: decoder_sparse_step, moe_layer_freq and mlp_only_layers: only 1, 1 and [] are read")


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
    """Of each layer whether it sees a window only."""
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
        # Layers from max_window_layers on have it, and only where it is switched on.
        return [bool(c.use_sliding_window) and i >= (c.max_window_layers or 0) for i in range(n)]
    pattern = c.sliding_window_pattern or family.pattern
    return [i % pattern < pattern - 1 if pattern else True for i in range(n)]


def _experts(c: ModelConfig) -> int:
    return c.num_local_experts or c.num_experts or c.n_routed_experts or 0


def _width(c: ModelConfig) -> int:
    """Numbers of a token between the matrices of the widest feed-forward layer."""
    if not _experts(c):
        return c.intermediate_size
    one = c.moe_intermediate_size or c.intermediate_size
    used = one * ((c.num_experts_per_tok or 1) + (c.n_shared_experts or 0))
    return max(used, c.intermediate_size if c.first_k_dense_replace else 0)


def _count(c: ModelConfig, family: _Family) -> tuple[int, int]:
    """Weights in all but the matrices of the experts, and in those (transformers, ``modeling_*.py``)."""
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
"""Architectures that llama.cpp gives a cache of keys and values alone; of so many layers the last sees everything and
the others a window (``hparams.set_swa_pattern`` in llama.cpp), 0: no window, whatever the header says."""


def _shape_of_gguf(model: str) -> MemoryShape:
    from kvsim.model.engine_shapes import gguf_path
    from kvsim.model.gguf_file import read_header

    path = gguf_path(model)
    assert path is not None
    header = read_header(path, vocabulary=False)
    fields, stem = header.fields, path.stem
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in _GGUF_PATTERNS:
        known = ", ".join(_GGUF_PATTERNS)
        raise UserError(f"{path}: architecture {arch!r:.40}: its layers are not known here; accepted are {known}")
    if fields.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: split.count is {fields['split.count']!r:.40}; a file in one piece is accepted")

    def number(key: str, default: int | None = None, most: int = _MOST) -> int:
        value = fields.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UserError(f"{path}: {arch}.{key} is {value!r:.40}; a whole number from 1 to {most} is expected")
        return value

    n_layers = number("block_count", most=_MOST_LAYERS)

    def each(key: str, default: int | None = None) -> list[int]:
        """A number for each layer; many files state one for all."""
        value = fields.get(f"{arch}.{key}", default)
        if not isinstance(value, list):
            return [number(key, default)] * n_layers
        fine = all(isinstance(x, int) and not isinstance(x, bool) and 1 <= x <= _MOST for x in value)
        if len(value) != n_layers or not fine:
            raise UserError(
                f"{path}: {arch}.{key}: a list of {len(value)}; {n_layers} whole numbers from 1 to {_MOST} are "
                "accepted (layers without attention, as in hybrid models, are not planned)"
            )
        return value

    d_model, heads = number("embedding_length"), each("attention.head_count")
    kv_heads = each("attention.head_count_kv") if f"{arch}.attention.head_count_kv" in fields else heads
    k_head = number("attention.key_length", d_model // heads[0])
    v_head = number("attention.value_length", d_model // heads[0])
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2 or not 1 <= embedding.dims[1] <= _MOST:
        raise UserError(f"{path}: it has no table of embeddings (token_embd.weight, of two dimensions)")
    pattern, window = _GGUF_PATTERNS[arch], None
    if pattern:
        window = number("attention.sliding_window")
        stated = fields.get(f"{arch}.attention.sliding_window_pattern", pattern)
        if stated != pattern:
            raise UserError(
                f"{path}: {arch}.attention.sliding_window_pattern is {stated!r:.40}; only {pattern} is accepted"
            )
    # Files made before llama.cpp's PR 12801 (April 2025) have no latents: their K and V are kept by head.
    latent = arch == "deepseek2" and f"{arch}.attention.key_length_mla" in fields
    found: Counter[tuple[bool, int]] = Counter()
    for i in range(n_layers):
        found[pattern > 0 and i % pattern < pattern - 1, kv_heads[i]] += 1
    groups = [
        AttentionGroup("latent", n, k_head, 0, k_head, 0)
        if latent
        else AttentionGroup(
            "window" if some else "full", n, kv * k_head, kv * v_head, k_head, v_head, window if some else None
        )
        for (some, kv), n in sorted(found.items())
    ]
    width = each("feed_forward_length", 4 * d_model)
    if f"{arch}.expert_count" in fields:
        used = number("expert_used_count", 1) * number("expert_feed_forward_length", max(width))
        width = [used] if arch != "deepseek2" else [*width, used]
    context = fields.get(f"{arch}.context_length")
    return MemoryShape(
        name=stem if model != "smollm2" else "smollm2",
        source=str(path),
        groups=tuple(groups),
        llamacpp_windows=True,
        d_model=d_model,
        n_heads=max(heads),
        d_ff=max(width),
        vocabulary=embedding.dims[1],
        context=context if isinstance(context, int) and context > 0 else None,
        parameters={},
        stored=_stored(path, {name: (tensor.kind, tensor.dims) for name, tensor in header.tensors.items()}),
        default_type="",
    )


def _stored(path: Path, tensors: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Bytes of all tensors by type. Raises ``UserError``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: dict[str, int] = {}
    for name, (kind, dims) in tensors.items():
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(f"{path}: tensor {name!r:.60} has the type {kind}, which is not known here") from None
        block, size = GGML_QUANT_SIZES[known]
        if dims[0] % block:
            raise UserError(f"{path}: tensor {name!r:.60} has rows of {dims[0]} numbers, blocks of {block}")
        numbers = 1
        for n in dims:
            numbers *= n
        if numbers > 1 << 50:
            raise UserError(f"{path}: tensor {name!r:.60} claims {numbers} numbers")
        sizes[known.name.lower()] = sizes.get(known.name.lower(), 0) + numbers // block * size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
