"""What holds for every scheduler under any policy, in random small worlds."""

from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvsim.errors import Livelock
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.result import summarize
from kvsim.simulation.run import run
from policies import Policy
from policies.layouts.paged import PagedPolicy
from policies.presets import PRESETS
from tests.worlds import Diary, Given, GivenTimes, Listed, scenario, serve
from workloads import Request, Segment, answer_of


@dataclass
class Story:
    """What happened."""

    steps: list
    jobs: dict
    recorder: object
    passes: list


def tell(world, requests, policy=None):
    """Serve requests, or rows of (arrival, prompt tokens, output tokens)."""
    workload = Given(requests) if isinstance(requests[0], Request) else Listed(requests)
    diary = Diary()
    recorder, jobs = serve(world, workload, diary, policy)
    return Story(diary.steps, jobs, recorder, diary.passes)


def each(story, field):
    """A field of all jobs, in order of their numbers."""
    return [getattr(job, field) for _, job in sorted(story.jobs.items())]


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
    """The same: two requests, none of them running yet, are two."""
    story = tell(vllm(server__n_batch=6, server__long_prefill_threshold=3), [(0.0, 5, 1), (0.0, 5, 1)])
    assert story.steps == [[(0, 0, 3), (1, 0, 3)], [(0, 3, 2), (1, 3, 2)]]


def test_vllm_has_so_many_seats():
    story = tell(vllm(server__slots=2), [(0.0, 2, 2), (0.0, 2, 4), (0.0, 2, 1), (0.0, 2, 1)])
    assert story.steps == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 1), (1, 2, 1)],
        [(1, 3, 1), (2, 0, 2)],
        [(1, 4, 1), (3, 0, 2)],
    ]


def test_the_urgent_wait_less():
    """By priority, then by arrival, then by number; whoever runs is not disturbed while there is room."""
    requests = [urgent(0, 0.0, 2, 2, 3), urgent(1, 0.0, 2, 1, 2), urgent(2, 0.0, 2, 1, 1), urgent(3, 0.0, 2, 1, 1)]
    requests.append(urgent(4, 0.5, 2, 1, 0))
    one_seat = {"server__slots": 1}
    story = tell(vllm(**one_seat, server__order="priority"), requests)
    assert [step[0][0] for step in story.steps] == [2, 4, 3, 1, 0, 0]
    story = tell(vllm(**one_seat), requests)
    assert [step[0][0] for step in story.steps] == [0, 0, 1, 2, 3, 4], "otherwise nobody looks at priorities"


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
    assert story.recorder.preemptions == 2
    assert story.recorder.recomputed_tokens == 8, "four of each; their fifth was never run"
    assert (story.jobs[1].started_s, story.jobs[1].first_token_s) == (0.0, 1.0), "those are of the first time"


def test_nobody_is_let_in_at_the_step_of_a_preemption():
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


def test_who_is_the_least_urgent_gives_way_itself_and_those_behind_go_on():
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


def test_a_request_starts_only_when_its_whole_prompt_fits_if_so_told():
    rows = [(0.0, 7, 4), (0.0, 12, 1)]
    story = tell(vllm(4, server__n_batch=4), rows)
    assert story.steps[2:6] == [[(0, 7, 1)], [(0, 8, 1)], [(0, 9, 1)], [(1, 0, 4)]]
    assert story.recorder.preemptions == 0
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


def test_recompute_goes_on_with_all_that_was_said():
    story = tell(vllm(4), THRASH)
    assert story.steps == [
        [(0, 0, 7), (1, 0, 4)],
        [(0, 7, 1), (1, 4, 1)],
        *([(0, at, 1)] for at in (8, 9, 10, 11)),
        [(1, 0, 6)],
        *([(1, at, 1)] for at in (6, 7, 8, 9, 10, 11)),
    ]
    assert each(story, "generated") == [6, 9]
    assert story.recorder.recomputed_tokens == 5


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
    assert (recorder.preemptions, recorder.recomputed_tokens, recorder.prefetched_cells) == (1, 0, 0)
    assert (recorder.to_host_cells, recorder.from_host_cells) == (8, 8), "two blocks"
    moved = [[transfer.to_host for transfer in batch.places[0].transfers] for batch in story.passes]
    assert moved == [[], [], [True], [], [], [], [False, False], *[[]] * 6]
    assert policy.host.used == 0


