"""The slots of llama-server of early 2025 step by step in small worlds."""

from dataclasses import dataclass, field

import pytest

from kvsim.errors import UserError
from kvsim.scenario.assumptions import assumptions
from kvsim.simulation.summary import summarize
from policies import CacheConfig
from policies.layouts.llamacpp import early_2025
from tests.kvsim.simulation.stories import each, says, tell
from tests.worlds import Given, GivenTimes, scenario, serve
from workloads import answer_of


def slots(n=2, cells=64, **keys):
    """That server with its own defaults, but slots of which each may fill the cache."""
    shape = {"server__slots": n, "cache__cells": cells, "server__slot_context": cells}
    return scenario(server__scheduler="llama-server-b4875", **{**shape, **keys})


def slots_of(story):
    return [batch.chunks[0].seq for batch in story.passes]


def started(story):
    """The requests in the order in which they got a slot and began."""
    return sorted(story.jobs, key=lambda number: (story.jobs[number].started_s, story.jobs[number].slot))


# Which slot


def test_slots_that_were_never_used_are_taken_from_the_first_on():
    story = tell(slots(3), [(0.0, 3, 3), (0.0, 3, 3), (0.0, 3, 3)])
    assert each(story, "slot") == [0, 1, 2]
    assert story.steps[0] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]


def test_a_slot_is_chosen_for_what_the_prompt_repeats_anywhere_even_if_nothing_of_it_is_found():
    requests = [
        says(0, 0.0, (1, 0, 8)),
        says(1, 10.0, (2, 0, 8)),
        says(2, 20.0, (3, 0, 4), (2, 0, 5)),  # 5 of the 8 in slot 1; slot 0 was used longest ago
        says(3, 30.0, (4, 0, 2), (1, 2, 5), (5, 0, 1)),  # 5 of the 8 in slot 0, which was used longest ago as well
        says(4, 40.0, (3, 0, 4), (6, 0, 1), (2, 0, 5)),  # 5 in a row of the 9 in slot 1, and 4 of them found
    ]
    story = tell(slots(), requests)
    assert slots_of(story) == [0, 1, 1, 0, 1]
    assert each(story, "cached") == [0, 0, 0, 0, 4]


def test_the_share_is_of_what_the_slot_holds_and_not_of_the_prompt():
    held = [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (2, 0, 8))]
    five_of_eight = tell(slots(), [*held, says(2, 20.0, (2, 0, 5), (3, 0, 20))])
    assert (slots_of(five_of_eight)[2], five_of_eight.jobs[2].cached) == (1, 5)
    # Half is not more than half, be it the whole prompt.
    four_of_eight = tell(slots(), [*held, says(2, 20.0, (2, 0, 4))])
    assert (slots_of(four_of_eight)[2], four_of_eight.jobs[2].cached) == (0, 0)
    never = tell(slots(server__slot_prompt_similarity=1.0), [*held, says(2, 20.0, (2, 0, 8), (3, 0, 1))])
    assert slots_of(never)[2] == 0
    by_age_alone = tell(slots(server__slot_prompt_similarity=0.0), [*held, says(2, 20.0, (2, 0, 8), (3, 0, 1))])
    assert slots_of(by_age_alone)[2] == 0


def test_the_longest_run_counts_and_not_the_largest_share():
    """Slot 0 has 6 tokens of 10 in a row, slot 1 all of its 4; slot 3 was never used."""
    held = [says(0, 0.0, (1, 0, 10)), says(1, 0.0, (2, 0, 4)), says(2, 0.0, (3, 0, 6))]
    story = tell(slots(4), [*held, says(3, 10.0, (2, 0, 4), (1, 3, 6))])
    assert story.jobs[3].slot == 0
    # As long, the first.
    story = tell(slots(4), [*held, says(3, 10.0, (2, 0, 4), (3, 0, 4))])
    assert story.jobs[3].slot == 1


