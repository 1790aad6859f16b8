"""Replays of vLLM: random runs of a plain model of it (``tests/vllm_model.py``)."""

import json
from functools import partial

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from policies.paging.block_manager import BlockManager
from policies.paging.blocks import BlockPool
from policies.paging.eviction import free_blocks
from tests.kvsim.engines.recordings import changed, check_refused, drop, lines, put, where, write
from tests.vllm_async_model import record_async
from tests.vllm_model import Manager, ModelRequest, Scheduler, record_manager, record_scheduler
from tests.worlds import command

MANAGERS = {
    "plain": {},
    "tiny blocks": {"blocks": 8, "size": 2},
    "nothing cached": {"caching": False},
    "lookahead": {"look": (0, 3, 5)},
    "watermark, all must fit": {"watermark": 0.2, "full": True},
    "window": {"window": 13, "blocks": 30},
    "window between blocks": {"window": 9, "blocks": 24, "size": 3},
}
BOTH = {
    "plain": {},
    "tiny blocks": {"blocks": 24, "size": 2},
    "nothing cached": {"caching": False},
    "priority": {"priority": True},
    "prompts need not fit": {"whole": False, "budget": 7},
    "watermark": {"watermark": 0.2},
    "window": {"window": 9},
    "not chunked": {"chunked": False, "most": 24},
    "long prompts give way": {"threshold": 5, "budget": 12},
    "short sequences": {"most": 20},
}
STEP_BY_STEP = BOTH | {
    "priority, prompts need not fit": {"priority": True, "whole": False, "budget": 6},
    "not chunked, answers beyond the budget": {"chunked": False, "budget": 9},
}
AHEAD = BOTH | {
    "three in flight": {"depth": 3},
    "three in flight, with a window": {"depth": 3, "window": 9},
    "four in flight, by priority": {"depth": 4, "priority": True},
}
SCHEDULERS = {
    f"{name}{', ahead' * (make is record_async)}": (make, keys)
    for make, table in ((record_scheduler, STEP_BY_STEP), (record_async, AHEAD))
    for name, keys in table.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", MANAGERS.values(), ids=MANAGERS)
def test_random_calls_of_the_model_manager_agree(tmp_path, keys):
    for seed in range(2):
        records = record_manager(seed, **keys)
        found = ENGINES["vllm"](write(tmp_path / "calls.jsonl", records))
        assert found.first is None
        assert (found.agree, found.total, found.era) == (len(records) - 2, len(records) - 2, "a model, manager")
        assert any(record.get("op") == "alloc" and record["out"] is None for record in records)
        assert any("ev" in record for record in records) == keys.get("caching", True)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "keys"), SCHEDULERS.values(), ids=SCHEDULERS)
def test_random_steps_of_the_model_schedulers_agree(tmp_path, make, keys):
    preemptions, era = 0, f"a model, scheduler{', asynchronous' * (make is record_async)}"
    if "depth" in keys:
        era += f", {keys['depth']} steps in flight"
    for seed in range(2):
        records = make(seed, **keys)
        found = ENGINES["vllm"](write(tmp_path / "steps.jsonl", records))
        assert found.first is None
        assert (found.agree, found.total, found.era) == (len(records) - 2, len(records) - 2, era)
        preemptions += sum(call[0] == "P" for record in records for call in record.get("calls", ()))
    assert preemptions > 0


def test_how_many_steps_are_in_flight_is_told_from_the_steps(tmp_path):
    """The control: replayed in any other way, the recordings disagree."""
    two, three = record_async(0, steps=60), record_async(0, depth=3, steps=60)
    for records in (two, three):
        assert ENGINES["vllm"](write(tmp_path / "right.jsonl", records)).first is None
    effective = two[0]["effective"] | {"async_scheduling": False, "max_concurrent_batches": 1}
    wrong = [[two[0] | {"effective": effective}, *two[1:]], [two[0] | {"depth": 3}, *two[1:]]]
    wrong.append([{key: value for key, value in three[0].items() if key != "depth"}, *three[1:]])
    for records in wrong:
        assert ENGINES["vllm"](write(tmp_path / "wrong.jsonl", records)).first is not None


@pytest.mark.parametrize("which", ["a request that has ended is preempted", "a request goes on when it has ended"])
def test_rare_steps_of_the_asynchronous_model_occur(which):
    """What the tests above would not see if it never happened."""
    for seed in range(6):
        rare, outputs = set(), {}
        for record in record_async(seed, depth=3, steps=250)[1:-1]:
            if any(call[0] == "P" and call[1] in record["fin"] for call in record["calls"]):
                rare.add("a request that has ended is preempted")
            outputs |= {row[0]: row[2] for row in record.get("add", ())}
            for name in record["emit"]:
                outputs[name] -= 1
                if outputs[name] < 0:
                    rare.add("a request goes on when it has ended")
        if which in rare:
            return
    raise AssertionError(which)


