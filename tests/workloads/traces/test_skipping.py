"""What all readers share: bad rows left out, thinning, and files that change between the check and the reading."""

import gzip
import itertools
import os
import pickle

import numpy as np
import pytest

from kvsim.scenario.scenario import load_scenario
from tests.traces import lines, message_of
from tests.workloads.traces.test_azure import HEADER
from tests.workloads.traces.test_mooncake import row as mooncake_row
from tests.workloads.traces.test_streaming import peak
from workloads import AzureTrace, BadRowError, MooncakeTrace, WorkloadError, named_rng
from workloads.traces import azure as azure_module
from workloads.traces import trace as traces_module


def stamp(i):
    return f"2023-11-16 {i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}.0000000"


def azure_rows(n):
    return [f"{stamp(i)},{100 + i},{1 + i % 9}" for i in range(n)]


def prompts(trace):
    return [request.prompt_tokens for request in trace]


@pytest.mark.parametrize("block", [60, 300, 1 << 18])
@pytest.mark.parametrize("bad", [{0}, {1, 2, 3}, {39}, {0, 17, 39}, set(range(5, 35))], ids=str)
def test_the_good_rows_are_those_of_a_file_without_the_bad_ones(write, monkeypatch, block, bad):
    monkeypatch.setattr(azure_module, "_BLOCK", block)
    n = 40 if len(bad) < 20 else 61
    rows = azure_rows(n)
    damaged = [f"{row}x" if i in bad else row for i, row in enumerate(rows)]
    trace = AzureTrace(write(lines(HEADER, *damaged)), skip_bad_rows=True)
    expected = AzureTrace(write(lines(HEADER, *(row for i, row in enumerate(rows) if i not in bad)), "good.csv"))
    assert list(trace) == list(trace) == list(expected)
    assert trace.n_requests == n - len(bad)
    (note,) = trace.notes
    assert f": {len(bad)} bad row{'s' if len(bad) > 1 else ''} skipped: row {min(bad) + 1} (GeneratedTokens '" in note
    assert note.endswith(", and 10 more") == (len(bad) == 30)


def test_the_first_bad_rows_are_named_with_what_is_wrong(write):
    rows = azure_rows(5)
    rows[1], rows[3] = f"{stamp(1)},NaN,5", f"{stamp(0)},5,5"
    path = write(lines(HEADER, *rows))
    assert AzureTrace(path, skip_bad_rows=True).notes == (
        f"{path}: 2 bad rows skipped: row 2 (ContextTokens 'NaN' is not a whole number of tokens), "
        "row 4 (TIMESTAMP '2023-11-16 00:00:00.0000000' is earlier than the row before)",
    )


def test_a_row_is_compared_with_the_last_good_one(write):
    times = (10, 90, 20, 30)  # the second is bad for another reason, and its time does not count
    rows = [f"{stamp(t)},{'x' if t == 90 else t},1" for t in times]
    assert prompts(AzureTrace(write(lines(HEADER, *rows)), skip_bad_rows=True)) == [10, 20, 30]
    first = [f"{stamp(50)},0,1", f"{stamp(10)},1,1", f"{stamp(12)},2,1"]
    assert [r.arrival_s for r in AzureTrace(write(lines(HEADER, *first)), skip_bad_rows=True)] == [0.0, 2.0]


def test_a_bad_chain_leaves_no_trace_and_is_skipped_again(write):
    rows = (
        mooncake_row(0, 700, 1, [1, 2]),
        mooncake_row(1, 1500, 1, [3, 4, 2]),  # bad: 2 follows 1; 3 and 4 are forgotten
        mooncake_row(2, 700, 1, [4, 3]),
        mooncake_row(3, 700, 1, [1, 2]),
    )
    trace = MooncakeTrace(write(lines(*rows), "t.jsonl"), skip_bad_rows=True)
    assert [[s.source for s in r.content] for r in trace] == [[1, 2], [4, 3], [1, 2]]
    assert [r.arrival_s for r in trace] == [0.0, 0.002, 0.003]
    assert "row 2 (hash_ids: 2 follows 4 but follows 1 elsewhere" in trace.notes[0]


def test_too_many_bad_rows_are_another_kind_of_file(write, monkeypatch):
    path = write(lines(HEADER, *azure_rows(12), *(f"{i},x" for i in range(12))))
    monkeypatch.setattr("workloads.traces.bad_rows.MAX_BAD_ROWS", 12)
    assert AzureTrace(path, skip_bad_rows=True).n_requests == 12
    monkeypatch.setattr("workloads.traces.bad_rows.MAX_BAD_ROWS", 11)
    with pytest.raises(WorkloadError, match="more than 11 bad rows; the first: row 13: 2 fields, the header has 3"):
        AzureTrace(path, skip_bad_rows=True)


@pytest.mark.slow
def test_bad_rows_take_eight_bytes_each(write):
    n = 30_000
    path = write(gzip.compress(lines(HEADER, *azure_rows(1) * n) + b"x\n" * n))
    assert peak(lambda: AzureTrace(path, skip_bad_rows=True)) < 3e6


