"""Token eviction: how much of its memory comes free in blocks, with holes left, refilled or compacted, and the cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvsim
from benchmarks.reproduced.finding import SEEDS, Finding, mean, measured, ratio
from kvsim.costs.load_profile import load_profile
from kvsim.experiments.estimates import Interval
from policies import CacheConfig, Chunk, SequencePlan, available
from policies.cells.token_ranks import DrawnAttention

FOLDER = Path(__file__).parents[2] / "examples" / "reproduced"
BATCH, CPU, LONG_PROMPTS, STREAM = (
    FOLDER / f"token-eviction{which}.toml" for which in ("", "-cpu", "-long-prompts", "-stream")
)
PROMPT = ANSWER = 512
"""Tokens of H2O's requests."""
BUDGETS = (0.1, 0.2, 0.4)
"""Shares of a whole sequence."""
BLOCK_SIZES = (16, 64, 128)
THRESHOLDS = (0.0, 0.3, 0.6)
PLENTY = {"workload__requests": 12, "cache__cells": 16384}
"""Keys of the batch with which all sequences fit into the cache whole."""
WINDOWS = (256, 1024, 4096)
"""Budgets of a stream."""


class Served(NamedTuple):
    """What a run of a scenario did under a policy."""

    throughput: float
    """Generated tokens per second."""
    tpot: float
    """Seconds for each token behind the first, mean over requests."""
    useful: float
    """Share of the cells read that hold a token."""
    moved: float
    """Cells copied, for each token placed."""
    copying: float
    """Share of the time that copies take."""


def served(path: Path, policy: str, seed: int, **keys: Any) -> Served:
    """Run a scenario under a policy."""
    scenario = kvsim.load(path, seed=seed, **keys)
    found = kvsim.run(scenario, policy).summary
    cache, moves = found["cache"], load_profile(found["profile"]).moves
    assert moves is not None
    copying_s = moves.per_pass_s.value * cache["compactions"] + moves.per_run_s.value * cache["move_runs"]
    copying_s += moves.per_cell_s.value * cache["moved_cells"]
    tokens = found["prompt_tokens"] + found["output_tokens"]
    return Served(
        found["throughput_tokens_per_s"],
        found["tpot_s"]["mean"],
        cache["scored_useful"],
        cache["moved_cells"] / tokens,
        copying_s / found["makespan_s"],
    )


class Blocks(NamedTuple):
    """Blocks of one sequence that is alone, means over the steps in which it decodes."""

    held: float
    needed: float
    """Blocks that its tokens would fill."""
    whole: float
    """Blocks that it would fill if no token had been evicted."""