def test_uncomputed_blocks_can_be_found_after_a_preemption(tmp_path):
    """In vLLM a block that a step's chunk fills keeps its id, although its request is preempted in that same step and
    never computes it. The replay does the same, the simulator does not: a policy forgets such blocks.
    """
    records = record_scheduler(1, priority=True)
    assert ENGINES["vllm"](write(tmp_path / "steps.jsonl", records)).first is None
    found = ENGINES["vllm"](write(tmp_path / "steps.jsonl", record_scheduler(1, priority=True, careful=True)))
    assert found.first.fields == ("ev",)
    assert BlockManager(BlockPool(4, partial(free_blocks, "lru")), 4).forgets_uncomputed


CALLS, STEPS = record_manager(0, 150), record_scheduler(0, 60)
AHEAD_STEPS = record_async(0, steps=5)
OTHERS = {"nf": -1, "fqc": 1, "st": 1, "nc": 99, "fq": [3, 2, 1], "ev": [[1, "0123456789ab"]]}


ALTERED = {
    "hit": (CALLS, lambda r: r.get("blocks"), {"hit": 0}),
    "blocks": (CALLS, lambda r: r.get("blocks"), {"blocks": []}),
    "out": (CALLS, lambda r: r.get("out"), {"out": None}),
    "refused": (CALLS, lambda r: r["op"] == "alloc" and r["out"] is None, {"out": []}),
    "tbl": (CALLS, lambda r: len(r.get("tbl", ())) > 1, {"tbl": [1]}),
    "ok": (CALLS, lambda r: r["op"] == "reset", {"ok": None}),
    "nst": (STEPS, lambda r: len(r["nst"]) > 1, {"nst": []}),
    "emit": (STEPS, lambda r: r["emit"], {"emit": []}),
    "fin": (STEPS, lambda r: r["fin"], {"fin": []}),
    "run": (STEPS, lambda r: len(r["run"]) > 1, {"run": ["r0"]}),
    "wait": (STEPS, lambda r: r["wait"], {"wait": []}),
    "calls": (STEPS, lambda r: any(call[0] == "P" for call in r["calls"]), {"calls": []}),
    **{f"{key} of a call": (CALLS, lambda r: r["op"] == "alloc", {key: value}) for key, value in OTHERS.items()},
    **{f"{key} of a step": (STEPS, lambda r: r["nst"], {key: value}) for key, value in OTHERS.items()},
}


@pytest.mark.parametrize(("records", "holds", "change"), ALTERED.values(), ids=ALTERED)
def test_an_altered_record_is_named_with_its_field(tmp_path, records, holds, change):
    number = where(records, holds)
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed(records, number, lambda r: r.update(change))))
    assert (found.agree, found.total) == (len(records) - 3, len(records) - 2)
    (key,) = change
    assert (found.first.record, found.first.fields) == (number - 1, (key,))
    assert found.first.recorded[key] == change[key]
    assert found.first.ours[key] == records[number].get(key, [])
    assert found.first.operation["op"] == records[number]["op"]


def test_an_altered_table_is_named_by_its_request_in_full_or_as_a_checksum(tmp_path):
    number = where(STEPS, lambda r: {type(table) for _, table in r["tables"]} == {int, list})
    tables = dict(STEPS[number]["tables"])
    for name, table in tables.items():
        other = 7 if isinstance(table, int) else [*table[::-1], 0]
        change = {"tables": [[n, other if n == name else t] for n, t in tables.items()]}
        found = ENGINES["vllm"](
            write(tmp_path / "wrong.jsonl", changed(STEPS, number, lambda r, c=change: r.update(c)))
        )
        assert found.first.fields == (f"table {name}",)
        assert (found.first.recorded[f"table {name}"], found.first.ours[f"table {name}"]) == (other, table)


def test_a_disagreement_shows_the_operation_without_its_results(tmp_path):
    number = where(CALLS, lambda r: r.get("out"))
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed(CALLS, number, lambda r: r.update(out=[], tbl=[]))))
    assert found.first.fields == ("out", "tbl")
    asked = ("op", "r", "nct", "new", "hit", "look", "ff", "hs", "stt", "first", "infl")
    assert found.first.operation == {key: CALLS[number][key] for key in asked}
    number = where(STEPS, lambda r: r.get("add"))
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed(STEPS, number, lambda r: r.update(run=[]))))
    assert found.first.operation == {key: STEPS[number][key] for key in ("op", "i", "add")}


