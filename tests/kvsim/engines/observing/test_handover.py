"""What the relay tells the observer, and what it drops when that one is far behind."""

import json
import socket

import pytest

from kvsim.engines.observing import handover as module
from kvsim.engines.observing.handover import Frame, Handover, Kind, Spool, frames_of, received


class Pipe:
    """A transport that keeps what it is given, and is as full as it is told to be."""

    def __init__(self):
        self.data, self.full = b"", 0

    def set_write_buffer_limits(self, high):
        pass

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return self.full

    def write(self, data):
        self.data += data


def frames(data):
    return list(frames_of(data[start : start + 7] for start in range(0, len(data), 7)))


@pytest.fixture
def pipe():
    return Pipe()


@pytest.fixture
def ways():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def handover(pipe, ways):
    made = Handover()
    made.begin(pipe, ways[0])
    return made


def test_frames_come_as_they_were_given_in_any_pieces(handover, pipe, ways):
    handover.text(Kind.ANSWERED, 7, 1.5, b"[]")
    handover.text(Kind.SENT, 7, 2.0, b"\x00\xff" * 20)
    assert pipe.data == b""  # They wait for more.
    handover.end(7, 2.5, {"end": "completed"})
    answered, sent, ended = frames(pipe.data)
    assert answered == Frame(Kind.ANSWERED, 7, 1.5, b"[]")
    assert sent == Frame(Kind.SENT, 7, 2.0, b"\x00\xff" * 20)
    assert json.loads(ended.data) == {"end": "completed", "missed": 0}
    assert frames(pipe.data[:-1]) == [answered, sent]
    ways[0].close()
    assert list(frames_of(received(ways[1]))) == [ended]


def test_a_thread_takes_all_that_comes(ways):
    ours, theirs = ways
    spool = Spool(theirs)
    ours.sendall(b"x" * 1000)
    ours.close()
    assert b"".join(spool.pieces()) == b"x" * 1000


def test_far_behind_texts_are_dropped_and_counted(handover, pipe, monkeypatch):
    monkeypatch.setattr(module, "_FULL", 1000)
    pipe.full = 1001
    handover.text(Kind.RECEIVED, 1, 0.0, b"x" * 30)
    pipe.full = 0
    handover.text(Kind.RECEIVED, 1, 0.0, b"x" * 12)  # Without what was dropped it makes no sense.
    handover.text(Kind.RECEIVED, 2, 0.0, b"kept")
    for request in (1, 2):
        handover.end(request, 0.0, {})
    kept, *ends = frames(pipe.data)
    assert kept.data == b"kept"
    assert [json.loads(end.data)["missed"] for end in ends] == [42, 0]


def test_ends_pass_texts_and_wait_where_there_is_no_room(handover, pipe, ways):
    """More than the system holds, and all texts are stuck."""
    pipe.full = 10**9
    n = 3000
    for request in range(n):
        handover.end(request, 0.0, {"filled": "x" * 300})
    assert pipe.data == b""
    ends = frames_of(received(ways[1]))
    found = []
    while len(found) < n:
        found.append(next(ends).request)
        handover.flush()
    assert found == list(range(n))
