"""The RAGPulse reader: texts and their lengths, the clock that starts anew, and what each fault is called."""

import gzip
import json
import shutil

import pytest

from policies import Content
from tests.traces import SHARED, lines, message_of, needs_shared
from workloads import BadRowError, RagPulseTrace, Request, WorkloadError

READS = RagPulseTrace, "0_trace.jsonl"
WEEK = 604_800
COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
FILES = {
    "1_sys_prompt.jsonl": ("sys_prompt_id", {1: 100}),
    "2_passages.jsonl": ("passage_id", {1: 10, 2: 20}),
    "3_history.jsonl": ("history_id", {5: 7}),
    "4_user_input.jsonl": ("user_input_id", {9: 3}),
    "5_web_search.jsonl": ("web_search_id", {8: 4}),
}


def row(timestamp="0", input_length=200, output_length=9, texts=((1,), (2, 1), (5,), (8,), (9,)), **others):
    ids = dict(zip(COMPONENTS, map(list, texts), strict=True))
    keys = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    return json.dumps({**keys, "session_id": "x", **others})


ROWS = (row(), row("3", 130, 1, ((1,), (2,), (), (), (9,))), row("3.5", 50, 2, ((), (), (), (), ())))


@pytest.fixture
def texts(tmp_path):
    """The files that say how long each text is."""
    for name, (key, lengths) in FILES.items():
        rows = [json.dumps({key: number, "token_length": n}) for number, n in lengths.items()]
        (tmp_path / name).write_bytes(lines(*rows, ""))


def test_without_the_lengths_prompts_have_no_content_and_a_note_says_so(read, texts, tmp_path):
    (tmp_path / "3_history.jsonl").unlink()
    trace = read(lines(*ROWS))
    assert list(trace) == [Request(0, 0.0, 200, 9), Request(1, 3.0, 130, 1), Request(2, 3.5, 50, 2)]
    assert trace.notes == (
        f"{tmp_path / '0_trace.jsonl'}: prompts have no content; the files that say how long each text is are "
        "missing: 3_history.jsonl",
    )


@pytest.mark.parametrize("pack", [False, True])
def test_a_prompt_says_its_texts_in_order_and_then_what_is_its_own(read, texts, tmp_path, pack):
    if pack:
        for name in FILES:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
            (tmp_path / name).unlink()
    trace = read(lines(*ROWS))
    assert trace.notes == ()
    first, second, third = (request.content for request in trace)
    assert [text.n for text in first] == [100, 20, 10, 7, 4, 3, 56]
    assert [text.n for text in second] == [100, 20, 3, 7]
    assert second[:2] == first[:2]
    assert second[2] == first[5]
    assert [text.n for text in third] == [50]
    own = {first[-1].source, second[-1].source, third[-1].source}
    assert len(own) == 3
    assert not own & {text.source for text in (*first[:-1], *second[:-1])}
    # Equal numbers in two components are not the same text.
    assert first[0].source != first[2].source
    assert Content(first).common_prefix(Content(second)) == 120


def test_texts_that_are_longer_than_the_prompt_cover_it(read, texts):
    (request,) = read(lines(row(input_length=90)))
    assert [text.n for text in request.content] == [100, 20, 10, 7, 4, 3]


def test_the_clock_starts_anew_only_where_that_is_allowed(read, tmp_path):
    rows = [row("604453"), row("604453"), row("0"), row("604460"), row("3"), row("20")]
    with pytest.raises(
        BadRowError, match=r'row 3: timestamp "0" is earlier.*clock_reset = "continue" \(--continue-clock\) would'
    ):
        read(lines(*rows))
    trace = read(lines(*rows[:4]), clock_reset="continue")
    assert [r.arrival_s for r in trace] == [0.0, 0.0, 347.0, 604_807.0]
    assert (
        trace.notes[-1]
        == f"{tmp_path / '0_trace.jsonl'}: the clock jumped back once, at row 3: 604,800 s added from there on"
    )
    trace = read(lines(*rows), clock_reset="continue")
    assert [r.arrival_s for r in trace] == [0.0, 0.0, 347.0, 604_807.0, 350.0 + WEEK, 367.0 + WEEK]
    assert "the clock jumped back 2 times, at row 3: 604,800 s added from there on; row 5: " in trace.notes[-1]


def test_as_many_weeks_are_added_as_are_needed(read):
    trace = read(lines(row(str(3 * WEEK + 1)), row("0"), row("2")), clock_reset="continue")
    assert [r.arrival_s for r in trace] == [0.0, WEEK - 1.0, WEEK + 1.0]
    assert "2,419,200 s added" in trace.notes[-1]


