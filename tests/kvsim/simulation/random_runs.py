"""Random scenarios, and all that a run of one leaves behind, to the last bit: for tests that compare two such runs."""

from hypothesis import strategies as st

from kvsim.costs.load_profile import load_profile
from kvsim.errors import Livelock, UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import RequestLog
from kvsim.simulation.run import drive
from kvsim.simulation.run_tables import Table, requests_table
from kvsim.simulation.set_up import build_policy, cost_model, ledger_for
from policies.cells.region_search import SEARCHES
from policies.layouts.paged import PagedPolicy

PROFILE = load_profile("default")
HOST_CACHES = st.fixed_dictionaries(
    {
        "cache_ram": st.sampled_from([8192, 1, 0, -1]),
        "cache_idle_slots": st.booleans(),
        "cache_reuse": st.sampled_from([0, 0, 3]),
        "slot_prompt_similarity": st.sampled_from([0.1, 0.0, 0.5]),
    }
)
"""Keys of llama-server's host cache, and of what it finds in slots; 1 MiB is 255 tokens of the model."""


@st.composite
def scenarios(draw, schedulers=("llama-server", "llama-server-b4875", "vllm", "static")):
    """Small caches and short contexts, so that requests wait, are preempted, shifted and refused."""
    scheduler = draw(st.sampled_from(schedulers))
    host = draw(st.sampled_from([0, 0, 40, 400]))
    swap = bool(host) and scheduler == "vllm" and draw(st.booleans())
    return load_scenario(
        {
            "name": "random",
            "seed": draw(st.integers(0, 1000)),
            "workload": draw(workloads()),
            "server": {
                "scheduler": scheduler,
                "slots": draw(st.sampled_from([1, 3, 5, 8, 20])),
                "n_batch": draw(st.sampled_from([4, 8, 24, 64, 400])),
                "n_ubatch": draw(st.sampled_from([4, 32])),
                "slot_context": draw(st.sampled_from([64, 160])),
                "context_shift": draw(st.booleans()) and scheduler.startswith("llama-server"),
                "keep_idle_slots": draw(st.booleans()),
                "n_keep": 4,
                **(draw(HOST_CACHES) if scheduler == "llama-server" else {}),
                "chunked_prefill": draw(st.booleans()),
                "long_prefill_threshold": draw(st.sampled_from([0, 0, 10])),
                "reserve_full": draw(st.booleans()),
                "async_scheduling": draw(st.booleans()),
                "order": draw(st.sampled_from(["fcfs", "fcfs", "priority", "longest-prefix", "depth-first"])),
                "longest_prefix_limit": draw(st.sampled_from([128, 2])),
                "preemption": "swap" if swap else "recompute",
                "requeue": draw(st.sampled_from(["front", "front", "back"])),
                "victim": draw(st.sampled_from(["newest", "newest", "fewest-generated"])),
            },
            "cache": {
                "cells": draw(st.sampled_from([192, 320, 800, 4000])),
                "block_size": draw(st.sampled_from([1, 4, 16])),
                "chunk_size": (chunk := draw(st.sampled_from([8, 64]))),
                "page_tokens": chunk // 2,
                "window": draw(st.sampled_from([2, 16, 21, 48])),
                "threshold": draw(st.sampled_from([0.05, 0.4])),
                "kernel": draw(st.sampled_from([None, None, None, "gather", "sliced", "masked", "tiled", "tiled"])),
                "unified": draw(st.booleans()),
                "search": draw(st.sampled_from([None, None, *SEARCHES])),
                "sort_batch": draw(st.booleans()),
                "prefix_cache": draw(st.booleans()),
                "eviction": draw(st.sampled_from(["lru", "lru", "fifo", "lfu", "sieve", "workload-aware"])),
                "free_order": draw(st.sampled_from(["0.33.0", "0.33.0", "0.22.1"])),
                "watermark": draw(st.sampled_from([0.0, 0.1])),
                "conservativeness": draw(st.sampled_from([1.0, 0.2, 10.0])),
                "host_cells": host,
                "budget": draw(st.sampled_from([24, 6, 256])),
                "budget_groups": draw(st.sampled_from([1, 1, 3])),
            },
        }
    )


@st.composite
def workloads(draw):
    """A ``[workload]`` table of at most 25 requests."""
    prompt = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5])), "sigma": 1.0, "min": 1, "max": 100}
    output = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5, 4.5])), "sigma": 0.8, "min": 1, "max": 200}
    kind = draw(st.sampled_from(["poisson", "gamma", "batch", "closed-loop", "sessions"]))
    stated = draw(st.sampled_from([None, None, 20, 90]))
    limit = {} if stated is None else {"max_output_tokens": stated}
    if kind == "sessions":
        return {
            **limit,
            "kind": kind,
            "sessions": draw(st.integers(1, 6)),
            "rate": draw(st.sampled_from([2.0, 50.0])),
            "turns": {"kind": "fixed", "value": 3},
            "user_tokens": prompt,
            "output_tokens": output,
            "system_tokens": {"kind": "fixed", "value": draw(st.sampled_from([20, 40]))},
        }
    arrivals = {
        "poisson": {"rate": draw(st.sampled_from([2.0, 30.0, 200.0]))},
        "gamma": {"rate": 10.0, "cv": 3.0},
        "batch": {},
        "closed-loop": {"users": 4, "think_s": draw(st.sampled_from([0.0, 0.5]))},
    }
    requests = draw(st.integers(1, 25))
    lengths = {"prompt_tokens": prompt, "output_tokens": output, **limit}
    return {"kind": kind, **lengths, "requests": requests, **arrivals[kind]}


def outcome(scenario, name, *, most_steps=1 << 62, detail="tables"):
    """All that a run leaves behind: what it decided and counted, its figures and tables, or why it ended.

    ``most_steps``: steps that the loop takes at a time; 0: each is placed chunk by chunk.
    """
    costs = cost_model(scenario, PROFILE)
    try:
        policy = build_policy(scenario, name, costs)
        breakdown = ledger_for(scenario, policy, costs) if detail == "tables" else None
        log = RequestLog(keeps=True)
        recorder = Recorder(detail=detail, time_breakdown=breakdown, requests=log)
        backend = SimulatedBackend(costs, policy.kernel, policy.groups)
        drive(scenario, policy, backend, recorder, PROFILE, most_steps=most_steps)
    except (Livelock, UserError) as e:
        return str(e)
    cells = [(policy.occupancy(g).position.tolist(), policy.occupancy(g).owners) for g in range(len(policy.groups))]
    if isinstance(policy, PagedPolicy):
        # When all requests have ended, only the order of the free blocks still tells which of them had which.
        cells.append((policy.pool.free.order(), policy.pool.keys))
    seen = costs.warnings(), costs.most_tokens, costs.most_cells
    tables = [table.to_csv() for table in recorder.tables() or () if isinstance(table, Table)]
    requests = requests_table(log.jobs).to_csv()
    order = [job.request.id for job in log.jobs]
    means = repr(recorder.cache_states.means())
    return recorder.counts, cells, policy.usage(), seen, order, requests, means, tables