def test_a_slot_goes_on_behind_the_common_prefix_and_computes_at_least_one_token():
    requests = [
        says(0, 0.0, (1, 0, 8), output=3),
        says(1, 10.0, (1, 0, 8), answer_of(0, 3), (2, 0, 4)),
        says(2, 20.0, (1, 0, 8)),  # 8 of the 15 that the slot holds
    ]
    story = tell(slots(1), requests)
    assert story.steps == [[(0, 0, 8)], [(0, 8, 1)], [(0, 9, 1)], [(1, 10, 5)], [(2, 7, 1)]]


# The queue


def test_who_came_during_the_step_goes_before_the_deferred_who_is_deferred_again_behind_all_others():
    """One slot. 1 and 2 wait when 3 comes in the last step of 0: 3 takes the slot, and 1 goes behind 2."""
    requests = [(0.0, 3, 4), (0.5, 3, 2), (0.6, 3, 2), (3.5, 3, 2)]
    story = tell(slots(1, server__slot_prompt_similarity=0.0), requests)
    assert started(story) == [0, 3, 2, 1]
    # Had it come a step earlier, it would have been deferred too.
    story = tell(slots(1, server__slot_prompt_similarity=0.0), [*requests[:3], (2.5, 3, 2)])
    assert started(story) == [0, 1, 2, 3]


def test_of_slots_released_in_one_step_the_first_deferred_chooses_first():
    story = tell(slots(2), [(0.0, 3, 2), (0.0, 3, 2), (0.5, 3, 2), (0.5, 3, 2)])
    assert each(story, "slot") == [0, 1, 0, 1]


def test_slots_are_released_in_order_of_their_numbers():
    """Slot 1 generates and comes first in the batch, slot 0 ends its prompt in the same step: it was used longest
    ago."""
    requests = [(0.0, 3, 1), (0.0, 3, 3), (1.5, 3, 1), (10.0, 3, 1)]
    story = tell(slots(2), requests)
    assert story.steps[2] == [(1, 4, 1), (2, 0, 3)]
    assert story.jobs[3].slot == 0


def test_who_comes_because_a_request_has_ended_goes_behind_the_one_that_its_slot_has_called():
    """A batch of 8 goes in two pieces. 2 ends with the first; 5 is called, and 3 comes at once, before the second."""
    requests = [
        says(0, 0.0, (1, 0, 10)),
        says(1, 10.0, (2, 0, 2)),
        says(2, 20.0, (1, 0, 6), output=2)._replace(session=7),  # 4 cells in a row are free then, and 5 others
        says(3, 20.0, (6, 0, 3))._replace(session=7),
        says(4, 20.5, (2, 0, 2), (4, 0, 7), output=5),
        says(5, 20.6, (5, 0, 3)),
    ]
    story = tell(slots(2, cells=17, server__n_batch=8), requests)
    assert story.steps[4:6] == [[(2, 6, 1), (4, 2, 3)], [(4, 5, 4)]]
    assert started(story) == [0, 1, 2, 4, 5, 3]


def test_an_empty_prompt_is_answered_with_nothing_and_was_the_last_use_of_its_slot():
    requests = [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (2, 0, 8)), says(2, 20.0), says(3, 30.0, (3, 0, 3))]
    story = tell(slots(2), requests)
    assert (story.jobs[2].status, story.jobs[2].generated, story.jobs[2].finished_s) == ("completed", 0, 20.0)
    assert each(story, "slot") == [0, 1, 0, 1]


def test_a_request_that_does_not_cache_finds_nothing_and_leaves_nothing_to_be_found():
    """Its cells stay all the same, and are given back when its slot is used again."""
    plain = says(0, 0.0, (1, 0, 8))._replace(cache_prompt=False)
    requests = [
        plain,
        says(1, 10.0, (1, 0, 8), (2, 0, 1)),  # not drawn to slot 0
        says(2, 20.0, (3, 0, 20)),  # slot 0 was used longest ago: its 8 cells are needed
        says(3, 30.0, (1, 0, 8), (4, 0, 1))._replace(cache_prompt=False),
    ]
    story = tell(slots(2, cells=29, server__n_batch=29), requests)
    assert each(story, "slot") == [0, 1, 0, 1]
    assert each(story, "cached") == [0, 0, 0, 0]
    assert each(story, "status") == ["completed"] * 4


# Prompts that are too long


