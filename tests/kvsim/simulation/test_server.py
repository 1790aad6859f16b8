"""Small worlds, and exactly what happens in them."""

import pytest

from kvsim.simulation.set_up import build_policy
from policies import Chunk, OutOfCells
from tests.worlds import GivenTimes, Listed, scenario, serve


def log_of(backend):
    return [[tuple(chunk)[:3] for chunk in batch.chunks] for batch in backend.passes]


def test_a_request_takes_one_prefill_and_a_decode_for_each_further_token():
    backend = GivenTimes()
    _, jobs = serve(scenario(), Listed([(0.0, 5, 3)]), backend)
    assert log_of(backend) == [[(3, 0, 5)], [(3, 5, 1)], [(3, 6, 1)]]
    job = jobs[0]
    assert (job.started_s, job.first_token_s, job.finished_s) == (0.0, 1.0, 3.0)
    assert job.computed == 7, "the last token is never run"


def test_a_long_prompt_is_cut_to_the_batch_and_the_batch_to_micro_batches():
    backend = GivenTimes()
    world = scenario(server__n_batch=8, server__n_ubatch=4)
    _, jobs = serve(world, Listed([(0.0, 10, 1)]), backend)
    assert log_of(backend) == [[(3, 0, 4)], [(3, 4, 4)], [(3, 8, 2)]]
    assert jobs[0].first_token_s == 3.0


def test_generating_slots_come_before_prompts():
    backend = GivenTimes()
    serve(scenario(), Listed([(0.0, 2, 3), (0.5, 4, 1)]), backend)
    assert log_of(backend) == [[(3, 0, 2)], [(3, 2, 1), (2, 0, 4)], [(3, 3, 1)]]


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    _, jobs = serve(scenario(), Listed([(0.0, 2, 1), (0.25, 2, 1)]))
    assert jobs[1].started_s == 1.0
    assert jobs[1].finished_s == 2.0


def test_more_requests_than_slots_wait_in_line():
    world = scenario(server__slots=2)
    _, jobs = serve(world, Listed([(0.0, 2, 2), (0.0, 2, 4), (0.0, 2, 1)]))
    assert [jobs[i].started_s for i in range(3)] == [0.0, 0.0, 2.0]


def test_an_idle_server_sleeps_until_the_next_arrival():
    _, jobs = serve(scenario(), Listed([(0.0, 2, 1), (100.0, 2, 1)]))
    assert jobs[1].started_s == 100.0


def test_out_of_cells_halves_the_batch_until_it_fits():
    """Holes of 8 and 4 cells: of ten prompt tokens, in batches of up to 16, 8 go in at once, then the other 2."""
    world = scenario(cache__cells=16, server__slots=1, server__slot_context=16)
    policy = build_policy(world)
    policy.allocate([Chunk(8, 0, 16)])
    policy.free(8, 0, 8)
    policy.free(8, 12, 16)
    backend = GivenTimes()
    recorder, jobs = serve(world, Listed([(0.0, 10, 1)]), backend, policy)
    assert log_of(backend) == [[(0, 0, 8)], [(0, 8, 2)]]
    assert [batch.cells.tolist() for batch in backend.passes] == [[0, 1, 2, 3, 4, 5, 6, 7], [12, 13]]
    assert recorder.counts.cache.batch_splits == recorder.counts.cache.failed_allocations == 1
    assert jobs[0].status == "completed"


def test_n_batch_itself_is_halved_so_that_a_small_piece_is_tried_unchanged():
    """One cell is free for three tokens: tried at 16, 8 and 4 alike, then as 2, then as 1, which fits; then nothing."""
    world = scenario(cache__cells=16, server__slots=1, server__slot_context=16)
    policy = build_policy(world)
    policy.allocate([Chunk(8, 0, 15)])
    backend = GivenTimes()
    recorder, jobs = serve(world, Listed([(0.0, 3, 1)]), backend, policy)
    assert log_of(backend) == [[(0, 0, 1)]]
    assert recorder.counts.cache.failed_allocations == 4 + 5, (
        "16, 8, 4, 2 before the one that fits; 16, 8, 4, 2, 1 behind it"
    )
    assert recorder.counts.cache.batch_splits == 2 + 1
    assert jobs[0].error == "Context size has been exceeded."
    assert policy.sequences() == [8], "the slot of a request that failed is emptied"


