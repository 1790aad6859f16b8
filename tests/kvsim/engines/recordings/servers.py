"""Recordings of servers, made by simulating one."""

import json

from kvsim.costs.load_profile import load_profile
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run

BLOCKS, BLOCK_SIZE = 28, 16
META = {
    "kind": "meta",
    "engine": "vllm",
    "version": "0.19.0",
    "model": "tiny",
    "device": "a simulator",
    "tensor_parallel_size": 1,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks": BLOCKS,
    "prefix_caching": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 400,
    "clock": "client",
}
WORKLOAD = {
    "kind": "poisson",
    "rate": 120.0,
    "requests": 40,
    "prompt_tokens": {"kind": "lognormal", "mu": 4.0, "sigma": 0.8, "min": 4, "max": 200},
    "output_tokens": {"kind": "lognormal", "mu": 3.5, "sigma": 0.7, "min": 1, "max": 120},
}
PROFILE = load_profile("default")


def world(workload=WORKLOAD, **keys):
    """The server that ``META`` describes."""
    server = {
        "scheduler": "vllm",
        "slots": META["max_num_seqs"],
        "n_batch": META["max_num_batched_tokens"],
        "slot_context": META["max_model_len"],
        "async_scheduling": True,
    }
    cache = {"policy": "paged", "free_order": "0.22.1", "cells": BLOCKS * BLOCK_SIZE, "block_size": BLOCK_SIZE}
    return load_scenario({"name": "world", "workload": workload, "server": server, "cache": cache}, **keys)


def recording(scenario, result, meta=(), later_s=0.0):
    """The lines of a recording of a run by its clients, for whom everything takes ``later_s`` longer."""
    content = {
        request.id: [[f"text {s.source}", s.start, s.n] for s in request.content]
        for request in scenario.build_workload()
    }
    first_s, rows = float(result.requests["arrival_s"].min()), []
    for row in result.requests.itertuples():
        rows.append(
            {
                "kind": "request",
                "id": f"r-{row.id}",
                "arrival_s": float(row.arrival_s - first_s),
                "prompt": content[row.id] or [[f"own {row.id}", 0, row.prompt_tokens]],
                "output_tokens": row.output_tokens,
                "scheduled_s": None,
                "first_token_s": row.first_token_s - first_s + later_s,
                "last_token_s": row.finished_s - first_s + later_s,
                "preemptions": row.preemptions,
            }
        )
    header = {**META, **dict(meta), "requests": len(rows)}
    seconds = []
    passes = result.passes
    for t in range(int(result.ended_s - first_s) + 1):
        now = t + first_s
        current = passes[(passes["start_s"] <= now) & (passes["start_s"] + passes["seconds"] > now)]
        running = int(current["chunks"].iloc[0]) if len(current) else 0
        inside = int((result.requests["arrival_s"] <= now).sum() - (result.requests["finished_s"] <= now).sum())
        seconds.append({"kind": "second", "t": float(t), "running": running, "waiting": max(inside - running, 0)})
    return [header, *rows, *seconds]


def recorded(**options):
    """A recording of the server of ``META``."""
    scenario = world()
    return recording(scenario, run(scenario, detail="tables"), **options)


def text(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)
