"""Recommendations for named devices: whose times and memory they rest on, and how devices compare."""

import json
import shlex
from dataclasses import replace

import pytest

from kvsim import UserError, load_scenario, recommend, report, run
from kvsim.advice.memory.engine_flags import flags_dict, model_argument
from kvsim.advice.recommend.candidates import build_search_space
from kvsim.advice.recommend.device_comparison import DeviceAnswer, DeviceComparison
from kvsim.advice.recommend.families import measured_range
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.on_devices import DEFAULT_REQUESTS, read_prices
from kvsim.advice.recommend.search import SearchBudget
from kvsim.advice.recommend.trials import TrialRun, run_trial
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import default_cells
from kvsim.experiments.interval_text import plain
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.memory_shapes import memory_shape
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

pytestmark = pytest.mark.slow

SMALL = SearchBudget(4, 1, 2, 1, 2, 1, fewest=20)
MODEL = "llama-3.1-8b"
SLO = "ttft_p95<250ms,e2e_p95<4s"
SUMMARY = TrafficSummary(100, 7000, 5000, 4000, 1200.0, True)

TRAFFIC = {
    "name": "busy",
    "workload": {
        "rate": 3.0,
        "requests": 80,
        "prompt_tokens": {"kind": "lognormal", "mu": 6.0, "sigma": 0.5, "min": 16, "max": 1500},
        "output_tokens": {"kind": "fixed", "value": 60},
    },
    "server": {"slots": 2, "n_batch": 64},
    "cache": {"cells": 4096, "block_size": 32},
}
"""Of a toy machine, whose sizes say nothing of a device."""


def ask(*devices, source=TRAFFIC, **more):
    asked = {"slo": SLO, "model": MODEL, "requests": 80, "budget": SMALL, "workers": 1, **more}
    return recommend(load_scenario(source), device=devices, **asked)


def space(device="rtx4090", engine="both", model=MODEL, summary=SUMMARY):
    base = load_scenario(TRAFFIC, model=model, device=device, cache__block_size=16)
    profile = find_device_profile(model, device)
    memory = device_named(device).memory_bytes
    return build_search_space(base, summary, engine, profile, memory_shape(model), memory)


@pytest.fixture(scope="module")
def one():
    return ask("rtx4090")


@pytest.fixture(scope="module")
def both():
    return ask("rtx4090", "h100_sxm", "l4", model="qwen3-14b", price="h100_sxm=2.5")


@pytest.fixture(scope="module")
def priced():
    return ask("rtx4090", "h100_sxm", price={"rtx4090": 0.4, "h100_sxm": 2.0})


# One device


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


def test_a_model_that_does_not_fit_is_told_what_would():
    with pytest.raises(UserError, match=r"qwen3-32b does not fit on rtx4090: .* what would fit: --weights "):
        ask("rtx4090", model="qwen3-32b")


def test_a_scenarios_number_of_requests_does_not_shorten_runs_on_devices():
    found = ask("rtx4090", model="falcon3-7b", requests=None)
    assert found.traffic.requests == DEFAULT_REQUESTS


# Several devices


def test_the_largest_load_comes_first_and_no_verdict_last(priced, both):
    assert isinstance(priced, DeviceComparison)
    assert [answer.device for answer in priced.ranked] == ["h100_sxm", "rtx4090"]
    loads = [answer.load for answer in priced.ranked]
    assert loads == sorted(loads, reverse=True)
    assert [answer.device for answer in both.ranked] == ["h100_sxm", "rtx4090", "l4"]
    assert [answer.met for answer in both.ranked] == [True, None, None]


def test_each_device_is_answered_as_if_it_were_asked_alone(priced, one):
    found = next(answer for answer in priced.answers if answer.device == "rtx4090").recommendation
    assert found.to_dict() | {"command": ""} == one.to_dict() | {"command": ""}


