"""A real llama-server that drafts: our scheduler drafts as many tokens, and keeps as many cells, step for step."""

import random
import time

import pytest

from tests.real_engine.llama_server.conftest import SERVER
from tests.real_engine.llama_server.drafts import record, replayed

pytestmark = [pytest.mark.llama, pytest.mark.slow]


def test_every_step_is_ours(tmp_path):
    draw = random.Random(seed := time.time_ns() % 1_000_000)
    sizes = [(draw.randrange(3, 30), draw.randrange(2, 30)) for _ in range(3)]
    recorded = record(SERVER, tmp_path, sizes)
    assert len(recorded["tasks"]) == 3
    assert sum(len(task["steps"]) for task in recorded["tasks"]) > 3
    assert replayed(recorded) == recorded["tasks"], (seed, sizes)
