"""The keys of a config.json, checked, and what the layers that they describe cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvsim.errors import LIMITS
from kvsim.model.cache_groups import CacheGroup
from kvsim.model.families import FAMILIES, Family
from kvsim.model.gguf_file import LARGEST, LARGEST_LAYERS
from kvsim.model.layer_parts import STATES

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1)]
Network = Literal["dense", "experts", "both", "none"]

_MIXERS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "none": "none",
    **dict.fromkeys(("parallel", "hybrid"), "parallel"),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "kimi", "lightning"), "state"),
}
"""What layers are called in ``layer_types``: ``parallel`` is attention and a state together, ``none`` neither."""


class ModelConfig(BaseModel):
    """The keys of a config.json that determine memory, under the names of most families; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model_type: str
    num_hidden_layers: int = Field(ge=1, le=LARGEST_LAYERS)
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Count
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
    attention_chunk_size: Positive | None = None
    layer_types: list[str] | None = None
    networks: list[Network] | None = None
    """The feed-forward network of each layer; None: experts, if there are any, from ``first_k_dense_replace`` on."""
    num_kv_shared_layers: Count = 0
    """Last layers that attend to the caches of those before them."""
    num_local_experts: Size | None = None
    num_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    n_routed_experts: Size | None = None
    n_shared_experts: Count | None = None
    routed_expert_hidden_size: Size | None = None
    """Width of what experts read and write, if not that of the model."""
    attn_res_block_size: Count = 0
    """Layers in a block whose results later ones add up by weights (attention residuals); 0 without."""
    hc_mult: Count = 0
    """Streams of hyper-connections (arXiv:2409.19606); 0 without."""
    idle_experts: Count = 0
    """Experts without weights, beside the others."""
    shared_expert_width: Count | None = None
    """Width of the expert that all tokens share; None: ``n_shared_experts`` as wide as the others."""
    first_k_dense_replace: Count = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    latent_gates: Count = 0
    """Gates of the result of attention by latents."""
    low_rank_gates: Count = 2
    """How many of the two gates of Kimi delta attention are two matrices of a low rank."""
    indexer_types: list[str] | None = None
    """Whether each layer chooses tokens by an indexer of its own (``full``) or as the one before (``shared``)."""
    index_n_heads: Count = 0
    index_head_dim: Count = 0
    state_heads: Count = 0
    """Heads of a state."""
    state_head: Count = 0
    """Numbers of V in a head of a state."""
    state_groups: Count = 0
    """Groups of heads with a K and a Q of their own, which Mamba calls B and C."""
    state_size: Count = 0
    """Numbers of K in a head of a state."""
    state_inner: Count = 0
    """Channels of Mamba, which has no heads."""
    state_rank: Count = 0
    """Rank of Mamba's time steps."""
    state_kernel: Count = 0
    """Tokens of which a convolution makes one."""
    decay_rank: Count | None = None
    """Rank of the matrices that make the decay of RWKV; the next ones: what is mixed, the gate, and values."""
    mix_rank: Count | None = None
    gate_rank: Count | None = None
    value_rank: Count | None = None
    state_norm: bool = False
    """Whether layers with a state have a norm within."""
    recurrent_type: str = ""
    """The type in which vLLM keeps a recurrent state, if the family says; the model's otherwise."""
    num_mem_blocks: Count = 0
    """Blocks of attention and a feed-forward network that layers share."""
    adapter_rank: Count = 0
    use_shared_attention_adapter: bool = False
    vocab_size_per_layer_input: Count = 0
    hidden_size_per_layer_input: Count = 0
    laurel_rank: Count = 0
    altup_num_inputs: Count = 0
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; a divisor of num_attention_heads "
                f"({self.num_attention_heads}) is accepted"
            )
        latent = self.kv_lora_rank is not None
        if not latent and self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("head_dim: field required where num_attention_heads does not divide hidden_size")
        needed = self.family.needed
        if self.n_routed_experts:
            needed += ("moe_intermediate_size", "num_experts_per_tok")
        for key in needed:
            if getattr(self, key, self) is None:
                raise ValueError(f"{key}: field required where model_type is {self.model_type}")
        if self.decoder_sparse_step != 1 or self.moe_layer_freq != 1 or self.mlp_only_layers:
            raise ValueError(
                "decoder_sparse_step, moe_layer_freq and mlp_only_layers: only 1, 1 and [] are accepted" + LIMITS
            )
        return self

    @property
    def family(self) -> Family:
        """What its ``model_type`` implies."""
        return FAMILIES[self.model_type]

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
    def shared_width(self) -> int:
        """Width of the experts that all tokens share, together."""
        told = self.shared_expert_width
        return self.d_expert * (self.n_shared_experts or 0) if told is None else told

    @property
    def width(self) -> int:
        """Width of the widest feed-forward layer, for one token."""
        used = self.d_expert * (self.num_experts_per_tok or 1) + self.shared_width
        return max(used if kind in ("experts", "both") else self.intermediate_size for kind in self.network_of_layers())

    @property
    def tied(self) -> bool:
        """Whether the table of embeddings is the head too."""
        return self.family.tied if self.tie_word_embeddings is None else self.tie_word_embeddings

    def network_of_layers(self) -> list[Network]:
        """The feed-forward network of each layer. Raises ``ValueError``."""
        n = self.num_hidden_layers
        if self.networks is not None:
            if len(self.networks) != n:
                raise ValueError(f"{len(self.networks)} feed-forward networks for {n} layers")
            return self.networks
        return ["experts" if self.n_experts and i >= self.first_k_dense_replace else "dense" for i in range(n)]

    def mixer_of_layers(self) -> list[str]:
        """What each layer does with other tokens: a kind of ``_MIXERS``. Raises ``ValueError``."""
        n, window = self.num_hidden_layers, self.sliding_window
        if self.layer_types is not None:
            if len(self.layer_types) != n:
                raise ValueError(f"layer_types has {len(self.layer_types)} entries for {n} layers")
            stateless = not self.family.state
            known = {n: kind for n, kind in _MIXERS.items() if not (stateless and kind in ("state", "parallel"))}
            if other := set(self.layer_types) - known.keys():
                raise ValueError(
                    f"layer_types: {min(other)!r:.40} is not planned; accepted: {', '.join(known)}{LIMITS}"
                )
            kinds = [known[kind] for kind in self.layer_types]
            if "window" in kinds and window is None:
                raise ValueError("sliding_window: field required where layer_types has sliding_attention")
            if "chunked" in kinds and self.attention_chunk_size is None:
                raise ValueError("attention_chunk_size: field required where layer_types has chunked_attention")
            return kinds
        return ["window" if some else "full" for some in self._windowed()]

    def indexer_types_of_layers(self) -> list[str]:
        """The indexer of each layer, as in ``indexer_types``. Raises ``ValueError``."""
        told, n = self.indexer_types or [], self.num_hidden_layers
        if told and (len(told) != n or not set(told) <= {"full", "shared"}):
            raise ValueError(f"indexer_types: {n} of full and shared are accepted")
        return told or ["none"] * n

    def _windowed(self) -> list[bool]:
        """Whether each layer has a sliding window, where ``layer_types`` does not say."""
        n, window = self.num_hidden_layers, self.sliding_window
        reaches = self.max_position_embeddings is not None and (window or 0) >= self.max_position_embeddings
        if window is None or reaches or self.model_type in ("llama", "mixtral"):
            return [False] * n
        if self.model_type in ("qwen2", "qwen3", "qwen3_moe"):
            # Layers from max_window_layers on have the window, if it is switched on.
            return [bool(self.use_sliding_window) and i >= (self.max_window_layers or 0) for i in range(n)]
        pattern = self.sliding_window_pattern or self.family.pattern
        return [i % pattern < pattern - 1 if pattern else True for i in range(n)]

    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that cache alike. Raises ``ValueError`` for layers that are not planned."""
        mixers = self.mixer_of_layers()
        own = mixers[: self.num_hidden_layers - self.num_kv_shared_layers]
        others = mixers[len(own) :]
        groups = []
        heads, k, v = self.kv_heads, self.d_head, self.d_head
        if self.family.expanded:
            k, v = (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0), self.v_head_dim or 0
        for kind, window in (("full", None), ("window", self.sliding_window), ("chunked", self.attention_chunk_size)):
            layers = own.count(kind) + (own.count("parallel") if kind == "full" else 0)
            if layers and kind == "full" and self.kv_lora_rank is not None and not self.family.expanded:
                groups.append(self._latent(layers))
            elif layers:
                rows = (heads * k, heads * v, k, v)
                groups.append(CacheGroup(kind, layers, *rows, window, readers=others.count(kind)))  # type: ignore[arg-type]
        if layers := self.indexer_types_of_layers().count("full"):
            groups.append(CacheGroup("index", layers, self.index_head_dim, 0, self.index_head_dim))
        if layers := own.count("state") + own.count("parallel"):
            groups.append(CacheGroup("state", layers, state=STATES[self.family.state](self)[1]))
        return tuple(groups)

    def _latent(self, layers: int) -> CacheGroup:
        assert self.kv_lora_rank is not None
        row = self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        expanded = (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0) + (self.v_head_dim or 0)
        return CacheGroup("latent", layers, row, 0, row, 0, score_width=expanded)
