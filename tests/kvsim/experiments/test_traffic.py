"""Replications of a workload, and how much more load its requests can make."""

import math

import pytest

from kvsim.advice.recommend.trials import MOST_DOUBLINGS, most_doublings
from kvsim.experiments.traffic import read_traffic
from kvsim.scenario.scenario import load_scenario

ROWS = [(start, f"u{start}", 0) for start in range(0, 90, 10)]


def table(tmp_path, gap_s, turns=5):
    """A log of chats that begin every 10 s, each with ``turns`` turns ``gap_s`` apart."""
    rows = sorted((start + turn * gap_s, user) for start, user, _ in ROWS for turn in range(turns))
    path = tmp_path / "log.csv"
    path.write_text("arrival,prompt,output,session\n" + "".join(f"{at},20,5,{user}\n" for at, user in rows))
    return load_scenario({"workload": {"kind": "table", "path": str(path), "columns": {"session": "session"}}})


def test_requests_that_arrive_by_themselves_can_make_any_load():
    traffic = read_traffic(load_scenario("chat"), 1, 60, 1.0)
    assert traffic.largest_factor == math.inf
    assert most_doublings(traffic) == MOST_DOUBLINGS


@pytest.mark.parametrize("gap_s", [1.0, 5.0, 100.0])
def test_conversations_make_no_more_load_than_all_of_them_at_once(tmp_path, gap_s):
    """Nine chats begin within 80 s; each lasts four gaps, beside the time of its answers."""
    traffic = read_traffic(table(tmp_path, gap_s), 1, None, 1.0)
    assert traffic.largest_factor == pytest.approx(max(80.0 / (4 * gap_s), 1.0), rel=0.3)
    assert 2.0 ** most_doublings(traffic) <= traffic.largest_factor


def test_a_closed_loop_has_no_more_users_than_requests():
    loop = load_scenario({"workload": {"kind": "closed-loop", "users": 4, "requests": 60}})
    assert read_traffic(loop, 1, 60, 1.0).largest_factor == 15.0


def test_what_is_offered_is_requests_over_the_time_in_which_they_come(tmp_path):
    """Nine chats of five turns begin 10 s apart: half a request per second, whatever lies between turns."""
    for gap_s in (1.0, 100.0):
        offered = read_traffic(table(tmp_path, gap_s), 1, None, 1.0).offered
        assert offered.requests_per_s == pytest.approx(0.5)
        assert offered.output_tokens_per_s == pytest.approx(2.5)
    once, twice = (read_traffic(load_scenario("chat"), 2, 200, factor).offered for factor in (1.0, 2.0))
    assert once.requests_per_s == pytest.approx(load_scenario("chat").workload.rate, rel=0.2)
    assert twice.requests_per_s == pytest.approx(2 * once.requests_per_s)


@pytest.mark.parametrize("kind", ["closed-loop", "batch"])
def test_nothing_is_offered_where_the_service_decides_or_all_come_at_once(kind):
    users = {"users": 4} if kind == "closed-loop" else {}
    assert (
        read_traffic(load_scenario({"workload": {"kind": kind, "requests": 60, **users}}), 1, 60, 1.0).offered is None
    )


def test_fewer_or_more_requests_than_usual_can_be_the_default():
    assert read_traffic(load_scenario({"workload": {"requests": 900}}), 1, None, 1.0).requests == 400
    assert read_traffic(load_scenario({"workload": {"requests": 900}}), 1, None, 1.0, most=700).requests == 700
