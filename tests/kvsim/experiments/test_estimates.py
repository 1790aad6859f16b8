"""Intervals on streams whose true mean is known: how often they cover it, and when they must be refused."""

import math

import numpy as np
import pytest
from scipy import stats

from kvsim.experiments.estimates import (
    bonferroni_level,
    check_precision,
    lowest_mean,
    mser5,
    paired_difference,
    paired_ratio,
    prediction_limit,
    replication_interval,
    t_quantile,
)

RUNS = 400
SURE = 0.95 - 3 * math.sqrt(0.95 * 0.05 / RUNS)
"""The lowest acceptable coverage: three standard errors below the level."""


def mm1_sojourns(rng, n, rho, runs=RUNS):
    """Sojourn times in an M/M/1 queue with service rate 1, initially empty (Lindley's recursion); shape (runs, n)."""
    service, gaps = rng.exponential(1, (runs, n)), rng.exponential(1 / rho, (runs, n))
    waits = np.zeros((runs, n))
    for i in range(1, n):
        waits[:, i] = np.maximum(waits[:, i - 1] + service[:, i - 1] - gaps[:, i], 0)
    return waits + service


def coverage(intervals, truth):
    return np.mean([each.low <= truth <= each.high for each in intervals])


def test_a_t_interval_by_hand():
    found = replication_interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert found.relative == pytest.approx(found.half_width / 2)
    assert found.excludes(0) == (found.low > 0)


def test_one_more_replication_exceeds_the_prediction_limit_in_95_of_100():
    rng = np.random.default_rng(1)
    drawn = rng.normal(3, 2, (4000, 6))
    kept = [row[5] >= prediction_limit(row[:5]) for row in drawn]
    assert np.mean(kept) == pytest.approx(0.95, abs=0.01)
    assert prediction_limit([1.0]) == -math.inf
    assert prediction_limit([2.0, 2.0]) == 2


def test_one_value_gives_an_infinite_interval():
    found = replication_interval([3.0])
    assert (found.value, found.low, found.high) == (3.0, -math.inf, math.inf)
    assert found.relative == math.inf


def test_constant_values_are_exact():
    found = replication_interval([0.1] * 3)
    assert (found.low, found.high, found.relative) == (found.value, found.value, 0.0)


def test_t_intervals_cover_the_true_mean():
    rows = np.random.default_rng(1).exponential(1, (RUNS, 40)).mean(axis=1).reshape(-1, 8)
    assert coverage(map(replication_interval, rows), 1.0) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(rows))


@pytest.mark.slow
def test_quantiles_over_replications_cover_the_true_quantile_of_a_queue():
    rows = mm1_sojourns(np.random.default_rng(6), 6_000, 0.5, runs=1000)[:, 500:]
    truth = -math.log(0.05) / 0.5
    groups = np.quantile(rows, 0.95, axis=1).reshape(-1, 10)
    assert coverage(map(replication_interval, groups), truth) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 100) - 0.02


def test_mser_finds_a_transient():
    rng = np.random.default_rng(8)
    cuts = []
    for _ in range(100):
        x = rng.standard_normal(2000)
        x[:300] += np.linspace(12, 0, 300)
        cuts.append(mser5(x))
    assert all(each.enough for each in cuts)
    assert 200 <= np.median([each.drop for each in cuts]) <= 400


def test_mser_cuts_little_where_there_is_no_transient():
    cuts = [mser5(row).drop for row in np.random.default_rng(9).standard_normal((100, 1000))]
    assert np.median(cuts) <= 50


def test_mser_removes_the_bias_of_a_queue_that_starts_full():
    rng = np.random.default_rng(10)
    x = mm1_sojourns(rng, 4000, 0.5, runs=50)
    x[:, :400] += np.linspace(60, 0, 400)
    cut = np.mean([row[mser5(row).drop :].mean() for row in x])
    assert abs(cut - 2.0) < 0.15 < x.mean() - 2.0


def test_mser_reports_a_stream_that_is_too_short():
    drift = mser5(np.arange(500.0))
    assert not drift.enough
    assert drift.drop <= 250
    assert mser5(np.ones(20)) == (0, False)
    assert mser5(np.ones(200)) == (0, True)