def test_a_prompt_that_no_slot_can_hold_loses_halves_of_a_slot_behind_what_is_kept():
    """16 tokens in a slot, 4 kept: halves of 6 are left out until 4 and less than 12 remain."""
    world = slots(1, server__slot_context=16, server__n_keep=4)
    story = tell(world, [says(0, 0.0, (1, 0, 40)), says(1, 10.0, (1, 0, 4), (1, 34, 6), (2, 0, 2))])
    assert story.steps == [[(0, 0, 10)], [(1, 10, 2)]]
    assert each(story, "status") == ["completed", "completed"]
    assert each(story, "discarded") == [30, 0]
    for prompt, left in ((15, 15), (16, 10), (21, 15), (22, 10)):
        story = tell(world, [says(0, 0.0, (1, 0, prompt))])
        assert story.steps == [[(0, 0, left)]]
        assert (story.jobs[0].status, story.jobs[0].generated) == ("completed", 1)


@dataclass
class Forgetful(GivenTimes):
    """Notes what it was told to begin with and to forget."""

    told: list = field(default_factory=list)

    def begin(self, seq, request, *, again=False):
        self.told.append(("begin", seq, request.id))

    def discard(self, seq, start, stop):
        self.told.append(("discard", seq, start, stop))


def test_an_engine_is_told_what_is_left_out_of_a_prompt():
    backend = Forgetful()
    serve(slots(1, server__slot_context=16, server__n_keep=4), Given([says(0, 0.0, (1, 0, 40))]), backend)
    assert backend.told == [("begin", 0, 0), ("discard", 0, 4, 34)]


def test_at_most_all_but_four_tokens_of_a_slot_are_kept():
    story = tell(slots(1, server__slot_context=16, server__n_keep=14), [says(0, 0.0, (1, 0, 21))])
    assert story.steps == [[(0, 0, 15)]]
    assert list(story.jobs[0].content.head(15)) == [(1, 0, 12), (1, 18, 3)]


@pytest.mark.parametrize(("own", "left"), [(None, 15), (0, 13), (-1, 15), (4, 15)])
def test_a_request_may_say_how_much_of_its_prompt_is_kept(own, left):
    world = slots(1, server__slot_context=16, server__n_keep=14)
    story = tell(world, [says(0, 0.0, (1, 0, 21))._replace(n_keep=own)])
    assert story.steps == [[(0, 0, left)]]


def test_without_context_shift_it_is_refused_and_the_slot_keeps_what_it_had_but_was_used():
    world = slots(2, server__slot_context=16, server__context_shift=False)
    requests = [
        says(0, 0.0, (1, 0, 8)),
        says(1, 10.0, (2, 0, 8)),
        says(2, 20.0, (3, 0, 16)),  # refused in slot 0
        says(3, 30.0, (4, 0, 3)),  # slot 1 was used longest ago now
        says(4, 40.0, (1, 0, 8), (5, 0, 2)),
    ]
    story = tell(world, requests)
    assert [story.jobs[i].status for i in range(5)] == ["completed", "completed", "failed", "completed", "completed"]
    assert (story.jobs[2].exceeded, story.jobs[2].finished_s) == (16, 20.0)
    assert story.steps == [[(0, 0, 8)], [(1, 0, 8)], [(3, 0, 3)], [(4, 8, 2)]]
    assert slots_of(story) == [0, 1, 1, 0]


def test_a_refused_prompt_calls_a_deferred_request():
    world = slots(1, server__slot_context=16, server__context_shift=False)
    story = tell(world, [(0.0, 3, 2), (0.5, 16, 1), (0.6, 3, 1)])
    assert each(story, "status") == ["completed", "failed", "completed"]
    assert each(story, "finished_s") == [2.0, 2.0, 3.0]


# Full slots


def test_a_full_slot_drops_half_of_what_is_behind_the_tokens_that_are_kept():
    """With 15 of 16 tokens in it there would be no room for one more after the next: 5 of 11 go."""
    world = slots(1, server__slot_context=16, server__n_keep=4, server__slot_prompt_similarity=0.0)
    first = says(0, 0.0, (1, 0, 14), output=5)
    story = tell(world, [first, says(1, 30.0, (1, 0, 4), (1, 9, 5), answer_of(0, 5))])
    assert story.steps[:5] == [[(0, 0, 14)], [(0, 14, 1)], [(0, 10, 1)], [(0, 11, 1)], [(0, 12, 1)]]
    assert story.steps[5:] == [[(1, 13, 1)]]
    assert (story.jobs[0].status, story.jobs[0].generated) == ("completed", 5)
    assert story.recorder.counts.context_shifts == 1


