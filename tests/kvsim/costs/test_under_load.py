"""What servers under load add to kernels alone: by engine and version, by device, and no more than was fitted."""

import pytest

from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.under_load import ALONE, Host, host_share
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.set_up import cost_model, profile_of
from kvsim.simulation.time_breakdown import SECONDS, TERMS
from policies import Group
from policies.placement.rule import PassReads

ON_H100 = load_profile("h100_sxm-llama-3.1-8b")
ON_4090 = load_profile("rtx4090-llama-3.1-8b")
SLOW_HOST = Host(seconds=0.0, least_s=0.02, source="this test")


def seconds(profile, decodes, prompt=0):
    """A pass of decodes at 500 cells, and perhaps a prompt."""
    scans = [(1, 500)] * decodes + ([(prompt, prompt)] if prompt else [])
    work = PassReads.counted(decodes + prompt, len(scans), 0, scans)
    return PassPrice(profile, "gather", (Group(0),)).seconds(work)


def alone(profile):
    """The profile without anything that a server under load adds."""
    return profile.model_copy(update={"host": ALONE, "source": profile.source.model_copy(update={"title": "tables"})})


@pytest.mark.parametrize("version", ["0.5.4", "0.12.0", "v0.13.1"])
def test_the_host_of_a_vllm_that_composes_steps_one_by_one_adds_to_each_and_for_each_sequence(version):
    served = alone(ON_H100).model_copy(update={"host": host_share(f"vllm {version}")})
    more = [seconds(served, n) - seconds(alone(ON_H100), n) for n in (1, 2, 65)]
    assert 1e-3 < more[0] < 2e-3
    assert more[2] - more[1] == pytest.approx(63 * (more[1] - more[0]))
    assert 2e-5 < more[1] - more[0] < 5e-5


@pytest.mark.parametrize("version", ["0.14.0", "0.23.0", "1.0", "nightly"])
def test_the_host_of_one_that_composes_ahead_is_hidden_behind_the_device(version):
    host = host_share(f"vllm {version}")
    assert (host.seconds, host.sequence_s) == (0, 0)
    assert host.least_s == host_share("vllm 0.12.0").seconds


def test_of_other_engines_nothing_is_known_and_that_is_said():
    assert host_share("llama.cpp") is None
    assert host_share("sglang 0.5.6") == Host(seconds=0.0, source="what sglang adds was not measured")


def test_no_step_is_shorter_than_its_host_takes():
    slow = alone(ON_4090).model_copy(update={"host": SLOW_HOST})
    assert seconds(alone(ON_4090), 1) < 0.02 < seconds(alone(ON_4090), 100)
    assert seconds(slow, 1) == pytest.approx(0.02)
    assert seconds(slow, 100) == seconds(alone(ON_4090), 100)


def test_the_wait_for_the_host_is_in_the_account_of_where_time_goes(tmp_path):
    slow = alone(ON_4090).model_copy(update={"host": SLOW_HOST})
    slow.save(tmp_path / "slow.json")
    scenario = load_scenario("gpu-chat", workload__requests=30, machine__profile=str(tmp_path / "slow.json"))
    result = run(scenario, "vllm", detail="tables")
    passes, causes = result.passes, result.causes
    assert passes["seconds"].min() == pytest.approx(0.02)
    assert passes["fixed_s"].max() > 0.004
    assert passes[list(TERMS)].sum(axis=1).to_numpy() == pytest.approx(passes["seconds"].to_numpy())
    assert causes[SECONDS].sum(axis=1).to_numpy() == pytest.approx(causes["e2e_s"].to_numpy())


def test_matrices_of_prompts_take_longer_under_load_where_that_was_seen():
    ratio = ON_H100.sustained.ratio
    assert ON_H100.sustained.low < ratio < ON_H100.sustained.high
    assert seconds(ON_H100, 8) == pytest.approx(seconds(alone(ON_H100), 8))
    short, long = (seconds(ON_H100, 0, n) / seconds(alone(ON_H100), 0, n) for n in (2, 8192))
    assert short == pytest.approx(1, abs=0.01)
    assert 1 + 0.8 * (ratio - 1) < long < ratio


def test_estimates_are_of_servers_under_load_too():
    basis = find_device_profile("qwen3-32b", "h200_sxm", tp=2, weights="fp8").basis
    assert "take 1.13 times as long" in basis
    assert "at least 1.58 ms" in basis
    basis = find_device_profile("qwen3-32b", "m4-max", engine="llamacpp", weights="q4_k_m").basis
    assert "The host" not in basis


@pytest.mark.parametrize("name", ["rtx4090-llama-3.1-8b", "rtxpro6000-qwen3-8b", "a100_sxm-llama-3.1-8b"])
def test_nothing_is_added_where_it_was_not_seen(name):
    profile = load_profile(name)
    assert profile.sustained is None
    assert seconds(profile, 4, 1000) == seconds(alone(profile), 4, 1000)


def test_the_head_of_every_result_says_what_was_added_and_to_what_it_was_fitted():
    assert "prompts take 1.13 times as long (1.08 to 1.16): fitted to recorded servers" in ON_H100.basis
    assert "at least 1.58 ms: since 0.14 vLLM prepares a step" in ON_H100.basis
    early = ON_H100.model_copy(update={"engine": "vllm 0.12.0"})
    assert "The host adds 1.58 ms and 0.036 ms for each sequence to a step: fitted to 30 loads" in early.basis


@pytest.mark.parametrize(("ahead", "version"), [(True, "0.14.0"), (False, "0.12.0")])
def test_a_scenario_says_whether_steps_are_composed_ahead(ahead, version):
    on = load_scenario("chat", model="qwen3-14b", device="h100_sxm", server__async_scheduling=ahead)
    assert cost_model(on, profile_of(on)).profile.host_share == host_share(f"vllm {version}")
    given = profile_of(on).model_copy(update={"host": ALONE})
    assert given.composing(ahead=not ahead) == given
