"""Drawn attention: as drawn it stays, and its statistics are those that it is said to have."""

import numpy as np
import pytest

from policies.cells.token_ranks import DrawnAttention
from policies.cells.token_rules import OBSERVED, HeavyHitters, PromptHeavy

EVERY = np.arange(1024)


def mean_run(positions):
    return len(positions) / (1 + int((np.diff(positions) > 1).sum()))


def survivors(rule, attention, seq, latest):
    """What a rule keeps of a prompt, without the sinks and the latest tokens."""
    evicted = rule.evicted(EVERY, len(EVERY), lambda positions: attention.scores(0, seq, positions))
    kept = np.setdiff1d(EVERY, evicted)
    assert len(kept) == rule.budget
    return kept[(kept >= 4) & (kept < len(EVERY) - latest)]


def test_the_same_tokens_have_the_same_weight_whatever_else_is_asked():
    once, again = DrawnAttention.by_last_queries(7), DrawnAttention.by_last_queries(7)
    few = np.array([5, 90, 700, 1023])
    again.scores(0, 3, np.arange(5000))
    assert (once.scores(0, 3, EVERY)[few] == again.scores(0, 3, EVERY)[few]).all()
    assert (once.scores(0, 3, few) == again.scores(0, 3, few)).all()


def test_seeds_groups_and_sequences_differ():
    attention = DrawnAttention.by_last_queries(7)
    drawn = [attention.scores(0, 3, EVERY), attention.scores(1, 3, EVERY), attention.scores(0, 4, EVERY)]
    drawn.append(DrawnAttention.by_last_queries(8).scores(0, 3, EVERY))
    attention.forget(3)
    drawn.append(attention.scores(0, 3, EVERY))
    correlations = np.corrcoef(np.log([each[4:] for each in drawn])) - np.eye(len(drawn))
    assert np.abs(correlations).max() < 0.2


def test_sinks_outweigh_all_others():
    for attention in (DrawnAttention.by_all_queries(1), DrawnAttention.by_last_queries(1)):
        weights = attention.scores(0, 0, EVERY)
        assert weights[:4].min() > 100 * weights[4:].max()


def test_neighbours_weigh_alike_as_often_as_runs_go_on():
    attention = DrawnAttention(1, run_length=4.0, sigma=1.0, age_exponent=0.0)
    logs = np.log(attention.scores(0, 0, np.arange(100_000))[4:])
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] == pytest.approx(0.75, abs=0.02)
    assert logs.std() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("rule", "drawn", "latest", "measured"),
    [
        (HeavyHitters(512), DrawnAttention.by_all_queries, 256, 1.87),
        (HeavyHitters(256), DrawnAttention.by_all_queries, 128, 1.35),
        (HeavyHitters(128), DrawnAttention.by_all_queries, 64, 1.15),
        (PromptHeavy(512), DrawnAttention.by_last_queries, OBSERVED, 12.7),
        (PromptHeavy(256), DrawnAttention.by_last_queries, OBSERVED, 10.6),
        (PromptHeavy(128), DrawnAttention.by_last_queries, OBSERVED, 7.7),
    ],
)
def test_survivors_come_in_runs_as_long_as_those_of_smollm2(rule, drawn, latest, measured):
    """To 15 %: two numbers are drawn from for three budgets."""
    attention = drawn(1)
    found = np.mean([mean_run(survivors(rule, attention, seq, latest)) for seq in range(30)])
    assert found == pytest.approx(measured, rel=0.15)


def test_runs_shorter_than_a_token_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        DrawnAttention(1, run_length=0.5, sigma=1.0, age_exponent=0.0)