@pytest.mark.parametrize(
    ("own", "bos", "goes_on_at"),
    [
        ({}, False, 10),  # 15 - (15 - 4) // 2
        ({"n_keep": 1}, False, 8),  # 15 - (15 - 1) // 2
        ({"n_keep": 1}, True, 9),  # 15 - (15 - 2) // 2
        ({"n_keep": -1}, False, 14),  # at most 12 are kept
        ({"n_keep": -1}, True, 14),  # and the model's own token besides
        ({"n_keep": 2, "n_discard": 5}, True, 10),
        ({"n_keep": 4, "n_discard": 11}, False, 4),  # all that is behind them
        ({"n_keep": 4, "n_discard": 30}, False, 4),
    ],
)
def test_a_request_may_say_what_a_context_shift_keeps_and_discards(own, bos, goes_on_at):
    world = slots(1, server__slot_context=16, server__n_keep=4, model__add_bos_token=bos)
    story = tell(world, [says(0, 0.0, (1, 0, 14), output=3)._replace(**own)])
    assert story.steps == [[(0, 0, 14)], [(0, 14, 1)], [(0, goes_on_at, 1)]]


def test_a_full_slot_that_has_next_to_no_room_ends_its_request():
    """Of 2 tokens half of what is behind none is none: nothing can be discarded."""
    story = tell(slots(1, server__slot_context=2), [(0.0, 1, 5)])
    assert (story.jobs[0].status, story.jobs[0].generated, story.jobs[0].truncated) == ("completed", 2, True)


def test_a_cache_whose_positions_cannot_be_shifted_is_served_without_context_shift():
    story = tell(slots(1, server__slot_context=16, cache__policy="paged", cache__block_size=4), [(0.0, 14, 5)])
    assert (story.jobs[0].failure, story.jobs[0].generated) == ("full", 2)
    with pytest.raises(UserError, match="context_shift: policy 'paged' cannot shift positions"):
        tell(slots(1, cache__policy="paged", server__context_shift=True), [(0.0, 14, 5)])


def test_a_full_slot_fails_its_request_without_context_shift():
    world = slots(1, server__slot_context=16, server__context_shift=False)
    story = tell(world, [says(0, 0.0, (1, 0, 13), output=9), says(1, 30.0, (1, 0, 13), answer_of(0, 9))])
    assert story.steps == [[(0, 0, 13)], [(0, 13, 1)], [(0, 14, 1)]]
    assert (story.jobs[0].status, story.jobs[0].failure, story.jobs[0].generated) == ("failed", "full", 3)
    assert (story.jobs[0].error, story.jobs[0].exceeded) == ("context shift is disabled", 16)
    reasons = {group["kind"]: group["reason"] for group in summarize(story.recorder, 1.0, "tokens")["failures"]}
    assert reasons["full"] == "the answer filled the slot, which is an error without context shift (a slot has 16)"
    # The second is refused: 22 tokens. Shorter, it finds what the slot held when it was full.
    story = tell(world, [says(0, 0.0, (1, 0, 12), output=9), says(1, 30.0, (1, 0, 12), answer_of(0, 3))])
    assert story.jobs[1].cached == 14


@pytest.mark.parametrize(("output", "status"), [(1, "completed"), (2, "failed")])
def test_a_prompt_one_short_of_a_slot_gets_one_token(output, status):
    world = slots(1, server__slot_context=16, server__context_shift=False)
    story = tell(world, [(0.0, 15, output)])
    assert (story.jobs[0].status, story.jobs[0].generated, story.jobs[0].truncated) == (status, 1, False)


# No room


