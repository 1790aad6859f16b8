"""What is written of the traffic, and what is not."""

import json
import re
import tracemalloc
import zlib
from datetime import UTC, datetime

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim import __version__
from kvsim.engines.observing import observer as observer_module
from kvsim.engines.observing import watch as watch_module
from kvsim.engines.observing.answers import AnswerReader
from kvsim.engines.observing.observations import ObservationFile
from tests.kvsim.engines.observing.servers import TEXT, event, observing, raw_server, receive

CHAT = "/v1/chat/completions"
KEYS = [
    *("kind", "id", "arrival_s", "first_s", "last_s", "status", "end", "path", "stream"),
    *("prompt_tokens", "output_tokens", "counted", "cached_tokens", "max_tokens"),
    *("unit", "prompt_units", "blocks", "answer_units", "answer_blocks", "finish"),
]


def post(client, observed, body, path=CHAT, **keys):
    told = client.post(observed.url + path, json=body, **keys)
    assert told.status_code == 200
    return told


def messages(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_header_and_a_line_for_each_request(client, upstream, out):
    before = datetime.now(UTC)
    with observing(upstream.url, out) as observed:
        post(client, observed, {"messages": messages("x" * 100), "max_tokens": 9})
        post(client, observed, {"messages": messages("y"), "stream": True})
    (header, *_), (first, second) = observed.lines(), observed.requests()
    began = datetime.fromisoformat(header.pop("started"))
    assert -0.001 < (began - before).total_seconds() < 10  # It is written in whole milliseconds.
    assert header == {
        "kind": "observed",
        "version": 1,
        "api": "openai",
        "model": "tiny",
        "block_bytes": 64,
        "block_tokens": 16,
        "kvsim": __version__,
    }
    for line in (first, second):
        line.pop("distorted", None)  # On a busy machine it may be there.
        assert list(line) == KEYS
    assert (first["id"], second["id"]) == (0, 1)
    assert 0 <= first["arrival_s"] <= first["last_s"] <= second["arrival_s"] <= second["first_s"] <= second["last_s"]
    expected = {
        "status": 200,
        "end": "completed",
        "stream": False,
        "first_s": None,
        "prompt_tokens": 11,
        "output_tokens": 5,
        "counted": "server",
        "cached_tokens": 4,
        "max_tokens": 9,
        "unit": "bytes",
        "prompt_units": len("user") + 1 + 100 + 1,
        "answer_units": len("assistant") + 1 + len("".join(TEXT)) + 1,
        "finish": "stop",
    }
    assert {key: first[key] for key in expected} == expected
    assert [len(first["blocks"]), len(first["answer_blocks"])] == [1, 1]
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in first["blocks"] + first["answer_blocks"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_begins_with_the_blocks_of_this_one(stream, client, upstream, out):
    first = messages("Quel temps fait-il ? " * 11)
    second = [*first, {"role": "assistant", "content": "".join(TEXT)}, {"role": "user", "content": "Et demain ?" * 9}]
    with observing(upstream.url, out) as observed:
        for turn in (first, second, messages("Autre chose " * 9)):
            post(client, observed, {"messages": turn, "stream": stream})
    one, two, other = observed.requests()
    known = one["blocks"] + one["answer_blocks"]
    assert len(known) == (one["prompt_units"] + one["answer_units"]) // 64 > len(one["blocks"])
    assert two["blocks"][: len(known)] == known
    assert not set(other["blocks"]) & set(two["blocks"])


def test_counts_come_from_the_server_from_its_tokenizer_or_from_an_estimate(client, upstream, out):
    """A stream without counts is asked about at ``/tokenize``; the stand-in counts words."""
    asked = {"messages": messages("un deux trois"), "stream": True}
    with observing(upstream.url, out) as observed:
        post(client, observed, asked | {"stream_options": {"include_usage": True}})
        post(client, observed, asked)
    by_server, by_tokenizer = observed.requests()
    assert (by_server["counted"], by_server["prompt_tokens"], by_server["output_tokens"]) == ("server", 11, 5)
    assert (by_tokenizer["counted"], by_tokenizer["prompt_tokens"], by_tokenizer["output_tokens"]) == (
        "tokenizer",
        4,
        5,
    )
    assert "stream_options" not in upstream.bodies[-1]
    assert observed.summary.to_dict()["counted"] == {"server": 1, "tokenizer": 1, "estimate": 0}


def test_a_server_without_a_tokenizer_is_asked_once(client, out):
    asked = []

    def answer(connection):
        said = receive(connection).split(b" ")[1]
        asked.append(said)
        if said == b"/tokenize":
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        events = b"".join(event({"choices": [{"index": 0, "delta": {"content": word}}]}) for word in TEXT)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + events)

    body = {"messages": messages("x" * 35), "stream": True}
    with raw_server(answer) as url, observing(url, out, requests=2) as observed:
        for _ in range(2):
            post(client, observed, body)
    assert asked.count(b"/tokenize") == 1
    for line in observed.requests():
        assert (line["counted"], line["prompt_tokens"], line["output_tokens"]) == ("estimate", 10, len(TEXT))


def test_a_packed_answer_passes_packed_and_is_counted(client, upstream, out):
    with (
        observing(upstream.url, out) as observed,
        client.stream("POST", observed.url + CHAT, json={"model": "gzip", "messages": [], "stream": True}) as told,
    ):
        packed = b"".join(told.iter_raw())
    assert (told.headers["content-encoding"], packed[:2]) == ("gzip", b"\x1f\x8b")
    (line,) = observed.requests()
    assert (line["counted"], line["output_tokens"], line["prompt_tokens"]) == ("server", 5, 11)
    assert line["first_s"] is not None
    assert line["answer_units"] > 0


def test_an_answer_that_cannot_be_unpacked_is_estimated(client, upstream, out):
    with observing(upstream.url, out) as observed:
        told = client.post(observed.url + CHAT, json={"model": "unknown_packing", "messages": messages("x")})
        assert told.headers["content-encoding"] == "br"
    (line,) = observed.requests()
    assert (line["end"], line["output_tokens"], line["counted"], line["answer_units"]) == (
        "completed",
        100,
        "estimate",
        0,
    )


@pytest.mark.slow
def test_few_bytes_that_stand_for_very_many_take_little_memory():
    packed = zlib.compress(b"data: " + b"x" * (64 << 20))
    reader = AnswerReader("text/event-stream", "deflate", lambda n: True)
    assert len(packed) < 100_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="unpacks to"):
        reader.feed(packed)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


