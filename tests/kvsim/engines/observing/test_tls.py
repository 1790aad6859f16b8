"""A server that wants TLS, with a certificate that it made for itself."""

import json
import shutil
import subprocess

import httpx
import pytest

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import http_options
from tests.kvsim.engines.observing.servers import TEXT, Upstream, chat_events, observing, served

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
ASKED = {"messages": [{"role": "user", "content": "Quel temps ?"}], "stream": True}
ASKED["stream_options"] = {"include_usage": True}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate of 127.0.0.1 and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kvsim test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def url(certificate):
    """The address of a server that has it."""
    cert, key = certificate
    with served(Upstream().app, ssl_certfile=cert, ssl_keyfile=key) as url:
        yield url.replace("http:", "https:")


@pytest.mark.slow
def test_a_certificate_that_is_trusted_is_accepted(url, certificate, out, client, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with observing(url, out) as observed:
        answers = [client.post(f"{observed.url}/v1/chat/completions", json=ASKED) for _ in range(3)]
    assert [answer.content for answer in answers] == [b"".join(chat_events())] * 3
    assert [(line["end"], line["output_tokens"]) for line in observed.requests()] == [("completed", len(TEXT))] * 3


def test_any_other_is_refused_and_the_answer_says_why(url, out, client, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with observing(url, out) as observed:
        answer = client.post(f"{observed.url}/v1/chat/completions", json=ASKED)
    said = json.loads(answer.content)["error"]["message"]
    assert answer.status_code == 502
    assert f"{url} cannot be reached: certificate verify failed: self-signed certificate; SSL_CERT_FILE=" in said
    (line,) = observed.requests()
    assert (line["end"], line["cause"]) == ("failed", "unreachable")


def test_one_for_another_name_is_refused(url, certificate, out, client, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with observing(url.replace("127.0.0.1", "localhost"), out) as observed:
        answer = client.post(f"{observed.url}/v1/chat/completions", json=ASKED)
    assert "Hostname mismatch, certificate is not valid for 'localhost'" in answer.text


def test_a_server_without_tls_is_named(upstream, out, client):
    with observing(upstream.url.replace("http:", "https:"), out) as observed:
        answer = client.post(f"{observed.url}/v1/chat/completions", json=ASKED)
    assert answer.status_code == 502
    assert "cannot be reached: wrong version number" in answer.text or "record layer failure" in answer.text


def test_the_other_commands_trust_the_same(url, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert httpx.Client(**http_options(Address(url))).get("/any").status_code == 203
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
        httpx.Client(**http_options(Address(url))).get("/any")