def test_idle_slots_keep_their_cells_when_a_step_finds_no_room():
    """16 cells, 12 of them kept by two idle slots: the third finds 4 and fails, and the first can go on."""
    world = slots(3, cells=16, server__n_batch=16)
    requests = [
        says(0, 0.0, (1, 0, 6)),
        says(1, 10.0, (2, 0, 6)),
        says(2, 20.0, (3, 0, 10), output=2),
        says(3, 30.0, (1, 0, 6), (4, 0, 1)),
    ]
    story = tell(world, requests)
    assert each(story, "status") == ["completed", "completed", "failed", "failed"]
    # Pieces of 16 and 8 found no room, of 4 did.
    assert story.steps[2:] == [[(2, 0, 4)]]
    assert story.jobs[2].error == "Input prompt is too big compared to KV size. Please try increasing KV size."


def test_n_batch_stays_halved_until_the_end_of_the_batch():
    """36 cells with three holes of 4: 12 tokens go in pieces of 4, after two attempts in vain. The next batch is tried
    whole again."""
    world = slots(4, cells=36, server__n_batch=16)
    requests = [says(i, 10.0 * i, (i, 0, 12)) for i in range(3)]
    requests += [says(i, 10.0 * i, (5 - i, 0, 7), (i, 0, 1)) for i in range(3, 6)]
    requests += [says(6, 60.0, (6, 0, 12)), says(7, 70.0, (7, 0, 8))]
    story = tell(world, requests)
    assert story.steps[:6] == [[(i, 0, 12)] for i in range(3)] + [[(i, 7, 1)] for i in range(3, 6)]
    assert story.steps[6:] == [[(6, 0, 4)], [(6, 4, 4)], [(6, 8, 4)], [(7, 0, 8)]]
    assert (story.recorder.counts.cache.failed_allocations, story.recorder.counts.cache.batch_splits) == (2, 2)


def test_what_was_placed_before_a_micro_batch_found_no_room_is_placed_again():
    """Passes of 4 tokens; 9 cells in a row are free, and 3 others: 12 tokens would fit, if the first 8 that found room
    were not begun anew."""
    world = slots(3, cells=22, server__n_batch=16)
    policy = early_2025("b4666", CacheConfig(22, n_ubatch=4, sequences=3), threshold=0.1)
    requests = [
        says(0, 0.0, (1, 0, 9)),
        says(1, 10.0, (2, 0, 4)),
        says(2, 20.0, (1, 0, 5), (3, 0, 1)),
        says(3, 30.0, (4, 0, 12)),
        says(4, 40.0, (5, 0, 2)),
        says(5, 50.0, (6, 0, 2)),
        says(6, 60.0, (4, 0, 12)),
    ]
    story = tell(world, requests, policy)
    n = story.steps.index([(2, 5, 1)]) + 1
    assert story.steps[n : n + 5] == [[(3, 0, 4)], [(3, 4, 4)], [(3, 0, 2)], [(3, 2, 1)], [(3, 3, 1)]]
    assert story.jobs[3].status == "failed"
    # What it took twice is given back when its slot begins anew.
    assert (story.jobs[6].slot, story.jobs[6].status, story.jobs[6].cached) == (2, "completed", 11)


def test_when_one_token_finds_no_room_all_requests_fail_and_their_slots_keep_tokens_and_cells():
    """13 cells: two requests say 4 and generate until one cell is left for both, which slot 0 gets."""
    world = slots(2, cells=13, server__n_batch=8)
    requests = [
        says(0, 0.0, (1, 0, 4), output=8),
        says(1, 0.0, (2, 0, 4), output=8),
        says(2, 30.0, (3, 0, 2)),  # slot 0 was released first
        says(3, 40.0, (2, 0, 4), answer_of(1, 4)),
    ]
    story = tell(world, requests)
    assert story.steps[2:] == [[(0, 5, 1), (1, 5, 1)], [(0, 6, 1)], [(2, 0, 2)], [(3, 7, 1)]]
    assert each(story, "status") == ["failed", "failed", "completed", "completed"]
    assert each(story, "generated") == [4, 3, 1, 1]
    # Slot 1 was told of the token that was never computed when the batch was composed.
    assert story.jobs[3].cached == 7
    assert (story.jobs[1].computed, story.jobs[1].failure) == (6, "no slot")


