"""Running a llama-server."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMED = "KVSIM_LLAMA_SERVER"
"""Environment variable with the path of a llama-server; ``make test-llama`` builds one and sets it."""

_LISTENS = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def version(server: Path) -> list[str]:
    """What the server says of its version."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=30, check=True)
    return [line for line in (said.stdout + said.stderr).splitlines() if "version" in line or "built with" in line]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


@contextmanager
def running(server: Path, model: Path, flags: Sequence[str], log: Path, limit_s: float) -> Iterator[int]:
    """The port of a server that has loaded its model; it is ended, and its log is whole, when the block is left.

    Raises ``TimeoutError`` if it does not come up within ``limit_s``, ``RuntimeError`` if it ends by itself.
    """
    # Settings of this user must not change what the flags say.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    network = ["--host", "127.0.0.1", "--port", "0", "--no-ui"]
    logging = ["--log-file", str(log), "--log-timestamps", "--log-prefix", "-lv", "5"]
    process = subprocess.Popen(
        [server, "-m", model, *network, *logging, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=clean,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        yield _wait_for_port(process, log, limit_s)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen, log: Path, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode} before it had loaded its model")
        if log.exists() and (found := _LISTENS.search(log.read_text("utf-8", "replace"))):
            return int(found[1])
        time.sleep(0.05)
    raise TimeoutError(f"llama-server had not loaded its model after {limit_s} s")
