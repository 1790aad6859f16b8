"""Passes that are drawn to be priced stay within what the model, the device and the tables hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.calibration.published.sampling import Reach, plan_passes

REACHES = st.builds(Reach, context=st.integers(512, 131_072), cells=st.integers(20_000, 1_000_000))


@pytest.mark.slow
@given(REACHES, st.integers(0, 9))
def test_no_pass_goes_further_than_it_may(reach, seed):
    for each in plan_passes(reach, np.random.default_rng(seed), 60):
        assert each.cells <= reach.cells
        assert each.prompts + each.decodes > 0
        assert (each.tokens >= 16) == (each.prompts > 0)
        assert (each.context >= 1) == (each.decodes > 0)
        assert max(each.context, each.cached + each.tokens) <= reach.context
        assert each.prompts * each.tokens + each.decodes <= 8_192 + 1_024


@pytest.mark.slow
@given(REACHES)
def test_decode_only_passes_come_first_and_are_two_in_five(reach):
    prompts = [each.prompts > 0 for each in plan_passes(reach, np.random.default_rng(0), 50)]
    assert prompts == [False] * 20 + [True] * 30


def test_most_passes_are_those_of_servers():
    drawn = list(plan_passes(Reach(131_072, 500_000), np.random.default_rng(0), 2_000))
    decode = [each for each in drawn if not each.prompts]
    usual = [each for each in decode if each.decodes <= 256 and 128 <= each.context <= 8_192]
    assert len(usual) / len(decode) > 0.7
    full = [each for each in drawn if each.prompts * each.tokens + each.decodes in range(2_040, 2_049)]
    assert len(full) > 50
    assert {each.prompts for each in drawn} == {0, 1, 2, 3, 4, 8}
    assert max(each.context for each in drawn) > 60_000
    assert max(each.cached for each in drawn) > 30_000


@pytest.mark.parametrize("cells", [20_000, 500_000])
def test_batches_reach_as_far_as_the_cells_let_them(cells):
    decode = [each for each in plan_passes(Reach(65_536, cells), np.random.default_rng(0), 2_000) if not each.prompts]
    assert max(each.decodes for each in decode) > 800
