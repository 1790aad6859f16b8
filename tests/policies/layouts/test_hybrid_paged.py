"""Groups of layers over one pool of blocks, step by step. That all is as in vLLM, recordings show."""

import pytest

from policies import CacheConfig, Chunk, Content, OutOfCells, SequencePlan, available
from policies.paging.cache_groups import GroupSpec

FULL, STATE = GroupSpec("full", 4), GroupSpec("state", 4)
WINDOW = GroupSpec("window", 4, 6)


def build(*groups, cells=64, **options):
    return available()["vllm"](CacheConfig(cells=cells, n_ubatch=32, groups=groups, **options))


def run(policy, seq, content, prompt, *, answer=0):
    """Look a prompt up, run what is missing, and some steps of the answer; what was found."""
    hit = policy.match(seq, content, prompt)
    policy.open(seq, SequencePlan(prompt, 64, prompt + answer, content))
    policy.allocate([Chunk(seq, hit, prompt - hit)])
    for at in range(prompt, prompt + answer):
        policy.allocate([Chunk(seq, at, 1)])
    return hit


def test_a_block_of_a_group_is_as_large_as_that_of_any_other():
    assert build(FULL, cells=64).pool.n == 16
    assert build(FULL, WINDOW, cells=64).pool.n == 32
    assert build(FULL, STATE, cells=64).pool.n == 16
    wide = build(GroupSpec("full", 4, layers=1), GroupSpec("state", 4, layers=3), cells=64)
    assert (wide.pool.n, wide.capacity, wide.groups[0].share) == (5, 48, 1.0)


def test_each_group_reads_what_it_keeps():
    policy = build(FULL, WINDOW, STATE)
    run(policy, 0, Content([(1, 0, 64)]), 20)
    (batch,) = policy.allocate([Chunk(0, 20, 1)])
    assert [place.reads.scanned.tolist() for place in batch.places] == [[21], [9]]
    assert [group.window for group in policy.groups] == [None, 6]


def test_a_prompt_of_twelve_tokens_takes_as_many_blocks_as_there_are_groups():
    policy = build(GroupSpec("full", 128), *[GroupSpec("state", 128)] * 3, cells=128 * 13)
    run(policy, 0, Content([(1, 0, 64)]), 12)
    usage = policy.usage()
    assert (usage.stored, usage.allocated, usage.capacity) == (12, 4 * 128, 12 * 128)


def test_a_sequence_holds_the_state_that_it_goes_on_from_and_no_earlier_one():
    policy = build(FULL, STATE)
    run(policy, 0, Content([(1, 0, 64)]), 10, answer=30)
    full, states = (table.blocks for table in policy.blocks.sequences[0].tables)
    assert len(full) == len(states) == 10
    assert [block > 0 for block in states] == [False] * 9 + [True]


def test_a_prefix_is_found_where_a_state_was_kept():
    """Where a chunk ended with a block: not after the 12 tokens that both texts begin with, until a third one comes."""
    policy, texts = build(FULL, STATE), [Content([(0, 0, 12), (n, 0, 52)]) for n in (1, 2, 3, 4)]
    for seq, text in enumerate(texts):
        hit = policy.match(seq, text, 24)
        policy.open(seq, SequencePlan(24, 64, 24, text))
        at, cut = hit, []
        while at < 24:
            n = policy.cut_chunk(seq, at, 24 - at, prompt=24, tokens=24, most=32)
            policy.allocate([Chunk(seq, at, n)])
            at += n
            cut.append(n)
        policy.free(seq)
        assert (hit, cut) == [(0, [20, 4]), (0, [12, 8, 4]), (12, [8, 4]), (12, [8, 4])][seq]


def test_without_a_prefix_cache_there_is_one_state():
    policy = build(FULL, STATE, prefix_cache=False)
    assert not policy.cuts_chunks
    run(policy, 0, Content([(1, 0, 64)]), 10, answer=30)
    assert len(policy.blocks.sequences[0].tables[1].blocks) == 1


def test_a_step_for_which_there_is_no_room_takes_no_block():
    policy = build(FULL, WINDOW, cells=16)
    policy.open(0, SequencePlan(20, 20, 20, Content([(1, 0, 20)])))
    with pytest.raises(OutOfCells, match="10 blocks of all groups, 7 are free"):
        policy.allocate([Chunk(0, 0, 20)])
    assert policy.usage().allocated == 0
    assert "needs" in policy.refusal(SequencePlan(20, 64, 30))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([STATE], "another kind than state"),
        ([GroupSpec("full", 4, 8)], "a span of 8"),
        ([GroupSpec("window", 4)], "a span of 0"),
        ([FULL, GroupSpec("state", 16)], "larger than others"),
        ([FULL, STATE, GroupSpec("state", 8)], "differ in size"),
        ([GroupSpec("full", 8), GroupSpec("chunked", 4, 8)], "blocks of chunks"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(groups, why):
    with pytest.raises(ValueError, match=why):
        build(*groups)


def test_a_retention_that_ends_within_a_block_is_refused():
    with pytest.raises(ValueError, match="no multiple of 4"):
        build(FULL, STATE, retention=6)
