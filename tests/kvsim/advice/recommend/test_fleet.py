"""How many servers a load takes that one does not bear, and behind which router."""

from dataclasses import replace

import pytest

from kvsim import run
from kvsim.advice.recommend.apart import find_apart
from kvsim.advice.recommend.fleet import ROUTERS, find_fleet
from kvsim.advice.recommend.server_trials import ServerTrials
from kvsim.errors import counted
from kvsim.reports.recommendation_report import recommendation_of
from kvsim.scenario.scenario import load_scenario
from tests.kvsim.advice.recommend.device_worlds import SMALL, ask_of_many

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overloaded():
    return ask_of_many("rtx4090")


def test_the_fewest_servers_that_suffice_are_found(overloaded):
    fleet, first = overloaded.fleet, overloaded.best[0]
    assert first.verdict == "not"
    assert fleet.met
    assert fleet.replicas > 1
    assert {router for router, _ in fleet.behind} == set(ROUTERS)
    assert fleet.behind[0][1].measures["ttft_p95"].value < 0.25
    assert fleet.one_less is None or fleet.one_less.verdict == "not" or fleet.one_less.measures["ttft_p95"].value > 0.2
    # The control: so many servers, run as a user would.
    again = load_scenario(
        overloaded.traffic.part(first.candidate.scenario, 0, 1.0, 1.0)[0],
        cluster__replicas=fleet.replicas,
        cluster__router=fleet.behind[0][0],
    )
    assert run(again).summary["ttft_s"]["p95"] == fleet.behind[0][1].outcomes[0].measures["ttft_p95"]


def test_it_is_said_in_words_and_in_a_table(overloaded):
    fleet, saved = overloaded.fleet, overloaded.to_dict()
    router = fleet.behind[0][0]
    assert saved["fleet_in_words"].startswith(f"{fleet.replicas} such servers behind {router} meet it: predicted TTFT")
    assert saved["fleet_in_words"] in recommendation_of(saved).conclusions
    (section,) = [each for each in recommendation_of(saved).sections if each.title == f"{fleet.replicas} servers"]
    assert [row["router"] for row in section.tables[0].rows] == [router for router, _ in fleet.behind]


def test_the_servers_are_tried_with_prefill_and_decode_apart(overloaded):
    fleet, saved = overloaded.fleet, overloaded.to_dict()
    apart = fleet.apart
    assert 2 <= apart.replicas <= fleet.replicas
    assert apart.replicas == fleet.replicas or apart.meets
    assert fleet.needed[0] == (apart.replicas if apart.better == "apart" else fleet.replicas)
    meet = "meet it" if apart.meets else "do not meet it"
    divided = f"{counted(apart.prefill, 'server')} to prefill behind least-load and {apart.decode} to decode"
    assert f"With prefill and decode apart, {divided} {meet}" in saved["fleet_in_words"]
    assert any(line.startswith("prefill and decode apart: assumed of the link between") for line in saved["limits"])
    (section,) = [each for each in recommendation_of(saved).sections if each.title == f"{fleet.replicas} servers"]
    assert [(row["prefill"], row["decode"]) for row in section.tables[1].rows] == [(apart.prefill, apart.decode)]
    # The control: so many servers, run as a user would.
    scenario = overloaded.traffic.part(apart.found.candidate.scenario, 0, 1.0, 1.0)[0]
    assert scenario.cluster.roles == ("prefill",) * apart.prefill + ("decode",) * apart.decode
    assert run(scenario).summary["ttft_s"]["p95"] == apart.found.outcomes[0].measures["ttft_p95"]


def test_servers_that_cannot_be_divided_are_not_tried_apart(overloaded):
    first = overloaded.best[0]
    tiered = replace(first.candidate, scenario=load_scenario(first.candidate.scenario, cache__host_cells=4096))
    trials = ServerTrials(replace(first, candidate=tiered), overloaded.traffic, overloaded.slo, 1, lambda _: None)
    (found,) = trials.run([trials.divided(2, 1, "least-load")], range(1))
    assert "and none in host memory, are read from other servers" in found.outcomes[0].error
    assert find_apart(trials, "round-robin", {3: first}, range(1), range(1)) is None


def test_of_devices_their_number_is_priced():
    found = ask_of_many("rtx4090", "h100_sxm", price="rtx4090=0.5,h100_sxm=3")
    for answer in found.answers:
        assert answer.replicas == (1 if answer.met else answer.recommendation.fleet.replicas)
        assert answer.price_in_all == answer.replicas * answer.price_per_hour
    assert "This load takes " in found.conclusion
    assert "servers of rtx4090 behind " in found.conclusion


def test_where_one_server_suffices_none_is_looked_for(one):
    assert one.fleet is None
    assert one.to_dict()["fleet_in_words"] == ""
    assert find_fleet(one.best, one.traffic, one.slo, 1) is None


def test_so_many_that_do_not_suffice_are_said(overloaded, monkeypatch):
    monkeypatch.setattr("kvsim.advice.recommend.fleet.MOST_SERVERS", 2)
    fleet = find_fleet(overloaded.best, overloaded.traffic, overloaded.slo, 1)
    assert (fleet.replicas, fleet.met) == (2, overloaded.fleet.replicas <= 2)
    assert SMALL.replications == len(fleet.behind[0][1].outcomes)


def test_servers_have_the_settings_that_sustain_most(overloaded):
    first = overloaded.best[0]
    better = replace(first, loads=tuple(2 * load for load in first.loads))
    found = find_fleet([first, better], overloaded.traffic, overloaded.slo, 1)
    assert found.place == 2
    assert found.replicas <= overloaded.fleet.replicas
    told = replace(overloaded, best=(first, better), fleet=found).fleet_in_words
    assert told.startswith(f"{found.replicas} servers with the settings of place 2 behind ")


def test_an_interrupt_keeps_what_was_found(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsim.advice.recommend.on_devices.find_fleet", interrupted)
    found = ask_of_many("rtx4090")
    assert found.fleet is None
    assert found.best
    assert found.conclusion.startswith("Interrupted while several servers were tried, after ")


def test_it_is_told_of_each_run(overloaded):
    told = []
    find_fleet(overloaded.best, overloaded.traffic, overloaded.slo, 1, told.append)
    assert told == list(range(1, len(told) + 1))
    assert len(told) >= len(ROUTERS) * SMALL.replications


def test_settings_for_several_servers_say_so_and_more_are_counted_from_there(overloaded):
    two = ask_of_many("rtx4090", cluster={"replicas": 2, "router": "least-load"})
    assert " on each of 2 servers behind least-load: predicted " in two.conclusion
    assert two.fleet is None or two.fleet.replicas > 2
    unlike = ask_of_many("rtx4090", cluster={"servers": [{}, {"server": {"slots": 4}}]})
    assert unlike.fleet is None
    assert overloaded.fleet is not None
