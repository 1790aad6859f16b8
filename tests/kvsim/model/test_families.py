"""Families by the config.json of a published model, beside those that are shipped by name."""

import json

import pytest

from kvsim.costs.memory_plan import plan
from kvsim.errors import UserError
from kvsim.model.config_shapes import shape_of_config
from tests.kvsim.model.configs import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_caches_are_those_of_the_libraries_that_run_them(name):
    known = CONFIGS[name]
    shape = shape_of_config(known.config, name, known.source)
    assert shape.n_parameters == known.parameters
    found = [(g.kind, g.layers, g.state.numbers() if g.state else g.k_row + g.v_row) for g in shape.groups]
    assert found == known.groups


def test_an_engine_that_does_not_run_a_family_is_left_out(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["a.x-k1"].config))
    made = plan(str(path))
    assert made.engines == ("vllm",)
    assert any("llama.cpp does not run this architecture" in note for note in made.notes)
    with pytest.raises(UserError, match=r"llama\.cpp does not run this architecture"):
        plan(str(path), engine="llamacpp")
