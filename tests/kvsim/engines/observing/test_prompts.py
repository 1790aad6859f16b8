"""Prompts in canonical form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engines.observing.answers import Answer
from kvsim.engines.observing.prompts import RECORDED, message_text, read_prompt
from kvsim.engines.observing.records import hash_texts

CHAT = "/v1/chat/completions"
TEXTS = st.text(max_size=60)
KEYS = st.sampled_from(["role", "content", "text", "type", "tool_calls", "function", "name", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=9,
)
FIELDS = st.sampled_from(["messages", "prompt", "tools", "n", "input_extra", "input_prefix"])
SALT = bytes(32)


def chat(*messages, **more):
    return read_prompt(CHAT, json.dumps({"messages": list(messages), **more}).encode())


def test_the_canonical_text_of_a_chat():
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    told = chat(
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"content": None, "role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ü", "tool_call_id": "1"},
        tools=[{"b": 1, "a": 2}],
    )
    assert told.text.decode().split("\0") == [
        "tools",
        '[{"a":2,"b":1}]',
        "system",
        "Be kind.",
        "user",
        'see {"image_url":{"url":"data:x"},"type":"image_url"}',
        "assistant",
        '["1","f","{}"]',
        "tool",
        'ü{"tool_call_id":"1"}',
        "",
    ]


def test_spelling_as_json_does_not_matter():
    one = read_prompt(CHAT, b'{"messages":[{"role":"user","content":"\\u00e9"}],"model":"a"}')
    other = read_prompt(
        CHAT, '{"model": "b", "messages": [ {"content": [{"type":"text","text":"é"}], "role": "user"} ]}'.encode()
    )
    assert one.text == other.text


@pytest.mark.parametrize(
    ("body", "text", "ids", "continues"),
    [
        ({"prompt": "a"}, b"a", None, True),
        ({"prompt": ["a"]}, b"a", None, True),
        ({"prompt": ["a", "b"]}, b'["a","b"]', None, False),
        ({"prompt": [1, 2]}, b"", (1, 2), True),
        ({"prompt": [[1, 2]]}, b"", (1, 2), True),
        ({"prompt": [1, "b"]}, b'[1,"b"]', None, False),
        ({"prompt": "a", "n": 2}, b"a", None, False),
        ({"prompt": [True]}, b"[true]", None, False),
        ({}, b"", None, True),
    ],
)
def test_prompts_of_completions(body, text, ids, continues):
    told = read_prompt("/v1/completions", json.dumps(body).encode())
    assert (told.text, told.ids, told.continues) == (text, ids, continues)


def test_an_infill_prompt():
    told = read_prompt("/infill", b'{"input_prefix": "a", "input_suffix": "b", "prompt": "c"}')
    assert (told.text, told.continues) == (b"\0a\0b\0c\0", False)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4, "max_tokens": 5}, 4),
        ({"n_predict": 3}, 3),
        ({"n_predict": -1}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({}, None),
    ],
)
def test_the_most_tokens_that_were_asked_for(body, limit):
    assert read_prompt("/completion", json.dumps(body).encode()).max_tokens == limit


@pytest.mark.slow
@given(st.sampled_from(sorted(RECORDED)), st.dictionaries(FIELDS, JSON, max_size=3))
def test_every_object_is_a_prompt_that_can_be_hashed(path, body):
    prompt = read_prompt(path, json.dumps(body).encode())
    hashes = hash_texts(SALT, prompt, Answer())
    assert len(hashes.blocks) == hashes.prompt_units // (64 if hashes.unit == "bytes" else 16)


@pytest.mark.slow
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_each_turn_begins_with_the_one_before_and_its_answer(turns):
    messages = []
    before = ()
    for question, text in turns:
        messages.append({"role": "user", "content": question})
        hashes = hash_texts(SALT, chat(*messages), answered(text))
        assert hashes.blocks[: len(before)] == before
        # Without text there is no message to send back.
        before = hashes.blocks + hashes.answer_blocks if text else hashes.blocks
        messages.append({"role": "assistant", "content": text})


def answered(text):
    answer = Answer()
    answer.take({"choices": [{"index": 0, "message": {"content": text}}]})
    return answer


def test_a_call_of_a_tool_is_sent_back_as_it_came_in_pieces():
    answer = Answer()
    pieces = [{"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}]
    pieces += [{"index": 0, "function": {"arguments": part}} for part in ('{"a"', ":1}")]
    for piece in pieces:
        answer.take({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    back = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a":1}'}}]}
    first = {"role": "user", "content": "y" * 200}
    assert chat(first, back).text == chat(first).text + message_text("assistant", b"", answer.tool_calls())
    hashes = hash_texts(SALT, chat(first), answer)
    whole = hash_texts(SALT, chat(first, back), Answer())
    assert whole.blocks == hashes.blocks + hashes.answer_blocks


def test_the_text_of_a_prompt_is_not_shown():
    assert "sesame" not in repr(chat({"role": "user", "content": "sesame"}, model="sesame"))
    assert "sesame" not in repr(answered("sesame"))
