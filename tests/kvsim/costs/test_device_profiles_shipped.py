"""The profiles of devices that ship: what each says of its source, and how well it fits."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from kvsim.costs.device_profiles import device_profiles, find_device_profile, profile_name
from kvsim.costs.load_profile import load_profile
from kvsim.costs.physics import PassPhysics
from kvsim.costs.shipped import is_shipped
from kvsim.model.memory_shapes import memory_shape
from tests.paths import ROOT

SHIPPED = [name for name in device_profiles() if is_shipped(name)]
PACKAGE = "aiconfigurator-core"


def installed():
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_is_named_after_what_it_is_of_and_says_its_source(name):
    profile = load_profile(name)
    shape = memory_shape(profile.model)
    same = {"tp": profile.tensor_parallel, "ep": profile.expert_parallel, "weights": profile.weights}
    assert profile.name == name == profile_name(shape, profile.device, **same)
    assert find_device_profile(profile.model, profile.device, **same) == profile
    assert profile.source.url.startswith("https://github.com/")
    assert profile.source.licence
    assert profile.source.version
    assert profile.host is None
    assert profile.tokens.high >= 2_048


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_predicts_passes_that_are_not_in_its_tables_or_says_that_it_does_not(name):
    profile = load_profile(name)
    said = " ".join(profile.source.notes)
    assert set(profile.held_out) == {"decode", "mixed"}
    for regime, error in profile.held_out.items():
        fits = error.error_median <= 0.02 and error.error_p95 <= 0.1
        assert fits != (f"In {regime} passes the error is" in said)
        # What DeepSeek's attention takes for a prompt does not go by its tokens and their cells alone.
        assert error.error_median < (0.08 if profile.model == "deepseek-v3" else 0.03)
        assert error.samples >= 20


def test_the_devices_rank_as_their_bandwidths_do():
    def decode(device):
        return find_device_profile("llama-3.1-8b", device).tables.work.seconds[0]

    ranks = sorted(["h100_sxm", "a100_sxm", "l40s", "h200_sxm", "b200_sxm"], key=decode)
    assert ranks == ["b200_sxm", "h200_sxm", "h100_sxm", "a100_sxm", "l40s"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_sxm-qwen3-14b", "a100_sxm-llama-3.1-8b"])
def test_a_shipped_profile_has_what_the_package_says_now(name):
    from kvsim.calibration.published.make import SEED
    from kvsim.calibration.published.package import ask, package_parts, package_passes

    profile = load_profile(name)
    if installed() != profile.source.version:
        pytest.skip(f"{PACKAGE} {profile.source.version} is not installed (extra gpu)")
    question = ask(profile.device, profile.model)
    samples = package_passes(question, np.random.default_rng(SEED))
    raw = json.dumps([s.model_dump() for s in samples], sort_keys=True)
    assert hashlib.sha256(raw.encode()).hexdigest() == profile.digest
    physics = PassPhysics(question.device, question.shape, question.weights)
    assert package_parts(question).tables(physics) == profile.tables


def test_the_notice_names_each_file_of_profiles_of_devices():
    notice = (ROOT / "NOTICE").read_text()
    for name in SHIPPED:
        of_package = PACKAGE in load_profile(name).source.title
        assert (f"{load_profile(name).device}.jsonl.gz" if of_package else f"{name}.json") in notice


def test_what_users_ask_about_most_is_shipped():
    """In fp8 not on a B200, where the package has one token take longer than eight."""
    for name in ("qwen3-32b-tp2", "llama-3.3-70b-tp4", "qwen3-30b-a3b", "qwen3-8b"):
        assert {f"{device}-{name}" for device in ("h100_sxm", "h200_sxm", "b200_sxm")} <= set(SHIPPED)
    for name in ("qwen3-32b-fp8", "llama-3.1-70b-tp2-fp8"):
        assert {f"{device}-{name}" for device in ("h100_sxm", "h200_sxm")} <= set(SHIPPED)
