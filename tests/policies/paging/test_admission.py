"""What is found in the prefix cache, and which chunks find room: stories with the numbers of their blocks.

What vLLM does with the same calls is compared in ``tests/kvsim/engines/test_vllm_conformance.py``.
"""

import pytest

from policies import NOTHING, Chunk, OutOfCells
from tests.policies.paging.cache import SAME, begin, cache, counted, moves_of, order, refs, run, says, table, tell


def test_a_text_may_become_known_while_it_is_written():
    """Blocks that were full before their text was known get their key with the next step."""
    policy = cache(8)
    content = says(0, 3)
    tell(policy, 0, content)
    run(policy, (0, 0, 7))
    assert policy.match(1, SAME, 20) == 0
    content.extend((0, 3, 5))
    assert policy.match(1, SAME, 20) == 0
    run(policy, (0, 7, 1))
    assert policy.match(1, SAME, 20) == 8


@pytest.mark.parametrize("watermark", [0.0, 0.2])
def test_a_chunk_finds_room_only_if_the_whole_of_its_sequence_does(watermark):
    """Of five blocks, of which one must stay free for those that run where others wait."""
    policy = cache(5, watermark=watermark)
    most = 20 - 4 * (watermark > 0)
    assert not policy.reserve(Chunk(0, 0, 4), whole=most + 1, waits=True)
    assert policy.reserve(Chunk(0, 0, 4), whole=most, waits=True)
    assert table(policy, 0) == [1]


def test_a_sequence_without_text_is_never_found():
    policy = cache(4)
    tell(policy, 0, NOTHING)
    run(policy, (0, 0, 8), (1, 0, 8))
    assert policy.match(2, NOTHING, 8) == 0
    assert policy.pool.n_cached == 0


def test_a_block_is_found_from_the_moment_it_is_scheduled():
    policy = cache(6)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 9))
    assert policy.match(1, SAME, 10) == 8
    tell(policy, 1, says(0, 10))
    assert policy.reserve(Chunk(1, 8, 2))
    [batch] = run(policy, (0, 0, 9), (1, 8, 2))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2, 3], [1, 2, 4])
    assert batch.views[1].cells.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17]


def test_a_block_that_was_scheduled_but_never_written_is_not_found():
    """It goes back to the pool as a plain block, in front of those that were written."""
    policy = cache(6)
    tell(policy, 0, says(0, 20))
    run(policy, (0, 0, 6))
    assert policy.reserve(Chunk(0, 6, 7))
    assert policy.match(1, SAME, 20) == 12
    policy.free(0)
    assert policy.match(1, SAME, 20) == 4
    assert order(policy) == [4, 3, 2, 5, 6, 1]
    assert counted(policy) == (0, 0)


def test_reserved_blocks_are_there_whatever_else_is_asked():
    policy = cache(3)
    assert policy.reserve(Chunk(0, 0, 5))
    assert not policy.reserve(Chunk(1, 0, 5))
    with pytest.raises(OutOfCells, match="the step needs 2 blocks of 4 cells, 1 are free"):
        run(policy, (0, 0, 5), (1, 0, 5))
    assert run(policy, (0, 0, 5), (1, 0, 1))[0].cells.tolist() == [4, 5, 6, 7, 8, 12]


def test_a_chunk_may_be_reserved_twice():
    """Sequence 1 has found the block in between. Its tokens will be what its key says, and no copy is needed."""
    policy = cache(6)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 4))
    assert policy.match(1, SAME, 6) == 4
    tell(policy, 1, says(0, 6))
    assert policy.reserve(Chunk(1, 4, 2))
    assert policy.reserve(Chunk(0, 0, 4))
    assert moves_of(run(policy, (0, 0, 4), (1, 4, 2))) == []
    assert (table(policy, 0), table(policy, 1), policy.match(2, SAME, 6)) == ([1], [1, 2], 4)


def test_drafted_tokens_get_blocks_but_no_key():
    policy = cache(5)
    tell(policy, 0, says(0, 20))
    assert policy.reserve(Chunk(0, 0, 6), lookahead=7)
    assert table(policy, 0) == [1, 2, 3, 4]
    run(policy, (0, 0, 6))
    assert policy.match(1, SAME, 20) == 4
    assert policy.reserve(Chunk(0, 6, 3), lookahead=1)
    assert table(policy, 0) == [1, 2, 3, 4]
    assert policy.match(1, SAME, 20) == 8
    short = cache(5, max_tokens=10)
    assert short.reserve(Chunk(0, 0, 6), lookahead=50)
    assert table(short, 0) == [1, 2, 3]


def test_found_blocks_are_used_once():
    """They are the sequence's own from ``reserve`` to ``free``; then it holds nothing again."""
    policy = cache(8)
    begin(policy, 0, says(0, 9))
    assert begin(policy, 1, says(0, 9)) == 8
    policy.free(1)
    with pytest.raises(ValueError, match="sequence 1 holds no token before position 8"):
        run(policy, (1, 8, 1))


def test_a_found_block_is_not_taken_from_a_sequence_that_got_it_since():
    policy = cache(3)
    begin(policy, 0, says(0, 5))
    policy.free(0)
    assert policy.match(1, SAME, 5) == 4
    tell(policy, 1, says(0, 5))
    run(policy, (2, 0, 12))
    assert not policy.reserve(Chunk(1, 4, 0))
    assert (table(policy, 1), refs(policy)) == ([], [0, 1, 1, 1])
    policy.free(2)
    assert begin(policy, 1, says(0, 5)) == 0


def test_blocks_found_by_two_sequences_are_not_handed_out_to_either_in_the_same_step():
    """Block 3 is second in the queue, and the first sequence needs three."""
    policy = cache(6)
    for seq, text, n in [(0, 0, 5), (3, 1, 5), (4, 2, 8)]:
        begin(policy, seq, says(text, n))
    for seq in (3, 0, 4):
        policy.free(seq)
    assert order(policy) == [2, 4, 3, 1, 6, 5]
    for seq, text in [(1, 0), (2, 1)]:
        tell(policy, seq, says(text, 16))
        assert policy.match(seq, says(text, 16), 5) == 4
    run(policy, (1, 4, 12), (2, 4, 1))
    assert (table(policy, 1)[0], table(policy, 2)[0]) == (1, 3)
    assert sorted(table(policy, 1) + table(policy, 2)) == [1, 2, 3, 4, 5, 6]
