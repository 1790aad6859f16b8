"""GuideLLM, a load generator that others wrote, against a real llama-server through ``kvsim observe``."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from kvsim.model.engine_shapes import gguf_path
from tests.kvsim.engines.observing.servers import observing
from tests.real_engine.llama_server.conftest import LIMIT_S, SERVER
from tests.real_engine.llama_server.server import running

NAMED = "KVSIM_GUIDELLM"
"""Environment variable with the path of GuideLLM; ``make test-load`` installs it and sets it."""
GUIDELLM = Path(named).absolute() if (named := os.environ.get(NAMED)) else None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GUIDELLM is None, reason=f"{NAMED} names no guidellm; make test-load installs one"),
]
SESSIONS, TURNS = 3, 3
"""Chats, and the questions of each; a question goes on from the answer to the one before."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a llama-server with room for all chats."""
    log = tmp_path_factory.mktemp("llama-server") / "server.log"
    flags = ["-t", "1", "-np", str(SESSIONS), "-c", "3072"]
    with running(SERVER, Path(gguf_path("smollm2")), flags, log, LIMIT_S) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer for which each character is a token: what prompts are made with, not what counts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = Tokenizer(WordLevel({chr(i): i for i in range(128)}, " "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def generate_load(url, tokenizer, out, *, api, data, profile, requests):
    """Have GuideLLM send requests, and return what it says of each that was answered."""
    words = {
        "--backend": f"kind=openai_http,target={url},request_format={api}",
        "--tokenizer": f"kind=hf_auto,model={tokenizer}",
        "--data": json.dumps({"kind": "synthetic_text", **data}),
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={requests}",
        "--output": f"kind=json,path={out}",
    }
    done = subprocess.run(
        [GUIDELLM, "run", *(word for pair in words.items() for word in pair), "--disable-console"],
        env={**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == requests, done.stderr[-2000:]
    return benchmark["requests"]["successful"]


def counts(requests):
    """Tokens of prompts and answers, in no order."""
    return sorted((request["prompt_tokens"], request["output_tokens"]) for request in requests)


def goes_on(later, earlier):
    """Whether a prompt begins with another request's prompt and answer."""
    told = earlier["blocks"] + earlier["answer_blocks"]
    return later is not earlier and later["blocks"][: len(told)] == told


def test_single_requests_are_counted_as_by_the_client(server, tokenizer, tmp_path):
    data = {"prompt_tokens": 120, "prompt_tokens_stdev": 60, "prompt_tokens_min": 20, "prompt_tokens_max": 300}
    data |= {"output_tokens": 8, "output_tokens_stdev": 4, "output_tokens_min": 2, "output_tokens_max": 20}
    with observing(server, tmp_path / "mine.jsonl") as observed:
        said = generate_load(
            observed.url,
            tokenizer,
            tmp_path / "load.json",
            api="/v1/completions",
            data=data,
            profile="kind=poisson,rate=4",
            requests=8,
        )
    assert counts(observed.requests()) == counts(said)
    assert {(request["end"], request["status"]) for request in observed.requests()} == {("completed", 200)}
    assert {request["counted"] for request in observed.requests()} == {"server"}


def test_sessions_are_counted_and_known_by_what_their_turns_share(server, tokenizer, tmp_path):
    with observing(server, tmp_path / "mine.jsonl") as observed:
        said = generate_load(
            observed.url,
            tokenizer,
            tmp_path / "load.json",
            api="/v1/chat/completions",
            data={"prompt_tokens": 300, "output_tokens": 12, "turns": TURNS},
            profile=f"kind=concurrent,streams={SESSIONS}",
            requests=SESSIONS * TURNS,
        )
    assert counts(observed.requests()) == counts(said)
    # Before each turn come those of its own chat, whose answers it repeats.
    lines = observed.requests()
    turns = [sum(goes_on(later, earlier) for earlier in lines) for later in lines]
    assert sorted(turns) == sorted([*range(TURNS)] * SESSIONS)
