"""Calibrations on machines whose pace drifts, with budgets that hold: on a clock that only the machine advances."""

from collections import Counter

import numpy as np
import pytest

from kvsim.calibration.journal import Journal
from kvsim.calibration.outcome import HELD_OUT_BOUND
from kvsim.calibration.pace import PaceCurve, Tick, Windows, choose_windows, median_seconds
from kvsim.calibration.pieces import MeasuredPiece, PieceRecorder
from kvsim.calibration.reference_passes import PaceKeeper, PaceMeasuringBackend, ReferencePasses, known_seconds
from kvsim.calibration.run import JournalHeader, measure
from kvsim.calibration.trials import Trial
from kvsim.costs.cost_model import CostModel
from kvsim.costs.fitting import ShiftSample
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies import MicroBatch
from tests.kvsim.calibration.drifting import TRUTH, DriftingClock, DriftingSubject, at_pace
from tests.worlds import GivenTimes

pytestmark = pytest.mark.slow

WINDOWS = Windows(0.1, 10.0)


def calibrated(seconds=60.0, clock=None, **options):
    clock = clock or DriftingClock()
    return measure(DriftingSubject(clock, options.pop("slowness", 1.0)), seconds=seconds, clock=clock, **options)


@pytest.fixture(scope="module")
def drifting():
    return calibrated()


def test_a_pace_that_drifts_twofold_within_seconds_does_not_spoil_the_fit(drifting):
    profile = drifting.profile
    assert profile.pace.spread > 1.5
    assert profile.held_out_error_median_without_pace > HELD_OUT_BOUND
    assert profile.held_out_error_median < 0.06
    assert drifting.refusal() is None
    assert set(drifting.held_out["mixed"]) == {True, False}, "alone and in running servers"


def test_a_steady_pace_costs_nothing():
    profile = calibrated(clock=DriftingClock(drifts=False)).profile
    assert profile.pace.spread < 1.05
    assert profile.held_out_error_median < 1.05 * profile.held_out_error_median_without_pace


@pytest.mark.parametrize("policy", ["contiguous", "paged", "adaptive"])
def test_what_is_fitted_on_a_drifting_machine_predicts_other_traffic(drifting, policy):
    """The scenario was not measured; the truth is taken at the profile's own pace, the median.

    There are cells enough: where a contiguous cache overflows, a difference of 2 % in time may double a latency.
    """
    scenario = load_scenario("bursty", workload__requests=150, cache__cells=12 * 608)
    usual_s = DriftingSubject(DriftingClock()).reference_s
    pace = float(np.mean(np.array(drifting.profile.reference_passes_s) / usual_s))
    found = []
    for costs in (CostModel(at_pace(TRUTH, pace)), CostModel(drifting.profile)):
        built = build_policy(scenario, policy)
        backend = SimulatedBackend(costs, built.kernel, built.groups)
        found.append(drive(scenario, built, backend, Recorder(), None)[0].summary["e2e_s"])
    true, predicted = found
    for statistic in ("p50", "p99"):
        assert predicted[statistic] == pytest.approx(true[statistic], rel=0.05)


@pytest.mark.parametrize("slowness", [0.5, 8.0])
def test_the_budget_holds_on_fast_and_on_slow_machines(slowness):
    clock = DriftingClock()
    calibrated(seconds=15.0, clock=clock, slowness=slowness)
    assert 10 < clock() < 15.75


def test_too_small_a_budget_still_gives_enough_for_a_fit():
    done = calibrated(seconds=0.01)
    assert set(done.profile.kernels) == {"masked", "gather", "sliced", "tiled"}
    assert done.profile.moves is not None


class InterruptedClock(DriftingClock):
    """Somebody presses Ctrl-C at a given time."""

    def __init__(self, at_s):
        super().__init__()
        self._at_s = at_s

    def work(self, seconds):
        if self.now_s >= self._at_s:
            self._at_s = np.inf
            raise KeyboardInterrupt
        return super().work(seconds)


def test_an_interrupt_keeps_what_was_measured(drifting, tmp_path):
    path = tmp_path / "j.part"
    with pytest.raises(KeyboardInterrupt):
        calibrated(clock=InterruptedClock(13.0), journal=path)
    pieces = Journal(path, JournalHeader, MeasuredPiece).entries()
    assert len(pieces) == 3
    assert sum(piece.wall_s for piece in pieces) == pytest.approx(13.0, abs=2.0)
    kept = sum(piece.items for piece in pieces)
    again = calibrated(clock=DriftingClock(), journal=path)
    assert again.resumed == kept > 20
    assert again.rounds > drifting.rounds
    # It went on where it was: no trial has had its turn twice more than another.
    turns = {
        (i, each.trial, each.at_s)
        for i, piece in enumerate(Journal(path, JournalHeader, MeasuredPiece).entries())
        for each in piece.trials
    }
    often = Counter(trial for _, trial, _ in turns).values()
    assert max(often) - min(often) <= 1


def test_a_journal_of_other_conditions_is_not_continued(tmp_path):
    path = tmp_path / "j.part"
    calibrated(seconds=5.0, journal=path)
    text = path.read_text(encoding="utf-8")
    for was, other in {'"model":"tiny"': '"model":"small"', '"type_k":"f32"': '"type_k":"f16"'}.items():
        assert was in text
        path.write_text(text.replace(was, other, 1), encoding="utf-8")
        assert calibrated(seconds=5.0, journal=path).resumed == 0
    # Another version of the program may have drawn other trials.
    header, rest = path.read_text(encoding="utf-8").split("\n", 1)
    path.write_text(header.replace('"trials":', '"trials":1') + "\n" + rest, encoding="utf-8")
    assert calibrated(seconds=5.0, journal=path).resumed == 0


