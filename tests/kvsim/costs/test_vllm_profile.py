"""What vLLM sets aside besides weights and blocks, against what servers logged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.devices import device_named, devices
from kvsim.costs.memory_plan import default_batch, default_cells, plan
from kvsim.costs.memory_settings import PlanSettings
from kvsim.costs.vllm_profile import profile_run, serve_defaults
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape, model_names
from tests.kvsim.cli.answers import complaint, succeeded
from tests.worlds import command

GIB = 1 << 30
RTX4090, H100 = 25_250_627_584, 85_045_739_520
"""Bytes, as recorded with the counts below."""

COUNTS = {
    # github.com/casys-kaist/LLMServingSim, bench/examples/RTX4090: max_num_seqs 256, 0.9 of the memory. That it was a
    # first start is not recorded but inferred: compiled before, the same server would have 9 % more.
    "RTX 4090, Llama 3.1 8B, 0.19.0": (
        2588,
        RTX4090,
        {"model": "llama-3.1-8b", "parallel": 256, "vllm_version": "0.19.0", "first_start": True},
    ),
    # The version is not recorded; the step from 2,048 to 8,192 tokens is that of Model Runner V2's sampler.
    "RTX 4090, Qwen3 8B, batch 2,048": (
        2529,
        RTX4090,
        {"model": "qwen3-8b", "parallel": 256, "vllm_version": "0.23.0", "gpu_memory_utilization": 0.9},
    ),
    "RTX 4090, Qwen3 8B, batch 8,192": (
        2295,
        RTX4090,
        {"model": "qwen3-8b", "parallel": 256, "batch": 8192, "vllm_version": "0.23.0", "gpu_memory_utilization": 0.9},
    ),
    # github.com/inference-sim/residency-vllm: vllm serve without options. 0.23.0 takes 0.92 of the memory; 0.9 of it
    # would be less than weights and blocks together.
    "H100, Qwen3 14B, 0.23.0": (
        18038,
        H100,
        {"model": "qwen3-14b", "parallel": 1024, "batch": 8192, "vllm_version": "0.23.0"},
    ),
    # github.com/inference-sim/sim-to-real-accuracy-validation: 128 sequences, 2,048 tokens, a context of 4,096.
    "H100, Llama 2 7B, 0.15.1": (
        7463,
        H100,
        {"model": "llama-2-7b", "parallel": 128, "ctx": 4096, "vllm_version": "0.15.1"},
    ),
}
"""Blocks of real servers, the bytes of their GPU, and how they were started as far as it is known."""


def buffers(**asked):
    made = plan(engine="vllm", **asked)
    return {part.name: part for part in made.parts if part.kind == "buffers"}


@pytest.mark.parametrize(("blocks", "memory", "asked"), COUNTS.values(), ids=COUNTS)
def test_blocks_are_those_of_real_servers(blocks, memory, asked):
    made = plan(engine="vllm", memory=memory, **asked)
    assert made.vllm_blocks(memory) == pytest.approx(blocks, rel=0.01)
    fewest, most = made.vllm_blocks_range(memory)
    assert fewest <= blocks <= most


def test_a_compiled_server_has_more_blocks_than_a_first_start():
    asked = {"model": "llama-3.1-8b", "engine": "vllm", "parallel": 256, "vllm_version": "0.19.0"}
    first, later = plan(**asked, first_start=True), plan(**asked)
    table = 2 * 128256 * 4096
    assert first.total("vllm") - later.total("vllm") == pytest.approx(table + 2 * 2048 * 4096 - 547e6, rel=0.01)
    assert later.vllm_blocks(RTX4090) > 1.05 * first.vllm_blocks(RTX4090)


@pytest.mark.parametrize(
    ("model", "version", "logged"),
    [
        ("llama-3.1-8b", "0.11.0", 4.76),
        ("qwen3-0.6b", "0.11.0", 5.56),
        ("qwen3-32b", "0.11.0", 5.64),
        ("llama-3.1-8b", "0.19.0", 1.89),
    ],
)
def test_peaks_are_what_was_logged_on_an_h100(model, version, logged):
    """8,192 tokens and 1,024 rows of logits; cuBLAS's workspace of 0.03 GiB is not in the plan's peak."""
    peak = buffers(model=model, batch=8192, parallel=1024, vllm_version=version)["activation peak"].bytes
    assert peak / GIB == pytest.approx(logged - 0.03, abs=0.015)


def test_the_rotary_table_makes_the_weights_what_vllm_loads():
    made = plan("llama-3.1-8b", engine="vllm")
    loaded = sum(part.bytes for part in made.parts if part.kind == "weights" or part.name == "rotary table")
    assert f"{loaded / GIB:.2f}" == "14.99"


@pytest.mark.parametrize("version", ["0.11.0", "0.19.0", "0.23.0", "0.33.0"])
def test_every_estimate_has_a_range_with_a_source(version):
    found = buffers(model="qwen3-8b", parallel=64, vllm_version=version)
    assert len(found) == 4
    assert {"rotary table", "activation peak", "CUDA graphs"} < set(found)
    for part in found.values():
        assert part.low <= part.bytes <= part.high
        assert part.source
    assert (found["CUDA graphs"].high > 0) == (version == "0.33.0")


@pytest.mark.slow
@given(
    st.sampled_from([name for name in model_names() if not memory_shape(name).vllm_until]),
    st.sampled_from([256, 2048, 8192]),
    st.sampled_from([1, 64, 1024]),
    st.booleans(),
)
def test_more_work_leaves_no_more_blocks(model, batch, parallel, first_start):
    asked = {"model": memory_shape(model), "engine": "vllm", "first_start": first_start}
    here, memory = plan(**asked, batch=batch, parallel=parallel), 200 * GIB
    assert plan(**asked, batch=2 * batch, parallel=parallel).vllm_blocks(memory) <= here.vllm_blocks(memory)
    assert plan(**asked, batch=batch, parallel=2 * parallel).vllm_blocks(memory) <= here.vllm_blocks(memory)


# Versions and defaults


def test_the_present_version_is_the_default():
    present = PRESENT["vLLM"].version
    assert profile_run(present).version == PlanSettings().vllm_version == present
    assert PlanSettings().gpu_memory_utilization == profile_run(present).utilization == 0.92
    assert plan("phi-4", vllm_version="0.19.0").settings.gpu_memory_utilization == 0.9


def test_a_version_between_two_is_planned_as_the_earlier():
    assert profile_run("0.28.0").version == "0.23.0"
    assert "vLLM 0.28 is planned as 0.23.0, " in plan("phi-4", engine="vllm", vllm_version="0.28").notes[0]
    assert not plan("phi-4", engine="vllm").notes


@pytest.mark.parametrize(
    ("memory", "device", "defaults"),
    [
        (None, None, (2048, 256)),
        (24 * GIB, None, (2048, 256)),
        (80 * GIB, None, (8192, 1024)),
        (79 * GIB, "h100_sxm", (8192, 1024)),
        (79 * GIB, "a100_sxm", (2048, 256)),
        (178 * GIB, "b200_sxm", (16384, 1024)),
    ],
)
def test_defaults_depend_on_the_device(memory, device, defaults):
    assert serve_defaults(memory, device) == defaults
    assert default_batch("vllm", memory, device) == defaults[0]
    assert default_batch("llamacpp", memory, device) == 2048


# Devices


def test_a_device_stands_for_its_memory_and_its_batch():
    made = plan("llama-3.1-8b", device="h100_sxm")
    assert (made.memory, made.device) == (device_named("h100_sxm").memory_bytes, "h100_sxm")
    assert made.settings.batch == 8192
    assert plan("llama-3.1-8b", device="h100_sxm", batch=512).settings.batch == 512
    assert plan("llama-3.1-8b", memory=80 * GIB).settings.batch == 2048
    assert made.what_would_fit("vllm") == made.what_would_fit("llamacpp") == ""


def test_a_model_too_large_for_its_device_is_told_what_would_fit():
    printed = succeeded(command("plan", "--model", "llama-3.1-70b", "--device", "h100_sxm"))
    (line,) = (row for row in printed.splitlines() if row.startswith("vLLM: does not fit"))
    assert line.endswith("; what would fit: --weights fp8, or --tp 2, or --device b200_sxm or gb200 or mi300x")
    told = json.loads(succeeded(command("plan", "--model", "llama-3.1-70b", "--device", "h100_sxm", "--json")))
    assert line.endswith(told["engines"]["vllm"]["would_fit"])
    assert told["engines"]["llamacpp"]["would_fit"].startswith("--weights q8_0, or --ngl 47, or --device ")
    assert plan("deepseek-v3", device="rtx4090", weights="f32").what_would_fit("vllm") == "nothing known here"
    # What is named does fit.
    for change in ({"weights": "fp8"}, {"tensor_parallel": 2}):
        assert plan("llama-3.1-70b", device="h100_sxm", **change).what_would_fit("vllm") == ""


def test_the_cells_that_a_device_leaves():
    cells = default_cells("llama-3.1-8b", "rtx4090")
    memory = device_named("rtx4090").memory_bytes
    assert cells == 16 * plan("llama-3.1-8b", engine="vllm", parallel=256).vllm_blocks(memory)
    large = default_cells("qwen3-14b", "h100_sxm", vllm_version="0.23.0")
    assert large // 16 == pytest.approx(18038, rel=0.01)
    assert default_cells("qwen3-14b", "h100_sxm", batch=2048, sequences=128, vllm_version="0.23.0") > large
    with pytest.raises(UserError, match=r"llama-3\.1-70b does not fit on rtx4090: .*; what would fit: --tp 8, or "):
        default_cells("llama-3.1-70b", "rtx4090")
    assert default_cells("llama-3.1-8b", "rtx4090", type_k="fp8") == pytest.approx(2 * cells, rel=0.01)


@pytest.mark.parametrize("name", devices())
def test_every_device_holds_a_small_model(name):
    assert default_cells("llama-3.2-1b", name) > 100_000


# Tensor parallelism


def test_weights_and_kv_heads_are_divided_over_gpus():
    one, two, eight, sixteen = (plan("llama-3.1-8b", engine="vllm", tensor_parallel=n) for n in (1, 2, 8, 16))
    size = {
        kind: [sum(part.bytes for part in made.parts if part.kind == kind) for made in (one, two, eight, sixteen)]
        for kind in ("weights", "kv")
    }
    assert size["weights"][0] == 2 * size["weights"][1] == 16 * size["weights"][3]
    # There are eight KV heads: sixteen GPUs have one each, twice.
    assert size["kv"][0] == 2 * size["kv"][1] == 8 * size["kv"][2] == 8 * size["kv"][3]
    assert "each keeps norms, the rotary table, KV heads, of which there are fewer than GPUs" in sixteen.notes[0]
    assert "memory is that of one of 2 GPUs" in two.notes[0]
    latent = plan("deepseek-v3", engine="vllm", tensor_parallel=8)
    assert latent.vllm_blocks(1 << 45) > 0
    assert [part.bytes for part in latent.parts if part.kind == "kv"] == [
        part.bytes for part in plan("deepseek-v3", engine="vllm").parts if part.kind == "kv"
    ]


MISTAKES = {
    "unknown device": (("--device", "rtx409"), "no device called 'rtx409'; did you mean 'rtx4090'"),
    "device and memory": (("--device", "rtx4090", "--memory", "24GB"), "--device and --memory: both say "),
    "three GPUs": (("--tp", "3", "--engine", "vllm"), "--tp: vLLM divides heads over GPUs; 3 does not divide the 40 "),
    "KV heads": (("--tp", "4", "--engine", "vllm"), "--tp: 4 and the 10 KV heads of phi-4 do not divide each other"),
    "no GPU": (("--tp", "0"), "--tp is 0; a whole number from 1 to "),
    "llama.cpp on two": (("--tp", "2", "--engine", "llamacpp"), "--tp: the memory of llama.cpp is planned for one "),
    "no version": (("--vllm-version", "new"), "--vllm-version is 'new'; a version such as 0.33.0 is accepted"),
    "old version": (("--vllm-version", "0.6.2"), "--vllm-version is 0.6.2; 0.11.0 and later are known here"),
}


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(arguments, answer):
    assert answer in complaint(command("plan", "--model", "phi-4", *arguments))
