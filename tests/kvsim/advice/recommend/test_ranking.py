"""How settings are ranked, by certainty, load and memory, and what is promised of them."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import load_scenario
from kvsim.advice.recommend.finalists import RULE, Finalist, rank
from kvsim.advice.recommend.recommendation import _missed
from kvsim.advice.recommend.slo import read_slo
from kvsim.advice.recommend.trials import (
    FindLargestLoad,
    LoadSearch,
    TrialOutcome,
    TrialRun,
)
from kvsim.experiments.estimates import replication_interval
from kvsim.experiments.traffic import read_traffic
from tests.kvsim.advice.recommend.worlds import BUSY, space_of


@cache
def choices_of_llamacpp():
    return space_of().candidates


def finalist(number, *values, loads, memory=0, limit=1.0):
    choices = choices_of_llamacpp()
    shares = {"failed_share": 0.0, "truncated_share": 0.0}
    outcomes = tuple(TrialOutcome({"ttft_p95": value, **shares}, True) for value in values)
    candidate = replace(choices[number], memory_bytes=memory)
    return Finalist(candidate, read_slo(f"ttft_p95<{limit}s"), outcomes, loads)


def test_the_ranking_goes_by_certainty_then_load_then_memory():
    sure = finalist(0, 0.4, 0.5, 0.45, loads=(1.1, 1.2, 1.1))
    likely = finalist(1, 0.5, 1.1, 0.7, loads=(3.0, 3.0, 3.0))
    missing = finalist(2, 2.0, 2.1, 2.2, loads=(0.5, 0.5, 0.5))
    more = finalist(3, 0.4, 0.5, 0.45, loads=(2.0, 2.1, 2.0), memory=9)
    equal = finalist(4, 0.4, 0.5, 0.45, loads=(1.95, 2.05, 2.0), memory=5)
    assert [f.verdict for f in (sure, likely, missing)] == ["surely", "likely", "not"]
    order = rank([missing, likely, sure, more, equal])
    assert [f.candidate.number for f in order] == [4, 3, 0, 1, 2]
    assert sure.sustained.value == pytest.approx(math.exp(sum(map(math.log, sure.loads)) / 3))
    assert finalist(0, 0.4, loads=(0.0,)).sustained is None
    assert finalist(0, 0.4, loads=(2.0,)).verdict == "likely"


def test_the_nearest_has_the_smallest_worst_miss_unless_arrivals_outpace_it():
    near, far = finalist(0, 1.3, loads=(0.6,)), finalist(1, 1.8, loads=(0.8,))
    assert rank([far, near]) == [near, far]
    outpaced = finalist(2, 1.1, loads=(0.9,))
    outpaced = replace(outpaced, outcomes=tuple(replace(o, settled=False) for o in outpaced.outcomes))
    assert rank([outpaced, far, near]) == [near, far, outpaced]


@pytest.mark.slow
def test_what_is_promised_holds_in_95_of_100_fresh_seeds():
    """On seeds beyond the five of a recommendation, the mean of their largest loads holds in about half."""
    seeds = 120
    traffic = read_traffic(load_scenario(BUSY), seeds, 40, 1.0)
    scenario = next(c for c in space_of("vllm", traffic=traffic).candidates if c.scenario.server.slots == 8).scenario
    find = FindLargestLoad(traffic, read_slo("ttft_p95<200ms"), 3)
    loads = np.array([find(LoadSearch(TrialRun(0, r, scenario, 1.0, 1.0), about=1.0))[1] for r in range(seeds)])
    rng = np.random.default_rng(1)
    promised, mean = [], []
    for _ in range(1000):
        *five, fresh = loads[rng.choice(seeds, 6, replace=False)].tolist()
        judged = finalist(0, *[0.5] * 5, loads=tuple(five))
        promised.append(fresh >= judged.promised)
        mean.append(fresh >= judged.sustained.value)
    assert 0.93 <= np.mean(promised) <= 0.99
    assert np.mean(mean) < 0.7


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.1, 2), st.floats(0, 4), st.integers(0, 3)), min_size=2, max_size=6))
def test_next_to_each_other_equals_go_by_memory(worlds):
    """Equal is what is within 5 % by load or, where no load is sustained, by the worst bound."""
    made = [
        finalist(i, value, loads=(round(load, 1),), memory=memory) for i, (value, load, memory) in enumerate(worlds)
    ]
    for first, second in pairwise(rank(made)):
        if first.verdict != second.verdict:
            assert first.verdict == "likely"
        elif first.verdict == "not":
            ratio = second.worst[1] / first.worst[1]
            assert ratio >= 0.949
            assert ratio > 1.05 or first.candidate.memory_bytes <= second.candidate.memory_bytes
        elif first.sustained and second.sustained:
            ratio = first.sustained.value / second.sustained.value
            assert ratio >= 0.949
            assert ratio > 1.05 or first.candidate.memory_bytes <= second.candidate.memory_bytes
        elif first.sustained or second.sustained:
            assert first.sustained
        else:
            ratio = second.worst[1] / first.worst[1]
            assert ratio >= 0.949
            assert ratio > 1.05 or first.candidate.memory_bytes <= second.candidate.memory_bytes


def test_the_rule_says_what_counts_where_no_load_is_sustained():
    near, far = finalist(0, 1.5, loads=(0.0,), memory=9), finalist(1, 3.0, loads=(0.0,), memory=1)
    assert rank([far, near]) == [near, far]
    assert "or no load is sustained, by the worst bound over its limit" in RULE


def test_places_that_do_the_same_are_each_named_once_by_what_differs():
    slots = [("--parallel", "1"), ("--kv-unified", "")], [("--parallel", "1")], [("--parallel", "1")]
    one, bare, again = (SimpleNamespace(flags=tuple(flags), notes=[]) for flags in slots)
    unified = Finalist(one, read_slo("ttft_p95<1s"), (), (), 1.0, (bare, again))
    assert unified.notes == ["any of these does the same: as typed; without --kv-unified"]
    assert Finalist(bare, unified.slo, (), (), 1.0, (again,)).notes == []


@pytest.mark.slow
def test_of_settings_with_the_same_memory_the_smaller_host_cache_comes_first():
    space = space_of(reuse=True)
    first = next(c for c in space.candidates if c.settings["cache_ram"] == 0)
    large = next(c for c in space.candidates if c.settings["cache_ram"] == 8192)
    made = finalist(0, 0.5, loads=(2.0,))
    without = replace(made, candidate=replace(first, number=7, memory_bytes=5))
    kept = replace(made, candidate=replace(large, number=3, memory_bytes=5))
    assert rank([kept, without]) == [without, kept]


def test_requests_that_fail_at_every_load_are_told_by_their_share():
    slo, none = read_slo("ttft_p95<1s"), {"ttft_p95": 0.5, "truncated_share": 0.0}
    shares = {"failed_share": replication_interval([0.02, 0.02])}
    failing = SimpleNamespace(outcomes=(), worst=slo.worst({**none, "failed_share": 0.02}), measures=shares)
    assert _missed(failing) == "2.0% of the requests failed at this load, and some at every load"
