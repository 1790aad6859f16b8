"""What a scenario on a device takes where it says nothing, and what it leaves behind when it is moved there."""

import json
import re
import tomllib

import pytest

from kvsim.costs.memory_plan import default_cells
from kvsim.errors import UserError
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.scenario import load_scenario

ON_4090 = {"model": {"name": "llama-3.1-8b"}, "machine": {"device": "rtx4090"}}


def test_a_model_and_a_device_are_enough():
    scenario = load_scenario(ON_4090)
    assert scenario.machine.profile == "rtx4090-llama-3.1-8b"
    assert scenario.cache.cells == default_cells("llama-3.1-8b", "rtx4090", batch=2048, sequences=256)
    assert (scenario.server.scheduler, scenario.server.slots, scenario.n_batch) == ("vllm", 256, 2048)
    assert (scenario.cache.policy, scenario.cache.type_k) == ("vllm", "f16")
    assert scenario.server.async_scheduling


AHEAD = "each step composed while the one before it runs (--async-scheduling)"


def test_steps_are_composed_ahead_on_gpus_and_that_is_said():
    """vLLM's default: on, except on CPUs."""
    for scenario in (load_scenario(ON_4090), load_scenario("chat", model="llama-3.1-8b", device="h100_sxm")):
        assert scenario.server.async_scheduling
        assert AHEAD in assumptions(scenario)[0]
        assert "".join(assumptions(scenario)).count("--max-num-batched-tokens") == 1, "said of the device alone"
        assert "async_scheduling = true" in scenario.to_toml()
    for stated in (True, False):
        scenario = load_scenario({**ON_4090, "server": {"async_scheduling": stated}})
        assert scenario.server.async_scheduling == stated
        assert AHEAD not in assumptions(scenario)[0]
    on_a_cpu = load_scenario("chat", server__scheduler="vllm")
    assert not on_a_cpu.server.async_scheduling
    assert "each step composed when the one before it has ended, as on CPUs" in assumptions(on_a_cpu)[0]
    assert "async_scheduling = false" in on_a_cpu.to_toml()


def test_what_a_scenario_says_comes_first():
    scenario = load_scenario({**ON_4090, "server": {"slots": 8, "n_batch": 512}, "cache": {"cells": 4096}})
    assert (scenario.server.slots, scenario.n_batch, scenario.cache.cells) == (8, 512, 4096)


def test_what_follows_from_a_device_follows_another_device_too():
    scenario = load_scenario(ON_4090)
    moved = load_scenario(scenario, machine__device="h100_sxm")
    assert moved.machine.profile == "h100_sxm-llama-3.1-8b"
    assert moved.cache.cells > 5 * scenario.cache.cells
    assert moved.n_batch == 8192


def test_a_written_scenario_is_read_as_it_was(tmp_path):
    scenario = load_scenario(ON_4090)
    (tmp_path / "again.toml").write_text(scenario.to_toml())
    again = load_scenario(tmp_path / "again.toml")
    assert again.cache == scenario.cache
    assert again.server == scenario.server
    assert again.machine == scenario.machine


def test_a_scenario_of_a_machine_leaves_its_sizes_behind():
    chat = load_scenario("chat")
    moved = load_scenario("chat", model="llama-3.1-8b", device="rtx4090")
    assert moved.workload == chat.workload
    assert (moved.server.slots, moved.cache.type_k) == (256, "f16")
    assert moved.cache.cells == load_scenario(ON_4090).cache.cells


@pytest.mark.parametrize("how", ["device", "machine__device"])
def test_a_scenario_of_a_device_leaves_its_cells_there(how):
    moved = load_scenario("gpu-chat", **{how: "h100_sxm"})
    assert moved.cache.cells == load_scenario(ON_4090, device="h100_sxm").cache.cells
    assert load_scenario("gpu-chat", **{how: "rtx4090"}).cache.cells == 41408
    assert moved.machine.profile == "h100_sxm-llama-3.1-8b"


