"""Shapes of models from the keys of a config.json of the transformers library: the shipped table, and files.

Models whose layers cache anything other than K and V are refused.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvsim.errors import LIMITS, UserError
from kvsim.model.attention_groups import AttentionGroup, MemoryShape, PassWeights
from kvsim.model.gguf_file import LARGEST, LARGEST_LAYERS
from kvsim.model.gguf_tensors import GgufTensor, gguf_tensors
from kvsim.model.published_weights import kept_numbers, stored_type

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


@lru_cache(maxsize=1)
def shipped_configs() -> dict[str, dict[str, Any]]:
    """The shipped table: the keys of a config.json for each model, and their ``source``."""
    return tomllib.loads((files("kvsim.model") / "models.toml").read_text(encoding="utf-8"))


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a config.json. Raises ``UserError``."""
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
    return loaded


def text_part(fields: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that describe the text part, which is all of it but for multimodal models."""
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return fields
    outer = ("torch_dtype", "dtype", "quantization_config", "model_type")
    return {**{key: value for key, value in fields.items() if key in outer}, **text}


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that a ``model_type`` implies, beyond its config.json (transformers, ``modeling_*.py``)."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    """Whether those norms are as wide as all heads together."""
    norms: int = 2
    """RMSNorms of width ``hidden_size`` in a layer."""
    sinks: bool = False
    tied: bool = False
    pattern: int = 0
    """Every ``pattern``-th layer has full attention, the others a window; 0: all have the window, if there is one."""
    llamacpp_windows: bool = False
    needed: tuple[str, ...] = ()
    """Keys that a config.json of this family must have."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of keys that a config.json of this family may omit."""


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
_FAMILIES: dict[str, _Family] = {
    # llama.cpp runs Mistral as a Llama, without its window, and has switched off Phi's (PR 13676).
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(needed=_EXPERTS),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True, needed=("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
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
    "gpt_oss": _Family(qkv_bias=True, o_bias=True, sinks=True, pattern=2, llamacpp_windows=True, needed=_EXPERTS),
    "deepseek_v2": _Family(needed=_LATENT),
    "deepseek_v3": _Family(needed=_LATENT),
    "kimi_k2": _Family(needed=_LATENT),
    "minimax_m2": _Family(qk_norm=True, whole_qk_norm=True, needed=_EXPERTS),
}
_SCORED_BY_SIGMOID = ("deepseek_v3", "kimi_k2", "minimax_m2")
"""Families whose routers keep a correction for each expert."""
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class ModelConfig(BaseModel):
    """The keys of a config.json that determine memory; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model_type: str
    num_hidden_layers: int = Field(ge=1, le=LARGEST_LAYERS)
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Positive | None = None
    tie_word_embeddings: bool | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: Positive | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    sliding_window_pattern: Positive | None = None
    layer_types: list[str] | None = None
    num_local_experts: Size | None = None
    num_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    n_routed_experts: Size | None = None
    n_shared_experts: Annotated[Count, Field(le=LARGEST)] | None = None
    first_k_dense_replace: Count = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; a divisor of num_attention_heads "
                f"({self.num_attention_heads}) is accepted"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("head_dim: field required where num_attention_heads does not divide hidden_size")
        needed = self.family.needed
        if self.n_routed_experts:
            needed += ("moe_intermediate_size", "num_experts_per_tok")
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f"{key}: field required where model_type is {self.model_type}")
        if self.decoder_sparse_step != 1 or self.moe_layer_freq != 1 or self.mlp_only_layers:
            raise ValueError(
                "decoder_sparse_step, moe_layer_freq and mlp_only_layers: only 1, 1 and [] are accepted" + LIMITS
            )
        return self

    @property
    def family(self) -> _Family:
        """What its ``model_type`` implies."""
        return _FAMILIES[self.model_type]

    @property
    def kv_heads(self) -> int:
        """Heads of K and of V."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def d_head(self) -> int:
        """Size of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def n_experts(self) -> int:
        """Experts in a layer; 0 without."""
        return self.num_local_experts or self.num_experts or self.n_routed_experts or 0

    @property
    def d_expert(self) -> int:
        """Width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def width(self) -> int:
        """Width of the widest feed-forward layer, for one token."""
        if not self.n_experts:
            return self.intermediate_size
        used = self.d_expert * ((self.num_experts_per_tok or 1) + (self.n_shared_experts or 0))
        return max(used, self.intermediate_size if self.first_k_dense_replace else 0)

    @property
    def tied(self) -> bool:
        """Whether the table of embeddings is the head too."""
        return self.family.tied if self.tie_word_embeddings is None else self.tie_word_embeddings

    def groups(self) -> tuple[AttentionGroup, ...]:
        """The groups of layers that cache alike. Raises ``ValueError`` for layers that are not planned."""
        if self.kv_lora_rank is not None:
            row = self.kv_lora_rank + (self.qk_rope_head_dim or 0)
            width = (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0) + (self.v_head_dim or 0)
            return (AttentionGroup("latent", self.num_hidden_layers, row, 0, row, 0, score_width=width),)
        windowed = self._windowed()
        head, row = self.d_head, self.kv_heads * self.d_head
        groups = []
        if full := windowed.count(False):
            groups.append(AttentionGroup("full", full, row, row, head, head))
        if some := windowed.count(True):
            groups.append(AttentionGroup("window", some, row, row, head, head, self.sliding_window))
        return tuple(groups)

    def _windowed(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        n, window = self.num_hidden_layers, self.sliding_window
        if self.layer_types is not None:
            if len(self.layer_types) != n:
                raise ValueError(f"layer_types has {len(self.layer_types)} entries for {n} layers")
            if other := set(self.layer_types) - {"full_attention", "sliding_attention"}:
                raise ValueError(
                    f"layer_types: {min(other)!r:.40} is not planned (recurrent, chunked or hybrid layers are not); "
                    f"full_attention and sliding_attention are accepted{LIMITS}"
                )
            windowed = [kind == "sliding_attention" for kind in self.layer_types]
            if any(windowed) and window is None:
                raise ValueError("sliding_window: field required where layer_types has sliding_attention")
            return windowed
        reaches = self.max_position_embeddings is not None and (window or 0) >= self.max_position_embeddings
        if window is None or reaches or self.model_type in ("llama", "mixtral"):
            return [False] * n
        if self.model_type.startswith("qwen"):
            # Layers from max_window_layers on have the window, if it is switched on.
            return [bool(self.use_sliding_window) and i >= (self.max_window_layers or 0) for i in range(n)]
        pattern = self.sliding_window_pattern or self.family.pattern
        return [i % pattern < pattern - 1 if pattern else True for i in range(n)]

    def count(self) -> tuple[int, int]:
        """Number of weights outside and inside the matrices of experts (transformers, ``modeling_*.py``)."""
        d, n, ff, family = self.hidden_size, self.num_hidden_layers, self.intermediate_size, self.family
        outside = self.vocab_size * d * (1 if self.tied else 2) + d
        attention = self.attention_weights() + family.norms * d
        dense = 3 * d * ff + (2 * ff + d) * self.mlp_bias
        if not self.n_experts:
            return outside + n * (attention + dense), 0
        first = min(self.first_k_dense_replace, n)
        sparse = d * self.n_experts + 3 * d * self.d_expert * (self.n_shared_experts or 0)
        if self.model_type in _SCORED_BY_SIGMOID:
            sparse += self.n_experts
        if self.model_type == "gpt_oss":
            sparse += self.n_experts * (1 + 2 * self.d_expert + d)
        experts = (n - first) * self.n_experts * 3 * d * self.d_expert
        return outside + n * attention + first * dense + (n - first) * sparse, experts

    def by_use(self) -> tuple[PassWeights, PassWeights, PassWeights]:
        """The weights outside experts, in experts and in the head (``MemoryShape``)."""
        numbers, experts = self.count()
        table = self.vocab_size * self.hidden_size
        narrow = self.type_of_experts
        kept = (0, 0) if narrow else kept_numbers(self.quantization_config or {}, self.tensors())
        return (
            PassWeights(numbers - table * (1 if self.tied else 2), kept=kept[0]),
            PassWeights(experts, narrow or "default", kept=kept[1]),
            PassWeights(table),
        )

    def tensors(self) -> tuple[GgufTensor, ...]:
        """The matrices that a GGUF file of it would have."""
        return gguf_tensors(self, tied=self.tied, experts_as=self.type_of_experts)

    def attention_weights(self) -> int:
        """Weights of the attention of one layer, biases and norms of queries and keys included."""
        d, heads, family = self.hidden_size, self.num_attention_heads, self.family
        if self.kv_lora_rank is not None:
            nope, rope, v = self.qk_nope_head_dim or 0, self.qk_rope_head_dim or 0, self.v_head_dim or 0
            q = heads * (nope + rope)
            queries = d * q if self.q_lora_rank is None else self.q_lora_rank * (d + 1 + q)
            latent = d * (self.kv_lora_rank + rope) + self.kv_lora_rank * (1 + heads * (nope + v))
            return queries + latent + heads * v * d
        q, kv = heads * self.d_head, self.kv_heads * self.d_head
        biased = bool(self.attention_bias)
        weights = 2 * d * q + 2 * d * kv + (q + 2 * kv) * (family.qkv_bias or biased)
        weights += d * (family.o_bias or (biased and self.model_type in ("llama", "qwen3", "qwen3_moe")))
        norms = q + kv if family.whole_qk_norm else 2 * self.d_head
        return weights + norms * family.qk_norm + heads * family.sinks

    @property
    def type_of_experts(self) -> str | None:
        """The type of the matrices of experts where they alone are converted (``modules_to_not_convert``, ``ignore``),
        as in gpt-oss and Kimi K2.5; None otherwise."""
        told = self.quantization_config or {}
        if not self.n_experts:
            return None
        if told.get("quant_method") == "mxfp4":
            return "mxfp4"
        packed = told.get("quant_method") == "compressed-tensors" and self.model_type == "kimi_k2"
        return "int4_g32" if packed else None

    def weights(self) -> tuple[dict[str, int], str]:
        """Number of weights by storage type, and the type of those that users may choose (``MemoryShape``)."""
        numbers, experts = self.count()
        stated = self.torch_dtype or self.dtype
        default = _DTYPES.get(stated or "bfloat16", "")
        told = self.quantization_config or {}
        method = told.get("quant_method")
        if narrow := self.type_of_experts:
            return {"default": numbers, narrow: experts}, default
        if method not in (None, "mxfp4"):
            default = stored_type(told) or f"quant_method {method!r:.40}"
        elif method is None and not default:
            default = f"torch_dtype {stated!r:.40}"
        return {"default": numbers + experts}, default


def shape_of_config(fields: dict[str, Any], name: str, source: str) -> MemoryShape:
    """The shape of a model by its config.json. Raises ``UserError``, which names ``source``."""
    fields = text_part(fields)
    kind = fields.get("model_type")
    kind = {"gemma3": "gemma3_text"}.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(
            f"{source}: model_type is {kind!r:.40}; its layers are not known here; accepted: {known}{LIMITS}"
        )
    family = _FAMILIES[kind]
    try:
        config = ModelConfig.model_validate({**dict(family.defaults), **fields, "model_type": kind})
        groups = config.groups()
    except ValidationError as e:
        raise UserError(f"{source}: {_first_fault(e)}") from None
    except ValueError as e:
        raise UserError(f"{source}: {e}") from None
    parameters, default_type = config.weights()
    matrices, experts, head = config.by_use()
    return MemoryShape(
        name=name,
        source=source,
        groups=groups,
        llamacpp_windows=family.llamacpp_windows,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_ff=config.width,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        parameters=parameters,
        stored={},
        default_type=default_type,
        matrices=matrices,
        experts=experts,
        head=head,
        n_experts=config.n_experts,
        experts_per_token=(config.num_experts_per_tok or 1) if config.n_experts else 0,
        qk_norm=family.qk_norm,
        whole_qk_norm=family.whole_qk_norm,
        tensors=config.tensors(),
    )


def _first_fault(error: ValidationError) -> str:
    """What is wrong with the first key that is, in words."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    said = first["msg"][0].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f", got {first['input']!r:.40}"
    return f"{'.'.join(map(str, first['loc']))}: {said}{given}"