def test_a_bad_row_moves_no_clock(read):
    rows = (row("9"), row("1", output_length=0), row("10"))
    trace = read(lines(*rows), clock_reset="continue", skip_bad_rows=True)
    assert [r.arrival_s for r in trace] == [0.0, 1.0]
    assert not any("the clock fell" in note for note in trace.notes)


def ids(**changes):
    return {**json.loads(row())["hash_ids"], **changes}


BAD_ROWS = {
    "number for a time": (row(9), 'timestamp 9 is not text; expected seconds as a string, such as "82"'),
    "no time": (row("soon"), "timestamp 'soon' is not a time"),
    "before time": (row("-9"), "timestamp '-9' is not a time"),
    "infinity": (row("Infinity"), "timestamp 'Infinity' is not a time"),
    "back in time": (row("2"), 'timestamp "2" is earlier than the row before'),
    "zero": (row("4", 0), "input_length 0 is out of range"),
    "fraction": (row("4", 1.5), "input_length 1.5 is not a whole number"),
    "negative": (row("4", 5, -1), "output_length -1 is out of range"),
    "no key": ('{"timestamp": "4", "input_length": 3, "output_length": 3}', "no key 'hash_ids'; expected timestamp, "),
    "list": (row("4", hash_ids=[1, 2]), "hash_ids: [...] is not an object; expected the keys sys_prompt, "),
    "component": (row("4", hash_ids={"sys_prompt": []}), "hash_ids: no key 'passages_ids'; expected sys_prompt, "),
    "other component": (row("4", hash_ids=ids(tools=[])), 'hash_ids: unknown component "tools"; expected sys_prompt, '),
    "negative id": (row("4", hash_ids=ids(history=[-5])), "hash_ids: history: -5 is not a whole number from 0"),
    "id in text": (row("4", hash_ids=ids(history=["5"])), 'hash_ids: history: "5" is not a whole number'),
    "no list of ids": (row("4", hash_ids=ids(history=5)), "hash_ids: history 5 is not a list"),
    "unknown text": (row("4", hash_ids=ids(history=[6])), "hash_ids: history: 6 is not in 3_history.jsonl"),
    "array": ("[" + row("4") + "]", "an array; one JSON object a line is expected"),
    "key twice": ('{"timestamp": "4", "timestamp": "4"}', 'not JSON (key "timestamp" twice)'),
}


@pytest.mark.parametrize(("bad", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_its_number_or_left_out(read, texts, tmp_path, bad, what):
    content = lines(*ROWS, "", bad, row("3.5"))
    with pytest.raises(BadRowError) as fault:
        read(content)
    assert message_of(fault).startswith(f"{tmp_path / '0_trace.jsonl'}: row 4: {what}")
    trace = read(content, skip_bad_rows=True)
    assert [r.prompt_tokens for r in trace] == [200, 130, 50, 200]
    assert "1 bad row skipped: row 4 (" in trace.notes[0]


BAD_LENGTHS = {
    "not JSON": ("x", "not JSON"),
    "no length": ('{"history_id": 6}', "no key 'token_length'"),
    "zero": ('{"history_id": 6, "token_length": 0}', "token_length 0 is out of range"),
    "twice": ('{"history_id": 5, "token_length": 3}', "history_id 5 occurred before"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_a_bad_row_of_the_lengths_is_refused_in_any_case(read, texts, tmp_path, bad, what):
    with (tmp_path / "3_history.jsonl").open("a") as file:
        file.write(bad)
    for skip in (False, True):
        with pytest.raises(WorkloadError) as fault:
            read(lines(*ROWS), skip_bad_rows=skip)
        assert message_of(fault).startswith(f"{tmp_path / '3_history.jsonl'}: row 2: {what}")


def test_lengths_that_change_after_the_check_are_reported(read, texts, tmp_path):
    trace = read(lines(*ROWS))
    (tmp_path / "3_history.jsonl").unlink()
    with pytest.raises(WorkloadError, match=r"0_trace\.jsonl: changed since it was checked"):
        list(trace)


@pytest.mark.slow
@needs_shared
def test_the_published_trace(tmp_path):
    (path,) = (SHARED / "ragpulse").glob("0_trace.jsonl.gz")
    with pytest.raises(WorkloadError, match=r"row 3801: timestamp"):
        RagPulseTrace(path)
    trace = RagPulseTrace(path, clock_reset="continue")
    requests = list(trace)
    assert len(requests) == 7106
    assert requests[-1].arrival_s == 1_209_321.0
    assert trace.notes == (f"{path}: the clock jumped back once, at row 3801: 604,800 s added from there on",)
    assert all(sum(text.n for text in r.content) == r.prompt_tokens for r in requests)
    shutil.copy(path, tmp_path)
    assert not any(r.content for r in RagPulseTrace(tmp_path / path.name, clock_reset="continue"))
