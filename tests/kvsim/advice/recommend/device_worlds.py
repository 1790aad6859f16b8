"""Traffic and small searches for tests of recommendations on devices."""

from kvsim import load_scenario, recommend
from kvsim.advice.recommend.search import SearchBudget
from kvsim.experiments.traffic import TrafficSummary

SMALL = SearchBudget(4, 1, 2, 1, 2, 1, fewest=20)
MODEL = "llama-3.1-8b"
SLO = "ttft_p95<250ms,e2e_p95<4s"
SUMMARY = TrafficSummary(100, 7000, 5000, 4000, 1200.0, True)

TRAFFIC = {
    "name": "busy",
    "workload": {
        "rate": 3.0,
        "requests": 80,
        "prompt_tokens": {"kind": "lognormal", "mu": 6.0, "sigma": 0.5, "min": 16, "max": 1500},
        "output_tokens": {"kind": "fixed", "value": 60},
    },
    "server": {"slots": 2, "n_batch": 64},
    "cache": {"cells": 4096, "block_size": 32},
}
"""Of a toy machine, whose sizes say nothing of a device."""


BUSY = {**TRAFFIC, "workload": {**TRAFFIC["workload"], "rate": 40.0}}
"""More than one server bears."""


def ask(*devices, source=TRAFFIC, **more):
    asked = {"slo": SLO, "model": MODEL, "requests": 80, "budget": SMALL, "workers": 1, **more}
    return recommend(load_scenario(source), device=devices, **asked)


def ask_of_many(*devices, cluster=None, **more):
    source = BUSY if cluster is None else {**BUSY, "cluster": cluster}
    return ask(*devices, source=source, slo="ttft_p95<250ms", requests=240, **more)
