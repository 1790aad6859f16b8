"""Memory plans against sums by hand, against what the engines logged, and against their own definition."""

import json

import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.costs.memory_plan import plan
from kvsim.errors import UserError
from kvsim.model.engine_shapes import gguf_path
from kvsim.model.gguf_file import read_header
from kvsim.model.memory_shapes import model_names
from kvsim.model.storage_types import LLAMACPP_CACHE_TYPES, weight_bytes
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.kvsim.cli.answers import complaint, succeeded
from tests.kvsim.model.test_memory_shapes import PARAMETERS, config
from tests.worlds import command

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def parts(made, engine, kind):
    return {part.name: part.bytes for part in made.parts if part.engine == engine and part.kind == kind}


def kv(engine="llamacpp", **given):
    """Return the bytes of K and V by group of layers."""
    return parts(plan(engine=engine, **given), engine, "kv")


def one(found):
    (value,) = found.values()
    return value


# llama.cpp, by hand and as it logs


def test_llama_keeps_a_gib_of_8192_tokens():
    assert one(kv(model="llama-3.1-8b", ctx=8192)) == GIB == 32 * 2 * 8 * 128 * 2 * 8192
    assert one(kv(model="llama-3.1-8b", ctx=8192, parallel=4)) == 4 * GIB
    assert one(kv(model="llama-3.1-8b", ctx=8192, type_k="q8_0", type_v="q8_0")) == GIB * 17 // 32
    assert one(kv(model="llama-3.1-8b", ctx=8192, type_k="q8_0", type_v="q4_0")) == GIB * (34 + 18) // 128


def test_the_context_is_rounded_up_to_256_cells_for_each_sequence_or_in_all():
    cell = 32 * 2 * 8 * 128 * 2
    assert one(kv(model="llama-3.1-8b", ctx=300)) == 512 * cell
    assert one(kv(model="llama-3.1-8b", ctx=300, parallel=3)) == 3 * 512 * cell
    assert one(kv(model="llama-3.1-8b", ctx=300, parallel=3, kv_unified=True)) == 1024 * cell


def test_gpt_oss_keeps_what_llamacpp_logged():
    """Context 131,072: "3072.00 MiB (131072 cells, 12 layers", "18.00 MiB (768 cells, 12 layers", "0.77 MiB"."""
    made = plan("gpt-oss-20b", ctx=131072, engine="llamacpp")
    assert list(parts(made, "llamacpp", "kv").values()) == [3072 * MIB, 18 * MIB]
    buffers = parts(made, "llamacpp", "buffers")
    assert f"{buffers['output buffer'] / MIB:.2f}" == "0.77"
    assert f"{buffers['compute buffer'] / MIB:.2f}" == "398.38"


def test_deepseek_keeps_latents_as_logged():
    """61 layers, 32,768 tokens: "c^KV (f16): 2196.00 MiB" (ik_llama.cpp, PR 235); mainline keeps no V either."""
    for engine in ("llamacpp", "vllm"):
        found = kv(engine, model="deepseek-v3", ctx=32768)
        assert found["KV, latent, 61 layers"] == 2196 * MIB


def test_windows_have_a_cache_of_their_own():
    """Gemma 3 27B: 10 layers see everything, 52 see 1,024 tokens."""
    cell = 2 * 16 * 128 * 2

    def cells(**given):
        full, window = kv(model="gemma-3-27b", **given).values()
        return full // (10 * cell), window // (52 * cell)

    assert cells(ctx=32768) == (32768, 1536)
    assert cells(ctx=32768, ubatch=2048) == (32768, 3072)
    assert cells(ctx=32768, ubatch=2048, batch=600) == (32768, 1792)
    assert cells(ctx=32768, parallel=4) == (4 * 32768, 4 * 1536)
    assert cells(ctx=32768, parallel=4, kv_unified=True) == (4 * 32768, 4 * 1024 + 512)
    assert cells(ctx=32768, swa_full=True) == (32768, 32768)
    assert cells(ctx=1000) == (1024, 1024)


