"""The reader of observed traffic: what prompts are taken to share, sessions, runs, what is left out, and each fault."""

import gzip
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Content
from tests.paths import DATA
from tests.traces import lines, message_of
from tests.workloads.traces.observed_files import (
    BLOCK_TOKENS,
    Call,
    counts,
    file_of,
    hashes,
    header,
    later,
    request,
    talks,
    words,
)
from tests.worlds import command, scenario, serve
from workloads import BadRowError, Mix, ObservedTrace, Segment, WorkloadError, answer_of
from workloads.traces import observed_texts

READS = ObservedTrace, "mine.jsonl"
FIXTURE = DATA / "observed.jsonl.gz"
"""``file_of(talks(3, sessions=12))``, compressed."""


def said(seed, n):
    return words(Random(seed), n)


ASKED = Call(1.0, 3.0, said(1, 40), said(2, 30))
NEXT = Call(5.0, 6.5, ASKED.whole + said(3, 20), said(4, 40))
LAST = Call(9.0, 9.5, NEXT.whole + said(5, 5), said(6, 1))
TALK = (ASKED, NEXT, LAST)
ROWS = (header(), *(request(call, n) for n, call in enumerate(TALK)))


# What prompts share


def shared(prompt, text):
    """Tokens that a prompt and a text begin with."""
    pairs = enumerate(zip(prompt, text, strict=False))
    return next((n for n, (mine, other) in pairs if mine != other), min(len(prompt), len(text)))


@pytest.mark.parametrize("unit", ["bytes", "tokens"])
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_prompts_share_what_their_texts_do_within_a_block(tmp_path_factory, unit, seed):
    calls, path = talks(seed), tmp_path_factory.getbasetemp() / f"talks-{unit}.jsonl"
    path.write_bytes(file_of(calls, unit))
    requests = list(ObservedTrace(path, sessions=False))
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(len(c.prompt), len(c.answer)) for c in calls]
    whole = [Content([*r.content, r.answer]) for r in requests]
    for number, (mine, call) in enumerate(zip(requests, calls, strict=True)):
        prompt = Content(mine.content)
        assert prompt.n == mine.prompt_tokens
        for before in range(number):
            assert abs(prompt.common_prefix(whole[before]) - shared(call.prompt, calls[before].whole)) < BLOCK_TOKENS


def test_texts_hashed_with_another_salt_share_nothing(read):
    """The control: what is shared is known from the hashes alone."""
    content = lines(header(), *(request(call, salt=bytes([n])) for n, call in enumerate(TALK)))
    assert [r.content for r in read(content)] == [(Segment(2 * n, 0, len(c.prompt)),) for n, c in enumerate(TALK)]


def test_a_turn_quotes_the_whole_answer_before_it(read):
    first, second, third = read(lines(*ROWS))
    assert first.content == (Segment(0, 0, 40),)
    assert second.content == (*first.content, answer_of(0, 30), Segment(2, 0, 20))
    assert third.content == (*second.content, answer_of(1, 40), Segment(4, 0, 5))


def test_tokens_of_bytes_go_by_what_the_server_counted(read):
    """A block of 64 bytes is a quarter of a prompt of 256 bytes, whatever its tokens."""
    other = Call(4.0, 5.0, ASKED.prompt[:16] + said(8, 48), said(9, 3))
    two = (request(ASKED, prompt_tokens=80), request(other, prompt_tokens=100))
    asked, told = read(lines(header(), *two))
    assert (asked.content, told.content) == ((Segment(0, 0, 80),), (Segment(0, 0, 32), Segment(2, 0, 68)))
    again = later(other, 9)
    *_, last = read(lines(header(), *two, request(again, prompt_tokens=33)), name="short.jsonl")
    assert last.content == (Segment(0, 0, 32), Segment(2, 0, 1))  # never more than it has
    *_, last = read(lines(header(), *two, request(again, prompt_tokens=10)), name="shorter.jsonl")
    assert last.content == (Segment(0, 0, 10),)


