"""The program as a user starts it, and commands within this process, both in an empty folder."""

import os
import subprocess

import pytest

from kvsim.advice.recommend.recommend import recommend
from kvsim.advice.recommend.search import SearchBudget
from tests.kvsim.cli.answers import PROGRAM
from tests.worlds import command


@pytest.fixture
def kvsim(tmp_path):
    """Runs the program in an empty folder, with no terminal."""
    quiet = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}

    def run(*arguments):
        return subprocess.run([PROGRAM, *arguments], cwd=tmp_path, env=quiet, capture_output=True, text=True)

    return run


@pytest.fixture
def brief_search(monkeypatch):
    """``kvsim recommend`` tries a few settings."""
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SearchBudget(4, 1, 2, 1, 2, 1, fewest=8))


@pytest.fixture
def within(tmp_path, monkeypatch):
    """Run a command within this process."""
    monkeypatch.chdir(tmp_path)
    return command
