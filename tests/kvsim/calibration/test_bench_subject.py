"""Which model, device and weights rows are of: taken from what they say, and refused where that is another."""

from dataclasses import replace

import pytest

from kvsim.calibration.bench_files.points import BenchPoint, SetUp
from kvsim.calibration.bench_subject import BenchOptions, models_like, subject_of
from kvsim.errors import UserError

LLAMA = SetUp(
    "llama-bench",
    build="b6975",
    engine="llamacpp",
    device="NVIDIA GeForce RTX 4090",
    model="llama 8B Q4_K - Medium",
    model_bytes=4_912_898_304,
    parameters=8_030_261_312,
    weights="q4_k_m",
    type_k="f16",
    type_v="f16",
    flash=True,
)
SERVED = SetUp("vllm bench serve", engine="vllm", model="meta-llama/Llama-3.1-8B-Instruct")
CARD = """
kind = "{kind}"
memory_bytes = 12_000_000_000
bandwidth_gb_s = 40
tflops = 0.5
"""


def rows(*set_ups):
    return [BenchPoint(f"a.json: row {i}", each, "decode", 1.0, new=128) for i, each in enumerate(set_ups, 1)]


def said(*set_ups, model="llama-3.1-8b", **options):
    with pytest.raises(UserError) as refused:
        subject_of(rows(*set_ups), BenchOptions(model=model, **options))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_device_weights_and_engine_are_as_the_rows_say():
    found = subject_of(rows(LLAMA), BenchOptions(model="llama-3.1-8b"))
    assert (found.device.name, found.weights, found.engine, found.notes) == ("rtx4090", "q4_k_m", "llamacpp", ())


def test_a_model_is_known_by_its_parameters_and_family():
    (point,) = rows(LLAMA)
    assert models_like(point) == ["llama-3-8b", "llama-3.1-8b"]
    (point,) = rows(replace(LLAMA, model="qwen3 14B Q8_0", parameters=14_768_307_200))
    assert models_like(point) == ["qwen3-14b"]
    (point,) = rows(replace(LLAMA, model="qwen2 14B Q8_0", parameters=14_770_033_664))
    assert models_like(point) == ["qwen2.5-14b"]
    (point,) = rows(SERVED)
    assert models_like(point) == ["llama-3.1-8b"]


def test_another_model_is_refused_and_named():
    other = replace(LLAMA, model="qwen3 8B Q4_K - Medium", parameters=8_190_735_360)
    assert said(other) == (
        "a.json: row 1 is of 'qwen3 8B Q4_K - Medium', 8.19 B parameters, not of llama-3.1-8b, which has 8.03 B "
        "parameters; it may be qwen3-8b"
    )
    assert said(other, model=None).endswith("8.19 B parameters; by its size it may be qwen3-8b")
    assert "not of qwen3-8b" in said(SERVED, model="qwen3-8b", device="rtx4090")


def test_rows_of_other_models_are_left_out():
    other = replace(LLAMA, model="qwen3 8B Q4_K - Medium", parameters=8_190_735_360)
    found = subject_of(rows(LLAMA, other), BenchOptions(model="llama-3.1-8b"))
    assert len(found.points) == 1
    assert found.notes == ("Left out: 1 row of other models, 'qwen3 8B Q4_K - Medium', 8.19 B parameters.",)


def test_another_device_is_refused():
    assert "timed on NVIDIA GeForce RTX 4090, not on h100_sxm; --device rtx4090 would be" in said(
        LLAMA, device="h100_sxm"
    )
    two = replace(LLAMA, device="NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 4090")
    assert "divided the model's layers" in said(two)


