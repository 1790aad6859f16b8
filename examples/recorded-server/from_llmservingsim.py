"""Write a server that LLMServingSim's `bench run` recorded as a recording that `kvsim validate --recorded` reads.

    python from_llmservingsim.py RUN DATASET [DEVICE] > server.jsonl

RUN is the folder with meta.json, requests.jsonl and timeseries.csv, DATASET the requests that were served (meta.json
names it as dataset_path), and DEVICE says what the server ran on, for runs of which meta.json does not.
"""

import csv
import json
import sys
from pathlib import Path

TIMES = ("scheduled", "first_token", "last_token")


def meta_line(meta, requests, device):
    """The first line: the engine and its settings."""
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache", {})
    return {
        "kind": "meta",
        "engine": "vllm",
        "version": meta["vllm_version"],
        "model": meta["model"],
        "device": meta.get("hardware", {}).get("device_name", device),
        "tensor_parallel_size": engine["tensor_parallel_size"],
        "max_num_seqs": engine["max_num_seqs"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
        "max_model_len": engine["max_model_len"],
        "num_gpu_blocks": cache.get("num_gpu_blocks"),
        "block_size": cache.get("block_size", 16),
        "prefix_caching": cache.get("enable_prefix_caching", True),
        "clock": "engine",
        "requests": requests,
    }


def prompts(texts, block):
    """Each prompt as segments: those of an earlier one for the whole blocks that both begin with, and its own rest."""
    earlier, segments = {}, []
    for i, tokens in enumerate(texts):
        beginnings = [tuple(tokens[:n]) for n in range(block, len(tokens) + 1, block)]
        shared = max((each for each in beginnings if each in earlier), key=len, default=())
        found = beginning(segments[earlier[shared]], len(shared)) if shared else []
        if len(shared) < len(tokens):
            found.append([f"p{i}", len(shared), len(tokens) - len(shared)])
        segments.append(found)
        for each in beginnings:
            earlier.setdefault(each, i)
    return segments


def beginning(segments, n):
    """The first ``n`` tokens of a row of segments."""
    found = []
    for source, start, length in segments:
        if n > 0:
            found.append([source, start, min(length, n)])
            n -= length
    return found


def lines(run, dataset, device=None):
    """All lines of the recording; ``run`` and ``dataset`` are paths."""
    meta = json.loads((run / "meta.json").read_text())
    served = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["input_tok_ids"] for line in dataset.read_text().splitlines()]
    first = meta_line(meta, len(served), device)
    yield first
    start = min(each["queued_ts"] for each in served)
    for each, prompt in zip(served, prompts(texts, first["block_size"]), strict=True):
        times = {f"{name}_s": round(each[f"{name}_ts"] - start, 6) for name in TIMES}
        arrival = {"arrival_s": round(each["queued_ts"] - start, 6), "prompt": prompt}
        yield {"kind": "request", "id": each["request_id"], **arrival, "output_tokens": each["output_toks"], **times}
    with (run / "timeseries.csv").open() as table:
        for row in csv.DictReader(table):
            loads = {name: int(row[name]) for name in ("running", "waiting")}
            yield {"kind": "second", "t": float(row["t"]), **loads}


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    for line in lines(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]):
        print(json.dumps(line))
