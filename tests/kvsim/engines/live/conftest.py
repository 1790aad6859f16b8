"""A port to start a server on."""

import socket

import pytest


@pytest.fixture
def port():
    """A free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