def test_llamacpp_keeps_all_tokens_of_mistral_and_vllm_its_window():
    made = plan("mistral-7b-v0.1", ctx=32768)
    assert one(parts(made, "llamacpp", "kv")) == 4 * GIB
    blocks = (4095 + 2 * 2048 + 15) // 16 + 1  # Two steps are under way.
    assert parts(made, "vllm", "kv")["KV, window of 4,096, 32 layers"] == blocks * 16 * 128 * KIB
    assert any("without its window" in note for note in made.notes)


@pytest.mark.parametrize(
    ("ctx", "flash_attn", "compute", "inputs"),
    [(512, False, 258.50, 9), (2048, False, 258.50, 12), (8192, False, 560.0, 24), (512, True, 258.50, 9)],
)
def test_buffers_of_llama_3_are_what_was_logged(ctx, flash_attn, compute, inputs):
    """CUDA0 and CUDA_Host compute buffers of Llama 3 8B with passes of 512 tokens; the latter has 0.01 MiB more."""
    buffers = parts(plan("llama-3-8b", ctx=ctx, flash_attn=flash_attn), "llamacpp", "buffers")
    assert buffers["compute buffer"] == compute * MIB
    assert buffers["input buffer"] == inputs * MIB
    assert f"{buffers['output buffer'] / MIB:.2f}" == "0.49"


# vLLM


def test_vllm_makes_the_blocks_that_it_logged():
    """Llama 3.1 8B on 23.58 GiB: 3.81 GiB for K and V are 1,952 blocks, 1.56 requests of 20,000 (vLLM issue 10517)."""
    made = plan("llama-3.1-8b", ctx=20000, batch=20000, engine="vllm")
    request = parts(made, "vllm", "kv")["KV, full attention, 32 layers"]
    assert request == 1250 * 2 * MIB
    assert abs(3.81 * GIB / (2 * MIB) - 1952) < 3
    assert f"{1952 / 1250:.2f}" == "1.56"
    peak = parts(made, "vllm", "buffers")["activation peak"]
    assert peak / GIB == pytest.approx(2.07, abs=0.02)
    longer = plan("llama-3.1-8b", ctx=29000, batch=29000, engine="vllm")
    assert parts(longer, "vllm", "buffers")["activation peak"] / GIB == pytest.approx(2.99, abs=0.02)
    # That version counted 0.35 GiB, CUDA's context included, beside PyTorch.
    asked = {"ctx": 20000, "batch": 20000, "engine": "vllm", "vllm_version": "0.11.0"}
    other = parts(plan("llama-3.1-8b", **asked), "vllm", "buffers")["not torch's"]
    blocks = plan("llama-3.1-8b", **asked).vllm_blocks(int(23.58 * GIB))
    assert blocks - (0.35 * GIB - other) / (2 * MIB) == pytest.approx(1952, abs=10)


