"""``kvsim observe`` before a real vLLM: what it writes is what vLLM counts."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from kvsim.engines.live.address import address_of
from kvsim.engines.live.client import Client, CompletionRequest
from kvsim.engines.live.settings import ask_counters, ask_settings
from tests.kvsim.engines.observing.servers import observing
from tests.real_engine.vllm_server.conftest import BLOCK_SIZE
from tests.real_engine.vllm_server.test_live import prompt

pytestmark = pytest.mark.slow


def tokens(counters):
    return counters.prompt_tokens, counters.output_tokens


def test_token_ids_are_counted_as_in_vllms_usage(server, tmp_path):
    questions = [CompletionRequest(prompt("observed", 50 + 40 * i), 4 + 3 * i) for i in range(4)]
    questions.append(CompletionRequest(questions[-1].prompt[: 3 * BLOCK_SIZE + 7], 2))

    async def ask(url):
        async with Client(address_of(url), "openai", server.model) as client:
            return [await client.ask(question) for question in questions]

    with observing(server.address.url, tmp_path / "mine.jsonl") as observed:
        # The command line is that of the process that listens, which is the proxy's.
        seen, own = ask_settings(address_of(observed.url)), ask_settings(server.address)
        assert replace(seen, started=None) == replace(own, started=None)
        answers = asyncio.run(asyncio.wait_for(ask(observed.url), 60))
    seen = [(line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) for line in observed.requests()]
    assert seen == [(len(q.prompt), q.output_tokens, a.cached_tokens) for q, a in zip(questions, answers, strict=True)]
    assert seen[-1] == (len(questions[-1].prompt), questions[-1].output_tokens, 3 * BLOCK_SIZE)
    told = {(line["counted"], line["unit"], line["end"], line["status"]) for line in observed.requests()}
    assert told == {("server", "tokens", "completed", 200)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_counted_with_and_without_usage(stream, server, tmp_path):
    body = {"model": server.model, "messages": [{"role": "user", "content": "w8 w9 " * 30}], "max_tokens": 12}
    body |= {"temperature": 0, "ignore_eos": True, "stream": stream}
    with observing(server.address.url, tmp_path / "mine.jsonl") as observed:
        before = tokens(ask_counters(server.address))
        told = httpx.post(f"{observed.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        after = tokens(ask_counters(server.address))
    assert told.status_code == 200
    (line,) = observed.requests()
    assert (line["prompt_tokens"], line["output_tokens"]) == (after[0] - before[0], after[1] - before[1])
    assert line["counted"] == ("tokenizer" if stream else "server")


def test_a_refusal_passes_and_is_noted(server, tmp_path):
    body = {"model": "another", "prompt": [5, 6], "max_tokens": 1}
    with observing(server.address.url, tmp_path / "mine.jsonl") as observed:
        told = [
            httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
            for url in (server.address.url, observed.url)
        ]
    assert [answer.status_code for answer in told] == [404, 404]
    assert told[0].json() == told[1].json()
    (line,) = observed.requests()
    assert (line["status"], line["end"], line["output_tokens"]) == (404, "failed", 0)
