"""How much room is kept free for those that run, rule by rule, in blocks of four cells."""

import pytest

from policies import NOTHING, Chunk, SequencePlan
from policies.paging.admission_rules import FIRST_RATIO, LEAST_RATIO, STEPS_TO_LEAST
from tests.policies.paging.cache import OTHER, SAME, cache, run


def plan(prompt, most, **known):
    return SequencePlan(prompt, most, most, **known)


def start(policy, seq, prompt, most, content=NOTHING):
    """Start a sequence and run its prompt."""
    policy.open(seq, plan(prompt, most, content=content))
    assert policy.reserve(Chunk(seq, 0, prompt), waits=True)
    run(policy, (seq, 0, prompt))


def decode(policy, seq, start, steps):
    for at in range(start, start + steps):
        run(policy, (seq, at, 1))


def test_as_it_fits_any_sequence_may_start():
    policy = cache(4, admission="as-it-fits")
    start(policy, 0, 8, 16)
    assert policy.admits(plan(16, 16))
    assert not policy.admits_while_decoding


def test_no_evict_keeps_the_blocks_free_that_all_may_still_need():
    """0 holds two blocks of its four, so that of the eight free ones six are for others."""
    policy = cache(10, admission="no-evict")
    start(policy, 0, 8, 16)
    assert policy.admits(plan(1, 24))
    assert not policy.admits(plan(1, 25))
    start(policy, 1, 4, 20)
    assert policy.admits(plan(4, 4))
    assert not policy.admits(plan(4, 5))


def test_no_evict_does_not_change_its_answer_while_sequences_grow():
    policy = cache(10, admission="no-evict")
    start(policy, 0, 8, 16)
    for at in range(8, 16):
        decode(policy, 0, at, 1)
        assert policy.admits(plan(1, 24))
        assert not policy.admits(plan(1, 25))
    policy.free(0)
    assert policy.admits(plan(1, 40))


def test_no_evict_lets_a_sequence_start_alone_whatever_it_may_hold():
    """Its limit may be more than there is: nothing that it could take belongs to another."""
    policy = cache(4, admission="no-evict")
    assert policy.admits(plan(4, 400))
    start(policy, 0, 4, 400)
    assert not policy.admits(plan(1, 1))


def test_no_evict_counts_what_a_window_holds_at_once():
    """The seven tokens before a chunk of at most four lie in at most four blocks."""
    policy = cache(10, window=8, admission="no-evict", prefix_cache=False, n_ubatch=4)
    start(policy, 0, 4, 400)
    assert policy.admits(plan(1, 400))
    start(policy, 1, 4, 400)
    assert policy.admits(plan(1, 8))
    assert not policy.admits(plan(1, 9))


def test_expected_takes_a_share_of_what_those_that_run_may_generate_and_all_of_the_new_one():
    """Of 80 free cells 40 * 0.7 are for 0; a new one of 4 tokens may generate 43, besides one block for rounding.

    One step has been taken since the cache was made, which has lowered the share a little.
    """
    policy = cache(21, admission="expected")
    start(policy, 0, 4, 44)
    assert 27.5 < 40 * policy._rule.ratio < 28
    assert policy.admits(plan(4, 48))
    assert not policy.admits(plan(4, 49))


def test_a_sequence_that_does_not_decode_yet_counts_with_its_whole_limit():
    policy = cache(21, admission="expected")
    policy.open(0, plan(8, 44))
    assert policy.reserve(Chunk(0, 0, 4), waits=True)
    run(policy, (0, 0, 4))
    assert policy.admits(plan(4, 35))
    assert not policy.admits(plan(4, 36))


def test_the_share_falls_with_every_step_and_an_empty_cache_sets_it_back():
    policy = cache(200, admission="expected", max_tokens=1000)
    rule, least = policy._rule, FIRST_RATIO * LEAST_RATIO
    start(policy, 0, 4, 1000)
    decode(policy, 0, 4, 59)
    assert rule.ratio == pytest.approx(FIRST_RATIO - (FIRST_RATIO - least) * 60 / STEPS_TO_LEAST)
    rule_of_rows = policy.placement_rule()
    assert rule_of_rows.join(0, 600)
    assert all(rule_of_rows.take_step() for _ in range(300))
    assert rule.ratio == pytest.approx(FIRST_RATIO - (FIRST_RATIO - least) * 360 / STEPS_TO_LEAST)
    assert all(rule_of_rows.take_step() for _ in range(300))
    assert rule.ratio == least
    policy.free(0)
    assert rule.ratio == FIRST_RATIO


def test_a_preemption_teaches_what_those_that_go_on_have_generated():
    """Two that go on have generated 6 and 2 of 100 each; 20 steps more for both make 48 of 200, and one token more."""
    policy = cache(100, admission="expected")
    for seq, steps in enumerate((7, 3, 1)):
        start(policy, seq, 10, 110)
        decode(policy, seq, 10, steps - 1)
    policy.free(2)
    policy.note_preemption()
    assert policy._rule.ratio == pytest.approx(48 / 201)


def test_conservativeness_scales_the_share_up_to_all():
    assert cache(9, admission="expected", conservativeness=0.5)._rule.ratio == FIRST_RATIO / 2
    assert cache(9, admission="expected", conservativeness=9.0)._rule.ratio == 1.0


def test_blocks_that_others_hold_take_no_room_once_more():
    """Of 24 free cells, with five blocks to share: 4 for the prompt's rest, 15 to generate, 4 for rounding."""
    policy = cache(12, admission="expected")
    start(policy, 0, 24, 24, SAME)
    assert policy.admits(plan(24, 39, content=SAME))
    assert not policy.admits(plan(24, 40, content=SAME))
    assert not policy.admits(plan(24, 24, content=OTHER))


def test_what_was_generated_before_a_preemption_is_computed_again():
    policy = cache(21, admission="expected")
    start(policy, 0, 4, 4)
    assert policy.admits(plan(10, 75))
    assert policy.admits(plan(10, 75, generated=30))
    assert not policy.admits(plan(10, 76, generated=30))
