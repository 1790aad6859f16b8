"""Traffic, small searches and settings for tests of recommendations."""

from dataclasses import replace

from kvsim import load_scenario, recommend
from kvsim.advice.recommend.search import SearchBudget
from kvsim.advice.recommend.search_space import build_search_space
from kvsim.costs.load_profile import load_profile
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.memory_shapes import memory_shape

SMALL = SearchBudget(10, 2, 4, 3, 3, 2, fewest=30)

BUSY = {
    "name": "busy",
    "workload": {
        "rate": 25.0,
        "requests": 60,
        "prompt_tokens": {"kind": "lognormal", "mu": 4.0, "sigma": 0.5, "min": 4, "max": 150},
        "output_tokens": {"kind": "fixed", "value": 60},
    },
}
"""A request takes about 0.1 s by itself, so a single slot cannot keep up."""
CALMER = {"workload__rate": 12.0}
"""Traffic with which even the few settings of a small search can keep up."""

SHARED = {
    "name": "shared",
    "workload": {
        "kind": "sessions",
        "rate": 3.0,
        "sessions": 20,
        "system_prompts": 1,
        "system_tokens": {"kind": "fixed", "value": 900},
        "turns": {"kind": "fixed", "value": 4},
        "user_tokens": {"kind": "fixed", "value": 20},
        "output_tokens": {"kind": "fixed", "value": 8},
        "think_s": 0.5,
    },
}
"""Long prompts with a common prefix."""

PROFILE = load_profile("default")
SUMMARY = TrafficSummary(100, 700, 500, 400, 200.0, False)


def space_of(
    engine="llamacpp", *, base=None, traffic=None, reuse=False, profile=PROFILE, model="tiny", memory=None, **more
):
    """The settings for some traffic; by default that of ``SUMMARY``."""
    if traffic is not None:
        base, summary = traffic.scenario, traffic.summary
    else:
        base, summary = base or load_scenario({}), replace(SUMMARY, reuse=reuse)
    return build_search_space(base, summary, engine, profile, memory_shape(model), memory, **more)


def ask(source=BUSY, engine="llamacpp", **asked):
    """A small search for a scenario."""
    return recommend(load_scenario(source), **{"engine": engine, "budget": SMALL, "workers": 1, **asked})


BUSY_SLO = {"slo": "ttft_p95<250ms,tpot_p95<20ms"}
