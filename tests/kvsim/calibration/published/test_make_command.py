"""``kvsim profile make`` with the made-up package: files, what is printed, and refusals."""

import json
from functools import partial

import pytest

from kvsim.calibration.published.make import make_profile
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.load_profile import load_profile
from tests.kvsim.cli.answers import complaint, succeeded
from tests.worlds import command

pytestmark = pytest.mark.slow

H100 = ("profile", "make", "--device", "h100_sxm", "--model", "llama-3.1-8b")


@pytest.fixture(autouse=True)
def own_folders(package, tmp_path, monkeypatch):
    """Profiles and caches that are no user's."""
    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path / "own"))
    monkeypatch.setattr("kvsim.calibration.published.make.user_cache_path", lambda *a, **k: tmp_path / "cache")


@pytest.fixture
def few_passes(monkeypatch):
    """For tests that do not look at how well the profile predicts; one of this file prices as many as users do."""
    monkeypatch.setattr("kvsim.calibration.published.make.make_profile", partial(make_profile, passes=400))


def test_a_profile_is_saved_where_scenarios_look_for_it(tmp_path):
    printed = succeeded(command(*H100, "--tp", "2", "--weights", "fp8"))
    for said in ("h100_sxm-llama-3.1-8b-tp2-fp8", "NVIDIA's aiconfigurator-core 9.9", "Apache-2.0", "held out"):
        assert said in printed
    assert (tmp_path / "own" / "h100_sxm-llama-3.1-8b-tp2-fp8.png").is_file()
    assert find_device_profile("llama-3.1-8b", "h100_sxm", tp=2, weights="fp8").weights == "fp8"


def test_a_profile_is_saved_under_another_name_and_told_in_json(tmp_path, few_passes):
    out = tmp_path / "mine.json"
    told = json.loads(succeeded(command(*H100, "--engine", "sglang", "--host-ms", "0.5", "--out", str(out), "--json")))
    assert told["files"] == [str(out), str(out.with_suffix(".png"))]
    profile = load_profile(str(out))
    assert told["profile"] == profile.model_dump(mode="json")
    assert (profile.engine, profile.host.seconds) == ("sglang 0.24.0", 0.0005)


def test_a_model_given_as_config_json_only(tmp_path, few_passes):
    fields = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    fields |= {"intermediate_size": 96, "vocab_size": 100, "head_dim": 32, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    out = tmp_path / "mine.json"
    succeeded(command("profile", "make", "--device", "l40s", "--model", str(tmp_path), "--out", str(out)))
    assert load_profile(str(out)).cells.high <= 4_096


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--device", "h100"), "no device called 'h100'; did you mean 'h100_sxm' or"),
        (("--device", "rtx4090"), "aiconfigurator-core has no kernels of rtx4090"),
        (("--model", "gemma-2-9b"), "not asked about model_type 'gemma2'"),
        (("--engine", "sglang"), "--out: needed with --engine sglang"),
        (("--weights", "q4_k_m"), "no type of weights called 'q4_k_m'"),
        (("--tp", "7"), "32 attention heads"),
        (("--out", "mine.txt"), "a file whose name ends in .json is expected"),
    ],
)
def test_bad_input_is_answered_in_a_line_and_writes_nothing(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in complaint(command(*H100, *given))
    assert not (tmp_path / "own").exists()
    assert not list(tmp_path.glob("*.txt"))
