"""Tests of estimated times: for every model on every device, never faster than the device, with errors stated."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.cpu_layers import OnCpu
from kvsim.costs.device_profiles import find_device_profile, find_profile
from kvsim.costs.devices import devices
from kvsim.costs.efficiency import efficiencies
from kvsim.costs.estimate import estimated
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.physics import PassPhysics
from kvsim.costs.served import Served
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape, model_names
from policies import Group
from policies.placement.rule import PassReads

WEIGHTS = {"vllm": (None, "fp8", "int4", "mxfp4", "nvfp4"), "llamacpp": (None, "f16", "q8_0", "q4_0", "q4_k_m")}
STORED = {"vllm": ("f16", "fp8"), "llamacpp": ("f16", "q8_0", "q4_0")}


@st.composite
def estimates(draw):
    """Any model on any device."""
    engine = draw(st.sampled_from(sorted(WEIGHTS)))
    flash_attn = engine == "vllm" or draw(st.booleans())
    kind = draw(st.sampled_from(STORED[engine])) if flash_attn else "f16"
    return Served(
        engine,
        draw(st.sampled_from(sorted(devices()))),
        draw(st.sampled_from(sorted(model_names()))),
        draw(st.sampled_from((1, 2, 8))) if engine == "vllm" else 1,
        draw(st.sampled_from(WEIGHTS[engine])),
        kind,
        kind,
        flash_attn=flash_attn,
    )


@pytest.mark.slow
@given(estimates(), st.integers(1, 4096), st.integers(1, 1 << 17), st.integers(1, 1 << 14))
def test_no_estimate_is_faster_than_its_device(estimate, sequences, cells, tokens):
    profile, shape = estimated(estimate), memory_shape(estimate.model)
    price = PassPrice(profile, profile.own_kernel, (Group(0),))
    weights = estimate.weights or shape.default_type
    types = (estimate.type_k, estimate.type_v, estimate.tp, estimate.engine, estimate.flash_attn)
    physics = PassPhysics(devices()[estimate.device], shape, weights, *types)

    decodes = PassReads(1)
    decodes.tokens = decodes.chunks = sequences
    decodes.groups[0].add_chunk(1, sequences * cells, sequences * cells, 0)
    parts = (physics.matrices(sequences), physics.experts(sequences), physics.head(sequences))
    least = sum(part.least_s for part in parts) + physics.decode(sequences, cells).least_s
    least += physics.states(sequences, sequences).least_s
    assert price.seconds(decodes) >= least * (1 - 1e-9)

    if tokens > 1:
        prompt = PassReads(1)
        prompt.tokens, prompt.chunks = tokens, 1
        prompt.groups[0].add_chunk(tokens, tokens, tokens, 0)
        least = physics.matrices(tokens).least_s + physics.experts(tokens).least_s
        assert price.seconds(prompt) >= (least + physics.prompt(tokens, (tokens + 1) / 2).least_s) * 0.98


@pytest.mark.slow
@given(estimates())
def test_an_estimate_is_made_again_from_its_name(estimate):
    assert Served.named(estimate.estimate) == estimate
    assert load_profile(estimate.estimate) == estimated(estimate)


def test_names_say_files_too():
    estimate = Served("llamacpp", "my&device.toml", "a folder/é=1.gguf")
    assert Served.named(estimate.estimate) == estimate


@pytest.mark.parametrize("name", ["estimate:", "estimate:engine=tgi&device=l4&model=qwen3-8b", "estimate:k=q9"])
def test_another_name_takes_one_line(name):
    with pytest.raises(UserError, match="not the name of an estimate, such as estimate:engine=vllm&device=h100_sxm"):
        load_profile(name)


def test_every_answer_says_its_error():
    basis = find_device_profile("llama-3.1-70b", "mi300x", weights="int4").basis
    found = efficiencies()["vllm"]["nvidia"].errors["all"]
    assert basis.startswith("Times are estimated: llama-3.1-70b on mi300x under vLLM, weights in int4, K and V in f16")
    assert f"decode steps are within ±{found.decode_median:.0%} (median) and ±{found.decode_p90:.0%} (P90)" in basis
    assert "vLLM was not measured on devices such as AMD Instinct MI300X" in basis
    assert "vLLM's matrices in int4 were not measured: they are priced with the efficiency of fp8" in basis


def test_models_with_states_have_errors_of_their_own():
    basis = find_device_profile("granite-4.0-h-small", "h200_sxm", engine="llamacpp").basis
    found = efficiencies()["llamacpp"]["hopper"].errors["states"]
    assert "(365 of 2 devices with 8 models); on devices and models left out of the fit, decode steps are" in basis
    assert f"within ±{found.decode_median:.0%} (median) and ±{found.decode_p90:.0%} (P90)" in basis


def test_decoding_over_quantised_k_and_v_takes_longer_where_that_was_measured():
    def step_s(device, kind):
        profile = estimated(Served("llamacpp", device, "llama-3.1-8b", weights="q4_k_m", type_k=kind, type_v=kind))
        return _pass_s(profile, [(1, 16384)]), profile.basis

    (wide, _), (narrow, basis) = step_s("h200_sxm", "f16"), step_s("h200_sxm", "q8_0")
    assert narrow / wide == pytest.approx(1.33, rel=0.1)
    assert "priced by its bytes" not in basis
    (wide, _), (narrow, basis) = step_s("rtx4090", "f16"), step_s("rtx4090", "q8_0")
    assert narrow < wide
    assert "Decoding over K in q8_0 and V in q8_0 was not measured on such devices, and is priced by its bytes" in basis


@pytest.mark.parametrize(("weights", "measured"), [("q4_k_m", 2.14), ("q8_0", 1.79), ("f16", 1.51)])
def test_a_pass_that_verifies_seven_drafts_takes_longer_than_a_step(weights, measured):
    """Measured on an H200, without context."""
    profile = estimated(Served("llamacpp", "h200_sxm", "llama-3.1-8b", weights=weights))
    assert _pass_s(profile, [(8, 8)], drafts=7) / _pass_s(profile, [(1, 32)]) == pytest.approx(measured, rel=0.27)


def test_what_was_measured_comes_first():
    assert find_profile("llama-3.1-8b", "rtx4090") == "rtx4090-llama-3.1-8b"
    for other in ({"weights": "fp8"}, {"engine": "llamacpp"}, {"tp": 2}):
        assert find_profile("llama-3.1-8b", "rtx4090", **other).startswith("estimate:")
    assert find_profile("llama-3.1-8b", "rtx4090", weights="BF16") == "rtx4090-llama-3.1-8b"


def test_tables_are_adapted_to_other_types_of_k_and_v():
    name = find_profile("llama-3.3-70b", "h200_sxm", weights="fp8", type_k="fp8", type_v="fp8")
    assert name == "h200_sxm-llama-3.3-70b-fp8?k=fp8&v=fp8"
    measured, narrow = load_profile("h200_sxm-llama-3.3-70b-fp8"), load_profile(name)
    assert (narrow.type_k, narrow.type_v) == ("fp8", "fp8")
    assert "K in fp8, V in fp8" in narrow.basis
    assert "(attention scaled from f16 by what fewer bytes save)" in narrow.basis
    assert narrow.tables.work == measured.tables.work
    ratio = np.divide(narrow.tables.decode.seconds, measured.tables.decode.seconds)
    assert 0.5 < ratio.min() < ratio.max() <= 1
    with pytest.raises(UserError, match="it cannot be had with K in q9 and V in fp8; f32, f16, q8_0, q4_0, fp8"):
        load_profile("h200_sxm-llama-3.3-70b-fp8?k=q9&v=fp8")


def test_less_to_read_takes_less_time():
    def step_s(**other):
        tables = find_device_profile("llama-3.3-70b", "gb200", **other).tables
        return tables.work.seconds[0], tables.decode.seconds[5][-1]

    (bf16, kv16), (fp8, kv8) = step_s(), step_s(weights="fp8", type_k="fp8", type_v="fp8")
    assert 0.5 < fp8 / bf16 < 0.8
    assert 0.5 < kv8 / kv16 < 0.8


def test_estimates_agree_with_tables_of_others():
    # Of LLMServingSim's profiler, which nothing was fitted to.
    for device, model in (("rtx4090", "llama-3.1-8b"), ("rtxpro6000", "qwen3-32b")):
        tabled, guessed = load_profile(f"{device}-{model}"), estimated(Served("vllm", device, model))
        sequences = np.array([1, 16, 64, 128])
        both = [[_decode_s(p, int(n)) for n in sequences] for p in (tabled, guessed)]
        assert np.abs(np.log(np.divide(*both))).max() < 0.25


def _decode_s(profile, sequences):
    return _pass_s(profile, [(1, 1024)] * sequences)


def _pass_s(profile, chunks, drafts=0):
    reads = PassReads.counted(sum(n for n, _ in chunks), len(chunks), len(chunks), chunks)
    return PassPrice(profile, profile.own_kernel, (Group(0),), drafts).seconds(reads)


@st.composite
def partly_on_cpu(draw):
    """A model of which llama.cpp keeps layers or experts on the CPU."""
    device = draw(st.sampled_from(sorted(name for name, d in devices().items() if d.kind != "apple")))
    model = draw(st.sampled_from(sorted(model_names())))
    weights = draw(st.sampled_from(("q8_0", "q4_k_m")))
    n_cpu_moe = draw(st.integers(0, 100)) if memory_shape(model).n_experts else 0
    cpu_gb_s = draw(st.sampled_from((None, 20.0, 400.0)))
    placed = (draw(st.integers(0, 100)), n_cpu_moe, cpu_gb_s, draw(st.booleans()))
    return Served("llamacpp", device, model, 1, weights, "f16", "f16", *placed)


@pytest.mark.slow
@given(partly_on_cpu(), st.integers(1, 512), st.integers(1, 1 << 15))
def test_no_estimate_is_faster_than_device_cpu_and_bus_together(of, sequences, cells):
    assert Served.named(of.estimate) == of
    profile, shape, device = estimated(of), memory_shape(of.model), devices()[of.device]
    on_cpu = OnCpu.of(shape, of.n_gpu_layers, of.n_cpu_moe)
    physics = PassPhysics(device, shape, of.weights, engine="llamacpp", flash_attn=of.flash_attn)
    decodes = PassReads(1)
    decodes.tokens = decodes.chunks = sequences
    decodes.groups[0].add_chunk(1, sequences * cells, sequences * cells, 0)

    # Of what is on the CPU, each byte is read from its memory or sent over the bus.
    rate = max(of.cpu_gb_s or device.cpu_gb_s, device.bus_gb_s) * 1e9
    parts = [(physics.matrices(sequences), on_cpu.layers), (physics.experts(sequences), on_cpu.experts)]
    parts += [(physics.head(sequences), on_cpu.head), (physics.decode(sequences, cells), on_cpu.layers)]
    least = sum((1 - share) * need.least_s for need, share in parts)
    least += sum(share * need.reading_s * device.bandwidth_gb_s * 1e9 / rate for need, share in parts)
    assert PassPrice(profile, profile.own_kernel, (Group(0),)).seconds(decodes) >= least * (1 - 1e-9)


def test_a_state_is_read_and_written_once_a_step_whatever_the_context():
    for engine, size in (("vllm", 36 * 2 * 548_864), ("llamacpp", 36 * 4 * 548_864)):
        device, shape = devices()["h100_sxm"], memory_shape("qwen3-next-80b-a3b")
        need = PassPhysics(device, shape, "bf16", engine=engine).states(3, 3)
        assert need.reading_s * device.bandwidth_gb_s * 1e9 == pytest.approx(3 * 2 * size)
    grid = estimated(Served("vllm", "h100_sxm", "mamba-2.8b")).tables.decode
    assert all(len(set(row)) == 1 for row in grid.seconds)
    assert all(a[0] < b[0] for a, b in pairwise(grid.seconds))


def test_no_error_of_others_is_that_of_models_with_states():
    said = estimated(Served("vllm", "h100_sxm", "granite-4.0-h-tiny")).basis
    assert "no measured server of this kind: no error is known" in said
    assert "±" not in said.partition("The host")[0]
    assert "no error is known" not in estimated(Served("vllm", "h100_sxm", "gemma-2-9b")).basis


def test_layers_are_put_on_the_device_as_llamacpp_does():
    shape, moe = memory_shape("llama-3.1-8b"), memory_shape("qwen3-30b-a3b")  # 32 and 48 layers.
    assert OnCpu.of(shape, None, 0) == OnCpu.of(shape, 33, 0) == OnCpu.of(shape, 99, 0) == OnCpu()
    assert OnCpu.of(shape, 32, 0) == OnCpu(1 / 32)  # The head counts as a layer, and comes first.
    assert OnCpu.of(shape, 1, 0) == OnCpu(1.0)
    assert OnCpu.of(shape, 0, 0) == OnCpu(1.0, head=True)
    assert OnCpu.of(moe, None, 12) == OnCpu(0.0, 0.25)
    assert OnCpu.of(moe, 25, 12) == OnCpu(0.5, 0.5)


def test_layers_on_the_cpu_take_their_bytes_over_its_memory_or_the_bus():
    def work(**placed):
        served = Served("llamacpp", "rtx3090", "llama-3.1-8b", 1, "q8_0", **placed)
        tables = estimated(served).tables
        return dict(zip(tables.work.at, tables.work.seconds, strict=True))

    whole, half, slow = work(), work(n_gpu_layers=17), work(n_gpu_layers=17, cpu_gb_s=44.8)
    assert work(n_gpu_layers=33) == whole
    size = memory_shape("llama-3.1-8b").matrices.bytes("q8_0")
    assert half[1] == pytest.approx(whole[1] / 2 + size / 2 / (0.6 * 89.6e9))
    assert slow[1] - whole[1] / 2 == pytest.approx(2 * (half[1] - whole[1] / 2))
    for tokens in (32, 512):
        assert half[tokens] == slow[tokens] == pytest.approx(whole[tokens] + size / 2 / 12e9)


def test_an_estimate_says_what_is_on_the_cpu():
    moe = estimated(Served("llamacpp", "rtx3060", "qwen3-30b-a3b", 1, "q4_k_m", n_cpu_moe=30, cpu_gb_s=51.2))
    assert "On the CPU: the experts of 30 of 48 layers, read at 60% of its memory's 51.2 GB/s" in moe.basis
    dense = estimated(Served("llamacpp", "rtx3060", "llama-3.1-8b", 1, "q8_0", n_gpu_layers=0))
    assert "On the CPU: 32 of 32 layers and the head, read at 60% of its memory's 89.6 GB/s" in dense.basis
    assert "On the CPU" not in estimated(Served("llamacpp", "rtx3060", "llama-3.1-8b", n_gpu_layers=99)).basis


def test_without_flash_attention_scores_are_written_and_read():
    of = Served("llamacpp", "rtx3090", "llama-3.1-8b", 1, "q4_k_m")
    fused, apart = estimated(of), estimated(replace(of, flash_attn=False))
    assert (fused.own_kernel, apart.own_kernel) == ("tiled", "masked")
    assert apart.tables.work == fused.tables.work
    ratio = {
        part: np.divide(getattr(apart.tables, part).seconds, getattr(fused.tables, part).seconds)[:, -1]
        for part in ("decode", "prompt")
    }
    # As was measured, by the page on GPUs: 1.1 to 4.9 and 3.2 to 6.0 times as long with longer contexts.
    assert 1.5 < ratio["decode"][0] < 3
    assert 3 < ratio["prompt"][np.searchsorted(apart.tables.prompt.rows, 512)] < 6
    assert "Without flash attention (8 devices), what longer contexts add to decode steps is within ±" in apart.basis
    other = estimated(replace(of, device="mi300x", flash_attn=False)).basis
    assert "Without flash attention (NVIDIA's, as of these devices none was measured: 8 devices), " in other


def test_layers_with_a_window_read_no_more_than_it():
    physics = PassPhysics(devices()["h200_sxm"], memory_shape("gpt-oss-120b"), "bf16")
    need = [float(physics.decode(1, cells).reading_s) for cells in (64, 128, 10_000)]
    assert need[1] == pytest.approx(2 * need[0])
    assert need[2] / need[1] == pytest.approx((10_000 + 128) / (2 * 128))  # Every other layer has a window of 128.


@pytest.mark.parametrize(
    ("model", "tp", "divided"), [("kimi-k2.5", 8, 1), ("qwen3-235b-a22b", 8, 4), ("qwen3-32b", 8, 8)]
)
def test_devices_that_are_more_than_heads_of_k_read_the_same(model, tp, divided):
    alone, shared = (PassPhysics(devices()["h200_sxm"], memory_shape(model), "bf16", tp=n) for n in (1, tp))
    assert shared.decode(4, 1000).reading_s == pytest.approx(alone.decode(4, 1000).reading_s / divided)


def test_what_takes_longer_in_servers_is_said_and_counted():
    def made(model, **other):
        return estimated(Served("vllm", "b200_sxm", model, **other))

    blocks, plain = (made("minimax-m2.5", tp=4, weights=kind) for kind in ("fp8_block", "fp8"))
    notes = " ".join(blocks.source.notes)
    assert "In servers, an exchange, with each doubling of the devices," in notes
    assert "In servers, a layer in blocks of fp8," in notes
    assert "blocks" not in " ".join(plain.source.notes)
    assert "In servers" not in made("qwen3-8b").basis
    assert not any("In servers" in note for note in estimated(Served("llamacpp", "rtx4090", "qwen3-8b")).source.notes)


def test_blocks_of_fp8_are_had_by_asking_for_fp8():
    names = {find_profile("minimax-m2.5", "b200_sxm", tp=4, weights=kind) for kind in (None, "fp8", "FP8_block")}
    assert len(names) == 1
    assert find_profile("deepseek-v3", "h200_sxm", tp=8, weights="fp8") == "h200_sxm-deepseek-v3-tp8"


def test_kernels_of_blackwell_are_others():
    before, since = (efficiencies()["vllm"][make] for make in ("nvidia", "blackwell"))
    assert since.exchange.layer_s > before.exchange.layer_s  # 7 µs rather than 5.
    assert "nvfp4" in since.experts
    assert "nvfp4" not in before.experts
