"""The pace of a run by every other of its steps, and the errors of the others."""

import numpy as np
import pytest

from kvsim.engines.recordings.run_pace import PacedServer, RunPace, StepTimes, step_errors


def times(pace, n=200, mixed_pace=1.0, seed=None):
    """Steps of 0.1 s, each tenth with a prompt, at a pace over time."""
    at = 0.1 * np.arange(n)
    mixed = np.arange(n) % 10 == 3
    fitting = np.zeros(n, dtype=bool)
    for kind in (True, False):
        fitting[np.flatnonzero(mixed == kind)[::2]] = True
    noise = 1.0 if seed is None else np.exp(np.random.default_rng(seed).normal(0, 0.1, n))
    predicted = np.where(mixed, 0.3, 0.1)
    measured = predicted * np.array([pace(t) for t in at]) * np.where(mixed, mixed_pace, 1.0) * noise
    return StepTimes(at, measured, predicted, mixed, fitting)


def test_a_change_of_pace_is_followed():
    found = RunPace(times(lambda t: 1.5 if 8 <= t < 14 else 1.0))
    assert found.window_s == 0.8
    assert found.at([2.0, 11.0, 18.0], [False] * 3) == pytest.approx([1.0, 1.5, 1.0], abs=0.01)


def test_noise_is_smoothed_over_the_widest_window():
    found = RunPace(times(lambda _: 1.2, seed=1))
    assert found.window_s > 6
    assert found.at([2.0, 11.0], [False] * 2) == pytest.approx([1.2] * 2, rel=0.03)


def test_prompts_have_a_pace_beside_that_of_decodes():
    found = RunPace(times(lambda _: 1.2, mixed_pace=1.1))
    assert found.at([5.0, 5.0], [False, True]) == pytest.approx([1.2, 1.32])


def test_one_step_that_was_disturbed_is_no_pace():
    disturbed = times(lambda _: 1.0)
    disturbed.measured_s[disturbed.fitting.nonzero()[0][30]] *= 50
    assert RunPace(disturbed).at(disturbed.start_s, disturbed.mixed) == pytest.approx(1.0, abs=0.05)


def test_errors_are_of_the_steps_that_do_not_tell():
    each = times(lambda _: 1.25)
    each.measured_s[each.fitting] *= 1.6  # What tells is not what is compared.
    table = step_errors(each, None).set_index("kind")
    assert table["steps"].to_dict() == {"all": 100, "decode": 90, "mixed": 10}
    assert table["error"].tolist() == pytest.approx([-0.2] * 3)
    assert table["spread"].tolist() == pytest.approx([0.2] * 3)
    assert (table["at_pace"] == table["error"]).all()
    paced = step_errors(times(lambda _: 1.25), RunPace(times(lambda _: 1.25))).set_index("kind")
    assert paced["at_pace"].tolist() == pytest.approx([0.0] * 3, abs=1e-9)
    assert paced["error"].tolist() == pytest.approx([-0.2] * 3)


def test_kinds_without_steps_have_no_row():
    each = times(lambda _: 1.0)
    only = StepTimes(
        *(values[~each.mixed] for values in (each.start_s, each.measured_s, each.predicted_s, each.mixed, each.fitting))
    )
    assert step_errors(only, RunPace(only))["kind"].tolist() == ["all", "decode"]


def test_all_that_a_server_does_is_slower_at_its_pace():
    class Inner:
        def step(self, step, batches):
            return [0.5] * len(batches)

        def move(self, moves):
            return 1.0

        transfer = copy = move

    class Batch:
        def __init__(self, n_tokens):
            self.n_tokens, self.chunks = n_tokens, [None]

    pace = RunPace(times(lambda t: 2.0 if t > 10 else 1.0, mixed_pace=1.5))
    now = [2.0]
    paced = PacedServer(Inner(), pace, lambda: now[0])
    assert paced.step([], [Batch(1)]) == pytest.approx([0.5])
    assert paced.step([], [Batch(1), Batch(9)]) == pytest.approx([0.75, 0.75])
    now[0] = 18.0
    assert paced.step([], [Batch(1)]) == pytest.approx([1.0])
    assert [paced.move(None), paced.transfer(()), paced.copy(())] == pytest.approx([2.0] * 3)
    assert paced.price is None  # Else steps would be taken ahead of their pace.
