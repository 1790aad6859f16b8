"""Attacks sweeps: whatever happens to them, the same command ends in the same bits, and says why it stopped in a line.

    python -m tests.kvsim.experiments.attack_sweeps kills --times 200   kill -9 at random moments, again and again
    python -m tests.kvsim.experiments.attack_sweeps rows --times 200    random bytes in, or the end of, a stored run
    python -m tests.kvsim.experiments.attack_sweeps disk --times 100    no file may grow beyond a random size
    python -m tests.kvsim.experiments.attack_sweeps clock --times 20    a clock that jumps by up to ten years
    python -m tests.kvsim.experiments.attack_sweeps two --times 50      two commands at once on one store

Moments and places are drawn from --seed. Ends with 1 where something else happened.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import tomli_w

from kvsim.experiments.store import Row, Store
from tests.kvsim.experiments.small_sweeps import SMALL
from tests.worlds import command

SWEEP = SMALL | {"replications": 2, "axes": {"cache.cells": [512, 1024], "workload.rate": [30.0, 60.0]}}
ANSWER_S = 60
"""Seconds in which a sweep must have ended."""
WORKERS_END_S = 2
"""Seconds that a worker has which was killed on its way, on a machine that is busy."""


class Attack:
    """A folder with a sweep, and what is drawn."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.draw, self.wrong = folder, random.Random(seed), 0
        (folder / "small.toml").write_text(tomli_w.dumps(SWEEP))
        os.chdir(folder)
        command("sweep", "small.toml", "--workers", "1", "--json")  # What is imported here need not be in each process.
        began = time.monotonic()
        self.end(self.start())
        self.whole_s = time.monotonic() - began
        self.right = self.rows()

    def start(self, before: Callable[[], object] = int) -> int:
        """Begin the sweep in a process of its own, which first does ``before``; its number."""
        if (child := os.fork()) == 0:
            before()
            done = command("sweep", "small.toml", "--out", "a.sqlite", "--workers", "2", "--json")
            (self.folder / f"said-{os.getpid()}").write_text(done.stderr)
            os._exit(done.returncode)
        return child

    def end(self, child: int) -> tuple[int, str]:
        """Wait for a sweep; its exit code, negative for a signal, and what it said."""
        until = time.monotonic() + ANSWER_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                self.tell(f"no end in {ANSWER_S} s")
                os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        said = self.folder / f"said-{child}"
        return os.waitstatus_to_exitcode(ended[1]), said.read_text() if said.exists() else ""

    def rows(self) -> list[Row]:
        """What is stored."""
        with Store(self.folder / "a.sqlite") as store:
            return store.rows()

    def begin_anew(self) -> None:
        """Forget what was stored."""
        for file in self.folder.glob("a.*"):
            file.unlink()

    def check_end(self, what: str) -> None:
        """The same command ends well, in the same bits."""
        code, said = self.end(self.start())
        if code != 0:
            self.tell(f"{what}: exit code {code}: {said[-300:]!r}")
        elif self.rows() != self.right:
            self.tell(f"{what}: other rows than undisturbed")

    def tell(self, what: str) -> None:
        """Print what is wrong."""
        self.wrong += 1
        print(what, flush=True)