def test_an_idle_slot_is_purged_before_anything_is_halved():
    world = scenario(cache__cells=16, server__slots=2, server__slot_context=16, server__cache_ram=0)
    recorder, jobs = serve(world, Listed([(0.0, 6, 1), (2.0, 12, 3)]))
    assert [job.status for job in jobs.values()] == ["completed"] * 2
    assert (recorder.counts.cache.failed_allocations, recorder.counts.cache.batch_splits) == (1, 0)


def test_a_single_token_without_room_fails_every_request_in_a_slot():
    world = scenario(cache__cells=16, server__slots=2, server__slot_context=16)
    _, jobs = serve(world, Listed([(0.0, 6, 99), (0.0, 6, 99)]))
    assert {job.error for job in jobs.values()} == {"Context size has been exceeded."}


def test_slots_with_caches_of_their_own_are_not_purged():
    """Room that a policy withholds in a divided cache cannot come from another slot."""
    world = scenario(
        cache__cells=32, server__slots=2, server__slot_context=16, server__cache_ram=0, cache__unified=False
    )
    policy = build_policy(world)
    policy.allocate([Chunk(8, 0, 18)])
    recorder, jobs = serve(world, Listed([(0.0, 6, 1), (2.0, 12, 3)]), policy=policy)
    assert [job.status for job in jobs.values()] == ["completed", "failed"]
    assert recorder.counts.cache.failed_allocations > 3


def test_finished_slots_keep_their_cells_only_if_told():
    rows = Listed([(0.0, 6, 1)])
    for keep, stored in ((True, 6), (False, 0)):
        world = scenario(server__keep_idle_slots=keep)
        policy = build_policy(world)
        serve(world, rows, policy=policy)
        assert policy.usage().stored == stored


def test_closed_loop_users_wait_for_their_answers():
    workload = Listed([(0.0, 2, 1)] * 4, users=2)
    _, jobs = serve(scenario(), workload)
    assert [jobs[i].arrival_s for i in range(4)] == [0.0, 0.0, 1.0, 1.0]


def test_every_request_ends_whatever_the_pressure():
    world = scenario(cache__cells=64, server__slots=8, server__slot_context=40)
    rows = Listed([(0.1 * i, 3 + 7 * i % 31, 1 + 5 * i % 37) for i in range(200)])
    for name in ("contiguous", "paged"):
        recorder, jobs = serve(world, rows, policy=build_policy(world, name))
        assert len(jobs) == 200
        assert recorder.counts.cache.failed_allocations > 0, "the world is too roomy to test anything"
        assert any(job.status == "completed" for job in jobs.values())


def test_allocate_raises_out_of_cells_and_changes_nothing():
    world = scenario(cache__cells=32, server__slots=2, server__n_ubatch=8)
    for name in ("contiguous", "paged"):
        policy = build_policy(world, name)
        policy.allocate([Chunk(0, 0, 9)])
        before = policy.occupancy(), policy.usage()
        with pytest.raises(OutOfCells):
            policy.allocate([Chunk(0, 9, 7), Chunk(1, 0, 30)])
        after = policy.occupancy(), policy.usage()
        assert before[1] == after[1]
        assert before[0].owners == after[0].owners
        assert (before[0].position == after[0].position).all()


def test_a_full_slot_forgets_half_of_what_follows_the_tokens_it_keeps():
    """Slot of 16: full with 15 tokens; keeps 4, forgets 5 of the other 11, and goes on from position 10."""
    world = scenario(cache__cells=32, server__slots=2, server__slot_context=16, server__context_shift=True)
    world = world.model_copy(update={"server": world.server.model_copy(update={"n_keep": 4})})
    backend = GivenTimes()
    recorder, jobs = serve(world, Listed([(0.0, 14, 9)]), backend, build_policy(world, "contiguous"))
    assert log_of(backend)[:4] == [[(1, 0, 14)], [(1, 14, 1)], [(1, 10, 1)], [(1, 11, 1)]]
    shift = backend.passes[2].places[0].shift
    assert shift.deltas.tolist() == [-5] * 6, "positions 9 to 14 became 4 to 9"
    assert (jobs[0].generated, jobs[0].truncated, recorder.counts.context_shifts) == (9, False, 2)


def test_a_ring_never_fills():
    world = scenario(server__slots=2, server__slot_context=16, cache__cells=32, cache__window=16, cache__sinks=2)
    _, jobs = serve(world, Listed([(0.0, 10, 60)]), policy=build_policy(world, "ring"))
    assert (jobs[0].generated, jobs[0].truncated) == (60, False)
