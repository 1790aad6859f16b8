"""The reader of tables: three formats, columns of any name, times in any unit, and the messages for faults."""

import bz2
import gzip
import json
import lzma
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings

from kvsim.errors import UserError
from kvsim.installation import install_extra
from kvsim.scenario.scenario import load_scenario
from tests.traces import lines, mangled, message_of, outcome
from tests.worlds import command
from workloads import BadRowError, Columns, Request, TableTrace, WorkloadError

NAMED = Columns("when", "ask", "say", "who", "rank")
HEADER = "when,ask,say,who,rank,other"
GOOD = (
    (0.5, 3, 4, "a", 0, "x"),
    (1.25, 5, 6, "a", -1, "x"),
    (1.25, 7, 8, None, 0, "x"),
    (2.5, 9, 2, "b", 0, "x"),
)
REQUESTS = [
    Request(0, 0.0, 3, 4, 0.0, session=0),
    Request(1, 0.0, 5, 6, 0.75, session=0, priority=-1),
    Request(2, 0.75, 7, 8),
    Request(3, 2.0, 9, 2, session=1),
]


def csv_of(rows=GOOD, header=HEADER, delimiter=","):
    text = [",".join("" if v is None else str(v) for v in row) for row in rows]
    return lines(*(line.replace(",", delimiter) for line in (header, *text)))


def jsonl_of(rows=GOOD):
    return lines(*(json.dumps(dict(zip(HEADER.split(","), row, strict=True))) for row in rows))


def parquet_of(path, columns, **options):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path, **options)
    return path


@pytest.fixture
def read(tmp_path):
    """Writes a table and reads it."""

    def write_and_read(content, name="table.csv", **options):
        path = tmp_path / name
        path.write_bytes(content)
        return TableTrace(path, **{"columns": NAMED, **options})

    return write_and_read


WAYS_TO_WRITE_IT = {
    "csv": ("table.csv", csv_of(), {}),
    "csv in capitals": ("table.CSV", csv_of(), {}),
    "semicolons": ("table.csv", csv_of(delimiter=";"), {"delimiter": ";"}),
    "tabs": ("table.tsv", csv_of(delimiter="\t"), {"delimiter": "\t", "format": "csv"}),
    "jsonl": ("table.jsonl", jsonl_of(), {}),
    "ndjson": ("table.ndjson", jsonl_of(), {}),
    "csv.gz": ("table.csv.gz", gzip.compress(csv_of()), {}),
    "jsonl.bz2": ("table.jsonl.bz2", bz2.compress(jsonl_of()), {}),
    "csv.xz": ("table.csv.xz", lzma.compress(csv_of()), {}),
    "another name": ("table", jsonl_of(), {"format": "jsonl"}),
}


@pytest.mark.parametrize(("name", "content", "options"), WAYS_TO_WRITE_IT.values(), ids=WAYS_TO_WRITE_IT)
def test_the_same_requests_however_they_are_written(read, name, content, options):
    trace = read(content, name, **options)
    assert list(trace) == list(trace) == REQUESTS


def test_parquet_says_the_same_batch_by_batch(tmp_path, monkeypatch):
    columns = dict(zip(HEADER.split(","), map(list, zip(*GOOD, strict=True)), strict=True))
    path = parquet_of(tmp_path / "table.parquet", columns, row_group_size=2)
    monkeypatch.setattr("workloads.traces.parquet._BATCH", 1)
    assert list(TableTrace(path, columns=NAMED)) == REQUESTS


def test_the_columns_have_names_of_their_own_by_default(read):
    (request,) = read(lines("output,prompt,arrival", "1,2,3"), columns=Columns())
    assert request == Request(0, 0.0, 2, 1)


TIMES = {
    "s": ("1.5", "3.25"),
    "ms": ("1500", "3250.0"),
    "us": ("1500000", "3250000"),
    "ns": ("1500000000", "3250000000"),
    "datetime": ("2024-05-10 00:00:59.5", "2024-05-10T02:01:01.25+02:00"),
}


