"""The Mooncake trace reader: what a trace may look like, what each fault is called, and the real file."""

import gzip
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.scenario.scenario import load_scenario
from tests.traces import SHARED, message_of, needs_shared
from workloads import MooncakeTrace, Request, Segment, WorkloadError

READS = MooncakeTrace, "trace.jsonl"


def row(timestamp=0, input_length=700, output_length=9, hash_ids=(5, 6), **others):
    keys = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps({**keys, "hash_ids": list(hash_ids), **others})


def lines(*rows, end="\n"):
    return "".join(text + end for text in rows).encode()


def blocks(*ids):
    return tuple(Segment(i, 0, 512) for i in ids)


ROWS = (row(), row(3000, 512, 1, [5]), row(3000, 1025, 40, [5, 6, 70]), row(9500, 1, 2, [8]))
REQUESTS = [
    Request(0, 0.0, 700, 9, content=blocks(5, 6)),
    Request(1, 3.0, 512, 1, content=blocks(5)),
    Request(2, 3.0, 1025, 40, content=blocks(5, 6, 70)),
    Request(3, 9.5, 1, 2, content=blocks(8)),
]


WAYS_TO_WRITE_IT = {
    "plain": lines(*ROWS),
    "gzip": gzip.compress(lines(*ROWS)),
    "byte order mark": b"\xef\xbb\xbf" + lines(*ROWS),
    "CRLF": lines(*ROWS, end="\r\n"),
    "no final newline": lines(*ROWS).removesuffix(b"\n"),
    "blank lines": lines("", *ROWS[:2], " ", "", *ROWS[2:], "", "\t"),
    "spaces": lines(*(f" {text.replace(',', ' , ')} " for text in ROWS)),
    "no spaces": lines(*(text.replace(" ", "") for text in ROWS)),
    "other keys": lines(*(text.replace("}", ', "type": "text", "extra": {"a": [1.5, null]}}') for text in ROWS)),
    "another order": lines(*(json.dumps(dict(reversed(json.loads(text).items()))) for text in ROWS)),
    "a clock of its own": lines(*(row(**{**json.loads(t), "timestamp": json.loads(t)["timestamp"] + 7}) for t in ROWS)),
}


@pytest.mark.parametrize("content", WAYS_TO_WRITE_IT.values(), ids=WAYS_TO_WRITE_IT)
def test_the_same_requests_however_they_are_written(read, content):
    trace = read(content)
    assert list(trace) == list(trace) == REQUESTS
    assert trace.n_requests == 4
    assert trace.users is None


def test_the_content_covers_the_prompt(read):
    for request in read(lines(*ROWS)):
        covered = sum(segment.n for segment in request.content)
        assert request.prompt_tokens <= covered < request.prompt_tokens + 512


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024, 1025, 10**7])
def test_one_id_for_each_block_begun(read, tokens):
    ids = list(range(math.ceil(tokens / 512)))
    assert next(iter(read(lines(row(0, tokens, 1, ids))))).content == blocks(*ids)
    for wrong in (ids[:-1], [*ids, len(ids)]):
        with pytest.raises(WorkloadError, match=rf"row 1: {len(wrong)} hash_ids for input_length {tokens}; expected"):
            read(lines(row(0, tokens, 1, wrong)))


def without(key):
    return json.dumps({k: v for k, v in json.loads(row(9600)).items() if k != key})


