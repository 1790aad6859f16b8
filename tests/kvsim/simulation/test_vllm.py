"""vLLM's scheduler step by step in small worlds, and how runs without progress end."""

import pytest

from kvsim.simulation.set_up import build_policy
from tests.kvsim.simulation.stories import closed, each, livelock, tell
from tests.worlds import scenario
from workloads import Request


def vllm(blocks=100, **keys):
    """vLLM's scheduler over so many usable blocks of four cells, where nothing is found again."""
    paged = {"cache__policy": "paged", "cache__block_size": 4, "cache__cells": 4 * (blocks + 1)}
    return scenario(**{"server__scheduler": "vllm", **paged, "cache__prefix_cache": False, **keys})


def urgent(number, at, prompt, output, priority):
    return Request(number, at, prompt, output, priority=priority)


# vllm: who runs


def test_vllm_serves_the_running_first_and_fills_the_budget_with_those_that_wait():
    story = tell(vllm(server__n_batch=6), [(0.0, 4, 3), (0.5, 9, 1)])
    assert story.steps == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 5)], [(0, 5, 1), (1, 5, 4)]]


def test_vllm_keeps_the_order_of_admission_whether_a_request_computes_its_prompt_or_generates():
    story = tell(vllm(server__n_batch=6), [(0.0, 10, 2), (0.5, 2, 2)])
    assert story.steps == [[(0, 0, 6)], [(0, 6, 4), (1, 0, 2)], [(0, 10, 1), (1, 2, 1)]]


def test_vllm_places_a_whole_step_in_one_pass():
    """``n_ubatch`` is llama-server's."""
    story = tell(vllm(server__n_batch=20, server__n_ubatch=4), [(0.0, 10, 1), (0.0, 10, 1)])
    assert story.steps == [[(0, 0, 10), (1, 0, 10)]]


def test_without_chunks_a_prompt_waits_until_the_budget_holds_all_of_it_and_those_behind_wait_too():
    world = vllm(server__n_batch=8, server__chunked_prefill=False)
    story = tell(world, [(0.0, 4, 3), (0.5, 8, 1), (0.5, 2, 1), (0.5, 9, 1)])
    assert story.steps == [[(0, 0, 4)], [(0, 4, 1)], [(0, 5, 1)], [(1, 0, 8)], [(2, 0, 2)]]
    assert story.jobs[3].error == "9 prompt tokens exceed n_batch (8), and prefill is not chunked"
    assert story.jobs[3].finished_s == 1.0, "it is refused as soon as it is seen"


def test_long_prompts_give_way_to_others_that_run():
    world = vllm(server__n_batch=16, server__long_prefill_threshold=3)
    story = tell(world, [(0.0, 10, 6), (0.5, 10, 1)])
    assert story.steps[0] == [(0, 0, 10)], "alone it may take all"
    assert [step[1:] for step in story.steps[1:]] == [[(1, 0, 3)], [(1, 3, 3)], [(1, 6, 3)], [(1, 9, 1)], []]


def test_a_long_prompt_that_is_alone_need_not_give_way():
    """vLLM's pull request 57951: the threshold is off while the scheduler has a single request, running or waiting."""
    story = tell(vllm(server__n_batch=16, server__long_prefill_threshold=3), [(0.0, 20, 1)])
    assert story.steps == [[(0, 0, 16)], [(0, 16, 4)]]


def test_a_long_prompt_gives_way_to_one_that_waits_as_well():
    """Two requests count as two, though none of them runs yet."""
    story = tell(vllm(server__n_batch=6, server__long_prefill_threshold=3), [(0.0, 5, 1), (0.0, 5, 1)])
    assert story.steps == [[(0, 0, 3), (1, 0, 3)], [(0, 3, 2), (1, 3, 2)]]


