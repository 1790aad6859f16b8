"""The reader of tables: three formats, columns of any name, times in any unit, and the messages for faults."""

import bz2
import gzip
import json
import lzma
import sys
from datetime import UTC, datetime
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import UserError
from kvsim.installation import install_extra
from kvsim.scenario.scenario import load_scenario
from kvsim.scenario.trace_files import trace_scenario
from tests.traces import lines, mangled, message_of, outcome
from tests.worlds import command
from workloads import BadRowError, Columns, Request, Segment, TableTrace, WorkloadError
from workloads.traces.table_form import table_form

NAMED = Columns("when", "ask", "say", "who", "rank")
READS = partial(TableTrace, columns=NAMED), "table.csv"
HEADER = "when,ask,say,who,rank,other"
GOOD = (
    (0.5, 3, 4, "a", 0, "x"),
    (1.25, 5, 6, "a", -1, "x"),
    (1.25, 7, 8, None, 0, "x"),
    (2.5, 9, 2, "b", 0, "x"),
)
REQUESTS = [
    Request(0, 0.0, 3, 4, 0.0, session=0, kind=1),
    Request(1, 0.0, 5, 6, 0.75, session=0, priority=-1, kind=2),
    Request(2, 0.75, 7, 8),
    Request(3, 2.0, 9, 2, session=1, kind=1),
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


# Order


def logged(rows):
    """Rows of (arrival, prompt, output, session), as they are written."""
    return lines("when,ask,say,who,rank", *(f"{at},{ask},{say},{who or ''},0" for at, ask, say, who in rows))


TALKS = [(1, 10, 5, "a"), (2, 20, 5, "b"), (3, 18, 5, "a"), (4, 30, 1, None), (5, 9, 5, "b"), (6, 40, 5, "a")]
"""Two sessions at the same time, in order of arrival, as servers log them."""


def as_read(trace):
    return [(r.arrival_s, r.prompt_tokens, r.think_s, r.session) for r in trace]


def test_rows_of_sessions_in_order_of_time_are_put_together(read):
    trace = read(logged(TALKS))
    assert as_read(trace) == [
        (0.0, 10, 0.0, 0),
        (0.0, 18, 2.0, 0),
        (0.0, 40, 3.0, 0),
        (1.0, 20, 0.0, 1),
        (1.0, 9, 3.0, 1),
        (3.0, 30, 0.0, None),
    ]
    assert "6 rows were put together in 2 sessions" in trace.notes[0]


def test_a_table_in_order_says_nothing_of_sorting(read):
    assert not any("sorted" in note for note in read(csv_of()).notes)
    assert read(logged([(1, 5, 5, None), (1, 6, 6, "a")])).notes == ()


@pytest.mark.slow
@settings(deadline=None)
@given(order=st.permutations(TALKS))
def test_the_order_of_the_rows_does_not_matter(tmp_path_factory, order):
    path = tmp_path_factory.getbasetemp() / "any-order.csv"
    path.write_bytes(logged(TALKS))
    expected = list(TableTrace(path, columns=NAMED))
    path.write_bytes(logged(order))
    trace = TableTrace(path, columns=NAMED)
    assert list(trace) == list(trace) == expected
    late = sum(max(order[: k + 1])[0] > row[0] for k, row in enumerate(order))
    assert any(f"{late} of them out of order" in note for note in trace.notes) or late == 0


rows_of_any_kind = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 60), st.integers(1, 9), st.sampled_from(["a", "b", "c", None])),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@settings(deadline=None)
@given(rows=rows_of_any_kind, keep=st.sampled_from([1.0, 0.5]), window=st.sampled_from([(0.0, None), (2.0, 7.0)]))
def test_sorted_rows_are_in_order_and_each_is_there_once(tmp_path_factory, rows, keep, window):
    """Rows with equal times stay as they are; a table that needs no sorting gives the same when it is sorted."""
    path = tmp_path_factory.getbasetemp() / "any-table.csv"
    path.write_bytes(logged(rows))
    whole = TableTrace(path, columns=NAMED)
    by_time = sorted(rows, key=lambda row: row[0])
    start = {}
    for row in by_time:
        start.setdefault(row[3], row[0])
    told = [(r.prompt_tokens, r.output_tokens) for r in whole]
    assert sorted(told) == sorted(row[1:3] for row in rows)
    for name in ("a", "b", "c"):
        turns = [row[1:3] for row in by_time if row[3] == name]
        at = next((k for k in range(len(told)) if told[k : k + len(turns)] == turns), None)
        assert at is not None
    arrivals = [r.arrival_s for r in whole]
    assert arrivals == sorted(arrivals)
    if not any("sorted" in note for note in whole.notes):
        again = TableTrace(path, columns=NAMED)
        object.__setattr__(again, "_sorts", True)
        assert list(again) == list(whole)
    options = {"columns": NAMED, "keep": keep, "start_s": window[0], "stop_s": window[1]}
    requests, message = outcome(TableTrace, path, **options)
    assert requests or "no requests" in message


