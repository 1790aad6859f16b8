"""Several devices: how they compare, by load and by cost."""

import json
from dataclasses import replace

import pytest

from kvsim import report
from kvsim.advice.recommend.device_comparison import DeviceAnswer, DeviceComparison
from kvsim.advice.recommend.places import Place
from kvsim.advice.recommend.trials import TrialRun, run_trial
from kvsim.experiments.interval_text import plain
from tests.kvsim.advice.recommend.device_worlds import MODEL, SMALL, TRAFFIC, ask

pytestmark = pytest.mark.slow


def test_the_largest_load_comes_first_and_no_verdict_last(priced, both):
    assert isinstance(priced, DeviceComparison)
    assert [answer.place.device for answer in priced.ranked] == ["h100_sxm", "rtx4090"]
    loads = [answer.load for answer in priced.ranked]
    assert loads == sorted(loads, reverse=True)
    assert [answer.place.device for answer in both.ranked] == ["h100_sxm", "rtx4090", "l4"]
    assert [answer.met for answer in both.ranked] == [True, None, None]


def test_each_device_is_answered_as_if_it_were_asked_alone(priced, one):
    found = next(answer for answer in priced.answers if answer.place.device == "rtx4090").recommendation
    assert found.to_dict()["best"] == one.to_dict()["best"]
    assert found.limits == one.limits


def test_what_differs_is_asked_in_every_combination_and_named(tmp_path):
    budget = SMALL._replace(screened=2, neighbours=0, kept=1, steps=0)
    found = ask("h100_sxm", tp=[1, 2], kv=["f16", "fp8"], budget=budget, requests=30, slo="e2e_p95<60s")
    names = {found.name(answer) for answer in found.answers}
    assert names == {f"{device}, K/V {kv}" for device in ("h100_sxm", "2 x h100_sxm") for kv in ("f16", "fp8")}
    rows = found.table.set_index(["tensor_parallel", "kv"])
    assert len(rows) == 4
    assert "--kv-cache-dtype fp8" in rows.loc[(2, "fp8"), "flags"]
    assert "--tensor-parallel-size 2" in rows.loc[(2, "fp8"), "flags"]
    files = [path.name for path in found.save(tmp_path, plots=False)]
    assert files[3:] == [answer.place.file(found.asked) for answer in found.ranked]
    assert "best-h100_sxm-tp2-kv-fp8.toml" in files


def test_places_are_called_what_they_do_not_have_in_common():
    places = [Place("h100_sxm", model, 1, weights) for model in (MODEL, "falcon3-7b") for weights in (None, "fp8")]
    assert [place.name(places) for place in places][1:3] == [
        f"h100_sxm, {MODEL}, weights fp8",
        "h100_sxm, falcon3-7b, weights as they are",
    ]
    assert places[1].file(places) == f"best-h100_sxm-{MODEL}-weights-fp8.toml"
    assert (places[0].name(places[:1]), places[0].file(places[:1])) == ("h100_sxm", "best-h100_sxm.toml")


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
    said = replace(priced, answers=(_with_verdict(second, "not"),), asked=(second.place,)).conclusion
    assert said.startswith(f"Nothing meets {priced.slo.text} at this load: rtx4090 meets it in every run up to ")


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
    reasons = {answer.place.device: answer.no_verdict for answer in both.ranked}
    assert reasons["h100_sxm"] == ""
    assert reasons["rtx4090"].startswith("qwen3-14b does not fit on rtx4090: ")
    assert reasons["l4"].startswith("qwen3-14b does not fit on l4: ")
    assert "rtx4090 has no verdict; l4 has no verdict" in both.conclusion
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
        two = replace(answer, place=replace(answer.place, tensor_parallel=2))
        assert (two.price_per_hour, two.cost) == pytest.approx((2 * answer.price_per_hour, 2 * answer.cost))
        assert replace(answer, price_of_one=None).cost is None


def test_a_device_that_misses_the_service_level_has_no_cost_at_this_load():
    found = ask("rtx4090", price="rtx4090=0.4", load=8.0, slo="tpot_p95<25ms")
    (answer,) = found.answers
    assert answer.met is False
    assert answer.cost is None
    assert answer.load < 1
    assert answer.cost_at_largest > 0
    assert found.conclusion.startswith(
        "Nothing meets tpot_p95<25ms at this load: rtx4090 meets it in every run up to 0."
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
        "Whether ttft_p95<250ms, e2e_p95<4s can be met is unknown: rtx4090; l4 have no verdict."
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
        return next(a.recommendation for a in priced.answers if a.place.device == "rtx4090")

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
    unpriced = replace(priced, answers=tuple(replace(a, price_of_one=None) for a in priced.answers))
    assert len(unpriced.plot().axes) == 1


def test_an_answer_without_anything_has_no_numbers():
    nothing = DeviceAnswer(Place("rtx4090", MODEL), None, "why not", 1.0)
    assert (nothing.met, nothing.load, nothing.served, nothing.largest, nothing.cost) == (None,) * 5
    assert nothing.cost_at_largest is None
    assert not nothing.at_least
