"""What passes through the proxy is what a client and a server would have told each other without it."""

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvsim.engines.live.address import Address
from kvsim.engines.observing import proxy, serving
from kvsim.engines.observing.handover import Handover
from kvsim.engines.observing.proxy import Relay
from kvsim.engines.observing.serving import Observation, observe
from kvsim.errors import UserError
from tests.kvsim.engines.observing.servers import TEXT, chat_events, observing, raw_server, receive

CHAT = "/v1/chat/completions"
N_CLIENTS = 200


def ask(model="", **more):
    return {"model": model, "messages": [{"role": "user", "content": "Quel temps ?"}], **more}


def told_by(base, client, method, target, content):
    """Status, headers and body of an answer, and what the stand-in says that it was asked."""
    pieces = iter(content) if isinstance(content, list) else content
    headers = {"host": "my-host", "authorization": "Bearer key", "x-odd": "ä".encode("latin-1")}
    request = client.build_request(method, base, headers=headers, content=pieces)
    request.extensions["target"] = target.encode()
    answer = client.send(request)
    client.cookies.clear()
    seen = answer.json() if answer.content else {}
    # A proxy has connections of its own.
    seen["headers"] = sorted(pair for pair in seen.get("headers", []) if pair[0] != "connection")
    return (
        answer.status_code,
        [pair for pair in answer.headers.raw if pair[0] not in (b"date", b"content-length")],
        seen,
    )


@pytest.mark.parametrize(
    ("method", "target", "content"),
    [
        ("GET", "/a%2Fb/../c;d?x=1&y=%0d%0aevil:1&x=2", None),
        ("POST", "/anything", b"\x00\xffbody"),
        ("PUT", "/props", b"x" * 100_000),
        ("DELETE", "//double//slash/", None),
        ("PATCH", "/pieces", [b"one", b"two"]),
        ("POST", "/empty", b""),
        ("OPTIONS", "/", None),
        ("HEAD", "/head", None),
        ("GET", "/moved", None),
    ],
)
def test_a_request_and_its_answer_pass_unchanged(method, target, content, client, upstream, out):
    with observing(upstream.url, out) as observed:
        first, second = (told_by(base, client, method, target, content) for base in (upstream.url, observed.url))
    assert second == first
    assert (observed.summary.requests, observed.summary.passed_on) == (0, 1)


def test_the_stand_in_sees_differences(client, upstream):
    """The control."""
    assert told_by(upstream.url, client, "GET", "/a", None) != told_by(upstream.url, client, "GET", "/b", None)