@pytest.mark.parametrize(
    ("model", "device", "said"),
    [
        ("llama-3.1-8b", "h100", "no device called 'h100'; did you mean 'h100_sxm'"),
        ("llama-3.1-8c", "rtx4090", "no model called 'llama-3.1-8c'; did you mean 'llama-3.1-8b'"),
        (None, "rtx4090", "say which model it serves, model.name"),
        ("llama-3-70b", "rtx4090", "llama-3-70b does not fit on rtx4090.*what would fit"),
    ],
)
def test_what_is_wrong_takes_one_line(model, device, said):
    with pytest.raises(UserError, match=said) as caught:
        load_scenario("chat", model=model, device=device)
    assert "\n" not in str(caught.value)


def test_a_profile_of_one_s_own_is_found_by_its_name(tmp_path, monkeypatch):
    from kvsim.costs.load_profile import load_profile

    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path))
    own = load_profile("h100_sxm-llama-3.1-8b").model_copy(update={"name": "h100_sxm-qwen3-8b", "model": "qwen3-8b"})
    own.save(tmp_path / "h100_sxm-qwen3-8b.json")
    scenario = load_scenario("chat", model="qwen3-8b", device="h100_sxm")
    assert scenario.machine.profile == str(tmp_path / "h100_sxm-qwen3-8b.json")


def test_what_was_not_measured_is_estimated():
    own = load_scenario({**ON_4090, "cache": {"type_k": "fp8", "type_v": "fp8"}})
    assert own.machine.profile == "rtx4090-llama-3.1-8b?k=fp8&v=fp8"
    other = load_scenario("chat", model="qwen3-4b", device="h100_sxm", cache__type_k="fp8", cache__type_v="fp8")
    assert other.machine.profile == "estimate:engine=vllm&device=h100_sxm&model=qwen3-4b&tp=1&k=fp8&v=fp8"


@pytest.mark.parametrize(
    ("table", "engine"),
    [
        ({}, "vllm"),
        ({"machine": {"engine": "llamacpp"}}, "llamacpp"),
        ({"machine": {"weights": "q4_K_M"}}, "llamacpp"),
        ({"machine": {"device": "m4-max"}}, "llamacpp"),
        ({"machine": {"device": "mi300x"}}, "vllm"),
        ({"server": {"scheduler": "llama-server"}}, "llamacpp"),
        ({"cache": {"policy": "llama.cpp-b4666"}}, "llamacpp"),
        ({"server": {"scheduler": "vllm"}, "cache": {"policy": "llama.cpp-b6975"}}, "vllm"),
    ],
)
def test_the_engine_on_a_device_is_that_of_what_is_named(table, engine):
    table = {"model": ON_4090["model"], **table, "machine": {**ON_4090["machine"], **table.get("machine", {})}}
    scenario = load_scenario(table)
    early = scenario.cache.policy == "llama.cpp-b4666"
    expected = {"vllm": "vllm", "llamacpp": "llama-server-b4875" if early else "llama-server"}[engine]
    assert scenario.server.scheduler == expected
    if scenario.machine.profile.startswith("estimate:"):
        assert f"engine={engine}&" in scenario.machine.profile


def test_llama_server_takes_the_context_that_fits():
    on = {"machine__engine": "llamacpp", "machine__weights": "q4_K_M"}
    whole = load_scenario("chat", model="qwen3-8b", device="rtx3090", **on)
    assert (whole.cache.cells, whole.server.slots, whole.cache.policy) == (40_960, 4, "llama.cpp-b6975")
    assert "40,960 cells, the model's whole context, 4 sequences at a time (--parallel)" in assumptions(whole)[0]
    part = load_scenario("chat", model="llama-3.1-8b", device="rtx3080", **on)
    assert 8_192 < part.cache.cells < 131_072
    assert "what is left of its memory" in assumptions(part)[0]
    with pytest.raises(UserError, match=r"qwen3-32b does not fit on rtx3080: .*llama\.cpp may use"):
        load_scenario("chat", model="qwen3-32b", device="rtx3080", **on)