def test_a_policy_whose_sequences_have_no_gaps_finds_only_what_was_computed():
    world = slots(2, cells=13, server__n_batch=8, cache__policy="llama.cpp-b6975", cache__unified=True)
    requests = [
        says(0, 0.0, (1, 0, 4), output=8),
        says(1, 0.0, (2, 0, 4), output=8),
        says(2, 30.0, (3, 0, 2)),
        says(3, 40.0, (2, 0, 4), answer_of(1, 4)),
    ]
    story = tell(world, requests)
    assert story.jobs[3].cached == 6
    assert story.steps[-1] == [(3, 6, 2)]


@pytest.mark.parametrize("scheduler", ["llama-server", "llama-server-b4875"])
def test_a_request_that_the_policy_does_not_admit_waits(scheduler):
    """64 cells, of which each request reserves 40: of two that come at once, one begins when the other has ended."""
    shape = {"server__slots": 2, "server__slot_context": 40, "cache__cells": 64}
    world = scenario(server__scheduler=scheduler, cache__policy="hf-reserved", **shape)
    story = tell(world, [(0.0, 8, 3), (0.0, 8, 3)])
    assert each(story, "status") == ["completed", "completed"]
    assert sorted(each(story, "started_s")) == [0.0, 3.0]


# Defaults


def test_its_flags_have_their_defaults_of_then_unless_they_are_given():
    world = scenario(server__scheduler="llama-server-b4875")
    assert (world.server.slots, world.server.context_shift, world.server.slot_prompt_similarity) == (1, True, 0.5)
    keys = {"server__slots": 3, "server__context_shift": False, "server__slot_prompt_similarity": 0.2}
    world = scenario(server__scheduler="llama-server-b4875", **keys)
    assert (world.server.slots, world.server.context_shift, world.server.slot_prompt_similarity) == (3, False, 0.2)
    today = scenario(server__scheduler="llama-server", server__slots="auto")
    assert (today.server.slots, today.server.context_shift, today.server.slot_prompt_similarity) == (4, False, 0.1)


def test_what_is_assumed_of_it_is_said():
    said = "assumed of the server, as in llama.cpp b4666: "
    world = scenario(server__scheduler="llama-server-b4875", server__n_batch=64, server__n_ubatch=64)
    assert assumptions(world)[0] == (
        f"{said}1 slot (no --parallel), context shift (no --no-context-shift), "
        "slots chosen for half of what they hold (--slot-prompt-similarity)"
    )
    world = scenario(server__scheduler="llama-server-b4875", server__slots=2, server__slot_prompt_similarity=0.1)
    batch = "batch 2,048/512 (--batch-size/--ubatch-size)"
    assert assumptions(world)[0] == f"{said}context shift (no --no-context-shift), {batch}"


@pytest.mark.parametrize(
    ("cells", "keys", "found"),
    [
        (1000, {"server__slots": 3}, (1024, 341, 1024)),  # rounded up to a multiple of 32, all slots together
        (1000, {"server__slots": 3, "cache__kernel": "tiled"}, (1024, 341, 1024)),
        (1030, {"server__slots": 2, "cache__kernel": "tiled"}, (1280, 640, 1280)),  # of 256 with flash attention
        (4096, {"server__slots": 2}, (4096, 2048, 2048)),
        (1000, {"server__n_batch": 8}, (1024, 1024, 64)),  # the least batch of that llama.cpp
    ],
)
def test_a_context_is_rounded_and_bounds_the_batch(cells, keys, found):
    keys = {"server__scheduler": "llama-server-b4875", "cache__policy": "llama.cpp-b4666", **keys}
    world = scenario(cache__cells=cells, **keys)
    assert (world.context_cells, world.slot_context, world.n_batch) == found
    assert world.cache_config().cells == found[0]


def test_under_another_cache_nothing_is_rounded_but_slots_share_all_the_same():
    world = scenario(server__scheduler="llama-server-b4875", cache__cells=1000, server__n_batch=8, server__slots=3)
    assert (world.context_cells, world.slot_context, world.n_batch) == (1000, 333, 8)
    assert scenario(server__scheduler="llama-server", cache__cells=1000, server__slots=3).slot_context == 1000
