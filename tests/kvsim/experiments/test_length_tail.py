"""Room for requests longer than those that were seen."""

import numpy as np
import pytest

from kvsim.experiments.length_tail import CHANCE, headroom


def lengths(draw, n, seed=1):
    return np.ceil(draw(np.random.default_rng(seed), n)).astype(int).tolist()


TAILS = {
    "exponential": (lambda rng, n: 50 + rng.exponential(100, n), lambda x: np.exp(-(x - 50) / 100)),
    "pareto": (lambda rng, n: 100 * (1 + rng.pareto(4, n)), lambda x: (x / 100) ** -4),
    "uniform": (lambda rng, n: rng.uniform(100, 500, n), lambda x: np.maximum(500 - x, 0) / 400),
}


@pytest.mark.parametrize(("tail", "seen"), [("exponential", 45), ("uniform", 45), *((tail, 1000) for tail in TAILS)])
def test_few_requests_are_longer_than_the_room(tail, seen):
    """Over many logs, a share that is not far from the stated one is longer: no more than five times it."""
    draw, beyond = TAILS[tail]
    rooms = [headroom(lengths(draw, seen, seed)) for seed in range(200)]
    shares = [float(beyond(np.array(room.tokens))) for room in rooms]
    assert np.median(shares) <= 5 * CHANCE
    assert ("as far as so few tell" in rooms[0].said) == (seen == 45)
    assert all(room.tokens >= room.longest for room in rooms)


def test_many_requests_need_no_more_than_the_longest_and_rarely_say_so():
    room = headroom([*lengths(TAILS["uniform"][0], 30_000), 700])
    assert room.tokens >= 700
    assert room.chance <= CHANCE
    assert "of 30,001 requests the longest has 700" in room.said


def test_equal_lengths_have_no_tail():
    room = headroom([300] * 10)
    assert (room.tokens, room.chance) == (300, 1 / 11)
    assert headroom([7]).tokens == 7