def test_vllm_groups_layers_of_a_hybrid_model():
    """Gemma 3 27B: one table for 10 layers, six for 52, which pads them to 60; gpt-oss: two of 12."""
    gemma = kv("vllm", model="gemma-3-27b", ctx=8192)
    block = 10 * 16 * 2 * 16 * 128 * 2
    window = -(-(1023 + 2 * 2048) // 16) + 1
    assert list(gemma.values()) == [512 * block, 6 * window * block, block]
    oss = kv("vllm", model="gpt-oss-20b", ctx=8192)
    block = 12 * 16 * 2 * 8 * 64 * 2
    assert list(oss.values()) == [512 * block, (-(-(127 + 2 * 2048) // 16) + 1) * block, block]


def test_vllm_takes_a_share_of_the_memory():
    made = plan("llama-3.1-8b", memory=80 * GIB, engine="vllm", gpu_memory_utilization=0.5)
    others = sum(part.bytes for part in made.parts if part.kind != "kv")
    assert made.vllm_blocks(80 * GIB) == (40 * GIB - others) // (2 * MIB)
    assert made.largest_parallel(80 * GIB, "vllm") == (made.vllm_blocks(80 * GIB) - 1) // 512
    assert one(
        {k: v for k, v in kv("vllm", model="llama-3.1-8b", type_k="fp8", type_v="fp8").items() if "full" in k}
    ) == (GIB // 2)


# Weights


def test_every_shipped_model_can_be_planned():
    for name in model_names():
        made = plan(name, ctx=4096)
        alone = made.shape.only or ("llamacpp" if made.shape.vllm_until else "")
        served = (alone,) if alone else ("llamacpp", "vllm")
        assert made.engines == served
        assert made.shape.source.startswith("https://huggingface.co/")
        assert sum(group.layers for group in made.shape.groups) > 0


def test_weights_by_type():
    def weights(model, **given):
        return parts(plan(model, **given), "llamacpp", "weights")

    numbers = PARAMETERS["llama-3.1-8b"]
    norms = 65 * 4096
    assert weights("llama-3.1-8b") == {"weights, bf16": 2 * numbers + 2 * norms}
    assert weights("llama-3.1-8b", weights="Q8_0") == {"weights, q8_0": (numbers - norms) * 34 // 32 + 4 * norms}
    assert weights("gpt-oss-20b", weights="mxfp4")["weights, mxfp4"] / GIB == pytest.approx(11.27, abs=0.005)
    experts = 24 * 32 * 3 * 2880 * 2880
    for kind in ("bf16", "q8_0", "q4_k_m"):
        oss = weights("gpt-oss-20b", weights=kind)
        assert oss["weights, mxfp4"] == experts * 17 // 32
        assert set(oss) == {"weights, mxfp4", f"weights, {kind}"}
    served = parts(plan("gpt-oss-20b", engine="vllm", weights="mxfp4"), "vllm", "weights")
    assert served == parts(plan("gpt-oss-20b", engine="vllm"), "vllm", "weights")
    assert served["weights, bf16"] == 2 * (PARAMETERS["gpt-oss-20b"] - experts)
    assert weight_bytes("f32", 3) == 12


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0])
def test_weights_of_a_gguf_file_are_summed_from_its_tensors(tmp_path, kind):
    small = Small(kind=kind)
    made = plan(str(small.write(tmp_path / "small.gguf")), ctx=256, engine="llamacpp")
    stored = {}
    for name in small.tensors:
        data, stored_as = small.stored(name)
        key = f"weights, {stored_as.name.lower()}"
        stored[key] = stored.get(key, 0) + data.nbytes
    assert parts(made, "llamacpp", "weights") == stored
    assert one(parts(made, "llamacpp", "kv")) == 2 * 256 * 2 * 2 * 32 * 2


@pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)
def test_weights_of_smollm2_fill_its_file():
    header = read_header(gguf_path("smollm2"))
    made = plan("smollm2", engine="llamacpp")
    weights = sum(parts(made, "llamacpp", "weights").values())
    start = min(tensor.offset for tensor in header.tensors.values())
    # Each tensor begins on a multiple of 32 bytes.
    assert header.size - start - 32 * len(header.tensors) <= weights <= header.size - start
    assert one(parts(made, "llamacpp", "kv")) == 8192 * 30 * 2 * 3 * 64 * 2


def test_a_gguf_file_of_gemma_3_has_windows(tmp_path):
    own = {"block_count": 12, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    own |= {"attention.key_length": 32, "attention.value_length": 32, "feed_forward_length": 96}
    fields = {f"gemma3.{key}": value for key, value in (own | {"attention.sliding_window": 512}).items()}
    path = Small(fields={"general.architecture": "gemma3", **fields}).write(tmp_path / "gemma.gguf")
    cell = 2 * 2 * 32 * 2
    assert kv(model=str(path), ctx=8192) == {
        "KV, full attention, 2 layers": 2 * 8192 * cell,
        "KV, window of 512, 10 layers": 10 * 1024 * cell,
    }


def test_a_gguf_file_of_deepseek_keeps_latents_if_it_was_made_for_them(tmp_path):
    own = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 1}
    own |= {"attention.key_length": 96, "attention.value_length": 64, "feed_forward_length": 96}
    own |= {"attention.key_length_mla": 48, "attention.value_length_mla": 32}
    fields = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in own.items()}
    path = str(Small(fields=fields).write(tmp_path / "new.gguf"))
    assert one(kv(model=path, ctx=256)) == 2 * 256 * 96 * 2
    before = fields | {"deepseek2.attention.key_length_mla": None, "deepseek2.attention.head_count_kv": 4}
    path = str(Small(fields=before).write(tmp_path / "old.gguf"))
    assert one(kv(model=path, ctx=256)) == 2 * 256 * 4 * (96 + 64) * 2


def test_a_config_is_read_from_its_file_or_folder(tmp_path):
    made = plan(config(tmp_path), ctx=256, engine="llamacpp")
    numbers = 2 * 100 * 64 + 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
    assert parts(made, "llamacpp", "weights") == {"weights, f16": 2 * numbers + 2 * (4 * 2 * 64 + 64)}
    assert plan(str(tmp_path), ctx=256, engine="llamacpp").parts == made.parts


# What fits

ANY = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite", "mistral-7b-v0.1"]),
        "ctx": st.integers(1, 200_000),
        "parallel": st.integers(1, 64),
        "ubatch": st.sampled_from([64, 512, 4096]),
        "kv_unified": st.booleans(),
        "swa_full": st.booleans(),
        "flash_attn": st.booleans(),
        "block_size": st.sampled_from([1, 16, 128]),
    }
)


