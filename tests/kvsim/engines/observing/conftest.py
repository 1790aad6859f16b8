"""Fixtures: one stand-in server for the tests of a module, and where the proxy writes."""

import httpx
import pytest

from tests.kvsim.engines.observing.servers import Upstream, served


@pytest.fixture(scope="module")
def upstream():
    """A stand-in for a server, and its address."""
    stand_in = Upstream()
    with served(stand_in.app) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
def out(tmp_path):
    return tmp_path / "mine.jsonl"


@pytest.fixture
def client():
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(timeout=30, trust_env=False, limits=limits) as made:
        yield made