# What is not in the file

SECRET = "sesame"


def test_keys_names_and_queries_are_not_in_the_file(client, upstream, out):
    headers = {"authorization": f"Bearer {SECRET}", "x-api-key": SECRET, "cookie": f"a={SECRET}", SECRET: "1"}
    body = {"messages": messages(SECRET), "user": SECRET, "metadata": {SECRET: SECRET}, SECRET: SECRET}
    with observing(upstream.url, out) as observed:
        post(client, observed, body, path=f"{CHAT}?key={SECRET}", headers=headers)
        client.post(f"{observed.url}/v1/{SECRET}/chat/completions", json=body)
        client.post(observed.url + CHAT, content=f"{SECRET} is no JSON", headers=headers)
    assert len(observed.requests()) == 2
    everything = out.read_text() + repr(observed.complaints) + repr(observed.summary)
    assert SECRET not in everything
    assert "127.0.0.1" not in out.read_text()


def test_what_is_searched_for_would_be_found(client, upstream, out):
    """The control: the name of the model is in the file."""
    with observing(upstream.url, out) as observed:
        post(client, observed, {"messages": messages("x")})
    assert "tiny" in out.read_text()


WORDS = st.text(st.characters(categories=("L", "N", "S")), min_size=1, max_size=12).map(lambda text: f"w{text}w")
IDS = st.integers(10**9, 10**9 + 10**6)
"""Of more digits than any other number in the file."""


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(WORDS, min_size=1, max_size=40), answer=st.lists(WORDS, max_size=40), ids=st.lists(IDS, max_size=40)
)
def test_no_word_and_no_token_of_any_prompt_or_answer_is_in_the_file(quiet, client, prompt, answer, ids):
    quiet.answer = {
        "content": " ".join(answer),
        "tokens": ids,
        "stop": True,
        "tokens_evaluated": 3,
        "tokens_predicted": 1,
    }
    n_before = len(quiet.observed.lines()) if quiet.observed.out.exists() else 0
    for given_as in (" ".join(prompt), ids):
        post(client, quiet.observed, {"prompt": given_as, "return_tokens": True}, path="/completion")
    post(client, quiet.observed, {"messages": [{"role": "user", "content": word} for word in prompt]})
    while not quiet.observed.out.exists() or len(quiet.observed.lines()) < n_before + 3:
        pass
    for line in quiet.observed.requests()[-3:]:
        line.pop("blocks"), line.pop("answer_blocks")  # Digits of a hash may be those of a short word by chance.
        text = json.dumps(line, ensure_ascii=False)
        assert not [word for word in [*prompt, *answer, *map(str, ids)] if word in text]
    assert not [token for token in map(str, ids) if token in quiet.observed.out.read_text()]


