"""The states of hybrid and recurrent models in llama.cpp are ours after random operations."""

import pytest

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llamacpp_replay import LlamaCppReplay
from kvsim.engines.recordings.recording_files import write_recording
from tests.real_engine.llamacpp.state_stories import STORIES, record

pytestmark = pytest.mark.llama

SEEDS = range(100, 104)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STORIES)
def test_every_record_of_a_new_story_agrees(library, only, tmp_path, name, seed):
    only("B")
    story = STORIES[name]._replace(seed=seed, operations=150)
    path = tmp_path / f"{name}.jsonl.gz"
    records = record(library, story, tmp_path)
    write_recording(path, records)
    agreement = conform(LlamaCppReplay, path)
    assert agreement.first is None
    assert agreement.agree == agreement.total == len(records) - 1
    refused = [r for r in records[1:] if r["op"] == "seq_rm" and not r["ret"]]
    assert len(refused) > 3
