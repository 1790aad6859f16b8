"""Recordings of real engines: our policies and schedulers decide what these decided, in every record."""

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.paths import REFERENCE

ENGINE_OF = {"llamacpp": "llamacpp", "llama-server": "llama-server", "vllm": "vllm", "vllm-cpu": "vllm"}
LEAST = {"llamacpp": 101, "llama-server": 11, "vllm": 300, "vllm-cpu": 250}
"""Records in each file, by folder."""
EDGES = {"b04": 3, "b06": 1, "t00": 2, "t03": 1}
"""Tasks that came less than half a millisecond before a step, in recordings of llama-server that have any."""
CASES = [
    pytest.param(path, id=path.name.split(".jsonl")[0], marks=() if folder == "llama-server" else pytest.mark.slow)
    for folder in ENGINE_OF
    for path in sorted((REFERENCE / folder).glob("*.jsonl.gz"))
]


def is_era(folder, name, era):
    """Whether a recording's era is what its folder and name say."""
    if folder == "llama-server":
        return era == "0.6.0-dev"
    if folder == "vllm":
        of = "manager" if name.split("_")[1].startswith("M") else "scheduler"
        return era.startswith(f"0.33.0, {of}") and ("asynchronous" in era) == ("_async" in name)
    if folder == "vllm-cpu":
        kinds = {"untimed": "in process", "async": "server, asynchronous"}
        return era == f"0.32.0, {kinds.get(name.split('_')[0], 'server')}"
    return era == name[0].upper()


@pytest.mark.slow
@pytest.mark.skipif(not CASES, reason=f"no recordings in {REFERENCE.name}/ beside the project")
@pytest.mark.parametrize("path", CASES)
def test_every_record_of_a_real_engine_agrees(path):
    folder = path.parent.name
    found = ENGINES[ENGINE_OF[folder]](path)
    assert (found.agree, found.first, found.file) == (found.total, None, path.name)
    assert found.total >= LEAST[folder]
    assert is_era(folder, path.name, found.era)
    assert len(found.excused) == (EDGES.get(path.name[:3], 0) if folder == "llama-server" else 0)
