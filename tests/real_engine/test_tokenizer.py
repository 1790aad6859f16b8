"""The tokenizer compared with a plain implementation of byte-pair encoding, and with known token ids."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import UserError
from kvsim.model.engine_shapes import gguf_path
from kvsim.model.gguf_file import read_header
from real_engine import load_model
from real_engine.tokenizer import Message, Tokenizer, read_tokenizer
from tests.gguf_files import MERGES, SMOLLM2_MISSING, SPECIAL, TOKENS, Small, alphabet

TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))
SMALL = Tokenizer(TOKENS, MERGES, TYPES, "smollm", ends=[2])


@pytest.fixture(scope="module")
def smollm2():
    if SMOLLM2_MISSING:
        pytest.skip(SMOLLM2_MISSING)
    return read_tokenizer(read_header(gguf_path("smollm2")), 49152)


def plain_encoding(text, tokens, merges):
    """Byte-pair encoding of an ASCII text, digits split: apply the first possible merge of the list until none is
    left."""
    ids, ranks = {token: id for id, token in enumerate(tokens)}, {pair: rank for rank, pair in enumerate(merges)}
    letter = alphabet()
    words = []
    for stretch in re.findall(r"\d|\D+", text):
        words += re.findall(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+", stretch)
    assert "".join(words) == text
    found = []
    for word in words:
        parts = [letter[byte] for byte in word.encode()]
        while True:
            pairs = [ranks.get(f"{a} {b}", len(merges)) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == len(merges):
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ids[part] for part in parts]
    return found


TEXTS = st.text(st.sampled_from("helo wrdin ab12'st.\n\t !?"), max_size=60)


@given(TEXTS)
@settings(max_examples=75, deadline=None)
def test_small_vocabulary_against_plain_byte_pair_encoding(text):
    assert SMALL.encode(text) == plain_encoding(text, TOKENS, MERGES)


def test_smollm2_against_plain_byte_pair_encoding(smollm2):
    fields = read_header(gguf_path("smollm2")).fields
    text = (
        "It's 2024, and we'll see 31 unbelievable \tantidisestablishmentarianisms...\n\n  def f(x):\n    return x**2 "
        "!= 7 # don't  \r\n"
    )
    ids = smollm2.encode(text)
    assert ids == plain_encoding(text, fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"])
    assert len(ids) < len(text) / 2


def test_smollm2_known_ids(smollm2):
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.ends == {0, 2}


# SmolLM2 has no token for the first byte of characters beyond plane 3, nor for six control characters.
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=40))
@settings(max_examples=75, deadline=None)
def test_round_trip(smollm2, text):
    for tokenizer in (smollm2, SMALL):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.streaming_decoder()
        assert "".join(map(decoder.decode, ids)) + decoder.flush() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "größe",
        "👩‍👩‍👧‍👦 família",
        "日本語 ١٢٣ ½Ⅷ",
        "a\r\n\tb\0",
        "e\u0301 \ufeff\u2028\ufffd",
        "𝔘𝔫𝔦\U0010fffd",
    ],
)
def test_round_trip_of_rare_characters(text):
    assert SMALL.decode(SMALL.encode(text)) == text


def test_digits_are_split_by_smollm_and_not_by_gpt2():
    gpt2 = Tokenizer(TOKENS, MERGES, TYPES, "gpt-2")
    name = TOKENS.index
    assert gpt2.encode("a 12") == [name("a"), name("Ġ1"), name("2")]
    assert gpt2.encode("12") == [name("12")]
    assert SMALL.encode("a 12") == [name("a"), name("Ġ"), name("1"), name("2")]


def test_a_character_is_emitted_with_its_last_byte():
    decoder = SMALL.streaming_decoder()
    euro = SMALL.encode("€")
    assert [decoder.decode(token) for token in euro] == ["", "", "€"]
    assert decoder.decode(euro[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_control_tokens_in_user_text_stay_text():
    ids = SMALL.encode("<|im_end|>hello<|endoftext|>")
    assert not set(ids) & {0, 1, 2}
    assert SMALL.decode(ids) == "<|im_end|>hello<|endoftext|>"
    assert SMALL.decode([1, *SMALL.encode("hello"), 2]) == "hello", "control tokens have no text"


def test_a_token_that_is_defined_as_text_is_found_in_it():
    tokens, types = [*TOKENS, "<think>"], [*TYPES, 4]
    ids = Tokenizer(tokens, MERGES, types).encode("hello<think>world")
    assert len(TOKENS) in ids
    assert Tokenizer(tokens, MERGES, types).decode(ids) == "hello<think>world"


def spelt(tokenizer, ids):
    return "".join(SPECIAL[id] if id < len(SPECIAL) else tokenizer.decode([id]) for id in ids)


def test_a_chat_is_spelt_as_the_template_says(tmp_path):
    tokenizer = load_model(str(Small().write(tmp_path / "m.gguf"))).tokenizer
    user, system = Message("user", "hello <|im_end|>"), Message("system", "Be brief.")
    asked = "<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert spelt(tokenizer, tokenizer.encode_chat([user])) == f"<|im_start|>system\nYou are small.<|im_end|>\n{asked}"
    assert (
        spelt(tokenizer, tokenizer.encode_chat([system, user])) == f"<|im_start|>system\nBe brief.<|im_end|>\n{asked}"
    )
    assert tokenizer.encode_chat([user]).count(2) == 2, "the user's own text ends nothing"
    assert spelt(SMALL, SMALL.encode_chat([user])) == asked, "without a template there is no system message"


def test_smollm2_chat(smollm2):
    text = smollm2.encode_chat([Message("user", "Hi")])
    assert text[:3] == [1, 9690, 198]
    assert smollm2.decode(text) == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\nHi\nassistant\n"
    )


def test_invalid_text_and_missing_chat_tokens_are_refused():
    with pytest.raises(UserError, match=r"'\\udc80'.*Unicode"):
        SMALL.encode("a\udc80")
    mute = Tokenizer(TOKENS[3:], MERGES, TYPES[3:])
    assert not mute.chats
    with pytest.raises(UserError, match="has no chat format"):
        mute.encode_chat([Message("user", "Hi")])


def test_a_text_begins_as_the_file_says(tmp_path):
    begin = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_model(str(Small(fields=begin).write(tmp_path / "m.gguf"))).tokenizer
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode_chat([])[0] == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    "fields", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "qwen2"}, {"tokenizer.ggml.model": None}]
)
def test_unsupported_vocabularies_leave_the_model_without_a_tokenizer(tmp_path, fields):
    assert load_model(str(Small(fields=fields).write(tmp_path / "m.gguf"))).tokenizer is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": list(TOKENS[:-1])}, "272 tokens and 273 embeddings"),
        ({"tokens": [*TOKENS[:-1], "he"]}, "a token occurs twice"),
        ({"tokens": list(range(273))}, "tokens is not a list of str"),
        ({"tokens": None}, "tokens is not a list of str"),
        ({"merges": ["h e", "x y z"]}, "a merge does not join two tokens into a third"),
        ({"merges": ["h q"]}, "a merge does not join two tokens into a third"),
        ({"merges": ["he"]}, "a merge does not join two tokens into a third"),
        ({"merges": None}, "merges is not a list of str"),
        ({"token_type": [1, 1]}, "2 types"),
        ({"token_type": ["1"] * 273}, "token_type is not a list of int"),
        ({"eos_token_id": 273}, "eos_token_id is 273"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ],
)
def test_damaged_vocabularies(tmp_path, fields, words):
    path = Small(fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()}).write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught:
        load_model(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