def test_who_finds_no_room_in_the_host_tier_computes_anew():
    story = tell(vllm(4, server__preemption="swap", cache__host_cells=4), THRASH)
    assert story.steps == tell(vllm(4), THRASH).steps
    assert story.recorder.to_host_cells == 0


def test_who_comes_back_without_room_for_a_token_more_keeps_its_place_in_the_host_tier():
    """1 holds one full block. In the fourth step one is free: enough to bring it back, but not to go on."""
    world = vllm(4, server__preemption="swap", cache__host_cells=16)
    story = tell(world, [(0.0, 9, 4), (0.0, 3, 6)])
    assert story.recorder.preemptions == 1
    assert story.recorder.recomputed_tokens == 0
    assert story.steps[4] == [(1, 4, 1)]


def test_a_preempted_request_finds_its_own_blocks_again():
    """0 takes one of 1's two blocks, the one that was released last; the first one still holds what it held."""
    story = tell(vllm(4, cache__prefix_cache=True), [(0.0, 7, 3), (0.0, 4, 4)])
    assert story.steps == [[(0, 0, 7), (1, 0, 4)], [(0, 7, 1), (1, 4, 1)], [(0, 8, 1)], [(1, 4, 2)], [(1, 6, 1)]]
    assert story.recorder.recomputed_tokens == 1
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
    assert story.recorder.failed_allocations == story.recorder.preemptions == 0


def test_vllm_ends_a_request_at_the_longest_sequence():
    """vLLM counts the token that was only just said; llama-server does not, and says one more."""
    story = tell(vllm(8, server__slot_context=16), [(0.0, 14, 99)])
    assert story.steps == [[(0, 0, 14)], [(0, 14, 1)]]
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (2, True)
    story = tell(vllm(8, server__slot_context=16), [(0.0, 14, 2)])
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (2, False)


class Closed(PagedPolicy):
    """A plug-in that lets nobody in."""

    def admits(self, plan):
        return False


def closed(config):
    return Closed("closed", config, block_size=config.block_size, free=partial(free_blocks, "lru"))


def livelock(world, rows, policy=None):
    """The error that ends a run."""
    with pytest.raises(Livelock) as stuck:
        tell(world, rows, policy)
    assert isinstance(stuck.value, UserError)
    assert len(str(stuck.value).splitlines()) == 1
    return stuck.value


def test_a_server_that_never_lets_anyone_in_says_who_waits_for_what():
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


def test_who_said_too_much_to_compute_it_in_one_step_waits_for_ever():
    """Without chunks. 1 is preempted after six tokens, and the nine it has then are more than a step may have."""
    world = vllm(4, server__n_batch=6, server__chunked_prefill=False)
    stuck = livelock(world, [(0.0, 3, 10), (0.0, 3, 12)])
    assert stuck.requests == (1,)
    assert "request 1 (3 prompt tokens, 6 generated) waits for 3" in str(stuck)


def test_a_run_in_which_nobody_gets_further_ends():
    """A buffer of 16 holds 16 tokens, the 17th comes in a second chunk, and doubling fails: for ever again."""
    world = scenario(server__scheduler="vllm", server__n_batch=8, cache__policy="growing", cache__cells=24)
    stuck = livelock(world, [(0.0, 10, 12)])
    assert "request 0 (10 prompt tokens, 7 generated)" in str(stuck)


# vllm over layouts of single cells, which cannot set room aside


def test_a_step_that_finds_no_room_preempts_the_last_and_nobody_is_let_in_until_someone_has_ended():
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
    assert story.recorder.failed_allocations == 1
    assert each(story, "preemptions") == [0, 0, 1]


# llama-server: which slot


def says(number, at, *pieces, output=1):
    """A request by what its prompt says: (source, first token, tokens)."""
    content = tuple(Segment(*piece) for piece in pieces)
    return Request(number, at, sum(piece.n for piece in content), output, content=content)


