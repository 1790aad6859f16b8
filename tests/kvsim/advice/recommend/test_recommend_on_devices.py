"""Recommendations for a named device: whose times and memory they rest on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvsim import UserError, load_scenario, recommend, run
from kvsim.advice.memory.engine_flags import flags_dict, model_argument
from kvsim.advice.recommend.families import measured_range
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.on_devices import DEFAULT_REQUESTS
from kvsim.advice.recommend.search_space import build_search_space
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import default_cells
from kvsim.model.memory_shapes import memory_shape
from tests.kvsim.advice.recommend.device_worlds import MODEL, SLO, SMALL, SUMMARY, TRAFFIC, ask

pytestmark = pytest.mark.slow


def space(device="rtx4090", engine="both", model=MODEL, summary=SUMMARY):
    base = load_scenario(TRAFFIC, model=model, device=device, cache__block_size=16)
    profile = find_device_profile(model, device)
    memory = device_named(device).memory_bytes
    return build_search_space(base, summary, engine, profile, memory_shape(model), memory)


def test_the_times_and_the_memory_are_those_of_the_device(one):
    assert one.profile.name == "rtx4090-llama-3.1-8b"
    assert one.basis.startswith("Times are those of profile rtx4090-llama-3.1-8b: model llama-3.1-8b on rtx4090 ")
    assert one.memory == device_named("rtx4090").memory_bytes
    assert (one.to_dict()["device"], one.to_dict()["tensor_parallel"]) == ("rtx4090", 1)
    assert one.conclusion.startswith("Run vllm serve meta-llama/Llama-3.1-8B --max-model-len ")


def test_each_setting_has_the_cells_that_the_device_leaves_for_it():
    for c in space().candidates:
        server = c.scenario.server
        left = default_cells(MODEL, "rtx4090", batch=server.n_batch, sequences=server.slots)
        assert c.scenario.cache.cells == left
        assert c.scenario.cache.block_size == 16
        assert c.scenario.server.async_scheduling
        assert c.scenario.slot_context <= left - 16


def test_the_flags_are_those_of_a_server_on_a_device():
    for c in space().candidates:
        server = c.scenario.server
        flags = flags_dict(c.flags)
        assert flags.pop("--max-model-len") == str(c.scenario.slot_context) == "7168"
        assert flags.pop("--max-num-seqs") == str(server.slots)
        assert flags.pop("--max-num-batched-tokens") == str(server.n_batch)
        assert (flags.pop("--gpu-memory-utilization"), flags.pop("--tensor-parallel-size")) == ("0.92", "1")
        assert len(flags) == 2
        assert set(flags) <= {
            f"--{no}enable-{what}" for no in ("", "no-") for what in ("prefix-caching", "chunked-prefill")
        }
        assert c.command == "vllm serve meta-llama/Llama-3.1-8B"


def test_a_model_of_ones_own_is_served_from_its_folder(tmp_path):
    assert model_argument("qwen3-14b") == "Qwen/Qwen3-14B"
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 1000,
                "torch_dtype": "float16",
            }
        )
    )
    assert model_argument(str(path)) == str(tmp_path)


@pytest.mark.parametrize("device", ["rtx4090", "h100_sxm"])
def test_no_setting_goes_beyond_what_the_profile_measured(device):
    slots, tokens = measured_range(find_device_profile(MODEL, device))
    candidates = space(device).candidates
    assert max(c.scenario.server.slots for c in candidates) <= slots
    assert max(c.scenario.n_batch for c in candidates) <= tokens
    assert max(c.scenario.server.slots for c in candidates) >= 256


def test_policies_of_engines_that_the_profile_has_no_times_of_are_not_tried():
    found = space()
    assert {c.engine for c in found.candidates} == {"vllm"}
    assert {family.keys["cache__policy"] for family in found.families} == {"vllm", "paged"}
    why = found.policies_left_out["llama.cpp-b6975"]
    assert why == ("engine", "profile rtx4090-llama-3.1-8b has times of vllm 0.19.0 alone")
    everything = space(engine="any")
    assert {c.engine for c in everything.candidates} == {"vllm", "research"}
    assert "contiguous" in {family.name for family in everything.families}
    assert "llama.cpp-b6975" in everything.policies_left_out
    with pytest.raises(UserError, match=r"--engine llamacpp: profile rtx4090-.* has times of vllm 0.19.0 alone"):
        space(engine="llamacpp")


def test_it_is_said_once_that_the_other_engine_was_not_tried(one):
    assert sum("llama.cpp was not tried" in line for line in one.limits) == 1
    assert any("kernels" in line for line in one.limits), "what the source of the profile notes"


def test_a_layout_that_no_engine_has_says_what_was_inferred():
    found = ask("rtx4090", engine="any", budget=SMALL._replace(screened=13, best=4, kept=13))
    layouts = {f.candidate.engine for f in found.best}
    assert "research" in layouts
    assert any("inferred, not measured: attention of " in line for line in found.limits)


def test_a_request_that_the_cache_cannot_hold_rules_settings_out():
    found = space(summary=replace(SUMMARY, longest=100_000))
    assert {c.reason for c in found.candidates} == {"memory"}
    assert all("a request has 100,000" in c.detail for c in found.candidates)
    assert {c.scenario.slot_context for c in space(model=MODEL, summary=replace(SUMMARY, longest=20)).candidates} == {
        256
    }


def test_a_saved_setting_can_be_run_again(one, tmp_path):
    one.save(tmp_path)
    again = run(tmp_path / "best-1.toml", detail="requests").summary
    assert again["ttft_s"]["p95"] == pytest.approx(one.best[0].outcomes[0].measures["ttft_p95"])
    saved = load_scenario(tmp_path / "best-1.toml")
    assert (saved.machine.device, saved.cache.cells) == ("rtx4090", one.best[0].candidate.scenario.cache.cells)


def test_the_scenarios_own_device_is_asked_like_one_that_is_given(one):
    scenario = load_scenario(TRAFFIC, model=MODEL, device="rtx4090")
    found = recommend(scenario, slo=SLO, requests=80, budget=SMALL, workers=1)
    assert found.to_dict() | {"command": ""} == one.to_dict() | {"command": ""}
    with pytest.raises(UserError, match="--memory: rtx4090, which the scenario names, has its own"):
        recommend(scenario, slo=SLO, memory="24GB")


def test_with_a_profile_of_another_model_nothing_is_said_of_times():
    machine = {"device": "rtx4090", "profile": "rtx4090-llama-3.1-8b"}
    found = ask(model="falcon3-7b", source={**TRAFFIC, "model": {"name": MODEL}, "machine": machine})
    assert isinstance(found, MemoryAnswer)
    assert found.no_times.startswith("no times for falcon3-7b: profile rtx4090-llama-3.1-8b was measured on ")
    assert (found.met, found.profile, found.to_dict()["profile"]) == (None, None, None)
    assert "rtx4090 (23.5" in found.conclusion
    assert not [word for word in ("TTFT P", "TPOT P", "sustains") if word in json.dumps(found.to_dict())]


@pytest.mark.parametrize(
    ("more", "engine", "begins"),
    [
        ({"model": "falcon3-7b"}, "vllm", "vllm serve "),
        ({"model": "falcon3-7b", "engine": "llamacpp", "weights": "q8_0"}, "llama.cpp", "llama-server"),
        ({"model": MODEL, "kv": "fp8"}, "vllm", "vllm serve "),
    ],
)
def test_without_tables_times_are_estimated(more, engine, begins):
    found = ask("rtx4090", **more)
    assert (found.profile.engine.split()[0], found.profile.type_k) == (engine, more.get("kv", "f16"))
    assert found.basis.startswith("Times are estimated: ") or "attention scaled from f16" in found.basis
    assert found.best[0].candidate.command.startswith(begins)
    assert ("--kv-cache-dtype", "fp8") in found.best[0].candidate.flags or "kv" not in more


def test_a_profile_of_ones_own_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path))
    of_other = find_device_profile(MODEL, "rtx4090")
    of_other.model_copy(update={"name": "rtx4090-falcon3-7b", "model": "falcon3-7b"}).save(
        tmp_path / "rtx4090-falcon3-7b.json"
    )
    assert ask("rtx4090", model="falcon3-7b").profile.name == "rtx4090-falcon3-7b"


def test_smaller_weights_are_assumed_and_said_where_the_models_own_do_not_fit():
    told = []
    found = ask("rtx4090", model="qwen3-14b", told=told.append)
    assert told == ["qwen3-14b on rtx4090: weights in fp8, since the model's own do not fit (--weights)"]
    assert found.best[0].candidate.scenario.machine.weights == "fp8"


def test_a_model_that_does_not_fit_is_told_what_would():
    with pytest.raises(UserError, match=r"qwen3-32b does not fit on rtx4090: .* what would fit: --weights "):
        ask("rtx4090", model="qwen3-32b")


def test_a_scenarios_number_of_requests_does_not_shorten_runs_on_devices():
    found = ask("rtx4090", model="falcon3-7b", requests=None)
    assert found.traffic.requests == DEFAULT_REQUESTS


def test_the_engines_defaults_and_what_runs_now_are_judged_beside_the_best():
    now = {"server__slots": 2, "server__slot_context": 4096, "server__scheduler": "vllm"}
    found = ask("rtx4090", now=now)
    running, usual = found.fixed
    assert (running.candidate.family, usual.candidate.family) == ("now", "vLLM's defaults")
    assert (running.candidate.scenario.server.slots, usual.candidate.scenario.server.slots) == (2, 256)
    assert all(f.candidate.scenario.slot_context >= 4096 for f in found.best), "no shorter context than now"
    first = found.best[0]
    gain = np.exp(np.mean(np.log(first.loads)) - np.mean(np.log(running.loads)))
    assert found.to_dict()["fixed"][0]["gain"]["value"] == pytest.approx(gain)
    assert gain > 2
    assert found.gains[0].startswith("Beside what runs now, which would sustain ")
    assert "Beside vLLM's defaults" in found.gains[1]
    # Where nothing that was searched is left beside them, too.
    assert replace(found, best=()).gains[0].startswith("What runs now would sustain ")
    assert {c.number for c in found.space.fixed} == {-1, -2}


def test_what_the_model_cannot_hold_is_said_at_once_and_the_rest_answered(tmp_path):
    path = tmp_path / "log.csv"
    rows = "".join(f"{i},{200_000 if i % 10 == 3 else 300},40\n" for i in range(120))
    path.write_text(f"arrival,prompt,output\n{rows}")
    told = []
    asked = {"slo": "ttft_p95<2s", "model": MODEL, "budget": SMALL, "workers": 1, "told": told.append}
    found = recommend(trace=path, device="rtx4090", **asked)
    assert told == [
        "10.0% of the requests (12 of 120) need more than the 131,072 tokens of llama-3.1-8b's context, 12 for the "
        "prompt alone: no setting can serve them; what follows is of the rest"
    ]
    assert found.conclusion.startswith(f"{told[0]}. Run vllm serve ")
    assert found.met


def test_settings_that_do_the_same_are_one_place():
    found = ask("rtx4090", load=0.1, slo="e2e_p95<60s", budget=SMALL._replace(screened=24, kept=8, best=3))
    first = found.best[0]
    assert first.same
    assert any(note.startswith("any of these does the same: as typed; --max-num-") for note in first.notes)
    assert all(found.ruled_out[c.number].reason == "same" for f in found.best for c in f.same)
    assert len(found.ruled_out) + len(found.best) == len(found.space.candidates)


LONG = {
    **TRAFFIC,
    "workload": {
        **TRAFFIC["workload"],
        "prompt_tokens": {"kind": "fixed", "value": 2_000},
        "output_tokens": {"kind": "fixed", "value": 1_500},
    },
}
"""Requests of which a card holds about a dozen in 16 bits."""


@pytest.mark.parametrize(("source", "kv"), [(LONG, "fp8"), (TRAFFIC, "f16")])
def test_k_and_v_are_narrowed_only_where_that_helps(source, kv):
    asked = {"slo": "ttft_p95<2s", "budget": SMALL._replace(screened=6, neighbours=6, kept=4, best=2, steps=3)}
    found = ask("rtx4090", source=source, load=0.2, **asked)
    first = found.best[0].candidate
    assert first.settings["type_k"] == kv
    assert any("fp8 cost accuracy" in note for note in first.notes) == (kv == "fp8")
    assert {c.settings["type_k"] for c in found.space.candidates if c.number in found.ruled_out} >= {"f16", "fp8"}


def test_other_weights_are_offered_and_never_taken(one):
    assert one.best[0].verdict != "surely"
    assert one.offer.startswith("With --weights fp8, which are of another quality, it would sustain about ")
    assert {c.scenario.machine.weights for c in one.space.candidates} == {None}
    calm = ask("rtx4090", load=0.1, slo="e2e_p95<60s")
    assert (calm.best[0].verdict, calm.offer) == ("surely", "")
    assert ask("rtx4090", weights="fp8").offer == ""


def test_two_gpus_are_asked_of_their_own_profile():
    found = ask("rtxpro6000", model="qwen3-32b", tp=2)
    assert found.profile.name == "rtxpro6000-qwen3-32b-tp2"
    assert flags_dict(found.best[0].candidate.flags)["--tensor-parallel-size"] == "2"
    assert found.to_dict()["tensor_parallel"] == 2
