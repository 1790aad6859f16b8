"""What importing the package costs: SciPy, pandas and pyarrow are loaded only by functions that need them."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

SLOW = {"scipy", "pandas", "pyarrow"}


@pytest.mark.parametrize("module", ["workloads", "kvsim.scenario.scenario", "kvsim.scenario.workload_sections"])
def test_importing_it_loads_no_slow_package(module):
    program = f"import sys, {module}; print(*sorted({SLOW!r} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
