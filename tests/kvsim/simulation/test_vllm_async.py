"""vLLM's asynchronous scheduling step by step in small worlds: what a step sees of what happens around it."""

import pytest

import kvsim
from kvsim.engines.recordings.replay import ZeroTimeBackend
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import SCHEDULERS, AsyncVllm
from kvsim.simulation.set_up import build_policy
from tests.kvsim.simulation.random_runs import outcome
from tests.kvsim.simulation.stories import closed, each, livelock, says, tell
from tests.kvsim.simulation.test_vllm import vllm
from workloads import Request


def ahead(blocks=100, **keys):
    return vllm(blocks, server__async_scheduling=True, **keys)


def test_a_request_that_arrives_during_a_step_is_in_the_second_step_after_it():
    """The next step has been composed already."""
    rows = [(0.0, 4, 4), (0.5, 3, 1)]
    assert tell(vllm(), rows).steps == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)], [(0, 5, 1)], [(0, 6, 1)]]
    story = tell(ahead(), rows)
    assert story.steps == [[(0, 0, 4)], [(0, 4, 1)], [(0, 5, 1), (1, 0, 3)], [(0, 6, 1)]]
    assert each(story, "first_token_s") == [1.0, 3.0]


def test_a_server_with_nothing_to_do_takes_a_request_at_once():
    story = tell(ahead(), [(0.0, 4, 1), (5.0, 4, 2)])
    assert each(story, "first_token_s") == [1.0, 6.0]
    assert each(story, "finished_s") == [1.0, 7.0]


def test_the_rest_of_a_prompt_is_composed_before_those_that_arrive_meanwhile():
    story = tell(ahead(server__n_batch=6), [(0.0, 9, 2), (0.5, 4, 1)])
    assert story.steps == [[(0, 0, 6)], [(0, 6, 3)], [(0, 9, 1), (1, 0, 4)]]


def test_a_slot_is_given_out_in_the_second_step_after_its_requests_last():
    rows = [(0.0, 4, 2), (0.0, 4, 4), (0.0, 4, 1)]
    assert tell(vllm(server__slots=2), rows).steps[2] == [(1, 5, 1), (2, 0, 4)]
    story = tell(ahead(server__slots=2), rows)
    assert story.steps == [[(0, 0, 4), (1, 0, 4)], [(0, 4, 1), (1, 4, 1)], [(1, 5, 1)], [(1, 6, 1), (2, 0, 4)]]


def test_a_request_that_has_ended_holds_its_blocks_for_one_step():
    """Request 1 wants a third block in step 2; request 0, which has ended, still holds two."""
    rows = [(0.0, 8, 1), (0.0, 7, 4)]
    assert tell(vllm(4), rows).recorder.counts.preemptions == 0
    story = tell(ahead(4), rows)
    assert story.recorder.counts.preemptions == 0
    assert story.steps == [[(0, 0, 8), (1, 0, 7)], [(1, 7, 1)], [(1, 8, 1)], [(1, 9, 1)]]
    tight = tell(ahead(4), [(0.0, 8, 1), (0.0, 8, 4)])
    assert tight.recorder.counts.preemptions == 1
    assert tell(vllm(4), [(0.0, 8, 1), (0.0, 8, 4)]).recorder.counts.preemptions == 0


def test_where_nothing_could_be_composed_ahead_the_next_step_waits_for_the_one_that_runs():
    """Request 1 finds no room beside request 0, and starts as soon as that has ended."""
    rows = [(0.0, 12, 2), (0.0, 12, 1)]
    assert tell(ahead(4), rows).steps == [[(0, 0, 12)], [(0, 12, 1)], [(1, 0, 12)]]
    assert tell(ahead(4), rows).steps == tell(vllm(4), rows).steps


@pytest.mark.parametrize("policy", ["contiguous", "fill-holes", "ring"])
def test_layouts_that_place_whole_steps_are_served_too(policy):
    world = ahead(server__slots=2, cache__policy=policy, cache__cells=20, server__slot_context=12)
    story = tell(world, [(0.0, 8, 3), (0.0, 8, 2), (0.5, 6, 2)])
    assert [job.status for job in story.jobs.values()] == ["completed"] * 3


def test_a_run_without_progress_ends():
    assert livelock(ahead(), [(0.0, 4, 1)], closed(ahead().cache_config()))


ANSWER = 1 << 48
"""The number of the text that request 0 answers with."""


