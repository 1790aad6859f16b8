"""When to compact: llama.cpp's four formulas by hand, and a trigger that learns whether compaction pays."""

import pytest

from policies import CacheConfig, Chunk, RelativeCosts
from policies.compaction.compactors import pack
from policies.compaction.triggers import Adaptive, Idle, OnFailure, Threshold, Trigger, TriggerInput
from policies.layouts.unified import UnifiedPolicy
from policies.vocabulary import NO_MOVES, Moves

MOVES = Moves.from_runs([(100 + 2 * i, i, 1) for i in range(10)])
"""Ten runs of a cell each."""


def state(used, span, *, top=None, pad=32, tokens=1, least=0):
    return TriggerInput(used, span if top is None else top, span, pad, tokens, lambda: least)


def answers(trigger, given):
    """Whether the trigger wants to compact: before the step, and after it."""
    return trigger.due_before_step(given, lambda: MOVES), trigger.due_after_step(given)


# Formula, threshold, state, (before, after), and as a comment the ratio by hand.
BY_HAND = [
    ("b2278", 0.5, state(63, 128, tokens=0), (False, True)),  # 1 - 63/128 = 0.507...
    ("b2278", 0.5, state(63, 128, tokens=1), (False, False)),  # 1 - 64/128 = 0.5, and not more
    ("b2278", 0.5, state(10, 127), (False, False)),  # below 128 cells nothing is worth it
    ("b2422", 0.5, state(63, 128, tokens=9), (False, True)),  # the step's tokens do not count: 0.507...
    ("b2422", 0.5, state(64, 128), (False, False)),
    ("b2422", 0.1, state(1, 2), (False, True)),  # however small the cache
    ("b2422", 0.1, state(0, 0), (False, False)),
    ("b4875", 0.2, state(1605, 2048, pad=32), (False, True)),  # 1 - 1637/2048 = 0.2006...
    ("b4875", 0.2, state(1607, 2048, pad=32), (False, False)),  # 1 - 1639/2048 = 0.1997...
    ("b4875", 0.1, state(10, 2047, top=2047), (False, False)),  # spans below 2,048 cells are left alone
    ("b4875", 0.1, state(10, 2048, top=1), (False, True)),  # the padded span counts
    ("b4875", 0.1, state(2040, 2048, pad=32), (False, False)),  # more than full with the padding: 0, not negative
    ("b6170", 0.2, state(1605, 2304, top=2048, pad=32), (True, False)),  # the same, of the span as it is
    ("b6170", 0.2, state(1607, 2304, top=2048, pad=32), (False, False)),
    ("b6170", 0.1, state(10, 2304, top=2047), (False, False)),
]


@pytest.mark.parametrize(("formula", "threshold", "given", "answer"), BY_HAND)
def test_the_measures_of_fragmentation(formula, threshold, given, answer):
    assert answers(Threshold(threshold, formula), given) == answer


@pytest.mark.parametrize(("formula", "before", "after"), [("b2422", False, True), ("b4875", False, True)])
def test_the_ratio_is_taken_in_single_precision(formula, before, after):
    """2,304 of 2,560 cells: 1 - 0.9 is 0.1 less a little in double precision, and 0.1 and a little in single."""
    assert not 1 - 2304 / 2560 > 0.1
    used = 2304 if formula == "b2422" else 2304 - 32
    assert answers(Threshold(0.1, formula), state(used, 2560)) == (before, after)
    assert answers(Threshold(0.1, formula), state(used + 1, 2560)) == (False, False)


@pytest.mark.parametrize("formula", ["b2278", "b2422", "b4875", "b6170"])
@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_of_zero_or_less_is_off(formula, threshold):
    assert answers(Threshold(threshold, formula), state(1, 4096)) == (False, False)


def test_which_triggers_act_on_failure_and_when_idle():
    for trigger, on_failure, when_idle in [
        (Trigger(), False, False),
        (OnFailure(), True, False),
        (Idle(), False, True),
        (Threshold(0.1), False, False),
        (Threshold(0.1, on_failure=True), True, False),
        (Adaptive(RelativeCosts(1, 1, 1)), True, False),
    ]:
        assert (trigger.on_failure, trigger.when_idle) == (on_failure, when_idle)
    assert answers(OnFailure(), state(1, 4096)) == answers(Idle(), state(1, 4096)) == (False, False)