def test_of_several_prompts_the_shortest_says_how_many_tokens_they_share(read):
    """A letter of the first block is a token, and four letters of what follows."""
    system = said(1, 16)
    long, short = Call(1.0, 2.0, system + said(2, 48), ()), Call(3.0, 4.0, system + said(3, 1), ())
    asked = [request(long, prompt_tokens=112), request(short, prompt_tokens=65)]
    *_, last = read(lines(header(), *(row.replace('"output_tokens":0', '"output_tokens":5') for row in asked)))
    assert last.content == (Segment(0, 0, round(65 * 64 / 68)), Segment(2, 0, 4))


def test_a_prompt_of_a_thousand_blocks_has_few_segments(read):
    long = said(1, 16_000)
    calls = [Call(float(n), n + 0.5, long[: 16_000 - 160 * n] + said(10 + n, 7), said(90 + n, 5)) for n in range(5)]
    requests = list(read(file_of(calls)))
    assert [len(r.content) for r in requests] == [1, 2, 2, 2, 2]
    assert [r.content[0] for r in requests[1:]] == [Segment(0, 0, 16_000 - 160 * n) for n in range(1, 5)]


def test_a_session_with_too_many_turns_begins_anew(read, monkeypatch):
    monkeypatch.setattr(observed_texts, "_MOST_SEGMENTS", 5)
    calls, text = [], ()
    for n in range(5):
        text += said(n, 20)
        calls.append(Call(n, n + 0.5, text, said(50 + n, 20)))
        text = calls[-1].whole
    requests = list(read(file_of(calls)))
    assert [len(r.content) for r in requests] == [1, 3, 1, 3, 1]
    assert {r.session for r in requests} == {0}


def test_of_equal_answers_each_turn_quotes_the_one_of_its_session(read):
    """A server without chance gives them; what a slot holds is the answer that it gave itself."""
    first, again = TALK, [later(call, 20) for call in TALK]
    requests = list(read(file_of([*first, *again])))
    assert [r.session for r in requests] == [0, 0, 0, 1, 1, 1]
    assert [s for s in requests[2].content if s.source >= answer_of(0, 1).source] == [
        answer_of(0, 30),
        answer_of(1, 40),
    ]
    assert [s for s in requests[5].content if s.source >= answer_of(0, 1).source] == [
        answer_of(3, 30),
        answer_of(4, 40),
    ]
    assert requests[3].content == (Segment(0, 0, 32), Segment(6, 0, 8))


# Sessions


def test_turns_come_as_long_after_the_answer_as_they_did(read):
    other = Call(4.0, 4.5, said(9, 12), said(10, 3))
    found = [(r.arrival_s, r.think_s, r.session, r.prompt_tokens) for r in read(file_of([*TALK, other]))]
    assert found == [(0.0, 0.0, 0, 40), (0.0, 2.0, 0, 90), (0.0, 2.5, 0, 135), (3.0, 0.0, None, 12)]
    apart = [(r.arrival_s, r.think_s, r.session) for r in read(file_of([*TALK, other]), sessions=False)]
    assert apart == [(0.0, 0.0, None), (3.0, 0.0, None), (4.0, 0.0, None), (8.0, 0.0, None)]


def test_sessions_change_no_text(read):
    content = file_of(talks(7, sessions=12))
    texts = []
    for sessions in (True, False):
        requests = list(read(content, sessions=sessions))
        own = {r.id: r.content[-1].source for r in requests}
        named = {answer_of(number, 1).source: source + 1 for number, source in own.items()}
        texts.append(
            {own[r.id]: [s._replace(source=named.get(s.source, s.source)) for s in r.content] for r in requests}
        )
    assert texts[0] == texts[1]