@settings(max_examples=30, deadline=None)
@given(given_=ANY, engine=st.sampled_from(["llamacpp", "vllm"]), memory=st.integers(1 << 20, 1 << 38))
def test_the_largest_fits_and_one_more_does_not(given_, engine, memory):
    made = plan(engine=engine, **given_)

    def fits(**changes):
        return plan(engine=engine, **(given_ | changes)).fits(engine, memory)

    longest, most = made.largest_context(memory, engine), made.largest_parallel(memory, engine)
    assert longest == 0 or fits(ctx=longest)
    own = made.shape.context or 1 << 30
    assert longest == own or not fits(ctx=longest + 1)
    assert most == 0 or fits(parallel=most)
    assert most == (256 if engine == "llamacpp" else 1 << 16) or not fits(parallel=most + 1)
    assert made.fits(engine, memory) == (most >= given_["parallel"])
    assert longest == own or made.fits(engine, memory) == (longest >= given_["ctx"])


def test_what_driver_desktop_and_chance_keep_is_no_engines():
    """23.76 of 24 GiB do not fit beside a driver; vLLM's share of 8 GiB is not left to it either."""
    asked = {"model": "llama-3.1-8b", "weights": "q4_k_m", "ctx": 8192}
    full = plan(**asked, parallel=19, memory=24 * GIB)
    others = (457 + 768) * MIB
    assert full.total("llamacpp") > full.budget("llamacpp", 24 * GIB) == 24 * GIB - others - GIB
    assert not full.fits("llamacpp", 24 * GIB)
    assert plan(**asked, parallel=19, reserve="1MiB").fits("llamacpp", 24 * GIB)
    card = plan(**asked, device="rtx4090")
    assert card.budget("llamacpp", card.memory) == card.memory - others - GIB
    rented = plan(**asked, device="h100_sxm")
    assert rented.budget("llamacpp", rented.memory) == rented.memory - 555 * MIB - GIB
    assert rented.budget("vllm", rented.memory) == int(rented.memory * 0.92)
    small = plan("llama-3.2-1b", memory=8 * GIB)
    assert small.budget("vllm", 8 * GIB) == 8 * GIB - others
    assert any("refuses to start with --gpu-memory-utilization 0.92" in note for note in small.notes)
    assert not plan(**asked, memory=1 << 30).budget("llamacpp", 1 << 30)