def test_the_first_line_says_which_meet_it_and_up_to_which_load(priced):
    surely = [_with_verdict(answer, "surely") for answer in priced.ranked]
    first, second = surely
    reach = f"in every run up to {plain(first.load, 2)} times the load ({plain(first.mean_load.value, 2)} on average)"
    said = replace(priced, answers=tuple(surely)).conclusion
    assert said.startswith(
        f"h100_sxm meets {priced.slo.text} at this load, and {reach}; rtx4090 meets it too, in every"
    )
    assert said.count(" At the largest load, a million output tokens cost ") == 1
    said = replace(priced, answers=tuple(_with_verdict(answer, "likely") for answer in surely)).conclusion
    assert said.startswith(f"h100_sxm probably meets {priced.slo.text} at this load, and {reach}; ")
    assert "; rtx4090 probably meets it, in every run up to " in said
    said = replace(priced, answers=(_with_verdict(second, "not"), first)).conclusion
    assert "; rtx4090 does not meet it, but does in every run up to " in said
    said = replace(priced, answers=(_with_verdict(second, "not"),), asked=("rtx4090",)).conclusion
    assert said.startswith(f"No device meets {priced.slo.text} at this load: rtx4090 meets it in every run up to ")


def _with_verdict(answer, verdict):
    """The same answer, had the best setting met the service level so surely, and at loads that differ."""
    best = answer.best
    scale = {"surely": (0.1, 0.1), "likely": (0.01, 0.4), "not": (2.0, 2.0)}[verdict]
    outcomes = tuple(
        replace(outcome, measures={**outcome.measures, "ttft_p95": factor, "e2e_p95": 0.1})
        for outcome, factor in zip(best.outcomes, scale, strict=True)
    )
    loads = (best.loads[0], 1.5 * best.loads[0])
    found = replace(
        answer.recommendation, best=(replace(best, outcomes=outcomes, loads=loads), *answer.recommendation.best[1:])
    )
    return replace(answer, answer=found)


def test_a_device_without_room_has_a_reason_and_no_verdict(both):
    reasons = {answer.device: answer.no_verdict for answer in both.ranked}
    assert reasons["h100_sxm"] == ""
    assert reasons["rtx4090"].startswith("qwen3-14b does not fit on rtx4090: ")
    assert reasons["l4"].startswith("qwen3-14b does not fit on l4: ")
    assert "rtx4090 has no verdict; l4 has no verdict" in both.conclusion
    assert any(line.startswith("l4: qwen3-14b does not fit") for line in both.no_verdicts)
    for each in both.to_dict()["devices"][1:]:
        assert (each["met"], each["verdict"], each["load"], each["cost_per_million"]) == (None, None, None, None)
    assert len(both.bases) == 1


def test_a_million_tokens_cost_the_price_over_the_tokens_of_that_time(priced):
    offered = priced.traffic.offered
    for answer in priced.ranked:
        per_s = answer.price_per_hour / 3600
        assert answer.cost == pytest.approx(per_s / offered.output_tokens_per_s * 1e6)
        assert answer.cost_at_largest == pytest.approx(answer.cost / answer.load)
        assert answer.largest.requests_per_s == pytest.approx(offered.requests_per_s * answer.load)
        assert replace(answer, tensor_parallel=2).cost == pytest.approx(2 * answer.cost)
        assert replace(answer, price_per_hour=None).cost is None


def test_a_device_that_misses_the_service_level_has_no_cost_at_this_load():
    found = ask("rtx4090", price="rtx4090=0.4", load=8.0, slo="tpot_p95<25ms")
    (answer,) = found.answers
    assert answer.met is False
    assert answer.cost is None
    assert answer.load < 1
    assert answer.cost_at_largest > 0
    assert found.conclusion.startswith(
        "No device meets tpot_p95<25ms at this load: rtx4090 meets it in every run up to 0."
    )


def test_the_largest_load_is_met_in_every_run(priced):
    for answer in priced.ranked:
        best = answer.best
        assert answer.load == min(best.loads) < best.largest_load
        for replication in range(2):
            trial = TrialRun(0, replication, best.candidate.scenario, 1.0, answer.load)
            assert run_trial(priced.traffic, trial).met(priced.slo)
        none = replace(answer, answer=replace(answer.answer, best=(replace(best, loads=(0.0, 1.0)),)))
        assert (none.load, none.largest, none.cost_at_largest) == (None, None, None)


def test_nothing_is_said_where_no_device_has_a_verdict():
    found = ask("rtx4090", "l4", model="qwen3-14b")
    assert found.met is None
    assert found.conclusion == (
        "Whether ttft_p95<250ms, e2e_p95<4s can be met is unknown: rtx4090, l4 have no verdict."
    )
    assert found.bases == []


