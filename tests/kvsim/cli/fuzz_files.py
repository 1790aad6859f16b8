"""Feeds commands with random scenario and profile files: each must end well, or with exit code 2 and why, in lines.

    python -m tests.kvsim.cli.fuzz_files --seconds 60        cases 0, 1, 2, ... as far as the time reaches
    python -m tests.kvsim.cli.fuzz_files --cases 100000      so many
    python -m tests.kvsim.cli.fuzz_files --case 4711         one case again, with its file

A case depends on its number alone. Processes of 2 GB take some hundred cases each; a case has 20 s.
What answers is the command, with its options given as such: reading them takes longer than most answers, so only each
200th is typed in full. Ends with 1 where a case was answered otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w

from kvsim.cli import app as cli
from kvsim.cli.commands.run import run
from kvsim.cli.option_groups import ScenarioOptions
from kvsim.costs.shipped import shipped_names, shipped_text
from kvsim.scenario.builtin import builtin_names, builtin_text
from tests.worlds import command

MEMORY = 2 << 30
CASE_S = 20
PER_PROCESS = 400
REQUESTS = 4
TYPED = 200
"""Of so many cases one is answered by the whole command line."""
NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    64,
    1e-300,
    1e308,
    -0.5,
    0.1,
    math.nan,
    math.inf,
    -math.inf,
    10**6,
    10**9,
    10**18,
    2**63,
    10**40,
)
TEXTS = (
    "",
    "x",
    "x" * 5000,
    "../..",
    "/dev/zero",
    "/dev/null",
    "/",
    "\\0",
    "~nobody/x",
    "ü\u202e",
    "paged",
    "vllm",
    "1",
    "5%",
)
KEYS = ("kind", "users", "requests", "cells", "policy", "profile", "value", "mean", "no_such_key", "", "a.b", "name")


def case(number: int) -> tuple[str, bytes]:
    """The kind of a case's file, ``toml`` or ``json``, and its content."""
    draw = random.Random(number)
    kind, names = ("toml", builtin_names()) if number % 3 else ("json", shipped_names())
    text, pickled = given(kind, draw.choice(names))
    if draw.random() < 0.7:
        table = pickle.loads(pickled)
        for _ in range(draw.choice((1, 1, 2, 3, 8))):
            alter(table, draw)
        text = json.dumps(table) if kind == "json" else tomli_w.dumps(table)
        return kind, text.encode("utf-8", "surrogatepass")
    data = bytearray(text.encode())
    for _ in range(draw.choice((1, 2, 5, 20))):
        at, n = draw.randrange(len(data) + 1), draw.choice((1, 1, 4, 30))
        what = draw.randrange(4)
        if what == 0:
            del data[at : at + n]
        elif what == 1:
            data[at:at] = draw.randbytes(n)
        elif what == 2:
            data[at:at] = data[at : at + 40 * n] * draw.choice((1, 2, 50))
        else:
            data[at:at] = draw.choice((b"[", b"{", b"\n[[", b"=", b"\0", b'"', b".", b"-", b"e999")) * n * 50
    return kind, bytes(data)


@cache
def given(kind: str, name: str) -> tuple[str, bytes]:
    """The text of a built-in scenario or a shipped profile, and its table as a pickle, which is copied fast."""
    text = builtin_text(name) if kind == "toml" else shipped_text(name)
    return text, pickle.dumps(tomllib.loads(text) if kind == "toml" else json.loads(text))


def alter(table: Any, draw: random.Random) -> None:
    """Change, remove or add a value somewhere in nested tables and lists."""
    at = table
    while True:
        places = list(at) if isinstance(at, dict) else range(len(at))
        if not places:
            return
        key = draw.choice(places)
        if not isinstance(at[key], dict | list) or draw.random() < 0.15:
            break
        at = at[key]
    what = draw.random()
    if what < 0.15:
        del at[key]
    elif what < 0.3 and isinstance(at, dict):
        at[draw.choice(KEYS)] = value(draw)
    else:
        at[key] = value(draw)


def value(draw: random.Random, depth: int = 0) -> Any:
    """A value that a file might have, fit or not."""
    what = draw.random()
    if what < 0.5 or depth > 3:
        return draw.choice(NUMBERS)
    if what < 0.75:
        return draw.choice(TEXTS)
    if what < 0.8:
        return draw.random() < 0.5
    if what < 0.9:
        return [value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 300 if depth == 0 else 4)))]
    return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3)))}


class TooLong(BaseException):
    """A case has had its time."""


def fault_of(number: int, folder: Path) -> str | None:
    """What is wrong with the answer to a case; None if nothing is."""
    kind, data = case(number)
    file = folder / f"case.{kind}"
    file.write_bytes(data)

    def end(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, end)
    signal.alarm(CASE_S)
    source = [str(file)] if kind == "toml" else ["chat", "--profile", str(file)]
    options = ScenarioOptions(scenario=source[0], profile=source[2] if source[1:] else None, requests=REQUESTS)
    answer = cli.app if number % TYPED == 0 else lambda **_: run.__wrapped__(options)  # type: ignore[attr-defined]
    try:
        with patch.object(cli, "app", answer):
            done = command("run", *source, "--requests", str(REQUESTS))
    except TooLong:
        return f"no answer in {CASE_S} s: {''.join(traceback.format_exc(limit=-3)).splitlines()[-4:-1]}"
    except BaseException as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__}: {e!s:.150} ({at.filename}:{at.lineno})"
    finally:
        signal.alarm(0)
    lines = done.stderr.splitlines()
    if done.returncode not in (0, 2) or (done.returncode == 2 and not lines):
        return f"exit code {done.returncode}: {done.stderr[-300:]!r}"
    if "Traceback" in done.stderr or (done.returncode == 2 and not all(line.startswith("kvsim: ") for line in lines)):
        return f"not in lines: {done.stderr[:300]!r}"
    return None


def run_cases(first: int, last: int, folder: Path, until: float) -> None:
    """Answer cases in a process of its own, and print what is wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(first, last):
        if time.monotonic() > until:
            os._exit(3)
        (folder / "number").write_text(str(number))
        if (fault := fault_of(number, folder)) is not None:
            print(f"case {number}: {fault}", flush=True)
            (folder / "wrong").touch()


def main() -> int:
    """Go through the cases until they, or the time, are over."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=math.inf)
    options.add_argument("--cases", type=int, default=10**9)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--case", type=int)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.case is not None:
            kind, data = case(asked.case)
            Path(f"case-{asked.case}.{kind}").write_bytes(data)
            print(f"case-{asked.case}.{kind}: {fault_of(asked.case, folder) or 'well'}")
            return 0
        for kind in ("toml", "json"):  # What is loaded here need not be in each process.
            for known in builtin_names() if kind == "toml" else shipped_names():
                given(kind, known)
        command("run", "chat", "--requests", str(REQUESTS))
        began, first, end = time.monotonic(), asked.first, asked.first + asked.cases
        until = began + asked.seconds
        while time.monotonic() < until and first < end:
            last = min(first + PER_PROCESS, end)
            if (child := os.fork()) == 0:
                os.chdir(folder)
                run_cases(first, last, folder, until)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            first = last
            if os.WIFSIGNALED(status):
                number = int((folder / "number").read_text())
                print(f"case {number}: ended by signal {os.WTERMSIG(status)}", flush=True)
                (folder / "wrong").touch()
                first = number + 1
        last = int((folder / "number").read_text())
        print(f"cases {asked.first:,} to {last:,} in {time.monotonic() - began:,.0f} s")
        return int((folder / "wrong").exists())


if __name__ == "__main__":
    sys.exit(main())
