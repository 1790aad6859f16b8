"""Tables and fits of llama.cpp studies, from synthetic measurements; real ones are in
``tests/real_engine/llamacpp``."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.llama_studies import studies
from benchmarks.llama_studies.results import Defragmentation, Holes, KShift
from benchmarks.llama_studies.studies import CACHES, PASSES, SPANS
from benchmarks.llama_studies.timing import MoveCount, count_moves
from kvsim.errors import UserError
from kvsim.installation import install_extra
from real_engine.llama_cells import StreamCells

HOLES_BASE_S, HOLES_CELL_S = 10e-3, 4e-6
BASE_S, RUN_S, CELL_S = 0.4e-3, 150e-6, 5e-6
ROUNDS = 11


def synthetic(kind, rows, *rest, noise=0.0, cpu_share=1.0):
    """A study of the given measurements with uniform noise in each round."""
    rng = np.random.default_rng(1)
    samples = pd.DataFrame([{"round": r, **row} for r in range(ROUNDS) for row in rows])
    samples["seconds"] *= 1 + noise * rng.uniform(-1, 1, len(samples))
    return kind("model.gguf", "llama-cpp-python 0", "A", 30, 1, cpu_share, samples, *rest)


def holes(**kwargs):
    rows = []
    for flash in (False, True):
        for span in SPANS:
            for place, n_kv in (("low", 256), ("high", span)):
                seconds = HOLES_BASE_S + (0 if flash else HOLES_CELL_S * n_kv)
                rows.append({"flash_attention": flash, "span": span, "place": place, "n_kv": n_kv, "seconds": seconds})
    return synthetic(Holes, rows, 128, **kwargs)


def defragmentation(**kwargs):
    rows = [
        {"runs": runs, "cells": runs * cells, "seconds": BASE_S + RUN_S * runs + CELL_S * runs * cells}
        for runs, cells in PASSES
    ]
    return synthetic(Defragmentation, rows, **kwargs)


def shift(**kwargs):
    rows = [
        {"cells": cells, "shifts": shifts, "seconds": 1e-3 + 8e-6 * cells * shifts}
        for cells in CACHES
        for shifts in (False, True)
    ]
    return synthetic(KShift, rows, 128, **kwargs)


def cells(text, positions=None):
    """A dump from a letter for each used cell, its sequence; positions rise within each sequence unless given."""
    owner = np.array([-1 if c == "." else ord(c) - ord("a") for c in text])
    if positions is None:
        positions = [text[:i].count(c) if c != "." else -1 for i, c in enumerate(text)]
    return StreamCells(0, 0, int((owner >= 0).sum()), np.array(positions), owner)


def test_a_known_ratio_and_cell_cost_are_recovered():
    study = holes()
    table = study.table.set_index(["flash_attention", "span"])
    expected = (HOLES_BASE_S + 4096 * HOLES_CELL_S) / (HOLES_BASE_S + 256 * HOLES_CELL_S)
    row = table.loc[(False, 4096)]
    assert row["ratio"] == pytest.approx(expected)
    assert row["ratio_low"] == pytest.approx(expected)
    assert row["ratio_high"] == pytest.approx(expected)
    assert (row["low_n_kv"], row["high_n_kv"]) == (256, 4096)
    assert study.per_cell_s(False).value == pytest.approx(HOLES_CELL_S)
    assert study.per_cell_s(True).value == pytest.approx(0, abs=1e-12)
    assert table.loc[True]["ratio"].to_numpy() == pytest.approx(1)
    assert "without flash attention: at the top of 4,096 cells x2." in study.summary


def test_intervals_contain_the_true_value_and_narrow_with_the_noise():
    wide, narrow = holes(noise=0.1).per_cell_s(False), holes(noise=0.01).per_cell_s(False)
    for interval in (wide, narrow):
        assert interval.low <= HOLES_CELL_S <= interval.high
        assert interval.low <= interval.value <= interval.high
    assert narrow.half_width < wide.half_width / 3
    assert holes(noise=0.1).per_cell_s(False) == wide


def test_known_costs_of_a_pass_a_run_and_a_cell_are_recovered():
    study = defragmentation()
    found = [study.base_s.value, study.per_run_s.value, study.per_cell_s.value]
    assert found == pytest.approx([BASE_S, RUN_S, CELL_S])
    assert study.table["error"].to_numpy() == pytest.approx(0, abs=1e-9)
    single = study.table[study.table["cells"] == study.table["runs"]].query("runs > 0")
    assert single["each_run_s"].to_numpy() == pytest.approx(RUN_S + CELL_S)
    assert np.isnan(study.table.query("runs == 0")["each_run_s"]).all()

    noisy = defragmentation(noise=0.05)
    for interval, true in ((noisy.base_s, BASE_S), (noisy.per_run_s, RUN_S), (noisy.per_cell_s, CELL_S)):
        assert interval.low < true < interval.high


def test_deviations_from_the_fit_show_and_the_fullest_passes_are_not_fitted():
    for full, runs in ((True, 45), (False, 32)):
        samples = defragmentation().samples
        samples.loc[samples["runs"] == runs, "seconds"] *= 2
        study = Defragmentation("m", "l", "A", 30, 1, 1.0, samples)
        table = study.table.set_index("runs")
        assert table["error"].idxmin() == runs
        assert (study.per_run_s.value == pytest.approx(RUN_S)) is full
        assert not table.loc[45, "in_fit"]
        assert table.drop(index=45)["in_fit"].all()
        assert ("largest 0%" in study.summary) is full


def test_a_shift_costs_the_difference_of_steps_with_and_without():
    table = shift().table
    assert table["cells"].tolist() == list(CACHES)
    assert table["seconds"].to_numpy() == pytest.approx([8e-6 * c for c in CACHES])
    assert "of 128 tokens takes 2.05 ms for 256 cells" in shift().summary


@pytest.mark.slow
@pytest.mark.parametrize(("study", "panels"), [(holes, 1), (defragmentation, 2), (shift, 1)])
def test_plots_are_drawn_and_say_when_the_machine_was_busy(study, panels, tmp_path):
    for share, busy in ((1.0, False), (0.5, True)):
        measured = study(noise=0.02, cpu_share=share)
        figure = measured.plot()
        figure.savefig(tmp_path / "it.png")
        assert len(figure.axes) == panels
        titles = [figure.get_suptitle(), *(axis.get_title() for axis in figure.axes)]
        assert measured.busy is busy
        assert ("BUSY MACHINE" in measured.summary) is busy
        assert any("BUSY MACHINE: it got 50%" in title for title in titles) is busy


def test_holes_can_be_drawn_on_a_given_axis():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots(1, 2)
    assert holes().plot(axes[1]) is figure
    assert not axes[0].lines
    assert axes[1].lines


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (cells("aabb"), cells("aabb"), MoveCount(0, 0)),
        (cells("..abbb", [-1, -1, 0, 0, 1, 2]), cells("bbab..", [1, 2, 0, 0, -1, -1]), MoveCount(1, 2)),
        # Two holes of a cell each; the second is filled from the cells before.
        (cells(".a.abb", [-1, 0, -1, 1, 0, 1]), cells("baba..", [1, 0, 0, 1, -1, -1]), MoveCount(2, 2)),
        # Contiguous before, but not after.
        (cells(".a.abb", [-1, 0, -1, 1, 0, 1]), cells("baba..", [0, 0, 1, 1, -1, -1]), MoveCount(2, 2)),
    ],
)
def test_runs_that_were_moved_are_counted(before, after, expected):
    assert count_moves(before, after) == expected


def refused(call):
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_invalid_requests_are_refused_in_one_line(tmp_path):
    model = str(tmp_path / "some.gguf")
    for measure in (studies.measure_holes, studies.measure_defragmentation, studies.measure_shift):
        assert "needs a GGUF file" in refused(lambda measure=measure: measure("tiny"))
        assert "rounds is 0" in refused(lambda measure=measure: measure(model, rounds=0))
        assert "threads is -1" in refused(lambda measure=measure: measure(model, threads=-1))


@pytest.mark.slow
def test_what_the_measuring_process_refuses_is_told_in_one_line(tmp_path):
    model, folder = str(tmp_path / "some.gguf"), tmp_path / "broken"
    assert "no llama_cpp in it" in refused(lambda: studies.measure_holes(model, library=tmp_path))
    (folder / "llama_cpp").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text("import a_package_that_does_not_exist")
    message = refused(lambda: studies.measure_shift(model, library=folder))
    assert "cannot be imported" in message
    assert message.endswith(f"install it with: {install_extra('llama')}")


def test_invalid_sizes_are_named():
    assert "a span of 300 cells" in refused(lambda: studies.measure_holes("x.gguf", spans=[256, 300]))
    assert "a cache of 0 cells" in refused(lambda: studies.measure_shift("x.gguf", cells=[0]))
    assert "nothing to measure" in refused(lambda: studies.measure_holes("x.gguf", spans=[]))
    assert "2 runs of 0 cells" in refused(lambda: studies.measure_defragmentation("x.gguf", passes=[(2, 0)]))
    few = [(0, 0), (1, 1), (1, 2)]
    assert "one of them with several runs" in refused(lambda: studies.measure_defragmentation("x.gguf", passes=few))
