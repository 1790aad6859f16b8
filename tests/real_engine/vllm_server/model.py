"""A small llama with a vocabulary of made-up words, in a folder as vLLM takes it; its weights are random.

A step takes it some 10 ms: what takes less comes to a client on a busy machine in bursts, and steps cannot be told.
Each word of a text, set apart by blanks, is one token: ``w7`` is token 7.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

CONTEXT = 1024
VOCABULARY = 2048
_UNKNOWN, _END = "<unknown>", "<end>"
"""Tokens 0 and 1."""

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "float32",
}
_CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def write_model(folder: Path) -> Path:
    """Write what vLLM reads of a model, but for the weights, into a new folder, and return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    names = [_UNKNOWN, _END, *(f"w{i}" for i in range(2, VOCABULARY))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, _UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _UNKNOWN,
        "eos_token": _END,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
