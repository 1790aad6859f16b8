"""The page about benchmarks shows what the command prints."""

import re
from dataclasses import replace

import numpy as np
import pytest

from kvsim.calibration.bench_calibration import calibrate_from, calibrate_profile, physics_of
from kvsim.calibration.bench_passes import PartPrices
from kvsim.calibration.bench_subject import BenchOptions
from kvsim.reports.report import report_of
from tests.docs.pages import DOCS, blocks
from tests.kvsim.calibration.test_bench_calibration import DEVICES, MODELS, corrected
from tests.paths import ROOT

POINTS = 1.0
"""Percentage points by which corrected figures may have moved with the estimate that they start from."""


@pytest.fixture(scope="module")
def done():
    file = ROOT / "examples" / "benchmarks" / "m2-ultra.md"
    return calibrate_from([file], BenchOptions(model="qwen2.5-7b", device="m2-ultra"))


@pytest.mark.slow
def test_the_rows_on_the_page_are_those_of_the_example(done):
    table, _ = report_of(done).sections[0].tables
    printed = {cells[0].text: [cell.text for cell in cells[1:]] for cells in table.cells}
    shown = re.findall(r"^(\S.*?) +(\S+ m?s) +(\S+)% +(\S+)% +(\S+)%$", blocks("your-benchmarks.md", "text")[0], re.M)
    assert len(shown) == 6
    for row, measured, _, after, left_out in shown:
        assert printed[row][0] == measured
        for said, now in zip((after, left_out), printed[row][2:], strict=True):
            assert float(said) == pytest.approx(float(now.rstrip("%")), abs=POINTS)


def test_the_errors_on_the_page_are_those_of_the_example(done):
    (said,) = re.findall(r"within ±(\S+)% \(median\) and ±(\S+)% \(P90\)", blocks("your-benchmarks.md", "text")[0])
    found = done.profile.corrected
    assert [float(each) for each in said] == pytest.approx([100 * found.error_median, 100 * found.error_p90], abs=0.3)
    assert found.by == "llama-bench b7948, llama-batched-bench (m2-ultra.md)"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_errors_of_real_devices_are_those_of_the_page(tmp_path, model):
    page = (DOCS / "your-benchmarks.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| `{re.escape(model)}`[^|]* \| (.*) \|$", page, re.M)[1].split(" | ")
    found = [corrected(tmp_path, device, model).correction.left_out_errors for device in DEVICES]
    now = [100 * np.quantile(errors, q) for errors in found for q in (0.5, 0.9)]
    assert [float(cell.rstrip(" %")) for cell in cells] == pytest.approx(now, abs=POINTS)


FEW = {
    "`pp512` and `tg32`, one sequence": lambda point: point.sequences == 1 and 512 in (point.prompt, point.depth),
    "one sequence, at 512 and at 8,192 cells": lambda point: (
        point.sequences == 1 and {512, 8192} & {point.prompt, point.depth}
    ),
    "1 to 32 sequences, at 512 cells": lambda point: 512 in (point.prompt, point.depth),
}


@pytest.mark.slow
def test_what_few_rows_tell_is_what_the_page_says(tmp_path):
    page = (DOCS / "your-benchmarks.md").read_text(encoding="utf-8")
    whole = [corrected(tmp_path, device, model) for device in DEVICES for model in MODELS]
    for title, read in FEW.items():
        errors = {"prompt": [], "decode": []}
        for done in whole:
            points = [row.point for row in done.correction.rows]
            few = calibrate_profile(done.starting, replace(done.subject, points=[p for p in points if read(p)]))
            prices = PartPrices(few.profile, physics_of(done.starting, done.subject))
            for point, passes in zip(points, done.correction.passes, strict=True):
                if not read(point):
                    errors[point.kind].append(abs(prices.seconds(passes) / point.seconds - 1))
        cells = re.search(rf"^\| {re.escape(title)} \| (.*) \|$", page, re.M)[1].split(" | ")
        now = [100 * np.median(each) for each in errors.values()]
        assert [float(cell.rstrip(" %")) for cell in cells] == pytest.approx(now, abs=3 * POINTS), title