def kills(attack: Attack, times: int) -> str:
    """Kill the command at random moments; when one has ended before, begin anew."""
    attack.begin_anew()
    ends = 0
    for number in range(times):
        child = attack.start()
        time.sleep(attack.draw.uniform(0.0, attack.whole_s / 2))
        workers = Path(f"/proc/{child}/task/{child}/children").read_text().split()
        os.kill(child, signal.SIGKILL)
        code, _ = attack.end(child)
        until = time.monotonic() + WORKERS_END_S
        while (left := [worker for worker in workers if _runs(worker)]) and time.monotonic() < until:
            time.sleep(0.01)
        if left:
            attack.tell(f"kill {number}: {len(left)} workers outlive the command by {WORKERS_END_S} s")
        if (attack.folder / "a.sqlite").exists():
            kept = {row.digest: row for row in attack.rows()}
            if any(kept.get(row.digest, row) != row for row in attack.right):
                attack.tell(f"kill {number}: a stored row is not what it should be")
        if code == 0:
            ends += 1
            attack.check_end(f"kill {number}")
            attack.begin_anew()
    attack.check_end("at the end")
    return f"{times} kills, {ends} of them after its end; the sweep was whole {ends + 1} times"


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rows(attack: Attack, times: int) -> str:
    """Damage a column of a stored run."""
    named = 0
    for number in range(times):
        row, column = (
            attack.draw.choice(attack.right),
            attack.draw.choice(("measures", "summary", "warnings", "settings")),
        )
        text = getattr(row, column).encode()
        at = attack.draw.randrange(len(text))
        damaged = attack.draw.choice((text[:at], text[:at] + b"\xff\0" + text[at + 1 :]))
        if column in ("measures", "summary") and attack.draw.random() < 0.5:  # It stays JSON, with another number.
            digits = [number for number, byte in enumerate(text) if chr(byte) in "12345678"]
            at = attack.draw.choice(digits)
            damaged = text[:at] + bytes([text[at] + 1]) + text[at + 1 :]
        with closing(sqlite3.connect(attack.folder / "a.sqlite")) as connection, connection:
            query = f"UPDATE points SET {column} = CAST(? AS TEXT) WHERE digest = ?"
            connection.execute(query, (damaged, row.digest))
        code, said = attack.end(attack.start())
        named += "a damaged run (" in said
        if code or "a damaged run (" not in said or attack.rows() != attack.right:
            attack.tell(
                f"row {number}: {column} of {row.digest} cut or changed at {at}: exit code {code}: {said[-300:]!r}"
            )
    return f"{times} runs damaged, {named} of them named"


def disk(attack: Attack, times: int) -> str:
    """Let no file grow beyond a size."""
    size = sum(file.stat().st_size for file in attack.folder.glob("a.sqlite*"))
    stopped = 0
    for number in range(times):
        attack.begin_anew()
        most = attack.draw.randrange(2 * size)
        code, said = attack.end(attack.start(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))))  # noqa: B023
        stopped += code == 2
        if code not in (0, 2) or (code == 2 and len(said.splitlines()) != 1):
            attack.tell(f"disk {number}: files up to {most} bytes: exit code {code}: {said[-300:]!r}")
        attack.check_end(f"disk {number}")
    return f"{times} sweeps with files up to 0 to {2 * size} bytes, {stopped} of which stopped with a line"


def clock(attack: Attack, times: int) -> str:
    """Let the clock jump whenever it is looked at."""
    for number in range(times):
        attack.begin_anew()
        now, jump = time.time, random.Random(attack.draw.random())
        code, said = attack.end(
            attack.start(lambda: setattr(time, "time", lambda: now() + jump.uniform(-3e8, 3e8)))  # noqa: B023
        )
        if code or attack.rows() != attack.right:
            attack.tell(f"clock {number}: exit code {code}: {said[-300:]!r}")
    return f"{times} sweeps under a clock that jumps"


def two(attack: Attack, times: int) -> str:
    """Start two commands on one store."""
    refused = 0
    for number in range(times):
        attack.begin_anew()
        first = attack.start()
        time.sleep(attack.draw.uniform(0.0, attack.whole_s))
        answers = [attack.end(attack.start()), attack.end(first)]
        for code, said in answers:
            refused += code == 2
            if code not in (0, 2) or (code == 2 and "in use by another sweep" not in said):
                attack.tell(f"two {number}: exit code {code}: {said[-300:]!r}")
        attack.check_end(f"two {number}")
    return f"{times} times two sweeps on one store, {refused} refused with a line"


ATTACKS = {"kills": kills, "rows": rows, "disk": disk, "clock": clock, "two": two}


def main() -> int:
    """Do what was asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("attack", choices=ATTACKS)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        attack = Attack(Path(name), asked.seed)
        print(f"undisturbed: {len(attack.right)} runs in {attack.whole_s:.1f} s", flush=True)
        print(ATTACKS[asked.attack](attack, asked.times))
        return int(attack.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
