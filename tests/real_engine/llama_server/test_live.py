"""A real llama-server under real traffic: what it answered, what its log says, and what our scheduler decides."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass

import pytest

from kvsim.engines.recordings.conformance import ENGINES

pytestmark = [pytest.mark.llama, pytest.mark.slow]


@dataclass
class Computed:
    """What was computed for a task."""

    slot: int
    first: int | None = None
    """Position of the first token of its prompt that was computed."""
    prompt: int = 0
    generated: int = 0


def computed(records):
    """Tokens computed for each task, added up from all steps that had room."""
    tasks, task_of = {}, {}
    batch = []
    for record in records:
        if record.get("kind") == "launch":
            task_of[record["slot"]] = record["task"]
            tasks[record["task"]] = Computed(record["slot"])
        if record["type"] != "step":
            continue
        if "tokens" in record:
            batch = [(slot, kind, start + i) for slot, kind, start, count in record["tokens"] for i in range(count)]
        for slot, kind, position in batch[record["off"] : record["off"] + record["n"]] if record["ok"] else ():
            task = tasks[task_of[slot]]
            if kind == "g":
                task.generated += 1
            else:
                task.first = position if task.first is None else task.first
                task.prompt += 1
    return tasks


def test_the_scenario_shows_what_it_is_for(run):
    assert run.scenario.shows <= {record.get("kind") for record in run.records}


def test_every_request_was_answered_with_its_token_or_refused(run):
    for request in run.scenario.requests:
        assert (request.result is None) is not (request.error is None)
        assert set(request.tokens) <= {request.answer}
        if request.result is not None:
            assert len(request.tokens) == request.result["predicted_n"]


def test_answers_and_log_tell_the_same(run):
    tasks = computed(run.records)
    for record in run.records:
        if record["type"] == "request" and record.get("result", {}).get("prompt_n"):
            result, task = record["result"], tasks[record["task"]]
            assert task == Computed(result["id_slot"], result["cache_n"], result["prompt_n"], result["predicted_n"] - 1)


def test_each_batch_is_computed_or_fails(run):
    steps = [record for record in run.records if record["type"] == "step"]
    batches = defaultdict(list)
    for step in steps:
        batches[step["batch"]].append(step)
    assert list(batches) == list(range(len(batches)))
    for of_batch in batches.values():
        placed = sum(step["n"] for step in of_batch if step["ok"])
        size = sum(count for *_, count in of_batch[0]["tokens"])
        assert placed == size or not of_batch[-1]["ok"]


def test_every_decision_is_ours(run):
    agreement = ENGINES["llama-server"](run.path)
    assert agreement.first is None
    assert agreement.agree == agreement.total >= len(run.scenario.phases)


def test_the_file_holds_the_recording(run):
    with gzip.open(run.path, "rt", encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == run.records