def test_vllm_runs_at_most_as_many_requests_as_it_has_slots():
    story = tell(vllm(server__slots=2), [(0.0, 2, 2), (0.0, 2, 4), (0.0, 2, 1), (0.0, 2, 1)])
    assert story.steps == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 1), (1, 2, 1)],
        [(1, 3, 1), (2, 0, 2)],
        [(1, 4, 1), (3, 0, 2)],
    ]


def test_the_urgent_wait_less():
    """By priority, then by arrival, then by number; running requests are not disturbed while there is room."""
    requests = [urgent(0, 0.0, 2, 2, 3), urgent(1, 0.0, 2, 1, 2), urgent(2, 0.0, 2, 1, 1), urgent(3, 0.0, 2, 1, 1)]
    requests.append(urgent(4, 0.5, 2, 1, 0))
    one_seat = {"server__slots": 1}
    story = tell(vllm(**one_seat, server__order="priority"), requests)
    assert [step[0][0] for step in story.steps] == [2, 4, 3, 1, 0, 0]
    story = tell(vllm(**one_seat), requests)
    assert [step[0][0] for step in story.steps] == [0, 0, 1, 2, 3, 4], "otherwise priorities play no part"


# vllm: who must go


def test_the_last_is_preempted_first_and_comes_back_first():
    """Four blocks. In the third step 0 needs a third one and takes 2's; then 1 needs a second one and gives up its own.

    1 was preempted later, so it stands before 2, and both before 3, which has been waiting since the first step.
    """
    story = tell(vllm(4), [(0.0, 7, 4), (0.0, 3, 3), (0.0, 3, 3), (0.5, 1, 1)])
    assert story.steps == [
        [(0, 0, 7), (1, 0, 3), (2, 0, 3)],
        [(0, 7, 1), (1, 3, 1), (2, 3, 1)],
        [(0, 8, 1)],
        [(0, 9, 1)],
        [(1, 0, 5), (2, 0, 5)],
        [(3, 0, 1)],
    ]
    assert each(story, "preemptions") == [0, 1, 1, 0]
    assert each(story, "generated") == [4, 3, 3, 1]
    assert story.recorder.counts.preemptions == 2
    assert story.recorder.counts.recomputed_tokens == 8, "four of each; their fifth was never run"
    assert (story.jobs[1].started_s, story.jobs[1].first_token_s) == (0.0, 1.0), "those are of the first time"


def test_no_request_is_admitted_at_the_step_of_a_preemption():
    """1's block is free in the third step, and 2 would fit."""
    story = tell(vllm(3, server__slots=3), [(0.0, 3, 3), (0.0, 7, 3), (1.5, 1, 1)])
    assert story.steps[:4] == [[(0, 0, 3), (1, 0, 7)], [(0, 3, 1), (1, 7, 1)], [(0, 4, 1)], [(1, 0, 9)]]
    assert story.jobs[2].started_s == 4.0


def test_the_least_urgent_is_preempted_even_when_it_is_already_part_of_the_step():
    """Four blocks, two each. 0 takes a token of the third step, then 1 needs a third block and 0 must go."""
    story = tell(vllm(4, server__order="priority"), [urgent(0, 0.0, 4, 6, 5), urgent(1, 0.5, 8, 3, 1)])
    assert story.steps == [
        [(0, 0, 4)],
        [(0, 4, 1), (1, 0, 8)],
        [(1, 8, 1)],
        [(1, 9, 1)],
        [(0, 0, 6)],
        [(0, 6, 1)],
        [(0, 7, 1)],
        [(0, 8, 1)],
    ]
    assert each(story, "generated") == [6, 3]


