"""The reader of agent sessions: turns, subagents, shared blocks, starts, and what each fault is called."""

import gzip
import itertools
import json

import numpy as np
import pytest

from policies import Content
from tests.traces import SHARED, lines, message_of, needs_shared
from tests.worlds import GivenTimes, scenario, serve
from workloads import BadRowError, Segment, WekaTrace, WorkloadError, named_rng

READS = WekaTrace, "trace.jsonl"


def call(t=0.0, prompt=130, output=3, hash_ids=(1, 2), **others):
    return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": list(hash_ids), **others}


def session_line(*requests, **others):
    return json.dumps({"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **others})


def agent(t, *requests):
    return {"t": t, "type": "subagent", "agent_id": "agent_001", "requests": list(requests)}


TURNS = (call(api_time=1.5), call(4.0, 200, 9, (1, 2, 3), think_time=2.0), call(9.5, 64, 1, (1,), api_time=None))


def starts(n, seed=0, rate=0.01):
    return np.cumsum(named_rng(seed, "session-gaps").exponential(1 / rate, n)).tolist()


def test_turns_are_adjacent_with_given_or_derived_think_times(read):
    turns = list(read(lines(session_line(*TURNS))))
    assert [(r.prompt_tokens, r.output_tokens, r.think_s, r.session) for r in turns] == [
        (130, 3, 0.0, 0),
        (200, 9, 2.0, 0),
        (64, 1, 5.5, 0),  # no answer time before it: all that lies between
    ]
    assert {r.arrival_s for r in turns} == {starts(1)[0]}
    late = [call(api_time=3.0), call(1.0)]
    assert [r.think_s for r in read(lines(session_line(*late)))] == [0.0, 0.0]


def test_sessions_start_by_a_poisson_process_of_the_rate_and_seed(read):
    content = lines(*[session_line(call())] * 5)
    assert [r.arrival_s for r in read(content)] == pytest.approx(starts(5))
    assert [r.arrival_s for r in read(content, rate=2.0, seed=7)] == pytest.approx(starts(5, 7, 2.0))
    assert [r.session for r in read(content)] == [0, 1, 2, 3, 4]
    gaps = np.diff([r.arrival_s for r in read(lines(*[session_line(call(1, 1, 1, ()))] * 4000), rate=0.5)])
    assert np.mean(gaps) == pytest.approx(2.0, rel=0.08)
    assert np.std(gaps) == pytest.approx(2.0, rel=0.1)


def test_a_subagent_is_a_session_that_starts_after_its_parent_did(read):
    first = session_line(call(), agent(150.0, call(0.0, 10, 1, ()), call(2.0, 70, 1, (1,))), call(900.0, 5, 5, ()))
    content = lines(first, session_line(call(0.0, 7, 7, ())), session_line(call(0.0, 8, 8, ())))
    requests = list(read(content))
    begun = starts(3)
    expected = sorted(
        [(begun[0], [130, 5]), (begun[0] + 150, [10, 70]), (begun[1], [7]), (begun[2], [8])],
        key=lambda session: session[0],
    )
    by_session = [
        (group[0].arrival_s, [r.prompt_tokens for r in group])
        for group in (list(g) for _, g in itertools.groupby(requests, key=lambda r: r.session))
    ]
    assert [prompts for _, prompts in by_session] == [prompts for _, prompts in expected]
    assert [at for at, _ in by_session] == pytest.approx([at for at, _ in expected])
    assert [r.id for r in requests] == list(range(6))


def test_a_session_that_begins_with_a_subagent_and_one_of_its_own(read):
    inner = agent(3.0, call(1.0, 3, 1, ()))
    requests = list(read(lines(session_line(agent(1.0, inner, call(0.0, 2, 1, ())), call(50.0, 1, 1, ())))))
    begun = starts(1)[0]
    assert [(r.prompt_tokens, r.arrival_s - begun) for r in requests] == [
        (2, pytest.approx(1.0)),
        (3, pytest.approx(5.0)),
        (1, pytest.approx(50.0)),
    ]


def test_blocks_are_shared_within_a_line_and_nowhere_else(read):
    first = session_line(call(), call(9.0, 200, 3, (1, 2, 7)), agent(10.0, call(0.0, 131, 3, (1, 2))))
    a, b, c, d = sorted(read(lines(first, session_line(call()))), key=lambda r: (r.content[0].source, r.prompt_tokens))
    assert a.content[:1] == (Segment(0, 64, 128),)
    assert [s.n for s in b.content] == [128, 3]
    assert [s[1:] for s in c.content] == [(64, 128), (448, 64), (0, 8)]
    assert Content(a.content).common_prefix(Content(c.content)) == 128
    assert Content(a.content).common_prefix(Content(b.content)) == 128
    assert Content(a.content).common_prefix(Content(d.content)) == 0
    keys = Content(b.content).keys(64, 2)
    assert Content(c.content).keys(64, 9)[:2] == keys
    private = [r.content[-1].source for r in (a, b, c, d)]
    assert len({*private, a.content[0].source, d.content[0].source}) == 6
    for request in (a, b, c, d):
        assert sum(segment.n for segment in request.content) == request.prompt_tokens


def test_window_limit_and_thinning_go_by_sessions(read):
    content = lines(*[session_line(*TURNS)] * 40)
    begun = starts(40)
    window = list(read(content, start_s=begun[3], stop_s=begun[6]))
    assert len(window) == 9
    assert window[0].arrival_s == 0.0
    assert [r.prompt_tokens for r in read(content, limit=5)] == [130, 200, 64, 130, 200]
    thinned = list(read(content, keep=0.5, seed=3))
    assert 30 < len(thinned) < 90
    assert len(thinned) == 3 * len({r.session for r in thinned})
    assert [r.think_s for r in read(content, limit=3, rate_scale=2.0)] == [0.0, 2.0, 5.5]


def test_the_server_serves_one_turn_after_the_other(read):
    trace = read(lines(session_line(*TURNS), session_line(*TURNS)), rate=1.0)
    _, jobs = serve(scenario(cache__cells=4096), trace, GivenTimes())
    for first, second in ((0, 1), (1, 2), (3, 4), (4, 5)):
        think_s = jobs[second].request.think_s
        assert jobs[second].arrival_s == pytest.approx(jobs[first].finished_s + think_s)


BAD_ROWS = {
    "no requests": ('{"id": "a"}', "no key 'requests'; expected requests"),
    "empty": (session_line(), "requests: none"),
    "only an empty subagent": (session_line(agent(1)), "requests: none"),
    "not a list": ('{"requests": {"t": 1}}', "requests {...} is not a list"),
    "array": (f"[{session_line(call())}]", "an array; one JSON object a line is expected"),
    "not an object": (session_line(3), "requests[0]: 3 is not an object; expected the keys t, in, out, hash_ids"),
    "no out": (session_line({"t": 0, "in": 3, "hash_ids": []}), "requests[0]: no key 'out'"),
    "time": (session_line(call("0")), 'requests[0]: t "0" is not a number of seconds'),
    "before time": (session_line(call(-1)), "requests[0]: t -1 is out of range"),
    "infinity": (session_line(call(0)).replace('"t": 0', '"t": 1e999'), "requests[0]: t Infinity is out of range"),
    "NaN": (session_line(call(float("nan"))), "not JSON (NaN is no number in JSON)"),
    "back in time": (session_line(call(5), call(4)), "requests[1]: t 4.0 is earlier than the request before"),
    "zero": (session_line(call(0, 0, 1, ())), "requests[0]: in 0 is out of range"),
    "fraction": (session_line(call(0, 64.0)), "requests[0]: in 64.0 is not a whole number"),
    "no output": (session_line(call(), call(output=0)), "requests[1]: out 0 is out of range"),
    "too few ids": (
        session_line(call(hash_ids=[1])),
        "requests[0]: 1 hash_ids for in 130; expected 2, one for each full 64",
    ),
    "too many ids": (session_line(call(0, 63, 1, [1])), "requests[0]: 1 hash_ids for in 63; expected 0"),
    "negative id": (session_line(call(hash_ids=[1, -2])), "requests[0]: hash_ids: -2 is not a whole number from 0"),
    "id in text": (session_line(call(hash_ids=[1, "2"])), 'requests[0]: hash_ids: "2" is not a whole number'),
    "chain": (
        session_line(call(), call(1, hash_ids=[2, 1])),
        "requests[1]: hash_ids: 2 comes first but follows 1 elsewhere",
    ),
    "thinking": (session_line(call(), call(think_time=-1)), "requests[1]: think_time -1 is out of range"),
    "answering": (session_line(call(api_time="1")), 'requests[0]: api_time "1" is not a number'),
    "subagent": (session_line(call(), agent(1, call(0, 0))), "requests[1].requests[0]: in 0 is out of range"),
    "subagent's time": (session_line(call(), agent(None, call())), "requests[1]: t null is not a number of seconds"),
    "block size": (session_line(call(), block_size=16), "block_size 16 is not read; expected 64"),
    "scope": (session_line(call(), hash_id_scope="global"), 'hash_id_scope "global" is not read; expected "local"'),
    "too deep": (
        session_line(agent(0, agent(0, agent(0, agent(0, agent(0, call())))))),
        "requests[0].requests[0].requests[0]",
    ),
    "nested": ('{"requests": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON that can be read: nested too deeply"),
}


@pytest.mark.parametrize(("bad", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_its_number_or_left_out(read, tmp_path, bad, what):
    content = lines(session_line(*TURNS), "", bad, session_line(*TURNS))
    with pytest.raises(BadRowError) as fault:
        read(content)
    assert message_of(fault).startswith(f"{tmp_path / 'trace.jsonl'}: row 2: {what}")
    trace = read(content, skip_bad_rows=True)
    assert list(trace) == list(read(lines(session_line(*TURNS), session_line(*TURNS))))
    assert trace.notes[0].startswith(f"{tmp_path / 'trace.jsonl'}: 1 bad row skipped: row 2 ({what}")


def test_a_line_without_end_is_refused(read, monkeypatch):
    monkeypatch.setattr("workloads.traces.weka._LINE", 10_000)
    with pytest.raises(WorkloadError, match=r"line 2: longer than 10000 characters"):
        read(gzip.compress(lines(session_line(call())) + b" " * 20_000))


@pytest.mark.slow
@needs_shared
def test_the_published_sample():
    path = SHARED / "weka_claude_code_sample.jsonl.gz"
    requests = list(WekaTrace(path))
    assert len(requests) == 2192  # 2,082 of the sessions, the others of 10 subagents
    assert len({r.session for r in requests}) == 27
    assert all(sum(segment.n for segment in r.content) == r.prompt_tokens for r in requests)
