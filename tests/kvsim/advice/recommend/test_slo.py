"""Service levels: reading them from text, and checking measures against them."""

import math

import pytest

from kvsim import UserError
from kvsim.advice.recommend.slo import LATENCY_MEASURES, read_slo
from kvsim.experiments.measures import MEASURES


def test_bounds_are_read_with_their_units():
    slo = read_slo("ttft_p95<1s, tpot_p95 < 80ms,e2e_p99<=30s,failed<1%")
    assert [(b.measure, b.limit, b.strict, b.text) for b in slo.asked] == [
        ("ttft_p95", 1.0, True, "ttft_p95<1s"),
        ("tpot_p95", pytest.approx(0.08), True, "tpot_p95<80ms"),
        ("e2e_p99", 30.0, False, "e2e_p99<=30s"),
        ("failed_share", 0.01, True, "failed<1%"),
    ]
    assert slo.text == "ttft_p95<1s, tpot_p95<80ms, e2e_p99<=30s, failed<1%"


def test_by_default_no_failures_are_allowed():
    slo = read_slo("ttft_p95<1s")
    assert [(b.measure, b.limit) for b in slo.bounds if not b.text] == [("failed_share", 0), ("truncated_share", 0)]
    good = {"ttft_p95": 0.5, "failed_share": 0.0, "truncated_share": 0.0}
    assert slo.met(good)
    assert not slo.met({**good, "failed_share": 0.001})
    assert slo.worst({**good, "truncated_share": 0.001}) == (slo.bounds[2], math.inf)
    assert read_slo("ttft_p95<1s,failed<1%,truncated<=0.1%").met(
        {**good, "failed_share": 0.009, "truncated_share": 0.001}
    )


def test_the_limit_itself_meets_only_a_bound_that_includes_it():
    assert not read_slo("e2e_p99<1s").bounds[0].met(1.0)
    assert read_slo("e2e_p99<=1s").bounds[0].met(1.0)


def test_the_worst_bound_has_its_factor():
    slo = read_slo("ttft_p95<1s,tpot_mean<10ms")
    found = {"ttft_p95": 0.5, "tpot_mean": 0.03, "failed_share": 0.0, "truncated_share": 0.0}
    bound, factor = slo.worst(found)
    assert (bound.text, factor) == ("tpot_mean<10ms", pytest.approx(3))


def test_requests_of_one_token_have_no_tpot_and_meet_it():
    slo = read_slo("tpot_p95<1ms,ttft_p95<1s")
    shares = {"failed_share": 0.0, "truncated_share": 0.0}
    assert slo.met({"tpot_p95": None, "ttft_p95": 0.1, **shares})
    assert not slo.met({"tpot_p95": None, "ttft_p95": None, **shares})


def test_latencies_are_measures():
    assert set(LATENCY_MEASURES) <= set(MEASURES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no bounds; bounds such as"),
        (",", "is not a bound; bounds such as"),
        ("ttft_p95", "'ttft_p95' is not a bound; bounds such as"),
        ("ttft_p95>1s", "is not a bound; bounds such as"),
        ("ttft_p96<1s", "no measure 'ttft_p96'; accepted: ttft or tpot or e2e followed by _"),
        ("throughput<1s", "no measure 'throughput'; accepted: "),
        ("ttft_p95<1", "ttft_p95 is a time; a number followed by s or ms is accepted"),
        ("ttft_p95<1%", "ttft_p95 is a time"),
        ("ttft_p95<0s", "a time above 0"),
        ("ttft_p95<1e99s", "a time above 0 and below 1e9 seconds"),
        ("ttft_p95<-1s", "is not a bound"),
        ("ttft_p95<nans", "is not a bound"),
        ("failed<1", "failed is a share of the requests; 0% to 100% is accepted"),
        ("failed<101%", "0% to 100% is accepted"),
        ("ttft_p95<1s,ttft_p95<2s", "ttft_p95 is bounded twice"),
        ("ttft_p95<1s,failed<1%,failed_share<2%", "failed_share is bounded twice"),
        (",".join(["ttft_p95<1s"] * 99), "99 bounds"),
        ("ttft_p95<1s\n", None),
        ("x" * 999, "is not a bound"),
    ],
)
def test_unreadable_bounds_are_reported_in_one_line(text, message):
    if message is None:
        assert read_slo(text).text == "ttft_p95<1s"
        return
    with pytest.raises(UserError, match="--slo: ") as caught:
        read_slo(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
