"""The server against queueing theory: with one slot and one pass for each request it is a textbook queue."""

import numpy as np
import pytest
from scipy import stats

from tests.worlds import GivenTimes, scenario, serve
from workloads import Fixed, Synthetic, poisson_gaps

RATE, MEAN_SERVICE, REQUESTS, WARM_UP, REPLICATIONS = 0.7, 1.0, 2500, 500, 5
MOST_TOKENS = 2**15
"""Above the longest request that is drawn; each further cell would be looked at in every pass, and change nothing."""
WORLD = scenario(
    server__slots=1,
    server__n_batch=MOST_TOKENS,
    server__n_ubatch=MOST_TOKENS,
    server__cache_ram=0,
    cache__cells=MOST_TOKENS,
)


class Geometric:
    """Lengths in whole tokens, nearly exponential: the service time is a token's time each."""

    mean = 1000

    def draw(self, rng, n):
        return rng.geometric(1 / self.mean, n)


def mean_waits(lengths, seconds):
    waits = []
    for seed in range(REPLICATIONS):
        workload = Synthetic(seed, REQUESTS, poisson_gaps(RATE), lengths, Fixed(1))
        _, jobs = serve(WORLD, workload, GivenTimes(seconds))
        waits.append(np.mean([jobs[i].started_s - jobs[i].arrival_s for i in range(WARM_UP, REQUESTS)]))
    return np.array(waits)


def interval(values, level=0.99):
    return stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))


@pytest.mark.slow
def test_md1():
    waits = mean_waits(Fixed(8), lambda batch: MEAN_SERVICE)
    low, high = interval(waits)
    assert low <= RATE * MEAN_SERVICE**2 / (2 * (1 - RATE * MEAN_SERVICE)) <= high


@pytest.mark.slow
def test_mm1_and_not_md1():
    waits = mean_waits(Geometric(), lambda batch: batch.n_tokens * MEAN_SERVICE / Geometric.mean)
    low, high = interval(waits)
    assert low <= RATE * MEAN_SERVICE**2 / (1 - RATE * MEAN_SERVICE) <= high
    # The control: the interval is narrow enough to tell the two queues apart.
    assert not low <= RATE * MEAN_SERVICE**2 / (2 * (1 - RATE * MEAN_SERVICE)) <= high


def test_little_s_law():
    """Mean number in the system equals arrival rate times mean time in it."""
    _, jobs = serve(
        scenario(server__slots=4, cache__cells=4096),
        Synthetic(3, 400, poisson_gaps(0.5), Fixed(20), Fixed(5)),
        GivenTimes(lambda batch: 0.1 + 0.01 * batch.n_tokens),
    )
    end = max(job.finished_s for job in jobs.values())
    times = sorted([(j.arrival_s, 1) for j in jobs.values()] + [(j.finished_s, -1) for j in jobs.values()])
    area, inside, before = 0.0, 0, 0.0
    for time, change in times:
        area, inside, before = area + inside * (time - before), inside + change, time
    sojourn = np.mean([job.finished_s - job.arrival_s for job in jobs.values()])
    assert area / end == pytest.approx(len(jobs) / end * sojourn)
