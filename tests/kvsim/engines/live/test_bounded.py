"""Answers of servers that are bounded in bytes and seconds."""

import asyncio
import tracemalloc

import httpx
import pytest

from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import ServerFault, fetch, fetch_async, http_options
from tests.kvsim.engines.live.broken_server import BrokenServer
from tests.kvsim.engines.live.fake_server import fake_server

LATE, LONG = "/props: not answered in full within 0.4 s", "/props: answered by more than 1,000,000 bytes"
SAID = {
    "drips a body of known length": LATE,
    "drips a body without end": LATE,
    "drips its headers": LATE,
    "says nothing": LATE,
    "never ends its body": LONG,
    "never ends its headers": "/props: the connection broke off: ",
    "never ends a refusal": LONG,
    "packs its answer": "answers in 'gzip', which was not asked for",
    "breaks off": "/props: the connection broke off: ",
    "speaks no HTTP": "/props: the connection broke off: ",
    "hangs up": "/props: the connection broke off: ",
}


def fetched(server, **bounds):
    with httpx.Client(**http_options(Address(server.url))) as http:
        return fetch(http, "GET", "/props", **bounds)


def fetched_async(server, **bounds):
    async def ask():
        async with httpx.AsyncClient(**http_options(Address(server.url))) as http:
            return await fetch_async(http, "GET", "/props", **bounds)

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [fetched, fetched_async])
@pytest.mark.parametrize("way", SAID)
def test_a_server_that_does_not_end_is_one_line(way, ask):
    with fake_server(BrokenServer(ways={"/props": way})) as server:
        tracemalloc.start()
        with pytest.raises(ServerFault) as fault:
            ask(server, most_bytes=1_000_000, within_s=0.4)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert SAID[way] in str(fault.value)
    assert str(fault.value).startswith(server.url)
    assert "\n" not in str(fault.value)
    assert most < 20_000_000


@pytest.mark.parametrize("ask", [fetched, fetched_async])
def test_an_answer_comes_whole(ask):
    with fake_server() as server:
        answer = ask(server)
    assert answer.status == 200
    assert b"total_slots" in answer.content
    with pytest.raises(ServerFault, match="cannot be reached") as fault:
        ask(server)
    assert fault.value.gone
