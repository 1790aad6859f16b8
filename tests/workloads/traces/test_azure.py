"""The Azure trace reader: what a trace may look like, what each fault is called, and the real files."""

import gzip

import numpy as np
import pytest

from tests.traces import message_of
from workloads import AzureTrace, Request, WorkloadError

READS = AzureTrace, "trace.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = (
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:51.2225670,879,55",
)
REQUESTS = [
    Request(0, 0.0, 374, 44),
    Request(1, 4.314579, 396, 109),
    Request(2, 4.541977, 879, 55),
]


def lines(*rows, end="\n"):
    return "".join(row + end for row in (HEADER, *rows)).encode()


def every_ten_seconds(n):
    return lines(*(f"2024-05-10 00:{i // 6:02}:{i % 6}0.000000+00:00,{100 + i},{10 + i}" for i in range(n)))


WAYS_TO_WRITE_IT = {
    "plain": lines(*ROWS),
    "gzip": gzip.compress(lines(*ROWS)),
    "byte order mark": b"\xef\xbb\xbf" + lines(*ROWS),
    "CRLF": lines(*ROWS, end="\r\n"),
    "no final newline": lines(*ROWS).removesuffix(b"\n"),
    "as published in 2023": lines(*ROWS, end="\r\n").removesuffix(b"\r\n"),
    "offset": lines(*(row.replace(",", "+00:00,", 1) for row in ROWS)),
    "another offset": lines(*(row.replace(" 18:", " 19:").replace(",", "+01:00,", 1) for row in ROWS)),
    "six decimals": lines(*(row.replace("0,", ",", 1) for row in ROWS)),
    "T and Z": lines(*(row.replace(" ", "T").replace(",", "Z,", 1) for row in ROWS)),
    "blank lines": lines("", *ROWS[:2], "", "", ROWS[2], ""),
    "quotes": lines(*('"' + row.replace(",", '","') + '"' for row in ROWS)),
    "spaces": lines(*(row.replace(",", " , ") for row in ROWS)),
}


@pytest.mark.parametrize("content", WAYS_TO_WRITE_IT.values(), ids=WAYS_TO_WRITE_IT)
def test_the_same_requests_however_they_are_written(read, content):
    trace = read(content)
    assert list(trace) == REQUESTS
    assert trace.n_requests == 3
    assert trace.users is None


def test_columns_are_found_by_name_and_others_left_alone(read):
    rows = ["Model,GeneratedTokens,TIMESTAMP,ContextTokens", "a,44,2023-11-16 18:15:46,374"]
    assert list(read("\n".join(rows).encode())) == [Request(0, 0.0, 374, 44)]


def test_gzip_named_gz_and_a_day_s_turn(read):
    rows = ["2023-12-31 23:59:59.9999999,1,1", "2024-01-01 00:00:00.0000001,2,2"]
    assert [r.arrival_s for r in read(gzip.compress(lines(*rows)), "trace.csv.gz")] == [0.0, 2e-7]


def test_equal_times_are_legal(read):
    assert [r.arrival_s for r in read(lines(ROWS[0], ROWS[0]))] == [0.0, 0.0]


BAD_ROWS = {
    "short row": ("2023-11-16 18:15:51.2225670,879", "2 fields, the header has 3"),
    "long row": ("2023-11-16 18:15:51.2225670,879,55,1", "4 fields"),
    "NaN": ("2023-11-16 18:15:51.2225670,NaN,55", "ContextTokens 'NaN'"),
    "fraction": ("2023-11-16 18:15:51.2225670,879.5,55", "ContextTokens '879.5'"),
    "nothing": ("2023-11-16 18:15:51.2225670,879,", "GeneratedTokens ''"),
    "negative": ("2023-11-16 18:15:51.2225670,879,-55", "GeneratedTokens -55 is out of range"),
    "zero": ("2023-11-16 18:15:51.2225670,0,55", "ContextTokens 0 is out of range"),
    "huge": ("2023-11-16 18:15:51.2225670,99999999999999999999,55", "ContextTokens 9999"),
    "too huge to convert": (f"2023-11-16 18:15:51.2225670,{'9' * 9999},55", "ContextTokens 9999"),
    "header again": (HEADER, "the header again"),
    "30 February": ("2023-02-30 18:15:51.2225670,879,55", "TIMESTAMP '2023-02-30 18:15:51.2225670'"),
    "25 o'clock": ("2023-11-16 25:15:51.2225670,879,55", "TIMESTAMP"),
    "seconds": ("1700158551,879,55", "TIMESTAMP '1700158551'"),
    "back in time": ("2023-11-16 18:15:50.9951689,879,55", "earlier than the row before"),
    "newline in quotes": ('"2023-11-16\n18:15:51",879,55', r"TIMESTAMP '2023-11-16\n18:15:51'"),
}


