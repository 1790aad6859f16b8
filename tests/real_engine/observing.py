"""Running ``kvsim observe`` before a real server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.paths import ROOT

_LIMIT_S = 200
"""After how long it ends in any case."""


@dataclass
class Observed:
    """What was observed; empty until the block has been left."""

    url: str
    """Where clients reach the server through it."""
    summary: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The lines of the file, in the order in which requests came."""


@contextmanager
def observing(upstream: str, out: Path) -> Iterator[Observed]:
    """The command as a process, until the block is left."""
    words = ["observe", "--upstream", upstream, "--port", "0", "--out", out, "--seconds", str(_LIMIT_S), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsim", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        said = process.stderr.readline()
        observed = Observed(said.partition(" can now use ")[2].partition(";")[0])
        assert observed.url.startswith("http://127.0.0.1:"), said
        yield observed
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, "")
    finally:
        process.kill()
        process.communicate()
    observed.summary = json.loads(told)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    observed.requests = sorted((line for line in lines if line["kind"] == "request"), key=lambda line: line["id"])
