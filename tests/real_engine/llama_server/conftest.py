"""Fixtures of the tests with a real llama-server: each scenario is run once, and its recording read by all tests."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsim.engines.recordings.llama_server_join import recording
from kvsim.engines.recordings.llama_server_log import read_log
from kvsim.engines.recordings.recording_files import Record, write_recording
from kvsim.model.engine_shapes import gguf_path
from tests.real_engine.llama_server.client import send
from tests.real_engine.llama_server.server import NAMED, running, version
from tests.real_engine.llama_server.traffic import SCENARIOS, Scenario
from tests.real_engine.llamacpp.models import (
    HYBRID_LAYERS,
    STATE_NUMBERS,
    TINY,
    write_hybrid,
    write_recurrent,
    write_windowed,
)

SERVER = Path(named).resolve() if (named := os.environ.get(NAMED)) else None
WINDOW = 64
"""Tokens that the windowed model looks back in half of its layers."""
LIMIT_S = 150.0
"""How long a server may take to load the model, and again to answer; a few seconds are usual."""
_CELL_BYTES = 2 * 2 * TINY["n_kv_heads"] * TINY["d_head"]
"""Bytes of a token in one layer of a tiny model, in f16."""
_HYBRID_LAYERS = HYBRID_LAYERS // 2
SHAPES = {
    "smollm2": {},
    "windowed": {"window": WINDOW, "cell_bytes": TINY["n_layers"] * _CELL_BYTES, "layers": TINY["n_layers"]},
    "hybrid": {
        "cell_bytes": _HYBRID_LAYERS * _CELL_BYTES,
        "layers": _HYBRID_LAYERS,
        # Two tensors in each layer, of which an LFM2 leaves one empty; each with its type and the size of a row.
        "state_bytes": _HYBRID_LAYERS * (4 * STATE_NUMBERS + 2 * 12),
    },
    "recurrent": {"state_bytes": 0},
}
"""What recordings say of a model's caches, by its name."""


def _model(name: str, folder: Path) -> Path:
    """The file of a model, which tiny ones are written into."""
    write = {
        "hybrid": write_hybrid,
        "recurrent": write_recurrent,
        "windowed": lambda path: write_windowed(path, WINDOW),
    }
    return write[name](folder / f"{name}.gguf") if name in write else Path(gguf_path(name))


@dataclass(frozen=True)
class Run:
    """What a server did under a scenario."""

    scenario: Scenario
    path: Path
    records: list[Record]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if SERVER is None and here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"{NAMED} names no llama-server; make test-llama builds one, and runs these tests"
                )
            )


@pytest.fixture(scope="session", params=SCENARIOS, ids=lambda make: make.__name__)
def run(request, tmp_path_factory):
    """A scenario that was just run, and its recording. Where a server was named, one that is missing is an error."""
    assert SERVER.is_file(), f"{NAMED}: there is no {SERVER}"
    scenario = request.param()
    folder = tmp_path_factory.mktemp(scenario.name)
    log, flags = folder / "server.log", ["-t", "1", *scenario.flags]
    model = _model(scenario.model, folder)
    with running(SERVER, model, flags, log, LIMIT_S) as port:
        send(port, scenario.phases, LIMIT_S)
    meta = {
        "name": scenario.name,
        "flags": flags,
        "server": {"version": version(SERVER)},
        "model": {"file": model.name, "bytes": model.stat().st_size, **SHAPES[scenario.model]},
    }
    records = recording(read_log(log), scenario.requests, meta)
    path = folder / f"{scenario.name}.jsonl.gz"
    write_recording(path, records)
    return Run(scenario, path, records)
