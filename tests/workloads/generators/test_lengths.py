"""Lengths: samples and quantiles against theory, and how prompt and output lengths depend on each other."""

import numpy as np
import pytest
from scipy import stats

from tests.workloads.generators.test_synthetic import STANDARD_ERRORS, agrees
from workloads import Empirical, Fixed, Gamma, GivenPrompt, Lognormal, Synthetic, Zipf, named_rng, poisson_gaps
from workloads.generators.lengths import MAX_SUPPORT, MAX_TOKENS

N = 100_000
KINDS = {
    "fixed": Fixed(7),
    "lognormal": Lognormal(5.0, 1.0, 20, 900),
    "gamma": Gamma(2.5, 40.0, max=300),
    "gamma, spiky": Gamma(0.3, 500.0),
    "zipf": Zipf(1.2, 1, 500),
    "zipf, far out": Zipf(3.0, 1000, 4000),
    "empirical": Empirical((3, 8.5, 8.5, 100)),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_quantiles_and_draws_are_of_one_distribution(kind):
    drawn, found = kind.draw(named_rng(1, "lengths"), N), kind.at(named_rng(2, "shares").random(N))
    assert drawn.dtype == found.dtype == np.int64
    assert drawn.shape == found.shape == (N,)
    assert stats.ks_2samp(drawn, found).pvalue > 1e-3
    assert (kind.at(np.linspace(0.001, 0.999, 999))[1:] >= kind.at(np.linspace(0.001, 0.999, 999))[:-1]).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_lengths_drawn_in_several_goes_are_the_same(kind):
    rng, other = named_rng(1, "lengths"), named_rng(1, "lengths")
    assert np.concatenate([kind.draw(rng, n) for n in (1, 0, 99, 900)]).tolist() == kind.draw(other, 1000).tolist()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_outermost_shares_are_lengths(kind):
    for u in (2.0**-1022, 1 - 2.0**-53):
        assert 1 <= kind.at(np.array([u]))[0] <= MAX_TOKENS
    assert len(kind.at(np.empty(0))) == len(kind.draw(named_rng(1, "x"), 0)) == 0


def test_quantiles_where_they_are_known():
    shares = np.array([1e-9, 0.25, 0.5, 0.75, 1 - 1e-9])
    assert Fixed(3).at(shares).tolist() == [3] * 5
    assert Lognormal(5.0, 1.0).at(shares[2:3]).tolist() == [round(np.exp(5))]
    assert Lognormal(700.0, 900.0).at(shares).tolist() == [1, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS]
    assert Gamma(1.0, 100.0).at(shares[1:4]).tolist() == [29, 69, 139]
    assert Zipf(0.0, 5, 8).at(shares).tolist() == [5, 5, 6, 7, 8]
    assert Empirical((1, 10, 100)).at(shares).tolist() == [1, 6, 10, 55, 100]


@pytest.mark.parametrize(("shape", "scale"), [(4.0, 300.0), (1.0, 2000.0)])
def test_gamma_lengths_have_the_mean_and_variance_of_theory(shape, scale):
    assert agrees(Gamma(shape, scale).draw(named_rng(1, "lengths"), N), stats.gamma(shape, scale=scale))
    assert not agrees(Gamma(shape, scale).draw(named_rng(1, "lengths"), N), stats.gamma(shape, scale=1.03 * scale))


def zipf_pvalue(exponent, theory, low=1, high=40):
    sample = Zipf(exponent, low, high).draw(named_rng(1, "lengths"), N)
    weights = np.arange(low, high + 1) ** -float(theory)
    return stats.chisquare(np.bincount(sample - low, minlength=high + 1 - low), N * weights / weights.sum()).pvalue


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.7])
def test_zipf_lengths_follow_zipf_s_law(exponent):
    assert zipf_pvalue(exponent, exponent) > 1e-3
    assert zipf_pvalue(exponent, exponent, 100, 130) > 1e-3
    assert zipf_pvalue(exponent, exponent + 0.05) < 1e-3, "the control"


