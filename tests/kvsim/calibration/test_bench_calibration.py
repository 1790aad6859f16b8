"""What benchmarks say of real devices and of kvsim's own servers comes back as times."""

import csv

import numpy as np
import pytest

from kvsim.calibration.bench_calibration import calibrate_from
from kvsim.calibration.bench_files.points import SetUp
from kvsim.calibration.bench_files.served import Served
from kvsim.calibration.bench_passes import Limits, PartPrices, passes_of
from kvsim.calibration.bench_subject import BenchOptions
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.physics import PassPhysics
from kvsim.model.memory_shapes import memory_shape
from kvsim.simulation.run import run
from tests.paths import ROOT
from tests.worlds import scenario

PUBLISHED = ROOT / "benchmarks" / "device_times" / "batched_bench.csv"
HEAD = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"

DEVICES = {"m2-ultra": "M2 Ultra 76c", "gb10": "GB10"}
MODELS = {
    "qwen2.5-7b": ("qwen2 7B", "q8_0"),
    "qwen3-30b-a3b": ("qwen3moe 30B.A3B", "q8_0"),
    "gpt-oss-20b": ("gpt-oss 20B", "q8_0"),
    "gpt-oss-120b": ("gpt-oss 120B", "q8_0"),
    "gemma-3-4b": ("gemma3 4B", "q4_0"),
}
"""The names of the published rows, and the types of the weights that are not experts."""


def table(device, model):
    """The published rows of a model on a device, as llama-batched-bench printed them."""
    lines = ["main: n_kv_max = 270336, n_batch = 2048, n_ubatch = 2048, flash_attn = 1, n_gpu_layers = -1", "", HEAD]
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            if (row["device"], row["model"]) == (device, model):
                cells = [row[key] for key in ("PP", "TG", "B", "N_KV", "T_PP_s", "S_PP", "T_TG_s", "S_TG")]
                lines.append(f"| {' | '.join([*cells, '0', '0'])} |")
    return "\n".join(lines)


def corrected(folder, device, model):
    """What the published rows of a model on a device make of its estimate."""
    title, weights = MODELS[model]
    file = folder / "table.txt"
    file.write_text(table(DEVICES[device], title))
    return calibrate_from([file], BenchOptions(model=model, device=device, weights=weights))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_real_devices_are_predicted_from_the_others(tmp_path, device, model):
    done = corrected(tmp_path, device, model)
    rows, errors = done.correction.rows, done.correction.left_out_errors
    assert len(rows) >= 34
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.08
    assert max(abs(row.corrected_s / row.point.seconds - 1) for row in rows) < 0.1
    assert not any(row.too_fast for row in rows)


@pytest.mark.slow
def test_sequences_that_share_experts_are_said_to(tmp_path):
    (warning,) = corrected(tmp_path, "gb10", "gpt-oss-120b").warnings
    assert "6 of 36 rows are faster than if tokens chose their experts evenly" in warning
    assert corrected(tmp_path, "gb10", "qwen2.5-7b").warnings == ()


@pytest.mark.parametrize(("users", "prompt", "new"), [(1, 512, 128), (4, 512, 128), (16, 2048, 64), (64, 512, 128)])
def test_a_closed_loop_is_read_as_the_steps_that_it_took(users, prompt, new):
    device = "rtx4090"
    done = run(
        scenario(
            workload={
                "kind": "closed-loop",
                "users": users,
                "think_s": 0.0,
                "requests": 8 * users,
                "prompt_tokens": {"kind": "fixed", "value": prompt},
                "output_tokens": {"kind": "fixed", "value": new},
            },
            model={"name": "llama-3.1-8b"},
            machine={"device": device},
        )
    ).summary
    rate = 8 * users / done["makespan_s"]
    served = Served("", SetUp("", engine="vllm"), prompt, new, rate, done["ttft_s"]["mean"], done["tpot_s"]["mean"])
    physics = PassPhysics(device_named(device), memory_shape("llama-3.1-8b"), "bf16")
    prices = PartPrices(load_profile(f"{device}-llama-3.1-8b"), physics)
    points = served.points()
    assert len(points) == (2 if users == 1 else 1)
    for point in points:
        predicted = prices.seconds(passes_of(point, Limits(2048, 256, 1 << 30)))
        assert predicted == pytest.approx(point.seconds, rel=1e-9 if users == 1 else 0.08)
