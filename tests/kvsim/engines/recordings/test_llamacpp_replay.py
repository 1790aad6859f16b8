"""Replays of llama.cpp: small recordings that were written by hand from its algorithms."""

import gzip
import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from kvsim.errors import UserError
from tests.kvsim.engines.recordings import changed, check_refused, drop, lines, put, without, write

# Written by hand: twelve cells, micro-batches of four tokens, two layers. A map has runs [first cell, length, seqs,
# position].


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


def record_a(op, what, cells, head, n_kv, free_run, ret=0, defrag=0):
    """A record of era A. The cells used are those of the map."""
    record = {"op": op, "ret": ret, "map": cells, "head": head, "used": sum(run[1] for run in cells)}
    record |= {"n_kv": n_kv, "max_contiguous": free_run, "do_defrag": defrag}
    return record | ({"batch": what} if op == "decode" else {"args": what})


def record_bm(op, what, cells, head, ret=0, n_kv=()):
    """A record of era B or M, with one cache of one stream."""
    stream = {"map": cells, "head": head, "used": sum(run[1] for run in cells)}
    record = {"op": op, "ret": ret, "caches": [[stream]], "attn": [[2, [1, 1, n]] for n in n_kv]}
    return record | ({"batch": what} if op == "decode" else {"args": what})


