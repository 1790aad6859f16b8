"""Profiles made with a package: what they carry, and when they are made anew."""

import pandas as pd
import pytest

from kvsim.calibration.published.make import make_profile
from kvsim.calibration.published.package_names import WEIGHTS
from kvsim.costs.cost_model import CostModel
from kvsim.costs.profile import Host, Profile
from tests.kvsim.calibration.published.packages import BASE_MS, TOKEN_MS

pytestmark = pytest.mark.slow


@pytest.fixture
def make(package, tmp_path):
    """A function that makes a profile from few passes, and says by ``len(package.asked)`` whether it asked for them."""

    def profile(device="h100_sxm", model="llama-3.1-8b", passes=400, **given):
        return make_profile(device, model, passes=passes, cache=tmp_path / "cache", **given)

    return profile


def test_a_profile_says_what_it_is_of_and_prices_passes(make, tmp_path):
    made = make(tp=2, weights="fp8", host_ms=1).profile
    assert (made.name, made.engine) == ("h100_sxm-llama-3.1-8b-tp2-fp8", "vllm 0.24.0")
    assert (made.device, made.tensor_parallel, made.weights, made.host) == (
        "h100_sxm",
        2,
        "fp8",
        Host(seconds=1e-3, source="given with --host-ms"),
    )
    assert made.source.licence == "Apache-2.0"
    assert {regime: error.error_p95 < 0.01 for regime, error in made.held_out.items()} == {
        "decode": True,
        "mixed": True,
    }
    price = CostModel(made).pass_price("gather")
    assert price.regime(1, 1).base_s == 1e-3
    assert price.regime(1, 1).matrix_s(1) == pytest.approx((BASE_MS + TOKEN_MS) / 1e3)
    made.save(tmp_path / "p.json")
    assert Profile.model_validate_json((tmp_path / "p.json").read_text()) == made


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_of_every_type_have_a_size(make, weights):
    made = make(weights=weights).profile
    assert made.weights == weights
    assert made.tables.work.seconds[0] > 0


def test_a_profile_is_made_once_for_the_same_inputs(make, package, monkeypatch):
    one, asked = make(), len(package.asked)
    again = make()
    assert len(package.asked) == asked
    assert again.profile == one.profile
    pd.testing.assert_frame_equal(again.held_out, one.held_out)
    for given in (
        {"model": "llama-3-8b"},
        {"device": "a100_sxm"},
        {"tp": 2},
        {"weights": "fp8"},
        {"engine": "sglang"},
        {"engine_version": "0.27.0"},
        {"passes": 401},
        {"host_ms": 2},
    ):
        before = len(package.asked)
        make(**given)
        assert len(package.asked) == before + 1, given
    for what in (
        "kvsim.calibration.published.make.code_version",
        "kvsim.calibration.published.package.package_version",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, lambda: "another")
            before = len(package.asked)
            make()
            assert len(package.asked) == before + 1, what


def test_a_changed_config_json_is_another_model(make, package, tmp_path):
    text = """{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 4096}"""
    (tmp_path / "config.json").write_text(text)
    make(model=str(tmp_path))
    (tmp_path / "config.json").write_text(text.replace("96", "128"))
    before = len(package.asked)
    make(model=str(tmp_path))
    assert len(package.asked) == before + 1


def test_what_was_kept_and_is_damaged_is_made_anew(make, package, tmp_path):
    one = make().profile
    for kept in (tmp_path / "cache").iterdir():
        kept.write_text("{")
    assert make().profile == one
    assert len(package.asked) == 2


def test_a_cache_that_cannot_be_written_is_no_error(package, tmp_path):
    (tmp_path / "cache").write_text("a file")
    made = make_profile("h100_sxm", "llama-3.1-8b", passes=400, cache=tmp_path / "cache")
    assert made.profile.held_out_samples == 400


def test_without_a_folder_the_users_cache_is_used(package, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.calibration.published.make.user_cache_path", lambda *a, **k: tmp_path / "user")
    make_profile("h100_sxm", "llama-3.1-8b", passes=400)
    assert {kept.suffix for kept in (tmp_path / "user" / "device-profiles").iterdir()} == {".csv", ".json"}


def test_what_the_host_adds_is_no_part_of_a_profile_unless_it_is_given(make):
    assert make().profile.host is None
    assert "what sglang adds was not measured" in make(engine="sglang").profile.basis