def test_what_is_asked_again_is_no_turn(read):
    """Nor is what was asked before the answer was there."""
    again, early = Call(10.0, 11.0, NEXT.prompt, said(7, 33)), Call(6.0, 7.0, NEXT.whole + said(8, 9), said(9, 2))
    requests = list(read(file_of([ASKED, NEXT, early, again])))
    assert [(r.session, r.prompt_tokens) for r in requests] == [(0, 40), (0, 90), (None, 139), (None, 90)]
    assert requests[2].content[:3] == (*requests[1].content[:2], Segment(2, 0, 10))
    assert requests[3].content == (*requests[1].content[:2], Segment(2, 0, 10), Segment(6, 0, 10))


def test_a_turn_goes_on_from_the_longest_talk_and_of_those_from_the_latest(read):
    short = Call(7.0, 8.0, ASKED.prompt, ASKED.answer)
    *_, last = read(file_of([ASKED, NEXT, short, LAST]))
    assert (last.session, last.think_s, last.prompt_tokens) == (None, 0.0, 40)
    twice = Call(3.5, 4.0, ASKED.prompt, ASKED.answer)
    requests = list(read(file_of([ASKED, twice, NEXT])))
    assert [(r.session, r.think_s, r.prompt_tokens) for r in requests] == [(None, 0.0, 40), (0, 0.0, 40), (0, 1.0, 90)]


def test_the_server_finds_the_answer_in_its_cache(read):
    """As many tokens as are cached of a prompt and its answer, whose last token never is."""
    world = scenario(cache__cells=4096, cache__policy="paged", cache__prefix_cache=True, cache__block_size=1)
    _, jobs = serve(world, read(lines(*ROWS)))
    assert [jobs[n].cached for n in range(3)] == [0, 40 + 29, 90 + 39]


@pytest.mark.parametrize(
    ("options", "prompts"),
    [
        ({"limit": 2}, [40, 90]),
        ({"limit": 2, "sessions": False}, [40, 12]),
        ({"start_s": 1.0}, [12]),
        ({"start_s": 4.0, "sessions": False}, [90, 135]),
        ({"stop_s": 2.0}, [40, 90, 135]),
    ],
)
def test_windows_are_of_sessions_and_limits_of_requests(read, options, prompts):
    content = file_of([*TALK, Call(4.0, 4.5, said(9, 12), said(10, 3))])
    trace = read(content, **options)
    assert [r.prompt_tokens for r in trace] == prompts
    assert [r.id for r in trace] == list(range(trace.n_requests))


def test_an_answer_that_is_left_out_is_still_one_text(read):
    one, two = read(lines(*ROWS), sessions=False, start_s=4.0)
    assert one.content == (Segment(0, 0, 40), Segment(1, 0, 30), Segment(2, 0, 20))
    assert two.content == (*one.content, answer_of(0, 40), Segment(4, 0, 5))


def test_whole_sessions_are_kept_or_dropped(read):
    content = file_of(talks(1, sessions=30))
    everything, half = list(read(content)), list(read(content, keep=0.5, seed=3))
    sizes = [sum(r.session == session for r in everything) for session in {r.session for r in everything} - {None}]
    assert 0 < len(half) < len(everything)
    assert all(sum(r.session == session for r in half) in sizes for session in {r.session for r in half} - {None})


def test_it_can_be_part_of_a_mix(read):
    content = file_of(talks(2, sessions=8))
    part = read(content, sessions=False)
    whole = [Content([*r.content, r.answer]) for r in part]
    mixed = [r for r in Mix([read(file_of([ASKED]), name="other.jsonl"), part]) if r.prompt_tokens != 40 or r.id]
    both = [Content([*r.content, r.answer]) for r in mixed]
    for a in range(len(whole)):
        assert [both[a].common_prefix(b) for b in both[:a]] == [whole[a].common_prefix(b) for b in whole[:a]]


