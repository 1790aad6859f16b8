"""What each layer of a model caches, and all else that determines the model's memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from kvsim.model.gguf_tensors import GgufTensor
from kvsim.model.storage_types import SERVED_TYPES, row_bytes, weight_bytes

Kind = Literal["full", "window", "chunked", "latent", "index", "state"]


@dataclass(frozen=True, slots=True)
class State:
    """What a layer keeps of a sequence in place of its tokens, whatever their number."""

    name: str
    """The kind of layer: Mamba, Mamba 2, gated delta net, short convolution, ..."""
    convolution: int
    """Numbers of the last inputs of its convolution; 0 without one."""
    recurrent: int
    """Numbers that each token updates; 0 for a convolution alone."""
    grouped: int = 0
    """Of ``convolution``, the numbers of B and C in one group of heads, of which each device needs one at least."""
    groups: int = 1
    """Groups of heads with a B and a C of their own."""
    recurrent_type: str = ""
    """The type in which vLLM keeps ``recurrent``, if not that of the model; llama.cpp keeps all in f32."""

    def numbers(self, ranks: int = 1) -> tuple[int, int]:
        """Numbers of one sequence on each of ``ranks`` devices: of its convolution, and those that tokens update.

        Source: vLLM 0.33, ``mamba2_state_shape`` in ``model_executor/layers/mamba/mamba_utils.py``.
        """
        more = 0 if self.groups % ranks == 0 else ranks - self.groups
        return (self.convolution + more * self.grouped) // ranks, self.recurrent // ranks


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache alike."""

    kind: Kind
    """``full``: K and V of all tokens; ``window``: of the last ``window``; ``chunked``: of those since the last
    multiple of ``window``; ``latent``: one vector that stands for both (multi-head latent attention, DeepSeek-V2,
    arXiv:2405.04434); ``index``: a key by which an indexer chooses tokens (DeepSeek-V3.2); ``state``: nothing of any
    token, but a ``state`` of each sequence."""
    layers: int
    """Layers that cache; each has a cache of its own."""
    k_row: int = 0
    """Numbers of K in one layer for one token: KV heads times their size; for a latent, rank plus rotated part."""
    v_row: int = 0
    """Numbers of V in one layer for one token; 0 for a latent, in which V is part of K."""
    k_head: int = 0
    """Size of a K head."""
    v_head: int = 0
    """Size of a V head."""
    window: int | None = None
    """Tokens in the sliding window, or in a chunk."""
    score_width: int = 0
    """Numbers that each query head multiplies with a cell, for the score and for the sum, where they are not ``k_head``
    and ``v_head``: a latent is first expanded to them."""
    readers: int = 0
    """Further layers that attend to a cache of this group and have none of their own (Gemma 3n)."""
    state: State | None = None

    @property
    def multiplied(self) -> int:
        """Numbers that each query head multiplies with a cell."""
        return self.score_width or self.k_head + self.v_head

    @property
    def kv_heads(self) -> int:
        """Heads of K that can be divided over devices, each of which holds at least one; a latent is not divided."""
        return 1 if self.kind in ("latent", "index") or not self.k_head else self.k_row // self.k_head

    @property
    def title(self) -> str:
        """Description for tables, with the number of layers."""
        window = f"{self.window or 0:,}"
        titles = {"full": "full attention", "window": f"window of {window}", "chunked": f"chunks of {window}"}
        titles["index"] = "keys of an indexer"
        what = self.state.name if self.state else titles.get(self.kind, self.kind)
        return f"{what}, {self.layers} layer{'s' * (self.layers != 1)}"


@dataclass(frozen=True, slots=True)
class PassWeights:
    """Weights that a forward pass treats alike."""

    numbers: int
    kind: str = "default"
    """Their storage type; ``default`` is the type that users may choose."""
    stored: int | None = None
    """Their bytes, if read from a GGUF file."""
    kept: int = 0
    """How many are published in 16 bits although the others are narrower."""

    def bytes(self, chosen: str) -> int:
        """Their size, where ``chosen`` is the type of ``default`` weights."""
        if self.stored is not None:
            return self.stored
        kept = self.kept if chosen in SERVED_TYPES else 0
        return 2 * kept + weight_bytes(chosen if self.kind == "default" else self.kind, self.numbers - kept)


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """All that determines the memory of a model: its KV cache, its weights, and the widths of its buffers."""

    name: str
    source: str
    """The file, or the source of the shipped figures."""
    groups: tuple[CacheGroup, ...]
    """Layers by what they cache. A layer may be in two groups (Falcon-H1) or in none (Nemotron-H)."""
    n_layers: int
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
    matrices: PassWeights
    """Weights that every pass reads whole and multiplies with each of its tokens: all but the next two and the table of
    embeddings."""
    experts: PassWeights
    """Weights of all experts, of which a pass reads those that its tokens choose."""
    head: PassWeights
    """Weights that are multiplied once for each sequence: the language-model head."""
    repeated: int = 0
    """Numbers of ``matrices`` that a pass reads again, in layers that share them (Zamba 2)."""
    n_experts: int = 0
    """Experts in a layer, of which each token uses some; 0 without."""
    experts_per_token: int = 0
    qk_norm: bool = False
    """Whether queries and keys have norms of their own."""
    whole_qk_norm: bool = False
    """Whether these are over all heads together, which devices that share a layer must tell each other of."""
    only: str = ""
    """The engine that alone runs it; empty where both do."""
    vllm_until: str = ""
    """The last version of vLLM that serves it; empty where the present one does."""
    takes_back: bool = False
    """Whether llama.cpp can take tokens back from its states (``llm_arch_supports_rs_rollback``)."""
    tensors: tuple[GgufTensor, ...] = ()
    """The matrices that a GGUF file of it would have, if its config.json says; all else in it is f32."""

    @property
    def cells(self) -> tuple[CacheGroup, ...]:
        """The groups that cache tokens, in cells."""
        return tuple(group for group in self.groups if group.state is None)

    @property
    def indices(self) -> tuple[CacheGroup, ...]:
        """The groups that cache keys of an indexer."""
        return tuple(group for group in self.groups if group.kind == "index")

    @property
    def states(self) -> tuple[CacheGroup, ...]:
        """The groups that keep a state of each sequence."""
        return tuple(group for group in self.groups if group.state is not None)

    @property
    def titles(self) -> tuple[str, ...]:
        """A unique title for each group; with the widths of K and V if only they differ."""
        often = Counter(group.title for group in self.groups)
        return tuple(
            group.title if often[group.title] == 1 else f"{group.title} of {group.k_row} and {group.v_row}"
            for group in self.groups
        )

    def cell_bytes(self, type_k: str, type_v: str) -> int:
        """Bytes of one token's K and V in all layers that cache it, each as if it kept every token."""
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
