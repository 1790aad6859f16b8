"""Calibrations that are refused: the cause that is named, and what the user can still do with them."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import kvsim
from kvsim.calibration.outcome import likely_cause
from kvsim.calibration.run import measure
from kvsim.costs.profile import Pace
from tests.kvsim.calibration.drifting import TRUTH, DriftingClock, DriftingSubject
from tests.worlds import command

pytestmark = pytest.mark.slow

SLOW, STEADY = Pace(p5=0.7, p50=1.0, p95=1.4, window_s=0.2), Pace(p5=0.98, p50=1.0, p95=1.02, window_s=1e6)


def held_out(**errors):
    """Thirty passes of each class, off by as much as given."""
    rows = []
    for name, error in errors.items():
        kernel, kind = name.split("_")
        tokens, chunks = (8, 8) if kind == "decodes" else (64, 1)
        rows += [(kernel, tokens, chunks, True, 1.0, 1 + error * sign) for sign in (-1, 1) for _ in range(15)]
    return pd.DataFrame(rows, columns=["kernel", "tokens", "chunks", "mixed", "measured_s", "predicted_s"])


def profile(share=1.0, pace=STEADY, error=0.15):
    machine = TRUTH.machine.model_copy(update={"cpu_share": share})
    return TRUTH.model_copy(update={"machine": machine, "pace": pace, "held_out_error_median": error})


EVEN = {"masked_decodes": 0.15, "masked_prompts": 0.15, "gather_decodes": 0.15}


@pytest.mark.parametrize(
    ("of", "errors", "scatter", "cause"),
    [
        (profile(share=0.92), EVEN, 0.01, "other work had 8% of the core"),
        (
            profile(pace=STEADY),
            EVEN,
            0.14,
            "an unsteady machine: the same pass, timed again and again, took 86% to 114% of its usual time; stop",
        ),
        (profile(), EVEN, 14.93, "took up to 16 times its usual time; stop other programs on it, or measure when"),
        (profile(pace=SLOW), EVEN, 0.14, "time, and the machine's pace was between 0.70 and 1.40 of its median; stop"),
        (profile(pace=SLOW), EVEN, 0.02, "the machine's pace changed between 0.70 and 1.40 of its median"),
        (profile(), EVEN | {"masked_prompts": 0.4}, 0.02, "since masked prompts are off by 40% and the rest by 15%"),
        (profile(), EVEN, None, "no single cause stands out"),
    ],
)
def test_the_likeliest_cause_is_named_with_its_evidence(of, errors, scatter, cause):
    assert cause in likely_cause(of, held_out(**errors), scatter)


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    """In an empty folder, calibrations of a machine so noisy that no fit meets the bound; counts them."""
    monkeypatch.chdir(tmp_path)
    runs = []

    def pretended(*_, seconds, name, journal, report, **__):
        clock = DriftingClock(noise=0.3)
        runs.append(clock)
        done = measure(DriftingSubject(clock), seconds=seconds, name=name, journal=journal, report=report, clock=clock)
        here = done.profile.machine.model_copy(update={"processor": kvsim.machine.processor()})
        return replace(done, profile=done.profile.model_copy(update={"machine": here}))

    monkeypatch.setattr("kvsim.calibration.run.calibrate", pretended)
    return runs


def test_a_refused_profile_is_kept_apart_and_can_be_used_or_saved_after_the_fact(noisy, tmp_path):
    refused = command("calibrate", "--seconds", "5")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("kvsim: not saved as tiny.profile.json: the median held-out error is ")
    assert "an unsteady machine: the same pass, timed again and again, took" in line
    assert "It is in tiny.profile.refused.json" in line
    files = {"tiny.calibration.png", "tiny.profile.json.part", "tiny.profile.refused.json"}
    assert {p.name for p in tmp_path.iterdir()} == files

    used = command("run", "chat", "--requests", "5", "--profile", "tiny.profile.refused.json")
    assert used.returncode == 0
    assert "profile tiny was refused when it was measured: the median held-out error is" in used.stderr

    saved = command("calibrate", "--seconds", "5", "--force")
    assert saved.returncode == 0, saved.stderr
    assert saved.stdout.startswith("Saved tiny.profile.json, as it was measured before.")
    assert len(noisy) == 1, "nothing was measured anew"
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.calibration.png", "tiny.profile.json"}
    assert json.loads((tmp_path / "tiny.profile.json").read_text())["refused"] is None
    assert "refused" not in command("run", "chat", "--requests", "5", "--profile", "tiny.profile.json").stderr


def test_a_refused_profile_of_something_else_is_not_taken(noisy, tmp_path):
    assert command("calibrate", "--seconds", "5").returncode == 1
    other = command("calibrate", "--seconds", "5", "--force", "--cache-type-k", "f16", "--json")
    assert other.returncode == 0, other.stderr
    assert len(noisy) == 2


def test_calibrating_again_after_a_refusal_measures_on(noisy):
    assert command("calibrate", "--seconds", "5").returncode == 1
    again = command("calibrate", "--seconds", "5", "--bound", "0.9")
    assert again.returncode == 0, again.stderr
    assert "measurements of an earlier call included" in again.stdout


def test_a_profile_from_before_the_pace_was_looked_at_is_read():
    assert (TRUTH.pace, TRUTH.refused, TRUTH.held_out_error_median_without_pace) == (None, None, None)
    assert np.isfinite(TRUTH.matmul_slopes_s[-1].value)