def blocks_of(
    seed: int,
    policy: str,
    budget: int,
    size: int,
    run_length: float | None = None,
    prompt: int = PROMPT,
    answer: int = ANSWER,
) -> Blocks:
    """Blocks under a policy; ``run_length``: that of drawn attention, instead of the one set by SmolLM2."""
    drawn = None
    if run_length is not None:
        drawn = DrawnAttention(seed, run_length=run_length, sigma=0.5, age_exponent=0.28)
    final = prompt + answer
    config = CacheConfig(
        cells=(2 * final // size + 2) * size,
        n_ubatch=prompt,
        max_tokens=final,
        block_size=size,
        budget=budget,
        seed=seed,
        attention=drawn,
    )
    built = available()[policy](config)
    built.open(0, SequencePlan(prompt, final, final))
    built.allocate([Chunk(0, 0, prompt)])
    rows = []
    for length in range(prompt, final):
        built.allocate([Chunk(0, length, 1)])
        usage = built.usage()
        rows.append((usage.allocated // size, -(-usage.stored // size), length // size + 1))
    held, needed, whole = np.array(rows).mean(axis=0)
    return Blocks(held, needed, whole)


def runs(path: Path, policies: Sequence[str], seeds: Sequence[int] = SEEDS, **keys: Any) -> dict[str, list[Served]]:
    """Runs under each policy, by seed."""
    return {policy: measured(partial(_served, path, policy, keys), seeds) for policy in policies}


def _served(path: Path, policy: str, keys: dict[str, Any], seed: int) -> Served:
    return served(path, policy, seed, **keys)


_H2O = "Zhang et al., H2O (arXiv 2306.14048), OPT-6.7B and OPT-30B in FlexGen on a T4, a budget of 20 %"
_SNAPKV = "Li et al., SnapKV (arXiv 2404.14469), LWM-Text-Chat-1M in transformers on an A100, 16,384 tokens"
_STREAMING = "Xiao et al., StreamingLLM (arXiv 2309.17453), Llama 2 in transformers on an A6000, up to 4,096 tokens"
_GPU = "Llama 2 7B under vLLM's scheduler on an H100, by its profile; tokens lie in blocks; attention is drawn"


def find() -> list[Finding]:
    """Every figure of the section."""
    return [*_fragmentation(), *_batch(), *_plenty_of_memory(), *_long_prompts(), *_stream()]


def _finding(claim: str, source: str, ours: Interval, unit: str = "times", differs: str = _GPU) -> Finding:
    return Finding("Token eviction", claim, source, ours, unit, differs)


def _fragmentation() -> Iterator[Finding]:
    """Blocks held over blocks needed, and over those of a whole sequence."""
    alone = "one sequence of 512 + 512 tokens alone; attention is drawn"
    for policy, size, share in product(("h2o", "h2o-refilled"), BLOCK_SIZES, BUDGETS):
        budget = round(share * (PROMPT + ANSWER))
        found = measured(partial(blocks_of, policy=policy, budget=budget, size=size))
        claim = f"blocks held over blocks needed, {policy}, blocks of {size}, budget {share:.0%}"
        yield _finding(claim, "no claim", ratio([b.held for b in found], [b.needed for b in found]), differs=alone)
    for run_length in (1.0, 4.0, 16.0):
        found = measured(partial(blocks_of, policy="h2o", budget=205, size=16, run_length=run_length))
        claim = f"blocks held over blocks needed, h2o, blocks of 16, budget 20%, heavy tokens in runs of {run_length:g}"
        yield _finding(claim, "no claim", ratio([b.held for b in found], [b.needed for b in found]), differs=alone)
    for policy in ("h2o", "h2o-refilled", "h2o-packed", "h2o-blocks"):
        found = measured(partial(blocks_of, policy=policy, budget=205, size=16))
        less = ratio([b.whole for b in found], [b.held for b in found])
        yield _finding(
            f"a fifth of the memory: blocks of whole sequences over those of {policy}", _H2O, less, differs=alone
        )


def _batch() -> Iterator[Finding]:
    """What comes free is worth a larger batch."""
    names = ("hf-reserved", "paged", "h2o", "h2o-refilled", "h2o-compacted", "h2o-packed", "h2o-blocks")
    found = runs(BATCH, names)
    for baseline, claim in (
        ("paged", "throughput up to 3 times that of FlexGen"),
        ("hf-reserved", "throughput up to 29 times that of DeepSpeed and Accelerate"),
    ):
        for policy in names[2:]:
            faster = ratio([s.throughput for s in found[policy]], [s.throughput for s in found[baseline]])
            yield _finding(f"{claim}: tokens/s, {policy} over {baseline}", _H2O, faster)
    for policy in ("h2o-compacted", "h2o-packed"):
        moved, copying = mean([s.moved for s in found[policy]]), mean([1000 * s.copying for s in found[policy]])
        yield _finding(f"cells copied for each token placed, {policy}", "no claim", moved, "cells")
        yield _finding(f"time that copies take, {policy}", "no claim", copying, "ms in a second")
    for size in BLOCK_SIZES[1:]:
        sized = runs(BATCH, ("paged", "h2o", "h2o-packed"), cache__block_size=size)
        for policy in ("h2o", "h2o-packed"):
            faster = ratio([s.throughput for s in sized[policy]], [s.throughput for s in sized["paged"]])
            yield _finding(f"tokens/s, {policy} over paged, blocks of {size}", "no claim", faster)


def _plenty_of_memory() -> Iterator[Finding]:
    """What is gained where memory is not short: holes are no longer read."""
    cpu = "the tiny model in the NumPy engine on a CPU, by its profile; attention is drawn"
    for where, path, keys, differs in (
        ("H100", BATCH, PLENTY, _GPU),
        ("CPU", CPU, {"workload__requests": PLENTY["workload__requests"]}, cpu),
    ):
        found = runs(path, ("paged", "h2o", "h2o-packed"), **keys)
        holes = [s.throughput for s in found["h2o"]]
        prefix = f"plenty of memory, {where}"
        useful = mean([s.useful for s in found["h2o"]])
        yield _finding(f"{prefix}: cells read that hold a token, h2o", "no claim", useful, "share", differs)
        for other in ("paged", "h2o"):
            faster = ratio([s.throughput for s in found["h2o-packed"]], [s.throughput for s in found[other]])
            yield _finding(f"{prefix}: tokens/s, h2o-packed over {other}", "no claim", faster, differs=differs)
        for threshold in THRESHOLDS:
            tidied = runs(path, ("h2o-compacted",), cache__threshold=threshold, **keys)["h2o-compacted"]
            faster, copying = ratio([s.throughput for s in tidied], holes), mean([1000 * s.copying for s in tidied])
            claim = f"{prefix}: {{}}, h2o-compacted, threshold {threshold:g}"
            yield _finding(claim.format("tokens/s over h2o"), "no claim", faster, differs=differs)
            yield _finding(claim.format("time that copies take"), "no claim", copying, "ms in a second", differs)


def _long_prompts() -> Iterator[Finding]:
    """SnapKV's case."""
    found = runs(LONG_PROMPTS, ("paged", "snapkv", "snapkv-compacted"))
    for policy in ("snapkv", "snapkv-compacted"):
        faster = ratio([s.tpot for s in found["paged"]], [s.tpot for s in found[policy]])
        yield _finding(f"generation 3.6 times as fast: time for a token, paged over {policy}", _SNAPKV, faster)
    for policy in ("snapkv", "snapkv-compacted"):
        held = measured(partial(blocks_of, policy=policy, budget=1024, size=16, prompt=16384))
        less = ratio([b.whole for b in held], [b.held for b in held])
        claim = f"memory 8.2 times as efficient: blocks of whole sequences over those of {policy} behind the prompt"
        yield _finding(claim, _SNAPKV, less)


def _stream() -> Iterator[Finding]:
    """StreamingLLM's case: a decode step over its window, and a prompt as long, which stands for recomputing it."""
    for window in WINDOWS:
        keys = {"workload__prompt_tokens": {"kind": "fixed", "value": window}, "cache__budget": window}
        found = kvsim.run(kvsim.load(STREAM, **keys), "streaming-llm").summary
        faster = found["ttft_s"]["mean"] / found["tpot_s"]["mean"]
        claim = f"up to 22.2 times as fast as recomputing the window: window of {window}"
        yield _finding(
            claim,
            _STREAMING,
            Interval(faster, faster, faster),
            differs=f"{_GPU}; nothing is drawn",
        )
