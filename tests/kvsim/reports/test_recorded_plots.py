"""The figure of recorded servers."""

import pytest

from kvsim.engines.recordings.validation import validate_recorded
from tests.kvsim.engines.recordings import write
from tests.kvsim.engines.recordings.servers import PROFILE, recorded
from tests.kvsim.engines.recordings.stepped_servers import KNOWN, Asked, asked, llama_recording, vllm_recording

PANELS = 6


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """A row of llama-server with its steps, then one of vLLM with its steps."""
    ask = Asked(asked(30), pace=lambda at_s: 1.3 if at_s > 6 else 1.0)
    folder = tmp_path_factory.mktemp("recorded")
    paths = [write(folder / f"{i}.jsonl", make(ask)) for i, make in enumerate((llama_recording, vllm_recording))]
    return validate_recorded(paths, KNOWN)


def texts(axis):
    return {text.get_text() for text in axis.texts}


@pytest.mark.slow
def test_a_row_for_each_recording(figure):
    axes = figure.plot().axes
    assert len(axes) == 2 * PANELS
    assert [axis.get_ylabel().partition("\n")[0] for axis in axes[::PANELS]] == ["0", "1"]


def test_the_pace_and_the_steps_that_are_compared(figure):
    for run, axis in zip(figure.runs, figure.plot().axes[PANELS - 1 :: PANELS], strict=True):
        lines = {line.get_label(): line.get_xydata() for line in axis.lines}
        assert set(lines) == {"decode", "prompt", "pace"}
        compared = run.steps.set_index("kind")["steps"]
        assert (len(lines["decode"]), len(lines["prompt"])) == (compared["decode"], compared["mixed"])
        assert len(lines["pace"]) == len(run.recording.steps)
        low, high = axis.get_ylim()
        assert low < 1.0 < 1.3 < high
        assert lines["pace"][-1, 1] == pytest.approx(1.3, abs=0.02)


@pytest.mark.slow
def test_one_disturbed_step_does_not_hide_the_others(tmp_path):
    lines = vllm_recording(Asked(asked(40)))
    step = [line for line in lines if line["type"] == "step"][101]
    step["exec"] *= 100
    (axis,) = validate_recorded(write(tmp_path / "a.jsonl", lines), KNOWN).plot().axes[PANELS - 1 :]
    assert axis.get_ylim()[1] < 3


@pytest.mark.slow
def test_what_was_not_recorded_is_said(figure, tmp_path):
    llama, vllm = figure.plot().axes[:PANELS], figure.plot().axes[PANELS:]
    assert [texts(axis) == {"not recorded"} for axis in llama] == [False, False, False, True, True, False]
    assert not any(texts(axis) == {"not recorded"} for axis in vllm)
    plain = validate_recorded(write(tmp_path / "plain.jsonl", recorded()), PROFILE).plot().axes
    assert [texts(axis) == {"not recorded"} for axis in plain] == [False, False, False, False, False, True]


def test_labels_stay_inside(figure):
    for axis in (*figure.plot().axes[3:5], *figure.plot().axes[PANELS + 3 : PANELS + 5]):
        for line in axis.lines:
            assert axis.get_ylim()[0] < line.get_ydata().min()
            assert line.get_ydata().max() < axis.get_ylim()[1]
