"""The reader of what recorded servers were asked: what a file may look like, and what each fault is called."""

import gzip
import json

import pytest

from kvsim.scenario.scenario import load_scenario
from tests.traces import message_of
from workloads import RecordedTrace, Request, Segment, WorkloadError

READS = RecordedTrace, "server.jsonl"


def row(arrival=0.0, prompt=(("p0", 0, 40),), output=2, **others):
    keys = {"kind": "request", "id": "a", "arrival_s": arrival, "prompt": [list(s) for s in prompt]}
    return json.dumps({**keys, "output_tokens": output, "scheduled_s": None, **others})


META = json.dumps({"kind": "meta", "engine": "vllm", "requests": 3})
SECOND = json.dumps({"kind": "second", "t": 1.0, "running": 1, "waiting": 0})
ROWS = (META, row(), row(0.5, (("p0", 0, 16), ("p1", 16, 8)), 4), row(2.0, (("p1", 16, 8),), 1), SECOND)
REQUESTS = [
    Request(0, 0.0, 40, 2, content=(Segment(0, 0, 40),)),
    Request(1, 0.5, 24, 4, content=(Segment(0, 0, 16), Segment(1, 16, 8))),
    Request(2, 2.0, 8, 1, content=(Segment(1, 16, 8),)),
]


def lines(*rows):
    return "".join(text + "\n" for text in rows).encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_equal_segments_are_equal_texts(read, pack):
    trace = read(pack(lines(*ROWS)))
    assert list(trace) == list(trace) == REQUESTS
    assert (trace.n_requests, trace.prefixes) == (3, "tokens")


def test_requests_are_sorted_by_arrival_and_times_start_with_the_first(read):
    found = list(read(lines(META, row(7.5, output=3), row(5.0, output=4))))
    assert [(r.id, r.arrival_s, r.output_tokens) for r in found] == [(0, 0.0, 4), (1, 2.5, 3)]


def test_a_limit_and_another_rate(read):
    assert [r.arrival_s for r in read(lines(*ROWS), limit=2, rate_scale=2.0)] == [0.0, 0.25]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "no key 'kind'"),
        ('{"kind": "call"}', 'kind "call"; expected meta, request, second'),
        (row(-1.0), "arrival_s -1.0 is out of range"),
        (row(prompt=()), "prompt [...] is not a list of segments"),
        (row(prompt=[["p0", 0]]), 'prompt: ["p0", 0] is not a segment [source, start, n]'),
        (row(prompt=[["p0", 0, 0]]), 'prompt: ["p0", 0, 0] is not a segment'),
        (row(prompt=[[None, 0, 5]]), "prompt: [null, 0, 5] is not a segment"),
        (row(output="many"), 'output_tokens "many" is not a whole number'),
        (row().replace(' "output_tokens": 2,', ""), "no key 'output_tokens'"),
    ],
)
def test_a_fault_is_one_line_with_its_row(read, text, what):
    with pytest.raises(WorkloadError) as fault:
        read(lines(*ROWS, text))
    assert f"server.jsonl: row 6: {what}" in message_of(fault)
    skipped = read(lines(*ROWS, text), skip_bad_rows=True)
    assert list(skipped) == REQUESTS


def test_a_file_without_requests_is_refused(read):
    with pytest.raises(WorkloadError, match="no requests"):
        read(lines(META, SECOND))


def test_a_scenario_may_replay_it(tmp_path):
    (tmp_path / "server.jsonl").write_bytes(lines(*ROWS))
    (tmp_path / "mine.toml").write_text('[workload]\nkind = "recorded"\npath = "server.jsonl"\n')
    assert list(load_scenario(tmp_path / "mine.toml").build_workload()) == REQUESTS
