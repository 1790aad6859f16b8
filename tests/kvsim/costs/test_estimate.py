"""Tests of estimated times: for every model on every device, never faster than the device, with errors stated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    kind = draw(st.sampled_from(STORED[engine]))
    return Served(
        engine,
        draw(st.sampled_from(sorted(devices()))),
        draw(st.sampled_from(sorted(model_names()))),
        draw(st.sampled_from((1, 2, 8))) if engine == "vllm" else 1,
        draw(st.sampled_from(WEIGHTS[engine])),
        kind,
        kind,
    )


@given(estimates(), st.integers(1, 4096), st.integers(1, 1 << 17), st.integers(1, 1 << 14))
def test_no_estimate_is_faster_than_its_device(estimate, sequences, cells, tokens):
    profile, shape = estimated(estimate), memory_shape(estimate.model)
    price = PassPrice(profile, profile.own_kernel, (Group(0),))
    weights = estimate.weights or shape.default_type
    types = (estimate.type_k, estimate.type_v, estimate.tp, estimate.engine)
    physics = PassPhysics(devices()[estimate.device], shape, weights, *types)

    decodes = PassReads(1)
    decodes.tokens = decodes.chunks = sequences
    decodes.groups[0].add_chunk(1, sequences * cells, sequences * cells, 0)
    parts = (physics.matrices(sequences), physics.experts(sequences), physics.head(sequences))
    least = sum(part.least_s for part in parts) + physics.decode(sequences, cells).least_s
    assert price.seconds(decodes) >= least * (1 - 1e-9)

    if tokens > 1:
        prompt = PassReads(1)
        prompt.tokens, prompt.chunks = tokens, 1
        prompt.groups[0].add_chunk(tokens, tokens, tokens, 0)
        least = physics.matrices(tokens).least_s + physics.experts(tokens).least_s
        assert price.seconds(prompt) >= (least + physics.prompt(tokens, (tokens + 1) / 2).least_s) * 0.98


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
        tables = find_device_profile("llama-3.3-70b", "gb200", tp=4, **other).tables
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
    reads = PassReads(1)
    reads.tokens = reads.chunks = sequences
    reads.groups[0].add_chunk(1, sequences * 1024, sequences * 1024, 0)
    return PassPrice(profile, profile.own_kernel, (Group(0),)).seconds(reads)