def test_a_processor_takes_a_file_of_its_own(tmp_path):
    own = replace(LLAMA, device="Intel(R) Xeon(R) Processor", threads=4)
    assert "'Intel(R) Xeon(R) Processor' is none of the devices" in said(own)
    assert "computed by a processor" in said(own, device="rtx4090")
    file = tmp_path / "mine.toml"
    file.write_text(CARD.format(kind="consumer"))
    assert "computed by a processor" in said(own, device=str(file))
    file.write_text(CARD.format(kind="cpu"))
    found = subject_of(rows(own), BenchOptions(model="llama-3.1-8b", device=str(file)))
    assert (found.device.name, found.device_name) == ("mine", str(file))


def test_rows_that_do_not_say_a_device_take_one():
    assert "does not say which device it is of; name it by --device" in said(SERVED)
    found = subject_of(rows(SERVED), BenchOptions(model="llama-3.1-8b", device="h100_sxm"))
    assert (found.device.name, found.engine, found.weights) == ("h100_sxm", "vllm", None)


def test_other_weights_are_refused():
    assert "--weights is q8_0, but the rows are of q4_k_m" in said(LLAMA, weights="q8_0")
    unknown = replace(LLAMA, model="llama 8B TQ1_0", weights=None)
    assert "say the nearest by --weights" in said(unknown)
    assert "4.91 GB, where llama-3.1-8b in q8_0 has 8.53" in said(unknown, weights="q8_0")


def test_several_types_of_k_are_chosen_from():
    both = (LLAMA, replace(LLAMA, type_k="q8_0", type_v="q8_0"))
    assert "choose by --cache-type-k" in said(*both)
    found = subject_of(rows(*both), BenchOptions(model="llama-3.1-8b", type_k="q8_0", type_v="q8_0"))
    assert (found.type_k, len(found.points)) == ("q8_0", 1)


def test_what_servers_do_not_run_with_is_left_out():
    found = subject_of(
        rows(LLAMA, replace(LLAMA, flash=False), replace(LLAMA, gpu_layers=20), replace(LLAMA, gpu_layers=99)),
        BenchOptions(model="llama-3.1-8b"),
    )
    assert len(found.points) == 2
    assert len(found.notes) == 2
    assert "20 of 32 layers were on the device" in said(replace(LLAMA, gpu_layers=20))


def test_a_name_that_is_not_known_is_taken_and_said():
    found = subject_of(rows(replace(SERVED, model="chat")), BenchOptions(model="llama-3.1-8b", device="rtx4090"))
    assert found.notes == ("'chat' was taken to be llama-3.1-8b.",)


def test_an_engine_that_is_not_said_is_assumed_and_said():
    guides = SetUp("GuideLLM", build="0.8.1", model="meta-llama/Llama-3.1-8B-Instruct")
    found = subject_of(rows(guides), BenchOptions(model="llama-3.1-8b", device="rtx4090"))
    assert found.engine == "vllm"
    assert "does not say which engine it asked" in found.notes[0]
    found = subject_of(rows(guides), BenchOptions(model="llama-3.1-8b", device="rtx4090", engine="llamacpp"))
    assert (found.engine, found.notes) == ("llamacpp", ())


def test_rows_of_a_cold_device_are_left_out():
    times = [(1, 0.27), (2, 0.23), (4, 0.437)]
    cold, *warm = (
        BenchPoint(f"a.txt: line {n}", LLAMA, "prompt", seconds, sequences=n, prompt=512) for n, seconds in times
    )
    found = subject_of([cold, *warm], BenchOptions(model="llama-3.1-8b"))
    assert found.points == warm
    assert found.notes == ("Left out: pp512 (a.txt: line 1), which took longer than 2 x pp512.",)
    found = subject_of([replace(cold, seconds=0.24), *warm], BenchOptions(model="llama-3.1-8b"))
    assert len(found.points) == 3


def test_files_named_after_their_experts_have_the_rest_in_the_type_of_their_size():
    oss = replace(
        LLAMA, model="gpt-oss 20B MXFP4 MoE", parameters=20_914_757_184, model_bytes=12_103_000_000, weights="mxfp4"
    )
    assert subject_of(rows(oss), BenchOptions(model="gpt-oss-20b")).weights == "q8_0"