def test_what_a_preempted_request_had_of_the_step_is_there_for_others():
    """Eight blocks, twelve tokens a step. 0 takes six of each; in the third step 1 needs a block and 0 must go.

    Then there are eleven tokens left for 2 instead of five, and it may have six.
    """
    world = vllm(8, server__order="priority", server__n_batch=12, server__long_prefill_threshold=6)
    story = tell(world, [urgent(0, 0.0, 30, 1, 5), urgent(1, 0.5, 4, 3, 1), urgent(2, 0.5, 8, 2, 2)])
    assert story.steps[:3] == [[(0, 0, 12)], [(0, 12, 6), (1, 0, 4), (2, 0, 2)], [(1, 4, 1), (2, 2, 6)]]


def test_the_least_urgent_request_gives_way_itself_and_the_others_go_on():
    """0 needs a third block; 1 behind it is more urgent."""
    story = tell(vllm(4, server__order="priority"), [urgent(0, 0.0, 7, 4, 5), urgent(1, 0.5, 5, 5, 1)])
    assert story.steps[:4] == [[(0, 0, 7)], [(0, 7, 1), (1, 0, 5)], [(1, 5, 1)], [(1, 6, 1)]]
    story = tell(vllm(4), [(0.0, 7, 4), (0.5, 5, 5)])
    assert story.steps[:4] == [[(0, 0, 7)], [(0, 7, 1), (1, 0, 5)], [(0, 8, 1)], [(0, 9, 1)]], "first come: 1 gives way"


def test_among_equals_the_later_one_gives_way():
    requests = [urgent(0, 0.0, 3, 3, 1), urgent(1, 0.25, 3, 3, 1), urgent(2, 0.5, 5, 5, 0)]
    story = tell(vllm(4, server__order="priority"), requests)
    assert story.steps[:3] == [[(0, 0, 3)], [(0, 3, 1), (2, 0, 5), (1, 0, 3)], [(0, 4, 1), (2, 5, 1)]]
    assert each(story, "preemptions") == [0, 1, 0]


def test_a_watermark_keeps_blocks_from_those_that_wait_while_others_run():
    """Nine blocks, two of ten kept: 0 takes two, 1 takes five, and 2 must wait for 1 although two are free."""
    story = tell(vllm(9, cache__watermark=0.2), [(0.0, 8, 4), (0.0, 20, 1), (0.0, 4, 1)])
    assert story.steps[:2] == [[(0, 0, 8), (1, 0, 20)], [(0, 8, 1), (2, 0, 4)]]
    story = tell(vllm(9, cache__watermark=0.2), [(0.0, 8, 4), (0.0, 21, 1), (0.0, 4, 1)])
    assert story.steps[0] == [(0, 0, 8)], "1 needs six, and 2 stands behind it"
    story = tell(vllm(9, cache__watermark=0.2), [(0.0, 35, 1)])
    assert story.steps == [[(0, 0, 35)]], "alone it may have them all"


def test_with_reserve_full_a_request_starts_only_when_its_whole_prompt_fits():
    rows = [(0.0, 7, 4), (0.0, 12, 1)]
    story = tell(vllm(4, server__n_batch=4), rows)
    assert story.steps[2:6] == [[(0, 7, 1)], [(0, 8, 1)], [(0, 9, 1)], [(1, 0, 4)]]
    assert story.recorder.counts.preemptions == 0
    story = tell(vllm(4, server__n_batch=4, server__reserve_full=False), rows)
    assert story.steps[:5] == [
        [(0, 0, 4)],
        [(0, 4, 3), (1, 0, 1)],
        [(0, 7, 1), (1, 1, 3)],
        [(0, 8, 1)],
        [(0, 9, 1), (1, 0, 3)],
    ]
    assert each(story, "preemptions") == [0, 1]


# vllm: what becomes of those that were preempted


THRASH = [(0.0, 7, 6), (0.0, 4, 9)]
"""In four blocks: 1 must go when 0 needs a third one."""


