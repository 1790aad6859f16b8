"""The rule of one cache for all sequences against ``allocate``: searches, compactions, tiles, chunks beside rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, OutOfCells, RelativeCosts, SequencePlan
from policies.compaction.compactors import FillHoles, pack
from policies.compaction.triggers import Adaptive, OnFailure, Threshold, Trigger
from policies.layouts.prompt_decode_regions import PromptDecodeRegionsPolicy
from policies.layouts.unified import UnifiedPolicy
from tests.policies.placement.harness import Twins

COSTS = RelativeCosts(score=1.0, run=5.0, cell=1.0)


class PlugIn(Trigger):
    """A trigger that is written by others."""

    checks_steps = True

    def due_after_step(self, state):
        return state.span - state.used > 40


POLICIES = {
    "contiguous": {},
    "tiled": {"kernel": "tiled"},
    "keeps_partial": {"keeps_partial": True, "compactor": FillHoles(2), "trigger": Threshold(0.1, "b2422")},
    "fill_holes": {"compactor": FillHoles(3), "trigger": OnFailure()},
    "packed": {"compactor": pack, "trigger": OnFailure(), "kernel": "tiled"},
    "threshold": {"compactor": pack, "trigger": Threshold(0.2, on_failure=True)},
    "before": {"compactor": pack, "trigger": Threshold(0.2, "b2278", on_failure=True), "kernel": "tiled"},
    "adaptive": {"compactor": pack, "trigger": Adaptive(COSTS, horizon=8.0)},
    "plugged_in": {"compactor": FillHoles(9), "trigger": PlugIn(), "kernel": "tiled"},
}
"""How each is built; ``regions`` is not here."""


def policy_of(name, cells, n_ubatch, pad):
    config = CacheConfig(cells=cells, n_ubatch=n_ubatch, pad=pad)
    return (
        PromptDecodeRegionsPolicy(name, config) if name == "regions" else UnifiedPolicy(name, config, **POLICIES[name])
    )


OPERATIONS = st.one_of(
    st.tuples(st.just("prompt"), st.integers(0, 5), st.integers(1, 60), st.integers(1, 3)),
    st.tuples(st.just("steps"), st.integers(1, 12), st.integers(0, 0), st.integers(0, 0)),
    st.tuples(st.just("free"), st.integers(0, 5), st.booleans(), st.integers(0, 0)),
    st.tuples(st.sampled_from(["leave", "truncate", "copy", "shift", "compact"]), *[st.integers(0, 5)] * 2, st.just(0)),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=75)
@pytest.mark.parametrize("name", [*POLICIES, "regions"])
@given(
    st.lists(OPERATIONS, min_size=4, max_size=40),
    st.sampled_from([(96, 16, 1), (200, 32, 16), (320, 24, 32), (64, 64, 8)]),
)
def test_the_rule_does_what_allocate_does(name, operations, sizes):
    twins = Twins(lambda: policy_of(name, *sizes))
    twins.rule.reserve()
    held = twins.lengths
    for what, seq, n, tokens in operations:
        if what == "prompt":
            if seq in twins.rule.by_seq:
                twins.rule.leave(seq)
            if seq not in held:
                for policy in twins.both():
                    policy.open(seq, SequencePlan(n, 1000, 1000))
            if not twins.step([Chunk(seq, held.get(seq, 0), n)]):
                break
            if twins.join([seq]):
                twins.rule.give(seq, tokens)
        elif what == "steps":
            if not all(twins.step() for _ in range(seq)):
                break
        elif what == "free" and (seq in twins.rule.by_seq or n):
            for policy in twins.both():
                policy.free(seq)
            held.pop(seq, None)
        elif what == "leave" and seq in twins.rule.by_seq:
            twins.rule.leave(seq)
        elif what == "truncate" and held.get(seq, 0) > n > 0:
            for policy in twins.both():
                policy.free(seq, n)
            held[seq] = n
            twins.join([seq])
        elif what == "copy" and seq in held and n not in held:
            for policy in twins.both():
                policy.copy(seq, n)
            held[n] = held[seq]
            for blocked in twins.rule.blocked():
                twins.rule.leave(blocked)
        elif what == "shift" and held.get(seq, 0) > 2:
            for policy in twins.both():
                policy.free(seq, 0, 1)
                policy.shift(seq, 1, None, -1)
            held[seq] -= 1
            twins.join([seq])
        elif what == "compact":
            for policy in twins.both():
                policy.compact()
        twins.compare()


def test_a_step_that_finds_room_only_after_a_compaction_is_taken_by_allocate():
    """Every other cell is free, and a step of two tokens needs two in a row."""
    twins = Twins(lambda: UnifiedPolicy("full", CacheConfig(cells=16, n_ubatch=8), compactor=pack, trigger=OnFailure()))
    assert twins.step([Chunk(seq, 0, 1) for seq in range(8)])
    assert twins.step([Chunk(seq, 0, 1) for seq in range(8, 16)])
    for policy in twins.both():
        for seq in range(0, 12, 2):
            policy.free(seq)
    assert twins.join([13, 15]) == [13, 15]
    assert not twins.rule.take_step()
    assert twins.rule.by_seq[13].length == 1
    assert twins.step()
    assert twins.ruled.usage().largest_free_extent == 4


def test_a_compaction_that_is_due_is_told_with_the_step():
    """In place of the first of three sequences the others move up; the moves are told once."""
    config = CacheConfig(cells=64, n_ubatch=32, pad=1)
    twins = Twins(lambda: UnifiedPolicy("due", config, compactor=pack, trigger=Threshold(0.2)))
    for seq in range(3):
        assert twins.step([Chunk(seq, 0, 10)])
    twins.join([1, 2])
    for each in twins.both():
        each.free(0)
    assert twins.step()
    moved = []
    for _ in range(3):
        assert twins.step()
        moved.append(twins.rule.passes[0].groups[0].moves.n_cells)
    assert [n > 0 for n in moved] == [True, False, False]


@pytest.mark.parametrize("keeps_partial", [False, True])
def test_a_prompt_that_does_not_fit_beside_rows(keeps_partial):
    """The first of two micro-batches has room; it stays where the policy keeps it."""
    config = CacheConfig(cells=32, n_ubatch=8, pad=1)
    twins = Twins(lambda: UnifiedPolicy("small", config, keeps_partial=keeps_partial))
    assert twins.step([Chunk(0, 0, 8), Chunk(1, 0, 8)])
    twins.join([0, 1])
    assert twins.step()
    done = []
    for place in (
        lambda: twins.rule.place([Chunk(2, 0, 20)]),
        lambda: twins.asked.allocate([Chunk(0, 9, 1), Chunk(1, 9, 1), Chunk(2, 0, 20)]),
    ):
        with pytest.raises(OutOfCells) as refusal:
            place()
        done.append([batch.chunks for batch in refusal.value.done])
    assert done[0] == done[1]
    assert (len(done[0]) > 0) == keeps_partial
    # Who asked for the step counts what is kept.
    assert [row.length for row in twins.rule.rows] == [9, 9]
    twins.compare()


def test_rows_that_fill_a_micro_batch():
    """Four tokens at most: then chunks beside the rows come in passes of their own, and so does a fifth row."""
    twins = Twins(lambda: UnifiedPolicy("narrow", CacheConfig(cells=160, n_ubatch=4)))
    for seq in range(5):
        assert twins.step([Chunk(seq, 0, 3)])
        twins.join([seq])
        assert twins.step([Chunk(9, twins.lengths.get(9, 0), 2)])
        assert twins.step()


def test_a_sequence_joins_when_its_prompt_has_ended():
    policy = PromptDecodeRegionsPolicy("regions", CacheConfig(cells=64))
    rule = policy.placement_rule()
    policy.open(0, SequencePlan(5, 64, 64))
    policy.allocate([Chunk(0, 0, 4)])
    assert not rule.join(0, 9)
    policy.allocate([Chunk(0, 4, 1)])
    assert rule.join(0, 2)
    assert not rule.join(1, 9), "it holds nothing"
    assert rule.take_step()
    assert not rule.ended
    assert rule.take_step()
    assert rule.ended
    assert [row.seq for row in rule.ended_rows()] == [0]
    assert np.flatnonzero(policy.occupancy().position >= 5).tolist() == [62, 63]
