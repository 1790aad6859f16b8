"""Adds what was recorded of llama.cpp on a GPU to the tables that its times are fitted to.

    python -m benchmarks.gpu.rows --device h100_sxm --date 2026-11-27 recorded/*.jsonl

appends to ``benchmarks/device_times/llama_bench.csv`` and ``batched_bench.csv`` a row for each result of a file that
``benchmarks.gpu.llamacpp`` wrote. The model is that of its name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from kvsim.costs.devices import device_named
from kvsim.errors import UserError, no_such
from kvsim.model.memory_shapes import memory_shape, model_names

TABLES = Path(__file__).parents[1] / "device_times"
SOURCE = {"source": "kvsim, random weights", "licence": "kvsim's"}


def bench_row(row: dict[str, Any]) -> dict[str, Any]:
    """A result of llama-bench."""
    prompt, answer = row["n_prompt"], row["n_gen"]
    # The first of few tokens also captures the graph that later passes replay.
    rate = max(row["samples_ts"]) if 0 < prompt < 64 else row["avg_ts"]
    return {
        "params_b": row["model_n_params"] / 1e9,
        "size_gib": row["model_size"] / 2**30,
        "flash_attn": row["flash_attn"],
        "type_k": row["type_k"],
        "type_v": row["type_v"],
        "n_ubatch": row["n_ubatch"],
        "test": f"pp{prompt}" if prompt else f"tg{answer}",
        "depth": row["n_depth"],
        "tokens_per_s": rate,
        "stddev": row["stddev_ts"],
    }


def batched_row(row: dict[str, Any]) -> dict[str, Any]:
    """A result of llama-batched-bench."""
    names = {"pp": "PP", "tg": "TG", "pl": "B", "n_kv": "N_KV", "t_pp": "T_PP_s", "speed_pp": "S_PP"}
    names |= {"t_tg": "T_TG_s", "speed_tg": "S_TG", "n_kv_max": "n_kv_max", "flash_attn": "flash_attn"}
    return {column: row[name] for name, column in names.items()}


def add(file: Path, model: str, weights: str, common: dict[str, str]) -> dict[str, int]:
    """Append the results of a file to the tables; how many came to each."""
    found: dict[str, list[dict[str, Any]]] = {"llama_bench.csv": [], "batched_bench.csv": []}
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            row = json.loads(line)
            table, read = ("batched_bench.csv", batched_row) if "pl" in row else ("llama_bench.csv", bench_row)
            found[table].append(common | SOURCE | {"backend": "CUDA", "model": model, "quant": weights} | read(row))
    for table, rows in found.items():
        columns = pd.read_csv(TABLES / table, nrows=0).columns
        pd.DataFrame(rows, columns=columns).to_csv(TABLES / table, mode="a", header=False, index=False)
    return {table: len(rows) for table, rows in found.items()}


def main(
    files: Annotated[list[Path], typer.Argument(help="MODEL-TYPE.jsonl of benchmarks.gpu.llamacpp.")],
    device: Annotated[str, typer.Option(help="The device that they are of.")],
    date: Annotated[str, typer.Option(help="When they were recorded.")],
    build: Annotated[str, typer.Option(help="Of llama.cpp.")] = "0c1e570",
) -> None:
    """Add recorded results to the tables."""
    for file in files:
        model, weights = re.fullmatch(r"(.+)-(q4_k_m|q8_0|f16)", file.stem).groups()  # type: ignore[union-attr]
        if model not in model_names():
            raise UserError(no_such("model", model, model_names()))
        common = {"device": device_named(device).name, "date": date, "build": build}
        print(f"{memory_shape(model).name}, {weights}: {add(file, model, weights.upper(), common)}")


if __name__ == "__main__":
    typer.run(main)