def test_in_a_closed_loop_runs_tell_what_is_served():
    loop = {**TRAFFIC, "workload": {**TRAFFIC["workload"], "kind": "closed-loop", "users": 2}}
    del loop["workload"]["rate"]
    found = ask("rtx4090", price="rtx4090=1", source=loop)
    (answer,) = found.answers
    assert found.traffic.offered is None
    assert answer.load > 1
    assert answer.largest.output_tokens_per_s > answer.served.output_tokens_per_s
    assert answer.cost_at_largest < answer.cost


def test_the_result_does_not_depend_on_the_number_of_workers(priced):
    again = ask("rtx4090", "h100_sxm", price={"rtx4090": 0.4, "h100_sxm": 2.0}, workers=2)
    assert json.dumps(again.to_dict()) == json.dumps(priced.to_dict())


def test_an_interrupt_keeps_the_devices_that_are_known(priced, monkeypatch):
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return next(a.recommendation for a in priced.answers if a.device == "rtx4090")

    monkeypatch.setattr("kvsim.advice.recommend.on_devices.find_settings", interrupted)
    found = ask("rtx4090", "h100_sxm")
    assert found.interrupted == "before h100_sxm"
    assert found.conclusion.startswith("Interrupted, before h100_sxm. So far: rtx4090 ")
    assert found.ranked[-1].no_verdict == "interrupted before its turn"
    assert found.to_dict()["devices"][-1]["met"] is None
    calls.append(None)
    with pytest.raises(KeyboardInterrupt):
        ask("rtx4090", "h100_sxm")


def test_progress_goes_on_from_one_device_to_the_next():
    told = []
    ask("rtx4090", "h100_sxm", progress=lambda *state: told.append(state))
    done = [state[0] for state in told]
    assert done == sorted(done)
    assert all(total >= now for now, total, _ in told)


def test_what_is_saved_is_what_is_printed_and_makes_a_page(both, tmp_path):
    (tmp_path / "recommendation.json").write_text("{}")
    (tmp_path / "best-l40s.toml").write_text("")
    names = [path.name for path in both.save(tmp_path)]
    assert names == [
        "recommendation.json",
        "recommendation.csv",
        "candidates.csv",
        "recommendation.png",
        "best-h100_sxm.toml",
    ]
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    printed = both.to_dict()
    assert json.loads((tmp_path / "recommendation.json").read_text()) == printed == json.loads(json.dumps(printed))
    assert list(both.table["device"]) == [each["device"] for each in printed["devices"]]
    assert set(both.candidates["device"]) == {"h100_sxm"}
    html = report(tmp_path).read_text(encoding="utf-8")
    assert "h100_sxm" in html
    assert "l4: qwen3-14b does not fit" in html
    assert "Scenario for h100_sxm" in html
    assert "vllm serve Qwen/Qwen3-14B" in html


def test_the_picture_shows_loads_and_costs(priced, one):
    loads, costs = priced.plot().axes
    assert [bar.get_width() for bar in loads.patches] == [answer.load for answer in priced.ranked]
    assert [bar.get_width() for bar in costs.patches] == [answer.cost_at_largest for answer in priced.ranked]
    unpriced = replace(priced, answers=tuple(replace(a, price_per_hour=None) for a in priced.answers))
    assert len(unpriced.plot().axes) == 1


def test_two_gpus_are_asked_of_their_own_profile():
    found = ask("rtxpro6000", model="qwen3-32b", tp=2)
    assert found.profile.name == "rtxpro6000-qwen3-32b-tp2"
    assert flags_dict(found.best[0].candidate.flags)["--tensor-parallel-size"] == "2"
    assert found.to_dict()["tensor_parallel"] == 2


