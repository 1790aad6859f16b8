"""Fits what vLLM reaches of NVIDIA's devices to the kernels that aiconfigurator-core has of it.

    python -m benchmarks.device_times.fit_vllm build/vllm-parts.csv.gz

reads what ``vllm_parts`` wrote, and writes the part of efficiencies.json that is of vLLM. Left out to find errors: each
device in turn, and each model in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pandas as pd

from benchmarks.device_times.fitting import errors, fit
from benchmarks.device_times.writing import write
from kvsim.costs.efficiency import Efficiency, EngineEfficiency
from kvsim.costs.physics import Need

SOURCE = "vLLM's kernels on {devices} devices of NVIDIA with {models} models (aiconfigurator-core 0.12.0, Apache-2.0)"
_ONE = ("head", "elementwise", "exchange", "decode")
"""Parts that do not depend on the type of the weights."""


def efficiency(rows: pd.DataFrame) -> dict[tuple[str, str], Efficiency]:
    """Efficiencies by part and group of types."""
    found = {(part, "f16"): fit(rows[rows["part"] == part]) for part in _ONE}
    for part in ("matrices", "experts"):
        for kind, own in rows[rows["part"] == part].groupby("kind"):
            found[part, str(kind)] = fit(own)
    # Prompts without cached tokens, which those measured are, tell nothing of reading.
    prompts = fit(rows[rows["part"] == "prompt"].assign(reading_s=0.0))
    found["prompt", "f16"] = prompts.model_copy(update={"reading": found["decode", "f16"].reading})
    return found


def left_out(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Whole passes, predicted by fits without their device, and without their model."""
    for by in ("device", "model"):
        for name, own in rows.groupby(by):
            yield passes(own, efficiency(rows[rows[by] != name])).assign(left_out=by)


def passes(rows: pd.DataFrame, fitted: dict[tuple[str, str], Efficiency]) -> pd.DataFrame:
    """Measured and predicted seconds of whole decode steps and prompts."""
    keys = ["device", "model", "tp", "weights"]
    rows = rows.assign(predicted=0.0)
    for (part, kind), own in rows.groupby(["part", "kind"]):
        which = fitted.get((str(part), str(kind))) or fitted.get((str(part), "f16"))
        if which is None:
            continue  # Experts of a type that only this device or model has.
        need = Need(own["reading_s"].to_numpy(), own["computing_s"].to_numpy())
        rows.loc[own.index, "predicted"] = which.seconds(need, 0) + own["layers"] * which.layer_s
    values = ["seconds", "predicted"]
    whole = rows[~rows["part"].isin(["decode", "prompt"])].groupby([*keys, "a"])[values].sum()
    body = rows[~rows["part"].isin(["decode", "prompt", "head"])].groupby([*keys, "a"])[values].sum()
    found = []
    for phase, rest in (("decode", whole), ("prompt", body)):
        attention = rows[rows["part"] == phase].set_index([*keys, "a"])[values]
        found.append((attention + rest.reindex(attention.index)).reset_index().assign(phase=phase))
    return pd.concat(found)


def fitted(rows: pd.DataFrame) -> EngineEfficiency:
    """What is written."""
    found = efficiency(rows)
    tested = pd.concat(left_out(rows))
    moe = tested["model"].isin(rows.loc[rows["part"] == "experts", "model"].unique())
    by_group = {}
    for kind, own in tested.groupby(tested["weights"] + moe.map({True: " experts", False: ""})):
        by_group[str(kind)] = errors(own)
    return EngineEfficiency(
        matrices={kind: found[part, kind] for part, kind in found if part == "matrices"},
        experts={kind: found[part, kind] for part, kind in found if part == "experts"},
        **{part: found[part, "f16"] for part in (*_ONE, "prompt")},
        errors=by_group | {"all": errors(tested)},
        source=SOURCE.format(devices=rows["device"].nunique(), models=rows["model"].nunique()),
    )


if __name__ == "__main__":
    write("vllm", {"nvidia": fitted(pd.read_csv(sys.argv[1]))})
