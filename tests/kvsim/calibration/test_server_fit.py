"""Profiles fitted to a server's steps."""

import numpy as np
import pytest

from kvsim.costs.cost_model import CostModel
from kvsim.costs.fitting import digest
from kvsim.costs.profile import Profile
from kvsim.costs.step_fit import server_profile
from policies.placement.rule import PassReads
from tests.kvsim.costs.test_step_fit import CELL_S, samples
from tests.kvsim.engines.recordings.stepped_servers import KNOWN, seconds


def profile(steps, **keys):
    return server_profile(
        steps,
        np.random.default_rng(0),
        name="mine",
        engine="llama-server 1",
        model="tiny",
        type_k="f16",
        type_v="f16",
        machine=KNOWN.machine,
        measured="2026-11-23",
        **keys,
    )


def test_a_profile_says_what_it_was_fitted_to(tmp_path):
    steps = samples()
    found = profile(steps, skipping=("tiled",), front_end_s=seconds(0.1), assumed=("a",))
    made = found.profile
    assert (made.samples, made.digest) == (len(steps), digest(steps))
    works = [work for step in steps for work in (step, *step.further)]
    assert (made.tokens.low, made.tokens.high) == (1, max(work.tokens for work in works))
    assert made.cells.high == max(cells for work in works for _, cells in work.scans)
    assert made.held_out_samples == len(found.held_out) == 100
    assert made.held_out_error_median < 1e-3
    assert (made.front_end_s.value, made.assumed, made.moves) == (0.1, ("a",), None)
    path = tmp_path / "mine.json"
    made.save(path)
    assert Profile.model_validate_json(path.read_text()) == made


def test_it_prices_passes_as_the_server_took_them():
    price = CostModel(profile(samples(), skipping=("tiled",)).profile).pass_price("tiled")
    for step in samples(30, seed=2):
        works = (step, *step.further)
        passes = [PassReads.counted(work.tokens, work.chunks, work.runs, work.scans) for work in works]
        predicted = sum(price.seconds(each) for each in passes)
        assert predicted == pytest.approx(step.seconds, rel=2e-3)


def test_too_few_steps():
    with pytest.raises(ValueError, match="at least 20 are needed for a fit"):
        profile(samples(20))


def test_the_cost_of_a_cell_is_within_its_interval():
    cell = profile(samples(600, noise=0.05)).profile.kernels["tiled"].per_cell_s
    assert cell.low * 0.95 < CELL_S < cell.high * 1.05
