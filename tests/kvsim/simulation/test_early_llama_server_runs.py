"""Runs of a real llama-server b4875, decision for decision.

``tests/data/early-llama-server.json.gz`` has what its log said while SmolLM2-135M answered requests on one thread: the
tasks that were posted, launched and deferred, each batch (slot, first position, tokens), context shifts, halvings,
failures, and which slots stopped, in the order in which they stood there; and what each client was told.
"""

import gzip
import json
from math import isnan

import pytest

from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import SCHEDULERS
from kvsim.simulation.set_up import build_policy
from policies import Content, OutOfCells
from tests.paths import DATA
from tests.worlds import GivenTimes
from tests.worlds import scenario as world_of
from workloads import Request

RUNS = {run["name"]: run for run in json.loads(gzip.decompress((DATA / "early-llama-server.json.gz").read_bytes()))}
_TEXTS = 1 << 20
"""The source of the first text; smaller sources are tokens."""


class Replay:
    """Goes through the rows of a run beside the scheduler, which is given the requests when they were posted."""

    def __init__(self, run, name):
        keys = {f"{section}__{key}": value for section in ("server", "cache") for key, value in run[section].items()}
        world = world_of(server__scheduler=name, cache__policy="llama.cpp-b4666", **keys)
        self.requests = {int(task): request for task, request in run["requests"].items()}
        self.policy = build_policy(world)
        self.decided = []
        self.answers = {}
        self.scheduler = SCHEDULERS[name](world, self.policy, GivenTimes(), Recorder(), self.hear)
        self.piece = []
        self.stopped = 0
        self.now = 0.0

    def hear(self, kind, job=None, slot=None, **fields):
        if kind == "batch":
            self.decided.append(["batch", [[chunk.seq, chunk.start, chunk.n] for chunk in fields["chunks"]]])
        elif kind == "launch":
            self.decided.append(["launch", slot, job.request.id])
        elif kind == "defer":
            self.decided.append(["defer", job.request.id])
        elif kind == "shift":
            self.decided.append(["shift", slot, fields["n_keep"], fields["n_left"], fields["n_discard"]])
        elif kind == "no_room":
            self.decided.append(["no_room", fields["n_batch"]])
        elif kind == "failed":
            self.decided.append(["failed"])
        elif kind == "stop":
            self.stopped += 1
            tokens = 0 if isnan(job.started_s) else fields["tokens"]  # Of what was refused the log says 0.
            truncated = int(fields["truncated"])
            self.decided.append(["stop", slot, tokens, truncated])
            self.answers[job.request.id] = job, [slot, job.generated, truncated]

    def post(self, task, at):
        request = self.requests[task]
        pieces = []
        for source, start, n in request["prompt"]:
            pieces += [(start, 0, 1)] * n if source == "#" else [(_TEXTS + source, start, n)]
        n, output = sum(piece[2] for piece in pieces), max(request["n_predict"], 1)
        own = {key: request[key] for key in ("n_keep", "n_discard", "cache_prompt") if key in request}
        job = Job(Request(task, at, n, output, **own), at)
        job.content = Content([*pieces, *[(request["answer"], 0, 1)] * output])
        self.scheduler.submit(job, at)

    def compose(self):
        if not self.piece:
            self.piece = self.scheduler.compose(self.now)

    def run_batch(self, posts):
        """Run the composed batch to its end; ``posts``: tasks that came meanwhile, each with the stops before it."""
        while self.piece:
            while posts and posts[0][0] <= self.stopped:
                self.post(posts.pop(0)[1], self.now + 0.5)
            self.now += 1.0
            try:
                self.policy.allocate(self.piece)
                self.scheduler.commit(self.piece, 1, self.now)
            except OutOfCells as reason:
                self.scheduler.on_out_of_cells(reason, self.now)
            self.piece = self.scheduler.compose(self.now) if self.scheduler.has_batch else []
        for _, task in posts:
            self.post(task, self.now)

    def go(self, rows):
        """Do all that is recorded; stop at the first difference, and return it as (row, recorded, ours)."""
        posts, running, done = [], False, 0
        for at, (kind, *fields) in enumerate(rows):
            if kind == "batch":
                self.compose()
                running, self.stopped, stops = True, 0, 0
            elif kind == "done":
                self.run_batch(posts)
                posts, running = [], False
            elif running:
                stops += kind == "stop"
                if kind == "post":
                    posts.append((stops, fields[0]))
            elif kind == "post":
                self.post(fields[0], self.now)
            else:
                self.compose()
            if kind in ("batch", "done"):
                recorded = [row for row in rows[done : at + 1] if row[0] not in ("post", "done")]
                if self.decided != recorded:
                    return at, recorded, self.decided
                self.decided, done = [], at + 1
        return None


@pytest.mark.parametrize("name", RUNS)
def test_every_decision_is_that_of_the_real_server(name):
    run, replay = RUNS[name], Replay(RUNS[name], "llama-server-b4875")
    assert replay.go(run["rows"]) is None
    for task, request in replay.requests.items():
        if request["told"] is None:
            continue  # The server was stopped before its answer was complete.
        job, answer = replay.answers[task]
        if request["told"] == "failed":
            assert job.status == "failed"
        else:
            assert (job.status, answer if job.request.prompt_tokens else []) == ("completed", request["told"])


def test_the_runs_show_what_is_rare():
    kinds = [row[0] for run in RUNS.values() for row in run["rows"]]
    assert (len(RUNS), kinds.count("batch"), kinds.count("defer")) == (11, 1468, 49)
    assert (kinds.count("shift"), kinds.count("no_room"), kinds.count("failed")) == (75, 423, 3)


@pytest.mark.parametrize("name", RUNS)
def test_todays_server_decides_otherwise(name):
    """The control: a difference is found."""
    assert Replay(RUNS[name], "llama-server").go(RUNS[name]["rows"]) is not None
