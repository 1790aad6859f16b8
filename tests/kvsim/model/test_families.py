"""Families by the config.json of a published model, beside those that are shipped by name."""

import json
import re
from dataclasses import replace

import pytest

from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import plan
from kvsim.costs.physics import PassPhysics
from kvsim.costs.vllm_blocks import BlockGroups
from kvsim.errors import UserError
from kvsim.model.config_shapes import shape_of_config
from kvsim.model.memory_shapes import config_fields, memory_shape
from tests.docs.pages import sections
from tests.gguf_files import Small
from tests.kvsim.model.configs import CONFIGS


def saved(folder, name):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name].config))
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_caches_are_those_of_the_libraries_that_run_them(name):
    known = CONFIGS[name]
    shape = shape_of_config(known.config, name, known.source)
    assert shape.n_parameters == known.parameters
    found = [(g.kind, g.layers, g.state.numbers() if g.state else g.k_row + g.v_row) for g in shape.groups]
    assert found == known.groups


def test_what_olmo_hybrid_leaves_out_follows_from_its_attention():
    told = config_fields("olmo-hybrid-7b")
    shorter = {key: value for key, value in told.items() if not key.startswith("linear_")}
    assert shape_of_config(shorter, "a", "b") == shape_of_config(told, "a", "b")


def test_vllm_pads_values_to_the_width_of_keys(tmp_path):
    made = plan(saved(tmp_path, "minicpm3-4b"), ctx=1024)
    assert BlockGroups.of(made.shape, made.settings).block_bytes == 16 * 62 * 2 * 40 * 96 * 2
    keys_and_values = sum(part.bytes for part in made.parts if (part.engine, part.kind) == ("llamacpp", "kv"))
    assert keys_and_values == 1024 * 62 * 40 * (96 + 64) * 2


GLM_5_2 = [i < 3 or i % 4 == 2 for i in range(78)]
"""Layers with an indexer of their own, as llama.cpp has them where the file does not say (``models/glm-dsa.cpp``)."""


@pytest.mark.parametrize(
    "told",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join("F" if own else "S" for own in GLM_5_2)},
        {"indexer_types": ["full" if own else "shared" for own in GLM_5_2], "layer_types": ["indexed_attention"] * 78},
    ],
    ids=str,
)
def test_layers_may_choose_tokens_as_the_one_before(told):
    full = shape_of_config(CONFIGS["glm-5"].config, "", "")
    shape = shape_of_config(CONFIGS["glm-5"].config | told, "", "")
    assert [(group.kind, group.layers) for group in shape.groups] == [("latent", 78), ("index", 21)]
    one = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert full.n_parameters - shape.n_parameters == (78 - 21) * one


def test_an_index_that_is_told_wrongly_is_refused():
    with pytest.raises(UserError, match="indexer_types: 78 of full and shared are accepted"):
        shape_of_config(CONFIGS["glm-5"].config | {"index_topk_pattern": "FS"}, "", "")


def test_the_page_lists_what_is_known(tmp_path):
    told = [set(re.findall("`([a-z0-9_-]+)`", part)) for part in sections("plan.md")["Architectures"].split("\n\n")]
    with pytest.raises(UserError) as refused:
        shape_of_config({"model_type": "t5"}, "", "")
    assert accepted(refused) == told[2]
    with pytest.raises(UserError) as refused:
        memory_shape(str(Small(fields={"general.architecture": "t5"}).write(tmp_path / "odd.gguf")))
    assert accepted(refused) == told[4]


def accepted(refused):
    """The names that a refusal lists."""
    return set(str(refused.value).partition("accepted: ")[2].partition(";")[0].split(", "))


def test_an_engine_that_does_not_run_a_family_is_left_out(tmp_path):
    path = saved(tmp_path, "a.x-k1")
    made = plan(path)
    assert made.engines == ("vllm",)
    assert any("llama.cpp is not known here to run this architecture" in note for note in made.notes)
    with pytest.raises(UserError, match=r"llama\.cpp is not known here to run"):
        plan(path, engine="llamacpp")


def test_a_block_that_layers_share_is_stored_once_and_used_by_each():
    shape = memory_shape("zamba2-7b")
    block = 3 * 7168**2 + 7168 * 3584 + 3 * 3584 * 14336 + 7168 + 3584
    assert shape.repeated == (13 - 2) * block
    stored = sum(t.numbers * len(t.layers) for t in shape.tensors if t.kind == "attn_q")
    assert stored == 2 * 7168**2
    shared, apart = (
        PassPhysics(device_named("h100_sxm"), replace(shape, repeated=n), "bf16").matrices([1, 4096])
        for n in (shape.repeated, 0)
    )
    more = 1 + shape.repeated / shape.matrices.numbers
    assert shared.reading_s / apart.reading_s == pytest.approx(more)
    assert shared.computing_s / apart.computing_s == pytest.approx(more)