def slots(n=2, **keys):
    """llama-server with slots that are chosen for a prompt of which they hold more than half."""
    return scenario(**{"server__slots": n, "server__slot_similarity": 0.5, "cache__cells": 64, **keys})


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
    world = slots(1, server__slot_context=16, server__context_shift=True, server__n_keep=4, server__slot_similarity=0.0)
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
    world = slots(1, server__n_batch=8, server__slot_similarity=0.0)
    story = tell(world, [says(0, 0.0, (1, 0, said)), says(1, 30.0, (1, 0, 5), (2, 0, 2))], policy)
    assert story.steps[-1] == [(1, begins, 7 - begins)]


def test_blocks_that_another_slot_holds_are_found_as_well():
    world = slots(cache__policy="paged", cache__block_size=4)
    story = tell(world, [says(0, 0.0, (1, 0, 9), output=4), says(1, 0.5, (1, 0, 9))])
    assert story.steps[1] == [(0, 9, 1), (1, 8, 1)]


def test_the_kept_slots_make_room_one_after_another():
    """16 cells. The third prompt needs 10 in a row: slot 0's are not enough, then slot 1's go as well."""
    world = slots(3, cache__cells=16, server__n_batch=16, server__slot_similarity=0.0)
    story = tell(world, [says(0, 0.0, (1, 0, 6)), says(1, 10.0, (2, 0, 6)), says(2, 20.0, (3, 0, 10), output=2)])
    assert story.jobs[2].status == "completed"
    assert sum(n for step in story.steps[2:] for _, _, n in step) == 11


# static


def static(**keys):
    return scenario(**{"server__scheduler": "static", **keys})


def test_a_batch_is_filled_once_and_nobody_joins():
    story = tell(static(server__slots=2), [(0.0, 2, 1), (0.0, 3, 3), (0.0, 2, 1), (0.5, 2, 1), (0.5, 2, 1)])
    assert story.steps == [
        [(0, 0, 2), (1, 0, 3)],
        [(1, 3, 1)],
        [(1, 4, 1)],
        [(2, 0, 2), (3, 0, 2)],
        [(4, 0, 2)],
    ]


def test_a_batch_that_is_not_full_does_not_wait_for_more():
    story = tell(static(server__slots=3), [(0.0, 2, 3), (0.5, 2, 1)])
    assert story.steps == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)], [(1, 0, 2)]]


def test_cells_are_kept_until_the_last_of_the_batch_has_ended():
    story = tell(static(server__slots=2), [(0.0, 5, 1), (0.0, 3, 3), (3.5, 2, 1)])
    stored = story.recorder.cache_states.table().set_index("time_s")["stored"]
    assert [stored[time] for time in (0.0, 1.0, 2.0, 3.0, 4.5)] == [8, 9, 10, 0, 0]


def test_generated_tokens_come_before_prompts_and_prompts_share_the_batch():
    story = tell(static(server__n_batch=6), [(0.0, 4, 3), (0.0, 9, 1)])
    assert story.steps == [[(0, 0, 4), (1, 0, 2)], [(0, 4, 1), (1, 2, 5)], [(0, 5, 1), (1, 7, 2)]]
    story = tell(static(server__n_batch=6), [(0.0, 9, 1), (0.0, 1, 3)])
    assert story.steps == [[(1, 0, 1), (0, 0, 5)], [(1, 1, 1), (0, 5, 4)], [(1, 2, 1)]]


def test_a_static_step_has_no_more_tokens_than_a_batch():
    story = tell(static(server__slots=3, server__n_batch=2), [(0.0, 1, 3)] * 3)
    assert max(sum(n for _, _, n in step) for step in story.steps) == 2


def test_the_last_of_a_batch_goes_back_when_there_is_no_room():
    """Thirteen cells: after the first step two are left, and the second needs three in a row.

    2 waits for the next batch, before 3, and with what it has said.
    """
    world = static(cache__policy="contiguous", cache__cells=13, server__slots=3)
    story = tell(world, [(0.0, 5, 2), (0.0, 4, 2), (0.0, 2, 2), (0.0, 2, 1)])
    assert story.steps == [[(0, 0, 5), (1, 0, 4), (2, 0, 2)], [(0, 5, 1), (1, 4, 1)], [(2, 0, 3), (3, 0, 2)]]
    assert each(story, "preemptions") == [0, 0, 1, 0]
    assert each(story, "generated") == [2, 2, 2, 1]
    assert (story.recorder.preemptions, story.recorder.recomputed_tokens) == (1, 2)


