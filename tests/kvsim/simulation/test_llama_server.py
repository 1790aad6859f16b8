"""llama-server's slots step by step in small worlds."""

import pytest

from policies import CacheConfig
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy
from tests.kvsim.simulation.stories import each, says, tell
from tests.worlds import scenario
from workloads import answer_of


def slots(n=2, **keys):
    """llama-server with slots that are chosen for a prompt of which they hold more than half."""
    return scenario(**{"server__slots": n, "server__slot_prompt_similarity": 0.5, "cache__cells": 64, **keys})


def slots_of(story):
    return [batch.chunks[0].seq for batch in story.passes]


def test_a_slot_is_chosen_by_the_prefix_that_it_keeps_else_the_one_used_longest_ago():
    requests = [
        says(0, 0.0, (1, 0, 8)),
        says(1, 10.0, (2, 0, 8)),  # a slot that was never used comes first
        says(2, 20.0, (1, 0, 8), (3, 0, 4)),  # 8 of 12 in slot 0
        says(3, 30.0, (2, 0, 4), (4, 0, 8)),  # 4 of 12 in slot 1, which was used longest ago: they count all the same
        says(4, 40.0, (2, 0, 4), (5, 0, 8)),  # 4 of 12 in slot 1, but slot 0 was used longest ago
        says(5, 50.0, (2, 0, 4), (4, 0, 3), (6, 0, 1)),  # 7 of 8 in slot 1
    ]
    story = tell(slots(), requests)
    assert story.steps == [[(0, 0, 8)], [(1, 0, 8)], [(2, 8, 4)], [(3, 4, 8)], [(4, 0, 12)], [(5, 7, 1)]]
    assert slots_of(story) == [0, 1, 0, 1, 0, 1]
    assert each(story, "cached") == [0, 0, 8, 4, 0, 7]
    assert (story.recorder.prefix_found, story.recorder.prefix_looked_up) == (19, 60)


def test_a_slot_must_keep_more_than_the_share_that_is_asked_for():
    other = says(1, 10.0, (2, 0, 8))
    half, more = says(2, 20.0, (1, 0, 8), (3, 0, 8)), says(2, 20.0, (1, 0, 8), (3, 0, 7))
    again = says(3, 30.0, (1, 0, 2))
    assert slots_of(tell(slots(), [says(0, 0.0, (1, 0, 8)), other, half, again])) == [0, 1, 0, 0]
    for third, slot in ((half, 1), (more, 0)):
        first = [says(0, 0.0, (2, 0, 8)), says(1, 10.0, (1, 0, 8))]
        story = tell(slots(), [*first, third])
        assert slots_of(story)[2] == 1 - slot


def test_at_least_one_token_of_a_prompt_is_computed():
    story = tell(slots(), [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 8)), says(2, 20.0, (1, 0, 3))])
    assert story.steps == [[(0, 0, 8)], [(1, 7, 1)], [(2, 2, 1)]]


def test_a_slot_keeps_the_answer_but_for_its_last_token():
    requests = [says(0, 0.0, (1, 0, 8), output=3), says(1, 10.0, (1, 0, 8), answer_of(0, 3), (2, 0, 4))]
    story = tell(slots(), requests)
    assert story.steps == [[(0, 0, 8)], [(0, 8, 1)], [(0, 9, 1)], [(1, 10, 5)]]


def test_slots_that_keep_nothing_are_matched_by_nothing():
    story = tell(slots(server__keep_idle_slots=False), [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 8))])
    assert story.steps == [[(0, 0, 8)], [(1, 0, 8)]]


def test_a_busy_slot_is_not_chosen_however_much_it_holds():
    story = tell(slots(), [says(0, 0.0, (1, 0, 8), output=9), says(1, 2.5, (1, 0, 8))])
    assert (1, 0, 8) in story.steps[3]


def test_a_context_shift_changes_what_a_slot_can_be_matched_by():
    """Full at 16 tokens, it keeps 4 and forgets the next 6; what is left are 4, 4 and 4 said since."""
    world = slots(
        1, server__slot_context=16, server__context_shift=True, server__n_keep=4, server__slot_prompt_similarity=0.0
    )
    first = says(0, 0.0, (1, 0, 14), output=5)
    story = tell(world, [first, says(1, 30.0, (1, 0, 14))])
    assert story.steps[:5] == [[(0, 0, 14)], [(0, 14, 1)], [(0, 15, 1)], [(0, 10, 1)], [(0, 11, 1)]]
    assert story.steps[5:] == [[(1, 4, 10)]]
    story = tell(world, [first, says(1, 30.0, (1, 0, 4), (1, 10, 4), answer_of(0, 5))])
    assert story.steps[5:] == [[(1, 12, 1)]]


@pytest.mark.parametrize("policy", ["hf-reserved", "growing", "oracle", "ring"])
def test_layouts_that_cannot_give_up_a_tail_start_from_scratch(policy):
    world = slots(cache__policy=policy, cache__window=32)
    story = tell(world, [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 8), (2, 0, 4))])
    assert story.steps == [[(0, 0, 8)], [(1, 0, 12)]]
    assert story.jobs[1].cached == 0


@pytest.mark.parametrize(("said", "begins"), [(6, 5), (20, 0)])
def test_a_window_that_has_moved_on_cannot_be_gone_back_to(said, begins):
    """A window of 8 in a cache of 16: after 20 tokens what the sixth one would see is overwritten."""
    caches = [CacheSpec(64, 1, share=0.5), CacheSpec(16, 1, window=8, share=0.5)]
    policy = MultiStreamPolicy("two", CacheConfig(64, n_ubatch=8, sequences=1), caches)
    world = slots(1, server__n_batch=8, server__slot_prompt_similarity=0.0)
    story = tell(world, [says(0, 0.0, (1, 0, said)), says(1, 30.0, (1, 0, 5), (2, 0, 2))], policy)
    assert story.steps[-1] == [(1, begins, 7 - begins)]


def test_blocks_that_another_slot_holds_are_found_as_well():
    world = slots(cache__policy="paged", cache__block_size=4)
    story = tell(world, [says(0, 0.0, (1, 0, 9), output=4), says(1, 0.5, (1, 0, 9))])
    assert story.steps[1] == [(0, 9, 1), (1, 8, 1)]


def test_the_kept_slots_make_room_one_after_another():
    """16 cells. The third prompt needs 10 in a row: slot 0's are not enough, then slot 1's go as well."""
    world = slots(3, cache__cells=16, server__n_batch=16, server__slot_prompt_similarity=0.0)
    story = tell(world, [says(0, 0.0, (1, 0, 6)), says(1, 10.0, (2, 0, 6)), says(2, 20.0, (3, 0, 10), output=2)])
    assert story.jobs[2].status == "completed"
    assert sum(n for step in story.steps[2:] for _, _, n in step) == 11


# static
