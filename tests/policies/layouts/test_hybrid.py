"""Hybrid caches: micro-batches of equal parts, what cannot be rolled back, and checkpoints."""

import numpy as np
import pytest

from policies import CacheConfig, Chunk, OutOfCells, Unsupported, available


def hybrid(name="hybrid", **options):
    config = {"cells": 64, "n_ubatch": 8, "sequences": 2, "unified": True, "for_any_layout": True}
    return available()[name](CacheConfig(**{**config, **options}))


def sizes(batches):
    return [[(chunk.seq, chunk.n) for chunk in batch.chunks] for batch in batches]


def test_a_micro_batch_has_equally_many_tokens_of_each_sequence():
    policy = hybrid()
    assert sizes(policy.allocate([Chunk(0, 0, 3), Chunk(1, 0, 9)])) == [[(0, 3), (1, 3)], [(1, 6)]]
    assert sizes(policy.allocate([Chunk(0, 3, 1), Chunk(1, 9, 1)])) == [[(0, 1), (1, 1)]]


def test_positions_that_a_state_has_seen_stay_in_every_cache():
    policy = hybrid()
    policy.allocate([Chunk(0, 0, 6)])
    before = policy.occupancy().position
    with pytest.raises(Unsupported):
        policy.free(0, 4)
    assert np.array_equal(policy.occupancy().position, before)
    assert [policy.can_truncate(0, n) for n in (4, 5, 6)] == [0, 0, 6]
    policy.free(0)
    assert (policy.ends(0), policy.usage().stored) == ((-1, -1), 0)


@pytest.mark.parametrize("name", ["hybrid", "sliding-window"])
@pytest.mark.parametrize("unified", [True, False])
def test_a_sequence_goes_on_from_a_checkpoint(name, unified):
    policy, fresh = (hybrid(name, unified=unified, window=3) for _ in range(2))
    policy.allocate([Chunk(0, 0, 7)])
    saved = policy.save_checkpoint(0, range(10, 13))
    assert (saved.last, saved.window_tokens) == (6, 3 if name == "sliding-window" else 0)
    for start in range(7, 30, 4):
        policy.allocate([Chunk(0, start, 4)])
    copies = policy.restore_checkpoint(0, saved)
    back, out = ([[(t.host, t.n) for t in copy.transfers] for copy in each] for each in (copies, saved.copies))
    assert back == out == ([[], [(10, 3)]] if name == "sliding-window" else [[]])
    policy.free(0, 7)
    policy.allocate([Chunk(0, 7, 2)])
    for at, n in ((0, 7), (7, 2)):
        fresh.allocate([Chunk(0, at, n)])
    for group in range(len(policy.groups)):
        seen = policy.occupancy(group).position
        window = policy.groups[group].window
        wanted = range(9) if window is None else range(4, 9)
        assert {*wanted} <= {*seen.tolist()} <= {-1, *range(9)}
    assert policy.ends(0)[1] == fresh.ends(0)[1] == 8


def test_a_step_without_room_is_seen_by_no_state():
    policy = hybrid(cells=8, sequences=1)
    policy.allocate([Chunk(0, 0, 6)])
    with pytest.raises(OutOfCells):
        policy.allocate([Chunk(0, 6, 3)])
    assert policy.ends(0) == (5, 5)
    assert sizes(policy.allocate([Chunk(0, 6, 2)])) == [[(0, 2)]]


def test_a_state_goes_to_the_host_and_back_with_its_cells():
    policy = hybrid()
    policy.allocate([Chunk(0, 0, 6)])
    exported = policy.export(0, range(6))
    policy.free(0)
    policy.import_(1, exported)
    assert policy.ends(1) == (5, 5)
