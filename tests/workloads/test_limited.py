"""Limits of output tokens that clients state."""

import pytest

from kvsim.scenario.scenario import load_scenario
from workloads import Capped, LimitedOutputs, Lognormal, Synthetic, named_rng, no_gaps

LONG = {"kind": "lognormal", "mu": 4.0, "sigma": 1.0, "min": 1, "max": 1000}
SESSIONS = {"kind": "sessions", "sessions": 20, "rate": 5.0, "output_tokens": LONG}


def test_longer_outputs_are_cut_and_all_else_stays():
    free = Synthetic(1, 200, no_gaps, Lognormal(3.0, 1.0), Lognormal(4.0, 1.0), users=3)
    limited = LimitedOutputs(free, 50)
    before, after = list(free), list(limited)
    assert max(r.output_tokens for r in before) > 50
    assert [r.output_tokens for r in after] == [min(r.output_tokens, 50) for r in before]
    assert {r.max_output_tokens for r in after} == {50}
    assert [r._replace(output_tokens=0, max_output_tokens=None) for r in after] == [
        r._replace(output_tokens=0) for r in before
    ]
    assert (limited.n_requests, limited.users, limited.notes, limited.prefixes) == (200, 3, (), "tokens")


def test_the_lower_of_two_limits_holds():
    twice = LimitedOutputs(LimitedOutputs(Synthetic(1, 50, no_gaps, Lognormal(3.0, 1.0), Lognormal(4.0, 1.0)), 30), 90)
    assert {r.max_output_tokens for r in twice} == {30}


def test_capped_lengths_are_those_of_the_distribution_up_to_the_cap():
    free = Lognormal(4.0, 1.0)
    drawn = Capped(free, 60).draw(named_rng(1, "x"), 500)
    assert drawn.max() == 60
    assert (drawn == free.draw(named_rng(1, "x"), 500).clip(max=60)).all()


@pytest.mark.parametrize("kind", ["poisson", "closed-loop", "batch"])
def test_every_generator_takes_the_key(kind):
    scenario = load_scenario({"workload": {"kind": kind, "output_tokens": LONG, "max_output_tokens": 40}})
    outputs = [r.output_tokens for r in scenario.build_workload()]
    assert max(outputs) == 40 > min(outputs)


def test_later_turns_quote_what_was_generated():
    requests = list(load_scenario({"workload": {**SESSIONS, "max_output_tokens": 40}}).build_workload())
    answers = {r.answer.source: r.output_tokens for r in requests}
    quoted = [s for r in requests for s in r.content if s.source in answers]
    assert quoted
    assert all(s.n == answers[s.source] <= 40 for s in quoted)


def test_parts_of_a_mix_have_limits_of_their_own():
    part = {"kind": "poisson", "requests": 100, "output_tokens": LONG}
    mix = {"kind": "mix", "parts": [{**part, "max_output_tokens": 40}, part]}
    limits = [r.max_output_tokens for r in load_scenario({"workload": mix}).build_workload()]
    assert limits.count(40) == limits.count(None) == 100
