"""Sweeps of short runs of a small server."""

BASE = {
    "workload": {
        "rate": 50.0,
        "requests": 60,
        "prompt_tokens": {"kind": "lognormal", "mu": 3.5, "sigma": 0.6, "min": 4, "max": 100},
        "output_tokens": {"kind": "fixed", "value": 12},
    },
    "server": {"slots": 4, "slot_context": 160},
}
SMALL = {
    "name": "small",
    "base": BASE,
    "policies": ["contiguous", "paged", "ring"],
    "replications": 2,
    "axes": {"cache.cells": [128, 512, 1024], "workload.rate": [30.0, 60.0]},
}
"""36 runs of 3 policies at 6 settings; 128 cells are fewer than the context of a slot."""


def base(**workload):
    """The base with other keys of its workload."""
    return BASE | {"workload": BASE["workload"] | workload}
