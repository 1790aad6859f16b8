"""Small simulations for tests: scenarios, backends with given step times, and runs of them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import joblib
import simpy

from kvsim.cli import app as cli
from kvsim.cli import progress
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.arrivals import Inbox, send
from kvsim.simulation.backend import PassByPass
from kvsim.simulation.job import Job
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import SCHEDULERS
from kvsim.simulation.server import Server
from kvsim.simulation.set_up import build_policy
from policies import HostCopy, MicroBatch, Moves, Policy, Transfer
from tests.paths import ROOT
from workloads import Prefixes, Request, Workload


@dataclass
class GivenTimes(PassByPass):
    """A backend whose passes take the seconds that a function gives; keeps the passes."""

    seconds: Callable[[MicroBatch], float] = lambda _: 1.0
    wants_views: bool = False
    passes: list[MicroBatch] = field(default_factory=list)

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        pass

    def discard(self, seq: int, start: int, stop: int) -> None:
        pass

    def forward(self, batch: MicroBatch) -> float:
        self.passes.append(batch)
        return self.seconds(batch)

    def move(self, moves: Moves) -> float:
        return 0.0

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        return 0.0

    def copy(self, copies: Sequence[HostCopy]) -> float:
        return 0.0


@dataclass
class Diary(GivenTimes):
    """Also records each pass as (request, first token, tokens), and copies between the tiers outside of passes."""

    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)
    copies: list[Transfer] = field(default_factory=list)
    """Copies between the tiers outside of passes, ahead of their use."""
    copying: Callable[[Sequence[Transfer]], float] = lambda _: 0.0
    """Seconds of such copies."""
    _by_slot: dict[int, int] = field(default_factory=dict)

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        self._by_slot[seq] = request.id

    def forward(self, batch: MicroBatch) -> float:
        self.steps.append([(self._by_slot[chunk.seq], chunk.start, chunk.n) for chunk in batch.chunks])
        return super().forward(batch)

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        self.copies += transfers
        return self.copying(transfers)


@dataclass(frozen=True)
class Given:
    """A workload of given requests, numbered from 0."""

    requests: Sequence[Request]
    users: int | None = None

    @property
    def n_requests(self) -> int:
        return len(self.requests)

    @property
    def notes(self) -> Sequence[str]:
        return ()

    @property
    def prefixes(self) -> Prefixes:
        return "tokens"

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class Listed(Given):
    """A workload of given requests: (arrival, prompt tokens, output tokens)."""

    def __init__(self, rows: Sequence[tuple[float, int, int]], users: int | None = None):
        super().__init__([Request(number, *row) for number, row in enumerate(rows)], users)


def scenario(**keys: Any) -> Scenario:
    """The default scenario with keys changed, as in ``load_scenario``."""
    return load_scenario({}, **keys)


def serve(
    world: Scenario, workload: Workload, backend: GivenTimes | None = None, policy: Policy | None = None
) -> tuple[Recorder, dict[int, Job]]:
    """Run a workload to the end; return the recorder and the jobs by request number."""
    env = simpy.Environment()
    recorder = Recorder()
    policy = policy or build_policy(world)
    backend = backend or GivenTimes()
    inbox = Inbox(env)
    env.process(send(env, inbox, workload))
    scheduler = SCHEDULERS[world.server.scheduler](world, policy, backend, recorder)
    prefetcher = Prefetcher(env, world.server.prefetch, policy, backend, recorder)
    env.run(until=env.process(Server(env, inbox, scheduler, policy, backend, recorder, prefetcher).run()))
    return recorder, {job.request.id: job for job in recorder.requests.jobs}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvsim`` with these arguments within this process; however long it takes, it does not say how far it is."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    quiet = patch.object(progress, "_FIRST_LINE_S", float("inf"))
    argv = patch.object(sys, "argv", ["kvsim", *arguments])
    with argv, quiet, redirect_stdout(out), redirect_stderr(err), joblib.parallel_config("sequential"):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def python(
    *arguments: str | Path, folder: Path = ROOT, path: Sequence[Path] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with these folders and the project on its path."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))} | env
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=found, capture_output=True, text=True)


def printed(program: str, **env: str) -> str:
    """What a program prints in a process of its own."""
    done = python("-c", program, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(program: str, folder: Path = ROOT) -> set[str]:
    """The modules that a new process has loaded when its program ends."""
    tells = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    done = python("-c", f"{tells}\n{program}", folder=folder)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())
