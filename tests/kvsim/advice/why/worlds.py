"""Scenarios that slow down for one reason."""

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run

SHORT = {"prompt_tokens": {"kind": "fixed", "value": 8}, "output_tokens": {"kind": "fixed", "value": 8}}
FEW = load_scenario("chat", workload__requests=60)


def breakdown(scenario, policy, **options):
    """Seconds by cause for each request, and the run's result."""
    result = run(scenario, policy, detail="tables", **options)
    return result.causes, result


def one_after_another(requests=40, **server):
    """One user at a time, so that no request waits and nothing is batched."""
    workload = {"kind": "closed-loop", "users": 1, "requests": requests, **SHORT}
    return load_scenario({"name": "single", "workload": workload, "server": {"keep_idle_slots": False, **server}})


def crowded(cells=512, slots=16, scheduler="vllm", **more):
    """Arrivals for which there are enough slots, but not enough cells."""
    hundred = {"kind": "fixed", "value": 100}
    workload = {"kind": "poisson", "rate": 8.0, "requests": 150, "prompt_tokens": hundred, "output_tokens": hundred}
    server = {"slots": slots, "scheduler": scheduler, **more}
    return load_scenario({"name": "crowded", "workload": workload, "server": server, "cache": {"cells": cells}})