def test_what_fits_only_without_the_margin_is_said_to():
    asked = ("plan", "--model", "llama-3.1-8b", "--weights", "q4_K_M", "--memory", "24GiB", "--engine", "llamacpp")
    printed = succeeded(command(*asked, "--parallel", "17"))
    assert "does not fit in 21.80 GiB of 24.00 GiB (only without its margin, of which " in printed
    assert "its margin" not in succeeded(command(*asked, "--parallel", "16"))
    assert "its margin" not in succeeded(command(*asked, "--parallel", "30"))


def test_a_context_is_never_longer_than_the_models_own():
    assert plan("llama-3.1-8b").largest_context("400GB") == plan("llama-3.1-8b").largest_context(4 * 10**11) == 131_072
    printed = succeeded(command("plan", "--model", "llama-3.1-8b", "--memory", "400GB"))
    assert printed.count("at most 131,072 tokens (the model's own limit)") == 2


@settings(max_examples=30, deadline=None)
@given(given_=ANY, engine=st.sampled_from(["llamacpp", "vllm"]), more=st.integers(1, 5000))
def test_larger_settings_never_need_less_memory(given_, engine, more):
    total = plan(engine=engine, **given_).total(engine)
    assert plan(engine=engine, **(given_ | {"ctx": given_["ctx"] + more})).total(engine) >= total
    assert plan(engine=engine, **(given_ | {"parallel": given_["parallel"] + more % 64})).total(engine) >= total


def test_narrower_types_need_less_memory():
    sizes = {kind: one(kv(model="llama-3.1-8b", type_k=kind, type_v=kind)) for kind in LLAMACPP_CACHE_TYPES}
    order = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "f32"]
    assert [sizes[kind] for kind in order] == sorted(sizes[kind] for kind in order)
    assert len({sizes[kind] for kind in order}) == len(order)
    assert sizes["iq4_nl"] == sizes["q4_0"]
    assert sizes["bf16"] == sizes["f16"]


# The command and the interface


def test_the_table_and_the_object_agree():
    made = kvsim.plan("gemma-3-12b", ctx=4096, memory="48GiB")
    printed = made.to_dict()
    assert made.table.groupby("engine")["bytes"].sum().to_dict() == {
        engine: message["total"] for engine, message in printed["engines"].items()
    }
    assert printed["engines"]["vllm"]["largest_context"] == made.largest_context(48 * GIB, "vllm")
    assert set(printed["engines"]["llamacpp"]) == {
        "parts",
        "total",
        "defaults",
        "budget",
        "reserve",
        "fits",
        "largest_context",
        "largest_parallel",
    }
    assert json.loads(json.dumps(printed)) == printed


def test_the_command_prints_both_engines_and_what_fits():
    printed = succeeded(command("plan", "--model", "llama-3.1-8b", "--parallel", "4", "--memory", "24GB"))
    line = {row.split("  ")[0]: row.split() for row in printed.splitlines()}
    assert line["KV, full attention, 32 layers"][-4:] == ["4.00", "GiB", "4.00", "GiB"]
    assert "llama.cpp: -c 32768 -np 4: 8,192 cells x 4 streams" in printed
    assert "llama.cpp: fits in 20.16 GiB of 22.35 GiB; at most " in printed
    assert "vLLM: fits in 20.56 GiB of 22.35 GiB, which makes " in printed
    printed = json.loads(succeeded(command("plan", "--model", "llama-3.1-8b", "--engine", "vllm", "--json")))
    assert list(printed["engines"]) == ["vllm"]


def test_the_command_lists_the_models():
    printed = succeeded(command("plan", "--list"))
    assert [row.split()[0] for row in printed.splitlines() if row][1:] == model_names()
    printed = json.loads(succeeded(command("plan", "--list", "--json")))
    assert printed["llama-3.1-8b"]["parameters"] == PARAMETERS["llama-3.1-8b"]


def test_an_engine_that_refuses_the_settings_is_left_out_with_a_note():
    made = plan("llama-3.1-8b", type_k="q8_0", type_v="q8_0")
    assert made.engines == ("llamacpp",)
    assert made.notes[0].startswith("left out: --cache-type-k: vLLM has no q8_0 cache")
    assert plan("llama-3.1-8b", type_k="fp8", type_v="fp8").engines == ("vllm",)
    assert plan("llama-3.1-8b", parallel=300).engines == ("vllm",)


