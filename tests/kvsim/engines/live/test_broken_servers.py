"""Servers that say what none should: each ends in one line, soon, and in little memory."""

import json
import time

import pytest

from kvsim.engines.live import measuring
from kvsim.engines.live.address import Address
from kvsim.engines.live.calibration import calibrate_server
from kvsim.engines.live.recorded_meta import Asking
from kvsim.engines.live.served import find_server
from kvsim.engines.live.server_recording import record_server
from kvsim.errors import UserError
from tests.kvsim.engines.live.broken_server import BrokenServer
from tests.kvsim.engines.live.fake_server import BUILD, fake_server
from tests.kvsim.engines.live.own_time import own_time
from tests.kvsim.engines.live.test_calibration import FLAGS
from tests.kvsim.engines.live.test_server_recording import scenario

SECONDS = 2.0
LONG_S = 60.0
"""Beyond which a server has held the command, even on a busy machine."""

DEEP = b"[" * 100_000
PROPS = {
    "default_generation_settings": {"n_ctx": 2048},
    "total_slots": 2,
    "model_path": "/models/fake.gguf",
    "build_info": BUILD,
}


def props(**keys):
    return json.dumps(PROPS | keys).encode()


def models(**keys):
    return json.dumps({"data": [{"id": "fake", "meta": {"n_vocab": 49152}} | keys]}).encode()


def last(**keys):
    """A stream of llama-server's that ends with these keys."""
    said = {"content": "", "tokens": [], "stop": True, "tokens_evaluated": 1, "tokens_predicted": 12} | keys
    return b'data: {"content": "a", "tokens": [7], "stop": false}\n\n' * 12 + f"data: {json.dumps(said)}\n\n".encode()


WHAT_IT_IS = [
    ("/props", props(default_generation_settings=[]), "default_generation_settings: input should be an object, got []"),
    ("/props", props(default_generation_settings={"n_ctx": "2048"}), "n_ctx: input should be a valid integer"),
    ("/props", props(default_generation_settings={"n_ctx": 0}), "n_ctx: input should be greater than or equal to 1"),
    ("/props", props(default_generation_settings={"n_ctx": 1e12}), "n_ctx: input should be"),
    ("/props", props(default_generation_settings={}), "does not say how long its context is"),
    ("/props", props(total_slots=-1), "total_slots: input should be greater than or equal to 1, got -1"),
    ("/props", props(total_slots=10**9), "total_slots: input should be less than or equal to 4096"),
    ("/props", props(total_slots=2.5), "total_slots: input should be a valid integer"),
    ("/props", props(model_path=7), "model_path: input should be a valid string, got 7"),
    ("/props", props(model_path=["a"]), "model_path: input should be a valid string"),
    ("/props", props(build_info="\x1b[31m"), "build_info: string should match pattern"),
    ("/props", props(build_info="x" * 10_000), "build_info: string should have at most 1000 characters"),
    ("/props", b"[1, 2]", "/props: input should be an object, got [1, 2]"),
    ("/v1/models", models(meta=[]), "data.0.meta: input should be an object, got []"),
    ("/v1/models", models(meta={"n_vocab": "49152"}), "n_vocab: input should be a valid integer, got '49152'"),
    ("/v1/models", models(meta={"n_vocab": -5}), "n_vocab: input should be greater than or equal to 1, got -5"),
    ("/v1/models", models(meta={"n_vocab": 0}), "n_vocab: input should be greater than or equal to 1, got 0"),
    ("/v1/models", models(meta={"n_vocab": True}), "n_vocab: input should be a valid integer, got True"),
    ("/v1/models", models(max_model_len="x"), "max_model_len: input should be a valid integer, got 'x'"),
    ("/v1/models", models(id=None), "data.0.id: input should be a valid string, got None"),
    ("/v1/models", b'{"data": {}}', "data: input should be a valid array, got {}"),
    ("/v1/models", b'{"data": [' + b"9" * 5000 + b"]}", "cannot be read here; say what it is by --model"),
    ("/props", DEEP, "/v1/models"),
    ("/props", "drips a body without end", "/props: not answered in full within"),
    ("/props", "drips its headers", "/props: not answered in full within"),
    ("/props", "says nothing", "/props: not answered in full within"),
    ("/props", "never ends its body", "/props: answered by more than"),
    ("/props", "never ends a refusal", "/props: answered by more than"),
    ("/v1/models", "never ends its body", "/v1/models: answered by more than"),
]


@pytest.mark.parametrize(("path", "way", "said"), WHAT_IT_IS)
def test_what_a_server_says_of_itself(path, way, said):
    began = time.monotonic()
    # The deep one leaves the server to be taken for another, which its models then are not enough for.
    broken = {path: way} | ({"/v1/models": DEEP} if way is DEEP else {})
    model = None if b"9999" in (way if isinstance(way, bytes) else b"") else "smollm2"
    with fake_server(BrokenServer(ways=broken)) as server, pytest.raises(UserError) as fault:
        find_server(server.url, model=model, within_s=SECONDS if "not answered in full" in said else LONG_S)
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)
    assert len(str(fault.value)) < 400
    assert time.monotonic() - began < LONG_S


