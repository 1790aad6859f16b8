"""Without vLLM, its recording says so; it is proven where vLLM is."""

import importlib.util

import pytest

from benchmarks.gpu import vllm
from tests.test_benchmarks import ran


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this Python has vllm")
def test_a_python_without_vllm_is_told_in_a_line(tmp_path):
    done = ran(vllm.main, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "has no vllm; run this with a Python that has it" in done.output
    assert not (tmp_path / "out").exists()
