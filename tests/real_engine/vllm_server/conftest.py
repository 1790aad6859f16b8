"""A real vLLM that all tests ask, one after the other."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsim.engines.live.address import Address, address_of
from tests.real_engine.vllm_server.model import write_model
from tests.real_engine.vllm_server.server import NAMED, running

# Not resolved: what it links to is the Python without vLLM.
PYTHON = Path(named).absolute() if (named := os.environ.get(NAMED)) else None
LIMIT_S = 300.0
"""How long the server may take to be ready; 20 to 40 seconds are usual."""
BLOCKS, BLOCK_SIZE, SEATS = 256, 32, 8


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    address: Address
    model: str
    """Its name, which is its folder."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if PYTHON is None and here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason=f"{NAMED} names no vLLM; make test-vllm installs one, and runs these tests")
            )


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of the tiny model. Where a Python was named, one that is missing is an error."""
    assert PYTHON.is_file(), f"{NAMED}: there is no {PYTHON}"
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model(folder / "model")
    flags = ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
    flags += ["--max-num-seqs", str(SEATS), "--enable-prompt-tokens-details"]
    with running(PYTHON, model, flags, folder / "server.log", LIMIT_S) as port:
        yield Server(address_of(f"http://127.0.0.1:{port}"), str(model))
