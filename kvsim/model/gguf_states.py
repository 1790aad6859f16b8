"""The states that layers keep, from the header of a GGUF file.

Source: llama.cpp 0c1e570, ``llama_hparams::n_embd_r`` and ``n_embd_s`` in ``llama-hparams.cpp``, and which layers are
recurrent in ``models/*.cpp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvsim.model.cache_groups import CacheGroup, State

if TYPE_CHECKING:
    from kvsim.model.gguf_shapes import Keys

Mixer = Literal["attention", "state", "both", "none"]
STATE_NAMES = {
    "mamba": "Mamba",
    "jamba": "Mamba",
    **dict.fromkeys(("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "plamo2"), "Mamba 2"),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "qwen4exp"), "gated delta net"),
    **dict.fromkeys(("kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"), "Kimi delta attention"),
    **dict.fromkeys(("lfm2", "lfm2moe"), "short convolution"),
    "minimax-01": "lightning attention",
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "RWKV"),
}
"""Architectures with layers that keep a state, and what those are."""
TAKE_BACK = (
    *("nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"),
    *("lfm2", "lfm2moe", "kimi-k3", "bailingmoe3", "glm5-next"),
)
"""Architectures from whose states llama.cpp can take tokens back (``llm_arch_supports_rs_rollback``)."""
_ONLY_STATES = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_EVERY_FEW = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp", "minimax-01")
"""Architectures with attention in every n-th layer; in others with states it is where there are heads of K."""
_ONE_EACH = ("nemotron_h", "nemotron_h_moe")
"""Architectures whose layers have attention, a state or a feed-forward network, and never two of them."""
_IN_F32 = (*_ONE_EACH, "qwen35", "qwen35moe")
"""Architectures whose recurrent states vLLM keeps in f32 unless told otherwise."""


def mixers_of(keys: Keys, kv_heads: list[int]) -> list[Mixer]:
    """What each layer does with other tokens, by its heads of K."""
    arch, n = keys.arch, keys.n_layers
    if arch not in STATE_NAMES:
        return ["attention"] * n
    if arch in _ONLY_STATES:
        return ["state"] * n
    if arch == "falcon-h1":
        return ["both"] * n
    if arch in _EVERY_FEW:
        told = keys.header.fields.get(f"{arch}.attention.recurrent_layers")
        if isinstance(told, list) and len(told) >= n:
            return ["state" if some else "attention" for some in told[:n]]
        every = keys.number("full_attention_interval", 8 if arch == "minimax-01" else 4)
        return ["attention" if (i + 1) % every == 0 else "state" for i in range(n)]
    width = keys.each("feed_forward_length", 0, least=0) if arch in _ONE_EACH else [0] * n
    return ["none" if wide else "attention" if kv else "state" for kv, wide in zip(kv_heads, width, strict=True)]


def state_of(keys: Keys) -> State:
    """The state of a layer, for one sequence. Raises ``UserError``."""
    name, d = STATE_NAMES[keys.arch], keys.number("embedding_length")
    if name == "RWKV":
        shifts = keys.number("token_shift_count", 1 if keys.arch in ("rwkv6qwen2", "arwkv7") else 2)
        return State(name, shifts * d, d * keys.number("wkv.head_size"))
    if name == "short convolution":
        return State(name, d * (keys.number("shortconv.l_cache") - 1), 0)
    if name == "Kimi delta attention":
        heads, head = max(keys.each("attention.head_count")), keys.number("kda.head_dim")
        before = keys.number("ssm.conv_kernel") - 1
        return State(name, 3 * before * heads * head, head * head * heads, recurrent_type="f32")
    if name == "lightning attention":
        heads, head = max(keys.each("attention.head_count")), keys.number("attention.key_length")
        return State(name, 0, head * head * heads)
    inner, size = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    groups, before = keys.number("ssm.group_count", 0, least=0), keys.number("ssm.conv_kernel") - 1
    grouped = before * 2 * size if name == "Mamba 2" else 0
    kind, several = "f32" if keys.arch in _IN_F32 else "", max(groups, 1) if grouped else 1
    return State(name, before * (inner + 2 * groups * size), size * inner, grouped, several, kind)


def states_of(keys: Keys, mixers: list[Mixer]) -> list[CacheGroup]:
    """The groups of layers that keep a state. Raises ``UserError``."""
    kept = sum(mixer in ("state", "both") for mixer in mixers)
    found = [CacheGroup("state", kept, state=state_of(keys))] if kept else []
    if keys.has("ple.layers"):
        # One layer convolves embeddings of n-grams (``ple_conv_state`` in ``llama-hparams.cpp``).
        width = keys.number("hyper_connection.count") * keys.number("embedding_length")
        inputs = (keys.number("ple.conv_kernel") - 1) * keys.number("ple.ngram_size") * width
        found.append(CacheGroup("state", 1, state=State("convolution of n-grams", inputs, 0)))
    return found
