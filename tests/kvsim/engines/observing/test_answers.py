"""What is read of answers in the forms of several servers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engines.observing.answers import Answer, AnswerReader
from tests.kvsim.engines.observing.servers import TEXT, chat_events, event


def read(data, content_type="text/event-stream", take_room=lambda n: True):
    reader = AnswerReader(content_type, "", take_room)
    reader.feed(data)
    return reader.finish()


@given(st.lists(st.integers(1, 400), max_size=8))
def test_a_stream_may_come_in_any_pieces(cuts):
    data = b"".join(chat_events())
    reader = AnswerReader("text/event-stream; charset=utf-8", "", lambda n: True)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        reader.feed(data[start:stop])
    answer = reader.finish()
    assert (answer.text.decode(), answer.text_events, answer.output_tokens) == ("".join(TEXT), len(TEXT), len(TEXT))
    assert (answer.finish, answer.ended, answer.model, answer.api) == ("stop", True, "tiny", "openai")


def test_llama_servers_own_stream():
    """As llama-server b9637 sends it: tokens in each event, counts and times in the last."""
    events = [{"content": "a", "tokens": [5], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 9}]
    events += [{"content": "b", "tokens": [6], "stop": False, "tokens_predicted": 2, "tokens_evaluated": 9}]
    timings = {"cache_n": 7, "prompt_n": 2, "predicted_n": 3}
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_cached": 11, "timings": timings}
    cut, whole = read(b"".join(map(event, events))), read(b"".join(map(event, [*events, last])))
    assert (cut.prompt_tokens, cut.output_tokens, cut.cached_tokens, cut.ended) == (9, 2, None, False)
    assert (whole.prompt_tokens, whole.output_tokens, whole.cached_tokens) == (9, 3, 7)
    assert (whole.text, whole.ids, whole.all_ids, whole.finish) == (b"ab", [5, 6], True, "length")
    assert (whole.ended, whole.api) == (True, "llama-server")


def test_ids_that_leave_tokens_out_are_not_the_answer():
    answer = Answer()
    answer.take({"content": "a", "tokens": [1, 2], "tokens_predicted": 4})
    assert not answer.all_ids


def test_the_last_of_counts_that_come_with_every_event():
    answer = Answer()
    for n in (1, 2, 3):
        answer.take({"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 4, "completion_tokens": n}})
    assert (answer.prompt_tokens, answer.output_tokens) == (4, 3)


def test_thoughts_count_as_tokens_and_are_not_sent_back():
    answer = Answer()
    assert answer.take({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    assert answer.take({"choices": [{"index": 0, "delta": {"content": "yes"}}]})
    assert not answer.take({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    assert (answer.text, answer.text_events, answer.bytes_of_text) == (b"yes", 2, 5)


def test_of_several_answers_the_first_is_kept():
    answer = Answer()
    answer.take({"choices": [{"index": i, "message": {"content": str(i)}, "finish_reason": "stop"} for i in range(3)]})
    assert (answer.text, answer.bytes_of_text) == (b"0", 3)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("/home/me/model.gguf", "model.gguf"),
        ("C:\\me\\model.gguf", "model.gguf"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("../own/", "own"),
        ("a\nb", None),
        ("x" * 500, None),
        (7, None),
    ],
)
def test_a_models_name_has_no_folder(told, kept):
    answer = Answer()
    answer.take({"model": told})
    assert answer.model == kept


@pytest.mark.parametrize("reason", ["Some words of a text", "x" * 100, "", 5, None, ["stop"]])
def test_a_reason_that_is_a_text_is_not_kept(reason):
    answer = Answer()
    answer.take({"choices": [{"index": 0, "finish_reason": reason}]})
    assert answer.finish is None


def test_an_error_in_a_stream_is_a_failure():
    assert read(event({"error": {"message": "out of memory"}})).failed
    assert read(b'error: {"message": "as it once was"}\n\n').failed


def test_a_line_without_an_end_is_given_up():
    reader = AnswerReader("text/event-stream", "", lambda n: True)
    for _ in range(40):
        reader.feed(b"data: " + b"x" * 65536)
        assert len(reader._kept) <= 1 << 20
    reader.feed(b"\n" + event({"choices": [{"index": 0, "delta": {"content": "a"}}]}))
    answer = reader.finish()
    assert (answer.text_events, answer.whole) == (1, False)


def test_where_there_is_no_room_text_is_counted_but_not_kept():
    answer = read(b"".join(chat_events()), take_room=lambda n: n > 3)
    assert (answer.whole, answer.bytes_of_text, answer.output_tokens) == (False, len("".join(TEXT)), len(TEXT))


KEYS = ["choices", "delta", "message", "content", "tool_calls", "function", "arguments", "index", "id", "name", "usage"]
KEYS += ["timings", "tokens", "stop", "stop_type", "error", "model", "text", "token_ids", "finish_reason", "cache_n"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None)  # A busy machine may take long over one of them.
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_whatever_a_server_says_is_taken(told):
    answer = Answer()
    for _ in range(2):
        answer.take(told)
    assert isinstance(answer.tool_calls(), list)
    assert read(json.dumps(told).encode(), "application/json").bytes_of_text * 2 == answer.bytes_of_text