def test_a_type_that_is_no_text_takes_one_line():
    with pytest.raises(UserError, match=r"cache\.type_k: input should be 'f32', .* got 3"):
        load_scenario({**ON_4090, "cache": {"type_k": 3}})


def test_llama_cpp_has_no_weights_of_servers_for_gpus():
    on = {"machine__engine": "llamacpp", "machine__weights": "fp8"}
    with pytest.raises(UserError, match=r"--weights: llama\.cpp has no fp8; it has f16, bf16, f32, mxfp4, iq1_m"):
        load_scenario("chat", model="qwen3-8b", device="rtx3090", **on)


def test_a_scenario_says_the_weights_of_its_times():
    from kvsim import run

    written = load_scenario("chat", model="qwen3-4b", device="h100_sxm", workload__requests=2)
    text = written.to_toml().replace('profile = "estimate:', 'weights = "fp8"\nprofile = "estimate:')
    with pytest.raises(UserError, match=r"has weights in bf16, and machine\.weights is fp8; leave one of them out"):
        run(load_scenario(tomllib.loads(text)))


CONFIG = {"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32}
CONFIG |= {"intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096}


@pytest.mark.parametrize("model", ["mine", "./mine/", "mine/config.json", "other.json"])
def test_a_model_of_a_file_is_served_by_its_profile_however_it_is_written(model, tmp_path, monkeypatch):
    from kvsim import run
    from kvsim.costs.load_profile import load_profile

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path / "profiles"))
    (tmp_path / "mine").mkdir()
    for file in ("mine/config.json", "other.json"):
        (tmp_path / file).write_text(json.dumps(CONFIG))
    for name in ("mine", "other"):
        named = {"name": f"h100_sxm-{name}", "model": name}
        own = load_profile("h100_sxm-llama-3.1-8b").model_copy(update=named)
        own.save(tmp_path / "profiles" / f"{own.name}.json")
    scenario = load_scenario("chat", model=model, device="h100_sxm", workload__requests=5)
    assert run(scenario).summary["completed"] == 5


def test_a_model_may_be_written_with_its_publisher():
    from kvsim import run

    scenario = load_scenario("chat", model="meta-llama/Llama-3.1-8B", device="h100_sxm", workload__requests=5)
    assert run(scenario).summary["profile"] == "h100_sxm-llama-3.1-8b"


def test_a_config_json_in_the_folder_of_work_is_named_after_the_folder(tmp_path, monkeypatch):
    from kvsim.model.memory_shapes import memory_shape

    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIG))
    assert memory_shape("./config.json").name == memory_shape(".").name == "mine"


def test_a_sweep_over_devices_has_the_cells_of_each():
    from kvsim.experiments.sweep_file import plan_sweep

    axes = {"machine.device": ["rtx4090", "h100_sxm"]}
    plan = plan_sweep({"scenario": "gpu-chat", "policies": ["vllm"], "axes": axes})
    cells = {point.settings["machine.device"]: point.scenario.cache.cells for point in plan.points}
    assert cells["rtx4090"] == 41408
    assert cells["h100_sxm"] > 5 * 41408


def test_a_profile_of_another_device_is_refused():
    from kvsim import run

    both = {**ON_4090, "machine": {"device": "rtx4090", "profile": "h100_sxm-llama-3.1-8b"}}
    with pytest.raises(UserError, match=r"is of 1 x h100_sxm, and machine\.device is 1 x rtx4090; leave one of"):
        run(load_scenario(both))


def test_more_cells_than_the_device_holds_are_warned_of():
    from kvsim import run

    few = {"workload": {"requests": 5}}
    (warning,) = run(load_scenario({**ON_4090, **few, "cache": {"cells": 400_000}}), detail="requests").warnings
    assert "400,000 cells are more than the " in warning
    assert run(load_scenario({**ON_4090, **few}), detail="requests").warnings == ()


