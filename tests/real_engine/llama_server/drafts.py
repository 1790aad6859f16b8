"""What a real llama-server drafts, checks and accepts: read from its log, and replayed on our scheduler.

    python -m tests.real_engine.llama_server.drafts LLAMA-SERVER OUT.json

The server drafts with its own model and accepts by drawn numbers (``--spec-synth-rates``), so that drafts of every
length are accepted and rejected. A record has ``flags``, ``requests`` as (prompt tokens, answer tokens), and for each
of them its ``steps``: (tokens in the slot before, drafted, accepted, tokens in the slot after), one for each pass after
the prompt's, and ``timings``: tokens drafted and accepted by the server's own count.
"""

import json
import re
import sys
from pathlib import Path

from kvsim.engines.recordings.llama_server_join import SentRequest
from kvsim.engines.recordings.replay import ZeroTimeBackend
from kvsim.model.engine_shapes import gguf_path
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import LlamaServer
from kvsim.simulation.set_up import build_policy
from tests.real_engine.llama_server.client import send
from tests.real_engine.llama_server.server import running
from workloads import Request

TOKENS, CONTEXT = 3, 256
SPECULATION = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(TOKENS), "--spec-synth-rates", "0.8,0.5,0.25"]
FLAGS = ["-np", "1", "-c", str(CONTEXT), "-t", "1", "-tb", "1", "-td", "1", "-tbd", "1", *SPECULATION]

_LINES = re.compile(
    r"task (?P<task>\d+) \| (?:generate_draft: id=-?\d+, #tokens=(?P<before>\d+), #draft=(?P<drafted>\d+)"
    r"|add accepted tokens: sampled=-?\d+, ids.size=(?P<gained>\d+)"
    r"|accepted (?P<accepted>\d+)/\d+ draft tokens, new n_tokens = (?P<after>\d+)"
    r"|slot decode token, id=-?\d+, n_ctx = \d+, n_tokens = (?P<plain>\d+)"
    r"|draft acceptance = [\d.]+ \( *(?P<all_accepted>\d+) accepted / *(?P<all_drafted>\d+) generated\))"
)


def steps_in(log):
    """For each task in a log, in order: its steps, and what the server counted."""
    tasks = {}
    for line in _LINES.finditer(log):
        said = {name: int(value) for name, value in line.groupdict().items() if value is not None}
        of = tasks.setdefault(said.pop("task"), {"steps": [], "timings": [0, 0]})
        if "drafted" in said:
            of["steps"].append([said["before"], said["drafted"], None, None])
        elif "gained" in said:  # An answer that ends in a draft is not said to have been accepted, as below.
            of["steps"][-1][2:] = [said["gained"] - 1, of["steps"][-1][0] + said["gained"]]
        elif "accepted" in said:
            of["steps"][-1][2:] = [said["accepted"], said["after"]]
        elif "plain" in said:
            of["steps"].append([said["plain"], 0, 0, said["plain"] + 1])
        else:
            of["timings"] = [said["all_drafted"], said["all_accepted"]]
    return [tasks[task] for task in sorted(tasks)]


def record(server, folder, sizes, limit_s=600.0):
    """Send one request after another to a server, and return the record; ``sizes``: as ``requests``."""
    log, model = folder / "server.log", Path(gguf_path("smollm2"))
    requests = [
        SentRequest(id=at, prompt=list(range(5 + 100 * at, 5 + 100 * at + prompt)), n_predict=answer, answer=20)
        for at, (prompt, answer) in enumerate(sizes)
    ]
    with running(server, model, [*FLAGS, "-md", str(model)], log, limit_s) as port:
        send(port, [[request] for request in requests], limit_s)
    tasks = steps_in(log.read_text(encoding="utf-8", errors="replace"))
    return {"flags": FLAGS, "requests": [list(each) for each in sizes], "tasks": tasks}


class _Recorded(Drafts):
    """Accepts what a record says."""

    def __init__(self, scenario, tasks):
        super().__init__(scenario, None, Recorder())
        self.tasks = tasks

    def verify(self, job, drafted, *, hopeless=False):
        """What the record's step says of the request's tokens so far."""
        before = job.tokens - 1
        return next((step[2] for step in self.tasks[job.request.id]["steps"] if step[0] == before), 0)


def replayed(recorded):
    """The steps of each request under our scheduler, which accepts what the record says; as in ``tasks``."""
    scenario = load_scenario(
        {
            "server": {"slots": 1, "cache_ram": 0},
            "cache": {"policy": "llama.cpp-b6975", "cells": CONTEXT},
            "speculation": {"method": "draft-model", "tokens": TOKENS, "acceptance": 0.0, "share": 1.0},
        }
    )
    policy = build_policy(scenario)
    scheduler = LlamaServer(scenario, policy, ZeroTimeBackend(), Recorder())
    scheduler.use_drafts(_Recorded(scenario, recorded["tasks"]))
    found = []
    for number, (prompt, answer) in enumerate(recorded["requests"]):
        job = Job(Request(number, 0.0, prompt, answer), 0.0)
        scheduler.submit(job, 0.0)
        steps = []
        while not job.ended:
            (chunk,) = scheduler.compose(0.0)
            policy.allocate([chunk])
            checks, drafted = job.prefilled, chunk.n - 1
            scheduler.commit([chunk], 1, 0.0)
            if checks:
                steps.append([chunk.start, drafted, job.computed - chunk.start - 1, policy.usage().stored])
        found.append({"steps": steps, "timings": [sum(s[1] for s in steps), sum(s[2] for s in steps)]})
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(record(Path(sys.argv[1]), Path(sys.argv[2]).parent, [(8, 12)])) + "\n")
