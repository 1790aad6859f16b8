"""llama-server with fairer rules, step by step beside the server's own."""

import pytest

from kvsim.scenario.scenario import load_scenario
from tests.kvsim.simulation.stories import each, says, tell
from tests.worlds import scenario

SYSTEM = (1, 0, 8)
"""What all users begin with."""


def world(scheduler, slots=2, **keys):
    return scenario(**{"server__scheduler": scheduler, "server__slots": slots, "cache__cells": 96, **keys})


def both(requests, slots=2, **keys):
    """The stories of the fair server and of the server."""
    return [tell(world(f"llama-server{kind}", slots, **keys), requests) for kind in ("-fair", "")]


def slots_of(story):
    return [batch.chunks[0].seq for batch in story.passes]


def test_users_who_share_a_system_prompt_get_a_slot_each_and_come_back_to_it():
    requests = [
        says(0, 0.0, SYSTEM, (2, 0, 8)),
        says(1, 10.0, SYSTEM, (3, 0, 8)),
        says(2, 20.0, SYSTEM, (2, 0, 8), (4, 0, 4)),
        says(3, 30.0, SYSTEM, (3, 0, 8), (5, 0, 4)),
    ]
    fair, todays = both(requests, server__cache_ram=0)
    assert slots_of(fair) == [1, 0, 1, 0]
    assert each(fair, "cached") == [0, 0, 16, 16]
    assert slots_of(todays) == [1, 1, 1, 1]
    assert each(todays, "cached") == [0, 8, 8, 8]


@pytest.mark.parametrize(("said", "slot"), [(7, 1), (8, 0)])
def test_a_slot_is_taken_over_only_if_more_is_found_there_than_thrown_away(said, slot):
    requests = [says(0, 0.0, SYSTEM, (2, 0, said)), says(1, 10.0, SYSTEM, (3, 0, 8))]
    story = tell(world("llama-server-fair", server__cache_ram=0), requests)
    assert slots_of(story) == [1, slot]


def test_of_slots_that_hold_the_same_beginning_the_one_used_longest_ago_is_taken():
    requests = [
        says(0, 0.0, SYSTEM, (2, 0, 8)),
        says(1, 10.0, SYSTEM, (3, 0, 9)),
        says(2, 20.0, SYSTEM, (4, 0, 8)),
        says(3, 30.0, SYSTEM, (5, 0, 8)),
    ]
    story = tell(world("llama-server-fair", server__cache_ram=0), requests)
    assert slots_of(story) == [1, 0, 1, 0]
    assert each(story, "cached") == [0, 0, 8, 8]


def test_a_longer_beginning_in_the_host_cache_is_preferred_to_a_shorter_one_in_a_slot():
    """Request 4 goes on from request 1, of whose slot only the system prompt is left."""
    requests = [
        says(0, 0.0, SYSTEM, (2, 0, 8)),
        says(1, 10.0, SYSTEM, (3, 0, 12)),
        says(2, 20.0, (5, 0, 20)),
        says(3, 30.0, SYSTEM, (4, 0, 4)),
        says(4, 40.0, SYSTEM, (3, 0, 12), (6, 0, 4)),
    ]
    fair, _ = both(requests)
    assert slots_of(fair) == [1, 0, 1, 0, 1]
    assert each(fair, "cached") == [0, 0, 0, 8, 20]
    without = tell(world("llama-server-fair", server__cache_ram=0), requests)
    assert slots_of(without)[4] == 0
    assert each(without, "cached")[4] == 8


def test_the_history_of_another_user_is_brought_back_and_stays_in_the_host_cache():
    """Request 4 finds the system prompt in what request 0 left, and request 5 goes on from there."""
    requests = [
        says(0, 0.0, SYSTEM, (2, 0, 12)),
        *(says(number, 10.0 * number, (5 + number, 0, 20)) for number in (1, 2, 3)),
        says(4, 40.0, SYSTEM, (3, 0, 4)),
        says(5, 50.0, SYSTEM, (2, 0, 12), (4, 0, 4)),
    ]
    fair, todays = both(requests)
    assert each(fair, "cached") == [0, 0, 0, 0, 8, 20]
    assert each(todays, "cached") == [0, 0, 0, 0, 8, 8]


def test_prompts_are_computed_in_the_order_in_which_they_came():
    burst = [says(number, 0.0, (number, 0, 12)) for number in range(3)]
    fair, todays = both(burst, 3, server__n_batch=8)
    order = [[number for step in story.steps for number, _, _ in step] for story in (fair, todays)]
    assert order == [[0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0]]
    assert each(fair, "first_token_s") == sorted(each(fair, "first_token_s"))


def test_a_newcomer_in_a_lower_slot_overtakes_no_prompt():
    requests = [says(0, 0.0, (1, 0, 24)), says(1, 0.5, (2, 0, 8))]
    fair, todays = both(requests, server__n_batch=8)
    assert fair.steps == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 8)], [(1, 0, 8)]]
    assert todays.steps == [[(0, 0, 8)], [(1, 0, 8)], [(0, 8, 8)], [(0, 16, 8)]]


def test_deferred_requests_get_slots_in_the_order_in_which_they_came():
    """Both slots are released in one step; slot 0 was, for either server, the one released first."""
    requests = [says(number, 0.0, (number, 0, 4), output=2) for number in range(5)]
    fair, todays = both(requests, server__cache_ram=0)
    assert fair.steps[2] == [(2, 0, 4), (3, 0, 4)]
    assert {job: chunk.seq for (job, _, _), chunk in zip(fair.steps[2], fair.passes[2].chunks, strict=True)} == {
        2: 0,
        3: 1,
    }
    assert todays.steps[2] == [(3, 0, 4), (2, 0, 4)]
    assert each(fair, "first_token_s")[4] > max(each(fair, "first_token_s")[:4])


def test_a_deferred_request_goes_before_those_that_came_later():
    """Request 4 comes in the step in which both slots are released."""
    requests = [
        *(says(n, 0.0, (n, 0, 4), output=2) for n in range(3)),
        says(3, 1.5, (3, 0, 4)),
        says(4, 1.6, (4, 0, 4)),
    ]
    story = tell(world("llama-server-fair"), requests)
    assert [number for number, _, _ in story.steps[2]] == [2, 3]


def test_its_flags_are_those_of_todays_server():
    cache = {"policy": "llama.cpp-b6975", "cells": 1000}
    stated = load_scenario({"server": {"scheduler": "llama-server-fair", "parallel": "auto"}, "cache": cache})
    assert (stated.server.slots, stated.unified, stated.context_cells) == (4, True, 1024)
    rounded = {"cache": cache, "server": {"slots": 3}}
    fair, todays = (
        load_scenario({**rounded, "server": {**rounded["server"], "scheduler": f"llama-server{kind}"}})
        for kind in ("-fair", "")
    )
    assert fair.context_cells == todays.context_cells == 1536
    assert (fair.n_batch, fair.n_ubatch) == (todays.n_batch, todays.n_ubatch) == (1000, 512)
