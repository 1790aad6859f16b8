"""Fixtures of the tests with a real llama.cpp: one version of it, or a skip, and tiny models."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvsim.errors import UserError
from real_engine.llama_library import Library, LlamaModel
from tests.real_engine.llamacpp.models import write_llama, write_windowed

FOLDER = Path(named).resolve() if (named := os.environ.get("KVSIM_LLAMA_CPP")) else None
"""Folder with another llama-cpp-python than the installed one."""
if FOLDER is not None:
    # Absolute, since tests change the working directory.
    os.environ["KVSIM_LLAMA_CPP"] = str(FOLDER)
WINDOW = 64


def missing():
    """Why no supported llama.cpp is available; empty if one is."""
    if FOLDER is None and find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed; make test-llama gets it and runs these tests"
    try:
        Library(FOLDER)
    except UserError as e:
        return f"{e}; make test-llama gets a supported one, and runs these tests"
    return ""


def pytest_collection_modifyitems(items):
    reason = missing()
    for item in items:
        if reason and item.get_closest_marker("llama"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def library():
    return Library(FOLDER)


@pytest.fixture
def only(library):
    """Skips a test that needs another era."""

    def check(wanted):
        if library.era != wanted:
            pytest.skip(f"for llama.cpp of era {wanted}; {library.name} is of era {library.era}")

    return check


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The path of a tiny Llama."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def model(library, tiny):
    """The tiny Llama."""
    with LlamaModel(library, tiny) as loaded:
        yield loaded


@pytest.fixture
def windowed(library, only, tmp_path):
    """A tiny model half of whose layers look back ``WINDOW`` tokens."""
    only("B")
    with LlamaModel(library, write_windowed(tmp_path / "windowed.gguf", WINDOW)) as loaded:
        yield loaded
