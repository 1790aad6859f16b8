"""What importing the package costs: SciPy, pandas and pyarrow are loaded only by functions that need them."""

import pytest

from tests.worlds import printed

SLOW = {"scipy", "pandas", "pyarrow"}


@pytest.mark.slow
def test_importing_it_loads_no_slow_package():
    modules = "workloads, kvsim.scenario.scenario, kvsim.scenario.workload_sections"
    told = printed(f"import sys, {modules}; print(*sorted({SLOW!r} & sys.modules.keys()))")
    assert told.split() == []
