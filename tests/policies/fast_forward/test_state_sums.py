"""States summed up over many steps at once, against one step after another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fast_forward.state_sums import StateSums, StepWeights
from policies.vocabulary import Usage

NUMBERS = st.integers(0, 1000)


@given(
    pieces=st.lists(st.tuples(st.integers(1, 30), *[NUMBERS] * 4, st.floats(0, 1)), min_size=1, max_size=4),
    growth=st.integers(0, 20),
    stop=st.integers(0, 40),
)
def test_sums_are_those_of_single_steps(pieces, growth, stop):
    """Each piece: its steps, what there is after its first step, and what a copy before that counts."""
    capacity, step, copies = 2_000_000, 0, dict[int, float]()
    for n, *_, copy in pieces:
        copies[step] = copy
        step += n
    step, weights = 0, StepWeights(0.01, 1e-4, 1e-3, copies)
    sums, expected = StateSums(weights), dict.fromkeys(("weight", "stored", "span", "external", "internal"), 0.0)
    sums.capacity, sums.growth = capacity, growth
    for n, scores, runs, stored, allocated, _ in pieces:
        sums.scores, sums.runs, sums.stored = scores, runs, stored
        sums.allocated = stored + 1000 * allocated
        sums.placeable = (capacity - sums.allocated) // 2
        sums.span, sums.span_stop = stored, stored + stop
        for k in range(n):
            weight = 0.01 + 1e-4 * (scores + k * growth) + 1e-3 * runs
            weight += copies.get(step, 0.0)
            step += 1
            span = stored + min(k, stop)
            now = Usage(capacity, stored + k * growth, sums.allocated, sums.placeable, 0, 0, span)
            expected["weight"] += weight
            expected["stored"] += weight * now.stored
            expected["span"] += weight * now.span
            expected["external"] += weight * now.external_fragmentation
            expected["internal"] += weight * now.internal_fragmentation
        sums.take_steps(n)
    found = [sums.weight, sums.sum_stored, sums.sum_span, sums.external_fragmentation, sums.internal_fragmentation]
    assert found == pytest.approx(list(expected.values()), rel=1e-9, abs=1e-9)
    assert sums.steps == step