MISTAKES = {
    "no model": ((), "--model: a name (kvsim plan --list), "),
    "misspelt": (("--model", "lama-3.1-8b"), "no model called 'lama-3.1-8b'; did you mean 'llama-3.1-8b'"),
    "nothing like it": (
        ("--model", "%%%"),
        "no model called '%%%'; there are tiny, small, smollm2, those of kvsim plan --list",
    ),
    "no context": (("--model", "phi-4", "--ctx", "0"), "--ctx is 0; a whole number from 1 to "),
    "no sequence": (("--model", "phi-4", "--parallel", "0"), "--parallel is 0; a whole number from 1 to "),
    "no tokens": (("--model", "phi-4", "--ubatch", "-1"), "--ubatch is -1; "),
    "all and more": (("--model", "phi-4", "--gpu-memory-utilization", "1.1"), "--gpu-memory-utilization is 1.1; a "),
    "unknown type of K": (
        ("--model", "phi-4", "--cache-type-k", "q3"),
        "--cache-type-k: no type called 'q3'; there are f32",
    ),
    "unknown weights": (("--model", "phi-4", "--weights", "q9"), "--weights: no type called 'q9'; there are f32, "),
    "unknown engine": (
        ("--model", "phi-4", "--engine", "tgi"),
        "--engine: no engine called 'tgi'; there are llamacpp, vllm",
    ),
    "no reserve": (("--model", "phi-4", "--reserve", "some"), "--reserve: 'some'; a size such as 8GB, 8GiB, "),
    "no size": (("--model", "phi-4", "--memory", "much"), "--memory: 'much'; a size such as 8GB, 8GiB, "),
    "no unit": (("--model", "phi-4", "--memory", "8"), "--memory is 8 bytes; at least 1 MiB is expected, such as"),
    "vLLM without q8_0": (
        ("--model", "phi-4", "--engine", "vllm", "--cache-type-k", "q8_0"),
        "--cache-type-k: vLLM has no q8_0 cache; it has f16, bf16, f32, fp8",
    ),
    "narrow V": (
        ("--model", "phi-4", "--engine", "llamacpp", "--cache-type-v", "q8_0", "--no-flash-attn"),
        "--cache-type-v: llama.cpp stores V as q8_0 only with flash attention",
    ),
    "nobody": (("--model", "phi-4", "--cache-type-k", "fp8"), "llama.cpp has no fp8; "),
    "lost file": (("--model", "lost.gguf"), "lost.gguf: cannot be read: "),
    "lost config": (("--model", "lost.json"), "'lost.json': no such file; a config.json is expected"),
    "no JSON": (("--model", "bad.json"), "'bad.json': not a config.json: "),
    "a list": (("--model", "list.json"), "list.json: not a config.json: an object is expected, got list"),
}


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(tmp_path, monkeypatch, arguments, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert answer in complaint(command("plan", *arguments))


def test_weights_of_a_gguf_file_are_not_chosen(tmp_path):
    path = str(Small().write(tmp_path / "small.gguf"))
    with pytest.raises(UserError, match="the file states the types of its weights"):
        plan(path, weights="f16")
    # Heads of keys may differ from layer to layer.
    path = Small(fields={"llama.attention.head_count_kv": [2, 4]}).write(tmp_path / "uneven.gguf")
    assert sorted(kv(model=str(path), ctx=256).values()) == [256 * 2 * 2 * 32 * 2, 256 * 2 * 4 * 32 * 2]
    with pytest.raises(UserError, match="layers of different widths cannot be planned for vLLM"):
        plan(str(path), engine="vllm")


def test_gigabytes_are_explained_where_they_decide():
    decides = ", into which this fits: --memory 16GiB"
    small, big = ({"model": "llama-3.1-8b", "engine": "llamacpp", "ctx": ctx} for ctx in (1024, 1 << 19))
    between = {"model": "llama-3.1-8b", "engine": "llamacpp", "ctx": 2048, "memory": "16GB", "reserve": 0}
    assert not kvsim.plan(**between).fits("llamacpp", "16GB")
    assert kvsim.plan(**between).fits("llamacpp", "16GiB")
    assert kvsim.plan(**between).notes[-1].endswith(decides)
    for question in ({**small, "memory": "24GB"}, {**big, "memory": "16GB"}):
        assert kvsim.plan(**question).notes[-1].endswith("GiB")
    assert not any("sold as" in note for note in kvsim.plan(**small, memory="16GiB").notes)
    assert not any("sold as" in note for note in kvsim.plan(**small, memory=16 * 10**9).notes)


def test_the_command_explains_gigabytes():
    assert "a card sold as 16 GB usually has 16GiB" in command("plan", "--model", "phi-4", "--memory", "16GB").stdout


def test_a_plan_for_a_device_says_what_a_server_left_to_itself_has():
    one = kvsim.plan(model="llama-3.1-8b", device="h100_sxm", engine="vllm")
    (note,) = (note for note in one.notes if "without --max-num-seqs" in note)
    usual = kvsim.plan(model="llama-3.1-8b", device="h100_sxm", engine="vllm", parallel=1024)
    assert f"1,024 sequences at once, which leaves {usual.vllm_blocks(usual.memory):,} blocks" in note
    assert not any("without --max-num-seqs" in note for note in usual.notes)


def test_layers_on_the_cpu_and_their_cells_are_in_the_computers_memory():
    def sizes(**more):
        made = plan("llama-3.1-8b", weights="q8_0", engine="llamacpp", **more)
        return {kind: sum(part.bytes for part in made.parts if part.kind == kind) for kind in ("weights", "kv")}

    whole, all_on, half, none = sizes(), sizes(n_gpu_layers=33), sizes(n_gpu_layers=17), sizes(n_gpu_layers=0)
    embeddings = weight_bytes("q8_0", 128256 * 4096)  # Never on the device; the head is a matrix of its own.
    # The file has norms in f32, which layers on the CPU count as q8_0.
    assert whole["weights"] - all_on["weights"] == pytest.approx(embeddings, rel=2e-3)
    assert half["weights"] == pytest.approx((all_on["weights"] - embeddings) / 2 + embeddings, rel=1e-3)
    assert half["kv"] * 2 == all_on["kv"] == whole["kv"]
    assert none["kv"] == 0
    assert none["weights"] == pytest.approx(0, abs=1 << 20)
    # A head that is the table of embeddings is copied to the device.
    tied = plan("llama-3.2-1b", engine="llamacpp", n_gpu_layers=99).total("llamacpp")
    assert tied == pytest.approx(plan("llama-3.2-1b", engine="llamacpp").total("llamacpp"), rel=1e-3)


def test_experts_on_the_cpu_leave_the_cells_on_the_device():
    of = {"engine": "llamacpp", "weights": "q4_k_m", "device": "rtx3060"}
    assert "--n-cpu-moe" in plan("qwen3-30b-a3b", **of).what_would_fit("llamacpp")
    whole, moved = plan("qwen3-30b-a3b", **of), plan("qwen3-30b-a3b", **of, n_cpu_moe=48)
    assert moved.fits("llamacpp", moved.memory)
    assert not whole.fits("llamacpp", whole.memory)
    assert [part for part in moved.parts if part.kind == "kv"] == [part for part in whole.parts if part.kind == "kv"]
    (note,) = (note for note in moved.notes if "in the computer's memory" in note)
    assert note.endswith("of weights, the table of embeddings included, and 0 B of K and V")


def test_the_command_plans_layers_on_the_cpu():
    printed = succeeded(command("plan", "--model", "llama-3.1-8b", "--weights", "q8_0", "--ngl", "17"))
    assert "weights, 16 of 32 layers" in printed
    assert "note: left out: --ngl: llama.cpp has it and vLLM has not" in printed
