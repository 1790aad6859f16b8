"""Blocks behind a sliding window: stories of what the comparison with vLLM in ``tests/kvsim/engines`` does not meet."""

import pytest

from policies import Chunk, Content, OutOfCells, SequencePlan, Unsupported
from tests.policies.paging.cache import SAME, UNBOUNDED, begin, cache, order, refs, run, table, tell


def test_a_window_gives_blocks_up_even_if_there_is_no_room_then():
    policy = cache(4, window=6)
    run(policy, (0, 0, 12), (1, 0, 4))
    with pytest.raises(OutOfCells, match="the step needs 3 blocks of 4 cells, 1 are free"):
        run(policy, (0, 12, 1), (1, 4, 8))
    assert (table(policy, 0), order(policy)) == ([0, 2, 3], [1])
    assert policy.reserve(Chunk(0, 12, 1))
    assert table(policy, 0) == [0, 2, 3, 1]


def test_tokens_in_flight_still_see_their_window():
    policy = cache(6, window=6, prefix_cache=False)
    run(policy, (0, 0, 13))
    assert policy.reserve(Chunk(0, 13, 1), in_flight=1)
    assert table(policy, 0) == [0, 2, 3, 4]


def test_a_sequence_can_be_truncated_down_to_the_blocks_given_up():
    policy = cache(8, window=6)
    run(policy, (0, 0, 16))
    assert policy.can_truncate(0, 14) == 14
    run(policy, (0, 16, 1))
    assert (table(policy, 0), order(policy)) == ([0, 0, 3, 4, 2], [1, 5, 6, 7, 8])
    assert policy.can_truncate(0, 14) == 0
    with pytest.raises(Unsupported, match="mine: what comes before position 8 has been given up"):
        policy.free(0, 8)
    with pytest.raises(Unsupported, match="mine: the window has moved past position 8"):
        policy.copy(0, 1, 0, 8)
    policy.copy(0, 1, 0, 15)
    assert (table(policy, 1), refs(policy)) == ([0, 0, 3, 4], [0, 0, 1, 2, 2, 0, 0, 0, 0])
    policy.free(0, 9)
    assert (table(policy, 0), policy.occupancy().owners[12]) == ([0, 0, 3], {0, 1})


def test_of_a_text_that_becomes_known_late_only_blocks_still_held_are_found():
    policy = cache(8, window=6)
    content = Content()
    tell(policy, 0, content)
    run(policy, (0, 0, 16))
    content.extend((0, 0, 20))
    run(policy, (0, 16, 1))
    assert table(policy, 0) == [0, 0, 3, 4, 2]
    assert [block for block, key in enumerate(policy.pool.keys) if key is not None] == [3, 4]
    assert policy.match(1, SAME, 17) == 16


def test_a_sequence_that_is_to_return_finds_also_what_its_window_has_left():
    """The token at position 12 sees 7 to 12, that at 14 only 9 to 14: the second block has been given up by then."""
    policy = cache(8, window=6)
    content = Content.of_two((7, 0, 14), (8, 0, 6))
    begin(policy, 0, content, 14)
    run(policy, (0, 14, 1))
    assert table(policy, 0) == [0, 0, 3, 4]
    policy.will_return(0)
    policy.free(0)
    assert policy.match(1, content, 16) == 12
    assert policy.admission.found(1) == [0, 2, 3]


def test_with_tail_only_just_the_last_window_of_a_prompt_is_found():
    """A prompt of 18 tokens and a window of 6: its last full blocks, 2 and 3 from 0, are cached; of the answer none."""
    policy = cache(8, window=6, tail_only=True)
    policy.open(0, SequencePlan(18, UNBOUNDED, 24, SAME))
    run(policy, (0, 0, 18))
    assert [block for block, key in enumerate(policy.pool.keys) if key is not None] == [3, 4]
    run(policy, (0, 18, 6))
    assert policy.pool.n_cached == 2
    assert policy.match(1, SAME, 18) == 16
    assert policy.match(1, SAME, 16) == 0
    assert policy.match(1, SAME, 40) == 16
    ends_with_a_block = cache(8, window=6, tail_only=True)
    ends_with_a_block.open(0, SequencePlan(16, UNBOUNDED, 24, SAME))
    run(ends_with_a_block, (0, 0, 16))
    assert [block for block, key in enumerate(ends_with_a_block.pool.keys) if key is not None] == [2, 3]
