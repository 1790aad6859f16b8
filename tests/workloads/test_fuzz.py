"""Coverage-guided fuzzing of the readers, for a few seconds; see ``tests/workloads/fuzz/fuzz_readers.py``."""

import importlib.util
import subprocess
import sys

import pytest

from tests.paths import ROOT

SECONDS = 6


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris (the extra fuzz)")
@pytest.mark.parametrize("group", ["csv", "jsonl", "packed", "parquet"])
def test_readers_read_or_refuse_whatever_they_are_given(tmp_path, group):
    if group == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    # A process inherits the peak memory of its parent, which libFuzzer would count. This process has run other tests,
    # so a shell is started in between.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    arguments = [*shell, sys.executable, "-m", "tests.workloads.fuzz.fuzz_readers", group, "--seconds", str(SECONDS)]
    done = subprocess.run(
        arguments, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr
