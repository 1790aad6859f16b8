"""Statistics of workloads, checked against workloads with known statistics."""

import json

import numpy as np
import pytest

from tests.traces import SHARED, needs_shared
from tests.worlds import Given, Listed
from workloads import AzureTrace, MooncakeTrace, Request, WorkloadError
from workloads.fitting.statistics import clock_tick, describe, dispersion, read_columns, spread_within_ticks


def test_a_small_workload_by_hand():
    found = describe(Listed([(10.0, 100, 10), (11.0, 200, 30), (14.0, 400, 20)]))
    assert (found.requests, found.duration_s, found.rate) == (3, 4.0, 0.75)
    assert found.gap_cv == pytest.approx(0.5)  # gaps of 1 and 3: deviation 1 over a mean of 2
    assert found.dispersion == {1.0: None, 60.0: None}
    assert found.prompt.mean == pytest.approx(700 / 3)
    assert (found.prompt.p50, found.prompt.max) == (200, 400)
    assert found.prompt.mu == pytest.approx(np.log([100, 200, 400]).mean())
    assert found.correlation == pytest.approx(0.5)
    assert (found.sessions, found.reuse, found.tick_s) == (0, None, None)


def test_all_at_once_has_no_rate():
    found = describe(Listed([(0.0, 5, 5)] * 4))
    assert (found.rate, found.gap_cv, found.correlation) == (None, None, None)


@pytest.mark.parametrize("window", [0.5, 3.0])
def test_dispersion_is_that_of_the_counts(window):
    times = np.sort(np.random.default_rng(3).uniform(0, 100, 400))
    windows = int((times[-1] - times[0]) // window)
    counts = np.histogram(times - times[0], bins=np.arange(windows + 1) * window)[0]
    assert dispersion(times, window) == pytest.approx(counts.var() / counts.mean())


def test_dispersion_over_an_enormous_time_takes_no_memory():
    times = np.concatenate((np.arange(50.0), [1e12]))
    assert 0 < dispersion(times, 1.0) < 2


def test_poisson_is_1_and_regular_is_0():
    rng = np.random.default_rng(1)
    assert dispersion(np.cumsum(rng.exponential(0.1, 100_000)), 1.0) == pytest.approx(1, abs=0.06)
    assert dispersion(np.arange(10_000) * 0.1, 1.0) == pytest.approx(0, abs=0.02)


def test_a_ticking_clock_is_seen_and_spread():
    times = np.repeat(np.arange(0, 30, 3.0), 4)
    assert clock_tick(times) == 3.0
    spread = spread_within_ticks(times, 3.0, np.random.default_rng(1))
    assert np.array_equal(spread // 3, times // 3)
    assert (np.diff(spread) > 0).all()
    assert clock_tick(np.arange(20.0)) is None
    assert clock_tick(np.array([0.0, 0.0, 1e-12, 1.0])) is None


def test_turns_come_after_their_session_by_their_pauses():
    turns = [Request(0, 5.0, 10, 1, 0.0, session=0), Request(1, 5.0, 20, 1, 9.0, session=0)]
    found = describe(Given([*turns, Request(2, 6.0, 30, 1, session=1)]))
    assert (found.sessions, found.duration_s) == (2, 9.0)


def test_a_closed_loop_has_no_arrivals():
    found = describe(Listed([(0.0, 5, 5), (0.0, 7, 9)], users=2))
    assert (found.users, found.requests, found.prompt.mean, found.output.max) == (2, 2, 6.0, 9)
    assert (found.rate, found.gap_cv) == (None, None)
    with pytest.raises(WorkloadError, match="closed loop"):
        read_columns(Listed([(0.0, 5, 5)], users=2))


PUBLISHED = {
    "azure2023_code": (AzureTrace, "AzureLLMInferenceTrace_code.csv.gz", 8819, 3436, 2.57, 13.2, 13.2, 164),
    "azure2023_conv": (AzureTrace, "AzureLLMInferenceTrace_conv.csv.gz", 19366, 3502, 5.53, 1.09, 1.39, 16.1),
    "mooncake_conversation": (MooncakeTrace, "conversation_trace.jsonl.gz", 12031, 3537, 3.40, 3.03, 7.9, 2.95),
    "mooncake_arxiv_1000": (MooncakeTrace, "mooncake_trace_1000.jsonl.gz", 1000, 177, 5.64, 4.03, 12.5, None),
}
LENGTHS = {
    "azure2023_code": ((2048, 1469, 7303, 7436, 7437, 6.999, 1.360), (28, 13, 90, 251, 1899, 2.788, 0.847)),
    "azure2023_conv": ((1155, 1020, 4083, 4142, 14050, 6.633, 0.985), (211, 129, 451, 601, 1000, 5.019, 0.859)),
    "mooncake_conversation": (
        (12035, 6909, 39550, 85400, 126195, 8.737, 1.199),
        (343, 350, 698, 1118, 2000, 5.336, 1.358),
    ),
    "mooncake_arxiv_1000": (
        (9792, 6558, 27307, 77828, 121290, 8.754, 0.883),
        (199, 34, 610, 831, 2000, 3.956, 1.982),
    ),
}


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("folder", PUBLISHED)
def test_the_statistics_of_real_traces(folder):
    reader, name, requests, duration, rate, cv, second, minute = PUBLISHED[folder]
    found = describe(reader(SHARED / folder / name))
    assert found.requests == requests
    assert found.duration_s == pytest.approx(duration, abs=0.6)
    assert found.rate == pytest.approx(rate, rel=2e-3)
    assert found.gap_cv == pytest.approx(cv, rel=5e-3)
    assert found.dispersion[1.0] == pytest.approx(second, rel=7e-3)
    if minute is None:
        assert found.dispersion[60.0] is None
    else:
        assert found.dispersion[60.0] == pytest.approx(minute, rel=5e-3)
    for spread, published in zip((found.prompt, found.output), LENGTHS[folder], strict=True):
        assert spread[:5] == pytest.approx(published[:5], abs=0.6)
        assert spread[5:] == pytest.approx(published[5:], abs=6e-4)


def test_statistics_fit_into_json():
    from kvsim.advice.workload_fit.fit import statistics_dict

    json.dumps(statistics_dict(describe(Listed([(float(i), 5 + i, 7) for i in range(30)]))), allow_nan=False)