def test_another_model_leaves_other_cells():
    assert load_scenario("gpu-chat", model="qwen3-8b").cache.cells == default_cells(
        "qwen3-8b", "rtx4090", batch=2048, sequences=256
    )


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_what_drafts_leaves_fewer_cells(engine):
    """A model that drafts takes more than one layer, n-grams nothing, and what is switched off nothing either."""

    def cells(**drafts):
        return load_scenario(ON_4090 | {"speculation": drafts}, machine__engine=engine).cache.cells

    alone = cells()
    assert cells(method="ngram", acceptance=0.5) == cells(method="mtp", acceptance=0.5, tokens=0) == alone
    assert cells(method="draft-model", acceptance=0.5, share=0.1) == alone
    head, model = cells(method="mtp", acceptance=0.5), cells(method="draft-model", acceptance=0.5, model="llama-3.2-1b")
    assert model < head < alone


def test_layers_on_the_cpu_leave_memory_to_the_cache():
    whole = {"model": "llama-3.1-8b", "device": "rtx3060", "machine__weights": "q8_0"}
    cells = load_scenario("chat", **whole).cache.cells
    half = load_scenario("chat", **whole, machine__n_gpu_layers=17)
    assert half.cache.cells > 2 * cells
    assert half.server.scheduler == "llama-server"
    assert half.machine.profile == (
        "estimate:engine=llamacpp&device=rtx3060&model=llama-3.1-8b&tp=1&weights=q8_0&k=f16&v=f16&ngl=17"
    )
    # On another device they are another number.
    assert load_scenario(half, device="rtx3090").machine.n_gpu_layers is None


def test_a_model_that_does_not_fit_is_told_how_many_layers_do():
    large = {"model": "llama-3.3-70b", "device": "rtx3090", "machine__weights": "q4_K_M", "machine__engine": "llamacpp"}
    with pytest.raises(UserError, match=r"does not fit on rtx3090: .* what would fit: --ngl (\d+), or ") as caught:
        load_scenario("chat", **large)
    n = int(re.search(r"--ngl (\d+)", str(caught.value))[1])
    assert 30 < n < 50
    assert load_scenario("chat", **large, machine__n_gpu_layers=n).cache.cells >= 8192
    assert load_scenario("chat", **large, machine__n_gpu_layers=n + 1).cache.cells < 8192


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine__engine": "vllm", "machine__n_gpu_layers": 9}, "--ngl: llama.cpp has it and vLLM has not; give "),
        ({"device": "m4-max", "machine__n_gpu_layers": 9}, "--ngl: Apple M4 Max.* has one memory for CPU and GPU"),
        ({"machine__n_cpu_moe": 9}, "--n-cpu-moe: llama-3.1-8b has no experts; --ngl keeps whole layers"),
        ({"machine__n_gpu_layers": -1}, "machine.n_gpu_layers.*greater than or equal to 0"),
        ({"machine__engine": "vllm", "machine__cpu_gb_s": 51.2}, "--cpu-gb-s: llama.cpp has it and vLLM has not"),
    ],
)
def test_layers_on_the_cpu_are_refused_where_there_can_be_none(changes, said):
    with pytest.raises(UserError, match=said):
        load_scenario("chat", model="llama-3.1-8b", **{"device": "rtx3090", **changes})


def test_without_flash_attention_scores_take_memory_and_v_is_not_quantised():
    of = {"model": "llama-3.1-8b", "device": "rtx3090", "machine__weights": "q4_K_M", "machine__engine": "llamacpp"}
    fused, apart = load_scenario("chat", **of), load_scenario("chat", **of, cache__kernel="masked")
    assert apart.cache.cells < fused.cache.cells
    assert apart.machine.profile == fused.machine.profile + "&fa=off"
    narrow = {"cache__type_k": "q8_0", "cache__type_v": "q8_0"}
    with pytest.raises(UserError, match=r"llama\.cpp stores V as q8_0 only with flash attention"):
        load_scenario("chat", **of, cache__kernel="masked", **narrow)