def test_too_many_rows_to_sort_are_refused(read, monkeypatch):
    monkeypatch.setattr("workloads.traces.table_order.MAX_SORTED", 5)
    with pytest.raises(WorkloadError) as fault:
        read(logged(TALKS))
    assert "not in order of arrival, and more than 5 rows" in message_of(fault)
    assert read(logged(sorted(TALKS, key=lambda row: (str(row[3]), row[0]))[2:4])).n_requests == 2


def test_times_too_far_apart_to_be_sorted_are_refused(read):
    with pytest.raises(WorkloadError, match="292 years apart"):
        read(logged([(10**11, 1, 1, None), (1, 1, 1, None)]))


def test_a_long_prompt_of_a_session_begins_with_what_was_said_before(read):
    """18 tokens are the 10 of the first prompt, the 5 of its answer, and 3 more; 9 are too few for that."""
    trace = read(logged(TALKS))
    first, second, third, other, short, alone = trace
    assert second.content == (*first.content, first.answer, Segment(second.id, 0, 3))
    assert third.content == (*second.content, second.answer, Segment(third.id, 0, 17))
    assert other.content == (Segment(other.id, 0, 20),)
    assert short.content == (Segment(short.id, 0, 9),)
    assert alone.content == ()
    assert trace.prefixes == "tokens"
    assert "2 of 3 later turns are long enough to begin with the prompt and the answer" in trace.notes[1]


def test_sessions_whose_prompts_do_not_grow_say_nothing_of_what_they_share(read):
    """If fewer than half of the turns could repeat what was said, sessions are no conversations: users, perhaps."""
    trace = read(logged([(1, 10, 5, "a"), (2, 14, 5, "a"), (3, 8, 5, "a"), (4, 90, 5, "a")]))
    assert trace.prefixes == "unknown"
    assert "only 1 of 3 later turns are long enough to begin with the prompt and the answer" in trace.notes[0]
    assert {r.content for r in trace} == {()}


