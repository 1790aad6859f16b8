"""Files that are odd as a whole or in one row: what is read all the same, and in which row the fault is found."""

import gzip
import lzma
import os

import pytest

from tests.traces import lines, message_of
from tests.workloads.traces.test_azure import HEADER
from tests.workloads.traces.test_azure import ROWS as AZURE
from tests.workloads.traces.test_burstgpt import OLD
from tests.workloads.traces.test_kinds import GOOD
from tests.workloads.traces.test_ragpulse import row as rag_row
from tests.worlds import command
from workloads import BadRowError, Columns, WorkloadError, open_trace, sniff
from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import parse_datetime, parse_seconds
from workloads.traces.csv_rows import parse_whole
from workloads.traces.files import open_bytes, shown_path

M = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0,1]}'
TABLE = "arrival,prompt,output"


def refusal(path, *args, **options):
    with pytest.raises(WorkloadError) as fault:
        open_trace(path, *args, **options)
    return message_of(fault).removeprefix(f"{path}: ")


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n\n \n"])
def test_a_byte_order_mark_alone_is_an_empty_file(write, content):
    path = write(content)
    assert refusal(path).startswith("empty file; ")
    done = command("workload", "describe", str(path))
    assert (done.returncode, done.stdout) == (2, "")


PIPE = "is a pipe or device; a file is expected, since it is read more than once"


@pytest.mark.parametrize("kind", [None, *GOOD, "parquet"])
def test_a_pipe_is_refused_before_it_is_opened(tmp_path, kind):
    path = tmp_path / "trace.csv"
    os.mkfifo(path)
    options = {"format": "parquet"} if kind == "parquet" else {}
    assert refusal(path, "table" if kind == "parquet" else kind, **options) == PIPE
    assert refusal(os.devnull, kind if kind in GOOD else None).endswith(PIPE)


