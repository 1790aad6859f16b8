"""Parquet files whose page headers promise more than the file holds, and honest files of every form beside them."""

from inspect import signature

import pytest

from tests.traces import SHARED, message_of
from tests.worlds import python
from workloads import Columns, TableTrace, WorkloadError

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
from pyarrow import parquet  # noqa: E402

PROMISED = 1_472_023_793
"""Bytes that a false page header promises."""
SHARED_BOMB = SHARED / "bombs" / "parquet_page_header.parquet"
NAMED = Columns("arrival", "prompt", "output", "who", "rank")

ANY_ROWS = {"max_rows_per_page": 1 << 30} if "max_rows_per_page" in signature(parquet.write_table).parameters else {}
"""Newer versions of pyarrow end a page after 20,000 rows unless they are told otherwise."""

READ_AND_REPORT = """
import resource, sys
from pathlib import Path
from workloads import Columns, TableTrace, WorkloadError
try:
    print(TableTrace(Path(sys.argv[1]), format="parquet", columns=Columns(*sys.argv[2:])).n_requests)
except WorkloadError as fault:
    print(fault)
try:
    status = Path("/proc/self/status").read_text()
    # ru_maxrss begins at what the parent process had, so that VmHWM is better where there is one.
    print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
except (OSError, StopIteration):
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def table(n, **changes):
    """Columns of n rows; every seventh row has neither a session nor a priority."""
    columns = {
        "arrival": [i / 8 for i in range(n)],
        "prompt": [1 + i * 7919 % 4000 for i in range(n)],
        "output": [1 + i % 300 for i in range(n)],
        "who": [None if i % 7 == 0 else f"session {i}" for i in range(n)],
        "rank": [i % 3 for i in range(n)],
    }
    return {**columns, **changes}


def write(path, columns, **options):
    """Writes the columns as a Parquet file; returns its path."""
    parquet.write_table(pa.table(columns), path, **options)
    return path


def zigzag(number):
    """A number as the compact protocol of Thrift writes it."""
    return number_of((number << 1) ^ (number >> 63))


def number_of(number):
    """A number from 0, seven bits in each byte."""
    written = b""
    while number >= 128:
        written, number = written + bytes([number & 127 | 128]), number >> 7
    return written + bytes([number])


def skip_number(content, at):
    """The place behind the number that starts at ``at``."""
    while content[at] >= 128:
        at += 1
    return at + 1


def with_false_header(path, *, compressed=None, uncompressed=None, entries=None):
    """Changes what the first page header of the last column promises, in place; ``entries``: of a dictionary.

    What follows that header moves, but it is the last one, and the footer is found from the file's end.
    """
    column = parquet.ParquetFile(path).metadata.row_group(0)
    last = column.column(column.num_columns - 1)
    content = path.read_bytes()
    at = last.dictionary_page_offset or last.data_page_offset
    # Field 1 (the type of page, one byte), then fields 2 and 3; each an i32 (0x15: the next field, of type 5).
    assert content[at] == content[at + 2] == 0x15
    places = [at + 3]
    places.append(skip_number(content, places[0]) + 1)
    if entries is not None:
        # Field 7, a struct (0x4c: four fields on, of type 12), whose first field is the number of entries.
        at = skip_number(content, places[1])
        assert content[at : at + 2] == b"\x4c\x15"
        places.append(at + 2)
    for place, number in reversed(list(zip(places, (uncompressed, compressed, entries), strict=False))):
        if number is not None:
            content = content[:place] + zigzag(number) + content[skip_number(content, place) :]
    path.write_bytes(content)
    return path


def refusal(path, columns=NAMED):
    """The one line that refuses the file."""
    with pytest.raises(WorkloadError) as fault:
        TableTrace(path, format="parquet", columns=columns)
    return message_of(fault)


def report(path):
    """What a new process says of a file, and the most memory that it held, in MB."""
    said, peak = python("-c", READ_AND_REPORT, path, *NAMED).stdout.splitlines()
    return said, int(peak) / 1024


FALSE = {
    "packed bytes": ({"compressed": PROMISED}, {}),
    "unpacked bytes": ({"uncompressed": PROMISED}, {}),
    "both": ({"compressed": PROMISED, "uncompressed": PROMISED}, {}),
    "both, of plain values": ({"compressed": PROMISED, "uncompressed": PROMISED}, {"compression": "none"}),
    "both, without a dictionary": ({"compressed": PROMISED, "uncompressed": PROMISED}, {"use_dictionary": False}),
    "both, of a second version": (
        {"compressed": PROMISED, "uncompressed": PROMISED},
        {"use_dictionary": False, "data_page_version": "2.0"},
    ),
    "entries of a dictionary": ({"entries": PROMISED}, {}),
    "less than nothing": ({"compressed": -5}, {}),
    "more than 32 bits": ({"compressed": 1 << 33}, {}),
}


@pytest.mark.parametrize(("promise", "options"), FALSE.values(), ids=FALSE)
def test_a_page_that_promises_what_the_file_does_not_hold_is_refused(tmp_path, promise, options):
    path = with_false_header(write(tmp_path / "false.parquet", table(20), **options), **promise)
    number = next(iter(promise.values()))
    said = refusal(path)
    assert said.startswith(f"{path}: damaged Parquet data (column 'rank', row group 1: a page promises {number:,} ")


@pytest.mark.slow
@pytest.mark.parametrize("promise", ["compressed", "uncompressed"])
def test_refusing_a_false_page_takes_no_more_memory_than_reading_an_honest_file(tmp_path, promise):
    honest = write(tmp_path / "honest.parquet", table(20))
    said, usual = report(honest)
    assert said == "20"
    said, peak = report(with_false_header(honest, **{promise: PROMISED}))
    assert f"promises {PROMISED:,} bytes" in said
    assert peak < usual + 100


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_BOMB.is_file(), reason="needs the shared traces")
def test_the_shared_file_with_a_false_page_is_refused_in_little_memory(tmp_path):
    said, peak = report(SHARED_BOMB)
    _, usual = report(write(tmp_path / "honest.parquet", table(20)))
    assert f"{SHARED_BOMB}: damaged Parquet data (column 'prompt', row group 1: a page promises " in said
    assert peak < usual + 100


@pytest.mark.slow
def test_a_footer_that_promises_a_long_list_is_refused_in_little_memory(tmp_path):
    """37 bytes: a schema without columns, then 900,000 row groups, of which the first has 900,000 column chunks."""
    many = b"\x19\xfc" + number_of(900_000)
    footer = b"\x15\x04\x19\x1c\x48\x06schema\x00\x16\x00" + many + many
    path = tmp_path / "false.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    said, peak = report(path)
    _, usual = report(write(tmp_path / "honest.parquet", table(20)))
    assert f"{path}: damaged Parquet data" in said
    assert peak < usual + 50


CODECS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
FORMS = {
    "with dictionaries": {},
    "plain": {"use_dictionary": False},
    "second version": {"data_page_version": "2.0"},
    "second version, plain": {"data_page_version": "2.0", "use_dictionary": False},
    "small pages": {"data_page_size": 64, "dictionary_pagesize_limit": 256, "write_batch_size": 50},
    "several row groups": {"row_group_size": 700},
    "page index and checksums": {"write_page_index": True, "write_page_checksum": True},
    "no statistics": {"write_statistics": False},
    "other encodings": {
        "use_dictionary": False,
        "column_encoding": {"arrival": "BYTE_STREAM_SPLIT", "prompt": "DELTA_BINARY_PACKED", "who": "DELTA_BYTE_ARRAY"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_honest_files_of_every_form_are_read(tmp_path, codec, form):
    rows = table(2000)
    expected = list(zip(rows["prompt"], rows["output"], rows["rank"], strict=True))
    trace = TableTrace(write(tmp_path / "t.parquet", rows, compression=codec, **form), columns=NAMED)
    assert [(r.prompt_tokens, r.output_tokens, r.priority) for r in trace] == expected


def test_long_texts_in_the_statistics_of_a_page_are_read(tmp_path):
    who = [f"{i} {'long ' * 2000}" for i in range(20)]
    path = write(tmp_path / "t.parquet", table(20, who=who), use_dictionary=False, data_page_size=64)
    assert TableTrace(path, columns=NAMED).n_requests == 20


def test_a_column_without_any_values_is_read(tmp_path):
    path = write(tmp_path / "t.parquet", table(20, who=pa.nulls(20, pa.string())))
    assert [r.session for r in TableTrace(path, columns=NAMED)] == [None] * 20


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_page_of_many_equal_values_is_read(tmp_path, monkeypatch, codec):
    """400 kB in one page, of which a good codec stores some hundred bytes."""
    n = 50_000
    rows = {"arrival": pa.repeat(1.0, n), "prompt": pa.repeat(1, n), "output": pa.repeat(1, n)}
    big = {"use_dictionary": False, "data_page_size": 1 << 30, "write_batch_size": n, **ANY_ROWS}
    path = write(tmp_path / "t.parquet", rows, compression=codec, **big)
    assert TableTrace(path).n_requests == n
    monkeypatch.setattr("workloads.traces.parquet_pages.MAX_PAGE", 1000)
    monkeypatch.setattr("workloads.traces.parquet_pages.MAX_RATIO", 0)
    assert "a page promises 400,0" in refusal(path, Columns())


def test_what_a_codec_may_make_of_a_long_page_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("workloads.traces.parquet_pages.MAX_PAGE", 10_000)
    equal = {"arrival": pa.repeat(1.0, 5000), "prompt": pa.repeat(1, 5000), "output": pa.repeat(1, 5000)}
    path = write(tmp_path / "equal.parquet", equal, compression="zstd", use_dictionary=False)
    said = refusal(path, Columns())
    assert "column 'arrival', row group 1: a page promises 40,0" in said
    assert said.endswith("; write it in smaller pages)")
    assert TableTrace(write(tmp_path / "other.parquet", table(5000), compression="zstd")).n_requests == 5000
