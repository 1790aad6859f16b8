"""Shapes of models by name, from a config.json and from GGUF files, and models as the keys of a config.json."""

import json
from pathlib import Path

import pytest

from kvsim.costs.memory_plan import plan
from kvsim.errors import LIMITS, UserError
from kvsim.model.config_shapes import shape_of_config
from kvsim.model.memory_shapes import config_fields, memory_shape, model_names
from tests.gguf_files import Small

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "smollm2-135m": 134_515_008,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "kimi-k2.5": 1_026_408_232_448,
    "minimax-m2.5": 228_703_644_928 - 13_880_064,  # Scales: one for each block of 128 x 128 weights.
    "command-r7b": 8_028_033_024,
    "lfm2-1.2b": 1_170_340_608,
    "mamba-2.8b": 2_768_345_600,
    "falcon-mamba-7b": 7_272_665_088,
    "mamba-codestral-7b": 7_285_403_648,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "minimax-text-01": 456_089_655_296,
    "kimi-k3": 2_779_484_476_000,  # Its files, whose 69 padded diagonals of 128 numbers have 96; without vision.
}
"""As the model cards on Hugging Face count them."""

COUNTED = {
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "jamba-1.5-mini": 51_570_323_328,
    "nemotron-h-8b": 8_100_852_736,
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-micro": 3_191_396_096,
    "lfm2-8b-a1b": 8_339_929_856,
    "falcon-h1-7b": 7_585_513_568,
    "bamba-9b": 9_780_235_392,
    "llama-4-scout": 107_769_861_120,
    "gemma-3n-e4b": 6_835_235_568,
    "glm-4.7-flash": 29_943_390_976 + 46 * 64,  # Corrections of routers, which are buffers there.
    "zamba2-7b": 7_356_749_648,
    "olmo-hybrid-7b": 7_430_870_688,
    "deepseek-v3.2": 671_877_929_216 + 58 * 256,
}
"""As the models of transformers 5.19 count them, made of these keys; without vision, audio, and heads that draft."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_add_up_to_the_models_parameters(name):
    assert memory_shape(name).n_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", COUNTED)
def test_shapes_add_up_to_what_the_library_that_runs_them_counts(name):
    # It has no K and V where Gemma 3n shares them, and no place for LFM2's corrections; files have both.
    assert memory_shape(name).n_parameters == pytest.approx(COUNTED[name], rel=0.005)
    if name not in ("gemma-3n-e4b", "lfm2-8b-a1b"):
        assert memory_shape(name).n_parameters == COUNTED[name]


GROUPS = {
    "qwen3-next-80b-a3b": [("full", 12, 512), ("state", 36, (24_576, 524_288))],
    "jamba-1.5-mini": [("full", 4, 1024), ("state", 28, (24_576, 131_072))],
    "nemotron-h-8b": [("full", 4, 1024), ("state", 24, (30_720, 1_048_576))],
    "falcon-h1-7b": [("full", 44, 256), ("state", 44, (10_752, 786_432))],
    "zamba2-7b": [("full", 13, 7168), ("state", 81, (22_272, 458_752))],
    "olmo-hybrid-7b": [("full", 8, 3840), ("state", 24, (34_560, 552_960))],
    "lfm2-1.2b": [("full", 6, 512), ("state", 10, (4096, 0))],
    "kimi-linear-48b-a3b": [("latent", 7, 576), ("state", 20, (36_864, 524_288))],
    "kimi-k3": [("latent", 24, 576), ("state", 69, (110_592, 1_572_864))],
    "minimax-text-01": [("full", 10, 1024), ("state", 70, (0, 1_048_576))],
    "mamba-2.8b": [("state", 64, (15_360, 81_920))],
    "llama-4-scout": [("full", 12, 1024), ("chunked", 36, 1024)],
    "gemma-3n-e4b": [("full", 4, 512), ("window", 16, 512)],
    "glm-4.7-flash": [("latent", 47, 576)],
    "deepseek-v3.2": [("latent", 61, 576), ("index", 61, 128)],
    "command-r7b": [("full", 8, 1024), ("window", 24, 1024)],
}


@pytest.mark.parametrize("name", GROUPS)
def test_layers_cache_tokens_or_keep_a_state(name):
    shape = memory_shape(name)
    found = [(g.kind, g.layers, g.state.numbers() if g.state else g.k_row) for g in shape.groups]
    assert found == GROUPS[name]
    assert all(group.k_row == group.v_row == 0 for group in shape.states)


def test_layers_that_share_a_cache_are_its_readers():
    shape = memory_shape("gemma-3n-e4b")
    assert [group.readers for group in shape.groups] == [3, 12]
    assert shape.n_layers == 35


def test_each_of_several_devices_has_the_groups_that_its_heads_need():
    # mamba2_state_shape of vLLM: one group on each of two devices.
    (state,) = (group.state for group in memory_shape("granite-4.0-h-small").states)
    assert state.numbers(2) == (3 * (8192 + 2 * 2 * 128) // 2, 128 * 64 * 128 // 2)
    (of_eight,) = (group.state for group in memory_shape("nemotron-h-8b").states)
    assert of_eight.numbers(8) == (30_720 // 8, 1_048_576 // 8)


STATEFUL = {
    "granitehybrid": ({"attention.head_count_kv": [0, 2, 0]}, 1, 2, (3 * (128 + 2 * 16), 16 * 128)),
    "jamba": ({"attention.head_count_kv": [0, 2, 0], "ssm.group_count": None}, 1, 2, (3 * 128, 16 * 128)),
    "falcon-h1": ({}, 3, 3, (3 * (128 + 2 * 16), 16 * 128)),
    "qwen3next": ({"full_attention_interval": 3}, 1, 2, (3 * (128 + 2 * 16), 16 * 128)),
    "mamba2": ({"attention.head_count": 0, "feed_forward_length": 0}, 0, 3, (3 * (128 + 2 * 16), 16 * 128)),
    "lfm2": ({"attention.head_count_kv": [0, 0, 2], "shortconv.l_cache": 3}, 1, 2, (2 * 64, 0)),
    "nemotron_h": (
        {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 96]},
        1,
        1,
        (3 * (128 + 2 * 16), 16 * 128),
    ),
    "kimi-linear": (
        {"attention.head_count_kv": [0, 1, 0], "kda.head_dim": 16, "attention.kv_lora_rank": 32}
        | {"attention.key_length_mla": 24, "attention.value_length_mla": 16},
        1,
        2,
        (3 * 3 * 4 * 16, 16 * 16 * 4),
    ),
    "rwkv7": ({"wkv.head_size": 16}, 0, 3, (2 * 64, 64 * 16)),
}
"""Keys of an architecture, its layers with attention and with a state, and the numbers of that state."""


@pytest.mark.parametrize("arch", STATEFUL)
def test_a_gguf_file_says_which_layers_keep_a_state(tmp_path, arch):
    told, attention, kept, numbers = STATEFUL[arch]
    own = {"block_count": 3, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    own |= {"attention.key_length": 32, "attention.value_length": 32, "feed_forward_length": 96}
    own |= {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 1} | told
    fields = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in own.items()}
    shape = memory_shape(str(Small(fields=fields).write(tmp_path / "small.gguf")))
    assert sum(group.layers for group in shape.cells) == attention
    assert [(group.layers, group.state.numbers()) for group in shape.states] == [(kept, numbers)]
    assert shape.n_layers == 3
    assert {group.kind for group in shape.cells} <= {"latent" if arch == "kimi-linear" else "full"}


def test_plm_and_minicpm3_cache_by_head_in_gguf_files(tmp_path):
    own = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 4}
    own |= {"attention.key_length": 24, "feed_forward_length": 96, "attention.kv_lora_rank": 32}
    for arch, only in (("minicpm3", ""), ("plm", "llamacpp")):
        fields = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in own.items()}
        shape = memory_shape(str(Small(fields=fields).write(tmp_path / "small.gguf")))
        assert [(g.kind, g.layers, g.k_row, g.v_row) for g in shape.groups] == [("full", 2, 4 * 24, 4 * 16)]
        assert shape.only == only


LATENT = {
    "block_count": 4,
    "embedding_length": 64,
    "context_length": 4096,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "feed_forward_length": 96,
}
INDEX = {"attention.indexer.head_count": 2, "attention.indexer.key_length": 16, "attention.indexer.top_k": 8}
DELTA = {"attention.head_count_kv": [0, 0, 0, 1], "kda.head_dim": 16, "ssm.conv_kernel": 4}
SPARSE = {
    "deepseek32": (INDEX, [("latent", 4, 48), ("index", 4, 16)]),
    "glm-dsa": (INDEX, [("latent", 4, 48), ("index", 4, 16)]),
    "glm-dsa, of a long context": (INDEX | {"context_length": 1 << 20}, [("latent", 4, 48), ("index", 3, 16)]),
    "glm-dsa, told": (INDEX | {"attention.indexer.types": [1, 0, 0, 0]}, [("latent", 4, 48), ("index", 1, 16)]),
    "hy_v4": ({}, [("latent", 4, 48)]),
    "hy_v4, sparse": (INDEX | {"attention.indexer.types": [1, 0, 1, 0]}, [("latent", 4, 48), ("index", 2, 16)]),
    "kimi-k3": (DELTA, [("latent", 1, 48), ("state", 3, (3 * 3 * 64, 16 * 64))]),
    "bailingmoe3": (DELTA, [("latent", 1, 48), ("state", 3, (3 * 3 * 64, 16 * 64))]),
    "glm5-next": (
        INDEX | DELTA | {"attention.indexer.kpool": 4},
        [("latent", 1, 48), ("index", 1, 48), ("state", 3, (3 * 3 * 64, 16 * 64))],
    ),
    "qwen4exp": (
        INDEX
        | {"attention.key_length_mla": None, "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
        | {"ssm.group_count": 1, "ple.layers": [1], "ple.ngram_size": 3, "ple.conv_kernel": 4}
        | {"hyper_connection.count": 4},
        [("full", 1, 48), ("index", 1, 16), ("state", 3, (3 * 160, 2048)), ("state", 1, (3 * 3 * 4 * 64, 0))],
    ),
}
"""Keys of an architecture beside ``LATENT``, and its groups (llama.cpp 0c1e570, ``models/*.cpp``)."""


@pytest.mark.parametrize("name", SPARSE)
def test_a_gguf_file_says_which_layers_have_latents_and_indexers(tmp_path, name):
    told, groups = SPARSE[name]
    arch = name.partition(",")[0]
    fields = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in (LATENT | told).items()}
    shape = memory_shape(str(Small(fields=fields).write(tmp_path / "small.gguf")))
    assert [(g.kind, g.layers, g.state.numbers() if g.state else g.k_row) for g in shape.groups] == groups


def test_only_the_experts_of_kimi_are_narrow():
    # The tensors of its 96 files have 1,453.66 GiB, with 0.86 of vision.
    assert memory_shape("kimi-k3").parameters == {"default": 56_743_645_792, "mxfp4": 92 * 896 * 3 * 3072 * 3584}
    weights = sum(part.bytes for part in plan("kimi-k3", engine="vllm").parts if part.kind == "weights")
    assert weights / 2**30 == pytest.approx(1453.66 - 0.86, abs=0.05)
    shape = memory_shape("kimi-k2.5")
    assert shape.parameters == {"default": 1_026_408_232_448 - 60 * 384 * 3 * 7168 * 2048, "int4_g32": 1014686023680}


PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "torch_dtype": "float16",
}


def config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in (PLAIN | changes).items() if value is not ...}))
    return str(path)


def test_a_multimodal_config_has_its_text_model_inside(tmp_path):
    path = tmp_path / "config.json"
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    path.write_text(json.dumps({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}))
    shape = memory_shape(str(path))
    assert shape.groups == memory_shape("gemma-3-4b").groups
    assert shape.n_parameters == memory_shape("gemma-3-4b").n_parameters


def test_layer_types_say_which_layers_have_a_window(tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    shape = memory_shape(config(tmp_path, model_type="gemma2", layer_types=kinds, sliding_window=64))
    assert [(group.kind, group.layers, group.window) for group in shape.groups] == [
        ("full", 2, None),
        ("window", 2, 64),
    ]
    off = memory_shape(config(tmp_path, model_type="qwen2", sliding_window=64, use_sliding_window=False))
    assert [group.kind for group in off.groups] == ["full"]
    some = memory_shape(
        config(tmp_path, model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3)
    )
    assert [(group.kind, group.layers) for group in some.groups] == [("full", 3), ("window", 1)]


BAD_CONFIGS = {
    "unknown kind": (
        {"model_type": "rwkv"},
        "model_type is 'rwkv'; its layers are not known here; accepted: llama",
    ),
    "odd kind": ({"model_type": {}}, "model_type is {}; its layers are not known here"),
    "no kind": ({"model_type": ...}, "model_type is None; "),
    "missing": ({"hidden_size": ...}, "config.json: hidden_size: field required"),
    "text": ({"num_hidden_layers": "4"}, "num_hidden_layers: input should be a valid integer, got '4'"),
    "negative": ({"vocab_size": -1}, "vocab_size: input should be greater than or equal to 1, got -1"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads is 3; a divisor of num_attention_heads (4) is accepted"),
    "head size": (
        {"hidden_size": 66},
        "head_dim: field required where num_attention_heads does not divide hidden_size",
    ),
    "linear": ({"layer_types": ["linear_attention"] * 4}, "layer_types: 'linear_attention' is not planned; acc"),
    "parallel": ({"layer_types": ["parallel"] * 4}, "layer_types: 'parallel' is not planned; accepted: full_att"),
    "too few": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    "no window": ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: field required where layer_types has "),
    "no experts": ({"model_type": "mixtral"}, "num_local_experts: field required where model_type is mixtral"),
    "half a latent": ({"model_type": "deepseek_v3"}, "kv_lora_rank: field required where model_type is deepseek_v3"),
    "sparse": ({"decoder_sparse_step": 2}, "decoder_sparse_step, moe_layer_freq and mlp_only_layers: only "),
    "odd pattern": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": 7},
        "keys of nemotron_h that are not as its config.json has them",
    ),
    "no layer types": ({"model_type": "lfm2"}, "layer_types: field required where model_type is lfm2"),
    "no state": (
        {"model_type": "granitemoehybrid", "layer_types": ["linear"] * 4, "shared_intermediate_size": 64},
        "layer_types: 'linear' is not planned; accepted: full_attention, attention",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method 'awq' is not known here; give --weig",
    ),
    "unknown dtype": ({"torch_dtype": "int3"}, "torch_dtype 'int3' is not known here; give --weights, one of "),
    "narrow heads": ({"head_dim": 16}, "q8_0 has blocks of 32, which do not divide heads of 16"),
}


@pytest.mark.parametrize(("changes", "answer"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_cannot_be_planned_is_refused_in_one_line(tmp_path, changes, answer):
    with pytest.raises(UserError) as said:
        plan(config(tmp_path, **changes), type_k="q8_0")
    assert answer in str(said.value)
    assert "\n" not in str(said.value)


BAD_FILES = {
    "unknown": ({"general.architecture": "t5"}, "architecture 't5': its layers are not known here; accepted: "),
    "split": ({"split.count": 3}, "split.count is 3; a file in one piece is accepted"),
    "no layers": ({"llama.block_count": 0}, "llama.block_count is 0; a whole number from 1 to 4096 is expected"),
    "layers without attention": (
        {"llama.attention.head_count_kv": [2, 0]},
        "head_count_kv: a list of 2; 2 whole numbers",
    ),
    "no window": ({"general.architecture": "gemma2"}, "gemma2.block_count is None; "),
}


@pytest.mark.parametrize(("fields", "answer"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_gguf_file_that_cannot_be_planned_is_refused_in_one_line(tmp_path, fields, answer):
    with pytest.raises(UserError) as said:
        memory_shape(str(Small(fields=fields).write(tmp_path / "odd.gguf")))
    assert answer in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("case", ["unknown kind", "linear", "unknown", "layers without attention"])
def test_what_is_not_simulated_is_refused_with_the_page_that_says_what_is_not(tmp_path, case):
    if case in BAD_CONFIGS:
        model = config(tmp_path, **BAD_CONFIGS[case][0])
    else:
        model = str(Small(fields=BAD_FILES[case][0]).write(tmp_path / "odd.gguf"))
    with pytest.raises(UserError, match=LIMITS):
        memory_shape(model)
    assert (Path(__file__).parents[3] / "docs" / "limits.md").is_file()


# As the keys of a config.json


@pytest.mark.parametrize("name", model_names())
def test_the_keys_of_a_shipped_model_have_its_shape_and_no_more(name):
    fields = config_fields(name)
    assert "source" not in fields
    assert shape_of_config(fields, name, memory_shape(name).source) == memory_shape(name)


def test_a_config_json_is_returned_as_it_is_by_file_and_by_folder(tmp_path):
    added = {"quantization_config": {"quant_method": "fp8"}, "own": 1}
    path = config(tmp_path, **added)
    assert config_fields(path) == config_fields(str(tmp_path)) == PLAIN | added


def test_of_a_multimodal_model_the_text_part_is_returned(tmp_path):
    text = {key: value for key, value in PLAIN.items() if key != "torch_dtype"} | {"model_type": "gemma3_text"}
    written = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert config_fields(str(tmp_path)) == {**text, "torch_dtype": "bfloat16"}


def test_the_keys_of_a_gguf_file_are_those_of_its_header(tmp_path):
    path = Small().write(tmp_path / "small.gguf")
    fields, shape = config_fields(str(path)), memory_shape(str(path))
    again = shape_of_config(fields, shape.name, shape.source)
    for key in ("groups", "d_model", "n_heads", "d_ff", "vocabulary", "context"):
        assert getattr(again, key) == getattr(shape, key), key
    assert fields["model_type"] == "llama"


def test_own_models_have_keys_too():
    assert config_fields("tiny")["num_hidden_layers"] == memory_shape("tiny").n_layers


def test_a_gguf_file_that_says_too_little_is_refused_in_a_line(tmp_path):
    own = {"block_count": 12, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    own |= {"attention.key_length": 32, "attention.value_length": 32, "feed_forward_length": 96}
    fields = {f"gemma3.{key}": value for key, value in (own | {"attention.sliding_window": 512}).items()}
    path = Small(fields={"general.architecture": "gemma3", **fields}).write(tmp_path / "gemma.gguf")
    with pytest.raises(UserError, match=r"gemma3.*give the config\.json of the model instead; accepted: llama") as said:
        config_fields(str(path))
    assert "\n" not in str(said.value)
