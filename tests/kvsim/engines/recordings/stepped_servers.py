"""Recordings of servers with their steps, made by simulating one whose costs are known."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import simpy

from kvsim.costs.cost_model import CostModel
from kvsim.costs.profile import NOTHING_S, Attention, Coefficient, MachineInfo, PassCosts, Profile, Range
from kvsim.engines.recordings.server_flags import scenario_of
from kvsim.engines.recordings.steps import FrontEnd, RecordedClients, SentAfter
from kvsim.experiments.traffic import InMemoryRequests
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.backend import DelegatingBackend, SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.result import Result
from kvsim.simulation.run import drive
from kvsim.simulation.schedulers import SCHEDULERS, LlamaServer
from kvsim.simulation.set_up import build_policy
from workloads import Request, Segment

Record = dict[str, Any]
Pace = Callable[[float], float]
"""How many times slower than it should be the machine is, by seconds since the start."""

FRONT_END = FrontEnd(0.0005, 0.0004)
"""Less than the millisecond and a half by which a log's clock may be off."""
VLLM = {
    "type": "meta",
    "vllm": "0.32.0",
    "cpu": "a simulator",
    "cores": 1,
    "group": "base",
    "rate_per_s": 5.0,
    "engine": {
        "mode": "server",
        "model": "tiny",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 129,
        "max_model_len": 512,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 128,
        "prefix_caching": False,
    },
}
LLAMA = {
    "type": "meta",
    "flags": ["-t", "1", "-np", "4", "-c", "2048", "-b", "128", "-ub", "64", "--cache-ram", "0"],
    "server": {"version": ["version: 0.6.0-dev"], "n_ctx": 2048, "n_ubatch": 64},
    "model": {"file": "tiny"},
    "machine": {"cpu": "a simulator", "cores": 1},
}


def seconds(value: float) -> Coefficient:
    return Coefficient(value=value, low=value, high=value)


def costs(base: float, token: float, further: float, cell: float) -> dict[str, Any]:
    """Costs of passes: each, per token, per token after the first of a chunk that sees a cell, and per cell."""
    return {
        "matmul_knots": (1, 4096),
        "attention_knots": (1, 2),
        "matmul_slopes_s": (seconds(token),),
        "kernels": {
            kernel: Attention(
                base_s=seconds(base),
                per_cell_s=seconds(cell),
                further_token_s=(seconds(further),),
                per_chunk_s=NOTHING_S,
                per_run_s=NOTHING_S,
                skips=kernel == "tiled",
                causal=True,
            )
            for kernel in ("gather", "tiled")
        },
    }


KNOWN = Profile(
    **costs(0.02, 0.002, 0.0, 2e-5),
    mixed=PassCosts(**costs(0.03, 0.0005, 1e-6, 1e-5)),
    moves=None,
    shift_per_cell_s=NOTHING_S,
    held_out_samples=1,
    held_out_error_median=0.0,
    held_out_error_p95=0.0,
    name="known",
    engine="a simulator",
    model="tiny",
    measured="2026-11-23",
    machine=MachineInfo(
        processor="a simulator",
        cores=1,
        blas="",
        threads=1,
        system="",
        python="",
        numpy="",
        load_before=0.0,
        load_after=0.0,
        cpu_share=1.0,
    ),
    tokens=Range(low=1, high=128),
    cells=Range(low=1, high=2048),
    samples=1,
    digest="",
)


def asked(n: int = 60, seed: int = 1, rate: float = 3.0, longest: int = 100) -> list[Request]:
    """Requests of random lengths that share nothing, at random times."""
    rng, found, now = random.Random(seed), [], 0.3
    for number in range(n):
        prompt = rng.randint(2, longest)
        found.append(
            Request(number, now, prompt, rng.randint(1, 30), content=(Segment(1000 * seed + number, 0, prompt),))
        )
        now += rng.expovariate(rate)
    return found


def steady(_: float) -> float:
    return 1.0


