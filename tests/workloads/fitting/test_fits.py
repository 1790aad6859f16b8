"""Fits, checked against requests drawn from known distributions."""

import numpy as np
import pytest
from scipy import linalg, special

from workloads import Empirical, Lognormal
from workloads.fitting.fits import fit_gaps, fit_lengths, quantiles_of
from workloads.fitting.modulated_fit import fit_modulated, log_likelihood


def rng(seed=5):
    return np.random.default_rng(seed)


def best(tokens):
    return fit_lengths(np.asarray(tokens))[0]


def test_a_lognormal_is_found_again():
    found = best(Lognormal(5.0, 0.8).draw(rng(), 20_000))
    assert found.kind == "lognormal"
    assert found.keys["mu"] == pytest.approx(5.0, abs=0.02)
    assert found.keys["sigma"] == pytest.approx(0.8, abs=0.02)
    assert found.distance < 0.015


def test_a_gamma_is_found_again():
    found = best(np.maximum(1, np.rint(rng().gamma(2.5, 80, 20_000))).astype(np.int64))
    assert found.kind == "gamma"
    assert found.keys["shape"] == pytest.approx(2.5, rel=0.05)
    assert found.keys["scale"] == pytest.approx(80, rel=0.05)
    assert found.distance < 0.015


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.7])
def test_zipf_is_found_again(exponent):
    values = np.arange(3, 2001)
    weights = values**-exponent
    found = best(rng().choice(values, 20_000, p=weights / weights.sum()))
    assert found.kind == "zipf"
    assert found.keys["exponent"] == pytest.approx(exponent, abs=0.03)
    assert found.distance < 0.015


def test_the_likelihood_of_zipf_is_that_of_its_weights():
    tokens = rng().integers(4, 40_000, 300)
    found = next(c for c in fit_lengths(tokens) if c.kind == "zipf")
    values = np.arange(tokens.min(), tokens.max() + 1).astype(float)
    weights = values ** -found.keys["exponent"]
    likelihood = np.log(tokens.astype(float) ** -found.keys["exponent"] / weights.sum()).sum()
    assert found.log_likelihood == pytest.approx(likelihood, rel=1e-9)


def test_the_likelihood_of_a_law_is_that_of_its_roundings():
    """Of all values from the smallest to the largest, the probabilities that a scenario's draws have make up 1."""
    tokens = np.array([2, 3, 3, 4, 5, 5, 5, 6])
    found = next(c for c in fit_lengths(tokens) if c.kind == "lognormal")
    edges = special.ndtr((np.log(np.arange(2, 6) + 0.5) - found.keys["mu"]) / found.keys["sigma"])
    shares = np.diff(np.concatenate(([0.0], edges, [1.0])))
    assert found.log_likelihood == pytest.approx(np.log(shares[tokens - 2]).sum())


def test_a_constant_is_fixed():
    assert best(np.full(50, 7)).kind == "fixed"


def test_quantiles_from_the_smallest_to_the_largest():
    found, shares = quantiles_of(np.arange(1, 1001))
    assert (found[0], found[50], found[-1]) == (1, 500, 1000)
    assert (shares[0], shares[50], shares[-1]) == (0, 0.5, 1)
    assert sorted(set(shares)) == shares


def test_quantiles_keep_the_mean_of_a_heavy_tail():
    """As of a trace's answers: most are short, a few in a thousand very long."""
    tokens = Lognormal(3.0, 1.2, 1, 4000).draw(rng(), 20_000)
    tokens[:20] += 3000
    found, shares = quantiles_of(tokens)
    drawn = Empirical(found, shares).draw(rng(2), 200_000)
    assert drawn.mean() == pytest.approx(tokens.mean(), rel=0.05)
    hundredths = Empirical(np.quantile(tokens, np.linspace(0, 1, 101)).tolist()).draw(rng(2), 200_000)
    assert hundredths.mean() > 1.2 * tokens.mean()


