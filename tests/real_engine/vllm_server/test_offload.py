"""What the real vLLM decides of chunks in host memory, and of prompts on other servers, is what is decided here, under
settings that are drawn."""

import os
import random
import subprocess

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.paths import ROOT
from tests.real_engine.vllm_server.conftest import PYTHON
from tests.real_engine.vllm_server.model import write_model
from tests.real_engine.vllm_server.server import SETTINGS

pytestmark = pytest.mark.slow
DRAWN = {
    "num_blocks": (26, 32, 40),
    "caching": (1, 1, 1, 0),
    "slowest": (2, 4, 8),
    "max_out": (20, 60),
}
OF_CHUNKS = {
    "chunks": (20, 60, 150),
    "blocks_per_chunk": (1, 1, 2, 3),
    "order": ("lru", "arc"),
    "store_threshold": (0, 0, 2),
    "prompt_only": (1, 0),
}
WITH_DISK = {"disk": (40, 150, 100_000), "store_threshold": (0,), "chunks": (20, 40)}


@pytest.mark.parametrize(
    ("recorder", "drawn", "depth"),
    [
        pytest.param("offload", DRAWN | OF_CHUNKS, 1, id="host"),
        pytest.param("offload", DRAWN | OF_CHUNKS | WITH_DISK, 2, id="disk"),
        pytest.param("apart", DRAWN, 2, id="apart"),
    ],
)
def test_every_decision_of_the_real_connector_is_ours(tmp_path, recorder, drawn, depth):
    draw = random.Random(seed := 7)  # Other seeds were tried by hand; a test does not fail by luck.
    given = [f"{name}={draw.choice(values)}" for name, values in drawn.items()]
    given += [f"seed={seed}", f"depth={depth}", "steps=150", "p_arrive=0.2", "p_abort=0.05", "texts=6"]
    record, out = ROOT / f"tests/real_engine/vllm_server/record_{recorder}.py", tmp_path / f"{recorder}.jsonl.gz"
    words = [PYTHON, record, write_model(tmp_path / "model"), out, *given]
    done = subprocess.run(words, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = ENGINES["vllm"](out)
    assert found.first is None, given
    assert found.total > 150
