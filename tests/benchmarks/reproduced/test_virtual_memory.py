"""The direction of what docs/reproduced.md says of virtual memory, on a small version."""

import sys

import numpy as np
import pytest

from benchmarks.reproduced import mapped_pages
from benchmarks.reproduced.virtual_memory import KIB, OUTPUTS, page_tokens, paged, served


def test_a_page_holds_as_many_tokens_as_the_formula_says():
    sizes = 64 * KIB, 2048 * KIB
    assert [page_tokens("llama-3-8b", page) for page in sizes] == [32, 1024]
    assert [page_tokens("llama-3-8b", page, tensor_parallel=2) for page in sizes] == [64, 2048]
    assert [page_tokens("llama-2-7b", page) for page in sizes] == [8, 256]


@pytest.mark.slow
def test_large_pages_waste_more_and_most_are_found_mapped():
    small, large = (
        served("virtual-memory.toml", 1, workload__requests=50, cache__page_tokens=tokens) for tokens in (32, 1024)
    )
    assert small.internal < 0.05 < large.internal
    few, many = (served("virtual-memory-overlap.toml", 1, workload__requests=n) for n in (65, 130))
    assert few.found < 0.3 < many.found
    assert many.waited < many.at_once < few.at_once < 0.1


def test_one_run_is_read_faster_than_a_table_and_most_so_while_decoding():
    gains = []
    for output in (OUTPUTS[500], OUTPUTS[50]):
        keys = {"workload__requests": 8, "workload__output_tokens": {"kind": "fixed", "value": output}}
        file = "virtual-memory-cpu.toml"
        gains.append(served(file, 1, **keys).throughput / paged(file, 1, **keys))
    assert 1.0 < gains[0] < gains[1]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are mapped on Linux only")
def test_passes_and_mappings_are_timed():
    table, ranges = mapped_pages.passes(200, 2, repeats=2, each=1)
    assert len(table) == len(ranges) == 2
    assert all(us > 0 for us in mapped_pages.mapping_us(512, repeats=2))
    view = mapped_pages.batch_of(200, 2).views[0]
    assert len(np.unique(view.cells)) == 200