class _Stopwatch(DelegatingBackend):
    """Notes each step and each token, on a machine of a pace of its own."""

    def __init__(self, inner: SimulatedBackend, env: simpy.Environment, pace: Pace):
        super().__init__(inner)
        self._env, self._pace = env, pace
        self._request: dict[int, Request] = {}
        self.steps: list[Record] = []
        self.tokens: dict[int, list[float]] = {}
        self.slots: dict[int, int] = {}

    def begin(self, seq, request, *, again=False):
        self._request[seq] = request
        self.slots[request.id] = seq
        self.tokens.setdefault(request.id, [])
        super().begin(seq, request, again=again)

    def step(self, step, batches):
        now = self._env.now
        took = [self._pace(now) * each for each in super().step(step, batches)]
        computed = []
        for chunk in step:
            request = self._request[chunk.seq]
            tokens = self.tokens[request.id]
            computed.append([request.id, chunk.n, chunk.start])
            if chunk.start + chunk.n == request.prompt_tokens + len(tokens):
                tokens.append(now + sum(took))
        self.steps.append({"at": now, "s": sum(took), "n": computed})
        return took


@dataclass
class World:
    """What a simulated server did."""

    result: Result
    steps: list[Record]
    """``at`` and ``s`` in seconds, and ``n``: request, tokens and tokens before."""
    tokens: dict[int, list[float]]
    """When the server had each token, by request."""
    slots: dict[int, int]
    """By request."""
    events: list[Record]
    clients: RecordedClients

    def sent_s(self, number: int) -> float:
        return self.came_s(number) - self.clients.there(number)

    def came_s(self, number: int) -> float:
        rows = self.result.requests.set_index("id")
        return float(rows.loc[number, "arrival_s"])

    def heard_s(self, number: int) -> list[float]:
        """When the client had each token."""
        return [at + self.clients.front_end.back_s for at in self.tokens.get(number, ())]


def served(
    scenario: Scenario,
    requests: Sequence[Request],
    pace: Pace = steady,
    after: Mapping[int, SentAfter] | None = None,
    profile: Profile = KNOWN,
    front_end: FrontEnd = FRONT_END,
) -> World:
    """Simulate a server; a request of ``after`` comes when those that it waits for have ended."""
    env, policy = simpy.Environment(), build_policy(scenario)
    watch = _Stopwatch(SimulatedBackend(CostModel(profile), policy.kernel, policy.groups), env, pace)
    clients = RecordedClients(after or {}, front_end)
    events: list[Record] = []

    def note(kind: str, **keys: Any) -> None:
        job = keys.pop("job", None)
        if job is not None:
            events.append({"type": "event", "kind": kind, "t": float(env.now), "task": job.request.id})

    noting = {"llama-server": lambda *server: LlamaServer(*server, log=note)}
    with patch.dict(SCHEDULERS, noting):
        result, _ = drive(
            scenario,
            policy,
            watch,
            Recorder(),
            None,
            workload=InMemoryRequests(tuple(requests)),
            clients=clients,
            env=env,
        )
    return World(result, watch.steps, watch.tokens, watch.slots, events, clients)


@dataclass(frozen=True)
class Asked:
    """What a server is asked, and how."""

    requests: Sequence[Request] = field(default_factory=asked)
    pace: Pace = steady
    after: Mapping[int, SentAfter] = field(default_factory=dict)
    front_end: FrontEnd = FRONT_END
    profile: Profile = KNOWN


def vllm_recording(ask: Asked | None = None, header: Record = VLLM) -> list[Record]:
    """The lines of a recording of vLLM with its steps; times in milliseconds."""
    ask, engine = ask or Asked(), header["engine"]
    scenario = load_scenario(
        {
            "name": "world",
            "server": {
                "scheduler": "vllm",
                "slots": engine["max_num_seqs"],
                "n_batch": engine["max_num_batched_tokens"],
                "slot_context": engine["max_model_len"],
                "reserve_full": True,
                "async_scheduling": False,
            },
            "cache": {
                "policy": "vllm",
                "cells": engine["num_blocks"] * engine["block_size"],
                "block_size": engine["block_size"],
                "prefix_cache": engine["prefix_caching"],
            },
        }
    )
    world = served(scenario, ask.requests, ask.pace, ask.after, ask.profile, ask.front_end)
    rows = world.result.requests.set_index("id")
    lines = [header]
    for request in ask.requests:
        heard = [at * 1e3 for at in world.heard_s(request.id)]
        came, sent = world.came_s(request.id) * 1e3, world.sent_s(request.id) * 1e3
        line = {"type": "request", "r": request.id, "prompt": [list(segment) for segment in request.content]}
        line |= {"n_prompt": request.prompt_tokens, "n_out": request.output_tokens, "due": sent, "sent": sent}
        line |= {"engine": came, "sched": float(rows.loc[request.id, "started_s"]) * 1e3}
        line |= {"first": heard[0], "end": heard[-1], "tok": heard}
        line |= {"hit": int(rows.loc[request.id, "cached_tokens"]), "pre": int(rows.loc[request.id, "preemptions"])}
        if request.id in ask.after:
            waits = ask.after[request.id]
            line |= {"after": waits.requests[0], "think": waits.think_s * 1e3}
        lines.append(line)
    return lines + [_vllm_step(number, step, rows) for number, step in enumerate(world.steps)]


