"""Passes on devices: what tables price, how far they reach, and that no price beats physics."""

import json
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from kvsim.costs.cost_model import CostModel
from kvsim.costs.device_profiles import device_profiles
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.physics import PassPhysics
from kvsim.costs.profile import Profile
from kvsim.costs.shipped import is_shipped
from kvsim.costs.under_load import Host
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from policies import Chunk, Group, MicroBatch, Place, Reads
from policies.placement.rule import PassReads

ON_4090 = load_profile("rtx4090-llama-3.1-8b")
ON_H100 = load_profile("h100_sxm-llama-3.1-8b")
SHIPPED = [name for name in device_profiles() if is_shipped(name)]

PASSES = st.lists(st.tuples(st.one_of(st.just(1), st.integers(2, 300)), st.integers(0, 6000)), min_size=1, max_size=12)
"""Chunks: tokens, and cells cached before them."""


def pass_of(chunks):
    """A pass of chunks that scan just their own cells."""
    tokens = np.array([n for n, _ in chunks])
    seen = np.array([n + before for n, before in chunks])
    reads = Reads(tokens, seen, seen, -(-seen // 16), int(seen.sum()))
    parts = tuple(Chunk(i, before, n) for i, (n, before) in enumerate(chunks))
    return PassReads.of(MicroBatch(parts, (Place(np.arange(tokens.sum()), reads),)))


same_pass = lru_cache(64)(pass_of)
"""Prices of a tuple of passes, kept, since many profiles price the same ones."""


def price_of(profile):
    """The seconds of passes of given chunks."""
    price = PassPrice(profile, "gather", (Group(0),))
    return lambda chunks: price.seconds(same_pass(tuple(chunks)))


def seconds(profile, chunks):
    return price_of(profile)(chunks)


def in_grid(grid, row, column):
    """A value between the entries of a grid, which SciPy finds."""
    found = RegularGridInterpolator((grid.rows, grid.columns), np.array(grid.seconds))
    return float(found((max(row, grid.rows[0]), max(column, grid.columns[0])))[()])


def by_hand(chunks, profile):
    """The parts of a pass, looked up one by one."""
    tables, singles = profile.tables, [1 + before for n, before in chunks if n == 1]
    longer = [(n, n + before) for n, before in chunks if n > 1]
    work = tables.prompt_work if longer and tables.prompt_work is not None else tables.work
    found = float(np.interp(sum(n for n, _ in chunks), work.at, work.seconds))
    if longer and profile.sustained is not None:
        found += (profile.sustained.ratio - 1) * max(found - work.seconds[0], 0.0)
    found += float(np.interp(len(chunks), tables.head.at, tables.head.seconds))
    decode_s = in_grid(tables.decode, len(singles), np.mean(singles)) if singles else 0.0
    if not longer:
        return found + decode_s
    tokens = sum(n for n, _ in longer)
    seen = sum(n * (cells - (n - 1) / 2) for n, cells in longer) / tokens
    most, far = tables.decode.rows[-1], tables.decode.columns[-1]
    read_s = sum(cells for _, cells in longer) * tables.decode.seconds[-1][-1] / most / far
    prompt_s = max(in_grid(tables.prompt, tokens, seen), read_s)
    ratio = 1.0
    if tables.together is not None and singles:
        t = tables.together
        axes = (t.tokens, t.cached, t.sequences, t.cells)
        ratios = RegularGridInterpolator(axes, np.array(t.ratios).reshape([len(axis) for axis in axes]))
        point = (tokens, max(seen - (tokens + 1) / 2, 0.0), len(singles), np.mean(singles))
        ratio = float(ratios([np.clip(value, axis[0], axis[-1]) for value, axis in zip(point, axes, strict=True)])[0])
    return found + ratio * (prompt_s + decode_s)


@pytest.mark.slow
@given(PASSES, st.sampled_from([ON_4090, ON_H100]))
def test_a_pass_costs_what_the_tables_say(chunks, profile):
    assert seconds(profile, chunks) == pytest.approx(by_hand(chunks, profile), rel=1e-9)


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


def test_the_host_adds_to_a_step_and_for_each_of_its_sequences():
    host = Host(seconds=1e-3, sequence_s=1e-5, source="this test")
    chunks = [(1, 100)] * 8 + [(64, 0)]
    more = seconds(ON_H100.model_copy(update={"host": host}), chunks) - seconds(ON_H100, chunks)
    assert more == pytest.approx(1e-3 + 9e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": None}, "machine"),
        ({"source": None}, "source"),
        ({"tables": None}, "tables"),
        ({"tables": {**ON_H100.tables.model_dump(), "head": {"at": (4, 2), "seconds": (1, 1)}}}, "at must rise"),
        ({"tables": {**ON_H100.tables.model_dump(), "head": {"at": (1, 2), "seconds": (1,)}}}, "seconds must be 2"),
    ],
    ids=["device", "source", "tables", "falling", "short"],
)
def test_profiles_that_do_not_fit_together_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Profile.model_validate(ON_H100.model_dump() | change)


def test_a_profile_of_a_device_from_before_tables_is_refused_in_a_line(tmp_path):
    old = tmp_path / "old.json"
    old.write_text('{"device": "h100_sxm", "matmul_knots": [1, 2]}')
    with pytest.raises(UserError, match=r"old\.json: an earlier version made this profile of a device; make it again"):
        load_profile(str(old))


def test_a_profile_of_a_machine_from_before_tables_still_loads(tmp_path):
    told = load_profile("default").model_dump(mode="json")
    told |= {"sequence_knots": [], "sequence_slopes_s": [], "chunk_knots": [], "long_context": 1}
    told["kernels"]["gather"] |= {"cell_by_chunks_s": [], "long_cell_by_chunks_s": []}
    (tmp_path / "old.json").write_text(json.dumps(told))
    assert load_profile(str(tmp_path / "old.json")) == load_profile("default")


def physics_of(profile):
    shape = memory_shape(profile.model)
    divided = {"tp": profile.tensor_parallel, "ep": profile.expert_parallel}
    return PassPhysics(device_named(profile.device), shape, profile.weights, **divided)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_no_pass_is_faster_than_physics(name):
    profile = load_profile(name)
    physics, price = physics_of(profile), price_of(profile)
    for n in (1, 2, 4, 8, 15, 16, 100, 129, 256, 1000, 4000):
        cells = 700
        least = physics.matrices(n).least_s + physics.experts(n).least_s + physics.head(n).least_s
        least += physics.decode(n, cells).least_s
        assert price([(1, cells - 1)] * n) >= 0.9999 * least
    for n in (2, 5, 15, 16, 200, 2_048, 8_000, 30_000):
        least = physics.matrices(n).least_s + physics.experts(n).least_s + physics.head(1).least_s
        least += physics.prompt(n, (n + 1) / 2).least_s
        assert price([(n, 0)]) >= 0.9999 * least


@pytest.mark.parametrize("name", SHIPPED)
def test_short_prompts_are_not_free(name):
    """Reading the weights takes as long for two tokens as for one."""
    profile = load_profile(name)
    decode = seconds(profile, [(1, 512)])
    for n in (2, 4, 8, 15):
        assert 0.8 * decode < seconds(profile, [(n, 0)]) < (15 if memory_shape(profile.model).n_experts else 2) * decode


@pytest.mark.parametrize("name", SHIPPED)
def test_many_sequences_beside_a_prompt_take_no_longer_than_both_alone_with_a_margin(name):
    """Beyond what was measured, nothing goes on as between the last two numbers of sequences."""
    profile = load_profile(name)
    measured, further = ((seconds(profile, [(1, 255)] * n + [(512, 0)]), n) for n in (127, 255))
    apart = [seconds(profile, [(1, 255)] * n) + seconds(profile, [(512, 0)]) for n in (127, 255)]
    assert further[0] / apart[1] < 1.2 * measured[0] / apart[0]
    assert further[0] < 1.6 * apart[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_larger_passes_take_longer(name):
    """But for the tiles of kernels, by which a few tokens more may be faster."""
    price = price_of(load_profile(name))
    for passes in (
        [[(n, 0)] for n in (16, 64, 256, 1024, 4096, 16384, 65536)],
        [[(1, cells)] * 32 for cells in (64, 512, 4096, 32768, 262144)],
        [[(1, 512)] * n for n in (1, 8, 64, 512, 4096)],
    ):
        took = [price(chunks) for chunks in passes]
        assert all(after > 0.97 * before for before, after in pairwise(took))