@pytest.mark.parametrize(("row", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_its_number(read, tmp_path, row, what):
    with pytest.raises(WorkloadError) as fault:
        read(lines(*ROWS[:2], row, ROWS[2]))
    assert message_of(fault).startswith(f"{tmp_path / 'trace.csv'}: row 3: ")
    assert what in message_of(fault)


def test_blank_lines_are_no_rows(read):
    with pytest.raises(WorkloadError, match=r"trace\.csv: row 2: ContextTokens 'x'"):
        read(lines("", ROWS[0], "", "2023-11-16 18:15:51,x,5"))


def test_times_before_the_first_are_compared_to_the_nanosecond(read):
    with pytest.raises(WorkloadError, match=r"row 2: .* earlier"):
        read(lines("2023-11-16 18:15:46.000000001,1,1", "2023-11-16 18:15:46.000000000,1,1"))


BAD_FILES = {
    "empty": (b"", "empty file"),
    "header only": (lines(), "no requests"),
    "missing column": (b"TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "no column 'GeneratedTokens'"),
    "duplicate column": (f"{HEADER},ContextTokens\n".encode(), "2 columns 'ContextTokens'"),
    "no header": ("\n".join(ROWS).encode(), "no column 'TIMESTAMP'"),
    "semicolons": (lines(*ROWS).replace(b",", b";"), "no column 'TIMESTAMP'"),
    "binary junk": (np.random.default_rng(1).bytes(2048), "not UTF-8"),
    "UTF-16": (lines(*ROWS).decode().encode("utf-16"), "not UTF-8"),
    "junk at the end": (every_ten_seconds(300) + b"\xff", "not UTF-8"),
    "open quote": (lines(ROWS[0], '"2023'), "not CSV"),
}


@pytest.mark.parametrize(("content", "what"), BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_bad_file_is_refused(read, tmp_path, content, what, pack):
    with pytest.raises(WorkloadError) as fault:
        read(pack(content))
    assert message_of(fault).startswith(f"{tmp_path / 'trace.csv'}: ")
    assert what in message_of(fault)


def test_what_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"none\.csv: no such file"):
        AzureTrace(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match="is a directory"):
        AzureTrace(tmp_path)


@pytest.mark.parametrize(
    "name", ["trace.csv/inside-a-file.csv", "long" * 100, "a\0b"], ids=["not a folder", "long", "nul"]
)
def test_a_path_that_can_name_no_file_is_refused(tmp_path, name):
    (tmp_path / "trace.csv").write_bytes(lines(*ROWS))
    with pytest.raises(WorkloadError) as fault:
        AzureTrace(tmp_path / name)
    message_of(fault)


def prompts_and_arrivals(trace):
    return {request.prompt_tokens: request.arrival_s for request in trace}


def test_a_window_is_half_open_and_counts_from_its_start(read):
    trace = read(every_ten_seconds(12), start_s=20, stop_s=50)
    assert prompts_and_arrivals(trace) == {102: 0.0, 103: 10.0, 104: 20.0}
    assert [request.id for request in trace] == [0, 1, 2]
    # What precedes the first request of the window is kept: the window starts at its start.
    assert prompts_and_arrivals(read(every_ten_seconds(12), start_s=25, stop_s=50)) == {103: 5.0, 104: 15.0}


def test_the_limit_counts_within_the_window(read):
    assert prompts_and_arrivals(read(every_ten_seconds(12), limit=2)) == {100: 0.0, 101: 10.0}
    assert prompts_and_arrivals(read(every_ten_seconds(12), start_s=100, limit=1)) == {110: 0.0}
    assert read(every_ten_seconds(12), limit=99).n_requests == 12


def test_the_whole_file_is_checked_whatever_is_kept_of_it(read):
    content = every_ten_seconds(12) + b"2024-05-10 00:02:00,NaN,5\n"
    for options in ({"limit": 2}, {"stop_s": 30.0}):
        with pytest.raises(WorkloadError, match=r"row 13: ContextTokens 'NaN'"):
            read(content, **options)


def test_rate_scale_divides_times_after_the_window_is_cut(read):
    fast = read(every_ten_seconds(12), rate_scale=4, start_s=20, stop_s=50)
    assert prompts_and_arrivals(fast) == {102: 0.0, 103: 2.5, 104: 5.0}
    slow = read(every_ten_seconds(12), rate_scale=0.5, limit=2)
    assert prompts_and_arrivals(slow) == {100: 0.0, 101: 20.0}


def test_an_empty_window_is_refused(read):
    for window in ({"start_s": 1000.0}, {"start_s": 21.0, "stop_s": 29.0}):
        with pytest.raises(WorkloadError, match=r"trace\.csv: no requests in the window"):
            read(every_ten_seconds(12), **window)