def test_a_batch_finds_prefixes_that_were_said_before():
    """1 begins as 0, which is placed with it: its block can be found from the moment it is reserved, but 1 came before.

    2 comes with the next batch.
    """
    world = static(server__slots=2, cache__policy="paged", cache__block_size=4)
    story = tell(world, [says(0, 0.0, (1, 0, 9)), says(1, 0.0, (1, 0, 9)), says(2, 0.5, (1, 0, 9))])
    assert story.steps == [[(0, 0, 9), (1, 0, 9)], [(2, 8, 1)]]


def test_static_ends_a_request_when_its_context_is_full_and_refuses_one_that_never_fits():
    story = tell(static(server__slot_context=16), [(0.0, 14, 99), (0.0, 16, 1)])
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (3, True)
    assert story.jobs[1].error == "the request exceeds the longest sequence: 16 prompt tokens, 16 in a sequence"


def test_static_says_when_nobody_can_be_let_in():
    world = static(cache__cells=36, cache__block_size=4)
    stuck = livelock(world, [(0.0, 5, 1)], closed(world.cache_config()))
    assert "closed: no progress after 0.000 s: 8 of 8 blocks of 4 cells are free; request 0 " in str(stuck)


# Every scheduler, every policy


def lengths(mean, most):
    return {"kind": "lognormal", "mu": mean, "sigma": 0.8, "min": 1, "max": most}


poisson = st.fixed_dictionaries(
    {
        "kind": st.just("poisson"),
        "rate": st.sampled_from([50.0, 2.0, 0.3]),
        "requests": st.integers(8, 16),
        "prompt_tokens": st.sampled_from([lengths(1.8, 16), lengths(0.5, 4), lengths(2.5, 60)]),
        "output_tokens": st.sampled_from([lengths(2.0, 24), lengths(0.5, 6)]),
    }
)
sessions = st.fixed_dictionaries(
    {
        "kind": st.just("sessions"),
        "rate": st.sampled_from([10.0, 1.0, 0.1]),
        "sessions": st.integers(3, 8),
        "turns": st.just(lengths(1.0, 5)),
        "system_prompts": st.integers(0, 2),
        "system_tokens": st.just({"kind": "fixed", "value": 5}),
        "user_tokens": st.sampled_from([lengths(0.8, 6), lengths(1.5, 20)]),
        "output_tokens": st.sampled_from([lengths(1.0, 10), lengths(0.5, 4)]),
        "think_s": st.sampled_from([1.0, 5.0, 0.0]),
    }
)
server = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(["vllm", "llama-server", "static"]),
        "slots": st.sampled_from([5, 3, 2, 1]),
        "n_batch": st.sampled_from([64, 8, 3]),
        "n_ubatch": st.sampled_from([1, 4, 16]),
        "slot_context": st.sampled_from([None, None, 18]),
        "keep_idle_slots": st.booleans(),
        "slot_similarity": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "chunked_prefill": st.booleans(),
        "long_prefill_threshold": st.sampled_from([0, 0, 2, 5]),
        "reserve_full": st.booleans(),
        "order": st.sampled_from(["fcfs", "priority"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "prefetch": st.sampled_from(["none", "on-resume", "predictive"]),
    }
)
cache = st.fixed_dictionaries(
    {
        "policy": st.one_of(
            st.sampled_from(["paged", "vllm", "paged-window"]), st.sampled_from([p.name for p in PRESETS])
        ),
        "cells": st.sampled_from([24, 32, 48]),
        "block_size": st.sampled_from([4, 1, 8]),
        "chunk_size": st.sampled_from([4, 8]),
        "window": st.sampled_from([2, 6, 16]),
        "unified": st.sampled_from([True, True, True, False]),
        "prefix_cache": st.booleans(),
        "eviction": st.sampled_from(["lru", "fifo", "lfu", "sieve", "belady"]),
        "free_order": st.sampled_from(["0.33.0", "0.22.1"]),
        "watermark": st.sampled_from([0.0, 0.1, 0.3]),
        "host_cells": st.sampled_from([128, 16, 0]),
    }
)
BY_NAME = {preset.name: preset for preset in PRESETS}


