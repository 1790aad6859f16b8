"""Static batching step by step in small worlds."""

from tests.kvsim.simulation.stories import closed, each, livelock, says, tell
from tests.worlds import scenario


def static(**keys):
    return scenario(**{"server__scheduler": "static", **keys})


def test_a_batch_is_filled_once():
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
    stored = story.recorder.cache_states.kept().table().frame.set_index("time_s")["stored"]
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
    assert (story.recorder.counts.preemptions, story.recorder.counts.recomputed_tokens) == (1, 2)


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


def test_static_says_when_no_request_can_be_admitted():
    world = static(cache__cells=36, cache__block_size=4)
    stuck = livelock(world, [(0.0, 5, 1)], closed(world.cache_config()))
    assert "closed: no progress after 0.000 s: 8 of 8 blocks of 4 cells are free; request 0 " in str(stuck)


# Every scheduler, every policy
