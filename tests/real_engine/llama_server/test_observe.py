"""A real llama-server behind ``kvsim observe``: its own counts, and turns that begin as the ones before."""

import json
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from kvsim.model.engine_shapes import gguf_path
from tests.kvsim.engines.observing.servers import observing
from tests.real_engine.llama_server.conftest import LIMIT_S, SERVER
from tests.real_engine.llama_server.server import running

pytestmark = [pytest.mark.llama, pytest.mark.slow]
FLAGS = ["-t", "1", "-c", "2048", "-np", "1"]
SYSTEM = {"role": "system", "content": "You are a machine that answers in whole sentences. " * 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a llama-server."""
    log = tmp_path_factory.mktemp("observe") / "server.log"
    with running(SERVER, Path(gguf_path("smollm2")), FLAGS, log, LIMIT_S) as port:
        yield f"http://127.0.0.1:{port}"


def client_of(observed):
    return httpx.Client(base_url=observed.url, timeout=LIMIT_S, trust_env=False)


def events(client, path, body):
    with client.stream("POST", path, json=body | {"stream": True}) as told:
        return [json.loads(line[6:]) for line in told.iter_lines() if line.startswith("data: {")]


def chat(client, messages, stream):
    """The answer's text and the server's own counts: prompt tokens, those found in the cache, output tokens."""
    body = {"messages": messages, "max_tokens": 16, "ignore_eos": True}
    if stream:
        told = events(client, "/v1/chat/completions", body)
        text = "".join(choice["delta"].get("content") or "" for one in told for choice in one["choices"])
        last = told[-1]
    else:
        last = client.post("/v1/chat/completions", json=body).json()
        text = last["choices"][0]["message"]["content"]
    timings = last["timings"]
    return text, [timings["cache_n"] + timings["prompt_n"], timings["cache_n"], timings["predicted_n"]]


@pytest.mark.parametrize("stream", [False, True])
def test_chats(stream, server, tmp_path):
    messages, counts = [SYSTEM], []
    with observing(server, tmp_path / "mine.jsonl") as observed, client_of(observed) as client:
        for n in range(3):
            messages.append({"role": "user", "content": f"Tell me thing number {n} about the sea, please."})
            text, counted = chat(client, messages, stream)
            messages.append({"role": "assistant", "content": text})
            counts.append(counted)
    lines = observed.requests()
    keys = ("prompt_tokens", "cached_tokens", "output_tokens")
    assert [[line[key] for key in keys] for line in lines] == counts
    assert {(line["counted"], line["end"], line["stream"]) for line in lines} == {("server", "completed", stream)}
    assert observed.lines()[0]["api"] == "llama-server"
    begin_as_before(lines)
    assert all((line["first_s"] is not None) == stream for line in lines)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(stream, as_ids, server, tmp_path):
    with observing(server, tmp_path / "mine.jsonl") as observed, client_of(observed) as client:
        text = "Once upon a time there was a very small machine that counted every token of a long text. "
        prompt = client.post("/tokenize", json={"content": text}).json()["tokens"] if as_ids else text
        for _ in range(3):
            body = {"prompt": prompt, "n_predict": 20, "return_tokens": True, "ignore_eos": True}
            told = events(client, "/completion", body) if stream else [client.post("/completion", json=body).json()]
            for one in told:
                prompt = prompt + (one["tokens"] if as_ids else one["content"])
    lines = observed.requests()
    assert {line["unit"] for line in lines} == {"tokens" if as_ids else "bytes"}
    assert [line["output_tokens"] for line in lines] == [20] * 3
    begin_as_before(lines)


def begin_as_before(lines):
    """Each prompt begins with the blocks of the one before and of its answer, and there are such."""
    for before, after in pairwise(lines):
        known = before["blocks"] + before["answer_blocks"]
        assert after["blocks"][: len(known)] == known
    assert sum(len(line["answer_blocks"]) for line in lines[:-1]) > 0


def test_a_client_that_hangs_up_frees_the_slot(server, tmp_path):
    """The next request has the only slot at once, and not after the 1500 tokens that were asked for before."""
    asked = {"messages": [SYSTEM, {"role": "user", "content": "Go on."}], "ignore_eos": True}
    with observing(server, tmp_path / "mine.jsonl") as observed, client_of(observed) as client:
        with client.stream("POST", "/v1/chat/completions", json=asked | {"max_tokens": 1500, "stream": True}) as told:
            lines = told.iter_lines()
            for _ in range(12):
                next(lines)
        client.post("/v1/chat/completions", json=asked | {"max_tokens": 2})
    first, second = observed.requests()
    assert (first["end"], second["end"]) == ("cancelled", "completed")
    assert (first["counted"], first["finish"]) == ("tokenizer", None)
    assert 1 <= first["output_tokens"] < 100
    assert second["cached_tokens"] >= second["prompt_tokens"] - 1
