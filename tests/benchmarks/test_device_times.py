"""The efficiencies that ship are those that the published measurements in the repository give."""

import pandas as pd
import pytest

from benchmarks.device_times import partly_on_cpu
from benchmarks.device_times.fit_llamacpp import Fit
from benchmarks.device_times.llamacpp_rows import FOLDER, rows
from benchmarks.device_times.no_flash_attention import unfused
from kvsim.costs.cpu_layers import ERRORS
from kvsim.costs.efficiency import efficiencies
from kvsim.errors import counted


@pytest.fixture(scope="module")
def table():
    return rows()


@pytest.mark.slow
@pytest.mark.parametrize("make", sorted(efficiencies()["llamacpp"]))
def test_llama_cpp_reaches_what_is_published(table, make):
    own = table[table["make"] == make]
    shipped = efficiencies()["llamacpp"][make]
    found = Fit(own).efficiency(shipped.errors, shipped.source)
    assert f"({len(own)} of {counted(own['device'].nunique(), 'device')} with" in shipped.source
    for part in ("matrices", "experts"):
        for group, one in getattr(shipped, part).items():
            again = getattr(found, part)[group].model_dump()
            assert again == pytest.approx(one.model_dump(), rel=0.02, abs=1e-7), (part, group)
    assert found.decode.model_dump() == pytest.approx(shipped.decode.model_dump(), rel=0.02, abs=1e-7)


@pytest.mark.parametrize("name", ["llama_bench.csv", "batched_bench.csv"])
def test_each_row_says_where_it_is_from(name):
    table = pd.read_csv(FOLDER / name)
    assert table["source"].notna().all()
    assert table["licence"].notna().all()


def test_errors_with_layers_on_the_cpu_are_those_that_are_quoted(tmp_path):
    table = pd.read_csv(partly_on_cpu.FILE)
    assert partly_on_cpu.found(table.assign(error=partly_on_cpu.errors(table, tmp_path))) == ERRORS


@pytest.mark.slow
@pytest.mark.parametrize("make", ["nvidia", "apple", "amd"])
def test_attention_without_flash_attention_is_as_published(make):
    shipped = efficiencies()["llamacpp"][make]
    found = unfused(make, shipped.decode.layer_s)
    for part in ("decode", "prompt"):
        assert getattr(found, part).model_dump() == pytest.approx(getattr(shipped.unfused, part).model_dump(), rel=1e-2)
    assert (found.decode_median, found.prompt_median) == pytest.approx(
        (shipped.unfused.decode_median, shipped.unfused.prompt_median), abs=0.01
    )