def test_recompute_goes_on_with_prompt_and_output():
    story = tell(vllm(4), THRASH)
    assert story.steps == [
        [(0, 0, 7), (1, 0, 4)],
        [(0, 7, 1), (1, 4, 1)],
        *([(0, at, 1)] for at in (8, 9, 10, 11)),
        [(1, 0, 6)],
        *([(1, at, 1)] for at in (6, 7, 8, 9, 10, 11)),
    ]
    assert each(story, "generated") == [6, 9]
    assert story.recorder.counts.recomputed_tokens == 5


def test_swap_keeps_what_was_computed():
    policy = build_policy(world := vllm(4, server__preemption="swap", cache__host_cells=16))
    story = tell(world, THRASH, policy)
    assert story.steps == [
        [(0, 0, 7), (1, 0, 4)],
        [(0, 7, 1), (1, 4, 1)],
        *([(0, at, 1)] for at in (8, 9, 10, 11)),
        *([(1, at, 1)] for at in (5, 6, 7, 8, 9, 10, 11)),
    ]
    assert each(story, "generated") == [6, 9]
    recorder = story.recorder
    assert (recorder.counts.preemptions, recorder.counts.recomputed_tokens, recorder.counts.host.cells_prefetched) == (
        1,
        0,
        0,
    )
    assert (recorder.counts.host.cells_out, recorder.counts.host.cells_in) == (8, 8), "two blocks"
    moved = [[transfer.to_host for transfer in batch.places[0].transfers] for batch in story.passes]
    assert moved == [[], [], [True], [], [], [], [False, False], *[[]] * 6]
    assert policy.host.used == 0


def test_a_request_without_room_in_the_host_tier_is_recomputed():
    story = tell(vllm(4, server__preemption="swap", cache__host_cells=4), THRASH)
    assert story.steps == tell(vllm(4), THRASH).steps
    assert story.recorder.counts.host.cells_out == 0


def test_a_request_stays_in_the_host_tier_until_there_is_room_for_its_next_token():
    """1 holds one full block. In the fourth step one is free: enough to bring it back, but not to go on."""
    world = vllm(4, server__preemption="swap", cache__host_cells=16)
    story = tell(world, [(0.0, 9, 4), (0.0, 3, 6)])
    assert story.recorder.counts.preemptions == 1
    assert story.recorder.counts.recomputed_tokens == 0
    assert story.steps[4] == [(1, 4, 1)]


def test_a_preempted_request_finds_its_own_blocks_again():
    """0 takes one of 1's two blocks, the one that was released last; the first one still holds what it held."""
    story = tell(vllm(4, cache__prefix_cache=True), [(0.0, 7, 3), (0.0, 4, 4)])
    assert story.steps == [[(0, 0, 7), (1, 0, 4)], [(0, 7, 1), (1, 4, 1)], [(0, 8, 1)], [(1, 4, 2)], [(1, 6, 1)]]
    assert story.recorder.counts.recomputed_tokens == 1
    assert each(story, "cached") == [0, 0], "only a first start counts"


# vllm: what cannot be


@pytest.mark.parametrize("scheduler", ["vllm", "static"])
def test_what_the_cache_could_never_hold_is_refused_before_it_starts(scheduler):
    """Four blocks of four cells, whatever a sequence may have; the last token that is said takes no cell."""
    world = vllm(4, server__scheduler=scheduler, server__slot_context=20)
    story = tell(world, [(0.0, 10, 8), (0.0, 10, 7), (0.0, 20, 1)])
    assert [story.jobs[i].status for i in range(3)] == ["failed", "completed", "failed"]
    sizes = "(10 prompt tokens, 17 in all)"
    assert story.jobs[0].error == f"the request needs 5 blocks of 4 cells {sizes}, the cache has 4"
    assert story.jobs[2].error == "the request exceeds the longest sequence: 20 prompt tokens, 20 in a sequence"
    assert story.jobs[0].finished_s == story.jobs[2].finished_s == 0.0
    assert story.recorder.counts.cache.failed_allocations == story.recorder.counts.preemptions == 0