EVENTS = [
    (b"data: " + DEEP + b"\n\n", "not of llama-server: invalid JSON: recursion limit exceeded"),
    (b"data: {\n\n", "invalid JSON"),
    (b'data: "text"\n\n', "input should be an object, got 'text'"),
    (b'data: {"error": ' + DEEP + b"}\n\n", "invalid JSON: recursion limit exceeded"),
    (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
    (b'data: {"content": 7, "stop": false}\n\n', "content: input should be a valid string, got 7"),
    (b'data: {"tokens": ["7"], "stop": false}\n\n', "tokens.0: input should be a valid integer, got '7'"),
    (b'data: {"tokens": [-7], "stop": false}\n\n', "tokens.0: input should be greater than or equal to 0"),
    (b'data: {"tokens_predicted": 1000000, "stop": false}\n\n', "says that it made 1,000,000 tokens where 12"),
    (last(tokens_predicted=10**12), "tokens_predicted: input should be less than or equal to 16777216"),
    (last(tokens_predicted=9999.5), "tokens_predicted: input should be a valid integer, got 9999.5"),
    (last(tokens_predicted="7"), "tokens_predicted: input should be a valid integer, got '7'"),
    (last(tokens_predicted=-7), "tokens_predicted: input should be greater than or equal to 0, got -7"),
    (last(tokens_predicted=None), "no tokens_evaluated or tokens_predicted at its end"),
    (last(tokens_evaluated=10**12), "tokens_evaluated: input should be less than or equal to 16777216"),
    (last(timings=[]), "timings: input should be an object, got []"),
    (last(timings={"prompt_ms": -1e308}), "timings.prompt_ms: input should be greater than or equal to 0, got -1e+308"),
    (last(timings={"prompt_ms": float("nan")}), "timings.prompt_ms: input should be a finite number, got nan"),
    (last(timings={"prompt_ms": "1"}), "timings.prompt_ms: input should be a valid number, got '1'"),
    (last(timings={"cache_n": -1}), "timings.cache_n: input should be greater than or equal to 0, got -1"),
    ("never ends an event", "an event of more than"),
    ("comments without end", "more events than its tokens can take"),
    ("never ends a stream", "says that it made 13 tokens where 12 were asked for"),
    ("never ends a refusal", "HTTP 500: no no no"),
    ("never ends its headers", "the connection broke off"),
    ("packs its answer", "answers in 'gzip', which was not asked for"),
]
PAGES = [
    ("/tokenize", DEEP, None),
    ("/tokenize", b'{"tokens": [[1]]}', "/tokenize: tokens.0: input should be a valid integer, got [1]"),
    ("/tokenize", b'{"tokens": [1e12]}', "/tokenize: tokens.0: input should be a valid integer"),
    ("/tokenize", "never ends its body", "/tokenize: answered by more than"),
    ("/tokenize", "drips a body without end", "/tokenize: not answered in full within"),
    ("/metrics", b"llamacpp:prompt_tokens_total abc\n", "'abc' where a number from 0 is expected"),
    ("/metrics", b"llamacpp:prompt_tokens_total NaN\n", "'NaN' where a number from 0 is expected"),
    ("/metrics", b"llamacpp:prompt_tokens_total -1e308\n", "where a number from 0 is expected"),
    ("/metrics", b"any other line\nabc{ NaN\n" * 1000, None),
    ("/metrics", "never ends its body", "/metrics: answered by more than"),
    ("/slots", b"{}", "/slots: input should be a valid array, got {}"),
    ("/slots", b'[{"is_processing": "yes"}]', "0.is_processing: input should be a valid boolean, got 'yes'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "way", "said"), [*(("/completion", way, said) for way, said in EVENTS), *PAGES])
def test_what_a_server_says_while_it_is_measured(path, way, said, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_ending", lambda _: lambda found: len(found.runs) >= 8)
    began = time.monotonic()
    fault = None
    with fake_server(BrokenServer(ways={path: way})) as server:
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        try:
            calibrate_server(found, seconds=SECONDS if "drips" in str(way) else LONG_S, journal=tmp_path / "p.part")
        except UserError as error:
            fault = str(error)
    if said:
        assert fault
        assert said in fault
    else:
        # What is left aside does no harm; the steps of one that takes no time cannot be told apart.
        assert fault is None or "where 40 of each are wanted: " in fault
    assert "\n" not in (fault or "")
    assert time.monotonic() - began < LONG_S


@pytest.mark.parametrize("way", ["says nothing", "stops in its stream"])
def test_a_server_that_falls_silent_is_said_to_be(way, tmp_path):
    with fake_server(BrokenServer(ways={"/completion": way}, after=3)) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        with pytest.raises(UserError, match="where 40 of each are wanted: it has said nothing for the last 30 s"):
            calibrate_server(found, seconds=30.0, journal=tmp_path / "p.part")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "said"), EVENTS)
def test_what_a_server_says_while_it_is_recorded(way, said, tmp_path):
    given = scenario(output_tokens={"kind": "fixed", "value": 12})
    with fake_server(BrokenServer(ways={"/completion": way})) as server, pytest.raises(UserError) as fault:
        record_server(given, tmp_path / "a.jsonl", Asking(Address(server.url), timeout_s=5, limit_s=30))
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)
    assert [*tmp_path.iterdir()] == []