@pytest.mark.parametrize(
    "lines",
    [
        b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: b\rEvil: 1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: b\x00\r\n\r\n",
        b"GET /x\x00y HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://example.invalid/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET example.invalid:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
def test_what_could_be_taken_for_another_request_is_refused(lines, upstream, out):
    """Header injection, targets elsewhere, and lengths that contradict each other never get to the server."""
    before = len(upstream.echoed)
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        connection.sendall(lines)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert len(upstream.echoed) == before


def test_injected_lines_in_an_answer_do_not_get_to_the_client(client, out):
    def answer(connection):
        receive(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-A: b\rSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n")

    with raw_server(answer) as url, observing(url, out) as observed:
        told = client.get(f"{observed.url}/x")
    assert (told.status_code, told.headers.get("set-cookie")) == (502, None)


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_stream_passes_piece_by_piece_at_once(client, out):
    """The server sends a piece only when the client has the one before."""
    had = threading.Event()
    pieces = list(chat_events())

    def answer(connection):
        receive(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            assert had.wait(10)
            had.clear()
        connection.sendall(b"0\r\n\r\n")

    got = []
    with (
        raw_server(answer) as url,
        observing(url, out) as observed,
        client.stream("POST", observed.url + CHAT, json=ask(stream=True)) as told,
    ):
        for piece in told.iter_raw():
            got.append(piece)
            had.set()
    assert got == pieces
    (line,) = observed.requests()
    assert (line["end"], line["stream"], line["output_tokens"]) == ("completed", True, len(TEXT))


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
def test_a_server_that_dies_in_an_answer_leaves_it_broken(framing, client, out):
    piece = next(chat_events())

    def answer(connection):
        receive(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n\r\n")
        connection.sendall(piece if b"Length" in framing else b"%x\r\n%b\r\n" % (len(piece), piece))

    got = []
    with (
        raw_server(answer) as url,
        observing(url, out) as observed,
        pytest.raises(httpx.RemoteProtocolError),
        client.stream("POST", observed.url + CHAT, json=ask(stream=True)) as told,
    ):
        got.extend(told.iter_raw())
    assert got == [piece]
    assert [(line["end"], line["status"]) for line in observed.requests()] == [("failed", 200)]


def test_a_server_that_cannot_be_reached_is_an_error_as_openai_has_them(client, out):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with observing(f"http://127.0.0.1:{port}", out) as observed:
        told = client.post(observed.url + CHAT, json=ask())
    error = told.json()["error"]
    assert (told.status_code, error["code"], error["type"]) == (502, 502, "bad_gateway")
    # asyncio and uvloop have different words.
    assert re.fullmatch(
        f"kvsim observe: the server http://127.0.0.1:{port} cannot be reached: connec.*", error["message"]
    )
    (line,) = observed.requests()
    assert (line["end"], line["status"], line["counted"], line["output_tokens"]) == ("failed", None, "estimate", 0)


def test_an_error_of_the_server_passes_and_is_recorded_without_its_words(client, upstream, out):
    with observing(upstream.url, out) as observed:
        told = client.post(observed.url + CHAT, json=ask("refusing"))
    assert (told.status_code, told.headers["retry-after"]) == (429, "7")
    assert told.json()["error"]["message"] == "no secret words here"
    (line,) = observed.requests()
    assert (line["status"], line["end"]) == (429, "failed")
    assert "secret" not in out.read_text()


@pytest.mark.parametrize(("how", "begun"), [("thinking", False), ("endless", True)])
def test_a_client_that_hangs_up_ends_the_request_at_the_server(how, begun, upstream, out):
    upstream.cancelled.clear()
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        body = json.dumps(ask(how, stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        n_before = len(upstream.bodies)
        connection.sendall(head + body)
        while len(upstream.bodies) == n_before:
            time.sleep(0.005)
        if begun:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.close()
        assert upstream.cancelled.wait(5)
    (line,) = observed.requests()
    assert (line["end"], line["status"]) == ("cancelled", 200 if begun else None)


def test_a_client_that_hangs_up_after_the_last_event_was_answered_in_full(client, upstream, out):
    with (
        observing(upstream.url, out) as observed,
        client.stream("POST", observed.url + CHAT, json=ask("hanging", stream=True)) as told,
    ):
        next(line for line in told.iter_lines() if "[DONE]" in line)
    assert [line["end"] for line in observed.requests()] == ["completed"]


@pytest.mark.slow
def test_two_hundred_clients_are_served_at_once(upstream, out):
    """The stand-in answers none before it has all of them."""
    body = ask("busy", n_clients=N_CLIENTS)
    limits = httpx.Limits(max_connections=None)
    with (
        observing(upstream.url, out) as observed,
        httpx.Client(timeout=30, trust_env=False, limits=limits) as client,
        ThreadPoolExecutor(N_CLIENTS) as clients,
    ):
        answers = list(clients.map(lambda _: client.post(observed.url + CHAT, json=body), range(N_CLIENTS)))
    assert {answer.status_code for answer in answers} == {200}
    assert upstream.together == N_CLIENTS
    lines = observed.requests()
    assert sorted(line["id"] for line in lines) == list(range(N_CLIENTS))
    assert len({tuple(line["blocks"]) for line in lines}) == 1


def test_requests_that_run_are_cut_off_at_the_end(upstream, out):
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        body = json.dumps(ask("endless", stream=True)).encode()
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(100)
        observed.listening.stop()
        observed.listening.stop()
    assert [line["end"] for line in observed.requests()] == ["cancelled"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upstream": "http://192.0.2.1:8080"}, "192.0.2.1: not an address of this machine"),
        ({"upstream": "ftp://127.0.0.1"}, "not the address of a server"),
        ({"host": "0.0.0.0"}, "--host: 0.0.0.0: others could connect"),
        ({"out": "missing/mine.jsonl"}, "--out: .*: cannot be written: No such file"),
        ({"out": "."}, "--out: .*: cannot be written: Is a directory"),
        ({"salt_file": "short"}, "a salt has 32"),
        ({"rotate_bytes": 10}, "--rotate: 10 bytes"),
    ],
)
def test_what_cannot_be_used_is_told_at_the_start(settings, message, tmp_path, out):
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "short").chmod(0o600)
    paths = {key: tmp_path / settings[key] for key in ("out", "salt_file") if key in settings}
    with pytest.raises(UserError, match=message):
        observe(Observation(**{"upstream": "http://127.0.0.1:9", "out": out, "port": 0} | settings | paths), print)


def test_it_does_not_pass_on_to_itself(out):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=r"--host 127.0.0.1 --port \d+: Address already in use"):
            observe(Observation("http://127.0.0.1:9", out, port=port), print)
    with pytest.raises(UserError, match="would pass requests on to itself"):
        observe(Observation(f"http://localhost:{port}", out, port=port), print)


def test_settings_of_this_user_have_nobody_else_contacted(client, upstream, out, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with observing(upstream.url, out) as observed:
        assert client.get(f"{observed.url}/x").status_code == 203


def test_a_server_elsewhere_is_told_its_own_name():
    relay = Relay(Address("https://example.invalid/base"), Handover())
    head = relay.rewritten(b"GET /x?a=%41 HTTP/1.1", [(b"Host", b"127.0.0.1:8090"), (b"Connection", b"keep-alive")])
    assert head == b"GET /base/x?a=%41 HTTP/1.1\r\nHost: example.invalid\r\nConnection: close\r\n\r\n"


def test_a_server_below_a_path_is_asked_there(client, upstream, out):
    with observing(f"{upstream.url}/base", out) as observed:
        told = client.post(f"{observed.url}/x", content=b"body").json()
    assert (told["target"], told["body"]) == ("/base/x?", "body")
    assert dict(told["headers"])["host"] == observed.url.removeprefix("http://")


def test_each_request_has_a_connection_of_its_own_to_the_server(client, upstream, out):
    """So that none is sent on a connection that the server is just closing."""
    n_before = len(upstream.peers)
    with observing(upstream.url, out) as observed:
        for _ in range(3):
            client.get(f"{observed.url}/x")
    assert len(set(upstream.peers[n_before:])) == 3


def test_small_pieces_are_sent_at_once():
    """asyncio switches Nagle's algorithm off only for sockets made with this protocol."""
    with serving._listening("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def request_of(body, path=CHAT):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def answer_when_half_closed(connection):
    """Answer when the client has said that it sends no more."""
    while connection.recv(65536):
        pass
    body = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def read_all(connection):
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_a_client_that_half_closes_gets_its_answer(out):
    with (
        raw_server(answer_when_half_closed) as url,
        observing(url, out) as observed,
        connected(observed.url) as connection,
    ):
        connection.sendall(request_of(ask()))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).endswith(b"}}")
    assert [line["end"] for line in observed.requests()] == ["completed"]


def test_an_answer_without_a_length_ends_with_its_connection(client, out):
    def answer(connection):
        receive(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(chat_events()))

    with raw_server(answer) as url, observing(url, out) as observed:
        assert client.post(observed.url + CHAT, json=ask(stream=True)).content == b"".join(chat_events())
    assert [(line["end"], line["output_tokens"]) for line in observed.requests()] == [("completed", len(TEXT))]


@pytest.mark.parametrize("begun", [b"POST /v1/chat/comp", request_of(b"x" * 100)[:-1]])
def test_a_request_that_does_not_come_in_full_is_dropped_in_time(begun, upstream, out, monkeypatch):
    monkeypatch.setattr(proxy, "HEAD_S", 0.2)
    monkeypatch.setattr(proxy, "BODY_S", 0.2)
    monkeypatch.setattr(proxy, "SWEEP_S", 0.05)
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        connection.sendall(begun)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert connection.recv(4096) == b""
    assert observed.summary.failures == ({"timeout": 1} if b"\r\n\r\n" in begun else {})


def test_an_idle_connection_is_closed_in_time(upstream, out, monkeypatch):
    monkeypatch.setattr(proxy, "IDLE_S", 0.2)
    monkeypatch.setattr(proxy, "SWEEP_S", 0.05)
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        assert connection.recv(4096) == b""


def test_a_head_without_an_end_is_refused(upstream, out):
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_requests_one_after_the_other_without_waiting_are_answered_in_order(upstream, out):
    requests = [ask(), ask(stream=True), ask("refusing"), ask()]
    with observing(upstream.url, out) as observed, connected(observed.url) as connection:
        last = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        connection.sendall(b"".join(map(request_of, requests)) + last)
        told = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+) ", told) == [b"200", b"200", b"429", b"200", b"203"]
    assert [line["status"] for line in observed.requests()] == [200, 200, 429, 200]


def test_another_protocol_passes_as_it_is(client, out):
    def answer(connection):
        if b"Upgrade" not in connection.recv(65536):
            return
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        while data := connection.recv(65536):
            connection.sendall(data[::-1])

    with raw_server(answer) as url, observing(url, out) as observed, connected(observed.url) as connection:
        connection.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
        for said in (b"\x00\xff no HTTP\r\n\r\n", b"more"):
            connection.sendall(said)
            assert connection.recv(4096) == said[::-1]


def test_an_offer_to_change_the_protocol_is_no_change(out):
    """As Java's client makes it with its first request."""

    def answer(connection):
        for _ in range(2):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\nContent-Length"
    with raw_server(answer) as url, observing(url, out) as observed, connected(observed.url) as connection:
        for _ in range(2):
            connection.sendall(request_of(ask()).replace(b"Content-Length", offer))
            assert connection.recv(65536).endswith(b"{}")
    assert [line["prompt_units"] for line in observed.requests()] == [18] * 2


def test_a_client_that_does_not_read_holds_the_server_up(upstream, out):
    """So that the proxy needs no memory for what nobody takes."""
    sent, held_up = 0, threading.Event()

    def answer(connection):
        nonlocal sent
        receive(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connection.settimeout(1)
        try:
            for _ in range(1000):
                connection.sendall(b"x" * 10**6)
                sent += 10**6
        except TimeoutError:
            held_up.set()

    with raw_server(answer) as url, observing(url, out) as observed, connected(observed.url) as connection:
        connection.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert held_up.wait(60)
    assert 0 < sent < 30 * 10**6


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", "no_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "cut_short"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", "http_5xx"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "http_4xx"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error": {"code": 500}}\n\n',
            "error_event",
        ),
    ],
)
def test_failed_requests_are_counted_by_cause_and_apart(answer, cause, client, out):
    def say(connection):
        receive(connection)
        connection.sendall(answer)

    with raw_server(say) as url, observing(url, out) as observed:
        for _ in range(2):
            with contextlib.suppress(httpx.RemoteProtocolError):
                client.post(observed.url + CHAT, json=ask())
    assert [(line["end"], line["cause"]) for line in observed.requests()] == [("failed", cause)] * 2
    assert (observed.summary.requests, observed.summary.failures) == (0, {cause: 2})


def test_retries_while_the_server_is_dead_do_not_end_the_recording(client, upstream, out):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with observing(f"http://127.0.0.1:{port}", out, requests=2) as observed:
        for _ in range(5):
            assert client.post(observed.url + CHAT, json=ask()).status_code == 502
    assert (observed.summary.requests, observed.summary.failures) == (0, {"unreachable": 5})


def test_times_are_marked_while_the_proxy_is_late(client, upstream, out, monkeypatch):
    """Connecting has the loop for 50 ms."""
    made = proxy.Server.connection_made
    monkeypatch.setattr(proxy.Server, "connection_made", lambda *these: (time.sleep(0.05), made(*these)))
    with observing(upstream.url, out) as observed:
        client.post(observed.url + CHAT, json=ask())
    (line,) = observed.requests()
    assert 0.02 < line["distorted"] < 5
    assert observed.summary.distorted == 1
    assert observed.summary.lag_s == pytest.approx(line["distorted"], abs=1e-4)


def test_where_it_is_in_time_nothing_is_marked(client, upstream, out, monkeypatch):
    monkeypatch.setattr(proxy, "LAG_S", 60)
    with observing(upstream.url, out) as observed:
        client.post(observed.url + CHAT, json=ask())
    assert (observed.summary.distorted, observed.summary.lag_s) == (0, 0)
    assert "distorted" not in observed.requests()[0]
