"""Long traces: memory does not grow with the rows, and reading blocks gives the same as reading row by row."""

import gzip
import tracemalloc
from collections import deque
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.traces import SHARED, needs_shared
from tests.workloads.generators.test_sessions import sessions_of
from tests.workloads.traces.test_azure import HEADER, WAYS_TO_WRITE_IT
from workloads import (
    AzureTrace,
    Columns,
    Fixed,
    MooncakeTrace,
    Synthetic,
    TableTrace,
    WorkloadError,
    poisson_gaps,
)
from workloads.traces import azure as azure_module
from workloads.traces.row_trace import RowTrace


class OneByOne(AzureTrace):
    """The control: a reader that reads rows one by one."""

    __slots__ = ()

    def _batches(self, *, check_all):
        return RowTrace._batches(self, check_all=check_all)


def outcome(reader, path, **options):
    """Every request, its time to the last bit, or the message."""
    try:
        trace = reader(path, **options)
        requests = list(trace)
    except WorkloadError as e:
        return str(e)
    assert trace.n_requests == len(requests)
    return [(r.arrival_s.hex(), *r) for r in requests]


def times(n, seed=1):
    """Nanoseconds after midnight, of n rows: bursts, pauses, and now and then nothing between two."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.integers(0, 3, n) * rng.integers(0, 10 ** rng.integers(1, 11, n))).tolist()


def stamp(ticks, decimals, offset="", mark=" "):
    seconds, beyond = divmod(ticks, 10**9)
    day, second = divmod(seconds, 86_400)
    fraction = f".{beyond:09}"[: decimals + 1] if decimals else ""
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return f"2024-02-{28 + day:02}{mark}{clock}{fraction}{offset}"


def trace_lines(n, decimals=7, offset="", end="\n", mark=" "):
    rows = (f"{stamp(t, decimals, offset, mark)},{1 + t % 9999},{1 + t % 77}" for t in times(n))
    return "".join(f"{row}{end}" for row in (HEADER, *rows)).encode()


@pytest.fixture(scope="module")
def any_path(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "any.csv"


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(azure_module, "_BLOCK", 150)


WRITTEN = {
    "2023": {"end": "\r\n"},
    "2024": {"decimals": 6, "offset": "+00:00"},
    "nanoseconds": {"decimals": 9},
    "one decimal": {"decimals": 1},
    "whole seconds": {"decimals": 0},
    "offset": {"offset": "-23:59", "mark": "T"},
    "Z": {"decimals": 0, "offset": "Z"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("keys", [{}, {"start_s": 30.0, "stop_s": 300.0, "rate_scale": 3.0}, {"limit": 70}], ids=str)
def test_many_rows_at_once_are_the_same_rows(any_path, monkeypatch, how, keys):
    any_path.write_bytes(trace_lines(300, **how))
    expected = outcome(OneByOne, any_path, **keys)
    assert isinstance(expected, list)
    assert len(expected) > 60
    with monkeypatch.context() as only_many:
        only_many.setattr(AzureTrace, "_rows", None)
        only_many.setattr(AzureTrace, "_read_lines", None)
        for block in (60, 150, 1 << 18):
            only_many.setattr(azure_module, "_BLOCK", block)
            assert outcome(AzureTrace, any_path, **keys) == expected


ODD = {
    "blank line": b"\n",
    "blank CRLF": b"\r\n",
    "spaces": b"2024-02-28 00:00:00.0000000 , 7, 8\n",
    "no fraction": b"2024-02-28 00:00:00,7,8\n",
    "other offset": b"2024-02-28 01:00:00.0000000+01:00,7,8\n",
    "mark": b"2024-02-28T00:00:00.0000000,7,8\n",
    "zeros": b"2024-02-28 00:00:00.0000000,00007,000000000008\n",
    "lone CR": b"2024-02-28 00:00:00.0000000,7,8\r",
    "quotes": b'2024-02-28 00:00:00.0000000,"7",8\n',
    "quoted line end": b'"2024-02-28 00:00:00.0000000\n",7,8\n',
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("at", [0, 1, 40, 99])
def test_an_odd_row_among_the_others_is_read_as_it_was(any_path, small_blocks, odd, at):
    head, *rows = trace_lines(100).splitlines(keepends=True)
    before = [odd.replace(b"2024-02-28 00:00:00", stamp(times(100)[at - 1], 0).encode()) if at else odd]
    any_path.write_bytes(b"".join([head, *rows[:at], *before, *rows[at:]]))
    expected = outcome(OneByOne, any_path)
    assert outcome(AzureTrace, any_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", ["2023", "2024", "whole seconds", "offset"])
def test_a_row_that_differs_in_any_one_character_is_read_as_it_was(any_path, monkeypatch, how):
    """Within a block, as its first row, and as the last row of the file."""
    head, *rows = trace_lines(7, **WRITTEN[how]).splitlines(keepends=True)
    size = len(rows[0])
    characters = (b"2", b"6", b"9", b":", b",", b"\n", b"\r", b" ", b"", b"\xb2")
    for at, (number, new) in product(range(size), enumerate(characters)):
        which = (3, 6)[(at + number) % 2]
        odd = rows[which][:at] + new + rows[which][at + 1 :]
        any_path.write_bytes(b"".join([head, *rows[:which], odd, *rows[which + 1 :]]))
        expected = outcome(OneByOne, any_path)
        for block in (3 * size - 1, 1 << 18):
            monkeypatch.setattr(azure_module, "_BLOCK", block)
            assert outcome(AzureTrace, any_path) == expected


LAST = {
    "text": b"2024-03-09 00:00:00.0000000,NaN,5\n",
    "back in time": b"2024-02-27 00:00:00.0000000,5,5\n",
    "no such day": b"2024-02-30 00:00:00.0000000,5,5\n",
    "no such hour": b"2024-03-09 24:00:00.0000000,5,5\n",
    "no tokens": b"2024-03-09 00:00:00.0000000,0,5\n",
    "too many": b"2024-03-09 00:00:00.0000000,10000001,5\n",
    "short": b"2024-03-09 00:00:00.0000000,5\n",
    "comma missing here, one too many there": b"2024-03-09 00:00:00.0000000,5\n,2024-03-09 00:00:00.0000000,5,5,\n",
    "not UTF-8": b"2024-03-09 00:00:00.0000000,5,\xff\n",
    "no line end": b"2024-03-09 00:00:00.0000000,5,5" + b"5" * 70_000,
    "open quote": b'"2024-03-09 00:00:00.0000000,5,5\n',
}


@pytest.mark.slow
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
@pytest.mark.parametrize("keys", [{}, {"limit": 3}], ids=str)
def test_a_bad_last_row_is_refused_at_the_start_with_the_same_message(any_path, last, keys):
    any_path.write_bytes(trace_lines(6_000) + last)  # More than a block.
    expected = outcome(OneByOne, any_path, **keys)
    assert isinstance(expected, str)
    with pytest.raises(WorkloadError) as fault:
        AzureTrace(any_path, **keys)
    assert str(fault.value) == expected


def mangled(draw_from):
    """Some bytes of a file replaced, at several places."""
    cuts = st.lists(
        st.tuples(
            st.integers(0, 400),
            st.integers(0, 40),
            st.binary(max_size=3)
            | st.sampled_from([b'"', b"\r", b"\n", b",", b"9", b"0", b" ", b"\xef\xbb\xbf", b"Z"]),
        ),
        max_size=3,
    )

    def mangle(content, places):
        for at, n, new in places:
            content = content[:at] + new + content[at + n % 3 :]
        return content

    return st.builds(mangle, draw_from, cuts)


small_files = st.one_of(
    st.sampled_from(list(WAYS_TO_WRITE_IT.values())),
    st.builds(
        trace_lines,
        st.integers(0, 9),
        st.sampled_from([0, 1, 6, 7, 9]),
        st.sampled_from(["", "Z", "+00:00", "+14:00", "-24:00", "+0100"]),
        st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
        st.sampled_from([" ", "T", "_"]),
    ),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(content=mangled(small_files), block=st.integers(1, 300))
def test_whatever_is_done_to_a_file_both_ways_say_the_same(any_path, content, block):
    any_path.write_bytes(content)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(azure_module, "_BLOCK", block)
        assert outcome(AzureTrace, any_path) == outcome(OneByOne, any_path)


@pytest.mark.slow
@settings(deadline=None, max_examples=75)
@given(
    days=st.lists(
        st.tuples(
            st.sampled_from(["0000", "0001", "0002", "1900", "2023", "2024", "9998", "9999"]),
            st.sampled_from(["01-01", "12-31", "02-28", "02-29", "02-30", "00-01", "01-00", "13-01"]),
        ).map("-".join),
        min_size=1,
        max_size=4,
    ),
    clock=st.sampled_from(["00:00:00", "23:59:59", "24:00:00", "23:60:00", "00:00:60"]),
    offset=st.sampled_from(["", "+00:00", "+23:59", "-23:59", "+24:00", "+00:60"]),
    ordered=st.booleans(),
)
@example(["1900-01-01", "2600-01-01"], "00:00:00", "", True)
@example(["9998-12-30", "9999-12-31"], "23:59:59", "-23:59", True)
@example(["9999-01-01", "9999-12-31"], "23:59:59", "-23:59", True)
@example(["0001-01-02", "0001-01-01"], "00:00:00", "+23:59", False)
def test_days_at_the_edges_of_the_calendar(any_path, days, clock, offset, ordered):
    rows = [f"{day} {clock}.5{offset},1,1" for day in (sorted(days) if ordered else days)]
    any_path.write_text("\n".join([HEADER, *rows]))
    assert outcome(AzureTrace, any_path) == outcome(OneByOne, any_path)


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", ["azure2023_conv", "azure2023_code"])
def test_the_published_traces_are_read_many_rows_at_once_and_the_same(name, monkeypatch):
    (path,) = (SHARED / name).glob("*.csv.gz")
    expected = outcome(OneByOne, path)
    monkeypatch.setattr(AzureTrace, "_rows", None)
    monkeypatch.setattr(AzureTrace, "_read_lines", None)
    assert outcome(AzureTrace, path) == expected


def peak(consume):
    """Most bytes that were held at a time, beyond those before."""
    tracemalloc.start()
    try:
        consume()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def write_rows(path, rows):
    with gzip.open(path, "wt", compresslevel=1, newline="") as text:
        text.writelines(rows)


@pytest.mark.slow
def test_a_long_azure_trace_is_never_held_whole(tmp_path):
    path, n = tmp_path / "long.csv.gz", 50_000
    clocks = (f"{i // 36_000:02}:{i // 600 % 60:02}:{i // 10 % 60:02}.{i % 10}000000" for i in range(n))
    write_rows(path, (f"{HEADER}\r\n", *(f"2023-11-16 {clock},{374 + i % 9},44\r\n" for i, clock in enumerate(clocks))))

    def read():
        trace = AzureTrace(path)
        assert trace.n_requests == n
        last = deque(trace, maxlen=1)[0]
        assert (last.id, last.arrival_s) == (n - 1, (n - 1) / 10)

    assert peak(read) < 6e6


@pytest.mark.slow
def test_of_an_odd_block_no_more_is_held_than_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(azure_module, "_BLOCK", 1 << 14)
    path, n = tmp_path / "odd.csv.gz", 8_000
    write_rows(path, (f"{HEADER}\n", *(f'"2023-11-16 {i // 3600:02}:{i // 60 % 60:02}:00",1,1\n' for i in range(n))))
    assert peak(lambda: deque(AzureTrace(path), maxlen=0)) < 2e6


@pytest.mark.slow
def test_reading_a_mooncake_trace_holds_no_ids(tmp_path):
    """The check at the start must hold those seen, the reading none."""
    path, n = tmp_path / "long.jsonl.gz", 3_000
    ids = (list(range(10 * i, 10 * i + 10)) for i in range(n))
    rows = (
        f'{{"timestamp": {i}, "input_length": 5120, "output_length": 1, "hash_ids": {row}}}\n'
        for i, row in enumerate(ids)
    )
    write_rows(path, rows)
    made = []
    assert peak(lambda: made.append(MooncakeTrace(path))) < 200 * 10 * n
    assert peak(lambda: deque(made[0], maxlen=0)) < 2e6


def table_rows(n, sessions):
    """A table of ``n`` rows; with ``sessions``, those of each are scattered over all of it."""
    names = (f"u{i % 500}" if sessions else "" for i in range(n))
    return ["arrival,prompt,output,who\n", *(f"{i / 8},{100 + i % 9},20,{name}\n" for i, name in enumerate(names))]


@pytest.mark.slow
def test_a_long_table_in_order_is_never_held_whole(tmp_path):
    path, n = tmp_path / "long.csv.gz", 10_000
    write_rows(path, table_rows(n, sessions=False))
    assert peak(lambda: deque(TableTrace(path, columns=Columns(session="who")), maxlen=0)) < 2e6


@pytest.mark.slow
def test_a_table_to_be_sorted_takes_some_bytes_a_row(tmp_path):
    path, n = tmp_path / "long.csv.gz", 10_000
    write_rows(path, table_rows(n, sessions=True))

    def read():
        trace = TableTrace(path, columns=Columns(session="who"))
        assert len({request.session for request in trace}) == 500

    assert peak(read) < 200 * n


GENERATED = {
    "synthetic": lambda: Synthetic(1, 20_000, poisson_gaps(1.0), Fixed(3), Fixed(3)),
    "sessions": lambda: sessions_of(sessions=6_000, turns=Fixed(3)),
    "long sessions": lambda: sessions_of(sessions=60, turns=Fixed(300)),
    "cut sessions": lambda: sessions_of(sessions=8_000, max_context=300),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", GENERATED.values(), ids=GENERATED)
def test_what_is_generated_is_not_kept(make):
    assert peak(lambda: deque(make(), maxlen=0)) < 2e6
