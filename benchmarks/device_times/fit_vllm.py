"""Fits what vLLM reaches of NVIDIA's devices to the kernels that aiconfigurator-core has of it.

    python -m benchmarks.device_times.fit_vllm build/vllm-parts.csv.gz

reads what ``vllm_parts`` wrote, and writes the part of efficiencies.json that is of vLLM: of Blackwell, and of what
came before, for which vLLM has other kernels. Left out to find errors: each device in turn, and each model in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pandas as pd

from benchmarks.device_times.fitting import errors, fit
from benchmarks.device_times.writing import write
from kvsim.costs.devices import devices
from kvsim.costs.efficiency import BUS_GB_S, Efficiency, EngineEfficiency, make_of
from kvsim.costs.physics import Need

SOURCE = "vLLM's kernels on {devices} devices of NVIDIA with {models} models (aiconfigurator-core 0.12.0, Apache-2.0)"
Fitted = dict[tuple[str, str], Efficiency]
"""By part and group of types."""
_ONE = ("head", "elementwise", "exchange", "decode")
"""Parts that do not depend on the type of the weights."""
_SLOW = {"h100_sxm", "h200_sxm"}
"""Devices on which experts in fp8 that is not in blocks take four times as long as in 16 bits by the package; these
rows are left out."""
_IN_GRAPHS = "b200_sxm"
"""The device on which latent attention was timed without the launches of its kernels, as servers run it."""


def prepared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are fitted, with the make of the device; exchanges over a bus are a part of their own."""
    known = rows["device"].map(devices())
    rows = rows.assign(make=[make_of("vllm", device) for device in known])
    bus = known.map(lambda device: device.link_gb_s <= BUS_GB_S)
    rows.loc[bus & (rows["part"] == "exchange"), "part"] = "bus"
    experts = rows["model"].isin(rows.loc[rows["part"] == "experts", "model"])
    return rows[~(rows["device"].isin(_SLOW) & experts & (rows["weights"] == "fp8"))]


def by_make(rows: pd.DataFrame) -> dict[str, Fitted]:
    """Efficiencies by make of device."""
    bus = fit(rows[rows["part"] == "bus"])
    in_graphs = rows[(rows["part"] == "latent") & (rows["device"] == _IN_GRAPHS)]
    return {
        str(make): efficiency(own, in_graphs) | {("bus", "f16"): bus} for make, own in rows.groupby("make", sort=False)
    }


def efficiency(rows: pd.DataFrame, in_graphs: pd.DataFrame) -> Fitted:
    """Efficiencies of one make; ``in_graphs``: the rows that tell what launches in graphs take of latent attention."""
    found = {(part, "f16"): fit(rows[rows["part"] == part]) for part in _ONE}
    for part in ("matrices", "experts"):
        for kind, own in rows[rows["part"] == part].groupby("kind"):
            if own["device"].nunique() > 1:
                found[part, str(kind)] = fit(own)
    # Prompts without cached tokens, which those measured are, tell nothing of reading.
    prompts = fit(rows[rows["part"] == "prompt"].assign(reading_s=0.0))
    found["prompt", "f16"] = prompts.model_copy(update={"reading": found["decode", "f16"].reading})
    if len(latent := rows[rows["part"] == "latent"]) and len(in_graphs):
        # The launches of its matrices, which are in it, are counted with these.
        layer_s = max(fit(in_graphs).layer_s - found["matrices", "f16"].layer_s, 1e-6)
        found["latent", "f16"] = fit(latent).model_copy(update={"layer_s": layer_s})
    return found


def left_out(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Whole passes, predicted by fits without their device, and without their model."""
    for by in ("device", "model"):
        for name, own in rows.groupby(by):
            yield passes(own, by_make(rows[rows[by] != name])).assign(left_out=by)


def passes(rows: pd.DataFrame, fitted: dict[str, Fitted]) -> pd.DataFrame:
    """Measured and predicted seconds of whole decode steps and prompts."""
    keys = ["device", "model", "tp", "weights"]
    rows = rows.assign(predicted=0.0)
    for (make, part, kind), own in rows.groupby(["make", "part", "kind"]):
        of = fitted[str(make)]
        which = of.get((str(part), str(kind))) or of.get((str(part), "f16"))
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


def fitted(rows: pd.DataFrame) -> dict[str, EngineEfficiency]:
    """What is written, by make of device."""
    rows = prepared(rows)
    tested = pd.concat(left_out(rows))
    moe = tested["model"].isin(rows.loc[rows["part"] == "experts", "model"])
    groups = tested.groupby(tested["weights"] + moe.map({True: " experts", False: ""}))
    found = {str(kind): errors(own) for kind, own in groups} | {"all": errors(tested)}
    source = SOURCE.format(devices=rows["device"].nunique(), models=rows["model"].nunique())
    return {make: _of_make(own, source).model_copy(update={"errors": found}) for make, own in by_make(rows).items()}


def _of_make(found: Fitted, source: str) -> EngineEfficiency:
    typed = {
        part: {kind: each for (own, kind), each in found.items() if own == part} for part in ("matrices", "experts")
    }
    # As of fp8 without blocks: those were timed with the launches of their kernels.
    typed["matrices"]["fp8_block"] = typed["matrices"]["fp8"]
    parts = {part: each for (part, _), each in found.items() if part not in typed}
    return EngineEfficiency(**typed, **parts, errors={}, source=source)


if __name__ == "__main__":
    write("vllm", fitted(pd.read_csv(sys.argv[1])))
