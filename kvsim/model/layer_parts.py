"""What the layers of a model are made of: their matrices, all other weights, and the state that some keep.

Source: ``modeling_*.py`` of transformers 5.19. The kinds of matrices are those by which ``llama-quantize`` tells them
apart, as ``convert_hf_to_gguf.py`` names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvsim.model.cache_groups import State
from kvsim.model.gguf_tensors import GgufTensor

if TYPE_CHECKING:
    from kvsim.model.model_config import ModelConfig


class Part(NamedTuple):
    """A part of a layer."""

    matrices: tuple[GgufTensor, ...]
    vectors: int = 0
    """Numbers of all else: norms, biases, sinks, routers, the weights of convolutions. GGUF files have them in f32."""

    @property
    def numbers(self) -> int:
        """All its weights."""
        return self.vectors + sum(matrix.numbers for matrix in self.matrices)

    @property
    def of_experts(self) -> int:
        """Weights in matrices of experts."""
        return sum(matrix.numbers for matrix in self.matrices if matrix.experts)


def attention(c: ModelConfig) -> Part:
    """Attention by heads of K and V."""
    family, d, q, kv = c.family, c.hidden_size, c.num_attention_heads * c.d_head, c.kv_heads * c.d_head
    # A gate for each number of the result comes with the queries.
    asked = 2 * q if family.gated_attention else q
    found = [GgufTensor("attn_q", d, asked), GgufTensor("attn_k", d, kv), GgufTensor("attn_v", d, kv)]
    if family.fused:
        found = [GgufTensor("attn_qkv", d, asked + 2 * kv)]
    vectors = (asked + 2 * kv) * (family.qkv_bias or bool(c.attention_bias))
    vectors += d * (family.o_bias or (bool(c.attention_bias) and family.o_biased))
    norms = q + kv if family.whole_qk_norm else 2 * c.d_head
    vectors += norms * family.qk_norm + c.num_attention_heads * family.sinks
    return Part((*found, GgufTensor("attn_output", q, d)), vectors)


def latent(c: ModelConfig) -> Part:
    """Multi-head latent attention, with the matrices of K and V apart (``attn_k_b``, ``attn_v_b``), but where they are
    expanded (``attn_kv_b``, which ``llama-quantize`` takes for V's)."""
    d, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank or 0
    nope, rope, v = c.qk_nope_head_dim or 0, c.qk_rope_head_dim or 0, c.v_head_dim or 0
    q, vectors = heads * (nope + rope), rank + heads * c.family.sinks
    found = [GgufTensor("attn_q", d, q)]
    if c.q_lora_rank is not None:
        found = [GgufTensor("other", d, c.q_lora_rank), GgufTensor("other", c.q_lora_rank, q)]
        vectors += c.q_lora_rank
    found.append(GgufTensor("other", d, rank + rope))
    if c.family.expanded:
        found.append(GgufTensor("attn_v", rank, heads * (nope + v)))
    else:
        found += [GgufTensor("other", nope, heads * rank), GgufTensor("other", rank, heads * v)]
    if c.latent_gates:
        found.append(GgufTensor("other", d, c.latent_gates))
    return Part((*found, GgufTensor("attn_output", heads * v, d)), vectors)


def indexer(c: ModelConfig) -> Part:
    """The indexer of DeepSeek Sparse Attention (arXiv:2512.02556), which has one key for all its heads."""
    d, heads, head = c.hidden_size, c.index_n_heads, c.index_head_dim
    shapes = ((c.q_lora_rank or 0, heads * head), (d, head), (d, heads))
    return Part(tuple(GgufTensor("other", row, rows) for row, rows in shapes), 2 * head)


def shared_block(c: ModelConfig) -> Part:
    """Attention and a feed-forward network that several layers of Zamba 2 share, on their input and the model's own."""
    d, wide = c.hidden_size, 2 * c.hidden_size
    found = tuple(GgufTensor(kind, wide, wide) for kind in ("attn_q", "attn_k", "attn_v"))
    return Part((*found, GgufTensor("attn_output", wide, d), *_network(c, c.intermediate_size)), wide + d)


def adapters(c: ModelConfig) -> Part:
    """What a layer of Zamba 2 has of its own beside a shared block."""
    d, rank, wide = c.hidden_size, c.adapter_rank, 2 * c.hidden_size
    shapes = [(d, d), (d, rank), (rank, 2 * c.intermediate_size)]
    shapes += [(wide, rank), (rank, wide)] * (3 * c.use_shared_attention_adapter)
    return Part(tuple(GgufTensor("other", row, rows) for row, rows in shapes))


def mamba(c: ModelConfig) -> tuple[Part, State]:
    """Mamba (arXiv:2312.00752), as in Jamba and Falcon Mamba."""
    d, inner, size, rank = c.hidden_size, c.state_inner, c.state_size, c.state_rank
    found = (
        GgufTensor("other", d, 2 * inner),
        GgufTensor("other", inner, rank + 2 * size),
        GgufTensor("other", rank, inner),
        GgufTensor("other", inner, d),
    )
    norms = (rank + 2 * size) * c.state_norm
    vectors = inner * (c.state_kernel + 1) + inner * (size + 2) + norms
    return Part(found, vectors), State("Mamba", (c.state_kernel - 1) * inner, inner * size)


def mamba2(c: ModelConfig) -> tuple[Part, State]:
    """Mamba 2 (arXiv:2405.21060)."""
    d, inner, groups, size = c.hidden_size, c.state_heads * c.state_head, c.state_groups, c.state_size
    convolved, before = inner + 2 * groups * size, c.state_kernel - 1
    found = (GgufTensor("other", d, inner + convolved + c.state_heads), GgufTensor("other", inner, d))
    vectors = convolved * (c.state_kernel + 1) + 3 * c.state_heads + inner * c.state_norm
    state = State(
        "Mamba 2", before * convolved, inner * size, before * 2 * size, groups, recurrent_type=c.recurrent_type
    )
    return Part(found, vectors), state


def plamo_mamba(c: ModelConfig) -> tuple[Part, State]:
    """Mamba 2 of PLaMo 2, whose B, C and time steps are made as in Mamba, without groups (``models/plamo2.cpp``)."""
    d, inner, heads, size, rank = c.hidden_size, c.state_heads * c.state_head, c.state_heads, c.state_size, c.state_rank
    shapes = ((d, 2 * inner), (inner, rank + 2 * size), (rank, heads), (inner, d))
    vectors = inner * c.state_kernel + 3 * heads + rank + 2 * size
    state = State("Mamba 2", (c.state_kernel - 1) * inner, inner * size)
    return Part(tuple(GgufTensor("other", row, rows) for row, rows in shapes), vectors), state


def gated_delta_net(c: ModelConfig) -> tuple[Part, State]:
    """Gated delta net (arXiv:2412.06464), as in Qwen3-Next."""
    d, heads, value = c.hidden_size, c.state_heads, c.state_heads * c.state_head
    convolved = 2 * c.state_groups * c.state_size + value
    found = (
        GgufTensor("attn_qkv", d, convolved),
        GgufTensor("other", d, value),
        GgufTensor("other", d, 2 * heads),
        GgufTensor("other", value, d),
    )
    vectors = convolved * c.state_kernel + 2 * heads + c.state_head
    state = State(
        "gated delta net",
        (c.state_kernel - 1) * convolved,
        value * c.state_size,
        recurrent_type=c.recurrent_type,
    )
    return Part(found, vectors), state


def kimi_delta(c: ModelConfig) -> tuple[Part, State]:
    """Kimi delta attention (arXiv:2510.26692), whose recurrent state vLLM keeps in f32 (``kda_state_dtype``)."""
    d, heads, head, value = c.hidden_size, c.state_heads, c.state_head, c.state_heads * c.state_head
    narrow = [GgufTensor("other", d, head), GgufTensor("other", head, value)]
    found = (
        GgufTensor("attn_q", d, value),
        GgufTensor("attn_k", d, value),
        GgufTensor("attn_v", d, value),
        *narrow * c.low_rank_gates,  # Gates of forgetting and of the result.
        *[GgufTensor("other", d, value)] * (2 - c.low_rank_gates),
        GgufTensor("other", d, heads),
        GgufTensor("attn_output", value, d),
    )
    vectors = 3 * value * c.state_kernel + heads + value + head
    state = State("Kimi delta attention", 3 * (c.state_kernel - 1) * value, value * head, recurrent_type="f32")
    return Part(found, vectors), state


def short_convolution(c: ModelConfig) -> tuple[Part, State]:
    """A gated convolution over a few tokens, as in LFM2."""
    d = c.hidden_size
    return (
        Part((GgufTensor("other", d, 3 * d), GgufTensor("other", d, d)), d * c.state_kernel),
        State("short convolution", (c.state_kernel - 1) * d, 0),
    )


def lightning(c: ModelConfig) -> tuple[Part, State]:
    """Lightning attention (arXiv:2401.04658), as in MiniMax-Text-01 and, with norms of heads, Ling 2.5."""
    d, q = c.hidden_size, c.num_attention_heads * c.d_head
    found = (GgufTensor("attn_qkv", d, 3 * q), GgufTensor("other", d, q), GgufTensor("attn_output", q, d))
    return Part(found, q + 2 * c.d_head * c.family.qk_norm), State("lightning attention", 0, q * c.d_head)


def rwkv6(c: ModelConfig) -> tuple[Part, State]:
    """RWKV 6 (arXiv:2404.05892): what mixes tokens, and the network with a gate behind it (``models/rwkv6.cpp``)."""
    found, state = _rwkv(c, gates=1)
    ranks = 2 * (5 * (c.mix_rank or 0) + (c.decay_rank or 0))
    gate = (GgufTensor("other", c.hidden_size, c.hidden_size),)
    return Part(found + gate, c.hidden_size * (ranks + 12)), state


def rwkv7(c: ModelConfig) -> tuple[Part, State]:
    """RWKV 7 (arXiv:2503.14456), without what mixes values with those of the first layer (``models/rwkv7.cpp``)."""
    found, state = _rwkv(c)
    ranks = 2 * ((c.decay_rank or 0) + (c.mix_rank or 0) + (c.gate_rank or 0))
    return Part(found, c.hidden_size * (ranks + 14)), state


def _rwkv(c: ModelConfig, gates: int = 0) -> tuple[tuple[GgufTensor, ...], State]:
    d, width = c.hidden_size, c.intermediate_size
    mixing = (GgufTensor("other", d, d),) * (4 + gates)
    network = (GgufTensor("other", d, width), GgufTensor("other", width, d))
    return (*mixing, *network), State("RWKV", 2 * d, d * c.state_head)


def hyper_connections(c: ModelConfig) -> Part:
    """What mixes the streams of Hy 4 before and behind attention, and the network, of a layer."""
    n = 2 * c.hc_mult
    return Part((), 2 * (n * c.hc_mult * c.hidden_size + n + 2))


def first_values(c: ModelConfig) -> Part:
    """What layers of RWKV 7 behind the first have to mix their values with those of the first."""
    return Part((), c.hidden_size * (2 * (c.value_rank or 0) + 1))


STATES = {
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
    "mamba": mamba,
    "mamba2": mamba2,
    "plamo_mamba": plamo_mamba,
    "gated_delta_net": gated_delta_net,
    "kimi_delta": kimi_delta,
    "short_convolution": short_convolution,
    "lightning": lightning,
}
"""The layers that keep a state, by what families call theirs."""


def dense(c: ModelConfig, width: int) -> Part:
    """A feed-forward network of a width."""
    return Part(_network(c, width), (2 * width + c.hidden_size) * c.mlp_bias)


def sparse(c: ModelConfig) -> Part:
    """Experts, those that all tokens share, and the router."""
    d, n = c.hidden_size, c.n_experts
    vectors = (n + c.idle_experts) * (d + c.family.corrected) + d * (c.family.gated_shared + c.family.normed_experts)
    if c.model_type == "gpt_oss":
        vectors += n * (1 + 2 * c.d_expert + d)
    shared = _network(c, c.shared_width) if c.shared_width else ()
    between: tuple[GgufTensor, ...] = ()
    if inner := c.routed_expert_hidden_size:
        between, vectors = (GgufTensor("other", d, inner), GgufTensor("other", inner, d)), vectors + inner
    return Part((*_network(c, c.d_expert, n), *between, *shared), vectors)


def side_streams(c: ModelConfig) -> Part:
    """What Gemma 3n has in a layer besides: alternating updates, a low-rank residual, and inputs of the layer's own."""
    d, streams, own, rank = c.hidden_size, c.altup_num_inputs, c.hidden_size_per_layer_input, c.laurel_rank
    shapes = ((d, rank), (rank, d), (d, own), (own, d))
    vectors = streams**2 * (streams + 1) + streams * d + 4 * d
    return Part(tuple(GgufTensor("other", row, rows) for row, rows in shapes), vectors)


def side_inputs(c: ModelConfig) -> Part:
    """What Gemma 3n has outside of layers besides: a table of inputs for each layer, and projections of streams."""
    d, width = c.hidden_size, c.num_hidden_layers * c.hidden_size_per_layer_input
    streams = (GgufTensor("other", d, d),) * (2 * (c.altup_num_inputs - 1))
    table = GgufTensor("token_embd", width, c.vocab_size_per_layer_input)
    return Part((table, GgufTensor("other", d, width), *streams), c.hidden_size_per_layer_input)


def _network(c: ModelConfig, width: int, experts: int = 0) -> tuple[GgufTensor, ...]:
    """Gate, up and down, of one network or of all ``experts``; some families have no gate, or one matrix of both."""
    d, n = (experts and c.routed_expert_hidden_size) or c.hidden_size, max(experts, 1)
    found = [("ffn_gate", d, width), ("ffn_up", d, width)]
    if c.family.fused:
        found = [("ffn_up", d, 2 * width)]
    elif not c.family.gated:
        found = found[1:]
    return tuple(
        GgufTensor(kind, row, rows * n, experts=experts > 0) for kind, row, rows in (*found, ("ffn_down", width, d))
    )
