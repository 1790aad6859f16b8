"""The direction of what docs/reproduced.md says of two-level pages, on a small version."""

import pytest

from benchmarks.reproduced.two_level_pages import GEMMA_2, serve, waste_of_one
from kvsim.scenario.scenario import load_scenario

SMALL = load_scenario(
    GEMMA_2, workload__requests=16, workload__output_tokens__value=40, cache__cells=20_000, cache__window=1024
)


@pytest.mark.slow
def test_two_level_pages_waste_little_and_serve_more():
    names = ("uniform-pages", "layer-groups", "two-level-pages")
    uniform, groups, two_level = (serve(SMALL, name) for name in names)
    assert two_level.waste < 0.1 < 0.4 < uniform.waste
    assert groups.waste == pytest.approx(two_level.waste, abs=0.01)
    assert two_level.at_once > uniform.at_once
    assert two_level.tokens_per_s > uniform.tokens_per_s


@pytest.mark.parametrize(("tokens", "window", "layers", "share"), [(8192, 4096, 1, 0.25), (4096, 4096, 1, 0)])
def test_what_uniform_pages_waste_follows_from_the_layers(tokens, window, layers, share):
    assert waste_of_one(tokens, window, layers) == pytest.approx(share)
