"""Workloads sent to a server: what is asked, when, and what goes wrong."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engines.live.address import Address
from kvsim.engines.live.client import Answer, Client
from kvsim.engines.live.prompts import Prompts, Vocabulary
from kvsim.engines.live.traffic import SendingStopped, send_traffic
from tests.kvsim.engines.live.fake_server import fake_server
from tests.worlds import Given
from workloads import Request, Segment, answer_of

IDS = Vocabulary(range(1000, 40000), (253, 281))
PLAIN_IDS = Vocabulary(range(1000, 40000))
WORDS = Vocabulary(None)


def request(id, arrival_s=0.0, prompt=6, output=2, **keys):
    return Request(id, arrival_s, prompt, output, **keys)


def sent(server, requests, vocabulary=IDS, users=None, limit_s=20, timeout_s=5, key=None, on_end=None):
    api = "llama-server" if server.kind == "llama-server" else "openai"
    return send_traffic(
        lambda: Client(Address(server.url), api, "fake", key=key, timeout_s=timeout_s),
        Given(requests, users),
        Prompts(1, vocabulary),
        limit_s=limit_s,
        on_end=on_end,
    )


# When


def test_arrivals_by_the_clock_do_not_wait_for_answers():
    with fake_server(token_s=0.05) as server:
        done = sent(server, [request(0, 0.0, output=4), request(1, 0.02, output=1), request(2, 0.03, output=1)])
    by_id = {e.request.id: e for e in done}
    assert [e.due_s for e in map(by_id.get, range(3))] == [0.0, 0.02, 0.03]
    assert all(e.answer.sent_s >= e.due_s for e in done)
    assert all(e.error is None and e.after is None for e in done)
    assert server.most_at_once == 3


def test_the_turns_of_a_session_follow_its_answers():
    requests = [request(0, 0.0, session=1), request(1, 0.0, session=1, think_s=0.05), request(2, 0.01)]
    with fake_server(token_s=0.01) as server:
        done = {e.request.id: e for e in sent(server, requests)}
    first, second = done[0], done[1]
    assert (second.after, done[2].after) == (0, None)
    assert second.due_s == pytest.approx(first.answer.done_s + 0.05)
    assert second.answer.sent_s >= second.due_s


def test_users_of_a_closed_loop_take_one_request_after_the_other():
    with fake_server(token_s=0.01) as server:
        done = sent(server, [request(i, think_s=0.0) for i in range(6)], users=2)
    assert sorted(e.request.id for e in done) == list(range(6))
    assert server.most_at_once == 2
    by_id = {e.request.id: e for e in done}
    assert [by_id[i].after for i in (0, 1)] == [None, None]
    assert all(by_id[i].due_s == by_id[by_id[i].after].answer.done_s for i in range(2, 6))


# What


@pytest.mark.parametrize("kind", ["llama-server", "vllm"])
def test_a_prompt_that_quotes_an_answer_is_found_in_the_server_s_cache(kind):
    first = request(0, prompt=10, output=4, session=1, content=(Segment(5, 0, 10),))
    quoted = (Segment(5, 0, 10), answer_of(0, 4), Segment(6, 0, 3))
    second = request(1, prompt=17, output=1, session=1, content=quoted)
    with fake_server(kind=kind) as server:
        done = sent(server, [first, second], IDS if kind == "llama-server" else PLAIN_IDS)
    assert done[1].answer.cached_tokens == 13  # The last token of an answer is never computed.
    assert done[1].answer.prompt_tokens == 17
    assert done[1].prompt.pieces == tuple(map(tuple, quoted))


def test_answers_are_forced_where_they_can_be():
    with fake_server() as server:
        done = sent(server, [request(0, output=3), request(1, output=2)])
    assert {e.request.id: e.answer.output for e in done} == {0: [253] * 3, 1: [281] * 2}


def test_what_a_request_says_of_context_shifts_is_asked_for():
    with fake_server() as server:
        sent(server, [request(0, n_keep=5, n_discard=2, cache_prompt=False)])
    assert {key: server.asked[0][key] for key in ("n_keep", "n_discard", "cache_prompt")} == {
        "n_keep": 5,
        "n_discard": 2,
        "cache_prompt": False,
    }


def test_prompts_of_words_have_as_many_tokens_and_quote_answers():
    first = request(0, prompt=10, output=4, session=1, content=(Segment(5, 0, 10),))
    quoted = (Segment(5, 0, 10), answer_of(0, 4), Segment(6, 0, 3))
    with fake_server(kind="plain", takes_ids=False) as server:
        done = sent(server, [first, request(1, prompt=17, session=1, content=quoted)], WORDS)
    assert [e.answer.prompt_tokens for e in done] == [10, 17]
    assert server.asked[1]["prompt"].startswith(server.asked[0]["prompt"] + done[0].answer.text)


def test_an_answer_that_ended_early_is_quoted_at_its_full_length():
    prompts = Prompts(1, IDS)
    first = request(0, output=4)
    prompts.answered(first, Answer(0.0, output=[7, 7]))
    said = prompts.of(request(1, prompt=5, content=(answer_of(0, 4), Segment(3, 0, 1)))).said
    assert len(said) == 5
    assert said[:2] == (7, 7)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=5))
def test_equal_segments_are_equal_tokens_in_whatever_order_they_are_asked_for(asked):
    once = Prompts(1, IDS)
    for source, start, n in asked:
        content = (Segment(source, start, n),)
        alone = Prompts(1, IDS).of(request(0, prompt=n, content=content)).said
        assert once.of(request(0, prompt=n, content=content)).said == alone
        assert len(alone) == n
        assert all(1000 <= token < 40000 for token in alone)


def test_different_texts_share_no_beginning():
    said = [Prompts(1, IDS).of(request(i, prompt=30)).said for i in range(50)]
    assert len({tokens[:2] for tokens in said}) == 50


# What goes wrong


def test_a_server_that_goes_ends_the_sending_and_what_ended_is_kept():
    requests = [request(i, think_s=0.0) for i in range(5)]
    kept = []
    with fake_server(is_gone=True, faulty_from=2) as server, pytest.raises(SendingStopped) as stopped:
        sent(server, requests, users=1, on_end=kept.append)
    assert "cannot be reached" in str(stopped.value)
    assert [e.request.id for e in stopped.value.exchanges] == [0, 1, 2]
    assert kept == stopped.value.exchanges
    assert kept[2].error is not None


def test_a_server_that_wants_a_key_ends_the_sending():
    with fake_server(key="secret") as server:
        with pytest.raises(SendingStopped, match="wants a key"):
            sent(server, [request(0)])
        assert sent(server, [request(0)], key="secret")[0].error is None


def test_the_first_requests_refused_end_the_sending():
    with fake_server(refuses=500) as server, pytest.raises(SendingStopped) as stopped:
        sent(server, [request(i) for i in range(9)], users=1)
    assert "3 requests in a row failed: HTTP 500: no, not this one" in str(stopped.value)
    assert len(server.asked) == 3


def test_later_refusals_are_kept_as_failures():
    with fake_server(refuses=400, faulty_from=1) as server:
        done = sent(server, [request(i) for i in range(6)], users=1)
    assert [e.error for e in done] == [None] + ["HTTP 400: no, not this one"] * 5


def test_a_silent_server_is_given_up():
    with fake_server(is_silent=True, faulty_from=1) as server, pytest.raises(SendingStopped) as stopped:
        sent(server, [request(i) for i in range(9)], users=3, timeout_s=0.1)
    assert "no answer for 0.1 s" in str(stopped.value)


def test_the_sending_is_bounded_in_time():
    began = time.monotonic()
    with fake_server(is_silent=True) as server, pytest.raises(SendingStopped, match=r"not done after 0\.2 s"):
        sent(server, [request(0)], limit_s=0.2)
    assert time.monotonic() - began < 50  # The server would be silent for a minute.


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"cuts_at": 1}, "cut off"),
        ({"answers_at_most": 1}, "1 of 2 tokens came back; the server cut the answer"),
        ({"says": "nonsense"}, "an event that is not of llama-server"),
        ({"says": "html"}, "answered by text/html, not by a stream of events"),
        ({"says": "whole"}, "answered by application/json, not"),
    ],
)
def test_what_is_not_an_answer_is_a_failure(fault, error):
    with fake_server(**fault) as server:
        (exchange,) = sent(server, [request(0)])
    assert error in exchange.error