@pytest.mark.parametrize("time", TIMES)
def test_times_in_any_unit(read, tmp_path, time):
    first, second = TIMES[time]
    for content, name in (
        (csv_of([(first, 1, 1, "", 0, ""), (second, 1, 1, "", 0, "")]), "table.csv"),
        (
            jsonl_of([(t if time == "datetime" else json.loads(t), 1, 1, None, 0, 0) for t in (first, second)]),
            "table.jsonl",
        ),
    ):
        assert [r.arrival_s for r in read(content, name, time=time)] == [0.0, 1.75]
    if time == "datetime":
        values = [datetime(2024, 5, 10, 0, 0, 59, 500_000, UTC), datetime(2024, 5, 10, 0, 1, 1, 250_000, UTC)]
    else:
        values = [float(first), float(second)]
    path = parquet_of(tmp_path / "t.parquet", {"arrival": values, "prompt": [1, 1], "output": [1, 1]})
    assert [r.arrival_s for r in TableTrace(path, time=time)] == [0.0, 1.75]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_time_stamps_of_any_unit_in_parquet(tmp_path, unit):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    stamps = pa.array([-5, 7], pa.timestamp(unit))
    path = parquet_of(tmp_path / "t.parquet", {"arrival": stamps, "prompt": [1, 1], "output": [1, 1]})
    (_, later) = TableTrace(path, time="datetime")
    assert later.arrival_s == pytest.approx(12 / {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit])


