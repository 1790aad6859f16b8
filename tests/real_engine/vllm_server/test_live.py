"""A real vLLM over HTTP: what it says of itself, and that its answers are counted and timed as it counts them."""

import asyncio
import random
import time

import pytest

from kvsim.engines.live.client import Client, CompletionRequest
from kvsim.engines.live.settings import ask_counters, ask_settings
from tests.real_engine.vllm_server.conftest import BLOCK_SIZE, BLOCKS
from tests.real_engine.vllm_server.model import CONTEXT, VOCABULARY

pytestmark = pytest.mark.slow


def ask(server, *questions):
    """The answers to questions that are asked at the same time."""

    async def all_of_them():
        async with Client(server.address, "openai", server.model) as client:
            return await asyncio.gather(*(client.ask(question, clock) for question in questions))

    clock = time.monotonic()
    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def prompt(name, n):
    """n random tokens; those of different names share nothing."""
    draw = random.Random(name)
    return tuple(draw.randrange(2, VOCABULARY) for _ in range(n))


def test_it_says_what_it_is(server):
    said = ask_settings(server.address)
    assert said.is_vllm
    assert (said.api, said.model, said.context) == ("openai", server.model, CONTEXT)
    assert (said.cache["block_size"], said.cache["num_gpu_blocks"]) == (str(BLOCK_SIZE), str(BLOCKS))


def test_tokens_are_counted_and_come_one_after_the_other(server):
    before = ask_counters(server.address)
    questions = [CompletionRequest(prompt(f"counted {i}", 20 + 90 * i), 3 + 7 * i) for i in range(6)]
    answers = ask(server, *questions)
    for question, answer in zip(questions, answers, strict=True):
        assert (answer.error, answer.status) == (None, 200)
        assert answer.prompt_tokens == len(question.prompt)
        assert answer.output_tokens == len(answer.output) == len(answer.token_s) == question.output_tokens
        assert set(answer.output) <= set(range(VOCABULARY))
        times = [answer.sent_s, answer.headers_s, *answer.token_s, answer.done_s]
        assert times == sorted(times)
        assert answer.token_s[0] < answer.token_s[-1]
    after = ask_counters(server.address)
    assert after.prompt_tokens - before.prompt_tokens == sum(len(question.prompt) for question in questions)
    assert after.output_tokens - before.output_tokens == sum(question.output_tokens for question in questions)


def test_what_the_cache_held_is_told(server):
    question = CompletionRequest(prompt("cached", 3 * BLOCK_SIZE + 5), 2)
    (first,), (second,) = ask(server, question), ask(server, question)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 3 * BLOCK_SIZE
    assert first.output == second.output


def test_text_has_a_token_for_each_word(server):
    (answer,) = ask(server, CompletionRequest("w5 w6 w7", 4))
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.token_s)) == (3, 4, 4)


def test_a_prompt_that_is_too_long_is_refused_and_the_server_goes_on(server):
    refused, answered = ask(
        server, CompletionRequest(prompt("long", CONTEXT + 1), 1), CompletionRequest(prompt("short", 9), 1)
    )
    assert refused.status == 400
    assert refused.error.startswith("HTTP 400: ")
    assert str(CONTEXT) in refused.error
    assert (answered.error, answered.output_tokens) == (None, 1)