def test_reasoning_that_is_not_repeated_is_not_quoted(read):
    """The server counts 300 tokens that the next prompt does not have."""
    more = (*NEXT.whole, *said(3, 400))
    long = Call(9.0, 9.5, more, said(6, 1))
    rows = (header(), request(ASKED), request(NEXT, output_tokens=340), request(long))
    trace = read(lines(*rows))
    *_, last = trace
    assert (last.session, last.think_s) == (0, 2.5)
    assert last.content == (Segment(0, 0, 40), answer_of(0, 30), Segment(2, 0, 20), Segment(4, 0, 440))
    assert [note.partition(": ")[2] for note in trace.notes] == [
        "1 turn repeats little of the answer before (without its reasoning?): shared with it is only the prompt"
    ]


@pytest.mark.parametrize("n", [40, 160])
def test_answers_of_short_tokens_are_quoted(read, n):
    """A letter is a token of the answer, four letters are one of the prompt."""
    answer = said(4, n // 4)
    text = NEXT.prompt + answer + said(5, 30)
    rows = (
        request(Call(5.0, 6.5, NEXT.prompt, answer), output_tokens=n),
        request(Call(9.0, 9.5, text, said(6, 1)), prompt_tokens=90 + n + 30),
    )
    *_, last = read(lines(header(), *rows))
    assert last.content == (Segment(0, 0, 90), answer_of(0, n), Segment(2, 0, 30))


# Runs


def test_runs_are_put_on_one_axis_by_their_start(read):
    start = header(started="2026-11-23T05:50:13.623Z")
    rows = (*ROWS, start, request(ASKED, salt=b"other"), request(NEXT, salt=b"other"))
    found = [(r.arrival_s, r.session, r.content[0].source) for r in read(lines(*rows))]
    assert found == [(0.0, 0, 0), (0.0, 0, 0), (0.0, 0, 0), (60.5, 1, 6), (60.5, 1, 6)]
    turned = lines(start, request(LAST), header(), *ROWS[1:3])
    assert [(r.arrival_s, r.think_s) for r in read(turned)] == [(0.0, 0.0), (0.0, 2.0), (0.0, 63.0)]


def test_parts_may_be_put_together_and_the_last_one_alone_says_so(read, tmp_path):
    first, second = lines(*ROWS[:2]), lines(ROWS[0], *ROWS[2:])
    for number, part in ((10, second), (2, first), (1, lines(ROWS[0]))):
        (tmp_path / f"mine.{number}.jsonl").write_bytes(part)
    alone = read(second)
    assert alone.n_requests == 2
    (note,) = alone.notes
    assert note.endswith("by: cat mine.1.jsonl mine.2.jsonl mine.10.jsonl mine.jsonl > all.jsonl")
    together = read(lines(ROWS[0]) + first + second, name="all.jsonl")
    assert (list(together), together.notes) == (list(read(lines(*ROWS), name="b.jsonl")), ())


# What is left out


def test_failed_and_unanswered_requests_are_left_out_and_counted(read):
    others = (
        request(ASKED, status=500),
        request(ASKED, status=None, end="failed"),
        request(ASKED, status=200, end="failed", output_tokens=0),
        request(ASKED, end="cancelled", output_tokens=0, answer_units=0, answer_blocks=[]),
        request(ASKED, status=None, end="cancelled", output_tokens=0),
        request(ASKED, output_tokens=0),
    )
    trace = read(lines(*ROWS[:2], *others, *ROWS[2:]))
    assert list(trace) == list(read(lines(*ROWS), name="good.jsonl"))
    assert [note.partition(": ")[2] for note in trace.notes] == [
        "3 failed requests left out",
        "2 requests cancelled before the first token left out",
        "1 request answered without a token left out",
    ]


def test_a_cancelled_request_that_got_tokens_is_kept_with_these(read):
    trace = read(lines(header(), request(ASKED, end="cancelled", output_tokens=7)))
    assert ([(r.prompt_tokens, r.output_tokens) for r in trace], trace.notes) == ([(40, 7)], ())


def test_failed_requests_are_never_traffic_and_are_counted_by_cause(read):
    """As of clients that try again and again while the server is down, and of an answer that broke off."""
    dead = [request(ASKED, status=None, end="failed", output_tokens=0, cause="unreachable")] * 80
    broken = request(ASKED, end="failed", cause="cut_short")
    refused = [request(ASKED, status=503, end="failed", output_tokens=0, cause="http_5xx")] * 3
    trace = read(lines(*ROWS[:2], *dead, broken, *refused, *ROWS[2:]))
    assert list(trace) == list(read(lines(*ROWS), name="good.jsonl"))
    causes = "the server was not reached (80), HTTP 5xx (3), the answer broke off (1)"
    assert [note.partition(": ")[2] for note in trace.notes] == [f"84 failed requests left out: {causes}"]


def test_counts_that_came_later_amend_the_request_of_their_run(read):
    first = [header(), request(ASKED, 7, counted="estimate"), counts(7, 33, 5)]
    second = [header("2026-11-24T05:49:13.123Z"), request(ASKED, 7, counted="estimate"), counts(8, 1, 1)]
    trace = read(lines(*first, *second))
    assert [(r.prompt_tokens, r.output_tokens) for r in trace] == [(33, 5), (40, len(ASKED.answer))]
    assert [note.partition(": ")[2] for note in trace.notes] == ["1 of 2 requests: tokens estimated"]


def test_counts_may_still_be_estimates(read):
    trace = read(lines(header(), request(ASKED, 7, counted="estimate"), counts(7, 33, 5, counted="estimate")))
    assert [r.prompt_tokens for r in trace] == [33]
    assert [note.partition(": ")[2] for note in trace.notes] == ["1 of 1 requests: tokens estimated"]


@pytest.mark.parametrize("early", [{}, {"end": "cancelled", "output_tokens": 0}, {"end": "failed"}])
def test_a_whole_line_replaces_the_one_without_texts(read, early):
    """Also where the first was left out; blocks, tokens, times and notes are those of the second alone."""
    first = {"counted": "estimate", "missed": 600, "blocks": [], "answer_blocks": [], **early}
    rows = request(ASKED, 3, **first), request(NEXT, 4), request(ASKED, 3)
    alone = read(lines(header(), *rows[1:]))
    requests, notes = list(alone), alone.notes
    trace = read(lines(header(), *rows))
    assert list(trace) == requests
    assert len(requests) == 2
    assert trace.notes == notes


def test_without_a_whole_line_the_one_without_texts_counts(read):
    early = request(ASKED, 3, counted="estimate", missed=600, blocks=[], answer_blocks=[])
    trace = read(lines(header(), early, request(NEXT, 4), counts(3, 33, 5)))
    assert [r.prompt_tokens for r in trace] == [33, 90]
    assert any("too busy to look at all" in note for note in trace.notes)


def test_a_left_out_request_that_turns_out_to_have_failed_is_counted_once(read):
    early = request(ASKED, 3, counted="estimate", missed=600, blocks=[], answer_blocks=[])
    failed = request(ASKED, 3, end="failed", cause="error_event")
    trace = read(lines(header(), early, request(NEXT, 4), failed))
    assert [r.prompt_tokens for r in trace] == [90]
    assert [note.partition(": ")[2] for note in trace.notes] == [
        "1 failed request left out: an error in the answer (1)"
    ]


def test_it_is_said_where_the_proxy_was_late_or_did_not_look(read):
    trace = read(lines(*ROWS[:2], request(NEXT, distorted=0.0337, missed=9), request(LAST, distorted=0.012)))
    assert [note.partition(": ")[2] for note in trace.notes] == [
        "2 of 3 requests: times distorted, since the proxy was late by up to 34 ms, as on a busy machine",
        "1 of 3 requests: the proxy was too busy to look at all of their texts",
    ]


def test_estimated_tokens_are_said(read):
    trace = read(lines(*ROWS[:2], request(NEXT, counted="estimate"), request(LAST, counted="tokenizer")))
    assert [note.partition(": ")[2] for note in trace.notes] == ["1 of 3 requests: tokens estimated"]


def test_without_answers_prompts_share_what_they_have_and_nothing_is_a_turn(read):
    trace = read(lines(header(), *(request(call, answer_blocks=[]) for call in TALK)))
    assert [(r.session, r.content[0]) for r in trace] == [
        (None, Segment(0, 0, 40)),
        (None, Segment(0, 0, 32)),
        (None, Segment(0, 0, 32)),
    ]
    assert [note.partition(": ")[2] for note in trace.notes] == [
        "no hashes of answers, so nothing is known of sessions"
    ]


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ((*ROWS, ROWS[1][:99]), 5),
        ((*ROWS[:3], ROWS[1][:99], *ROWS[:1], ROWS[3]), 4),
        ((*ROWS[:3], ROWS[1][:99] + ROWS[0], ROWS[3]), 4),
        ((*ROWS, ROWS[0][:20]), 5),
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_a_line_cut_short_is_left_out(read, rows, number, skips):
    """The last, or one before the header of the next run; that may have been written right behind it."""
    trace = read(lines(*rows), skip_bad_rows=skips)
    assert list(trace) == list(read(lines(*ROWS), name="good.jsonl"))
    assert [note.partition(": ")[2] for note in trace.notes] == [f"1 line cut short left out: row {number}"]


def test_lines_cut_short_elsewhere_are_faults(read):
    with pytest.raises(BadRowError, match="row 3: not JSON"):
        read(lines(*ROWS[:2], ROWS[2][:99], ROWS[3]))


# Faults


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((ROWS[0],), "no request yet"),
        ((ROWS[0], ROWS[1][:50]), "no request yet: 1 line cut short left out: row 2"),
        ((ROWS[0], request(ASKED, status=503)), "no request yet: 1 failed request left out"),
        (ROWS[1:], "row 1: no header before it"),
        ((header(version=2), *ROWS[1:]), "row 1: version 2 of the file's format is not read; expected 1"),
        ((header(version="1"), *ROWS[1:]), 'row 1: version "1" of'),
        ((header(started=5), *ROWS[1:]), "row 1: started 5 is not a date and time"),
        ((header(started="today"), *ROWS[1:]), "row 1: started 'today' is not a time"),
        ((header(block_bytes=0), *ROWS[1:]), "row 1: block_bytes 0 is out of range"),
        ((*ROWS, '{"kind": "observed"}'), "row 5: no key 'version'"),
        ((*ROWS, '{"kind": "observed", "version": nan}'), "row 5: not JSON"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_in_one_line(read, tmp_path, rows, what):
    for skips in (False, True):
        with pytest.raises(WorkloadError) as fault:
            read(lines(*rows), skip_bad_rows=skips)
        assert message_of(fault).startswith(
            f"{tmp_path}/mine.jsonl: {what}" if not skips else f"{tmp_path}/mine.jsonl: "
        )


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("[]", "an array"),
        ("{}", "no key 'kind'"),
        ('{"kind": "meta"}', 'kind "meta"; expected observed, request, counts'),
        ('{"kind": "request"}', "no key 'arrival_s'"),
        (request(ASKED, arrival_s="1"), 'arrival_s "1" is not a number of seconds'),
        (request(ASKED, arrival_s=-1.0), "arrival_s -1.0 is out of range"),
        (request(ASKED, last_s=0.5), "last_s 0.5 is before arrival_s 1.0"),
        (request(ASKED, status="ok"), 'status "ok" is not a whole number'),
        (request(ASKED, end="lost"), 'end "lost"; expected completed, cancelled, failed'),
        (request(ASKED, end=[]), "end [...]; expected completed, cancelled, failed"),
        (request(ASKED, prompt_tokens=None), "prompt_tokens null is not a whole number"),
        (request(ASKED, output_tokens=1.5), "output_tokens 1.5 is not a whole number"),
        (request(ASKED, output_tokens=10**9), "output_tokens 1000000000 is out of range"),
        (request(ASKED, counted="guess"), 'counted "guess"; expected server, tokenizer, estimate'),
        (request(ASKED, unit="words"), 'unit "words"; expected bytes, tokens'),
        (request(ASKED, blocks={}), "blocks {...} is not a list"),
        (request(ASKED, blocks=["12"]), 'blocks: "12" is not a hash of 16 digits'),
        (request(ASKED, blocks=["0123456789abcdeg"]), 'blocks: "0123456789abcdeg" is not a hash'),
        (request(ASKED, blocks=[5]), "blocks: 5 is not a hash"),
        (request(ASKED, prompt_units=100), "2 blocks; prompt_units 100 have 1"),
        (
            request(ASKED, answer_units=64),
            "2 blocks and 2 answer_blocks; prompt_units 160 and answer_units 64 have 2 and 1",
        ),
        (request(ASKED, blocks=hashes(ASKED.prompt)[::-1], answer_blocks=[]), "blocks: a hash stands in another place"),
        (request(ASKED, blocks=["f" * 16] * 2, answer_blocks=[]), "blocks: a hash stands in another place"),
        (request(ASKED, blocks=["f" * 16, hashes(ASKED.prompt)[1]]), "blocks: a hash stands in another place"),
    ],
)
def test_a_bad_row_is_one_line_with_its_number_or_is_skipped(read, row, what):
    with pytest.raises(WorkloadError) as fault:
        read(lines(*ROWS, row, ROWS[0]))
    assert f"mine.jsonl: row 5: {what}" in message_of(fault)
    skipping = read(lines(*ROWS, row, ROWS[0]), skip_bad_rows=True)
    assert list(skipping) == list(read(lines(*ROWS), name="good.jsonl"))
    assert "1 bad row skipped: row 5" in skipping.notes[-1]