BAD_ROWS = {
    "back in time": ((0.4, 1, 1, None, 0, 0), "when"),
    "back in a session": ((2.4, 1, 1, "b", 0, 0), "when"),
    "a session again": ((2.5, 1, 1, "a", 0, 0), 'who "a" was there before; the rows of a session must follow'),
    "before time": ((-1, 1, 1, None, 0, 0), "when"),
    "zero": ((2.5, 0, 1, None, 0, 0), "ask 0 is out of range; expected 1 to 10000000"),
    "negative": ((2.5, 1, -1, None, 0, 0), "say -1 is out of range"),
    "fraction": ((2.5, 1.5, 1, None, 0, 0), "ask"),
    "text": ((2.5, "x", 1, None, 0, 0), "ask"),
    "time in words": (("soon", 1, 1, None, 0, 0), "when"),
    "rank": ((2.5, 1, 1, None, 2**31, 0), "rank 2147483648 is out of range; expected -2147483647 to 2147483647"),
    "rank in words": ((2.5, 1, 1, None, "high", 0), "rank"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("write", [csv_of, jsonl_of])
def test_a_bad_row_is_refused_by_its_number_or_left_out(read, tmp_path, bad, what, write):
    name = "table.csv" if write is csv_of else "table.jsonl"
    content = write([*GOOD, bad, (2.5, 77, 1, "b", 0, 0)])
    with pytest.raises(BadRowError) as fault:
        read(content, name)
    assert message_of(fault).startswith(f"{tmp_path / name}: row 5: {what}")
    trace = read(content, name, skip_bad_rows=True)
    assert [r.prompt_tokens for r in trace] == [3, 5, 7, 9, 77]
    assert "1 bad row skipped: row 5 (" in trace.notes[0]


BAD_OBJECTS = {
    "infinity": ('{"when": 1e999, "ask": 1, "say": 1, "who": null, "rank": 0}', "when Infinity is out of range"),
    "true": ('{"when": true, "ask": 1, "say": 1, "who": null, "rank": 0}', "when true is not a number; expected s"),
    "no rank": ('{"when": 1, "ask": 1, "say": 1, "who": null}', "no key 'rank'; expected when, ask, say, who, rank"),
    "session": ('{"when": 1, "ask": 1, "say": 1, "who": [1], "rank": 0}', "who [...] is not a name; expected text"),
    "array": ("[1]", "an array; one JSON object a line is expected"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_OBJECTS.values(), ids=BAD_OBJECTS)
def test_a_bad_object_is_refused_by_its_number(read, bad, what):
    with pytest.raises(BadRowError) as fault:
        read(lines(bad), "table.jsonl")
    assert f"table.jsonl: row 1: {what}" in message_of(fault)


BAD_COLUMNS = {
    "floats": (
        {"arrival": [1.0], "prompt": [1.0], "output": [1]},
        "column 'prompt' has the type double; expected whole",
    ),
    "text": (
        {"arrival": ["1"], "prompt": [1], "output": [1]},
        "column 'arrival' has the type string; expected numbers",
    ),
    "lists": ({"arrival": [1], "prompt": [[1]], "output": [1]}, "column 'prompt' has the type list<"),
    "objects": ({"arrival": [1], "prompt": [{"n": 1}], "output": [1]}, "column 'prompt' has the type struct<"),
    "missing": (
        {"arrival": [1], "prompt": [1]},
        "no column 'output'; expected arrival, prompt, output, got 'arrival, ",
    ),
    "nothing": ({"arrival": [], "prompt": [], "output": []}, "column 'arrival' has the type null"),
    "no value": (
        {"arrival": [1, 2], "prompt": [1, None], "output": [1, 1]},
        "row 2: prompt null is not a whole number",
    ),
    "no time": ({"arrival": [1, None], "prompt": [1, 1], "output": [1, 1]}, "row 2: arrival is missing"),
    "NaN": ({"arrival": [1, float("nan")], "prompt": [1, 1], "output": [1, 1]}, "row 2: arrival NaN is out of range"),
    "zero": ({"arrival": [1, 2], "prompt": [1, 0], "output": [1, 1]}, "row 2: prompt 0 is out of range"),
    "back": (
        {"arrival": [2, 1], "prompt": [1, 1], "output": [1, 1]},
        "row 2: arrival 1 is earlier than the row before",
    ),
}


@pytest.mark.parametrize(("columns", "what"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_a_bad_parquet_table_is_refused(tmp_path, columns, what):
    path = parquet_of(tmp_path / "table.parquet", columns)
    with pytest.raises(WorkloadError) as fault:
        TableTrace(path)
    assert message_of(fault).startswith(f"{path}: {what}")


def test_a_dictionary_of_sessions_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    who = pa.array(["a", "b"]).dictionary_encode()
    path = parquet_of(tmp_path / "t.parquet", {"arrival": [1, 2], "prompt": [1, 1], "output": [1, 1], "who": who})
    with pytest.raises(WorkloadError, match=r"column 'who' has the type dictionary<.*expected text or whole numbers"):
        TableTrace(path, columns=Columns(session="who"))


def test_damaged_parquet_is_refused(tmp_path):
    good = parquet_of(tmp_path / "t.parquet", {"arrival": [1, 2], "prompt": [1, 1], "output": [1, 1]}).read_bytes()
    for content, what in (
        (good[:-9], "damaged Parquet data"),
        (good[:20], "damaged Parquet data"),
        (b"PAR1", "damaged Parquet data"),
        (b"arrival,prompt", "not Parquet data, which begins with PAR1"),
        (b"", "not Parquet data"),
        (gzip.compress(good), "Parquet packed by gzip"),
    ):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(WorkloadError, match=what) as fault:
            TableTrace(tmp_path / "bad.parquet")
        message_of(fault)


def test_without_pyarrow_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(WorkloadError, match=r"t\.parquet: reading Parquet needs pyarrow, which .* kvsim\[parquet\]$"):
        TableTrace(tmp_path / "t.parquet")
    done = command("workload", "describe", str(tmp_path / "t.parquet"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"; install it with: {install_extra('parquet')}\n")


def test_a_name_that_does_not_say_the_format_is_refused(read):
    for name in ("table", "table.txt", "table.gz"):
        with pytest.raises(WorkloadError, match=f"{name}: its name does not say what it is; give format = "):
            read(csv_of() if name != "table.gz" else gzip.compress(csv_of()), name)


BAD_FILES = {
    "column": (
        csv_of(header="when,ask,say,who,level,other"),
        "header: no column 'rank'; expected when,ask,say,who,rank",
    ),
    "delimiter": (csv_of(delimiter=";"), "header: no column 'when'"),
    "empty": (b"", "empty file; expected the header when,ask,say,who,rank"),
}


@pytest.mark.parametrize(("content", "what"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused(read, content, what):
    with pytest.raises(WorkloadError) as fault:
        read(content)
    assert what in message_of(fault)


KEYS = (
    'kind = "table"\npath = "table.csv"\ndelimiter = ";"\ntime = "ms"\nlimit = 2\n[workload.columns]\nsession = "who"\n'
)


def test_a_scenario_names_columns_and_survives_its_own_file(tmp_path):
    (tmp_path / "table.csv").write_bytes(lines("arrival;prompt;output;who", "5;1;2;a", "9;3;4;", "10;3;4;"))
    path = tmp_path / "mine.toml"
    path.write_text(f"[workload]\n{KEYS}")
    scenario = load_scenario(path)
    assert list(scenario.build_workload()) == [Request(0, 0.0, 1, 2, session=0), Request(1, 0.004, 3, 4)]
    text = scenario.to_toml()
    assert "workload.columns.priority" in text.splitlines()[-1]
    path.write_text(text)
    assert load_scenario(path).to_toml() == text
    assert list(load_scenario(path).build_workload()) == list(scenario.build_workload())


BAD_KEYS = {
    'columns = {arival = "t"}': "workload.columns.arival: unknown key; did you mean 'arrival'?",
    'columns = {arrival = ""}': "workload.columns.arrival: string should have at least 1 character",
    "columns = 3": "workload.columns: a table is expected, got 3",
    'delimiter = ";;"': "workload.delimiter: ';;' cannot stand between fields; one character such as",
    'delimiter = "\\n"': "workload.delimiter: '\\n' cannot stand between fields",
    'time = "hours"': "workload.time: input should be 's', 'ms', 'us', 'ns' or 'datetime', got 'hours'",
    'format = "xlsx"': "workload.format: input should be 'csv', 'jsonl' or 'parquet', got 'xlsx'",
    "keep = 0": "workload.keep: input should be greater than 0, got 0",
    "keep = 1.5": "workload.keep: input should be less than or equal to 1, got 1.5",
    "skip_bad_rows = 1": "workload.skip_bad_rows: input should be a valid boolean, got 1",
    "failed = 'drop'": "workload.failed: unknown key; accepted: path, limit, ",
}


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_bad_key_is_refused(tmp_path, key):
    path = tmp_path / "mine.toml"
    path.write_text(f'[workload]\nkind = "table"\npath = "x"\n{key}\n')
    with pytest.raises(UserError) as fault:
        load_scenario(path)
    assert BAD_KEYS[key] in message_of(fault)


@settings(deadline=None)
@given(content=mangled(csv_of(), jsonl_of()))
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_any_bytes_are_read_or_refused(tmp_path_factory, content, kind):
    path = tmp_path_factory.getbasetemp() / "any-table"
    path.write_bytes(content)
    for skip in (False, True):
        requests, message = outcome(TableTrace, path, format=kind, columns=NAMED, skip_bad_rows=skip)
        assert requests or message.startswith(f"{path}: ")


def test_any_parquet_bytes_are_read_or_refused(tmp_path):
    good = parquet_of(tmp_path / "t.parquet", {"arrival": [1, 2], "prompt": [1, 1], "output": [1, 1]}).read_bytes()
    path = tmp_path / "any.parquet"

    @settings(deadline=None)
    @given(content=mangled(good))
    def check(content):
        path.write_bytes(content)
        requests, message = outcome(TableTrace, path)
        assert requests or message.startswith(f"{path}: ")

    check()