# What cannot be asked


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": ["rtx4090", "rtx4090"]}, "--device: rtx4090 is given twice"),
        ({"device": "rtx409"}, "no device called 'rtx409'; did you mean 'rtx4090'"),
        ({"price": "rtx4090=1"}, "--price: prices are of devices; name them with --device"),
        ({"tp": 2}, "--tp: GPUs that share a model; name them with --device"),
        ({"device": "rtx4090", "tp": 0}, "--tp is 0"),
        ({"device": "rtx4090", "tp": 3}, "3 does not divide the 32 heads"),
        ({"device": "rtx4090", "price": "rtx409=1"}, "--price: no device called 'rtx409'; did you mean 'rtx4090'"),
        ({"device": "rtx4090", "price": "l40s=1"}, "--price: l40s is not among the devices asked about"),
        ({"device": "rtx4090", "memory": "24GB"}, "--memory and --device: both say"),
        ({"device": "rtx4090", "profile": "default"}, "--profile and --device: both say"),
        ({"device": "rtx4090", "weights": "banana"}, "--weights: no type called 'banana'"),
        ({"device": "rtx4090", "model": None}, "--device: name the model that is served"),
    ],
)
def test_a_question_that_cannot_be_asked_ends_in_one_line(asked, message):
    with pytest.raises(UserError, match=message) as raised:
        recommend(load_scenario(TRAFFIC), **{"slo": SLO, "model": MODEL, "requests": 80, **asked})
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "rtx4090", "rtx4090=", "=1", "rtx4090=x", "rtx4090=0", "rtx4090=-1", "rtx4090=inf"]
)
def test_a_price_is_a_number_above_0(text):
    with pytest.raises(UserError, match=r"--price: .* the price of an hour above 0"):
        read_prices(text, ["rtx4090"])


def test_prices_are_read():
    assert read_prices("rtx4090=0.4, l40s=.75", ["l40s", "rtx4090"]) == {"rtx4090": 0.4, "l40s": 0.75}
    assert read_prices({"l40s": 2}, ["l40s"]) == {"l40s": 2.0}
    with pytest.raises(UserError, match="--price: l40s is given twice"):
        read_prices("l40s=1,l40s=1", ["l40s"])


def test_an_answer_without_anything_has_no_numbers():
    nothing = DeviceAnswer("rtx4090", None, "why not", price_per_hour=1.0)
    assert (nothing.met, nothing.load, nothing.served, nothing.largest, nothing.cost) == (None,) * 5
    assert nothing.cost_at_largest is None
    assert not nothing.at_least


# The command


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with a scenario, where a search is short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SMALL)
    (tmp_path / "busy.toml").write_text(load_scenario(TRAFFIC).to_toml())
    return ["recommend", "--scenario", "busy.toml", "--slo", SLO, "--requests", "80", "--workers", "1"]


def test_the_command_compares_devices_and_says_what_it_rests_on_first(small, tmp_path):
    devices = ["--device", "rtx4090", "--device", "h100_sxm", "--device", "a6000", "--price", "h100_sxm=2.5"]
    asked = [*small, "--model", "qwen3-14b", *devices]
    shown = command(*asked).stdout
    lines = shown.splitlines()
    assert lines[0].startswith("Times are those of profile h100_sxm-qwen3-14b: ")
    assert lines[1].startswith("Times are estimated: qwen3-14b on a6000 under vLLM")
    begins = [
        "h100_sxm ",
        "rtx4090: qwen3-14b does not fit on rtx4090: ",
        "a6000 ",
    ]
    assert all(any(line.startswith(begin) for line in lines) for begin in begins), shown
    assert "\nh100_sxm\n   vllm serve Qwen/Qwen3-14B --max-model-len " in shown
    assert "kvsim run results/recommend-busy/best-h100_sxm.toml" in shown
    saved = json.loads((tmp_path / "results/recommend-busy/recommendation.json").read_text())
    found = json.loads(command(*asked, "--json").stdout)
    assert found == saved
    again = json.loads(command(*shlex.split(found["command"])[1:], "--workers", "1", "--json").stdout)
    assert again == found
    assert command("report", "results/recommend-busy").returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "rtx4090", "--device", "rtx4090"],
        ["--device", "rtx4090", "--memory", "24GB"],
        ["--device", "rtx4090", "--price", "rtx4090"],
        ["--device", "h100_sxm", "--price", "rtx4090=1"],
        ["--device", "rtx4090", "--model", "qwen3-32b"],
        ["--price", "rtx4090=1"],
    ],
)
def test_the_command_refuses_in_one_line(small, tmp_path, options):
    complaint(command(*small, "--model", MODEL, *options))
    assert not (tmp_path / "results").exists()
