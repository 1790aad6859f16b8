"""A recording of llama-server with drafts, made by ``tests/real_engine/llama_server/drafts.py``."""

import copy
import json

from tests.paths import DATA
from tests.real_engine.llama_server.drafts import replayed

RECORDED = json.loads((DATA / "llama-server-drafts.json").read_text(encoding="utf-8"))


def test_every_step_drafts_as_many_tokens_and_keeps_as_many_cells():
    assert replayed(RECORDED) == RECORDED["tasks"]
    (task,) = RECORDED["tasks"]
    assert [step[1] for step in task["steps"]] == [3, 3, 3, 3, 2, 0]  # No more than the answer still lacks.
    assert task["timings"] == [14, 5]


def test_what_is_accepted_decides_the_rest():
    changed = copy.deepcopy(RECORDED)
    changed["tasks"][0]["steps"][1][2] = 3
    assert replayed(changed) != RECORDED["tasks"]
