"""The BurstGPT reader: both layouts, failed calls, and what each fault is called."""

import gzip

import numpy as np
import pytest

from tests.traces import SHARED, lines, message_of, needs_shared
from workloads import BadRowError, BurstGptTrace, Request, WorkloadError

READS = BurstGptTrace, "trace.csv"
OLD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEW = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
ROWS = ("5,ChatGPT,472,18,490,Chat", "45,GPT-4,1087,230,1317,API", "45,GPT-4,1,2,3,API")
WIDER = tuple(row.replace(",", ",,1.5,", 1) for row in ROWS)
REQUESTS = [Request(0, 0.0, 472, 18), Request(1, 40.0, 1087, 230), Request(2, 40.0, 1, 2)]
FAILED = "46,ChatGPT,0,0,0,Chat"


WAYS_TO_WRITE_IT = {
    "old": lines(OLD, *ROWS),
    "new": lines(NEW, *WIDER),
    "sessions": lines(NEW, *(row.replace(",,", ",abc,") for row in WIDER)),
    "gzip": gzip.compress(lines(OLD, *ROWS)),
    "CRLF, byte order mark": b"\xef\xbb\xbf" + lines(OLD, *ROWS, end="\r\n"),
    "no final newline": lines(OLD, *ROWS).removesuffix(b"\n"),
    "blank lines": lines(OLD, "", *ROWS[:1], "", "", *ROWS[1:], ""),
    "decimals": lines(OLD, *(row.replace(",", ".000,", 1) for row in ROWS)),
    "quotes": lines(OLD, *(f'"{row}"'.replace(",", '","') for row in ROWS)),
    "another order": lines(
        "Total tokens,Response tokens,Request tokens,Timestamp", "490,18,472,5", "1317,230,1087,45", "3,2,1,45"
    ),
}


@pytest.mark.parametrize("content", WAYS_TO_WRITE_IT.values(), ids=WAYS_TO_WRITE_IT)
def test_the_same_requests_however_they_are_written(read, content):
    trace = read(content)
    assert list(trace) == list(trace) == REQUESTS
    assert trace.notes == ()


def test_parts_of_a_second(read):
    rows = ("0.25,A,1,1,2,C", "0.5,A,1,1,2,C", "1.123456789,A,1,1,2,C")
    assert [r.arrival_s for r in read(lines(OLD, *rows))] == [0.0, 0.25, 0.873456789]


def test_a_failed_call_is_refused_or_dropped_with_a_note(read, tmp_path):
    content = lines(OLD, FAILED.replace("46", "1"), ROWS[0], FAILED.replace("46", "9"), *ROWS[1:])
    advised = r'row 1: Request tokens 0 is out of range.*failed = "drop" \(--drop-failed\) would'
    with pytest.raises(BadRowError, match=advised) as fault:
        read(content)
    assert fault.value.row == 1
    trace = read(content, failed="drop")
    assert list(trace) == REQUESTS
    assert trace.notes == (f"{tmp_path / 'trace.csv'}: 2 failed calls dropped: rows 1, 3",)


def test_no_answer_is_a_failed_call_whatever_was_asked(read):
    content = lines(OLD, *ROWS, "50,A,7,0,7,C")
    with pytest.raises(WorkloadError, match=r"row 4: Response tokens 0 is out of range.*failed"):
        read(content)
    assert list(read(content, failed="drop")) == REQUESTS


def test_of_many_failed_calls_the_first_are_named(read):
    trace = read(lines(OLD, *ROWS, *[FAILED] * 30), failed="drop")
    assert trace.notes[0].endswith("22, 23, and 10 more")
    assert "30 failed calls dropped: rows 4, 5, " in trace.notes[0]


