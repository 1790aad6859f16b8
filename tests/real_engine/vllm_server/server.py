"""Running a vLLM server."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

NAMED = "KVSIM_VLLM"
"""Environment variable with the path of the Python that has vLLM; ``make test-vllm`` installs one and sets it."""

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Few gigabytes, and nothing is sent anywhere."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(python: Path, model: Path, flags: Sequence[str], log: Path, limit_s: float) -> Iterator[int]:
    """The port of a server with random weights that is ready; it is ended when the block is left.

    ``model`` is a folder, see ``model.py``. Raises ``TimeoutError`` if the server is not ready within ``limit_s``,
    ``RuntimeError`` if it ends by itself.
    """
    # Settings of this user must not change what the flags say.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    port = _free_port()
    # The script "vllm" of the package vllm-cpu looks for a package of another name, and ends.
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", model, "--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--seed", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **SETTINGS, "VLLM_CACHE_ROOT": str(log.parent / "vllm-cache")},
            start_new_session=True,
        )
    with _ended_with_us(process):
        _wait_until_ready(process, port, log, limit_s)
        yield port


@contextmanager
def _ended_with_us(process: subprocess.Popen) -> Iterator[None]:
    """Ends a process and all of its group when the block is left, or when this process ends in whatever way.

    vLLM's other processes survive it if it is killed, and until it is ready it does not always heed a request to end.
    """
    # The shell reads until nobody can write any more.
    kills = ["sh", "-c", 'read _; kill -s KILL -- "-$0"', str(process.pid)]
    guard = subprocess.Popen(kills, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        guard.communicate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen, port: int, log: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            last = log.read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"vLLM ended with {process.returncode} before it was ready:\n{last}")
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(0.2)
    raise TimeoutError(f"vLLM was not ready after {limit_s} s")