@pytest.mark.slow
def test_pairs_with_common_random_numbers_give_narrower_intervals():
    rng = np.random.default_rng(11)
    found, narrower = [], []
    for _ in range(RUNS):
        common = rng.normal(10, 3, 10)
        a, b = common + rng.normal(0, 0.1, 10), common + 0.5 + rng.normal(0, 0.1, 10)
        found.append(paired_difference(b, a))
        apart = stats.ttest_ind(b, a).confidence_interval()
        narrower.append((apart.high - apart.low) / 2 > 5 * found[-1].half_width)
    assert coverage(found, 0.5) >= SURE
    assert all(each.excludes(0) for each in found)
    assert all(narrower)


def test_fiellers_interval_covers_the_true_ratio():
    rng = np.random.default_rng(12)
    found = []
    for _ in range(RUNS):
        common = rng.gamma(4, 1, 8)
        found.append(paired_ratio(1.2 * common + rng.normal(0, 0.3, 8), common))
    assert coverage(found, 1.2) >= SURE
    assert all(each.low <= each.value <= each.high for each in found)


def test_a_ratio_with_a_denominator_near_zero_is_unbounded():
    assert paired_ratio([1.0, 1.1, 0.9], [1.0, -1.2, 0.9]).high == math.inf
    with pytest.raises(ValueError, match="denominator is 0"):
        paired_ratio([1.0, 2.0], [1.0, -1.0])
    same = paired_ratio([1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
    assert (same.low, same.high) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.slow
def test_a_wrong_best_is_rare():
    """With six nearly equal systems, one that is not the best is named best at most one time in twenty."""
    rng = np.random.default_rng(13)
    wrong = right = 0
    for _ in range(RUNS):
        x = rng.standard_normal((6, 6))
        x[0] -= 0.01
        found = lowest_mean(x)
        wrong += found.lowest != 0 and not found.ties
        x[0] -= 10
        right += lowest_mean(x).lowest == 0 and not lowest_mean(x).ties
    assert wrong / RUNS <= 0.05
    assert right == RUNS


def test_a_single_system_has_no_ties():
    found = lowest_mean([[1.0, 2.0]])
    assert (found.lowest, found.ties, found.differences[0].value) == (0, (), 0.0)


def test_more_comparisons_need_wider_intervals():
    assert bonferroni_level(0.95, 1) == pytest.approx(0.95)
    assert bonferroni_level(0.95, 5) == pytest.approx(0.99)


def test_replications_stop_when_they_are_precise():
    exact, rough = replication_interval([1.0] * 5), replication_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert check_precision(exact, 2, 0.02) == (False, False)
    assert check_precision(exact, 5, 0.02) == (True, True)
    assert check_precision(rough, 5, 0.02) == (False, False)
    assert check_precision(rough, 5, 0.02, most=5) == (True, False)


def test_the_stopping_rule_reaches_its_precision():
    """With a target of 5 %, the estimate is within 5 % of the true mean in most runs."""
    rng = np.random.default_rng(14)
    errors, counts = [], []
    for _ in range(200):
        x = list(rng.normal(10, 1, 5))
        while not check_precision(replication_interval(x), len(x), 0.05, most=200).done:
            x.append(rng.normal(10, 1))
        errors.append(abs(np.mean(x) / 10 - 1))
        counts.append(len(x))
    assert np.mean(np.array(errors) <= 0.05) > 0.88
    assert np.mean(counts) > 8


@pytest.mark.parametrize("values", [[], [[1.0]], [math.nan], [1.0, math.inf]], ids=str)
def test_invalid_streams_are_refused(values):
    with pytest.raises(ValueError, match="values"):
        replication_interval(values)


def test_invalid_arguments_are_refused():
    for wrong in (
        lambda: paired_difference([1.0], [1.0, 2.0]),
        lambda: lowest_mean([]),
        lambda: replication_interval([1.0, 2.0], level=1.0),
    ):
        with pytest.raises(ValueError, match=r"needed|between|paired"):
            wrong()


@pytest.mark.parametrize(
    ("level", "freedom", "quantile"),
    [(0.9, 1, 6.314), (0.95, 1, 12.706), (0.95, 5, 2.571), (0.95, 30, 2.042), (0.99, 10, 3.169), (0.95, 1e5, 1.960)],
)
def test_quantiles_are_those_of_the_printed_table(level, freedom, quantile):
    assert t_quantile(level, freedom) == pytest.approx(quantile, abs=5e-4)
    assert t_quantile(level, freedom) > t_quantile(level, freedom + 0.5) > t_quantile(level, freedom + 1)