def test_a_file_of_bad_rows_alone_is_refused(write):
    with pytest.raises(WorkloadError) as fault:
        AzureTrace(write(lines(HEADER, "x", "y")), skip_bad_rows=True)
    assert message_of(fault).endswith("no requests; 2 bad rows skipped, the first: row 1: 1 field, the header has 3")


def test_a_bad_row_knows_its_number_in_another_process_too(write):
    with pytest.raises(BadRowError) as fault:
        AzureTrace(write(lines(HEADER, *azure_rows(2), "x")))
    copy = pickle.loads(pickle.dumps(fault.value))
    assert (copy.row, str(copy)) == (3, str(fault.value))


def test_limit_and_window_count_good_rows(write):
    rows = azure_rows(9)
    rows[2] = "x"
    path = write(lines(HEADER, *rows))
    assert prompts(AzureTrace(path, limit=3, skip_bad_rows=True)) == [100, 101, 103]
    assert prompts(AzureTrace(path, start_s=1.0, stop_s=5.0, skip_bad_rows=True)) == [101, 103, 104]


@pytest.mark.slow
def test_thinning_keeps_a_share_by_seed_whatever_the_batches(write, monkeypatch):
    path = write(lines(HEADER, *azure_rows(900)))
    drawn = named_rng(7, "thinning").random(900) < 0.3
    expected = (np.flatnonzero(drawn) + 100).tolist()
    for block, batch in ((1 << 18, 4096), (500, 4096), (60, 3)):
        monkeypatch.setattr(azure_module, "_BLOCK", block)
        monkeypatch.setattr(traces_module, "_BATCH", batch)
        trace = AzureTrace(path, keep=0.3, seed=7)
        assert prompts(trace) == prompts(trace) == expected
        assert trace.n_requests == len(expected)
        assert [r.id for r in trace] == list(range(len(expected)))
    assert prompts(AzureTrace(path, keep=0.3, seed=8)) != expected
    assert prompts(AzureTrace(path, keep=1.0, seed=8)) == list(range(100, 1000))


def test_thinning_comes_after_the_window_and_before_the_limit(write):
    path = write(lines(HEADER, *azure_rows(400)))
    drawn = (np.flatnonzero(named_rng(7, "thinning").random(300) < 0.5) + 150).tolist()
    assert prompts(AzureTrace(path, start_s=50, stop_s=350, keep=0.5, seed=7)) == drawn
    trace = AzureTrace(path, start_s=50, stop_s=350, keep=0.5, seed=7, limit=10)
    assert prompts(trace) == drawn[:10]
    assert trace.n_requests == 10


def test_a_share_that_keeps_nothing_is_refused(write):
    with pytest.raises(WorkloadError, match=r"no requests \(keep = 1e-09\)"):
        AzureTrace(write(lines(HEADER, *azure_rows(9))), keep=1e-9)


def keeping_its_date(path, change):
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "longer": lambda rows: [*rows, f"{stamp(80)},1,1"],
    "shorter": lambda rows: rows[:-1],
    "a row gone bad": lambda rows: [*rows[:4], rows[4].replace(",", ";"), *rows[5:]],
    "another header": lambda rows: [rows[0].replace(",", ";")],
    "empty": lambda rows: [],
}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_since_it_was_checked_is_refused(write, change, skip):
    rows = [HEADER, *azure_rows(9)]
    path = write(lines(*rows))
    trace = AzureTrace(path, skip_bad_rows=skip)
    write(lines(*CHANGES[change](rows)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(WorkloadError, match=r"trace\.csv: changed since it was checked \(.*\); run again"):
        list(trace)


@pytest.mark.parametrize("change", ["shorter", "a row gone bad", "another header", "empty"])
def test_also_if_its_size_and_date_do_not_tell(write, monkeypatch, change):
    rows = [HEADER, *azure_rows(9)]
    path = write(lines(*rows))
    monkeypatch.setattr(traces_module, "_state_of", lambda path: (str(path), 0, 0))
    for skip in (False, True):
        trace = AzureTrace(write(lines(*rows)), skip_bad_rows=skip)
        keeping_its_date(path, lambda: write(lines(*CHANGES[change](rows))))
        with pytest.raises(WorkloadError) as fault:
            list(trace)
        assert message_of(fault).startswith(f"{path}: ")


def test_a_file_that_is_gone_is_refused(write):
    path = write(lines(HEADER, *azure_rows(3)))
    trace = AzureTrace(path)
    path.unlink()
    with pytest.raises(WorkloadError, match="changed since it was checked"):
        list(trace)


def test_two_readings_at_a_time_do_not_disturb_each_other(write):
    rows = azure_rows(30)
    rows[3], rows[20] = "x", "y"
    trace = AzureTrace(write(lines(HEADER, *rows)), skip_bad_rows=True, keep=0.7)
    expected = list(trace)
    both = list(itertools.zip_longest(trace, trace))
    assert both == [(request, request) for request in expected]


def test_what_is_generated_needs_no_notes():
    scenarios = ("chat", "assistant")
    assert [tuple(load_scenario(name).build_workload().notes) for name in scenarios] == [(), ()]