def test_altered_prompts_and_answers_disagree(tmp_path):
    """The control for fields that are not compared: another prompt prefix, and an answer longer by one token."""
    number = where(STEPS, lambda r: r.get("add"))
    other = changed(STEPS, number, lambda r: r["add"][0][1][0].__setitem__(0, 424_242))
    found = ENGINES["vllm"](write(tmp_path / "other.jsonl", other))
    assert (found.first.record, found.first.fields) == (number - 1, ("st",))
    name, _, output, *_ = STEPS[number]["add"][0]
    longer = changed(STEPS, number, lambda r: r["add"][0].__setitem__(2, output + 1))
    found = ENGINES["vllm"](write(tmp_path / "longer.jsonl", longer))
    assert found.first.record == where(STEPS, lambda r: name in r["fin"]) - 1
    assert found.first.fields[:2] == ("fin", "run")


def test_operations_impossible_after_a_disagreement_are_tolerated(tmp_path):
    """With another prompt prefix less of it is found; the recording then continues beyond the tokens that ours
    holds."""
    number = where(CALLS, lambda r: r["op"] == "add")
    other = changed(CALLS, number, lambda r: r["prompt"][0].__setitem__(0, 424_242))
    found = ENGINES["vllm"](write(tmp_path / "other.jsonl", other))
    assert found.first.record > number - 1
    assert "st" in found.first.fields


# The command


def test_conform_says_how_far_each_recording_agrees(tmp_path):
    files = [str(write(tmp_path / "calls.jsonl", CALLS)), str(write(tmp_path / "steps.jsonl", STEPS))]
    finished = command("conform", "vllm", *files)
    assert (finished.returncode, finished.stderr) == (0, "")
    rows = [line.split() for line in finished.stdout.splitlines()]
    calls, steps = len(CALLS) - 2, len(STEPS) - 2
    assert ["calls.jsonl", "a", "model,", "manager", f"{calls}/{calls}"] in rows
    assert ["steps.jsonl", "a", "model,", "scheduler", f"{steps}/{steps}"] in rows
    assert ["in", "all", f"{calls + steps}/{calls + steps}"] in rows
    printed = json.loads(command("conform", "vllm", *files, "--json").stdout)
    assert printed == {
        "engine": "vllm",
        "agree": True,
        "files": [
            {"file": "calls.jsonl", "era": "a model, manager", "agree": calls, "total": calls},
            {"file": "steps.jsonl", "era": "a model, scheduler", "agree": steps, "total": steps},
        ],
    }


def test_conform_ends_with_one_where_something_disagrees(tmp_path):
    number = where(STEPS, lambda r: len(r["run"]) > 1)
    wrong = changed(STEPS, number, lambda r: r.update(run=["r0"]))
    files = [str(write(tmp_path / "calls.jsonl", CALLS)), str(write(tmp_path / "steps.jsonl", wrong))]
    finished = command("conform", "vllm", *files)
    assert (finished.returncode, finished.stderr) == (1, "")
    printed = " ".join(finished.stdout.split())
    assert f"{len(STEPS) - 3}/{len(STEPS) - 2}" in printed
    assert f'steps.jsonl, record {number - 1}: {{"op": "step"' in printed
    assert f"run ['r0'] {STEPS[number]['run']}" in printed
    finished = command("conform", "vllm", *files, "--json")
    assert (finished.returncode, finished.stderr) == (1, "")
    printed = json.loads(finished.stdout)
    assert not printed["agree"]
    assert printed["files"][1]["first_disagreement"]["fields"] == ["run"]


# Malformed recordings


