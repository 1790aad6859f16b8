"""Arrival processes: samples against theory, whatever the pages, and what a scenario may say of them."""

import numpy as np
import pytest
from scipy import integrate, linalg, stats

import kvsim
from kvsim.scenario.scenario import load_scenario
from tests.workloads.generators.test_synthetic import STANDARD_ERRORS, agrees, digest, drawn
from workloads import (
    Fixed,
    Synthetic,
    diurnal_gaps,
    empirical_gaps,
    modulated_gaps,
    named_rng,
    poisson_gaps,
    weibull_gaps,
)

N = 100_000
RATE = 8.0
TWO_STATES = modulated_gaps((2.0, 40.0), (3.0, 0.5))
THREE_STATES = modulated_gaps((0.0, 30.0, 4.0), (1.0, 0.2, 3.0))
PROFILE = (1.0, 0.0, 4.0, 2.0, 0.5)
DAY = diurnal_gaps(RATE, PROFILE, 10.0)
QUANTILES = (0.0, 0.01, 0.05, 0.1, 2.0)


def arrivals(gaps, n=N, seed=1):
    return np.cumsum(gaps(named_rng(seed, "arrivals"))(n))


def weibull_theory(rate, shape):
    mean = float(stats.weibull_min(shape).mean())
    return stats.weibull_min(shape, scale=1 / (rate * mean))


@pytest.mark.parametrize("shape", [0.4, 1.0, 3.0])
def test_weibull_gaps_are_weibull(shape):
    sample = drawn(weibull_gaps(RATE, shape))(named_rng(3, "gaps"), N)
    assert agrees(sample, weibull_theory(RATE, shape))
    assert stats.kstest(sample, weibull_theory(RATE, shape).cdf).pvalue > 1e-3


def test_the_comparison_with_weibull_can_fail():
    """The control: a shape a little off."""
    sample = drawn(weibull_gaps(RATE, 0.4))(named_rng(3, "gaps"), N)
    assert not agrees(sample, weibull_theory(RATE, 0.5))
    assert stats.kstest(sample, weibull_theory(RATE, 0.42).cdf).pvalue < 1e-6


def test_empirical_gaps_have_the_given_quantiles():
    sample = drawn(empirical_gaps(QUANTILES))(named_rng(1, "gaps"), N)
    theory = np.interp(np.linspace(0, 1, N), np.linspace(0, 1, len(QUANTILES)), QUANTILES)
    assert stats.kstest(sample, lambda x: np.searchsorted(theory, x) / N).pvalue > 1e-3
    assert stats.kstest(sample, lambda x: np.searchsorted(1.05 * theory, x) / N).pvalue < 1e-6, "the control"


def test_empirical_gaps_are_stretched_to_a_rate_and_keep_their_shape():
    plain, stretched = (empirical_gaps(QUANTILES, rate)(named_rng(1, "gaps"))(N) for rate in (None, RATE))
    assert np.mean(stretched) == pytest.approx(1 / RATE, rel=STANDARD_ERRORS * np.std(plain) / np.mean(plain) / N**0.5)
    assert stretched / plain == pytest.approx(np.full(N, stretched[0] / plain[0]))


def dispersion(times, window):
    """Variance over mean of the arrivals in windows of so many seconds, and its standard error."""
    counts = np.bincount((times / window).astype(int))[:-1].astype(float)
    ratios = [part.var() / counts.mean() for part in np.array_split(counts, 20)]
    return counts.var() / counts.mean(), np.std(ratios) / 20**0.5


def two_state_dispersion(rates, dwell_s, t):
    """Of a Markov-modulated Poisson process with two states (Heffes & Lucantoni 1986, equation 3)."""
    (a, b), (leave_a, leave_b) = rates, (1 / dwell_s[0], 1 / dwell_s[1])
    both = leave_a + leave_b
    excess = 2 * leave_a * leave_b * (a - b) ** 2 / (both**2 * (a * leave_b + b * leave_a))
    return 1 + excess - excess / (both * t) * (1 - np.exp(-both * t))


def many_state_dispersion(rates, dwell_s, t):
    """Of one with any number of states, whose successors are equally likely (Fischer & Meier-Hellstern 1993)."""
    rates, dwell = np.array(rates), np.array(dwell_s)
    n = len(rates)
    leave = (1 - np.eye(n)) / (n - 1) / dwell[:, None] - np.diag(1 / dwell)
    share = dwell / dwell.sum()
    mean = share @ rates

    def covariance(s):
        return share * rates @ linalg.expm(leave * s) @ rates - mean**2

    area = integrate.quad(lambda s: (t - s) * covariance(s), 0, t, limit=200)[0]
    return 1 + 2 * area / (mean * t)