@pytest.mark.parametrize("states", [2, 3])
def test_the_likelihood_of_a_modulated_process_is_the_product_of_its_matrices(states):
    gaps, rates, dwells = rng().exponential(0.5, 60), np.array([9.0, 1.0, 0.2])[:states], np.array([1.0, 4.0, 9.0])
    dwells = dwells[:states]
    leave = 1 / dwells
    generator = np.full((states, states), 1 / (states - 1)) * leave[:, None]
    np.fill_diagonal(generator, -leave)
    state = dwells * rates / (dwells * rates).sum()
    for gap in gaps:
        state = state @ linalg.expm((generator - np.diag(rates)) * gap) @ np.diag(rates)
    assert log_likelihood(gaps, rates, dwells) == pytest.approx(np.log(state.sum()), rel=1e-9)


def test_a_modulated_process_of_one_rate_is_poisson():
    gaps = rng().exponential(0.5, 500)
    expected = (np.log(2.0) - 2.0 * gaps).sum()
    assert log_likelihood(gaps, np.array([2.0, 2.0]), np.array([3.0, 5.0])) == pytest.approx(expected)


def modulated(rates, dwells, n, draw):
    times, now, state = [], 0.0, 0
    while len(times) < n:
        stay = draw.exponential(dwells[state])
        times += sorted((now + stay * draw.random(draw.poisson(rates[state] * stay))).tolist())
        now, state = now + stay, 1 - state
    return np.array(times[:n])


@pytest.mark.slow
def test_a_modulated_process_is_found_again():
    times = modulated((20.0, 2.0), (5.0, 10.0), 3000, rng())
    found = fit_modulated(np.diff(times), 2)
    assert found.rates == pytest.approx([20, 2], rel=0.15)
    assert found.dwell_s == pytest.approx([5, 10], rel=0.3)
    assert found.log_likelihood >= log_likelihood(np.diff(times), np.array([20.0, 2.0]), np.array([5.0, 10.0]))
    candidates, gaps = fit_gaps(times)
    assert gaps == 2999
    assert candidates[0].kind == "mmpp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gaps", "key", "value"),
    [
        ("poisson", lambda draw: draw.exponential(0.2, 2000), "rate", 5.0),
        ("gamma", lambda draw: draw.gamma(0.25, 0.8, 2000), "cv", 2.0),
        ("weibull", lambda draw: draw.weibull(2.0, 2000), "shape", 2.0),
    ],
)
def test_a_renewal_process_is_found_again(kind, gaps, key, value):
    candidates, _ = fit_gaps(np.concatenate(([0.0], np.cumsum(gaps(rng())))))
    found = next(c for c in candidates if c.kind == kind)
    assert found.keys[key] == pytest.approx(value, rel=0.06)
    assert found.aic <= candidates[0].aic + 4
    assert found.distance < 0.03


@pytest.mark.slow
def test_a_day_with_hours_is_found_again():
    draw, day = rng(), 86_400.0
    times = np.sort(draw.uniform(0, 4 * day, 12_000))
    busy = (times % day // 3600 >= 8) & (times % day // 3600 < 20)
    kept = times[busy | (draw.random(len(times)) < 0.1)]
    candidates, _ = fit_gaps(kept)
    found = next(c for c in candidates if c.kind == "diurnal")
    profile = np.array(found.keys["profile"])
    assert profile.mean() == pytest.approx(1)
    # The clock of the profile starts with the first arrival.
    assert profile.max() / profile.min() > 5
    assert found.aic < next(c for c in candidates if c.kind == "poisson").aic


def test_gaps_that_are_all_the_same_are_not_fitted():
    (found,), gaps = fit_gaps(np.arange(300) * 0.5)
    assert gaps == 299
    assert found.kind == "renewal"
    assert found.keys == {"quantiles": pytest.approx([0.5, 0.5])}