def test_zipf_lengths_have_limits():
    assert Zipf(1.0, 1, MAX_SUPPORT).draw(named_rng(1, "x"), 10).max() <= MAX_SUPPORT
    assert Zipf(20.0, MAX_TOKENS - 1, MAX_TOKENS).at(np.array([0.4, 0.6])).tolist() == [MAX_TOKENS - 1, MAX_TOKENS]
    for low, high in ((1, MAX_SUPPORT + 1), (5, 4), (0, 4)):
        with pytest.raises(ValueError, match="values are accepted"):
            Zipf(1.0, low, high)


PROMPT, OUTPUT = Lognormal(6.0, 1.0), Gamma(2.0, 300.0)


def pairs(n=20_000, seed=1, **changes):
    usual = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, **changes}
    requests = Synthetic(seed, n, poisson_gaps(1.0), **usual)
    return np.array([(r.prompt_tokens, r.output_tokens) for r in requests]).T


@pytest.mark.parametrize("rho", [-1.0, -0.6, 0.2, 0.5, 0.9, 1.0])
def test_lengths_are_correlated_and_each_stays_as_it_is(rho):
    prompts, outputs = pairs(correlation=rho)
    found = stats.spearmanr(prompts, outputs).statistic
    # Standard error of Spearman's coefficient after Bonett & Wright 2000.
    error = (1 - rho**2) * np.sqrt((1 + rho**2 / 2) / len(prompts))
    assert found == pytest.approx(rho, abs=STANDARD_ERRORS * error + 1e-4)
    assert stats.ks_2samp(prompts, PROMPT.draw(named_rng(9, "x"), N)).pvalue > 1e-3
    assert stats.ks_2samp(outputs, OUTPUT.draw(named_rng(9, "x"), N)).pvalue > 1e-3
    assert stats.ks_2samp(outputs, Gamma(2.0, 320.0).draw(named_rng(9, "x"), N)).pvalue < 1e-3, "the control"


def test_without_correlation_lengths_are_drawn_as_ever():
    alone = [PROMPT.draw(named_rng(1, "prompt-lengths"), 5000), OUTPUT.draw(named_rng(1, "output-lengths"), 5000)]
    assert pairs(5000, correlation=0.0).tolist() == pairs(5000).tolist() == np.array(alone).tolist()


@pytest.mark.parametrize("changes", [{"correlation": 0.5}, {"output_tokens": GivenPrompt((400,), (OUTPUT, PROMPT))}])
def test_dependent_lengths_do_not_depend_on_how_many_there_are(changes):
    assert pairs(4097, **changes).tolist() == pairs(9000, **changes)[:, :4097].tolist()


def test_which_table_holds_depends_on_the_prompt():
    tables = (Fixed(1), Lognormal(5.0, 0.5), Zipf(1.0, 10, 90))
    prompts, outputs = pairs(output_tokens=GivenPrompt((200, 600), tables))
    assert set(outputs[prompts < 200]) == {1}
    middle, last = outputs[(prompts >= 200) & (prompts < 600)], outputs[prompts >= 600]
    assert stats.ks_2samp(middle, tables[1].draw(named_rng(9, "x"), N)).pvalue > 1e-3
    assert stats.ks_2samp(last, tables[2].draw(named_rng(9, "x"), N)).pvalue > 1e-3
    assert prompts.tolist() == pairs()[0].tolist()


def test_an_edge_belongs_to_the_table_above():
    given = GivenPrompt((5, 9), (Fixed(1), Fixed(2), Fixed(3)))
    assert given.draw(named_rng(1, "x"), np.array([4, 5, 8, 9, 10**7, 1])).tolist() == [1, 2, 2, 3, 3, 1]


def test_another_table_changes_only_its_own_outputs():
    one, other = (pairs(output_tokens=GivenPrompt((400,), (OUTPUT, table)))[1] for table in (PROMPT, Fixed(3)))
    below = pairs()[0] < 400
    assert one[below].tolist() == other[below].tolist()
    assert set(other[~below]) == {3}


def test_what_contradicts_itself_is_refused():
    for edges, tables in (((5,), (Fixed(1),)), ((5, 5), (Fixed(1),) * 3)):
        with pytest.raises(ValueError, match="edges"):
            GivenPrompt(edges, tables)
    with pytest.raises(ValueError, match="said twice"):
        Synthetic(1, 9, poisson_gaps(1.0), PROMPT, GivenPrompt((5,), (PROMPT, OUTPUT)), None, 0.5)
