"""Generated workloads: samples against theory, and what a seed means."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from workloads import Fixed, Lognormal, Request, Synthetic, gamma_gaps, named_rng, no_gaps, poisson_gaps
from workloads.generators.lengths import MAX_TOKENS

N = 200_000
STANDARD_ERRORS = 4.5
RATE = 8.0


def agrees(sample, theory):
    """Whether mean and variance of a sample lie within a few standard errors of a distribution's.

    The variance of a sample variance is ``(mu4 - sigma^4) / n``, with the fourth central moment ``mu4``.
    """
    mean, variance, excess = (float(x) for x in theory.stats(moments="mvk"))
    error_of_mean = np.sqrt(variance / len(sample))
    error_of_variance = variance * np.sqrt((excess + 2) / len(sample))
    return bool(
        abs(np.mean(sample) - mean) < STANDARD_ERRORS * error_of_mean
        and abs(np.var(sample) - variance) < STANDARD_ERRORS * error_of_variance
    )


def gamma_theory(rate, cv):
    return stats.gamma(1 / cv**2, scale=cv**2 / rate)


def lognormal_theory(mu, sigma):
    return stats.lognorm(sigma, scale=np.exp(mu))


def drawn(gaps):
    """Gaps of a process that has just begun, drawn as lengths are."""
    return lambda rng, n: gaps(rng)(n)


GAPS = {
    "poisson": (poisson_gaps(RATE), stats.expon(scale=1 / RATE)),
    "gamma, bursty": (gamma_gaps(RATE, 3.0), gamma_theory(RATE, 3.0)),
    "gamma, regular": (gamma_gaps(RATE, 0.3), gamma_theory(RATE, 0.3)),
    "gamma with cv 1": (gamma_gaps(RATE, 1.0), stats.expon(scale=1 / RATE)),
}


@pytest.mark.parametrize(("gaps", "theory"), GAPS.values(), ids=GAPS)
def test_gaps_have_the_mean_and_variance_of_theory(gaps, theory):
    assert agrees(gaps(named_rng(1, "gaps"))(N), theory)


@pytest.mark.parametrize(("mu", "sigma"), [(6.0, 0.5), (7.0, 0.9), (5.0, 0.1)])
def test_lognormal_lengths_have_the_mean_and_variance_of_theory(mu, sigma):
    assert agrees(Lognormal(mu, sigma).draw(named_rng(1, "lengths"), N), lognormal_theory(mu, sigma))


@pytest.mark.parametrize(
    ("sample", "theory"),
    [
        pytest.param(drawn(poisson_gaps(RATE)), stats.expon(scale=1 / (1.03 * RATE)), id="rate 3 % off"),
        pytest.param(drawn(gamma_gaps(RATE, 1.0)), gamma_theory(RATE, 1.05), id="same mean, cv 5 % off"),
        pytest.param(drawn(gamma_gaps(RATE, 3.0)), stats.expon(scale=1 / RATE), id="bursty is not Poisson"),
        pytest.param(Lognormal(6.0, 0.5).draw, lognormal_theory(6.02, 0.5), id="mu off"),
        pytest.param(Lognormal(6.0, 0.5).draw, lognormal_theory(6.0, 0.52), id="sigma off"),
        pytest.param(Lognormal(6.0, 0.5, max=1200).draw, lognormal_theory(6.0, 0.5), id="cut tail"),
    ],
)
def test_the_comparison_with_theory_can_fail(sample, theory):
    """The control: samples of another distribution, though a similar one, do not agree."""
    assert not agrees(sample(named_rng(1, "control"), N), theory)


@pytest.mark.slow
def test_a_workload_s_own_gaps_and_lengths_agree_with_theory():
    requests = list(Synthetic(2, N, gamma_gaps(RATE, 2.0), Lognormal(6.0, 0.5), Lognormal(7.0, 0.3)))
    arrivals = np.array([0.0, *(r.arrival_s for r in requests)])
    assert agrees(np.diff(arrivals), gamma_theory(RATE, 2.0))
    assert agrees([r.prompt_tokens for r in requests], lognormal_theory(6.0, 0.5))
    assert agrees([r.output_tokens for r in requests], lognormal_theory(7.0, 0.3))


def test_lengths_outside_the_limits_become_the_limit():
    mu, sigma, low, high = 4.0, 1.0, 20, 200
    lengths = Lognormal(mu, sigma, low, high).draw(named_rng(1, "clip"), N)
    assert (lengths.min(), lengths.max()) == (low, high)
    # Rounding moves the edges by half a token.
    theory = lognormal_theory(mu, sigma)
    shares = (np.mean(lengths == low), np.mean(lengths == high))
    assert shares == pytest.approx((theory.cdf(low + 0.5), theory.sf(high - 0.5)), abs=4.5 * np.sqrt(0.25 / N))


def test_lengths_are_whole_tokens_between_one_and_the_most_that_a_trace_may_hold():
    for mu, limit in ((-20.0, 1), (20.0, MAX_TOKENS), (700.0, MAX_TOKENS)):
        lengths = Lognormal(mu, 0.0).draw(named_rng(1, "far"), 10)
        assert lengths.dtype == np.int64
        assert lengths.tolist() == [min(limit, max(1, round(np.exp(mu))))] * 10


def test_fixed_lengths_and_no_gaps_draw_nothing():
    rng, untouched = named_rng(1, "x"), named_rng(1, "x")
    assert Fixed(7).draw(rng, 3).tolist() == [7, 7, 7]
    assert no_gaps(rng)(3).tolist() == [0.0, 0.0, 0.0]
    assert rng.random() == untouched.random()


def chat(seed=1, n=100, gaps=None, prompt=None, output=None, users=None):
    return Synthetic(
        seed,
        n,
        gaps or poisson_gaps(RATE),
        prompt or Lognormal(4.2, 0.9),
        output or Lognormal(4.0, 0.8),
        users,
    )


def columns(workload):
    """Arrivals, prompt lengths and output lengths."""
    rows = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in workload]
    return [list(column) for column in zip(*rows, strict=True)]


def test_the_same_seed_gives_the_same_requests_at_every_iteration():
    workload = chat()
    assert list(workload) == list(workload) == list(chat())


def test_another_seed_gives_other_requests():
    for one, other in zip(columns(chat(seed=1)), columns(chat(seed=2)), strict=True):
        assert one != other


def test_names_are_independent_generators_of_one_seed():
    pairs = [
        (named_rng(1, "arrivals"), named_rng(1, "prompt-lengths")),
        (named_rng(1, "arrivals"), named_rng(2, "arrivals")),
    ]
    for one, other in pairs:
        r = np.corrcoef(one.random(N), other.random(N))[0, 1]
        assert abs(r) < STANDARD_ERRORS / np.sqrt(N)
    # The control: the same seed and name are the same numbers.
    assert np.corrcoef(named_rng(1, "arrivals").random(N), named_rng(1, "arrivals").random(N))[0, 1] == pytest.approx(1)


def test_changing_one_distribution_leaves_the_others_draws_alone():
    arrivals, prompts, outputs = columns(chat())
    assert columns(chat(gaps=no_gaps))[1:] == [prompts, outputs]
    assert columns(chat(prompt=Fixed(3)))[::2] == [arrivals, outputs]
    assert columns(chat(output=Lognormal(1.0, 2.0)))[:2] == [arrivals, prompts]


def test_a_shorter_workload_is_the_beginning_of_a_longer_one():
    long = list(chat(n=9000))
    assert [r.id for r in long] == list(range(9000))
    for n in (1, 4095, 4096, 4097, 8193):
        assert list(chat(n=n)) == long[:n]


def test_arrivals_never_go_back():
    arrivals = columns(chat(n=5000, gaps=gamma_gaps(RATE, 5.0)))[0]
    assert arrivals == sorted(arrivals)


def test_a_batch_arrives_at_once():
    assert columns(chat(gaps=no_gaps))[0] == [0.0] * 100


def test_in_a_closed_loop_gaps_are_think_times_and_nothing_has_an_arrival():
    opened, closed = list(chat()), list(chat(users=4))
    assert chat(users=4).users == 4
    assert chat().users is None
    assert {r.arrival_s for r in closed} == {0.0}
    assert {r.think_s for r in opened} == {0.0}
    thinking = np.cumsum([r.think_s for r in closed])
    assert thinking == pytest.approx([r.arrival_s for r in opened])
    assert [r.prompt_tokens for r in closed] == [r.prompt_tokens for r in opened]


def test_a_workload_spelled_out():
    workload = Synthetic(1, 2, lambda rng: lambda n: np.full(n, 0.5), Fixed(4), Fixed(1))
    assert list(workload) == [Request(0, 0.5, 4, 1), Request(1, 1.0, 4, 1)]
    assert workload.n_requests == 2


def digest(workload):
    """Of every field of every request, times to the last bit."""
    found = hashlib.sha256()
    for r in workload:
        times, content = (r.arrival_s.hex(), r.think_s.hex()), tuple(map(tuple, r.content))
        row = (r.id, times[0], r.prompt_tokens, r.output_tokens, times[1], content, r.session)
        found.update(repr(row).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        pytest.param(
            Synthetic(1, 9000, poisson_gaps(8.0), Lognormal(4.2, 0.9, 4, 400), Lognormal(4.0, 0.8)), "c2f99b20edc39eb1"
        ),
        pytest.param(
            Synthetic(2, 9000, gamma_gaps(8.0, 3.0), Lognormal(4.2, 0.9, 4, 400), Fixed(7)), "d2cef89c4feb5d67"
        ),
        pytest.param(
            Synthetic(3, 9000, poisson_gaps(0.1), Lognormal(4.2, 0.9, 4, 400), Lognormal(4.0, 0.8), 4),
            "77ff51ee4ff5c3c9",
        ),
        pytest.param(Synthetic(4, 5000, no_gaps, Lognormal(4.2, 0.9, 4, 400), Lognormal(4.0, 0.8)), "70125a6a61a1d648"),
    ],
    ids=["poisson", "gamma", "closed loop", "batch"],
)
def test_a_seed_means_what_it_always_meant(workload, expected):
    """Recorded when requests were made one by one; another NumPy may draw other numbers."""
    assert digest(workload) == expected


def test_prompts_may_begin_with_the_same_text():
    prompts = Lognormal(4.0, 1.0, 1, 500)
    made = list(Synthetic(1, 500, no_gaps, prompts, Fixed(3), shared_tokens=60))
    plain = list(Synthetic(1, 500, no_gaps, prompts, Fixed(3)))
    assert [r.prompt_tokens for r in made] == [r.prompt_tokens for r in plain]
    owns = set()
    for request in (request for request in made if request.prompt_tokens > 1):
        shared, own = request.content
        assert tuple(shared) == (0, 0, min(60, request.prompt_tokens - 1))
        assert shared.n + own.n == request.prompt_tokens
        owns.add(own.source)
    assert 0 not in owns
    assert len(owns) > 400