ERA_A = [
    header("A"),
    record_a("init", [], [], 0, 0, 12),
    # Five tokens in two micro-batches; the span is rounded up to fours.
    record_a("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, 8, 7),
    record_a("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, 12, 3),
    # The head goes back to the first cell freed.
    record_a("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3),
    # Five cells are free, but no four in a row; the search wraps around from cell 1, and its head stops at 1.
    record_a("decode", [[[1], 4, 4]], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3, ret=1),
    record_a("defrag", [], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1, 12, 3, defrag=1),
    # Seven cells are used: the last two fill the hole below cell 7, in order.
    record_a("update", [], [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0]], 7, 12, 5),
    record_a(
        "decode",
        [[[1], 4, 4]],
        [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0], [7, 4, [1], 4]],
        11,
        12,
        1,
    ),
    # Context shift: two tokens are removed and the others move down; the search begins at 0 again.
    record_a("seq_rm", [1, 0, 2], [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [7, 4, [1], 4]], 5, 12, 2),
    record_a("seq_add", [1, 2, -1, -2], [[0, 1, [0], 0], [1, 2, [1], 0], [3, 2, [0], 3], [7, 4, [1], 2]], 0, 12, 2),
    # Three cells are free, two and one. After one round from 0 the search gives up with its head at 1.
    record_a(
        "decode", [[[2], 0, 3]], [[0, 1, [0], 0], [1, 2, [1], 0], [3, 2, [0], 3], [7, 4, [1], 2]], 1, 12, 2, ret=1
    ),
    record_a("seq_cp", [0, 3, 0, -1], [[0, 1, [0, 3], 0], [1, 2, [1], 0], [3, 2, [0, 3], 3], [7, 4, [1], 2]], 0, 12, 2),
    record_a("seq_keep", [3], [[0, 1, [3], 0], [3, 2, [3], 3]], 0, 12, 7),
    record_a("clear", [], [], 0, 12, 12),
]

ERA_M = [
    header("M", n_tensors=9),
    record_bm("init", [], [], 0),
    record_bm("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, n_kv=[4, 8]),
    record_bm("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, n_kv=[12]),
    record_bm("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1),
    # No four cells in a row: one pass of defragmentation, the head to 0, and the four after the seventh are taken.
    record_bm(
        "decode",
        [[[1], 4, 4]],
        [[0, 1, [0], 0], [1, 2, [1], 2], [3, 2, [0], 3], [5, 2, [1], 0], [7, 4, [1], 4]],
        11,
        n_kv=[12],
    ),
    # A single cell is free, and there is nothing to compact.
    record_bm(
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
    record_bm("init", [], [], 0),
    record_bm("decode", [[[0], 0, 5]], [[0, 5, [0], 0]], 5, n_kv=[12, 12]),
    record_bm("decode", [[[1], 0, 4]], [[0, 5, [0], 0], [5, 4, [1], 0]], 9, n_kv=[12]),
    record_bm("seq_rm", [0, 1, 3], [[0, 1, [0], 0], [3, 2, [0], 3], [5, 4, [1], 0]], 1),
    # Any cells will do: 1 and 2, and then 9 and 10.
    record_bm("decode", [[[1], 4, 4]], SCATTERED, 11, n_kv=[12]),
    # Sequence 1 ends at 7, so 9 leaves a gap; and of two tokens one finds no cell.
    record_bm("decode", [[[1], 9, 1]], SCATTERED, 11, ret=-1),
    record_bm("decode", [[[0], 5, 2]], SCATTERED, 11, ret=1),
    record_bm("seq_cp", [0, 2, 0, -1], [[0, 1, [0, 2], 0], *SCATTERED[1:2], [3, 2, [0, 2], 3], *SCATTERED[3:]], 11),
    record_bm("seq_keep", [2], [[0, 1, [2], 0], [3, 2, [2], 3]], 1),
    record_bm("decode", [[[2], 5, 1]], [[0, 1, [2], 0], [1, 1, [2], 5], [3, 2, [2], 3]], 2, n_kv=[12]),
    record_bm("seq_div", [2, 1, -1, 2], [[0, 1, [2], 0], [1, 1, [2], 2], [3, 2, [2], 1]], 2),
]


@pytest.mark.parametrize("records", [ERA_A, ERA_M, ERA_B], ids=["A", "M", "B"])
def test_a_recording_written_by_hand_agrees(tmp_path, records):
    found = ENGINES["llamacpp"](write(tmp_path / "hand.jsonl", records))
    assert found.first is None
    assert (found.agree, found.total, found.era) == (len(records) - 1, len(records) - 1, records[0]["era"])
    assert found.to_dict() == {"file": "hand.jsonl", "era": found.era, "agree": found.agree, "total": found.total}


def test_a_recording_with_streams_written_by_hand_agrees(tmp_path):
    """Sequences 0 and 1 run one token each, since 1 has no more; the span is the larger of the two."""
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
    assert ENGINES["llamacpp"](write(tmp_path / "streams.jsonl", records)).first is None


def test_gzip_is_recognised_by_content(tmp_path):
    packed, plain = tmp_path / "packed.jsonl", tmp_path / "plain.jsonl.gz"
    packed.write_bytes(gzip.compress(write(plain, ERA_B).read_bytes()))
    assert ENGINES["llamacpp"](packed).agree == ENGINES["llamacpp"](plain).agree == len(ERA_B) - 1


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
def test_the_first_disagreeing_record_is_named(tmp_path, records, number, change, fields):
    """The control: agreement must be able to fail. Later records agree again, since the replay is unaffected."""
    found = ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", changed(records, number, change)))
    assert (found.agree, found.total) == (len(records) - 2, len(records) - 1)
    first = found.first
    assert (first.record, first.fields) == (number - 1, fields)
    assert first.operation["op"] == records[number]["op"]


@pytest.mark.parametrize("records", [ERA_A, ERA_M, ERA_B], ids=["A", "M", "B"])
def test_without_cells_only_return_codes_are_compared(tmp_path, records):
    state = ("map", "head", "used", "n_kv", "max_contiguous", "do_defrag", "caches", "attn")
    blind = without(records, *state)
    found = ENGINES["llamacpp"](write(tmp_path / "blind.jsonl", blind))
    decoded = sum(record.get("op") == "decode" for record in records)
    assert (found.agree, found.total, found.first) == (decoded, decoded, None)
    wrong = changed(blind, 2, lambda r: r.update(ret=1))
    first = ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", wrong)).first
    assert (first.record, first.fields) == (1, ("ret",))


def test_cells_recorded_now_and_then_are_compared(tmp_path):
    """Records in between are replayed as well: a fault shows at the next record with cells."""
    seldom = [
        r if i in (0, 8) else without([r, r], "map", "head", "used", "n_kv", "max_contiguous", "do_defrag")[1]
        for i, r in enumerate(ERA_A)
    ]
    assert ENGINES["llamacpp"](write(tmp_path / "seldom.jsonl", seldom)).first is None
    assert seldom[4]["args"] == [0, 1, 3]
    wrong = changed(seldom, 4, lambda r: r.update(args=[0, 1, 2]))
    first = ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", wrong)).first
    assert first.record == 7
    assert "map" in first.fields


@pytest.mark.parametrize("unseen", ["head", "n_kv", "do_defrag"])
def test_fields_that_were_not_recorded_are_not_compared(tmp_path, unseen):
    """The view interface of era A shows all cells, but not these fields."""
    records = without(ERA_A, unseen)
    assert ENGINES["llamacpp"](write(tmp_path / "seen.jsonl", records)).first is None
    wrong = changed(records, 3, lambda r: r.update(used=8))
    assert ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", wrong)).first.fields == ("used",)


def test_streams_that_were_not_recorded_are_not_compared(tmp_path):
    """llama.cpp shows only the streams that it searches; a record may lack streams and caches."""
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
    assert ENGINES["llamacpp"](write(tmp_path / "some.jsonl", records)).first is None
    wrong = changed(records, 3, lambda r: r["caches"][0][1].update(head=4))
    assert ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", wrong)).first.fields == ("cache 0 stream 1 head",)
    mixed_step = changed(records, 3, lambda r: r["caches"][0].reverse())
    assert ENGINES["llamacpp"](write(tmp_path / "beside.jsonl", mixed_step)).first.fields[0] == "cache 0 stream 0 map"


def test_the_first_disagreement_shows_both_sides(tmp_path):
    wrong = changed(ERA_B, 5, lambda r: r["caches"][0][0]["map"].__setitem__(1, [1, 1, [1], 4]))
    wrong[7]["ret"] = 0
    found = ENGINES["llamacpp"](write(tmp_path / "wrong.jsonl", wrong))
    assert found.agree == found.total - 2
    shown = json.loads(json.dumps(found.to_dict()))["first_disagreement"]
    assert shown["record"] == 4
    assert shown["operation"] == {"op": "decode", "batch": [[[1], 4, 4]]}
    assert shown["fields"] == ["cache 0 stream 0 map"]
    assert shown["recorded"]["cache 0 stream 0 map"][1] == [1, 1, [1], 4]
    assert shown["ours"]["cache 0 stream 0 map"] == SCATTERED
    assert shown["recorded"]["cache 0 stream 0 head"] == shown["ours"]["cache 0 stream 0 head"] == 11


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
    "deeply nested brackets": ("[" * 100_000 + "\n", "line 1: "),
    "more digits than Python converts": ('{"era": "A", "n_cells": ' + "1" * 5000 + "}\n", "line 1: "),
    "infinitely many cells": (put(ERA_A, 0, n_cells=float("inf")), "line 1: "),
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
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    "gzip cut off": (gzip.compress(lines(ERA_A).encode())[:-20], "damaged gzip data"),
    "gzip of nothing else": (b"\x1f\x8b", "damaged gzip data"),
    "gzip changed": (gzip.compress(lines(ERA_A).encode())[:40] + b"\0" * 60, "damaged gzip data"),
    "gzip header alone wrong": (b"\x1f\x8b\x00" + bytes(20), ""),
}


@pytest.mark.parametrize(("content", "answer"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_recordings_are_refused_in_one_line(tmp_path, content, answer):
    check_refused(tmp_path, "llamacpp", content, answer)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "lost.jsonl", tmp_path, tmp_path / ("long" * 100), tmp_path / "a\0b"):
        with pytest.raises(UserError) as fault:
            ENGINES["llamacpp"](path)
        assert str(fault.value).startswith(f"{path}: cannot be read: ")


def test_a_recording_with_nothing_to_compare_is_refused(tmp_path):
    path = tmp_path / "blind.jsonl"
    blind = [header("B"), {"op": "init", "args": []}, {"op": "seq_rm", "args": [0, 0, -1]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in blind))
    with pytest.raises(UserError, match="nothing that can be compared"):
        ENGINES["llamacpp"](path)