BAD_ROWS = {
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
@pytest.mark.parametrize("written", [csv_of, jsonl_of])
def test_a_bad_row_is_refused_by_its_number_or_left_out(read, tmp_path, bad, what, written):
    name = "table.csv" if written is csv_of else "table.jsonl"
    content = written([*GOOD, bad, (2.5, 77, 1, "b", 0, 0)])
    with pytest.raises(BadRowError) as fault:
        read(content, name)
    assert message_of(fault).startswith(f"{tmp_path / name}: row 5: {what}")
    trace = read(content, name, skip_bad_rows=True)
    assert [r.prompt_tokens for r in trace] == [3, 5, 7, 9, 77]
    assert "1 bad row skipped: row 5 (" in trace.notes[-1]


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
        (gzip.compress(good), "Parquet data in gzip"),
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
    assert list(scenario.build_workload()) == [Request(0, 0.0, 1, 2, session=0, kind=1), Request(1, 0.004, 3, 4)]
    text = scenario.to_toml()
    assert "workload.columns.priority" in text.splitlines()[-1]
    path.write_text(text)
    assert load_scenario(path).to_toml() == text
    assert list(load_scenario(path).build_workload()) == list(scenario.build_workload())


BAD_KEYS = {
    'columns = {arival = "t"}': "workload.columns.arival: unknown key; did you mean 'arrival'?",
    'columns = {arrival = ""}': "workload.columns.arrival: string should have at least 1 character",
    "columns = 3": "workload.columns: a table is expected, got 3",
    'delimiter = ";;"': "workload.delimiter: ';;' cannot separate fields; one character such as",
    'delimiter = "\\n"': "workload.delimiter: '\\n' cannot separate fields",
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


# The form of a table


FORMS = {
    "our names": (lines("Output,prompt,ARRIVAL", "1,2,3"), {}, ("csv", ("ARRIVAL", "prompt", "Output"), "s", ",")),
    "tabs": (lines("a\tb\tc", "1\t2\t3"), ("a", "b", "c"), ("csv", ("a", "b", "c"), "s", "\t")),
    "blanks": (lines("a , b, c", "1,2,3"), ("a", "b", "c"), ("csv", ("a ", " b", " c"), "s", ",")),
    "quotes": (lines('"a;x";b;c', "1;2;3"), ("a;x", "b", "c"), ("csv", ("a;x", "b", "c"), "s", ";")),
    "dates": (lines("a,b,c", "2026-03-01T10:00:00Z,2,3"), ("a", "b", "c"), ("csv", ("a", "b", "c"), "datetime", ",")),
    "since 1970": (lines("a,b,c", "1770000000000,2,3"), ("a", "b", "c"), ("csv", ("a", "b", "c"), "ms", ",")),
    "objects": (lines('{"a": 1.7e18, "b": 2, "c": 3}'), ("a", "b", "c"), ("jsonl", ("a", "b", "c"), "ns", ",")),
    "no rows": (lines("a,b,c"), ("a", "b", "c"), ("csv", ("a", "b", "c"), "s", ",")),
}


@pytest.mark.parametrize(("content", "given", "form"), FORMS.values(), ids=FORMS)
def test_the_form_of_a_table_is_found(tmp_path, content, given, form):
    path = tmp_path / "table"
    path.write_bytes(content)
    found = table_form(path, dict(zip(("arrival", "prompt", "output"), given, strict=False)))
    assert (found.format, found.columns[:3], found.time, found.delimiter) == form


def test_the_form_of_a_parquet_table_is_found(tmp_path):
    stamps = [datetime(2024, 5, 10, tzinfo=UTC)]
    path = parquet_of(tmp_path / "t", {"when": stamps, "prompt": [1], "output": [1], "session": ["a"]})
    found = table_form(path, {"arrival": "when"})
    assert (found.format, found.time, found.columns.session) == ("parquet", "datetime", "session")
    with pytest.raises(
        WorkloadError, match=r"no column is clearly arrival; name its columns with --columns .* found: when, pr"
    ):
        table_form(path)


@pytest.mark.slow
@settings(deadline=None)
@given(content=mangled(csv_of(), jsonl_of(), csv_of(delimiter=";")), named=st.booleans())
def test_any_bytes_have_a_form_or_are_refused(tmp_path_factory, content, named):
    path = tmp_path_factory.getbasetemp() / "any-form"
    path.write_bytes(content)
    columns = {"arrival": "when", "prompt": "ask", "output": "say", "session": "who"} if named else None

    def read(path):
        return trace_scenario(path, "table", columns=columns).build_workload()

    requests, message = outcome(read, path)
    assert requests or message.startswith(f"{path}: ")


def test_parquet_with_the_names_of_logs_needs_no_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "log.parquet"
    named = {"timestamp": [0.5, 1.5], "prompt_tokens": [40, 50], "completion_tokens": [4, 5], "user": ["a", "b"]}
    parquet.write_table(pa.table(named), path)
    found = table_form(path)
    assert (found.format, found.columns) == ("parquet", Columns("timestamp", "prompt_tokens", "completion_tokens"))
    assert table_form(path, {"prompt": "completion_tokens"}).columns.prompt == "completion_tokens"