# Adaptive. Below, holes are cells of the span (unpadded: pad 1) that hold no token; the horizon begins at 64 steps.


def holes(n, *, tokens=1, least=0):
    return state(100, 100 + n, pad=1, tokens=tokens, least=least)


def test_it_compacts_where_the_attention_saved_costs_more_than_the_moves():
    """Ten runs of a cell cost 10 x 50 + 10 x 8 = 580; n holes save n x 64 / 2 = 32 n in the horizon."""
    costs = RelativeCosts(score=1.0, run=50.0, cell=8.0)
    assert not Adaptive(costs).due_before_step(holes(18), lambda: MOVES)  # 576
    assert Adaptive(costs).due_before_step(holes(19), lambda: MOVES)  # 608
    assert Adaptive(costs).due_before_step(holes(10, tokens=2), lambda: MOVES)  # Two tokens a step save it sooner: 640.
    assert not Adaptive(costs).due_before_step(holes(19), lambda: NO_MOVES)


def test_the_padding_s_cells_are_no_holes():
    """A span of 128 cells for 97 tokens is full, at a padding of 32."""
    eager = RelativeCosts(score=1e6, run=1.0, cell=1.0)
    assert not Adaptive(eager).due_before_step(state(97, 128, pad=32), lambda: MOVES)
    assert Adaptive(eager).due_before_step(state(96, 128, pad=32), lambda: MOVES)


def test_it_plans_only_where_a_plan_could_pay():
    def plan():
        raise AssertionError("planned in vain")

    costs = RelativeCosts(score=1.0, run=50.0, cell=8.0)
    assert not Adaptive(costs).due_before_step(holes(1), plan)  # One run costs more than it saves.
    assert not Adaptive(costs).due_before_step(holes(19, least=100), plan)  # A hundred cells at least are to be moved.


def test_a_plan_that_cost_too_much_is_not_made_again_at_once():
    trigger = Adaptive(RelativeCosts(score=1.0, run=50.0, cell=8.0))
    planned_at = []

    def plan():
        planned_at.append(step)
        return MOVES

    for step in range(71):
        assert trigger.due_before_step(holes(18 if step < 70 else 19), plan) == (step == 70)
    # Only where more is to be saved than the plan cost is it made again before its time.
    assert planned_at == [0, 32, 64, 70]


def test_the_horizon_is_learned_from_how_soon_the_holes_are_back():
    trigger = Adaptive(RelativeCosts(score=1.0, run=50.0, cell=8.0))
    assert trigger.due_before_step(holes(19), lambda: MOVES)
    for n in (0, 6, 12, 18):
        assert not trigger.due_before_step(holes(n), lambda: MOVES)
    assert trigger.horizon == 64
    # In the fifth step they are back: the horizon is 64 + 0.2 x (5 - 64), and what paid before does not any more.
    assert not trigger.due_before_step(holes(19), lambda: MOVES)
    assert trigger.horizon == pytest.approx(52.2)
    assert not trigger.due_before_step(holes(22), lambda: MOVES)  # 574.2
    assert trigger.due_before_step(holes(23), lambda: MOVES)  # 600.3


def test_holes_that_stay_away_lengthen_the_horizon():
    trigger = Adaptive(RelativeCosts(score=1.0, run=50.0, cell=8.0), horizon=10.0)
    assert trigger.due_before_step(holes(200), lambda: MOVES)
    for _ in range(80):
        trigger.due_before_step(holes(3), lambda: MOVES)
    assert trigger.horizon == pytest.approx(10 + 0.2 * (80 - 10))


def test_a_policy_compacts_before_the_step_for_which_it_pays():
    """Of three sequences of 20 tokens side by side the first leaves: 20 holes save 640 scores, or 64 cheap ones."""
    for score, moved in [(1.0, [20]), (0.1, [])]:
        costs = RelativeCosts(score=score, run=50.0, cell=8.0)
        config = CacheConfig(cells=128, n_ubatch=32, pad=1)
        policy = UnifiedPolicy("adaptive", config, compactor=pack, trigger=Adaptive(costs))
        for seq in range(3):
            policy.allocate([Chunk(seq, 0, 20)])
        policy.free(0)
        (batch,) = policy.allocate([Chunk(2, 20, 1)])
        assert batch.places[0].moves.length.tolist() == moved
        assert policy.usage().span == (41 if moved else 60)
