"""What passes through the proxy is what a client and a server would have told each other without it."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvsim.engines.live.address import Address
from kvsim.engines.observing import serving
from kvsim.engines.observing.proxy import Proxy, end_to_end
from kvsim.engines.observing.serving import Observation, observe
from kvsim.errors import UserError
from tests.kvsim.engines.observing.servers import TEXT, chat_events, observing, raw_server

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


def test_headers_of_a_connection_stay_there():
    given = [
        (b"Connection", b"keep-alive, X-Mine"),
        (b"x-mine", b"1"),
        (b"TE", b"trailers"),
        (b"a", b"1"),
        (b"a", b"2"),
    ]
    assert end_to_end(given) == [(b"a", b"1"), (b"a", b"2")]
    both_lengths = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    assert end_to_end(both_lengths) == []
    assert end_to_end(both_lengths[:1]) == both_lengths[:1]


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
        connection.recv(65536)
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
        connection.recv(65536)
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
        connection.recv(65536)
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
    assert error["message"] == f"kvsim observe: the server http://127.0.0.1:{port} cannot be reached (ConnectError)"
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


def test_what_takes_long_to_close_was_answered_in_full(client, upstream, out, monkeypatch):
    close = httpx.Response.aclose

    async def slowly(answer):
        await asyncio.sleep(0.05)
        await close(answer)

    monkeypatch.setattr(httpx.Response, "aclose", slowly)
    with observing(upstream.url, out) as observed:
        client.post(observed.url + CHAT, json=ask())
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
    proxy = Proxy(Address("https://example.invalid/base"), observer=None)
    scope = {"method": "GET", "raw_path": b"/x", "query_string": b"a=%41", "headers": [(b"host", b"127.0.0.1:8090")]}
    request = proxy._request(scope, _NoBody())
    assert request.headers["host"] == "example.invalid"
    assert request.extensions["target"] == b"/base/x?a=%41"


class _NoBody:
    def leave(self):
        pass


def test_the_way_to_a_server_has_no_limit_in_time_or_number(out):
    request = Proxy(Address("http://127.0.0.1:9"), observer=None)._request(
        {"method": "POST", "raw_path": b"/", "query_string": b"", "headers": []}, _NoBody()
    )
    timeouts = request.extensions["timeout"]
    assert [timeouts[key] for key in ("read", "write", "pool")] == [None] * 3
    assert re.fullmatch(r"127\.0\.0\.1:9", request.headers["host"])


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
