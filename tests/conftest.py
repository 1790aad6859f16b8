"""What all tests have in common.

Each process has one BLAS thread: several processes with several threads each would fight over the cores.
"""

import gc
import os
import signal
from pathlib import Path

import pytest

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for the commands that tests start
os.environ["KVSIM_PROFILES"] = os.path.join(os.path.dirname(__file__), "no-profiles")  # none of this user's own

# A shell that starts this in the background may have it ignore Ctrl-C, and with it what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import numpy as np
from hypothesis.internal.conjecture import providers
from threadpoolctl import threadpool_limits

from real_engine import load_model

gc.disable()  # Until tests run: nearly all that is made before stays.

# A test must not fail by luck: hypothesis draws the same examples in every run, unless HYPOTHESIS=random is set.
# On a busy machine an example may take any time, so that none fails for having been slow.
random = os.environ.get("HYPOTHESIS") == "random"
hypothesis.settings.register_profile(
    "suite",
    derandomize=not random,
    max_examples=100 if random else 50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")
# Nor may examples depend on which modules are loaded, whose constants hypothesis draws otherwise.
providers._get_local_constants = providers.Constants

np.ones((2, 2)) @ np.ones((2, 2))  # loads the library, so that there is something to limit
threadpool_limits(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Leave what tests are made of, a million objects, out of every garbage collection to come."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def smollm2():
    """The real model, loaded once; tests that use it skip where ``SMOLLM2_MISSING`` says that it is not there."""
    return load_model("smollm2")


@pytest.fixture
def undrawn(monkeypatch):
    """Saved figures are files with hardly anything in them, where a test is of what stands beside the pictures."""

    def save(figure, out, **options):
        out.write_bytes(b"PNG") if isinstance(out, Path) else out.write(b"PNG")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture
def write(tmp_path):
    """A function that writes a file and returns its path."""

    def write_file(content, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write_file
