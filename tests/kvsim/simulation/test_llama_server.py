"""llama-server's slots step by step in small worlds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import run
from kvsim.simulation.schedulers.llama_server import LlamaServer
from kvsim.simulation.schedulers.slots import reused_runs
from kvsim.simulation.set_up import build_policy
from policies import CacheConfig, Content
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy
from tests.kvsim.simulation.stories import each, says, tell
from tests.worlds import Diary, Given, GivenTimes, scenario, serve
from workloads import answer_of


def slots(n=2, **keys):
    """llama-server with slots chosen for a prompt of which they hold more than half, and without host cache."""
    server = {"server__slots": n, "server__slot_prompt_similarity": 0.5, "server__cache_ram": 0}
    return scenario(**{**server, "cache__cells": 64, **keys})


def slots_of(story):
    return [batch.chunks[0].seq for batch in story.passes]


def test_a_slot_is_chosen_by_the_prefix_that_it_keeps_else_the_one_used_longest_ago():
    requests = [
        says(0, 0.0, (1, 0, 8)),
        says(1, 10.0, (2, 0, 8)),  # of slots that were never used the last comes first
        says(2, 20.0, (1, 0, 8), (3, 0, 4)),  # 8 of 12 in slot 1
        says(3, 30.0, (2, 0, 4), (4, 0, 8)),  # 4 of 12 in slot 0, which was used longest ago: they count all the same
        says(4, 40.0, (2, 0, 4), (5, 0, 8)),  # 4 of 12 in slot 0, but slot 1 was used longest ago
        says(5, 50.0, (2, 0, 4), (4, 0, 3), (6, 0, 1)),  # 7 of 8 in slot 0
    ]
    story = tell(slots(), requests)
    assert story.steps == [[(0, 0, 8)], [(1, 0, 8)], [(2, 8, 4)], [(3, 4, 8)], [(4, 0, 12)], [(5, 7, 1)]]
    assert slots_of(story) == [1, 0, 1, 0, 1, 0]
    assert each(story, "cached") == [0, 0, 8, 4, 0, 7]
    assert (story.recorder.counts.prefix.found, story.recorder.counts.prefix.tokens) == (19, 60)


def test_a_slot_must_keep_more_than_the_share_that_is_asked_for():
    other = says(1, 10.0, (2, 0, 8))
    half, more = says(2, 20.0, (1, 0, 8), (3, 0, 8)), says(2, 20.0, (1, 0, 8), (3, 0, 7))
    first = says(0, 0.0, (1, 0, 8))
    assert slots_of(tell(slots(3), [first, other, half])) == [2, 1, 0]
    assert slots_of(tell(slots(3), [first, other, more])) == [2, 1, 2]


def test_of_equally_similar_slots_the_first_is_chosen():
    """Two at once that say the same lie in slots 1 and 0; slot 0 was used before."""
    requests = [says(0, 0.0, (1, 0, 8)), says(1, 0.0, (1, 0, 8)), says(2, 10.0, (1, 0, 8), (3, 0, 2))]
    story = tell(slots(), requests)
    assert slots_of(story)[-1] == 0
    assert story.steps[-1] == [(2, 8, 2)]


def test_without_a_similarity_slots_are_chosen_by_age_alone():
    requests = [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 8)), says(2, 20.0, (1, 0, 8))]
    story = tell(slots(server__slot_prompt_similarity=0.0), requests)
    assert slots_of(story) == [1, 0, 1]
    assert each(story, "cached") == [0, 0, 7], "what the slot holds counts whatever it was chosen for"


def test_refused_prompts_use_up_a_slots_turn_and_leave_what_it_holds():
    requests = [
        says(0, 0.0, (1, 0, 8)),
        says(1, 10.0, (2, 0, 8)),
        says(2, 20.0, (3, 0, 16)),  # too long: slot 1, which was used longest ago
        says(3, 30.0, (4, 0, 8)),  # so slot 0's turn is next
        says(4, 40.0, (1, 0, 8), (5, 0, 2)),
    ]
    story = tell(slots(server__slot_context=16), requests)
    assert slots_of(story) == [1, 0, 0, 1]
    assert story.jobs[2].error.endswith("16 prompt tokens, 16 in a slot")
    assert story.steps[-1] == [(4, 8, 2)]


def test_a_refused_prompt_lets_a_deferred_one_in_though_nothing_runs():
    story = tell(slots(1, server__slot_context=16), [says(0, 0.0, (1, 0, 20)), says(1, 0.0, (2, 0, 8))])
    assert story.steps == [[(1, 0, 8)]]
    assert each(story, "status") == ["failed", "completed"]


def test_prompts_are_filled_in_order_of_slots_so_that_the_first_to_come_is_the_last():
    """Slots 3, 2, 1, 0 are given out in order of arrival; a batch holds 8 tokens."""
    requests = [says(i, 0.0, (i, 0, 6)) for i in range(4)]
    story = tell(slots(4, server__n_batch=8), requests)
    assert story.steps[:3] == [[(3, 0, 6), (2, 0, 2)], [(2, 2, 4), (1, 0, 4)], [(1, 4, 2), (0, 0, 6)]]


def test_a_newcomer_in_a_low_slot_overtakes_a_prompt_that_is_half_done():
    requests = [says(0, 0.0, (1, 0, 20)), says(1, 0.5, (2, 0, 6))]
    story = tell(slots(2, server__n_batch=8), requests)
    assert story.steps[:3] == [[(0, 0, 8)], [(1, 0, 6), (0, 8, 2)], [(0, 10, 8)]]


def test_of_two_slots_released_in_one_step_the_task_deferred_later_chooses_first():
    """Each slot that is released puts the first deferred task before all others: 2, then 3 before it."""
    requests = [says(i, 0.1 * i, (i, 0, 4)) for i in range(4)]
    world = slots(2)
    story = tell(world, [says(0, 0.0, (0, 0, 4)), says(1, 0.0, (1, 0, 4)), *requests[2:]])
    assert story.steps[0] == [(1, 0, 4), (0, 0, 4)]
    assert slots_of(story) == [0, 0]
    assert [chunk[0] for chunk in story.steps[1]] == [2, 3], "slot 0 was released first, and request 3 has slot 1"
    admitted = {
        chunk.seq: request for chunk, (request, _, _) in zip(story.passes[1].chunks, story.steps[1], strict=True)
    }
    assert admitted == {0: 2, 1: 3}


def test_a_context_one_cell_from_full_ends_the_answer_before_its_length_does():
    """A prompt of 15 in a slot of 16 gets one token."""
    story = tell(slots(server__slot_context=16), [says(0, 0.0, (1, 0, 15), output=9)])
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (1, True)
    story = tell(slots(server__slot_context=16), [says(0, 0.0, (1, 0, 12), output=4)])
    assert (story.jobs[0].generated, story.jobs[0].truncated) == (4, False)


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


def shifted(said=14, **keys):
    """Where the next token goes after each shift of a slot of 16 tokens, as (position before, position after)."""
    own = {key: keys.pop(key) for key in ("n_keep", "n_discard") if key in keys}
    world = slots(1, server__slot_context=16, server__context_shift=True, **keys)
    request = says(0, 0.0, (1, 0, said), output=5)._replace(**own)
    starts = [chunk[1] for step in tell(world, [request]).steps[1:] for chunk in step]
    return [(before, after) for before, after in pairwise(starts) if after != before + 1]


@pytest.mark.parametrize(
    ("keys", "after"),
    [
        ({}, 8),  # 15 tokens: 7 of them go
        ({"server__n_keep": 4}, 10),  # 5 of 11
        ({"server__n_keep": 4, "model__add_bos_token": True}, 10),  # 5 of 10: one more is kept
        ({"server__n_keep": 4, "n_keep": 0}, 8),  # the request's own
        ({"server__n_keep": -1}, 14),  # 12 are kept, as many as may be; 1 of 3 goes
        ({"server__n_keep": 99}, 14),
        ({"server__n_discard": 3}, 12),
        ({"server__n_discard": 3, "n_discard": 2}, 13),
        ({"server__n_discard": 99}, 1),  # all but one
    ],
)
def test_a_full_slot_keeps_and_discards_what_it_is_told(keys, after):
    assert shifted(**keys)[0] == (14, after)


def test_a_context_shift_changes_what_a_slot_can_be_matched_by():
    """With 15 of 16 tokens it keeps 4 and forgets the next 5; what is left are 4, 5 and all said since."""
    world = slots(1, server__slot_context=16, server__context_shift=True, server__n_keep=4)
    world = load_scenario(world, server__slot_prompt_similarity=0.0)
    first = says(0, 0.0, (1, 0, 14), output=5)
    story = tell(world, [first, says(1, 30.0, (1, 0, 14))])
    assert story.steps[:5] == [[(0, 0, 14)], [(0, 14, 1)], [(0, 10, 1)], [(0, 11, 1)], [(0, 12, 1)]]
    assert story.steps[5:] == [[(1, 4, 10)]]
    story = tell(world, [first, says(1, 30.0, (1, 0, 4), (1, 9, 5), answer_of(0, 5))])
    assert story.steps[5:] == [[(1, 13, 1)]]


def test_a_prompt_that_is_not_to_be_cached_is_computed_anew():
    said = [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 8), (2, 0, 2))]
    assert tell(slots(server__cache_prompt=False), said).steps[1] == [(1, 0, 10)]
    assert tell(slots(), [said[0], said[1]._replace(cache_prompt=False)]).steps[1] == [(1, 0, 10)]
    assert tell(slots(server__cache_prompt=False), [said[0], said[1]._replace(cache_prompt=True)]).steps[1] == [
        (1, 8, 2)
    ]


REUSED = [
    # what is held, the prompt, the shortest run, and what is found
    ([(1, 0, 4), (2, 0, 6), (3, 0, 5)], [(1, 0, 4), (3, 0, 5), (9, 0, 2)], 4, 9),
    ([(1, 0, 4), (2, 0, 6), (3, 0, 5)], [(1, 0, 4), (3, 0, 5), (9, 0, 2)], 6, 4),
    ([(1, 0, 4), (2, 0, 6), (3, 0, 5)], [(3, 0, 5), (9, 0, 2)], 2, 5),
    ([(1, 0, 4), (2, 0, 3), (3, 0, 5)], [(1, 0, 4), (3, 0, 5), (2, 0, 3), (9, 0, 2)], 2, 9),  # what was passed is gone
    ([(1, 0, 4), (2, 0, 3), (3, 0, 5)], [(1, 0, 4), (9, 0, 1), (3, 0, 5)], 2, 4),  # the prompt waits for a run
    ([(1, 0, 4), (2, 0, 3), (3, 0, 5)], [(1, 0, 4), (3, 0, 5)], 2, 8),  # one token at least is computed
]


@pytest.mark.parametrize(("held", "prompt", "shortest", "found"), REUSED)
def test_runs_behind_the_common_prefix_are_moved_and_used_again(held, prompt, shortest, found):
    world = slots(1, server__cache_reuse=shortest)
    story = tell(world, [says(0, 0.0, *held), says(1, 10.0, *prompt)])
    assert story.jobs[1].cached == found
    n = sum(piece[2] for piece in prompt)
    assert story.steps[1] == [(1, found, n - found)]
    moved = story.passes[1].places[0].shift
    assert (len(moved.cells) > 0) == (found > Content(held).common_prefix(Content(prompt)))


@given(
    held=st.lists(st.integers(0, 2), max_size=20),
    prompt=st.lists(st.integers(0, 2), max_size=20),
    shortest=st.integers(1, 4),
)
def test_runs_to_reuse_are_those_of_the_word_by_word_search(held, prompt, shortest):
    """Token by token, as the server does it."""
    prefix = next(
        (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
    )
    expected, at, place = [], prefix, prefix
    while at < len(held) and place < len(prompt):
        n = 0
        while at + n < len(held) and place + n < len(prompt) and held[at + n] == prompt[place + n]:
            n += 1
        if n >= shortest:
            expected.append((at, n))
            at, place = at + n, place + n
        else:
            at += 1
    texts = [Content((token, 0, 1) for token in text) for text in (held, prompt)]
    assert list(reused_runs(*texts, prefix, shortest)) == expected


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
    """16 cells, 12 of them kept. The third prompt has slot 0 and needs 10 in a row: slot 1 goes, then slot 2."""
    world = slots(3, cache__cells=16, server__n_batch=16, server__slot_prompt_similarity=0.0)
    story = tell(world, [says(0, 0.0, (1, 0, 6)), says(1, 10.0, (2, 0, 6)), says(2, 20.0, (3, 0, 10), output=2)])
    assert story.jobs[2].status == "completed"
    assert sum(n for step in story.steps[2:] for _, _, n in step) == 11


# static


# The host cache


def two_users(turns, system=4):
    """Prompts of two users in turns, who share a system prompt; each goes on from the user's own last prompt."""
    for number in range(turns):
        user = number % 2
        yield says(number, 10.0 * number, (1, 0, system), (2 + user, 0, 6 * (number // 2 + 1)))


def hosted(n=4, **keys):
    """llama-server as it is by itself, but for the size of its cache and the similarity of the prompts here."""
    return scenario(**{"server__slots": n, "cache__cells": 256, "cache__unified": False, **keys})


def test_users_who_share_a_system_prompt_find_their_own_history_through_the_host_cache():
    """All of them in one slot: without host cache each finds the system prompt alone."""
    without = tell(hosted(server__cache_ram=0), list(two_users(6)))
    assert set(slots_of(without)) == {3}
    assert each(without, "cached") == [0, 4, 4, 4, 4, 4]
    story = tell(hosted(), list(two_users(6)))
    assert set(slots_of(story)) == {3}
    assert each(story, "cached") == [0, 4, 10, 10, 16, 16]
    assert (story.recorder.counts.host.saves, story.recorder.counts.host.loads) == (5, 4)
    assert (story.recorder.counts.host.cells_out, story.recorder.counts.host.cells_in) == (
        10 + 10 + 16 + 16 + 22,
        10 + 10 + 16 + 16,
    )


def test_nothing_is_saved_where_the_slot_keeps_half_of_what_it_holds():
    requests = [says(0, 0.0, (1, 0, 8)), says(1, 10.0, (1, 0, 4), (2, 0, 4)), says(2, 20.0, (1, 0, 3), (3, 0, 4))]
    story = tell(hosted(1), requests)
    assert each(story, "cached") == [0, 4, 3]
    assert story.recorder.counts.host.saves == 1, "4 of 8 tokens are half of them, 3 of 8 are less"


def test_idle_slots_are_saved_once_and_emptied_where_all_share_one_cache():
    requests = [says(number, 10.0 * number, (number, 0, 8)) for number in range(4)]
    again = says(4, 40.0, (0, 0, 8), (9, 0, 2))
    divided = tell(hosted(2), [*requests[:3], again])
    assert (divided.recorder.counts.host.saves, divided.recorder.counts.host.loads) == (3, 1)
    policy = build_policy(hosted(cache__unified=True))
    unified = tell(hosted(cache__unified=True), [*requests, again], policy)
    assert each(unified, "cached") == [0, 0, 0, 0, 8]
    assert (unified.recorder.counts.host.saves, unified.recorder.counts.host.loads) == (4, 1)
    assert policy.sequences() == [unified.passes[-1].chunks[0].seq], "the others were emptied"
    kept = tell(hosted(cache__unified=True, server__cache_idle_slots=False), [*requests, again])
    assert each(kept, "cached") == [0, 0, 0, 0, 8]
    assert (kept.recorder.counts.host.saves, kept.recorder.counts.host.loads) == (0, 0)


def test_a_host_cache_of_one_mebibyte_keeps_the_youngest():
    """256 tokens of 4,096 bytes are as much; each prompt has 100."""
    requests = [says(number, 10.0 * number, (number, 0, 100)) for number in range(4)]
    requests += [says(4, 40.0, (0, 0, 100), (9, 0, 2)), says(5, 50.0, (3, 0, 100), (9, 0, 2))]
    roomy = tell(hosted(1, cache__cells=512, server__slot_prompt_similarity=0.0), requests)
    assert each(roomy, "cached")[4:] == [100, 100]
    story = tell(hosted(1, cache__cells=512, server__slot_prompt_similarity=0.0, server__cache_ram=1), requests)
    assert each(story, "cached")[4:] == [0, 100]


def test_copies_to_and_from_the_host_take_time_before_the_step():
    class Slow(Diary):
        def copy(self, copies):
            return 0.5 * sum(transfer.n for copy in copies for transfer in copy.transfers)

    jobs = serve(hosted(1), Given([says(0, 0.0, (1, 0, 4)), says(1, 10.0, (2, 0, 4))]), Slow())[1]
    assert (jobs[1].started_s, jobs[1].first_token_s) == (10.0, 13.0)
    requests = [says(0, 0.0, (1, 0, 4)), says(1, 10.0, (2, 0, 99)), says(2, 10.5, (3, 0, 4))]
    recorder, jobs = serve(hosted(1, server__slot_context=64), Given(requests), Slow())
    assert jobs[1].status == "failed"
    assert jobs[2].first_token_s == 13.0, "a refused prompt had its slot saved as well, and others wait for that"
    assert recorder.counts.host.copy_s == 2.0


def test_a_state_that_finds_no_room_stays_in_the_host_cache_and_empties_its_slot():
    """48 cells for all: the long answer leaves too few for the state of 20 tokens."""
    world = hosted(2, cache__cells=48, cache__unified=True)
    first = [says(0, 0.0, (1, 0, 20)), says(1, 10.0, (2, 0, 10), output=30)]
    story = tell(world, [*first, says(2, 31.0, (1, 0, 20), (9, 0, 1)), says(3, 80.0, (1, 0, 20), (8, 0, 1))])
    assert story.recorder.counts.host.loads == 1
    assert each(story, "cached")[3] == 20


def test_a_host_cache_that_a_policy_cannot_have_is_named():
    asked = {"workload": {"requests": 5}, "server": {"slots": 2, "cache_ram": 64}}
    assert run(load_scenario(asked), "paged").summary["without_effect"] == ["server.cache_ram"]
    assert run(load_scenario(asked), "contiguous").summary["without_effect"] == []
    assert run(load_scenario({**asked, "server": {"slots": 2}}), "paged").summary["without_effect"] == []


def test_a_slot_whose_state_finds_no_room_is_cleared_of_what_it_held():
    """48 cells for all: 20 saved tokens find no room beside a long answer, and the 8 of their slot are gone."""
    keys = {"cache__unified": True, "server__cache_idle_slots": False, "server__slot_prompt_similarity": 0.0}
    world = hosted(2, cache__cells=48, **keys)
    policy, log = build_policy(world), []
    note = lambda kind, **fields: log.append((kind, fields.get("slot"), fields.get("tokens")))  # noqa: E731
    scheduler = LlamaServer(world, policy, GivenTimes(), Recorder(), log=note)

    def serve_steps(*requests, steps):
        for request in requests:
            scheduler.submit(Job(request, 0.0), 0.0)
        for _ in range(steps):
            step = scheduler.compose(0.0)
            policy.allocate(step)
            scheduler.commit(step, 1, 0.0)

    serve_steps(says(0, 0.0, (1, 0, 20)), steps=1)
    serve_steps(says(1, 0.0, (2, 0, 10), output=40), steps=2)
    serve_steps(says(2, 0.0, (3, 0, 8)), steps=20)
    log.clear()
    scheduler.submit(Job(says(3, 0.0, (1, 0, 20), (9, 0, 1)), 0.0), 0.0)
    scheduler.compose(0.0)
    assert ("clear", 1, 8) in log
    assert len(scheduler.host_cache.entries) == 2