def test_vllm_ends_a_request_at_the_longest_sequence():
    """vLLM counts the token that was only just said; llama-server does not, and says one more."""
    story = tell(vllm(8, server__slot_context=16), [(0.0, 14, 99)])
    assert story.steps == [[(0, 0, 14)], [(0, 14, 1)]]
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (2, True)
    story = tell(vllm(8, server__slot_context=16), [(0.0, 14, 2)])
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (2, False)


def test_a_server_that_never_admits_a_request_says_which_wait():
    world = vllm(8)
    stuck = livelock(world, [(2.5, 5, 1), (2.5, 4, 1)], closed(world.cache_config()))
    assert stuck.requests == (0, 1)
    assert str(stuck) == (
        "closed: no progress after 2.500 s: 8 of 8 blocks of 4 cells are free; "
        "request 0 (5 prompt tokens, 0 generated) waits for 2, request 1 (4 prompt tokens, 0 generated) waits for 1"
    )


def test_only_the_first_of_many_are_named():
    world = vllm(8)
    stuck = livelock(world, [(0.0, 4, 1)] * 7, closed(world.cache_config()))
    assert stuck.requests == tuple(range(7))
    assert "request 3 " in str(stuck)
    assert str(stuck).endswith(", and 3 more wait")


@pytest.mark.parametrize("scheduler", ["vllm", "static"])
def test_a_buffer_that_cannot_be_doubled_ends_the_run(scheduler):
    """24 cells: the buffer of 16 is full, and no run of 24 is free beside it, nor when the request starts anew."""
    world = scenario(server__scheduler=scheduler, cache__policy="growing", cache__cells=24)
    stuck = livelock(world, [(0.0, 10, 12)])
    assert stuck.requests == (0,)
    assert "(no free extent of 24 cells: the largest has 8 of 8): 8 of 24 cells are free" in str(stuck)
    assert "request 0 (10 prompt tokens, 7 generated) waits for" in str(stuck)
    story = tell(world, [(0.0, 10, 7)])
    assert story.jobs[0].status == "completed", "one token less, and it would have fitted"


def test_a_request_too_long_to_recompute_in_one_step_is_a_livelock():
    """Without chunks. 1 is preempted after six tokens, and the nine it has then are more than a step may have."""
    world = vllm(4, server__n_batch=6, server__chunked_prefill=False)
    stuck = livelock(world, [(0.0, 3, 10), (0.0, 3, 12)])
    assert stuck.requests == (1,)
    assert "request 1 (3 prompt tokens, 6 generated) waits for 3" in str(stuck)


def test_a_run_without_progress_ends():
    """A buffer of 16 holds 16 tokens, the 17th comes in a second chunk, and doubling fails: for ever again."""
    world = scenario(server__scheduler="vllm", server__n_batch=8, cache__policy="growing", cache__cells=24)
    stuck = livelock(world, [(0.0, 10, 12)])
    assert "request 0 (10 prompt tokens, 7 generated)" in str(stuck)


# vllm over layouts of single cells, which cannot set room aside


def test_a_step_that_finds_no_room_preempts_the_last_and_admits_none_until_one_has_ended():
    """Thirteen cells. The second step needs three in a row and there are two; without 2 it fits.

    2 would come back to the third step otherwise, and be sent away again.
    """
    world = scenario(server__scheduler="vllm", cache__policy="contiguous", cache__cells=13)
    story = tell(world, [(0.0, 5, 5), (0.0, 4, 3), (0.0, 2, 2)])
    assert story.steps == [
        [(0, 0, 5), (1, 0, 4), (2, 0, 2)],
        [(0, 5, 1), (1, 4, 1)],
        [(0, 6, 1), (1, 5, 1)],
        [(0, 7, 1), (2, 0, 3)],
        [(0, 8, 1)],
    ]
    assert story.recorder.counts.cache.failed_allocations == 1
    assert each(story, "preemptions") == [0, 0, 1]


# llama-server: which slot
