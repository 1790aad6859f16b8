"""Replays of llama-server: small recordings that were written by hand from its rules."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from kvsim.engines.recordings.server_flags import scenario_of
from kvsim.simulation.schedulers.slot_server import SlotServer
from tests.kvsim.engines.recordings import check_refused, write
from tests.worlds import command


def test_flags_and_what_they_say():
    flags = "-t 1 -np 3 -c 1000 -b 64 -ub 32 --cache-ram -1 -sps 0.5 --cache-reuse 16 --context-shift --keep -1"
    flags += " --no-cache-idle-slots --no-cache-prompt -ctk q8_0 -kvu"
    model = {"file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    scenario, known = scenario_of({"flags": flags.split(), "server": {}, "model": model})
    server, cache = scenario.server, scenario.cache
    assert known
    assert (server.slots, server.n_batch, server.n_ubatch, server.cache_ram) == (3, 64, 32, -1)
    assert (server.slot_prompt_similarity, server.cache_reuse, server.n_keep) == (0.5, 16, -1)
    assert (server.context_shift, server.cache_idle_slots, server.cache_prompt) == (True, False, False)
    assert (cache.cells, cache.type_k, cache.type_v, cache.unified) == (1000, "q8_0", "f16", True)
    scenario, known = scenario_of({"flags": ["-np", "-1"], "server": {"n_ctx": 2048}, "model": {"file": "odd.gguf"}})
    assert not known
    assert (scenario.server.slots, scenario.unified, scenario.cache.cells) == (4, True, 2048)


# Written by hand: two slots of 256 cells. Text "a" is said, then gone on from, then a stranger comes.

MIB = 2**20
EACH, MORE = 2 * 30 * 3 * 64 * 2 + 12, 30 * 24 + 28 + 2 * 4
"""Bytes of a saved token and of a saved state, for SmolLM2 135M in f16 in two streams."""


def meta(*flags, **server):
    said = {"version": ["version: 0.6.0-dev"], "slots": 2, "n_ctx_slot": 256, "kv_cells": 256, "kv_unified": "false"}
    said |= {"n_batch": 512, "n_ubatch": 512, **server}
    model = {"file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    return {"type": "meta", "flags": ["-np", "2", "-c", "512", *flags], "server": said, "model": model}


def request(number, task, prompt, n_predict, **keys):
    common = {"type": "request", "id": number, "task": task, "prompt": prompt, "n_predict": n_predict, "answer": 7}
    return common | {"params": {}, **keys}


def answered(slot, found, computed, said, kept, truncated=False):
    names = ("id_slot", "cache_n", "prompt_n", "predicted_n", "tokens_cached", "truncated")
    return {"result": dict(zip(names, (slot, found, computed, said, kept, truncated), strict=True))}


def event(kind, t=0.0, **keys):
    return {"type": "event", "kind": kind, "t": t, **keys}


def step(batch, tokens, t, s=0.1, off=0, n=None, ok=True):
    n = sum(entry[3] for entry in tokens) if n is None else n
    return {"type": "step", "batch": batch, "t": t, "s": s, "tokens": tokens, "off": off, "n": n, "ok": ok}


def ended(slot, task, computed, said, kept):
    return [
        event("prompt_time", slot=slot, task=task, tokens=computed, ms=1.0),
        event("answer_time", slot=slot, task=task, tokens=said, ms=1.0),
        event("stop", slot=slot, task=task, tokens=kept, truncated=0),
    ]


def started(slot, task, tokens):
    return [
        event("launch", slot=slot, task=task),
        event("prompt", slot=slot, task=task, context=256, n_keep=0, tokens=tokens),
    ]


SOURCES = [
    {"type": "source", "name": name, "tokens": list(range(base, base + 40))}
    for name, base in zip("abc", (1000, 2000, 3000), strict=True)
]
TALK = [
    meta(),
    *SOURCES,
    request(0, 0, [["a", 0, 20]], 2, **answered(1, 0, 20, 2, 21)),
    request(1, 3, [["a", 0, 20], ["#7", 0, 2], ["b", 0, 8]], 1, **answered(1, 21, 9, 1, 30)),
    request(2, 5, [["c", 0, 10]], 1, **answered(0, 0, 10, 1, 10)),
    event("idle", -0.1),
    event("post", 0.0, task=0),
    event("by_lru", slot=1, t_last=-1),
    event("look", keep=-1.0, sim=0.0),
    event("host_cache", prompts=0, mib=0.0),
    *started(1, 0, 20),
    step(0, [[1, "p", 0, 20]], 0.01),
    step(1, [[1, "g", 20, 1]], 0.12),
    *ended(1, 0, 20, 2, 21),
    event("idle", 0.23),
    event("post", 0.30, task=3),
    event("check", slot=1, sim=0.7, lcp=21, of=30),
    event("by_similarity", slot=1, sim=0.7, threshold=0.1, keep=1.0),
    *started(1, 3, 30),
    step(2, [[1, "p", 21, 9]], 0.31),
    *ended(1, 3, 9, 1, 30),
    event("idle", 0.42),
    event("post", 0.50, task=5),
    event("check", slot=1, sim=0.0, lcp=0, of=10),
    event("by_lru", slot=0, t_last=-1),
    event("look", keep=-1.0, sim=0.0),
    event("host_cache", prompts=0, mib=0.0),
    event("launch", slot=0, task=5),
    event("save", tokens=30, mib=round((30 * EACH + MORE) / MIB, 3)),
    event("host_cache", prompts=1, mib=round((30 * EACH + MORE) / MIB, 3)),
    event("host_entry", tokens=30, mib=round((30 * EACH + MORE) / MIB, 3)),
    event("prompt", slot=0, task=5, context=256, n_keep=0, tokens=10),
    step(3, [[0, "p", 0, 10]], 0.51),
    *ended(0, 5, 10, 1, 10),
    event("idle", 0.62),
]


def conformed(tmp_path, records):
    return ENGINES["llama-server"](write(tmp_path / "run.jsonl", records))


def altered(kind, at=0, **keys):
    """The talk with the ``at``-th record of a kind changed."""
    found = [i for i, record in enumerate(TALK) if kind in (record.get("kind"), record["type"])]
    records = json.loads(json.dumps(TALK))
    records[found[at]] |= keys
    return records


def test_a_talk_written_from_the_rules_agrees(tmp_path):
    found = conformed(tmp_path, TALK)
    assert (found.agree, found.total, found.first, found.excused) == (8, 8, None, ())


@pytest.mark.parametrize(
    ("kind", "at", "keys", "fields"),
    [
        ("by_lru", 0, {"slot": 0}, ("decision 1",)),
        ("by_lru", 1, {"t_last": 12345}, ("decision 2",)),
        ("check", 0, {"lcp": 20}, ("decision 1",)),
        ("prompt", 1, {"tokens": 31}, ("decision 4",)),
        ("save", 0, {"mib": 0.661}, ("decision 6",)),
        ("host_entry", 0, {"tokens": 29}, ("decision 8",)),
        ("step", 2, {"tokens": [[1, "p", 20, 10]]}, ("tokens",)),
        ("step", 2, {"n": 8}, ("n",)),
        ("step", 2, {"ok": False}, ("ok",)),
        ("stop", 0, {"tokens": 22}, ("decision 3",)),
        ("stop", 0, {"truncated": 1}, ("decision 3",)),
        ("request", 1, {"result": {"cache_n": 20}}, ("answer 1",)),
        ("request", 1, {"error": {"code": 400}}, ("answer 1",)),
        ("meta", 0, {"server": {"slots": 3}}, ("slots",)),
    ],
)
def test_the_first_difference_is_named(tmp_path, kind, at, keys, fields):
    found = conformed(tmp_path, altered(kind, at, **keys))
    assert found.first is not None
    assert found.first.fields == fields
    assert found.agree < found.total


def test_a_decision_too_many_or_too_few_is_a_difference(tmp_path):
    more = [*TALK[:14], event("purge", slot=0, tokens=5), *TALK[14:]]
    assert conformed(tmp_path, more).first.fields[-1].startswith("decision")
    fewer = [record for record in TALK if record.get("kind") != "save"]
    assert "decision 6" in conformed(tmp_path, fewer).first.fields


def test_another_rule_disagrees(tmp_path, monkeypatch):
    """Control: of slots never used the first, as in early 2025."""
    monkeypatch.setattr(SlotServer, "_last_first", False)
    assert conformed(tmp_path, TALK).first.fields == ("decision 1", "decision 4", "decision 5", "tokens")


def late(came_s):
    """A second request that comes ``came_s`` after the first one's prompt began, is taken after that step, and a slot
    is free."""
    return [
        meta("--cache-ram", "0"),
        *SOURCES,
        request(0, 0, [["a", 0, 20]], 2, **answered(1, 0, 20, 2, 21)),
        request(1, 1, [["b", 0, 8]], 1, **answered(0, 0, 8, 1, 8)),
        event("post", 0.0, task=0),
        event("by_lru", slot=1, t_last=-1),
        *started(1, 0, 20),
        event("post", came_s, task=1),
        step(0, [[1, "p", 0, 20]], 0.01),
        event("by_lru", slot=0, t_last=-1),
        *started(0, 1, 8),
        step(1, [[1, "g", 20, 1], [0, "p", 0, 8]], 0.12),
        *ended(0, 1, 8, 1, 8),
        *ended(1, 0, 20, 2, 21),
        event("idle", 0.23),
    ]


def test_a_warm_up_before_the_recording_has_used_a_slot(tmp_path):
    """40 tokens and an answer of 8 lie in slot 1 when the first request comes."""
    tokens = ended(0, 4, 20, 2, 21)
    records = [
        meta("--cache-ram", "0") | {"warm_up_tokens": 40},
        *SOURCES,
        request(0, 4, [["a", 0, 20]], 2, **answered(0, 0, 20, 2, 21)),
        request(1, 6, [["#999", 0, 48]], 1, **answered(1, 40, 8, 1, 48)),
        event("post", 0.0, task=4),
        event("check", slot=1, sim=0.0, lcp=0, of=20),
        event("by_lru", slot=0, t_last=-1),
        *started(0, 4, 20),
        step(0, [[0, "p", 0, 20]], 0.01),
        step(1, [[0, "g", 20, 1]], 0.12),
        *tokens,
        event("idle", 0.23),
        event("post", 0.30, task=6),
        event("check", slot=0, sim=0.0, lcp=0, of=48),
        event("check", slot=1, sim=0.833, lcp=40, of=48),
        event("by_similarity", slot=1, sim=0.833, threshold=0.1, keep=0.851),
        *started(1, 6, 48),
        step(2, [[1, "p", 40, 8]], 0.31),
        *ended(1, 6, 8, 1, 48),
        event("idle", 0.42),
    ]
    assert conformed(tmp_path, records).first is None
    assert conformed(tmp_path, [records[0] | {"warm_up_tokens": 0}, *records[1:]]).first is not None


def test_a_task_at_the_very_edge_of_a_step_is_excused_and_named(tmp_path):
    found = conformed(tmp_path, late(0.0098))
    assert found.first is None
    assert found.excused == ("task 1 came 0.2 ms before step 0 and was taken after it",)
    early = late(0.0098)
    early[10], early[11] = early[11], early[10]  # It came while the step ran: not at its edge.
    early[11]["t"] = 0.05
    assert conformed(tmp_path, early).excused == ()


def test_a_task_that_waited_through_a_step_is_a_difference(tmp_path):
    """It came before the second step was over, and yet has no slot in the third."""
    records = late(0.0098)
    where = next(i for i, record in enumerate(records) if record.get("kind") == "by_lru" and record["slot"] == 0)
    records.insert(where, step(1, [[1, "g", 20, 1]], 0.12))
    found = conformed(tmp_path, records)
    assert found.first.record > 8


def test_the_command_names_what_was_excused_and_shows_the_first_difference(tmp_path):
    path = write(tmp_path / "late.jsonl", late(0.0098))
    done = command("conform", "llama-server", str(path))
    assert done.returncode == 0
    assert "late.jsonl: task 1 came 0.2 ms before step 0 and was taken after it" in " ".join(done.stdout.split())
    assert json.loads(command("conform", "llama-server", str(path), "--json").stdout)["files"][0]["excused"]
    path = write(tmp_path / "other.jsonl", altered("check", 0, lcp=20))
    done = command("conform", "llama-server", str(path))
    assert done.returncode == 1
    assert "decision 1" in done.stdout


def test_one_damaged_file_does_not_lose_what_the_others_say(tmp_path):
    good, bad = write(tmp_path / "good.jsonl", TALK), tmp_path / "bad.jsonl"
    bad.write_text("{")
    done = command("conform", "llama-server", str(bad), str(good))
    assert done.returncode == 2
    assert "8/8" in done.stdout
    assert "bad.jsonl: line 1: not JSON" in done.stderr


WRONG = {
    "another recording": (
        '{"era": "A"}\n',
        "line 1: not a recording of llama-server; a line with 'type': 'meta', 'flags'",
    ),
    "no record": (json.dumps(meta()) + "\n", "no record behind its header"),
    "a type": (
        json.dumps(meta()) + '\n{"type": "stage"}\n',
        "line 2: type 'stage' is unknown; accepted: source, request,",
    ),
    "a text": (
        "\n".join(map(json.dumps, [record for record in TALK if record.get("name") != "a"])),
        "line 14: not a record of such a run (KeyError: 'a')",
    ),
    "flags": (json.dumps(meta("-b", "many")) + "\n", "line 1: --batch-size 'many': a whole number is expected"),
}


@pytest.mark.parametrize(("text", "answer"), WRONG.values(), ids=WRONG)
def test_what_is_no_recording_is_answered_in_one_line(tmp_path, text, answer):
    check_refused(tmp_path, "llama-server", gzip.compress(text.encode()), answer)


def test_rounds_of_the_loop_without_a_step_are_gone_through_one_by_one(tmp_path):
    """An empty text is answered with nothing to compute; only then is the next task taken."""
    records = [
        meta("--cache-ram", "0"),
        *SOURCES,
        request(0, 0, [], 2, raw_prompt="", **answered(1, 0, 0, 0, 0)),
        request(1, 1, [["a", 0, 20]], 1, **answered(0, 0, 20, 1, 20)),
        event("post", 0.0, task=0),
        event("by_lru", slot=1, t_last=-1),
        event("post", 0.001, task=1),
        event("launch", slot=1, task=0),
        event("prompt", slot=1, task=0, context=256, n_keep=0, tokens=0),
        event("empty", slot=1, task=0),
        *ended(1, 0, 0, 0, 0),
        event("by_lru", slot=0, t_last=-1),
        *started(0, 1, 20),
        step(0, [[0, "p", 0, 20]], 0.01),
        *ended(0, 1, 20, 1, 20),
        event("idle", 0.12),
    ]
    found = conformed(tmp_path, records)
    assert (found.agree, found.total, found.first) == (2, 2, None)