MODULATED = {"two states": ((2.0, 40.0), (3.0, 0.5)), "three states": ((0.0, 30.0, 4.0), (1.0, 0.2, 3.0))}


@pytest.mark.parametrize("window", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize(("rates", "dwell_s"), MODULATED.values(), ids=MODULATED)
def test_modulated_arrivals_are_dispersed_as_theory_says(rates, dwell_s, window):
    times = arrivals(modulated_gaps(rates, dwell_s), 2_000_000)
    measured, error = dispersion(times, window)
    expected = many_state_dispersion(rates, dwell_s, window)
    assert measured == pytest.approx(expected, abs=STANDARD_ERRORS * error)
    if len(rates) == 2:
        assert expected == pytest.approx(two_state_dispersion(rates, dwell_s, window))
    # The control: longer stays do not agree, where the window is long enough to tell.
    longer = many_state_dispersion(rates, 1.5 * np.array(dwell_s), window)
    assert window < 5 or abs(measured - longer) > STANDARD_ERRORS * error


@pytest.mark.slow
@pytest.mark.parametrize(("rates", "dwell_s"), MODULATED.values(), ids=MODULATED)
def test_modulated_arrivals_have_their_mean_rate_from_the_start(rates, dwell_s):
    mean, t = np.average(rates, weights=dwell_s), 0.5
    gaps = modulated_gaps(rates, dwell_s)
    counts = [np.searchsorted(np.cumsum(gaps(named_rng(seed, "start"))(100)), t) for seed in range(4000)]
    expected = mean * t
    error = np.sqrt(many_state_dispersion(rates, dwell_s, t) * expected / len(counts))
    assert np.mean(counts) == pytest.approx(expected, abs=STANDARD_ERRORS * error)


def test_states_of_one_rate_are_poisson():
    sample = modulated_gaps((RATE, RATE), (0.1, 2.0))(named_rng(1, "gaps"))(N)
    assert agrees(sample, stats.expon(scale=1 / RATE))


def test_a_state_is_needed_for_each_rate():
    for rates, dwell_s in (((1.0,), (1.0,)), ((1.0, 2.0), (1.0,))):
        with pytest.raises(ValueError, match="at least 2 of both"):
            modulated_gaps(rates, dwell_s)


@pytest.mark.parametrize("phase_s", [0.0, 3.0, 27.5])
def test_arrivals_follow_the_profile(phase_s):
    times = arrivals(diurnal_gaps(RATE, PROFILE, 10.0, phase_s))
    whole = times[times < times[-1] // 10 * 10]
    parts = ((whole + phase_s) % 10 / 2).astype(int)
    counts = np.bincount(parts, minlength=5)
    expected = np.array(PROFILE) / np.sum(PROFILE) * len(whole)
    assert counts[1] == 0
    some = np.array(PROFILE) > 0
    assert stats.chisquare(counts[some], expected[some]).pvalue > 1e-3
    other = np.array((1.0, 0.0, 4.0, 2.1, 0.5))[some]
    assert stats.chisquare(counts[some], other / other.sum() * len(whole)).pvalue < 1e-3, "the control"
    assert len(whole) / (times[-1] // 10 * 10) == pytest.approx(RATE, rel=STANDARD_ERRORS / N**0.5)


def test_within_a_part_of_the_profile_arrivals_are_uniform():
    times = arrivals(DAY)
    offsets = times % 10
    assert stats.kstest(offsets[(offsets >= 4) & (offsets < 6)], stats.uniform(4, 2).cdf).pvalue > 1e-3


def test_a_flat_profile_is_poisson():
    sample = diurnal_gaps(RATE, (3.0,), 10.0)(named_rng(1, "gaps"))(N)
    assert agrees(sample, stats.expon(scale=1 / RATE))


PROCESSES = {
    "weibull": weibull_gaps(RATE, 0.5),
    "two states": TWO_STATES,
    "three states": THREE_STATES,
    "a day": DAY,
    "empirical": empirical_gaps(QUANTILES, RATE),
}


@pytest.mark.parametrize("gaps", PROCESSES.values(), ids=PROCESSES)
def test_gaps_do_not_depend_on_pages(gaps):
    whole = gaps(named_rng(1, "gaps"))(20_000)
    draw = gaps(named_rng(1, "gaps"))
    pages = np.concatenate([draw(n) for n in (1, 0, 2, 4096, 4095, 1, 11_805)])
    assert pages.tolist() == whole.tolist()
    assert whole.min() >= 0


def test_two_runs_of_one_process_do_not_disturb_each_other():
    one, other = TWO_STATES(named_rng(1, "gaps")), TWO_STATES(named_rng(1, "gaps"))
    assert [one(3).tolist(), one(5).tolist()] == [other(3).tolist(), other(5).tolist()]


@pytest.mark.parametrize("gaps", PROCESSES.values(), ids=PROCESSES)
def test_a_shorter_workload_is_the_beginning_of_a_longer_one(gaps):
    long = list(Synthetic(1, 9000, gaps, Fixed(1), Fixed(1)))
    assert long == list(Synthetic(1, 9000, gaps, Fixed(1), Fixed(1)))
    assert list(Synthetic(1, 4097, gaps, Fixed(1), Fixed(1))) == long[:4097]
    times = [request.arrival_s for request in long]
    assert times == sorted(times)


EXTREMES = {
    "bursts far apart": modulated_gaps((1e9, 0.0), (1e9, 1e9)),
    "one state of many": modulated_gaps((1e9, *[0.0] * 99), (1e-6, *[1e9] * 99)),
    "rarely anything": modulated_gaps((1e-6, 1e-6), (1e9, 1e4)),
    "changes all the time": modulated_gaps((0.02, 0.0), (1.0, 1e-6)),
    "one hour of many": diurnal_gaps(1e3, (1.0, *[0.0] * 99), 1e9, 5e8),
    "all in an instant": diurnal_gaps(1.0, (*[0.0] * 9999, 1.0), 1e9),
    "a short day": diurnal_gaps(1e-6, (1.0, 0.0), 1e-6, 1e9),
    "a heavy tail": weibull_gaps(1e-6, 0.1),
    "nearly the same": empirical_gaps((0.0, 0.0, 1e-9), 1e-6),
}


@pytest.mark.parametrize("gaps", EXTREMES.values(), ids=EXTREMES)
def test_the_extremes_that_are_accepted_are_finite(gaps):
    sample = gaps(named_rng(1, "gaps"))(5000)
    assert np.isfinite(sample).all()
    assert sample.min() >= 0


WORKLOADS = {
    "weibull": {"kind": "weibull", "shape": 0.7},
    "mmpp": {"kind": "mmpp", "rates": [0, 50.0], "dwell_s": [1, 0.5]},
    "diurnal": {"kind": "diurnal", "profile": [1, 2.5], "phase_s": 3},
    "renewal": {"kind": "renewal", "quantiles": [0, 0.1, 3.0], "rate": 9},
    "renewal as it is": {"kind": "renewal", "quantiles": [0, 0.1, 0.3]},
}


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
@pytest.mark.parametrize("kind", ["weibull", "mmpp", "diurnal", "renewal"])
def test_each_kind_runs(kind, policy):
    table = {**WORKLOADS[kind], "requests": 40}
    assert kvsim.run(load_scenario({"workload": table, "cache": {"policy": policy}})).summary["completed"] == 40


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        pytest.param(weibull_gaps(RATE, 0.5), "782b2b0c8899840b", id="weibull"),
        pytest.param(THREE_STATES, "f081652ee55c1656", id="mmpp"),
        pytest.param(DAY, "568ac01ea0c9c11e", id="diurnal"),
        pytest.param(empirical_gaps(QUANTILES, RATE), "bd55e0a102a86fb4", id="renewal"),
    ],
)
def test_a_seed_means_what_it_always_meant(gaps, expected):
    """Another NumPy may draw other numbers."""
    assert digest(Synthetic(1, 9000, gaps, Fixed(1), Fixed(1))) == expected


def test_a_long_day_keeps_its_rate():
    """As many requests in a period as are accepted, from its midst on: no gap may be lost in rounding."""
    sample = diurnal_gaps(1e3, (1.0,), 1e9, 5e8)(named_rng(1, "gaps"))(N)
    assert agrees(sample, stats.expon(scale=1e-3))


def test_poisson_gaps_still_draw_what_they_drew():
    assert poisson_gaps(2.0)(named_rng(1, "x"))(5).tolist() == named_rng(1, "x").exponential(0.5, 5).tolist()