class Quiet:
    """A server that answers what it is told to, behind a proxy."""

    answer = None
    observed = None


@pytest.fixture
def quiet(out):
    told = Quiet()

    def answer(connection):
        data = connection.recv(1 << 20)
        head, _, body = data.partition(b"\r\n\r\n")
        missing = int(re.search(rb"content-length: (\d+)", head.lower())[1]) - len(body)
        while missing > 0:
            missing -= len(connection.recv(missing))
        content = json.dumps(told.answer).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))

    with raw_server(answer) as url, observing(url, out) as observed:
        told.observed = observed
        yield told


# Faults


def test_a_full_disk_does_not_stop_the_traffic(client, upstream, out, monkeypatch):
    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ObservationFile, "write", full)
    with observing(upstream.url, out) as observed:
        for _ in range(3):
            post(client, observed, {"messages": messages("x")})
    (complaint,) = observed.complaints
    assert complaint.startswith("a line could not be written: No space left on device; traffic is passed on")
    told = observed.summary.to_dict()
    assert (told["requests"], told["lost"], told["faults"]) == (3, 3, 3)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (observer_module, "read_prompt"),
        (observer_module, "hash_texts"),
        (watch_module, "AnswerReader"),
        (AnswerReader, "feed"),
    ],
)
def test_whatever_fails_in_observing_the_answer_arrives_and_a_line_is_written(
    where, name, client, upstream, out, monkeypatch
):
    def broken(*arguments):
        raise RuntimeError("sesame")

    monkeypatch.setattr(where, name, broken)
    with observing(upstream.url, out) as observed:
        told = post(client, observed, {"messages": messages("x"), "stream": True})
        post(client, observed, {"messages": messages("x"), "stream": True})
    assert "".join(TEXT[:1]) in told.text
    assert [line["end"] for line in observed.requests()] == ["completed"] * 2
    assert observed.summary.faults >= 2
    assert len(observed.complaints) == 1
    assert "sesame" not in observed.complaints[0]


def test_an_answer_that_is_not_what_it_says_passes(client, upstream, out):
    with observing(upstream.url, out) as observed:
        told = post(client, observed, {"model": "nonsense", "messages": [], "stream": True})
    assert told.content.startswith(b"data: {not json\n\n\xff\xfe\n")
    assert [line["end"] for line in observed.requests()] == ["completed"]
    assert observed.summary.faults == 1


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b"{", b"[" * 100_000, b'{"messages": 1e999}', b"\xff"])
def test_a_body_that_is_no_request_passes(body, client, upstream, out, monkeypatch):
    def app(connection):
        connection.recv(1 << 20)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with raw_server(app) as url, observing(url, out) as observed:
        assert client.post(observed.url + CHAT, content=body).content == b"{}"
    (line,) = observed.requests()
    assert line["blocks"] == []
    assert line["end"] == "completed"


