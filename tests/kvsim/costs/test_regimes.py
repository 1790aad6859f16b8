"""Costs by regime: which coefficients a pass is priced with, whatever is known of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.cost_model import CostModel
from kvsim.costs.fitting import fit_regimes
from kvsim.costs.pass_layout import Sample
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Profile, load_profile
from kvsim.costs.tables import CHUNK_KNOTS, LONG_CONTEXT
from policies import Chunk, Group, MicroBatch, Place, Reads
from policies.placement.rule import PassReads
from tests.kvsim.costs.passes import looked_up

ON_4090 = load_profile("rtx4090-llama-3.1-8b")

PASSES = st.lists(st.tuples(st.one_of(st.just(1), st.integers(2, 300)), st.integers(0, 6000)), min_size=1, max_size=12)
"""Chunks: tokens, and cells cached before them."""


def pass_of(chunks):
    """A pass of chunks that scan just their own cells."""
    tokens = np.array([n for n, _ in chunks])
    seen = np.array([n + before for n, before in chunks])
    runs = -(-seen // 16)
    reads = Reads(tokens, seen, seen, runs, int(seen.sum()))
    parts = tuple(Chunk(i, before, n) for i, (n, before) in enumerate(chunks))
    return PassReads.of(MicroBatch(parts, (Place(np.arange(tokens.sum()), reads),)))


def by_hand(chunks, profile):
    """The formula of kvsim/costs/pass_price.py, written out."""
    costs = profile if all(n == 1 for n, _ in chunks) else profile.mixed
    kernel = costs.kernels["gather"]
    n, k = sum(n for n, _ in chunks), len(chunks)

    seconds = looked_up(costs.matmul_slopes_s, costs.matmul_knots, n)
    seconds += looked_up(costs.sequence_slopes_s, costs.sequence_knots, k)
    seconds += profile.host.seconds + kernel.base_s.value + kernel.per_chunk_s.value * k
    seconds += kernel.per_run_s.value * sum(-(-(n + before) // 16) for n, before in chunks)
    single = [1 + before for n, before in chunks if n == 1]
    for n, before in chunks:
        if n > 1:
            cell = kernel.per_cell_s.value + looked_up(kernel.further_token_s, costs.attention_knots, n)
            seconds += cell * (before + n - (n - 1) / 2)
    if costs.chunk_knots:
        place = np.interp(np.log2(k), np.log2(costs.chunk_knots), np.arange(len(costs.chunk_knots)))
        cell, more = (
            np.interp(place, np.arange(len(costs.chunk_knots)), [c.value for c in each])
            for each in (kernel.cell_by_chunks_s, kernel.long_cell_by_chunks_s)
        )
        seconds += cell * sum(single) + more * max(sum(single) - costs.long_context * len(single), 0)
    else:
        seconds += kernel.per_cell_s.value * sum(single)
    return seconds


@given(PASSES)
def test_a_pass_costs_what_the_formula_says(chunks):
    price = PassPrice(ON_4090, "gather", (Group(0),))
    assert price.seconds(pass_of(chunks)) == pytest.approx(by_hand(chunks, ON_4090), rel=1e-9)


@given(PASSES)
def test_a_pass_of_which_only_counts_are_known_costs_the_same(chunks):
    """All tokens that decode count as one, with the cells that they scan together."""
    price = PassPrice(ON_4090, "gather", (Group(0),))
    single = sum(1 + before for n, before in chunks if n == 1)
    scans = [(n, n + before) for n, before in chunks if n > 1] + [(1, single)] * (single > 0)
    runs = sum(-(-(n + before) // 16) for n, before in chunks)
    counted = PassReads.counted(sum(n for n, _ in chunks), len(chunks), runs, scans)
    assert price.seconds(counted) == price.seconds(pass_of(chunks))


def test_most_is_kept_of_what_was_priced():
    price = PassPrice(ON_4090, "gather", (Group(0),))
    for chunks, tokens, cells in (
        ([(1, 99), (1, 49)], 2, 100),
        ([(7, 23), (1, 9)], 8, 100),
        ([(3, 497)], 8, 500),
        ([(1, 0)], 8, 500),
    ):
        price.seconds(pass_of(chunks))
        assert (price.most_tokens, price.most_cells) == (tokens, cells)


@given(PASSES)
def test_attention_is_split_without_a_rest(chunks):
    price, work = PassPrice(ON_4090, "gather", (Group(0),)), pass_of(chunks)
    n, k = work.tokens, len(chunks)
    regime = price.regime(n, k)
    useful, holes = price.attention_of(work, runs_are_holes=False)
    whole = regime.base_s + regime.matrix_s(n) + regime.chunks_s(k) + useful + holes
    assert whole == pytest.approx(price.seconds(work), rel=1e-9)
    assert holes == pytest.approx(0, abs=1e-12)


def test_a_window_never_makes_a_pass_negative():
    reads = Reads(np.array([2048]), np.array([64]), np.array([64]), np.array([4]), 64)
    batch = MicroBatch((Chunk(0, 0, 2048),), (Place(np.arange(2048), reads),))
    assert PassPrice(ON_4090, "gather", (Group(0),)).seconds(PassReads.of(batch)) > 0


def test_profiles_of_machines_have_one_regime():
    profile = load_profile("default")
    assert profile.mixed is None
    price = CostModel(profile).pass_price("gather")
    assert price.regime(8, 8) is price.regime(9, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": None}, "machine"),
        ({"source": None}, "source"),
        ({"chunk_knots": (2, 3)}, "cell_by_chunks_s must be 2"),
        ({"sequence_knots": (4, 2)}, "sequence_knots must be two or more numbers, rising"),
    ],
    ids=str,
)
def test_profiles_that_do_not_fit_together_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Profile.model_validate(ON_4090.model_dump() | change)


def known_passes(rng, n=3000):
    """Passes of a device on which a cell costs more beside a prompt, and still more in long contexts."""
    samples = []
    for origin in range(n):
        decodes = int(2 ** rng.uniform(0, 7))
        context = int(2 ** rng.uniform(4, 12.5))
        prompt = int(2 ** rng.uniform(1, 10)) if origin % 2 else 0
        cells = decodes * context
        seconds = 5e-3 + 1e-5 * (decodes + prompt) + 2e-5 * decodes
        seconds += cells * (3e-7 if prompt else 1e-7)
        if prompt:
            seconds += prompt * (prompt + 1) / 2 * 2e-9 + 2e-7 * max(cells - LONG_CONTEXT * decodes, 0)
        scans = ((prompt, prompt),) if prompt else ()
        samples.append(
            Sample(
                kernel="gather",
                tokens=prompt + decodes,
                scans=(*scans, (1, cells)),
                chunks=decodes + bool(prompt),
                runs=0,
                seconds=seconds,
                origin=origin,
            )
        )
    return samples


@pytest.mark.slow
def test_a_fit_by_regime_recovers_what_made_the_passes():
    fitted = fit_regimes(known_passes(np.random.default_rng(3)), np.random.default_rng(4))
    for errors in fitted.errors.values():
        assert errors.error_median < 0.01
    decode, mixed = fitted.costs["decode"].kernels["gather"], fitted.costs["mixed"]
    assert decode.per_cell_s.value == pytest.approx(1e-7, rel=0.02)
    cells = dict(zip(mixed.chunk_knots, mixed.kernels["gather"].cell_by_chunks_s, strict=True))
    assert cells[33].value == pytest.approx(3e-7, rel=0.05)
    assert mixed.chunk_knots == CHUNK_KNOTS[: len(mixed.chunk_knots)]


def test_too_few_passes_make_no_fit():
    with pytest.raises(ValueError, match="decode passes; at least"):
        fit_regimes(known_passes(np.random.default_rng(3), n=20), np.random.default_rng(4))
