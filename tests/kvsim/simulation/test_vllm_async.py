"""vLLM's asynchronous scheduling step by step in small worlds: what a step sees of what happens around it."""

import pytest

from tests.kvsim.simulation.stories import closed, each, livelock, tell
from tests.kvsim.simulation.test_vllm import vllm


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
    assert tell(vllm(4), rows).recorder.preemptions == 0
    story = tell(ahead(4), rows)
    assert story.recorder.preemptions == 0
    assert story.steps == [[(0, 0, 8), (1, 0, 7)], [(1, 7, 1)], [(1, 8, 1)], [(1, 9, 1)]]
    tight = tell(ahead(4), [(0.0, 8, 1), (0.0, 8, 4)])
    assert tight.recorder.preemptions == 1
    assert tell(vllm(4), [(0.0, 8, 1), (0.0, 8, 4)]).recorder.preemptions == 0


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