BAD_ROWS = {
    "short": ("46,A,1,2,3", "5 fields, the header has 6"),
    "long": ("46,A,1,2,3,C,D", "7 fields, the header has 6"),
    "header": (OLD, "the header again"),
    "sum": ("46,A,1,2,4,C", "Total tokens 4 is not the sum of 1 Request tokens and 2 Response tokens"),
    "sum of nothing": ("46,A,0,0,4,C", "Total tokens 4 is not the sum"),
    "no prompt": ("46,A,0,2,2,C", "Request tokens 0 is out of range; expected 1 to 10000000"),
    "negative": ("46,A,-1,2,1,C", "Request tokens -1 is out of range"),
    "fraction": ("46,A,1.0,2,3,C", "Request tokens '1.0' is not a whole number of tokens"),
    "NaN": ("46,A,1,nan,3,C", "Response tokens 'nan' is not"),
    "nothing": ("46,A,1,2,,C", "Total tokens '' is not"),
    "huge": ("46,A,99999999,2,100000001,C", "Request tokens 99999999 is out of range"),
    "back in time": ("44,A,1,2,3,C", "Timestamp '44' is earlier than the row before"),
    "before time": ("-1,A,1,2,3,C", "Timestamp '-1' is not a time"),
    "infinity": ("inf,A,1,2,3,C", "Timestamp 'inf' is not a time"),
    "exponent": ("1e3,A,1,2,3,C", "Timestamp '1e3' is not a time"),
    "end of time": ("9" * 20 + ",A,1,2,3,C", "Timestamp '99999999999999999999' is out of range"),
    "date": ("2023-11-16 18:15:46,A,1,2,3,C", "Timestamp '2023-11-16 18:15:46' is not a time"),
    "zero byte": ("46,A\0,1,2,3,C", "'Model': a zero byte"),
    "line end in quotes": ('"4\n6",A,1,2,3,C', r"Timestamp '4\n6' is not"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_its_number_or_left_out(read, tmp_path, bad, what):
    content = lines(OLD, *ROWS[:2], "", "45,A,3,4,7,C", bad, ROWS[2])
    with pytest.raises(BadRowError) as fault:
        read(content)
    assert message_of(fault).startswith(f"{tmp_path / 'trace.csv'}: row 4: {what}")
    trace = read(content, skip_bad_rows=True)
    assert [r.prompt_tokens for r in trace] == [472, 1087, 3, 1]
    assert trace.notes[0].startswith(f"{tmp_path / 'trace.csv'}: 1 bad row skipped: row 4 ({what}")


BAD_FILES = {
    "empty": (b"", "empty file; expected the header Timestamp,Request tokens,Response tokens,Total tokens"),
    "header only": (lines(OLD), "no requests"),
    "all failed": (lines(OLD, FAILED), "no requests"),
    "tabs": (lines(OLD, *ROWS).replace(b",", b"\t"), "header: no column 'Timestamp'"),
    "another case": (lines(OLD.lower(), *ROWS), "header: no column 'Timestamp'"),
    "missing": (lines(OLD.replace("Total tokens", "Sum"), *ROWS), "header: no column 'Total tokens'"),
    "twice": (lines(f"{OLD},Timestamp", *ROWS), "header: 2 columns 'Timestamp'"),
    "UTF-16": (lines(OLD, *ROWS).decode().encode("utf-16"), "not UTF-8"),
    "UTF-16 without mark": (lines(OLD, *ROWS).decode().encode("utf-16-le"), "header: zero bytes"),
    "open quote": (lines(OLD, ROWS[0], '"5') + b"x\n" * 100_000, "not CSV"),
    "quotes without end": (lines(OLD) + b'"a\n",' * 400_000, "row 1, line 209717: longer than 1048576 characters"),
    "line without end": (lines(OLD) + b"5," * 600_000, "row 1, line 2: longer than 1048576 characters; CSV is"),
}


@pytest.mark.parametrize(("content", "what"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_also_where_bad_rows_are_skipped(read, tmp_path, content, what):
    for skip in (False, True):
        with pytest.raises(WorkloadError) as fault:
            read(content, failed="drop", skip_bad_rows=skip)
        assert message_of(fault).startswith(f"{tmp_path / 'trace.csv'}: ")
        assert what in message_of(fault)


@needs_shared
def test_the_published_slice():
    (path,) = (SHARED / "burstgpt_1_slice400").glob("*.csv")
    trace = BurstGptTrace(path, failed="drop")
    rows = list(trace)
    assert len(rows) == 383
    assert "17 failed calls dropped: rows 21, " in trace.notes[0]
    assert round(np.mean([r.prompt_tokens for r in rows])) == 544
    assert round(np.mean([r.output_tokens for r in rows])) == 289
