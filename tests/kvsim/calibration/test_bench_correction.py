"""Tables that are corrected by what a benchmark timed: known factors come back, few rows change little else."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.calibration.bench_correction import Factors, Rows, correct
from kvsim.calibration.bench_files.points import BenchPoint, SetUp
from kvsim.calibration.bench_passes import Limits, PartPrices, Pass, passes_of
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.physics import PassPhysics
from kvsim.costs.under_load import Host
from kvsim.model.memory_shapes import memory_shape
from policies import Group
from policies.placement.rule import PassReads

PROFILE = load_profile("rtx4090-llama-3.1-8b")
PHYSICS = PassPhysics(device_named("rtx4090"), memory_shape("llama-3.1-8b"), "bf16")
PRICES = PartPrices(PROFILE, PHYSICS)
LIMITS = Limits(2048, 256, 40_000)
LLAMACPP = SetUp("llama-bench", engine="llamacpp")
SERVED = SetUp("vllm bench serve", engine="vllm")
TRUE = Factors(np.log([1.2] * 6 + [1.5] * 9 + [2.0, 1.8]), np.zeros(17))
"""Work takes 1.2 times as long up to 32 tokens, and 1.5 from 64 on."""


def row(kind, factors=TRUE, set_up=LLAMACPP, **sizes):
    """A row that takes as long as the profile says, times the factors."""
    point = BenchPoint("rows.json: row 1", set_up, kind, 1.0, ubatch=512 if set_up is LLAMACPP else None, **sizes)
    return replace(point, seconds=factors.seconds(PRICES.parts(passes_of(point, LIMITS))))


ROWS = [
    row("prompt", prompt=512),
    row("prompt", prompt=512, depth=32768),
    row("decode", new=128),
    row("decode", new=128, depth=32768),
    *(row("decode", new=64, depth=512, sequences=n) for n in (4, 16, 32)),
    row("prompt", prompt=128),
    row("prompt", prompt=2048),
]


@pytest.mark.parametrize("host", [None, Host(seconds=2e-3, sequence_s=1e-4, source="given")])
def test_parts_sum_up_to_what_the_profile_says(host):
    profile = PROFILE.model_copy(update={"host": host})
    price, prices = PassPrice(profile, profile.own_kernel, (Group(0),)), PartPrices(profile, PHYSICS)
    passes = [Pass(1, ((512, 900), (3, 40)), 7, 333.0), Pass(2, singles=5, cells=100.0), Pass(1, ((64, 64),))]
    same = Factors(np.zeros(17), np.zeros(17))
    for one in passes:
        scans = [*one.prompts] + [(1, round(one.singles * one.cells))] * (one.singles > 0)
        work = PassReads.counted(one.tokens, one.chunks, 0, scans)
        parts = prices.parts([one])
        assert same.seconds(parts) == pytest.approx(one.weight * price.seconds(work), rel=1e-12)
        assert parts.least_s < same.seconds(parts)


def test_a_step_that_waits_for_the_host_tells_nothing_of_the_device():
    host = Host(seconds=0.0, least_s=0.1, source="given")
    slow = PROFILE.model_copy(update={"host": host})
    point = BenchPoint("", SERVED, "decode", 3.2, new=32)
    done = correct(slow, PHYSICS, LIMITS, [point])
    assert done.rows[0].estimate_s == done.rows[0].corrected_s == pytest.approx(3.2)
    assert not done.factors.tells_of(1)


def test_a_long_prompt_runs_in_passes_of_the_micro_batch():
    passes = passes_of(BenchPoint("", LLAMACPP, "prompt", 1.0, prompt=1200, depth=100, ubatch=512), LIMITS)
    assert [one.prompts for one in passes] == [((512, 612),), ((512, 1124),), ((176, 1300),)]


def test_short_prompts_share_passes():
    passes = passes_of(BenchPoint("", LLAMACPP, "prompt", 1.0, sequences=9, prompt=128, ubatch=512), LIMITS)
    assert [(one.weight, len(one.prompts)) for one in passes] == [(2, 4), (1, 1)]


def test_requests_without_room_wait():
    point = BenchPoint("", SERVED, "batch", 1.0, sequences=64, prompt=4000, new=1000)
    steps = [one for one in passes_of(point, LIMITS) if one.singles]
    assert {one.singles for one in steps} == {8}
    assert sum(one.weight for one in steps) == pytest.approx(999 * 8)


def test_known_factors_come_back():
    done = correct(PROFILE, PHYSICS, LIMITS, ROWS)
    for n in (1, 4, 16, 32, 128, 512):
        assert done.factors.work([n])[0] == pytest.approx(TRUE.work([n])[0], rel=0.04)
        assert done.factors.tells_of(n)
    assert done.factors.decode == pytest.approx(2.0, rel=0.1)
    assert done.factors.prompt == pytest.approx(1.8, rel=0.1)
    assert max(abs(each.corrected_s / each.point.seconds - 1) for each in done.rows) < 0.03
    assert (done.tokens, done.sequences, done.cells) == (512, 32, 33280)


def test_rows_that_the_profile_predicts_leave_it_as_it_is():
    same = Factors(np.zeros(17), np.zeros(17))
    rows = [row(r.kind, same, prompt=r.prompt, new=r.new, depth=r.depth, sequences=r.sequences) for r in ROWS]
    done = correct(PROFILE, PHYSICS, LIMITS, rows)
    assert np.abs(done.factors.logs).max() < 1e-6
    assert max(done.left_out_errors) < 1e-6


def test_few_rows_leave_alone_what_they_do_not_tell_of():
    done = correct(PROFILE, PHYSICS, LIMITS, [ROWS[2]])
    assert done.factors.work([1])[0] == pytest.approx(1.2, rel=0.03)
    assert done.factors.work([512])[0] == pytest.approx(1.0, abs=0.03)
    assert not any([done.factors.tells_of(512), done.factors.tells_of_decode, done.factors.tells_of_prompt])
    assert not len(done.left_out_errors)
    assert done.profile.held_out_samples == 0, "no error is that of the profile before"


def test_no_row_moves_nothing():
    found = Rows([], np.empty(0), np.empty(0)).fit()
    assert np.abs(found.logs).max() == 0
    assert found.told == pytest.approx(1.0)


def test_rows_that_tell_the_same_are_left_out_together():
    slow = replace(ROWS[0], seconds=2 * ROWS[0].seconds)
    done = correct(PROFILE, PHYSICS, LIMITS, [ROWS[0], slow, ROWS[2]])
    first, second, _ = done.rows
    assert first.left_out_s == second.left_out_s
    assert first.left_out_s == pytest.approx(first.estimate_s, rel=0.05)


@pytest.mark.slow
def test_corrected_tables_never_beat_physics():
    done = correct(PROFILE, PHYSICS, LIMITS, [replace(each, seconds=each.seconds / 20) for each in ROWS])
    assert all(each.too_fast for each in done.rows)
    after = PartPrices(done.profile, PHYSICS)
    for one in (Pass(1, singles=1, cells=1.0), Pass(1, singles=32, cells=4096.0), Pass(1, ((512, 512),))):
        assert after.seconds([one]) >= after.parts([one]).least_s * (1 - 1e-9)


def test_servers_under_load_tell_of_batches():
    rows = [
        row("serve", set_up=SERVED, sequences=n, prompt=512, new=128, prompts_per_step=n / 128) for n in (1.0, 12.4)
    ]
    done = correct(PROFILE, PHYSICS, LIMITS, rows)
    assert done.factors.tells_of(1)
    assert done.factors.tells_of(16)
    assert max(abs(each.corrected_s / each.point.seconds - 1) for each in done.rows) < 0.03


def test_a_rotation_of_rows_gives_the_same():
    one = correct(PROFILE, PHYSICS, LIMITS, ROWS).factors.logs
    other = correct(PROFILE, PHYSICS, LIMITS, ROWS[3:] + ROWS[:3]).factors.logs
    assert one == pytest.approx(other, abs=1e-5)
