"""The page about benchmarks shows what the command prints."""

import re

import numpy as np
import pytest

from kvsim.calibration.bench_calibration import calibrate_from
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


@pytest.mark.parametrize("model", MODELS)
def test_the_errors_of_real_devices_are_those_of_the_page(tmp_path, model):
    page = (DOCS / "your-benchmarks.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| `{re.escape(model)}`[^|]* \| (.*) \|$", page, re.M)[1].split(" | ")
    found = [corrected(tmp_path, device, model).correction.left_out_errors for device in DEVICES]
    now = [100 * np.quantile(errors, q) for errors in found for q in (0.5, 0.9)]
    assert [float(cell.rstrip(" %")) for cell in cells] == pytest.approx(now, abs=POINTS)
