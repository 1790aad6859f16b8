"""Holds estimates with layers on the CPU against published results.

    python -m benchmarks.device_times.partly_on_cpu

prints predicted over measured time of each row of ``partly_on_cpu.csv``, the errors, and the share of its memory's
bandwidth at which each machine's CPU reads: ``READING`` of ``kvsim/costs/cpu_layers.py`` is about their middle. The
rates at which weights are copied are from the prompts of the one machine that has any, and so are not tested.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from kvsim.costs import cpu_layers
from kvsim.costs.estimate import estimated
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.served import Served
from policies import Group
from policies.placement.rule import PassReads

MINISTRAL = """{"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 16384, "vocab_size": 131072,
"tie_word_embeddings": false, "max_position_embeddings": 262144, "torch_dtype": "bfloat16"}"""
FILE = Path(__file__).with_suffix(".csv")
DEVICES = {
    "rtx4070-laptop": "kind = 'consumer'\nmemory_bytes = 8_000_000_000\nbandwidth_gb_s = 256\n"
    "tflops = 40.1\ntops_int8 = 160",
    "rtx2080": "kind = 'consumer'\nmemory_bytes = 8_000_000_000\nbandwidth_gb_s = 448\ntflops = 40.3\ntops_int8 = 161",
}
"""Data sheets: 36 SM at 2.175 GHz of the Ada whitepaper's rates; NVIDIA's Turing whitepaper."""


def seconds(row: Any, folder: Path) -> float:
    """The estimate of a row: of a step, or of the whole prompt."""
    device, model = row.device, row.model
    if device in DEVICES:
        device = str(folder / f"{device}.toml")
        Path(device).write_text(DEVICES[row.device])
    if model.startswith("ministral"):
        model = str(folder / "config.json")
        Path(model).write_text(MINISTRAL)
    rate = None if np.isnan(row.cpu_gb_s) else row.cpu_gb_s
    profile = estimated(Served("llamacpp", device, model, 1, row.weights, "f16", "f16", row.ngl, row.n_cpu_moe, rate))
    price, n = PassPrice(profile, profile.own_kernel, (Group(0),)), int(row.test[2:])
    tokens = 1 if row.test.startswith("tg") else min(row.n_ubatch, n)
    found = []
    for start in [n // 2] if tokens == 1 else range(0, n, tokens):
        reads = PassReads(1)
        reads.tokens, reads.chunks = tokens, 1
        reads.groups[0].add_chunk(tokens, start + tokens, start + tokens, 0)
        found.append(price.seconds(reads))
    return sum(found)


def errors(table: pd.DataFrame, folder: Path) -> pd.Series:
    """Predicted over measured time of each row, less 1."""
    measured = [
        (1 if row.test.startswith("tg") else int(row.test[2:])) / row.tokens_per_s for row in table.itertuples()
    ]
    return pd.Series([seconds(row, folder) for row in table.itertuples()], table.index) / measured - 1


def found(table: pd.DataFrame) -> dict[str, tuple[int, float, float]]:
    """Number of rows, median and P90 of the column ``error`` without its sign: ``ERRORS`` of ``cpu_layers``."""
    kinds = {"decode": table["test"].str.startswith("tg"), "prompt": table["test"].str.startswith("pp")}
    off = {kind: table.loc[rows, "error"].abs() for kind, rows in kinds.items()}
    return {kind: (len(o), round(o.median(), 3), round(o.quantile(0.9), 3)) for kind, o in off.items()}


def main() -> None:
    """Print the table and the errors."""
    table = pd.read_csv(FILE)
    with TemporaryDirectory() as name:
        folder = Path(name)
        table["error"] = errors(table, folder)
        print(table[["machine", "model", "ngl", "n_cpu_moe", "n_ubatch", "test", "error"]].round(3).to_string())
        for kind, (rows, median, p90) in found(table).items():
            print(f"{kind}: median {median:.1%}, P90 {p90:.1%}, {rows} rows")
        usual = cpu_layers.READING
        decodes = table[table["test"].str.startswith("tg")]
        for machine, own in decodes.groupby("machine"):

            def middle(share: float, own: pd.DataFrame = own) -> float:
                cpu_layers.READING = share
                return float(errors(own, folder).median())

            print(
                f"{machine}: its rows have no error in the median where the CPU reads at {brentq(middle, 0.2, 1.0):.0%}"
            )
        cpu_layers.READING = usual


if __name__ == "__main__":
    main()
