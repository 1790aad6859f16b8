"""Small GGUF files of the llama architecture, written with the ``gguf`` package, and reference logits of their
models."""

from dataclasses import dataclass, field

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from kvsim.model.engine_shapes import gguf_path

try:
    gguf_path("smollm2")
    SMOLLM2_MISSING = ""
except ValueError as e:
    SMOLLM2_MISSING = str(e)

TEMPLATE = "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% for m in messages %}...{% endfor %}"
WORDS = ("he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "Ġworl", "Ġworld", "Ġ1", "12", "in", "Ġa", "Ġb")
MERGES = (
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "Ġwor l",
    "Ġworl d",
    "Ġ 1",
    "1 2",
    "i n",
    "Ġ a",
    "Ġ b",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def alphabet():
    """GPT-2's ``bytes_to_unicode``, as published."""
    bs = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    cs, n = bs[:], 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return dict(zip(bs, map(chr, cs), strict=True))


TOKENS = (*SPECIAL, *alphabet().values(), *WORDS)


@dataclass
class Small:
    """A small random Llama and the contents of its file."""

    kind: Kind = Kind.F32
    tied: bool = True
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    d_head: int = 32
    d_ff: int = 96
    vocabulary: int = len(TOKENS)
    rope_base: float = 5000.0
    epsilon: float = 1e-5
    seed: int = 0
    architecture: str = "llama"
    """Architecture named in the file; another one may need more ``tensors``, and has other ``logits``."""
    tensors: dict = field(default_factory=dict)
    """By name: float32, shape (outputs, inputs), as they are written; or raw bytes with their type."""
    fields: dict = field(default_factory=dict)
    """Additional or replaced fields; None leaves a field out."""

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        q, kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head

        def matrix(outputs, inputs, gain=1.0):
            return (rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)).astype(np.float32)

        made = {"token_embd.weight": matrix(self.vocabulary, self.d_model, 4.0)}
        made["output_norm.weight"] = rng.uniform(0.5, 1.5, self.d_model).astype(np.float32)
        if not self.tied:
            made["output.weight"] = matrix(self.vocabulary, self.d_model)
        for i in range(self.n_layers):
            made |= {
                f"blk.{i}.attn_norm.weight": rng.uniform(0.5, 1.5, self.d_model).astype(np.float32),
                f"blk.{i}.attn_q.weight": matrix(q, self.d_model, 2.0),
                f"blk.{i}.attn_k.weight": matrix(kv, self.d_model, 2.0),
                f"blk.{i}.attn_v.weight": matrix(kv, self.d_model),
                f"blk.{i}.attn_output.weight": matrix(self.d_model, q),
                f"blk.{i}.ffn_norm.weight": rng.uniform(0.5, 1.5, self.d_model).astype(np.float32),
                f"blk.{i}.ffn_gate.weight": matrix(self.d_ff, self.d_model),
                f"blk.{i}.ffn_up.weight": matrix(self.d_ff, self.d_model),
                f"blk.{i}.ffn_down.weight": matrix(self.d_model, self.d_ff),
            }
        self.tensors = made | self.tensors

    def stored(self, name):
        """A tensor as the file holds it: its bytes or numbers, and its type."""
        value = self.tensors[name]
        if isinstance(value, tuple):
            return value
        kind = Kind.F32 if value.ndim == 1 else self.kind
        return gguf.quants.quantize(value, kind), kind

    def weights(self, name):
        """A tensor as a reader must understand it, float64."""
        return gguf.quants.dequantize(*self.stored(name)).astype(np.float64)

    def write(self, path):
        """Write the file; tensors set to None are left out."""
        of = self.architecture
        writer = gguf.GGUFWriter(path, of)
        fields = {
            f"{of}.block_count": self.n_layers,
            f"{of}.context_length": 256,
            f"{of}.embedding_length": self.d_model,
            f"{of}.feed_forward_length": self.d_ff,
            f"{of}.attention.head_count": self.n_heads,
            f"{of}.attention.head_count_kv": self.n_kv_heads,
            f"{of}.attention.key_length": self.d_head,
            f"{of}.attention.value_length": self.d_head,
            f"{of}.rope.dimension_count": self.d_head,
            f"{of}.rope.freq_base": self.rope_base,
            f"{of}.attention.layer_norm_rms_epsilon": self.epsilon,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": list(TOKENS),
            "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
            "tokenizer.ggml.merges": list(MERGES),
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        } | self.fields
        for key, value in fields.items():
            if value is None:
                continue
            if key == "general.architecture":
                writer.kv_data[0][key].value = value
            elif isinstance(value, list):
                writer.add_array(key, value)
            else:
                add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
                add[type(value)](key, value)
        for name in self.tensors:
            if self.tensors[name] is not None:
                data, kind = self.stored(name)
                writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, tokens):
        """Logits after each token, shape (n, vocabulary), implemented from the papers in float64, one head at a time.

        The rotation is llama.cpp's for this architecture: it pairs neighbours, (0, 1), (2, 3), ....
        """

        def norm(x, weight):
            return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.epsilon) * weight

        def rotated(x):
            out = np.empty_like(x)
            for position, row in enumerate(x):
                for i in range(self.d_head // 2):
                    angle = position * self.rope_base ** (-2 * i / self.d_head)
                    a, b = row[2 * i], row[2 * i + 1]
                    out[position, 2 * i] = a * np.cos(angle) - b * np.sin(angle)
                    out[position, 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
            return out

        n = len(tokens)
        embedding = self.weights("token_embd.weight")
        x = embedding[tokens]
        for i in range(self.n_layers):
            w = {part: self.weights(f"blk.{i}.{part}.weight") for part in ("attn_norm", "attn_q", "attn_k", "attn_v")}
            h = norm(x, w["attn_norm"])
            q = (h @ w["attn_q"].T).reshape(n, self.n_heads, self.d_head)
            k = (h @ w["attn_k"].T).reshape(n, self.n_kv_heads, self.d_head)
            v = (h @ w["attn_v"].T).reshape(n, self.n_kv_heads, self.d_head)
            heads = []
            for head in range(self.n_heads):
                shared = head // (self.n_heads // self.n_kv_heads)
                scores = rotated(q[:, head]) @ rotated(k[:, shared]).T / np.sqrt(self.d_head)
                scores[np.triu_indices(n, 1)] = -np.inf
                weight = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads.append(weight / weight.sum(axis=1, keepdims=True) @ v[:, shared])
            x = x + np.hstack(heads) @ self.weights(f"blk.{i}.attn_output.weight").T
            h = norm(x, self.weights(f"blk.{i}.ffn_norm.weight"))
            gate, up = h @ self.weights(f"blk.{i}.ffn_gate.weight").T, h @ self.weights(f"blk.{i}.ffn_up.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights(f"blk.{i}.ffn_down.weight").T
        return (
            norm(x, self.weights("output_norm.weight")) @ (embedding if self.tied else self.weights("output.weight")).T
        )