BAD_ROWS = {
    "cut": (row(9600)[:-2], "not JSON (Expecting ',' delimiter, column 79)"),
    "two rows in one": (row(9600) + row(9600), "not JSON (Extra data"),
    "NaN": (row(9600, float("nan")), "not JSON (NaN is no number in JSON)"),
    "Infinity": (row(9600, float("inf")), "not JSON (Infinity"),
    "NaN where nobody looks": (row(9600, score=float("nan")), "not JSON (NaN"),
    "key twice": (row(9600).replace("}", ', "timestamp": 9700}'), 'not JSON (key "timestamp" twice)'),
    "long number": (row(9600).replace("700", "7" * 5000), "not JSON (Exceeds the limit"),
    "nested": ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
    "nested where nobody looks": (row(9600, x=0).replace("0}", '{"a":' * 200_000 + "0" + "}" * 200_001), "nested too"),
    "CSV": ("9600,700,9", "not JSON"),
    "a list": ("[9600, 700, 9]", "an array; one JSON object a line is expected"),
    "a number": ("9600", "9600 is not an object"),
    "no timestamp": (without("timestamp"), "no key 'timestamp'; expected timestamp, input_length, "),
    "no input_length": (without("input_length"), "no key 'input_length'"),
    "no output_length": (without("output_length"), "no key 'output_length'"),
    "no hash_ids": (without("hash_ids"), "no key 'hash_ids'"),
    "back in time": (row(9499), "timestamp 9499 is earlier than the row before"),
    "before time": (row(-1), "timestamp -1 is out of range"),
    "seconds": (row(9.6), "timestamp 9.6 is not a whole number"),
    "text for a time": (row("9600"), 'timestamp "9600" is not a whole number'),
    "the end of time": (row(10**400), "timestamp 1000000"),
    "no length": (row(9600, None), "input_length null is not a whole number"),
    "true": (row(9600, True, 9, [5]), "input_length true is not a whole number"),
    "fraction": (row(9600, 700.0), "input_length 700.0 is not a whole number"),
    "zero": (row(9600, 0, 9, []), "input_length 0 is out of range; expected 1 to 10000000"),
    "no output": (row(9600, 700, 0), "output_length 0 is out of range"),
    "huge": (row(9600, 700, 10**7 + 1), "output_length 10000001 is out of range"),
    "text with a newline": (row(9600, "7\n00\u2028"), r'input_length "7\n00\u2028" is not'),
    "long text": (row(9600, "7" * 99), f'input_length "{"7" * 36}... is not'),
    "ids in text": (row(9600).replace("[5, 6]", '"5, 6"'), 'hash_ids "5, 6" is not a list'),
    "ids in an object": (row(9600).replace("[5, 6]", '{"5": 6}'), "hash_ids {...} is not a list"),
    "id in text": (row(9600, hash_ids=["5", 6]), 'hash_ids: "5" is not a whole number from 0 to 281474976710655'),
    "true id": (row(9600, hash_ids=[5, True]), "hash_ids: true is not"),
    "list for an id": (row(9600, hash_ids=[5, [6]]), "hash_ids: [...] is not"),
    "negative id": (row(9600, hash_ids=[5, -6]), "hash_ids: -6 is not"),
    "the number of an answer": (row(9600, hash_ids=[5, 2**48]), "hash_ids: 281474976710656 is not"),
    "another parent": (row(9600, hash_ids=[8, 6]), "hash_ids: 6 follows 8 but follows 5 elsewhere; an id has one"),
    "a parent of its own": (row(9600, hash_ids=[5, 5]), "hash_ids: 5 follows 5 but comes first elsewhere"),
    "no parent": (row(9600, hash_ids=[6, 71]), "hash_ids: 6 comes first but follows 5 elsewhere"),
    "the same twice in one row": (row(9600, 1300, 9, [90, 91, 90]), "hash_ids: 90 follows 91 but comes first"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_its_number(read, tmp_path, bad, what):
    with pytest.raises(WorkloadError) as fault:
        read(lines(*ROWS, "", bad, row(9700)))
    assert message_of(fault).startswith(f"{tmp_path / 'trace.jsonl'}: row 5: ")
    assert what in message_of(fault)
    assert len(message_of(fault)) < 300 + len(str(tmp_path))


def test_the_largest_id_and_equal_times_are_legal(read):
    trace = read(lines(row(5, hash_ids=[2**48 - 1, 0]), row(5, hash_ids=[2**48 - 1, 0])))
    assert [request.arrival_s for request in trace] == [0.0, 0.0]


BAD_FILES = {
    "empty": (b"", "no requests"),
    "blank": (b"\n\n \n", "no requests"),
    "binary junk": (bytes(range(256)), "not UTF-8 text (byte 0x80); a trace is expected, CSV or JSONL"),
    "UTF-16": (lines(*ROWS).decode().encode("utf-16"), "not UTF-8"),
    "a line without end": (lines(ROWS[0]) + b"[" * 5_000_000, "line 2: longer than 4194304 characters"),
    "blanks without end": (b" " * 5_000_000, "line 1: longer than 4194304 characters"),
}


@pytest.mark.parametrize(("content", "what"), BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_bad_file_is_refused(read, tmp_path, content, what, pack):
    with pytest.raises(WorkloadError) as fault:
        read(pack(content))
    assert message_of(fault).startswith(f"{tmp_path / 'trace.jsonl'}: ")
    assert what in message_of(fault)


def every_three_seconds(n):
    return lines(*(row(3000 * i, 100 + i, 1, [i]) for i in range(n)))


def test_window_limit_and_scale_are_those_of_every_trace(read):
    trace = read(every_three_seconds(9), limit=2, rate_scale=2.0, start_s=4.0, stop_s=15.0)
    assert list(trace) == [
        Request(0, 1.0, 102, 1, content=blocks(2)),
        Request(1, 2.5, 103, 1, content=blocks(3)),
    ]
    assert trace.n_requests == 2
    assert read(every_three_seconds(9), start_s=3.0, stop_s=9.0).n_requests == 2
    with pytest.raises(WorkloadError, match=r"trace\.jsonl: no requests in the window"):
        read(every_three_seconds(9), start_s=100.0)


def test_the_whole_file_is_checked_whatever_is_kept_of_it(read):
    content = every_three_seconds(9) + lines(row(99_000, 600, 1, [1, 0]))
    for options in ({"limit": 2}, {"stop_s": 6.0}):
        with pytest.raises(WorkloadError, match="row 10: hash_ids: 0 follows 1 but comes first elsewhere"):
            read(content, **options)


def test_a_scenario_names_a_trace_and_survives_its_own_file(read, tmp_path):
    read(every_three_seconds(9))
    path = tmp_path / "mine.toml"
    keys = 'path = "trace.jsonl"\nlimit = 3\nrate_scale = 3.0\nstart_s = 3.0\nstop_s = 99.0\n'
    for text, kept in ((keys, 3), ('path = "trace.jsonl"\n', 9)):
        path.write_text(f'[workload]\nkind = "mooncake"\n{text}', encoding="utf-8")
        scenario = load_scenario(path)
        assert scenario.workload.count_key == "limit"
        assert isinstance(scenario.build_workload(), MooncakeTrace)
        (tmp_path / "results").mkdir(exist_ok=True)
        copy = tmp_path / "results" / "scenario.toml"
        copy.write_text(scenario.to_toml(), encoding="utf-8")
        assert load_scenario(copy).to_toml() == scenario.to_toml()
        assert list(load_scenario(copy).build_workload()) == list(scenario.build_workload())
        assert scenario.build_workload().n_requests == kept


any_number = st.one_of(st.integers(-2, 2000), st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
any_ids = st.lists(st.integers(0, 5) | any_number, max_size=4) | any_number
any_row = st.one_of(
    st.builds(row, any_number, any_number, any_number, st.lists(st.integers(0, 5), max_size=4)),
    st.fixed_dictionaries(
        {},
        optional={
            "timestamp": any_number,
            "input_length": any_number,
            "output_length": any_number,
            "hash_ids": any_ids,
        },
    ).map(json.dumps),
    st.builds(
        row, st.integers(0, 20), st.integers(1, 1600), st.integers(1, 9), any_ids.filter(lambda x: isinstance(x, list))
    ),
)
mutated = st.tuples(st.sampled_from(list(WAYS_TO_WRITE_IT.values())), st.integers(0, 400), st.binary(max_size=3)).map(
    lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
)
any_content = st.one_of(
    mutated, st.lists(any_row, max_size=4).map(lambda rows: lines(*rows)), st.text(max_size=99).map(str.encode)
)


@pytest.fixture(scope="module")
def any_path(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "any.jsonl"


def outcome(path):
    """The requests, and the message if there are none."""
    try:
        return list(MooncakeTrace(path)), ""
    except WorkloadError as e:
        return [], str(e)


@pytest.mark.slow
@settings(deadline=None)
@given(content=any_content)
def test_any_bytes_are_read_or_refused(any_path, content):
    any_path.write_bytes(content)
    requests, message = outcome(any_path)
    if not requests:
        assert message.startswith(f"{any_path}: ")
        assert len(message.splitlines()) == 1
        return
    arrivals = [request.arrival_s for request in requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    parents = {}
    for request in requests:
        assert request.output_tokens >= 1
        assert len(request.content) == math.ceil(request.prompt_tokens / 512)
        for before, segment in itertools.pairwise((None, *request.content)):
            assert parents.setdefault(segment, before) == before


@pytest.mark.slow
@needs_shared
def test_the_published_trace():
    (path,) = (SHARED / "mooncake_conversation").glob("*.jsonl.gz")
    requests = list(MooncakeTrace(path))
    blocks_of_all = [segment for request in requests for segment in request.content]
    assert (len(requests), len(blocks_of_all), len(set(blocks_of_all))) == (12_031, 288_500, 182_790)
    assert len({request.arrival_s for request in requests}) == 1_180
    assert {request.content[0] for request in requests} == {Segment(0, 0, 512)}
