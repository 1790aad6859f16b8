"""What prompts are drawn from, by what the server says and takes."""

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import ServerFault
from kvsim.engines.live.client import Client
from kvsim.engines.live.prompts import WORDS, Prompts, Vocabulary
from kvsim.engines.live.settings import ask_settings
from kvsim.engines.live.vocabulary import find_vocabulary
from tests.kvsim.engines.live.fake_server import fake_server
from workloads import Request


def found(server, **settings):
    """What is found out about a server, of which more may be known than it says."""
    address = Address(server.url)
    said = replace(ask_settings(address), **settings)

    async def ask():
        async with Client(address, said.api, said.model, timeout_s=5) as client:
            return await find_vocabulary(client, said)

    return asyncio.run(ask())


def test_there_are_enough_words_and_no_two_are_equal():
    assert len(set(WORDS)) == len(WORDS) >= 80


def test_llama_server_says_its_vocabulary_and_words_of_one_token():
    with fake_server(vocabulary=30000) as server:
        vocabulary = found(server)
    assert vocabulary.ids == range(1000, 30000)
    assert len(set(vocabulary.answers)) == 16
    assert server.asked == []


def test_a_small_vocabulary():
    with fake_server(vocabulary=500) as server:
        assert found(server).ids == range(250, 500)


def test_a_server_with_a_tokenizer_is_asked_for_larger_ids_first():
    with fake_server(kind="vllm", vocabulary=17000) as server:
        assert found(server).ids == range(1000, 16000)
    assert [asked["prompt"][0] for asked in server.asked] == [39999, 31999, 15999]


def test_a_server_without_a_tokenizer_is_not_asked_for_ids_it_may_not_have():
    """vLLM does not check them then."""
    with fake_server(kind="plain") as server:
        assert found(server).ids == range(300, 2000)
    assert len(server.asked) == 1


def test_a_model_on_this_machine_says_its_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 20000}))
    with fake_server(kind="plain", vocabulary=20000) as server:
        assert found(server, model_file=str(tmp_path)).ids == range(1000, 20000)


@pytest.mark.parametrize(("each", "extra"), [(1, 0), (1, 1), (2, 3)])
def test_a_server_that_takes_no_ids_is_sent_words_of_known_counts(each, extra):
    with fake_server(kind="plain", takes_ids=False, tokens_per_word=each, extra_tokens=extra) as server:
        vocabulary = found(server)
        assert (vocabulary.tokens_per_word, vocabulary.extra_tokens) == (each, extra)
        prompt = Prompts(1, vocabulary).of(Request(0, 0.0, 41, 1)).said
        assert len(server._tokens(prompt)) in (41, 41 + (41 - extra) % each)


def test_a_server_that_takes_nothing():
    with fake_server(kind="plain", refuses=500) as server, pytest.raises(ServerFault, match="neither token ids"):
        found(server)


@pytest.mark.parametrize("vocabulary", [Vocabulary(range(3, 9), (4, 5)), Vocabulary(None, (), 1.5, 2)])
def test_a_vocabulary_comes_back_from_json(vocabulary):
    adapter = TypeAdapter(Vocabulary)
    assert adapter.validate_json(adapter.dump_json(vocabulary)) == vocabulary
