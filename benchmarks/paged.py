"""Paged memory and its scheduler compared with vLLM 0.33.0's own, in calls per second: ``python -m benchmarks.paged``.

vLLM's figures were taken with its Python ``KVCacheManager`` and ``Scheduler`` on two cores of an AMD EPYC: a ratio is
meaningful only as far as the machines are comparable. As in those measurements, block hashes are computed before the
clock starts; our figure with hashes included is reported too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.vllm import Vllm
from policies import CacheConfig, Chunk, Content, SequencePlan
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks
from tests.worlds import GivenTimes
from workloads import Request

UNBOUNDED = 1 << 30
ROUNDS = 15


def paged(blocks: int) -> PagedPolicy:
    config = CacheConfig(cells=blocks * 16, n_ubatch=UNBOUNDED, max_tokens=UNBOUNDED, block_size=16)
    return PagedPolicy("paged", config, block_size=16, free=partial(free_blocks, "lru"), prefix_cache=True)


def text(number: int, tokens: int, *, hashed: bool = True) -> Content:
    content = Content([(number, 0, tokens)])
    if hashed:
        content.keys(16, tokens // 16)
    return content


def appends(n: int = 20_000) -> float:
    """Append one token at a time to a running sequence; full blocks are cached."""
    policy = paged(n // 16 + 80)
    policy.open(0, SequencePlan(16, UNBOUNDED, UNBOUNDED, text(0, n + 32)))
    assert policy.reserve(Chunk(0, 0, 16))
    chunks = [Chunk(0, 16 + i, 1) for i in range(n)]
    began = time.thread_time()
    for chunk in chunks:
        policy.reserve(chunk)
    return n / (time.thread_time() - began)


def prefills(n: int = 300, *, hashed: bool = True) -> float:
    """Look up and allocate 1,024 tokens, the first half of which is cached."""
    policy = paged(40_000)
    plans = []
    for i in range(n + 1):
        content = Content([(0, 0, 512), (1 + i, 0, 528)])
        if hashed:
            content.keys(16, 65)
        plans.append(SequencePlan(1024, UNBOUNDED, UNBOUNDED, content))
    began = 0.0
    for i, plan in enumerate(plans):
        if i == 1:
            began = time.thread_time()
        hit = policy.match(i, plan.content, 1024)
        policy.open(i, plan)
        policy.reserve(Chunk(i, hit, 1024 - hit))
    return n / (time.thread_time() - began)


def evictions(n: int = 400) -> float:
    """Allocate blocks from a full pool, each evicting its contents; cache them anew and release them."""
    pool = paged(4097).pool
    keys = text(1, 16 * 64 * (n + 64)).keys(16, 64 * (n + 64))
    began = 0.0
    for i in range(n + 64):
        if i == 64:
            assert pool.n_free_cached == 4096
            began = time.thread_time()
        blocks = pool.take(64)
        for at, block in enumerate(blocks, 64 * i):
            pool.store(block, keys[at])
        blocks.reverse()
        pool.release(blocks)
    return 64 * n / (time.thread_time() - began)


def steps(n: int = 300) -> float:
    """Compose steps of 64 decodes."""
    server = {"scheduler": "vllm", "slots": 64, "n_batch": 8192}
    policy = paged(8192)
    scheduler = Vllm(load_scenario({"server": server, "cache": {"cells": 2**17}}), policy, GivenTimes(), Recorder())
    for i in range(64):
        scheduler.submit(Job(Request(i, 0.0, 100, 10_000), 0.0), 0.0)
    policy.allocate(step := scheduler.compose(0.0))
    scheduler.commit(step, 1, 0.0)
    seconds = 0.0
    for _ in range(n):
        began = time.thread_time()
        step = scheduler.compose(0.0)
        seconds += time.thread_time() - began
        assert len(step) == 64
        policy.allocate(step)
        scheduler.commit(step, 1, 0.0)
    return n / seconds


CASES: tuple[tuple[str, Callable[[], float], int | None], ...] = (
    ("one-token append", appends, 205_000),
    ("1,024-token look-up and allocation", prefills, 11_200),
    ("the same, hashes included", partial(prefills, hashed=False), None),
    ("blocks evicted, steady", evictions, 488_000),
    ("scheduler steps of 64 decodes", steps, 1_201),
)


def main() -> None:
    """Measure all cases interleaved, and print medians with bootstrap intervals."""
    found: dict[str, list[float]] = {name: [] for name, _, _ in CASES}
    for _ in range(ROUNDS):
        for name, case, _ in CASES:
            found[name].append(case())
    rng = np.random.default_rng(1)
    print(f"{'per second of thread time':36}{'ours':>12}{'95 % interval':>24}{'vLLM 0.33.0':>14}{'ratio':>8}")
    for name, _, theirs in CASES:
        rates = np.array(found[name])
        medians = np.median(rng.choice(rates, (2000, len(rates))), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        median = statistics.median(found[name])
        comparison = f"{theirs:>14,}{median / theirs:>8.1f}" if theirs else ""
        print(f"{name:36}{median:>12,.0f}{f'{low:,.0f} to {high:,.0f}':>24}{comparison}")
    print("vLLM's figures: two cores of an AMD EPYC, another machine than this one.")


if __name__ == "__main__":
    main()