def _vllm_step(number: int, step: Record, rows: Any) -> Record:
    at, end = step["at"], step["at"] + step["s"]
    inside = rows[(rows["arrival_s"] <= at) & (rows["finished_s"] > at)]
    fin = [int(each) for each in inside.index[inside["finished_s"] <= end + 1e-9]]
    running, waiting = len(step["n"]), len(inside) - len(step["n"])
    times = {"t": at * 1e3, "sched": 0.0, "exec": step["s"] * 1e3, "upd": 0.0}
    counts = {"run": [running, running], "wait": [waiting, waiting], "free": 0}
    return {"type": "step", "s": number, **times, **counts, "n": step["n"], "fin": fin}


def llama_recording(ask: Asked | None = None, header: Record = LLAMA) -> list[Record]:
    """The lines of a recording of llama-server with its log."""
    ask = ask or Asked()
    world = served(scenario_of(header)[0], ask.requests, ask.pace, ask.after, ask.profile, ask.front_end)
    rows = world.result.requests.set_index("id")
    sources = {segment.source: 0 for request in ask.requests for segment in request.content}
    for request in ask.requests:
        for source, start, n in request.content:
            sources[source] = max(sources[source], start + n)
    lines = [header]
    for source, n in sources.items():
        lines.append({"type": "source", "name": f"text{source}", "tokens": [source * 1000 + at for at in range(n)]})
    for request in ask.requests:
        heard = world.heard_s(request.id)
        prompt = [[f"text{source}", start, n] for source, start, n in request.content]
        line = {"type": "request", "id": request.id, "group": "", "prompt": prompt, "n_predict": request.output_tokens}
        line |= {"answer": 7, "params": {}, "send_s": world.sent_s(request.id), "token_s": heard, "task": request.id}
        if request.id in ask.after:
            waits = ask.after[request.id]
            line |= {"after": waits.requests[0], "think": waits.think_s}
        if rows.loc[request.id, "status"] == "completed":
            line |= {
                "status": 200,
                "done_s": heard[-1],
                "result": _result(rows.loc[request.id], world.slots[request.id]),
            }
        else:
            line |= {"status": 400, "done_s": world.sent_s(request.id), "error": {"message": "no"}}
        lines.append(line)
    return lines + _log(world)


def _result(row: Any, slot: int) -> Record:
    computed = int(row["prompt_tokens"] - row["cached_tokens"])
    return {
        "id_slot": slot,
        "cache_n": int(row["cached_tokens"]),
        "prompt_n": computed,
        "predicted_n": int(row["output_tokens"]),
    }


def _log(world: World) -> list[Record]:
    """The log in its order: tasks that come, decisions, steps, and when all slots are idle."""
    steps = [
        {"type": "step", "batch": number, "t": step["at"], "s": step["s"], "ok": True}
        for number, step in enumerate(world.steps)
    ]
    ends = [step["t"] + step["s"] for step in steps]
    idle = [
        {"type": "event", "kind": "idle", "t": end}
        for end, following in zip(ends, [*(step["t"] for step in steps[1:]), float("inf")], strict=True)
        if following > end + 1e-9
    ]
    came = world.result.requests.set_index("id")["arrival_s"]
    posts = [
        {"type": "event", "kind": "post", "t": float(at), "task": int(number)}
        for number, at in came.sort_values().items()
    ]
    order = {"post": 0, "idle": 1}
    both = [*posts, *idle, *world.events, *steps]
    return sorted(both, key=lambda record: (record["t"], order.get(record.get("kind"), 3 if "s" in record else 2)))