@dataclass
class Slow(GivenTimes):
    """Copies between the tiers take time, within a pass and ahead of it."""

    def transfer(self, transfers):
        return sum(0.05 + 0.01 * transfer.n for transfer in transfers)

    def forward(self, batch):
        return 0.5 + 0.1 * batch.n_tokens + self.transfer(batch.places[0].transfers)


def built(world):
    """The scenario's policy, without looking for plug-ins."""
    return BY_NAME[world.cache.policy](world.cache_config())


def attempt(world, requests):
    """Run it, check what must hold for each request and what is left in the cache; the figures, or the livelock."""
    policy = built(world)
    longest = min(world.slot_context, policy.max_sequence_tokens)
    try:
        recorder, jobs = serve(world, requests, Slow(), policy)
    except Livelock as stuck:
        return str(stuck)
    assert sorted(job.request.id for job in recorder.jobs) == list(range(requests.n_requests))
    for job in jobs.values():
        assert job.ticket is None
        if job.status == "completed":
            assert job.generated == job.request.output_tokens or (job.truncated and job.tokens >= longest)
            assert job.truncated == (job.generated < job.request.output_tokens)
            assert job.arrival_s <= job.started_s < job.first_token_s <= job.finished_s
            assert job.cached < job.request.prompt_tokens
        else:
            assert job.status == "failed"
            assert job.error
    kept = policy.sequences()
    if world.server.scheduler != "llama-server" or not world.server.keep_idle_slots:
        assert kept == []
    for seq in kept:
        policy.free(seq)
    assert (policy.usage().allocated, policy.usage().stored) == (0, 0)
    if isinstance(policy, PagedPolicy) and policy.host is not None and not policy.prefix_cache:
        assert policy.host.used == 0
    return summarize(recorder, 1.0)


def may_go_round_for_ever(world):
    """Two that are computed anew by turns, each for want of the other's cells, or a step that can never be placed."""
    scheduler, policy = world.server.scheduler, built(world)
    by_turns = scheduler == "vllm" and type(policy).reserve is Policy.reserve
    too_wide = not world.server.chunked_prefill or (scheduler == "static" and world.cache.policy == "paged-window")
    return world.cache.policy == "growing" or by_turns or too_wide


def check(seed, workload, server, cache):
    if server["scheduler"] != "vllm" or not cache["host_cells"]:
        server["preemption"] = "recompute"
    if not cache["host_cells"]:
        server["prefetch"] = "none"
    try:
        world = load_scenario({"seed": seed, "workload": workload, "server": server, "cache": cache})
        built(world)
    except ValueError:
        return
    requests = world.build_workload()
    found = attempt(world, requests)
    if isinstance(found, str):
        event("livelock")
        assert may_go_round_for_ever(world), found
    else:
        event(f"preemptions: {found['preemptions'] > 0}")
        event(f"from the host tier: {found['host']['bytes_in'] > 0}")
        event(f"ahead: {found['host']['bytes_prefetched'] > 0}")
    assert attempt(world, requests) == found


@settings(max_examples=90, deadline=None)
@given(st.integers(0, 999), st.one_of(poisson, sessions), server, cache)
def test_every_request_ends_once_and_leaves_nothing_behind(seed, workload, server, cache):
    check(seed, workload, server, cache)


@settings(max_examples=45, deadline=None)
@given(
    st.integers(0, 999),
    sessions,
    server.map(lambda keys: keys | {"slot_context": None, "n_batch": 64, "keep_idle_slots": False}),
    cache.map(lambda keys: keys | {"policy": "paged", "prefix_cache": True, "unified": True, "block_size": 4}),
)
def test_every_request_ends_once_where_blocks_come_and_go(seed, workload, server, cache):
    check(seed, workload, server, cache | {"host_cells": cache["host_cells"] or 64})


@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
def test_two_runs_give_the_same_figures(scheduler):
    world = load_scenario(
        "chat", workload__requests=25, server__scheduler=scheduler, cache__policy="paged", cache__cells=1024
    )
    one, two = (run(world).summary for _ in range(2))
    assert one.pop("wall_s") > 0
    two.pop("wall_s")
    assert one == two
    assert one["completed"] == 25
