"""Reservation against preemption, in whole runs: who starts, who is preempted, and that steps taken together agree."""

import io

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings

from kvsim.simulation.schedulers import SCHEDULERS
from policies.paging.admission_rules import ExpectedRule
from tests.kvsim.simulation.random_runs import outcome, scenarios
from tests.kvsim.simulation.stories import each, tell
from tests.worlds import scenario
from workloads import Request


def paged(blocks, **keys):
    """vLLM's scheduler over so many usable blocks of four cells, where nothing is found again."""
    cells = {"cache__policy": "paged", "cache__block_size": 4, "cache__cells": 4 * (blocks + 1)}
    return scenario(**{"server__scheduler": "vllm", **cells, "cache__prefix_cache": False, **keys})


def limited(number, at, prompt, output, limit):
    return Request(number, at, prompt, output, max_output_tokens=limit)


THREE = [limited(n, 0.0, 4, 9, 9) for n in range(3)]
"""Each has 12 cells in the end: three blocks."""


def test_a_stated_limit_is_the_most_that_a_sequence_may_hold():
    """The last token is never computed."""
    for policy, cells in (("hf-reserved", 24), ("paged", 28)):
        world = paged(6, cache__policy=policy, cache__cells=cells)
        assert tell(world, THREE[:2]).recorder.counts.preemptions == 0


def test_without_a_stated_limit_a_slot_s_context_is_reserved():
    story = tell(paged(8, cache__admission="no-evict", server__slot_context=16), [(0.0, 4, 9)] * 3)
    assert [len(step) for step in story.steps] == [2] * 9 + [1] * 9


def test_no_evict_starts_as_many_as_can_end():
    as_it_fits = tell(paged(6), THREE)
    assert as_it_fits.recorder.counts.preemptions > 0
    story = tell(paged(6, cache__admission="no-evict"), THREE)
    assert story.recorder.counts.preemptions == story.recorder.counts.recomputed_tokens == 0
    assert [len(step) for step in story.steps] == [2] * 9 + [1] * 9


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=scenarios(schedulers=("vllm",)))
def test_no_evict_never_preempts(world):
    found = outcome(world, "no-evict", detail="requests")
    assert isinstance(found, str) or found[0].preemptions == 0


def test_the_newest_is_preempted_or_the_one_that_has_generated_least():
    """0 has taken three steps for its prompt, 1 one step for its own, when 0 needs a block that is not there."""
    requests, slowly = [(0.0, 12, 8), (0.0, 4, 9)], {"server__long_prefill_threshold": 4, "server__n_batch": 16}
    assert each(tell(paged(5, **slowly), requests), "preemptions") == [0, 1]
    assert each(tell(paged(5, **slowly, server__victim="fewest-generated"), requests), "preemptions") == [1, 0]


def test_among_equals_the_longest_prompt_is_preempted():
    requests = [(0.0, 8, 9), (0.0, 4, 9)]
    assert each(tell(paged(5), requests), "preemptions") == [0, 1]
    assert each(tell(paged(5, server__victim="fewest-generated"), requests), "preemptions") == [1, 0]


def test_priority_comes_before_progress():
    urgent = [Request(0, 0.0, 8, 9, priority=0), Request(1, 0.0, 4, 9, priority=1)]
    world = paged(5, server__victim="fewest-generated", server__order="priority")
    assert each(tell(world, urgent), "preemptions") == [0, 1]


def test_a_preempted_request_waits_before_all_others_or_behind_them():
    """1 is preempted while 2 waits for a slot."""
    requests = [(0.0, 8, 9), (0.0, 4, 9), (0.5, 4, 2)]
    front = tell(paged(5, server__slots=2), requests)
    back = tell(paged(5, server__slots=2, server__requeue="back"), requests)
    assert front.jobs[1].preemptions == back.jobs[1].preemptions == 1
    assert front.jobs[2].started_s == 9.0, "when 0 has ended, and 1 has started again"
    assert back.jobs[2].started_s == 6.0, "as soon as a slot and a block are free"


DECAY = {
    "workload__kind": "batch",
    "workload__requests": 8,
    "workload__prompt_tokens": {"kind": "fixed", "value": 20},
    "workload__output_tokens": {"kind": "fixed", "value": 700},
    "workload__max_output_tokens": 900,
    "server__slot_context": 1000,
    "server__slots": 8,
}
"""Six requests start at once; then the share of limits falls while none ends, until another one may start."""


def fallen(scheduler):
    return paged(1100, **DECAY | {"server__scheduler": scheduler})


def requests_in(found):
    """The table of requests in the outcome of a run."""
    *_, requests, _, _ = found
    return pd.read_csv(io.StringIO(requests))


@pytest.mark.slow
@pytest.mark.parametrize("detail", ["requests", "tables"])
@pytest.mark.parametrize("scheduler", ["vllm", "llama-server"])
def test_a_request_starts_at_the_step_at_which_the_share_has_fallen_enough(scheduler, detail):
    together = outcome(fallen(scheduler), "expected-length", detail=detail)
    assert together == outcome(fallen(scheduler), "expected-length", most_steps=0, detail=detail)
    starts, ends = (requests_in(together)[time] for time in ("started_s", "finished_s"))
    assert starts.nsmallest(7).iloc[-1] > starts.nsmallest(6).iloc[-1] + 0.2
    assert starts.nsmallest(7).iloc[-1] < ends.min()


@pytest.mark.parametrize("scheduler", ["vllm", "llama-server"])
def test_a_rule_that_does_not_say_that_it_changes_is_skipped_past(scheduler, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(ExpectedRule, "admits_while_decoding", False)
    together, alone = (
        requests_in(outcome(fallen(scheduler), "expected-length", most_steps=most, detail="requests"))
        for most in (1 << 62, 0)
    )
    assert together["started_s"].tolist() != alone["started_s"].tolist()


def test_all_schedulers_serve_all_under_every_rule():
    for scheduler in SCHEDULERS:
        for rule in ("no-evict", "expected"):
            world = paged(30, server__scheduler=scheduler, cache__admission=rule)
            assert each(tell(world, THREE), "generated") == [9, 9, 9]
