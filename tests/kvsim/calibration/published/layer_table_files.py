"""Small tables of kernels whose costs are known, in the format of LLMServingSim's profiler."""

import itertools

import pandas as pd

LAYERS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
TOKENS = (*range(1, 33), *range(40, 513, 8), *range(544, 2049, 32))


def dense_us(tokens):
    """Microseconds of one layer, but for attention and with one of its two norms: as long as reading the weights, or
    as computing with them."""
    return 500 + max(0, tokens - 64) * 3.0


def write_tables(folder, *, model="meta-llama/Llama-3.1-8B", cell_us=0.005, mixed_cell_us=0.01):
    """Write tables in which a cell costs ``cell_us`` alone and ``mixed_cell_us`` beside a prompt; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(layer, n, dense_us(n) / len(LAYERS)) for layer in LAYERS for n in TOKENS]
    rows += [(layer, n, 5 + n * 0.001) for layer in ("embedding", "final_layernorm") for n in TOKENS]
    pd.DataFrame(rows, columns=["layer", "tokens", "time_us"]).to_csv(folder / "dense.csv", index=False)
    heads = [("lm_head", n, 1100 + n * 7.0) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    heads += [("sampler", n, 20 + n * 0.5) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    pd.DataFrame(heads, columns=["layer", "sequences", "time_us"]).to_csv(folder / "per_sequence.csv", index=False)
    counts, contexts = (1, 2, 4, 8, 16, 32, 64, 128), (16, 64, 256, 512, 1024, 2048, 4096)
    attention = [(0, 0, n, kv, 8 + n * kv * cell_us) for n, kv in itertools.product(counts, contexts)]
    for chunk, cached in itertools.product((16, 64, 256, 512, 1024), (0, 256, 1024)):
        prompt = 8 + chunk * (cached + chunk - (chunk - 1) / 2) * 1e-4
        attention.append((chunk, cached, 0, 0, prompt))
        attention += [
            (chunk, cached, n, kv, prompt + n * kv * mixed_cell_us) for n, kv in itertools.product(counts, contexts)
        ]
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame(attention, columns=columns).to_csv(folder / "attention.csv.gz", index=False)
    (folder / "meta.yaml").write_text(
        "gpu: NVIDIA GeForce RTX 4090\nvllm_version: 0.19.0\n"
        f"model: {model}\nprofiled_at: '2026-08-17T19:43:32+00:00'\n"
    )
    return folder