BAD_JSON = {
    "timestamp": (M.replace('"timestamp": 0', '"timestamp": "600"'), 'timestamp "600" is not a whole number'),
    "hash_ids": (M.replace("[0,1]", '{"a":1}'), "hash_ids {...} is not a list"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_JSON.values(), ids=BAD_JSON)
def test_the_first_row_tells_the_kind_and_a_later_one_is_at_fault(write, bad, what):
    assert refusal(write(lines(M, M, bad), "t.jsonl")) == f"row 3: {what}"


def test_keys_and_their_types_tell_the_kind(write):
    path = write(lines(M, M.replace("{", '{"requests":3,')), "t.jsonl")
    assert sniff(path) == "mooncake"
    assert open_trace(path).n_requests == 2
    assert open_trace(write(lines(M.replace("{", '{"requests":3,'), M))).n_requests == 2
    first = write(lines(BAD_JSON["timestamp"][0].replace("600", "0", 1), M))
    assert refusal(first).startswith('row 1: timestamp "0" is not a whole number')
    assert sniff(write(lines("{", M, '{"requests": []}'))) == "mooncake"
    assert sniff(write(lines("{}", M))) == "mooncake"
    long = M.replace("[0,1]", str(list(range(5000)))).replace("{", '{"requests":3,')
    assert sniff(write(long.encode())) == "mooncake"
    assert sniff(write(b'{"requests": 3}')) == "weka"
    assert sniff(write(b'{"timestamp": "0", "input_length": 1')) == "ragpulse"


@pytest.mark.parametrize("name", ["new\nbad.csv", "\x1b[31m.csv", "a\u2028b.csv"])
def test_a_path_is_shown_in_one_printable_line(write, name):
    def check(text):
        assert text.isprintable()
        assert shown_path(path) in text

    path = write(lines(HEADER, *AZURE, "x"), name)
    assert shown_path("a\n\udce9é") == "a\\n\\udce9é"
    assert len(open_trace(path, skip_bad_rows=True).notes) == 1
    check(open_trace(path, skip_bad_rows=True).notes[0])
    for content in (lines(HEADER, *AZURE, "x"), b"", b"a,b", lines(HEADER), lines("TIMESTAMP"), b"PK\x03\x04"):
        write(content, name)
        for kind in (None, "azure", "burstgpt", "table", "mooncake", "none"):
            with pytest.raises(WorkloadError) as fault:
                open_trace(path, kind)
            check(str(fault.value))
    path.unlink()
    with pytest.raises(WorkloadError) as fault:
        open_trace(path)
    check(str(fault.value))


@pytest.mark.parametrize("where", [1, 2])
def test_a_zero_byte_in_a_row_is_that_rows_fault(write, where):
    for content, row in ((lines(HEADER, AZURE[0], AZURE[1].replace(",", "\0,", 1), *AZURE[2:]), 2),):
        path = write(content)
        assert refusal(path).startswith(f"row {row}: 'TIMESTAMP': a zero byte")
        assert open_trace(path, skip_bad_rows=True).n_requests == len(AZURE) - 1
    rows = [M, M, M]
    rows[where] = rows[where].replace("0", "\0", 1)
    path = write(lines(*rows))
    assert refusal(path).startswith(f"row {where + 1}: not JSON")
    assert open_trace(path, skip_bad_rows=True).n_requests == 2


def test_an_archive_is_refused(write):
    assert refusal(write(b"trace.csv" + bytes(100) + b"0000644" + GOOD["azure"] * 300)).startswith("zero bytes; ")


def test_a_byte_that_is_no_text_is_its_rows_fault(write):
    good = {"azure": (HEADER, *AZURE), "mooncake": (M, M, M)}
    for kind, rows in good.items():
        content = lines(*rows).split(b"\n")
        at = 2 if kind == "azure" else 1
        content[at] = content[at].replace(b"0", b"\xe9", 1)
        path = write(b"\n".join(content))
        for given in (None, kind):
            assert refusal(path, given) == "row 2: not UTF-8 text (byte 0xe9)"
            assert open_trace(path, given, skip_bad_rows=True).n_requests == 2


@pytest.mark.parametrize("kind", [None, *GOOD])
@pytest.mark.parametrize("code", ["utf-16", "utf-16-be"])
def test_utf_16_is_named(write, kind, code):
    mark = b"\xfe\xff" if code == "utf-16-be" else b""
    path = write(mark + GOOD["azure"].decode().encode(code))
    assert "looks like UTF-16; UTF-8 is expected" in refusal(path, kind)


def test_a_header_that_is_no_text_is_the_files_fault(write):
    assert refusal(write(lines(HEADER, *AZURE).replace(b"Context", b"\xe9", 1)), "azure").startswith("not UTF-8 text")


def test_a_bad_quote_in_one_line_can_be_skipped(write):
    path = write(lines(HEADER, AZURE[0], '"1"x,2,3', AZURE[1]))
    assert refusal(path).startswith("row 2: line 3: not CSV (")
    trace = open_trace(path, skip_bad_rows=True)
    assert len(list(trace)) == trace.n_requests == 2
    assert "row 2 (line 3: not CSV" in trace.notes[0]
    for bad in ('"1', '"1\n2"x,2,3'):
        path = write(lines(HEADER, AZURE[0], bad, AZURE[1]))
        assert "not CSV" in refusal(path, skip_bad_rows=True)


def test_a_clock_goes_on_only_where_it_falls_by_more_than_half_a_week(write):
    def rows(*times):
        return write(lines(*(rag_row(str(time)) for time in times)), "t.jsonl")

    goes_on = {"clock_reset": "continue"}
    assert refusal(rows(10, 12, 11), **goes_on).startswith(
        'row 3: timestamp "11" is earlier than the row before; clock_reset = "continue" (--continue-clock) goes on '
        "only where the clock jumps back by more than half a week"
    )
    assert "row 2" in refusal(rows(302_400, 0), **goes_on)
    assert [r.arrival_s for r in open_trace(rows(0, 302_401, 0), **goes_on)] == [0, 302_401, 604_800]
    assert '; clock_reset = "continue" (--continue-clock) would add whole weeks' in refusal(rows(600_000, 1))
    assert refusal(rows(10, 12, 11)) == 'row 3: timestamp "11" is earlier than the row before'
    assert [r.arrival_s for r in open_trace(rows(600_000, 1, 2), **goes_on)] == [0, 4_801, 4_802]


@pytest.mark.parametrize("skipped", [2, 3])
def test_more_bad_rows_than_good_ones_are_no_exception(write, skipped):
    far = AZURE[0].replace("2023", "2099")
    path = write(lines(HEADER, AZURE[0], far, *AZURE[1:2] * skipped))
    if skipped == 2:
        assert open_trace(path, skip_bad_rows=True).n_requests == 2
    else:
        message = refusal(path, skip_bad_rows=True)
        assert message.startswith("more than half of the rows are wrong: 3 of 5; the first: row 3: TIMESTAMP ")


@pytest.mark.parametrize("kind", GOOD)
def test_blank_lines_first_are_ignored(write, kind):
    good = GOOD[kind]
    expected = list(open_trace(write(good), kind)) if kind != "table" else list(open_trace(write(good)))
    for blank in (b"\r\n\r\n", b"\n" * 100_000, b"\xef\xbb\xbf\n"):
        path = write(blank + good)
        assert sniff(path) == kind
        assert list(open_trace(path)) == expected


def test_only_ascii_blanks_surround_a_number():
    assert parse_whole("n", " \t10 ", 0, 99) == 10
    assert parse_seconds("n", " 10\t") == 10 * 10**9
    for text in ("\u00a010", "\u008510", "10\u2028", "\x0b10", "10\x0c", "10\n"):
        with pytest.raises(FlawError, match="is not a whole number"):
            parse_whole("n", text, 0, 99)
        with pytest.raises(FlawError, match="is not a time"):
            parse_seconds("n", text)
    for text in ("\u00a02023-11-16 18:15:46", "2023-11-16 18:15:46.\u0661", "\u0662023-11-16 18:15:46"):
        with pytest.raises(FlawError, match="is not a time"):
            parse_datetime("n", text)


def test_a_name_in_capitals_says_as_much(write):
    assert "named .GZ but not gzip data" in refusal(write(GOOD["azure"], "t.csv.GZ"))
    assert "zip data, which cannot be read" in refusal(write(b"x", "t.ZIP"))
    assert open_trace(write(gzip.compress(GOOD["table"]), "t.CSV.GZ")).n_requests == 2


def test_parquet_is_known_whatever_its_name(write):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = write(b"")
    parquet.write_table(pa.table({"arrival": [0.0], "prompt": [3], "output": [4]}), path)
    assert open_trace(path).n_requests == 1
    assert open_trace(path, "table").n_requests == 1


def test_padding_after_xz_is_accepted_and_nothing_else(write):
    packed = lzma.compress(b"some")

    def read(content):
        with open_bytes(write(content)) as binary:
            return binary.read()

    for zeros in (4, 8, 1 << 17):
        assert read(packed + bytes(zeros)) == b"some"
        assert read(packed + bytes(zeros) + packed) == b"somesome"
        with pytest.raises(WorkloadError, match=r"damaged xz data \(trailing bytes"):
            read(packed + bytes(zeros) + b"x")
    for rest in (b"\0", bytes(5), bytes(3) + packed, b"and so on", b"\xfd7z"):
        with pytest.raises(WorkloadError, match=r"damaged xz data \(trailing bytes"):
            read(packed + rest)


def test_an_array_is_named(write):
    array = "an array; one JSON object a line is expected"
    for content in (f"[{M}]", f"[{M},\n{M}]", f"[\n{M},\n{M}\n]"):
        assert refusal(write(content.encode())) == f"row 1: {array}"


@pytest.mark.parametrize("header", [HEADER, OLD, TABLE])
def test_a_header_alone_is_named(write, header):
    assert refusal(write(lines(header))) == "no requests: only a header"
    assert refusal(write(lines(header)), stop_s=5) == "no requests: only a header"


def test_an_empty_path_is_named():
    for read in (sniff, open_trace):
        with pytest.raises(WorkloadError, match="an empty path"):
            read("")
    with pytest.raises(WorkloadError, match="an empty path"):
        open_trace("", "azure")


def test_one_is_singular(write):
    assert refusal(write(lines(HEADER, "x"))) == "row 1: 1 field, the header has 3"
    rows = ("1,A,5,5,10,C", "2,A,5,0,5,C")
    assert "1 failed call dropped: row 2" in open_trace(write(lines(OLD, *rows)), failed="drop").notes[0]


def test_a_column_has_one_meaning(write):
    columns = Columns(prompt="output")
    for format in ("csv", "jsonl", "parquet"):
        message = refusal(write(GOOD["table"]), "table", columns=columns, format=format)
        assert message == "column 'output' is named twice, for prompt and output"


def test_advice_is_given_once(write):
    path = write(lines(OLD, *["1,A,5,5,10,C"] * 5, "2,A,5,0,5,C", "2,A,0,0,0,C"))
    advice = 'failed = "drop" (--drop-failed)'
    with pytest.raises(BadRowError) as fault:
        open_trace(path)
    assert message_of(fault).endswith(f"; a failed call, which {advice} would leave out")
    notes = open_trace(path, skip_bad_rows=True).notes
    assert "".join(notes).count(advice) == 1
    assert len(notes) == 2