def test_a_long_body_is_recorded_without_blocks(client, upstream, out, monkeypatch):
    monkeypatch.setattr(watch_module, "BODY_BYTES", 1000)
    with observing(upstream.url, out) as observed:
        post(client, observed, {"messages": messages("x" * 2000)})
    (line,) = observed.requests()
    assert (line["blocks"], line["prompt_units"], line["prompt_tokens"], line["counted"]) == ([], 0, 11, "server")
    assert observed.summary.without_blocks == 1


def test_what_is_held_is_given_back(client, upstream, out):
    rooms = []
    original = observer_module.Room

    class Kept(original):
        def __init__(self, *size):
            super().__init__(*size)
            rooms.append((self, self._left))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer_module, "Room", Kept)
        with observing(upstream.url, out) as observed:
            for how in ("", "gzip", "refusing"):
                client.post(observed.url + CHAT, json={"model": how, "messages": messages("x" * 999), "stream": True})
    assert [room._left for room, _ in rooms] == [size for _, size in rooms]
    assert rooms[0][1] == watch_module.ROOM_BYTES


def test_without_room_an_answer_is_not_kept(client, upstream, out, monkeypatch):
    monkeypatch.setattr(watch_module.Room, "take", lambda self, n: False)
    with observing(upstream.url, out) as observed:
        told = post(client, observed, {"messages": messages("x"), "stream": True})
    assert told.text.endswith("data: [DONE]\n\n")
    (line,) = observed.requests()
    assert (line["end"], line["blocks"], line["answer_units"]) == ("completed", [], 0)


def test_it_ends_by_itself(upstream, out):
    with observing(upstream.url, out, requests=2) as observed, httpx.Client(trust_env=False) as client:
        for _ in range(2):
            post(client, observed, {"messages": messages("x")})
    assert observed.summary.requests == 2
    with observing(upstream.url, out, seconds=0.2) as observed:
        pass
    assert observed.summary.seconds < 10
    assert [line["kind"] for line in observed.lines()] == ["observed", "request", "request"]


@pytest.mark.parametrize("kept", [False, True])
def test_only_with_a_salt_that_is_kept_can_runs_be_joined(kept, client, upstream, out, tmp_path):
    blocks = []
    for _ in range(2):
        with observing(upstream.url, out, salt_file=tmp_path / "salt" if kept else None) as observed:
            post(client, observed, {"messages": messages("x" * 200)})
        blocks.append(observed.requests()[-1]["blocks"])
    assert [line["kind"] for line in observed.lines()] == ["observed", "request"] * 2
    assert (blocks[0] == blocks[1]) == kept


def test_a_file_that_is_full_is_followed_by_another_of_the_same_run(client, upstream, out):
    with observing(upstream.url, out, rotate_bytes=2000) as observed:
        for _ in range(12):
            post(client, observed, {"messages": messages("x" * 200)})
    files = observed.summary.files
    assert [path.name for path in files] == [*(f"mine.{n}.jsonl" for n in range(1, len(files))), "mine.jsonl"]
    runs = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    assert len(runs) > 1
    assert all(run[0] == runs[0][0] for run in runs)
    assert [line["id"] for run in runs for line in run[1:]] == list(range(12))


def test_what_cannot_be_told_does_not_end_observing(client, upstream, out, monkeypatch):
    def gone(*arguments):
        raise BrokenPipeError

    monkeypatch.setattr(observer_module, "read_prompt", gone)
    with observing(upstream.url, out) as observed:
        observed.complaints = None  # so that telling fails
        for _ in range(2):
            post(client, observed, {"messages": messages("x")})
    assert len(observed.requests()) == 2