class BusySubject(DriftingSubject):
    """Other work takes the processor for three milliseconds now and then."""

    every_s = 0.02

    def spent(self):
        return self.clock.now_s, self.clock.now_s - self.clock.stolen_s


class StolenClock(DriftingClock):
    """A clock on which other work takes its time."""

    def __init__(self, every_s):
        super().__init__()
        self.stolen_s, self._every_s, self._next_s = 0.0, every_s, every_s

    def work(self, seconds):
        took = super().work(seconds)
        while self.now_s > self._next_s:
            self._next_s += self._every_s
            self.stolen_s += 0.003
            self.now_s += 0.003
            took += 0.003
        return took


def test_what_other_work_disturbs_is_left_out():
    clock = StolenClock(every_s=0.03)
    done = measure(BusySubject(clock), seconds=60.0, clock=clock)
    assert 0.1 < done.left_out < 0.5
    assert done.profile.machine.cpu_share < 0.92
    assert done.refusal() is None
    assert done.profile.held_out_error_median < 0.06


def test_where_most_is_disturbed_the_machine_is_too_busy():
    clock = StolenClock(every_s=0.005)
    done = measure(BusySubject(clock), seconds=20.0, clock=clock)
    assert done.busy
    assert "the machine is busy: other work disturbed" in done.refusal()


def test_the_tables_reach_the_largest_usual_batches(drifting):
    assert drifting.profile.tokens.high == 2048
    assert {512, 1024, 2048} <= set(drifting.profile.matmul_knots)


def ticks(pace, ratio=1.0, n=200, noise=0.0):
    rng = np.random.default_rng(1)
    return [
        Tick(at, (pace(at) * np.exp(noise * rng.standard_normal()), 4 * ratio * pace(at)))
        for at in np.linspace(0, 20, n).tolist()
    ]


def test_the_pace_is_that_of_the_nearest_reference_passes():
    curve = PaceCurve(ticks(lambda at: 1.0 if at < 10 else 2.0), (1.0, 4.0), WINDOWS)
    assert curve.at([2.0, 18.0], [1, 1]) == pytest.approx([1.0, 2.0])


def test_passes_of_few_and_of_many_tokens_have_paces_of_their_own():
    curve = PaceCurve(ticks(lambda _: 1.0, ratio=1.44), (1.0, 4.0), WINDOWS)
    assert curve.at([5.0] * 4, [1, 8, 32, 2048]) == pytest.approx([1.0, 1.2, 1.44, 1.44])


def test_one_disturbed_reference_pass_hardly_counts():
    disturbed = ticks(lambda _: 1.0)
    disturbed[100] = disturbed[100]._replace(seconds=(30.0, 120.0))
    curve = PaceCurve(disturbed, (1.0, 4.0), WINDOWS)
    assert curve.at(disturbed[100].at_s, 1) == pytest.approx(1.0, abs=0.2)


def test_the_window_is_as_wide_as_the_machine_is_steady():
    narrow = choose_windows([ticks(lambda at: 1.5 + 0.5 * np.sin(2 * at))], (1.0, 4.0))
    wide = choose_windows([ticks(lambda _: 1.0, noise=0.05)], (1.0, 4.0))
    assert narrow.level_s < 0.5 < 3 < wide.level_s


def test_the_known_pace_is_the_median():
    stretches = [[Tick(0.0, (1.0, 10.0)), Tick(1.0, (3.0, 20.0))], [Tick(0.0, (2.0, 90.0))]]
    assert median_seconds(stretches) == (2.0, 20.0)


def test_reference_passes_of_older_profiles_are_found_among_the_others():
    assert known_seconds(TRUTH) == (TRUTH.reference_passes_s[2], TRUTH.reference_passes_s[6])
    with pytest.raises(UserError, match="has 3 reference passes, not 2; calibrate anew"):
        known_seconds(TRUTH.model_copy(update={"reference_passes_s": (1.0, 2.0, 3.0)}))


def test_reference_passes_are_not_on_the_servers_clock():
    clock = DriftingClock(drifts=False, noise=0.0)
    runs = []

    def reference(seconds):
        runs.append(seconds)
        return clock.work(seconds)

    passes = ReferencePasses(lambda: reference(0.001), lambda: reference(0.002))
    keeper = PaceKeeper(passes, every_s=0.5, clock=clock, spent=lambda: (clock(), clock()))
    paced = PaceMeasuringBackend(GivenTimes(lambda _: clock.work(0.2)), keeper)
    assert [paced.step((), [MicroBatch((), ())]) for _ in range(7)] == [[0.2]] * 7
    # Before the first step, and then after every half second.
    assert len(keeper.ticks) == 3
    assert keeper.ticks[0].seconds == (0.001, 0.002)
    assert len(paced.stamps) == 7
    assert paced.stamps[0] == pytest.approx(0.105)


@pytest.mark.parametrize(("threads", "kept"), [(1, 0.5), (2, None)])
def test_of_long_passes_the_time_that_others_had_is_taken_off(threads, kept):
    """With several threads it cannot be told: they wait for each other, and that takes the processor too."""
    clock = StolenClock(every_s=0.006)
    keeper = PaceKeeper(ReferencePasses(lambda: 0.1, lambda: 0.1), clock=clock, spent=BusySubject(clock).spent)
    recorder = PieceRecorder(keeper, threads)
    clock._drifts = clock._noise = 0
    recorder.time(0, Trial(ShiftSample(cells=1, seconds=0.0), lambda: clock.work(0.5), before=lambda: 0.0))
    found = [each.seconds for each in recorder.piece(1.0, 1.0).trials]
    assert found == ([] if kept is None else [pytest.approx(kept, rel=0.05)])
    assert recorder.disturbed == (kept is None)
