"""Recordings of real llama.cpp caches and of the real vLLM, and small ones made here from the algorithms' words."""

import gzip
import json

import pytest

from kvsim.engines.conformance import conform_llamacpp, conform_vllm
from kvsim.errors import UserError
from tests.paths import REFERENCE
from tests.vllm_model import Asked, Manager, Scheduler, record_manager, record_scheduler
from tests.worlds import command

RECORDED = REFERENCE / "llamacpp"
RECORDINGS = sorted(RECORDED.glob("*.jsonl.gz"))


@pytest.mark.slow
@pytest.mark.skipif(not RECORDINGS, reason=f"no recordings in {RECORDED.name}/ beside the project")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".")[0])
def test_every_record_of_a_real_run_is_ours(path):
    found = conform_llamacpp(path)
    assert found.total > 100
    assert (found.agree, found.first) == (found.total, None)
    assert found.file == path.name


# By hand: twelve cells, micro-batches of four tokens, two layers. A map has runs [first cell, length, seqs, position].


def header(era, **keys):
    common = {
        "n_ctx": 12,
        "n_cells": 12,
        "n_seq_max": 4,
        "n_batch": 12,
        "n_ubatch": 4,
        "defrag_thold": -1,
        "n_layer": 2,
    }
    if era == "A":
        return {"era": era, **common, "n_pad": 4, **keys}
    caches = [{"size": 12, "n_pad": 4, "n_swa": 0, "swa_type": 0}]
    return {"era": era, **common, "n_stream": 1, "kv_unified": True, "set_rows": era == "B", "caches": caches, **keys}


def a(op, what, cells, head, n_kv, free_run, ret=0, defrag=0):
    """A record of era A. The cells used are those of the map."""
    record = {"op": op, "ret": ret, "map": cells, "head": head, "used": sum(run[1] for run in cells)}
    record |= {"n_kv": n_kv, "max_contiguous": free_run, "do_defrag": defrag}
    return record | ({"batch": what} if op == "decode" else {"args": what})


def bm(op, what, cells, head, ret=0, n_kv=()):
    """A record of era B or M, with one cache of one stream."""
    stream = {"map": cells, "head": head, "used": sum(run[1] for run in cells)}
    record = {"op": op, "ret": ret, "caches": [[stream]], "attn": [[2, [1, 1, n]] for n in n_kv]}
    return record | ({"batch": what} if op == "decode" else {"args": what})