def test_a_file_that_grows_meanwhile_is_said_to_have_changed(read):
    trace = read(lines(*ROWS[:3]))
    with trace.path.open("ab") as file:
        file.write(lines(ROWS[3]))
    with pytest.raises(WorkloadError, match="changed since it was checked"):
        list(trace)


# On the command line


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Runs a command on the fixture; the JSON that it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f'[workload]\nkind = "observed"\npath = "{FIXTURE}"\n[server]\nscheduler = "vllm"\n'
    )

    def tell(*arguments):
        done = command(*arguments, "--json")
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
        return json.loads(done.stdout)

    return tell


N_REQUESTS = 41


def test_the_shipped_file_is_what_its_generator_makes():
    assert gzip.decompress(FIXTURE.read_bytes()) == file_of(talks(3, sessions=12))


def test_it_can_be_described(told):
    described = told("workload", "describe", str(FIXTURE))
    assert (described["requests"], described["sessions"]) == (N_REQUESTS, 11)
    assert described["reuse"]["hit_rate"] == pytest.approx(0.76, abs=0.01)


@pytest.mark.slow
def test_a_generator_is_fitted_to_it(told):
    assert any("11 sessions" in note for note in told("workload", "fit", str(FIXTURE))["notes"])


def test_a_prefix_cache_finds_what_the_server_finds(told):
    cached = told("prefix-cache", str(FIXTURE), "-e", "lru")
    ran = told("run", "mine.toml", "-p", "vllm")
    assert cached["requests"] == ran["requests"] == N_REQUESTS
    assert ran["prefix"]["hit_rate"] == cached["infinite_hit_rate"] > 0.7


@pytest.mark.slow
def test_it_is_traffic_to_recommend_for(told):
    advice = told("recommend", "--trace", str(FIXTURE), "--model", "tiny", "--slo", "ttft_p95<1s", "--requests", "20")
    assert advice["best"]