@pytest.mark.parametrize(("at", "after", "found"), [(0.5, 4, 4), (1.5, 8, 8)])
def test_a_block_with_a_token_of_the_running_step_is_found_a_step_later(at, after, found):
    """The second block of request 0 ends with its second output token, which step 3 places and step 2 gives."""
    rows = [says(0, 0.0, (1, 0, 6), output=8), says(1, at, (1, 0, 6), (ANSWER, 0, 2), (2, 0, 4))]
    assert each(tell(vllm(cache__prefix_cache=True), rows), "cached") == [0, after]
    story = tell(ahead(cache__prefix_cache=True), rows)
    assert each(story, "cached") == [0, found]
    assert next(at for at, step in enumerate(story.steps, 1) if len(step) > 1) == (3 if found == 4 else 4)


def test_a_request_that_has_ended_but_holds_its_blocks_is_preempted_first():
    """Request 0 wants a third block in step 2; request 1 was admitted last, and has ended."""
    story = tell(ahead(4), [(0.0, 8, 4), (0.0, 8, 1)])
    assert story.steps == [[(0, 0, 8), (1, 0, 8)], [(0, 8, 1)], [(0, 9, 1)], [(0, 10, 1)]]
    assert each(story, "preemptions") == [0, 1]
    assert story.recorder.counts.preemptions == 1
    assert each(story, "finished_s") == [4.0, 1.0]
    assert [job.status for job in story.jobs.values()] == ["completed"] * 2


def test_a_token_in_flight_is_not_lost_by_a_preemption():
    """Request 1 gives way in step 2, while the token that step 1 gives is not known; it computes it again, with it."""
    story = tell(ahead(4), [(0.0, 8, 3), (0.0, 8, 3)])
    assert story.steps == [[(0, 0, 8), (1, 0, 8)], [(0, 8, 1)], [(0, 9, 1)], [(1, 0, 9)], [(1, 9, 1)]]
    assert each(story, "first_token_s") == [1.0, 1.0]
    assert each(story, "finished_s") == [3.0, 5.0]


def test_nothing_waits_for_a_request_that_is_cancelled():
    """Whether it has not been seen, waits, runs, or has ended and holds its blocks."""
    policy = build_policy(world := ahead(4), "paged")
    scheduler = AsyncVllm(world, policy, ZeroTimeBackend(), Recorder())
    jobs = [Job(Request(number, 0.0, 8, output), 0.0) for number, output in enumerate((1, 5, 5, 5))]
    for job in jobs[:3]:
        scheduler.submit(job, 0.0)
    step = scheduler.compose(0.0)
    assert [(chunk.start, chunk.n) for chunk in step] == [(0, 8), (0, 8)]
    policy.allocate(step)
    scheduler.commit(step, 1, 1.0)
    scheduler.submit(jobs[3], 1.0)
    for job in jobs:
        scheduler.cancel(job, 1.0)
    assert [job.status for job in jobs] == ["completed", "failed", "failed", "failed"]
    assert (len(policy.pool.free), list(scheduler.waiting), scheduler.running) == (4, [], [])
    assert scheduler.compose(1.0) == ()


@pytest.mark.parametrize("name", ["h2o", "streaming-llm"])
def test_what_has_ended_evicts_nothing_while_no_step_asks_for_room(name):
    """Whether or not others could be rows then: its blocks are given back all at once, in their order."""
    workload = {"kind": "closed-loop", "users": 1, "requests": 12, "think_s": 0.2}
    lengths = {"prompt_tokens": {"kind": "fixed", "value": 70}, "output_tokens": {"kind": "fixed", "value": 1}}
    server = {"scheduler": "vllm", "async_scheduling": True}
    cache = {"cells": 400, "block_size": 4, "budget": 24}
    world = load_scenario({"workload": workload | lengths, "server": server, "cache": cache})
    assert outcome(world, name) == outcome(world, name, most_steps=0)


class CountingScheduler(AsyncVllm):
    """Counts how often it is asked for a step."""

    asked = 0

    def compose(self, now):
        CountingScheduler.asked += 1
        return super().compose(now)


def asked(monkeypatch, most_steps):
    """How often the scheduler is asked in a run with few requests, and its forward passes."""
    monkeypatch.setitem(SCHEDULERS, "vllm", CountingScheduler)
    monkeypatch.setattr(CountingScheduler, "asked", 0)
    world = load_scenario("chat", workload__requests=20, server__scheduler="vllm", server__async_scheduling=True)
    passes = kvsim.run(world, "vllm", most_steps=most_steps).summary["forward_passes"]
    return CountingScheduler.asked, passes


def test_most_steps_are_taken_together(monkeypatch):
    """The control of tests that compare steps that are taken together with single ones."""
    together, passes = asked(monkeypatch, 1 << 62)
    assert together < passes / 5
    assert asked(monkeypatch, 1)[0] >= passes
