"""Which runs are of the same requests, and by how much they differ."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engines.recordings.latencies import measured_latencies, statistic_of
from kvsim.engines.recordings.recorded_server import ServedRequest
from kvsim.engines.recordings.spread import same_requests, spread_of
from workloads.traces.recorded import AskedRequest


def run(name, times, server="s", settings="a", after=(), lengths=None):
    """A run of requests that take a second to the first token and ``times`` in all; by id."""
    requests = tuple(
        ServedRequest(
            str(number),
            AskedRequest(float(number), (("text", 0, 10),), (lengths or {}).get(number, 11)),
            number + 1.0,
            number + seconds,
            None,
        )
        for number, seconds in times.items()
    )
    clients = SimpleNamespace(after=dict.fromkeys(after))
    return SimpleNamespace(
        path=Path(name), name=name, requests=requests, clients=clients, same_server=server, same_settings=settings
    )


TWELVE = dict.fromkeys(range(12), 2.0)
SLOWER = dict.fromkeys(range(12), 2.5)


def moved(one, by_s, ids):
    """A run in which some requests came later."""
    requests = tuple(later(request, by_s) if int(request.id) in ids else request for request in one.requests)
    return SimpleNamespace(**{**vars(one), "requests": requests})


def later(request, by_s):
    asked = request.asked._replace(arrival_s=request.asked.arrival_s + by_s)
    return ServedRequest(request.id, asked, request.first_token_s + by_s, request.last_token_s + by_s, None)


def test_latencies():
    table = measured_latencies(run("a", {0: 3.0, 1: 2.0}, lengths={1: 1}))
    assert table.loc["0"].tolist() == pytest.approx([1.0, 0.2, 3.0])
    assert table.loc["1", "e2e_s"] == 2.0
    assert table["tpot_s"].isna().tolist() == [False, True]
    assert measured_latencies(run("a", {0: 3.0, 1: 2.0}), {"1"}).index.tolist() == ["1"]
    assert measured_latencies(run("a", {})).empty


def test_a_statistic_is_a_quantile_or_the_mean():
    values = measured_latencies(run("a", {0: 2.0, 1: 4.0, 2: 9.0}))["e2e_s"]
    assert [statistic_of(values, name) for name in ("mean", "p50", "p95")] == [5.0, 4.0, 8.5]


def test_the_same_requests_twice():
    assert same_requests(run("a", TWELVE), run("b", SLOWER))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (dict.fromkeys(range(9), 2.0), False),
        (dict.fromkeys(range(10), 2.0), True),
        (dict.fromkeys(range(1, 13), 2.0), True),
        (dict.fromkeys(range(3, 15), 2.0), False),
        (dict.fromkeys(range(40), 2.0), True),
    ],
    ids=["too few", "fewest", "one missing in each", "three missing in each", "one ended earlier"],
)
def test_how_many_requests_must_be_the_same(other, same):
    assert same_requests(run("a", TWELVE), run("b", other)) is same
    assert same_requests(run("b", other), run("a", TWELVE)) is same


def test_other_lengths_are_other_requests():
    assert not same_requests(run("a", TWELVE), run("b", TWELVE, lengths={5: 12}))


def test_requests_at_other_times_are_others_unless_they_waited_for_an_answer():
    one = run("a", TWELVE)
    assert same_requests(one, moved(one, 0.4, {3}))
    assert not same_requests(one, moved(one, 0.6, {3}))
    waited = run("a", TWELVE, after=[3])
    assert same_requests(waited, moved(waited, 30.0, {3}))


def test_the_spread_is_the_largest_difference():
    found = spread_of(run("a", TWELVE), [run("b", SLOWER), run("c", dict.fromkeys(range(12), 2.2))])
    assert set(found.runs) == {"a", "b", "c"}
    assert found.of["e2e_s", "mean"] == pytest.approx(0.25)
    assert found.of["ttft_s", "p50"] == 0.0
    assert found.of["tpot_s", "mean"] == pytest.approx(0.5)


def test_only_requests_that_both_runs_have_are_compared():
    early = run("b", dict.fromkeys(range(10), 2.0))
    long = run("a", {number: 2.0 if number < 10 else 99.0 for number in range(20)})
    assert spread_of(long, [early]).of["e2e_s", "mean"] == 0.0


def test_runs_of_other_servers_and_settings_tell_nothing():
    one = run("a", TWELVE)
    assert spread_of(one, [one]) is None
    assert spread_of(one, [run("b", SLOWER, server="t")]) is None
    assert spread_of(one, [run("b", SLOWER, settings="b")]) is None


def test_other_requests_of_the_same_server_tell_what_there_is():
    alone = run("x", dict.fromkeys(range(3), 1.0))
    pair = [run("a", TWELVE), run("b", SLOWER)]
    assert spread_of(alone, pair).of["e2e_s", "mean"] == pytest.approx(0.25)
    assert spread_of(alone, pair).runs == ("a", "b")


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(1.5, 9), st.floats(1.5, 9)), min_size=10, max_size=20))
def test_it_is_the_same_whichever_run_comes_first(pairs):
    one, other = (run(name, {i: pair[at] for i, pair in enumerate(pairs)}) for at, name in enumerate("ab"))
    assert same_requests(one, other)
    forth, back = spread_of(one, [other]), spread_of(other, [one])
    assert forth.of == back.of
    assert all(value >= 0 for value in forth.of.values())