ADDED, LOOKED_UP, WENT_ON = (
    where(CALLS, lambda r: r["op"] == "add"),
    where(CALLS, lambda r: r["op"] == "lookup"),
    where(CALLS, lambda r: r["op"] == "alloc" and not r["first"]),
)
VLLM_MALFORMED = {
    "empty": ("", "line 1: not a vLLM recording's header"),
    "llama.cpp's": (
        lines([{"era": "A"}]),
        "line 1: not a vLLM recording's header; a JSON object with 'kind' (",
    ),
    "header of another kind": (put(CALLS, 0, kind="worker"), "line 1: not a vLLM recording's header"),
    "no version": (drop(CALLS, 0, "vllm"), "line 1: "),
    "no blocks": (drop(CALLS, 0, "num_blocks"), "line 1: "),
    "blocks as words": (put(CALLS, 0, num_blocks="many"), "line 1: num_blocks is 'many'; a whole number "),
    "a single block": (put(CALLS, 0, num_blocks=1), "line 1: 4 cells make 1 blocks of 4, and block 0 is never handed"),
    "too many blocks": (put(CALLS, 0, num_blocks=2**40), "line 1: num_blocks is "),
    "blocks of nothing": (put(CALLS, 0, block_size=0), "line 1: block_size is 0; "),
    "half a token": (put(CALLS, 0, block_size=0.5), "line 1: block_size is 0.5; "),
    "no window": (put(CALLS, 0, window=0), "line 1: window is 0; "),
    "a watermark of words": (put(CALLS, 0, watermark="high"), "line 1: "),
    "no such watermark": (put(CALLS, 0, watermark=float("nan")), "line 1: "),
    "no budget": (drop(STEPS, 0, "budget"), "line 1: "),
    "a budget of nothing": (put(STEPS, 0, budget=0), "line 1: budget is 0; "),
    "nothing in effect": (drop(STEPS, 0, "effective"), "line 1: "),
    "no step in flight": (put(AHEAD_STEPS, 0, depth=0), "line 1: depth is 0; a whole number "),
    "steps in flight as words": (put(AHEAD_STEPS, 0, depth="two"), "line 1: depth is 'two'; a whole number "),
    "half a step in flight": (
        put(AHEAD_STEPS, 0, effective=AHEAD_STEPS[0]["effective"] | {"max_concurrent_batches": 1.5}),
        "line 1: max_concurrent_batches is 1.5; a whole number ",
    ),
    "unknown call": (put(CALLS, 2, op="move"), "line 3: operation 'move' is unknown; accepted: add, append, lookup, "),
    "unknown step": (put(STEPS, 2, op="jump"), "line 3: operation 'jump' is unknown; accepted: step"),
    "a call without operation": (drop(CALLS, 2, "op"), "line 3: "),
    "a call of an unknown request": (put(CALLS, LOOKED_UP, r="r77"), f"line {LOOKED_UP + 1}: "),
    "a prompt of words": (put(CALLS, ADDED, prompt="hello"), f"line {ADDED + 1}: "),
    "a segment without length": (put(CALLS, ADDED, prompt=[[1, 2]]), f"line {ADDED + 1}: "),
    "tokens by halves": (put(CALLS, ADDED, prompt=[[1, 0, 2.5]]), f"line {ADDED + 1}: "),
    "tokens behind others that are not there": (
        put(CALLS, WENT_ON, nct=99),
        f"line {WENT_ON + 1}: vllm 0.33.0: sequence ",
    ),
    "a block that is not there": (lines([CALLS[0], {"op": "evict", "ids": [99]}]), "line 2: "),
    "no tables": (drop(STEPS, 2, "tables"), "line 3: "),
    "a request without a number": (put(STEPS, 1, add=[["me", [[1, 0, 3]], 1, 0, 1.0]]), "line 2: "),
    "half a request": (put(STEPS, 1, add=[["r0", [[1, 0, 3]]]]), "line 2: "),
    "an unknown request is cancelled": (put(STEPS, 1, abort=["r77"]), "line 2: "),
    "an unknown order": (put(STEPS, 0, policy="fair"), "line 1: "),
    "too many sequences": (put(STEPS, 0, max_seqs=10**6), "line 1: "),
    "a threshold below nothing": (put(STEPS, 0, long_thr=-1), "line 1: "),
    "two faults": (put(STEPS, 0, policy="fair", long_thr=-1), "line 1: "),
}


@pytest.mark.parametrize(("content", "answer"), VLLM_MALFORMED.values(), ids=VLLM_MALFORMED)
def test_malformed_recordings_are_refused_in_one_line(tmp_path, content, answer):
    check_refused(tmp_path, "vllm", content, answer)


@pytest.mark.parametrize("key", ["nf", "fqc", "st", "nc", "out", "tbl", "hit", "blocks"])
def test_a_call_without_its_results_disagrees(tmp_path, key):
    number = where(CALLS, lambda r: key in r)
    path = write(tmp_path / "less.jsonl", changed(CALLS, number, lambda r: r.pop(key)))
    assert command("conform", "vllm", str(path)).returncode in (1, 2)


def test_a_scheduler_may_wait_forever(tmp_path):
    """vLLM refuses no request: one that outgrows the pool waits for ever."""
    manager = Manager(4, 4)
    scheduler = Scheduler(manager, budget=16, slots=1, most=10**6)
    header = {**record_scheduler(0, 0, blocks=4, budget=16, slots=1)[0]}
    row = ["r0", [[1, 0, 10]], 9, 0, 1.0]
    scheduler.add(ModelRequest(*row), row[1])
    records = [header]
    for i in range(1100):
        step = scheduler.schedule()
        tables = [[request.name, list(manager.tables[request.name])] for request in step]
        emitted, ended = scheduler.finish_step(step)
        record = {"op": "step", "i": i, "nst": [[r.name, n] for r, n in step.items()], "emit": emitted, "fin": ended}
        record |= {"tables": tables, "calls": scheduler.calls, "run": [r.name for r in scheduler.running]}
        record |= {"wait": [r.name for r in scheduler.waiting], **({"add": [row]} if i == 0 else {})}
        scheduler.calls = []
        records.append(record | manager.pool.state())
    assert records[-1]["wait"] == ["r0"]
    found = ENGINES["vllm"](write(tmp_path / "patient.jsonl", records))
    assert (found.agree, found.first) == (1100, None)