ERA_A = [
    header("A"),
    a("init", [], [], 0, 0, 12),
    # Five tokens in two micro-batches; the span is rounded up to fours.
    a("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, 8, 7),
    a("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, 12, 3),
    # The head goes back to the first cell freed.
    a("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3),
    # Five cells are free, but no four in a row; from cell 1 the search goes round, and its head stops at 1.
    a("decode", [[[1], 4, 4]], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3, ret=1),
    a("defrag", [], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3, defrag=1),
    # Seven cells are used: the hole below cell 7 is filled by the last two, in their order.
    a("update", [], [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0]], 7, 12, 5),
    a(
        "decode",
        [[[1], 4, 4]],
        [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0], [7, 4, [1], 4]],
        11,
        12,
        1,
    ),
    # Context shift: forget two tokens, and the others move up; the search begins at 0 again.
    a("seq_rm", [1, 0, 2], [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [7, 4, [1], 4]], 5, 12, 2),
    a("seq_add", [1, 2, -1, -2], [[0, 1, [0], 0], [1, 2, [1], 0], [3, 2, [0], 3], [7, 4, [1], 2]], 0, 12, 2),
    # Three cells are free, two and one. Once round from 0: the search has given up when the head stands at 1 again.
    a("decode", [[[2], 0, 3]], [[0, 1, [0], 0], [1, 2, [1], 0], [3, 2, [0], 3], [7, 4, [1], 2]], 1, 12, 2, ret=1),
    a("seq_cp", [0, 3, 0, -1], [[0, 1, [0, 3], 0], [1, 2, [1], 0], [3, 2, [0, 3], 3], [7, 4, [1], 2]], 0, 12, 2),
    a("seq_keep", [3], [[0, 1, [3], 0], [3, 2, [3], 3]], 0, 12, 7),
    a("clear", [], [], 0, 12, 12),
]

ERA_M = [
    header("M", n_tensors=9),
    bm("init", [], [], 0),
    bm("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, n_kv=[4, 8]),
    bm("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, n_kv=[12]),
    bm("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1),
    # No four cells in a row: one pass of defragmentation, the head to 0, and the four after the seventh are taken.
    bm(
        "decode",
        [[[1], 4, 4]],
        [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0], [7, 4, [1], 4]],
        11,
        n_kv=[12],
    ),
    # A single cell is left, and nothing to tidy.
    bm(
        "decode",
        [[[0], 5, 2]],
        [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0], [7, 4, [1], 4]],
        11,
        ret=1,
    ),
]

SCATTERED = [[0, 1, [0], 0], [1, 2, [1], 4], [3, 2, [0], 3], [5, 4, [1], 0], [9, 2, [1], 6]]
ERA_B = [
    header("B"),
    bm("init", [], [], 0),
    bm("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, n_kv=[12, 12]),
    bm("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, n_kv=[12]),
    bm("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1),
    # Any cells will do: 1 and 2, and then 9 and 10.
    bm("decode", [[[1], 4, 4]], SCATTERED, 11, n_kv=[12]),
    # Sequence 1 ends at 7, so 9 leaves a gap; and of two tokens one finds no cell.
    bm("decode", [[[1], 9, 1]], SCATTERED, 11, ret=-1),
    bm("decode", [[[0], 5, 2]], SCATTERED, 11, ret=1),
    bm("seq_cp", [0, 2, 0, -1], [[0, 1, [0, 2], 0], *SCATTERED[1:2], [3, 2, [0, 2], 3], *SCATTERED[3:]], 11),
    bm("seq_keep", [2], [[0, 1, [2], 0], [3, 2, [2], 3]], 1),
    bm("decode", [[[2], 5, 1]], [[0, 1, [2], 0], [1, 1, [2], 5], [3, 2, [2], 3]], 2, n_kv=[12]),
    bm("seq_div", [2, 1, -1, 2], [[0, 1, [2], 0], [1, 1, [2], 2], [3, 2, [2], 1]], 2),
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("records", [ERA_A, ERA_M, ERA_B], ids=["A", "M", "B"])
def test_a_run_by_hand_is_ours(tmp_path, records):
    found = conform_llamacpp(write(tmp_path / "hand.jsonl", records))
    assert found.first is None
    assert (found.agree, found.total, found.era) == (len(records) - 1, len(records) - 1, records[0]["era"])
    assert found.to_dict() == {"file": "hand.jsonl", "era": found.era, "agree": found.agree, "total": found.total}


def test_streams_by_hand(tmp_path):
    """Sequences 0 and 1 give one token each, since 1 has no more; the span is the larger one of the two."""
    caches = [{"size": 300, "n_pad": 1, "n_swa": 0, "swa_type": 0}]
    top = header("B", n_cells=300, n_ubatch=300, n_stream=2, kv_unified=False, caches=caches)
    first, second = [[0, 259, [0], 0]], [[0, 1, [1], 0]]

    def streams(*pairs):
        return [[{"map": cells, "head": head, "used": sum(run[1] for run in cells)} for cells, head in pairs]]

    records = [
        top,
        {"op": "init", "caches": streams(([], 0), ([], 0))},
        {
            "op": "decode",
            "batch": [[[0], 0, 259], [[1], 0, 1]],
            "ret": 0,
            "caches": streams((first, 259), (second, 1)),
            "attn": [[2, [1, 2, 256]], [2, [1, 258, 300]]],
        },
        {"op": "seq_cp", "args": [1, 0, 0, -1], "caches": streams(([[0, 1, [0], 0]], 1), (second, 1))},
    ]
    assert conform_llamacpp(write(tmp_path / "streams.jsonl", records)).first is None


def test_gzip_or_not_is_seen_by_the_content(tmp_path):
    packed, plain = tmp_path / "packed.jsonl", tmp_path / "plain.jsonl.gz"
    packed.write_bytes(gzip.compress(write(plain, ERA_B).read_bytes()))
    assert conform_llamacpp(packed).agree == conform_llamacpp(plain).agree == len(ERA_B) - 1


def changed(records, number, change):
    """A copy in which one record (the header is number 0) is different."""
    copy = json.loads(json.dumps(records))
    change(copy[number])
    return copy


WRONG = {
    "one cell further": (ERA_A, 4, lambda r: r["map"][1].__setitem__(0, 2), ("map",)),
    "another position": (ERA_A, 8, lambda r: r["map"][-1].__setitem__(3, 5), ("map",)),
    "the head": (ERA_A, 5, lambda r: r.update(head=9), ("head",)),
    "the span and the hole": (ERA_A, 3, lambda r: r.update(n_kv=8, max_contiguous=4), ("n_kv", "max_contiguous")),
    "found room": (ERA_A, 5, lambda r: r.update(ret=0), ("ret",)),
    "defragmentation": (ERA_A, 6, lambda r: r.update(do_defrag=0), ("do_defrag",)),
    "another sequence": (
        ERA_M,
        3,
        lambda r: r["caches"][0][0]["map"][1].__setitem__(2, [2]),
        ("cache 0 stream 0 map",),
    ),
    "the used cells": (ERA_M, 4, lambda r: r["caches"][0][0].update(used=8), ("cache 0 stream 0 used",)),
    "rejected": (ERA_B, 6, lambda r: r.update(ret=1), ("ret",)),
    "attention": (ERA_B, 2, lambda r: r["attn"][0][1].__setitem__(2, 8), ("n_kv",)),
    "a cache too many": (
        ERA_B,
        1,
        lambda r: r["caches"].append([{"map": [], "head": 0, "used": 0}]),
        ("cache 1 stream 0 map", "cache 1 stream 0 head", "cache 1 stream 0 used"),
    ),
}


@pytest.mark.parametrize(("records", "number", "change", "fields"), WRONG.values(), ids=WRONG)
def test_a_record_that_is_not_ours_is_named(tmp_path, records, number, change, fields):
    """The control: agreement must be able to fail. Later records agree again, since the replay goes its own way."""
    found = conform_llamacpp(write(tmp_path / "wrong.jsonl", changed(records, number, change)))
    assert (found.agree, found.total) == (len(records) - 2, len(records) - 1)
    first = found.first
    assert (first.record, first.fields) == (number - 1, fields)
    assert first.operation["op"] == records[number]["op"]


def without(records, *keys):
    """A copy in which no record has these keys, but for the header."""
    return records[:1] + [{k: v for k, v in record.items() if k not in keys} for record in records[1:]]


@pytest.mark.parametrize("records", [ERA_A, ERA_M, ERA_B], ids=["A", "M", "B"])
def test_of_a_recorder_that_saw_no_cells_only_what_came_back_is_compared(tmp_path, records):
    state = ("map", "head", "used", "n_kv", "max_contiguous", "do_defrag", "caches", "attn")
    blind = without(records, *state)
    found = conform_llamacpp(write(tmp_path / "blind.jsonl", blind))
    decoded = sum(record.get("op") == "decode" for record in records)
    assert (found.agree, found.total, found.first) == (decoded, decoded, None)
    wrong = changed(blind, 2, lambda r: r.update(ret=1))
    first = conform_llamacpp(write(tmp_path / "wrong.jsonl", wrong)).first
    assert (first.record, first.fields) == (1, ("ret",))


def test_of_a_recorder_that_saw_the_cells_now_and_then_those_are_compared(tmp_path):
    """What lies between is replayed all the same: a fault shows where somebody looks again."""
    seldom = [
        r if i in (0, 8) else without([r, r], "map", "head", "used", "n_kv", "max_contiguous", "do_defrag")[1]
        for i, r in enumerate(ERA_A)
    ]
    assert conform_llamacpp(write(tmp_path / "seldom.jsonl", seldom)).first is None
    assert seldom[4]["args"] == [0, 1, 3]
    wrong = changed(seldom, 4, lambda r: r.update(args=[0, 1, 2]))
    first = conform_llamacpp(write(tmp_path / "wrong.jsonl", wrong)).first
    assert first.record == 7
    assert "map" in first.fields


@pytest.mark.parametrize("unseen", ["head", "n_kv", "do_defrag"])
def test_a_field_that_was_not_seen_is_not_compared(tmp_path, unseen):
    """The interface of era A shows neither, but all cells."""
    records = without(ERA_A, unseen)
    assert conform_llamacpp(write(tmp_path / "seen.jsonl", records)).first is None
    wrong = changed(records, 3, lambda r: r.update(used=8))
    assert conform_llamacpp(write(tmp_path / "wrong.jsonl", wrong)).first.fields == ("used",)


def test_streams_that_were_not_seen_are_not_compared(tmp_path):
    """As where llama.cpp shows those only in which it looks for room; a record may have fewer streams, or caches."""
    caches = [{"size": 256, "n_pad": 1, "n_swa": 0, "swa_type": 0}]
    top = header("B", n_cells=256, n_ubatch=256, n_stream=2, kv_unified=False, caches=caches)
    first, second = ({"map": [[0, 3, [seq], 0]], "head": 3, "used": 3} for seq in (0, 1))
    records = [
        top,
        {"op": "init"},
        {"op": "decode", "batch": [[[0], 0, 3]], "ret": 0, "caches": [[first]]},
        {"op": "decode", "batch": [[[1], 0, 3]], "ret": 0, "caches": [[None, second]]},
        {"op": "seq_rm", "args": [0, 0, -1], "caches": [[None, None]]},
        {"op": "seq_rm", "args": [1, 0, -1], "caches": []},
    ]
    assert conform_llamacpp(write(tmp_path / "some.jsonl", records)).first is None
    wrong = changed(records, 3, lambda r: r["caches"][0][1].update(head=4))
    assert conform_llamacpp(write(tmp_path / "wrong.jsonl", wrong)).first.fields == ("cache 0 stream 1 head",)
    mixed_step = changed(records, 3, lambda r: r["caches"][0].reverse())
    assert conform_llamacpp(write(tmp_path / "beside.jsonl", mixed_step)).first.fields[0] == "cache 0 stream 0 map"


def test_of_the_first_disagreement_both_sides_are_shown(tmp_path):
    wrong = changed(ERA_B, 5, lambda r: r["caches"][0][0]["map"].__setitem__(1, [1, 1, [1], 4]))
    wrong[7]["ret"] = 0
    found = conform_llamacpp(write(tmp_path / "wrong.jsonl", wrong))
    assert found.agree == found.total - 2
    shown = json.loads(json.dumps(found.to_dict()))["first_disagreement"]
    assert shown["record"] == 4
    assert shown["operation"] == {"op": "decode", "batch": [[[1], 4, 4]]}
    assert shown["fields"] == ["cache 0 stream 0 map"]
    assert shown["recorded"]["cache 0 stream 0 map"][1] == [1, 1, [1], 4]
    assert shown["ours"]["cache 0 stream 0 map"] == SCATTERED
    assert shown["recorded"]["cache 0 stream 0 head"] == shown["ours"]["cache 0 stream 0 head"] == 11


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def drop(records, number, key):
    return lines(changed(records, number, lambda record: record.pop(key)))


def put(records, number, **keys):
    return lines(changed(records, number, lambda record: record.update(keys)))


MALFORMED = {
    "empty": ("", "line 1: "),
    "header not JSON": ("era A\n", "line 1: not JSON"),
    "header not an object": ("[1]\n", "line 1: a JSON object is expected"),
    "no header": (lines(ERA_A[1:]), "line 1: not a recording's header"),
    "header without layers": (drop(ERA_A, 0, "n_layer"), "line 1: "),
    "header without caches": (drop(ERA_B, 0, "caches"), "line 1: "),
    "unknown era": (put(ERA_A, 0, era="Z"), "line 1: era 'Z' is unknown"),
    "cells as words": (put(ERA_A, 0, n_cells="many"), "line 1: "),
    "fewer cells than none": (put(ERA_A, 0, n_cells=-1), "line 1: "),
    "no layers": (put(ERA_A, 0, n_layer=0), "line 1: "),
    "no tokens in a micro-batch": (lines([header("A", n_ubatch=0), ERA_A[1]]), "line 1: "),
    "a well of brackets": ("[" * 100_000 + "\n", "line 1: "),
    "more digits than Python converts": ('{"era": "A", "n_cells": ' + "1" * 5000 + "}\n", "line 1: "),
    "endless cells": (put(ERA_A, 0, n_cells=float("inf")), "line 1: "),
    "record not JSON": (lines(ERA_A[:3]) + "{'op': 'clear'}\n" + lines(ERA_A[3:]), "line 4: not JSON"),
    "record cut off": (lines(ERA_A)[:-9], f"line {len(ERA_A)}: not JSON"),
    "record not an object": (lines(ERA_A[:3]) + "7\n", "line 4: a JSON object is expected"),
    "no operation": (drop(ERA_A, 3, "op"), "line 4: "),
    "no batch": (drop(ERA_A, 3, "batch"), "line 4: "),
    "no map": (drop(ERA_A, 3, "map"), "line 4: "),
    "no result": (drop(ERA_B, 3, "ret"), "line 4: "),
    "unknown operation": (put(ERA_A, 4, op="seq_mv"), "line 5: operation 'seq_mv' is unknown"),
    "too few arguments": (put(ERA_A, 4, args=[0]), "line 5: "),
    "a batch of nothing": (put(ERA_A, 2, batch=[[[], 0, 5]]), "line 3: "),
    "a batch of words": (put(ERA_A, 2, batch="all"), "line 3: "),
    "a shift beyond all": (put(ERA_A, 10, args=[1, 2, -1, 10**30]), "line 11: "),
    "a stream that is not there": (put(ERA_B, 4, caches=[[{}]]), "line 5: "),
    "part of a sequence to another stream": (
        lines([header("B", n_stream=4), {"op": "seq_cp", "args": [0, 1, 0, 2], "caches": [[]]}]),
        "line 2: ",
    ),
    "not UTF-8": (b"\xff\xfe{}\n", "not UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    "gzip cut off": (gzip.compress(lines(ERA_A).encode())[:-20], "damaged gzip data"),
    "gzip of nothing else": (b"\x1f\x8b", "damaged gzip data"),
    "gzip changed": (gzip.compress(lines(ERA_A).encode())[:40] + b"\0" * 60, "damaged gzip data"),
    "gzip header alone wrong": (b"\x1f\x8b\x00" + bytes(20), ""),
}


@pytest.mark.parametrize(("content", "answer"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_recording_is_answered_in_one_line(tmp_path, content, answer):
    path = tmp_path / "odd.jsonl.gz"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as fault:
        conform_llamacpp(path)
    message = str(fault.value)
    assert message.startswith(f"{path}: {answer}")
    assert "\n" not in message
    assert message.count(str(path)) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "lost.jsonl", tmp_path, tmp_path / ("long" * 100), tmp_path / "a\0b"):
        with pytest.raises(UserError) as fault:
            conform_llamacpp(path)
        assert str(fault.value).startswith(f"{path}: cannot be read: ")


# vLLM. A model of it, written from its description, makes the recordings (tests/vllm_model.py).

VLLM = REFERENCE / "vllm"
VLLM_RECORDINGS = sorted(VLLM.glob("*.jsonl.gz"))
ASYNCHRONOUS = ("S07", "S14", "S15", "S16")


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_RECORDINGS, reason=f"no recordings in {VLLM.name}/ beside the project")
@pytest.mark.parametrize("path", VLLM_RECORDINGS, ids=lambda path: path.name.split(".")[2][2:])
def test_every_call_and_step_of_a_real_vllm_is_ours(path):
    found = conform_vllm(path)
    assert found.total >= 300
    if any(f"_{name}_" in path.name for name in ASYNCHRONOUS):
        assert found.era == "0.33.0, scheduler, asynchronous (ours is not)"
        assert found.first is not None
    else:
        assert found.era in ("0.33.0, manager", "0.33.0, scheduler")
        assert (found.agree, found.first) == (found.total, None)


MANAGERS = {
    "plain": {},
    "tiny blocks": {"blocks": 8, "size": 2},
    "nothing cached": {"caching": False},
    "lookahead": {"look": (0, 3, 5)},
    "watermark, all must fit": {"watermark": 0.2, "full": True},
    "window": {"window": 13, "blocks": 30},
    "window between blocks": {"window": 9, "blocks": 24, "size": 3},
}
SERVERS = {
    "plain": {},
    "tiny blocks": {"blocks": 24, "size": 2},
    "nothing cached": {"caching": False},
    "priority": {"priority": True, "careful": True},
    "priority, prompts need not fit": {"priority": True, "careful": True, "whole": False, "budget": 6},
    "prompts need not fit": {"whole": False, "budget": 7},
    "watermark": {"watermark": 0.2},
    "window": {"window": 9},
    "not chunked": {"chunked": False, "most": 24},
    "not chunked, and too much said": {"chunked": False, "budget": 9},
    "long prompts give way": {"threshold": 5, "budget": 12},
    "short sequences": {"most": 20},
}


@pytest.mark.parametrize("keys", MANAGERS.values(), ids=MANAGERS)
def test_random_calls_of_a_manager_are_ours(tmp_path, keys):
    for seed in range(2):
        records = record_manager(seed, **keys)
        found = conform_vllm(write(tmp_path / "calls.jsonl", records))
        assert found.first is None
        assert (found.agree, found.total, found.era) == (len(records) - 2, len(records) - 2, "a model, manager")
        assert any(record.get("op") == "alloc" and record["out"] is None for record in records)
        assert any("ev" in record for record in records) == keys.get("caching", True)


@pytest.mark.parametrize("keys", SERVERS.values(), ids=SERVERS)
def test_random_steps_of_a_scheduler_are_ours(tmp_path, keys):
    preemptions = 0
    for seed in range(2):
        records = record_scheduler(seed, **keys)
        found = conform_vllm(write(tmp_path / "steps.jsonl", records))
        assert found.first is None
        assert (found.agree, found.total, found.era) == (len(records) - 2, len(records) - 2, "a model, scheduler")
        preemptions += sum(call[0] == "P" for record in records for call in record.get("calls", ()))
    assert preemptions > 0


def test_what_was_never_computed_is_not_found_after_a_preemption(tmp_path):
    """Where ours parts from vLLM on purpose: a block that is full by the chunk of a step keeps its id there, although
    its request is preempted in that same step and never computes it. The recordings of the real one have no such step.
    """
    records = record_scheduler(1, priority=True)
    found = conform_vllm(write(tmp_path / "steps.jsonl", records))
    assert (found.agree, found.first.fields) == (found.total - 1, ("ev",))
    assert found.first.recorded["ev"][:-1] == found.first.ours["ev"]
    first = records[found.first.record + 1]
    victim = next(call[1] for call in first["calls"] if call[0] == "P")
    assert any(call[:2] == ["A", victim] and call[-1] is not None for call in first["calls"])


CALLS, STEPS = record_manager(0, 150), record_scheduler(0, 60)
OTHERS = {"nf": -1, "fqc": 1, "st": 1, "nc": 99, "fq": [3, 2, 1], "ev": [[1, "0123456789ab"]]}


def where(records, holds):
    """The number of the first record of which this holds."""
    return next(number for number, record in enumerate(records) if "op" in record and holds(record))


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
    found = conform_vllm(write(tmp_path / "wrong.jsonl", changed(records, number, lambda r: r.update(change))))
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
        found = conform_vllm(write(tmp_path / "wrong.jsonl", changed(STEPS, number, lambda r, c=change: r.update(c))))
        assert found.first.fields == (f"table {name}",)
        assert (found.first.recorded[f"table {name}"], found.first.ours[f"table {name}"]) == (other, table)


def test_what_was_done_is_shown_without_what_came_of_it(tmp_path):
    number = where(CALLS, lambda r: r.get("out"))
    found = conform_vllm(write(tmp_path / "wrong.jsonl", changed(CALLS, number, lambda r: r.update(out=[], tbl=[]))))
    assert found.first.fields == ("out", "tbl")
    asked = ("op", "r", "nct", "new", "hit", "look", "ff", "hs", "stt", "first", "infl")
    assert found.first.operation == {key: CALLS[number][key] for key in asked}
    number = where(STEPS, lambda r: r.get("add"))
    found = conform_vllm(write(tmp_path / "wrong.jsonl", changed(STEPS, number, lambda r: r.update(run=[]))))
    assert found.first.operation == {key: STEPS[number][key] for key in ("op", "i", "add")}


def test_what_is_told_differently_comes_out_differently(tmp_path):
    """The control for what is not compared itself: a prompt has another beginning, an answer is one token longer."""
    number = where(STEPS, lambda r: r.get("add"))
    other = changed(STEPS, number, lambda r: r["add"][0][1][0].__setitem__(0, 424_242))
    found = conform_vllm(write(tmp_path / "other.jsonl", other))
    assert (found.first.record, found.first.fields) == (number - 1, ("st",))
    name, _, output, *_ = STEPS[number]["add"][0]
    longer = changed(STEPS, number, lambda r: r["add"][0].__setitem__(2, output + 1))
    found = conform_vllm(write(tmp_path / "longer.jsonl", longer))
    assert found.first.record == where(STEPS, lambda r: name in r["fin"]) - 1
    assert found.first.fields[:2] == ("fin", "run")


def test_after_a_disagreement_the_recording_may_ask_for_what_ours_does_not_have(tmp_path):
    """A prompt begins otherwise, so that less of it is found; then the recording goes on behind what ours holds."""
    number = where(CALLS, lambda r: r["op"] == "add")
    other = changed(CALLS, number, lambda r: r["prompt"][0].__setitem__(0, 424_242))
    found = conform_vllm(write(tmp_path / "other.jsonl", other))
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
    told = json.loads(command("conform", "vllm", *files, "--json").stdout)
    assert told == {
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
    told = json.loads(finished.stdout)
    assert not told["agree"]
    assert told["files"][1]["first_disagreement"]["fields"] == ["run"]


# What is no recording


ADDED, LOOKED_UP, WENT_ON = (
    where(CALLS, lambda r: r["op"] == "add"),
    where(CALLS, lambda r: r["op"] == "lookup"),
    where(CALLS, lambda r: r["op"] == "alloc" and not r["first"]),
)
VLLM_MALFORMED = {
    "empty": ("", "line 1: not a vLLM recording's header"),
    "llama.cpp's": (lines(ERA_A), "line 1: not a vLLM recording's header; a JSON object with 'kind' (manager or sched"),
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
    "unknown call": (put(CALLS, 2, op="move"), "line 3: operation 'move' is unknown; there are add, append, lookup, "),
    "unknown step": (put(STEPS, 2, op="leap"), "line 3: operation 'leap' is unknown; there is step"),
    "a call without operation": (drop(CALLS, 2, "op"), "line 3: "),
    "a record that is no object": (lines(CALLS[:3]) + "[]\n", "line 4: a JSON object is expected"),
    "cut off": (lines(STEPS)[:-9], f"line {len(STEPS)}: not JSON"),
    "nobody's call": (put(CALLS, LOOKED_UP, r="r77"), f"line {LOOKED_UP + 1}: "),
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
    "who was never there is gone": (put(STEPS, 1, abort=["r77"]), "line 2: "),
    "not UTF-8": (b"\xff\xfe{}\n", "not UTF-8"),
    "gzip cut off": (gzip.compress(lines(CALLS).encode())[:-20], "damaged gzip data"),
}


@pytest.mark.parametrize(("content", "answer"), VLLM_MALFORMED.values(), ids=VLLM_MALFORMED)
def test_what_is_no_recording_of_vllm_is_answered_in_one_line(tmp_path, content, answer):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    finished = command("conform", "vllm", str(path))
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"kvsim: {path}: {answer}")


@pytest.mark.parametrize(
    "keys",
    [
        {"policy": "fair"},
        {"max_seqs": 10**6},
        {"long_thr": -1},
        {"policy": "fair", "long_thr": -1},
    ],
    ids=str,
)
def test_a_header_that_no_scheduler_can_have_is_answered_by_its_line(tmp_path, keys):
    path = write(tmp_path / "odd.jsonl", [STEPS[0] | keys])
    finished = command("conform", "vllm", str(path))
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"kvsim: {path}: line 1: ")


@pytest.mark.parametrize("key", ["nf", "fqc", "st", "nc", "out", "tbl", "hit", "blocks"])
def test_a_call_without_what_came_of_it_does_not_agree(tmp_path, key):
    number = where(CALLS, lambda r: key in r)
    path = write(tmp_path / "less.jsonl", changed(CALLS, number, lambda r: r.pop(key)))
    assert command("conform", "vllm", str(path)).returncode in (1, 2)


def test_a_scheduler_may_wait_for_ever(tmp_path):
    """vLLM refuses nobody: a request that outgrows the pool waits, step after step, as long as anyone looks."""
    manager = Manager(4, 4)
    scheduler = Scheduler(manager, budget=16, slots=1, most=10**6)
    header = {**record_scheduler(0, 0, blocks=4, budget=16, slots=1)[0]}
    row = ["r0", [[1, 0, 10]], 9, 0, 1.0]
    scheduler.add(Asked(*row), row[1])
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
    found = conform_vllm(write(tmp_path / "patient.jsonl", records))
    assert (found.agree, found.first) == (1100, None)


def test_a_recording_in_which_nothing_was_seen_agrees_with_nobody(tmp_path):
    path = tmp_path / "blind.jsonl"
    blind = [header("B"), {"op": "init", "args": []}, {"op": "seq_rm", "args": [0, 0, -1]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in blind))
    with pytest.raises(UserError, match="nothing that can be compared"):
        conform_llamacpp(path)
