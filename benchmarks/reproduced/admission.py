"""Reservation against preemption: what it costs to start more requests than can end, and what is kept free instead."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvsim
from benchmarks.reproduced.finding import Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from policies import CacheConfig
from policies.layouts.paged import PagedOptions, PagedPolicy
from policies.paging.eviction import free_blocks

FOLDER = Path(__file__).parents[2] / "examples" / "reproduced"
NO_EVICT, NEXT_CHUNK, WATERMARK = (
    FOLDER / f"{name}.toml" for name in ("no-evict", "max-utilization-next-chunk", "watermark")
)
POOLS = (402_000, 412_000, 422_000, 432_000, 442_000)
"""Cells around those of the issue, one for each seed: there all lengths are fixed, so that a seed changes nothing."""
WATERMARKS = (0.0, 0.02, 0.05, 0.1)
SGLANG = {"server__victim": "fewest-generated", "server__requeue": "back"}
"""The request that is preempted, and where it waits, as in SGLang."""
HALF = 225
"""Requests of the runs that are taken step by step: half of the others'."""


class Served(NamedTuple):
    """What a run did for its users."""

    throughput: float
    """Generated tokens per second."""
    tpot_p99: float
    """Seconds; as are the next two."""
    e2e_p99: float
    ttft_p50: float
    preemptions: int


def served(scenario: Path, policy: str, seed: int, **keys: Any) -> Served:
    """One run; ``keys``: more of the scenario's keys."""
    summary = kvsim.run(kvsim.load(scenario, seed=seed, **keys), policy, detail="requests").summary
    return Served(
        summary["throughput_tokens_per_s"],
        summary["tpot_s"]["p99"],
        summary["e2e_s"]["p99"],
        summary["ttft_s"]["p50"],
        summary["preemptions"],
    )


def oversubscribed(scenario: Path, policy: str, seed: int, **keys: Any) -> Served:
    """One run of issue 16827's traffic, with a pool of its own for each seed."""
    return served(scenario, policy, 1, cache__cells=POOLS[seed - 1], **keys)


def itl_p99(watermark: float, seed: int) -> float:
    """The 99th percentile of the seconds between two tokens of a request, without waits of preempted requests."""
    scenario = kvsim.load(WATERMARK, seed=seed, workload__requests=HALF, cache__watermark=watermark)
    passes = kvsim.run(scenario, detail="tables").passes
    seconds, requests = passes["seconds"].to_numpy(), passes["chunks"].to_numpy()
    order = np.argsort(seconds)
    upto = np.cumsum(requests[order])
    return float(seconds[order][np.searchsorted(upto, 0.99 * upto[-1])])


class Watched(PagedPolicy):
    """SGLang's rule of admission; notes the step of every preemption."""

    has_placement_rule = True

    def __init__(self, config: CacheConfig):
        self.preempted_at: list[int] = []
        config = config.with_options(admission="expected")
        super().__init__(
            "watched", config, block_size=config.read(PagedOptions).block_size, free=partial(free_blocks, "lru")
        )

    def note_preemption(self) -> None:
        """Note the step."""
        super().note_preemption()
        self.preempted_at.append(self._placement_rule.steps)


def steps_between_retractions(seed: int) -> float:
    """Mean steps from one step with preemptions to the next."""
    built: list[Watched] = []

    def factory(config: CacheConfig) -> Watched:
        built.append(Watched(config))
        return built[0]

    kvsim.run(kvsim.load(WATERMARK, seed=seed, workload__requests=HALF, **SGLANG), factory, detail="requests")
    return float(np.diff(sorted(set(built[0].preempted_at))).mean())


_ISSUE = "TensorRT-LLM issue 16827: Llama-3.3-70B-FP8 on one H200, TensorRT-LLM 1.2.1, 128 prompts of 16,384 tokens"
_PULL = "vLLM pull request 44594: Qwen2.5-7B on one GB200, a pool of 299,584 tokens, 450 requests of 128 users"
_SGLANG = "SGLang pull request 20729: Gemma-27B in RL rollouts"
_POOL = "pool inferred: interval over pools of 402,000 to 442,000 tokens; K and V in 16 bits; the host adds nothing"
_BOARD = "a B200, no time of the host"


def find() -> list[Finding]:
    """All figures of the section, in its order."""
    return [*_no_evict(), *_watermark(), *_retraction()]


def _no_evict() -> list[Finding]:
    """Reserving nothing beside reserving all."""
    findings = []
    reserved = measured(partial(oversubscribed, NO_EVICT, "no-evict"))
    for scenario, rule in ((NO_EVICT, "as vLLM admits"), (NEXT_CHUNK, "a next chunk admits, preempted wait last")):
        free = measured(partial(oversubscribed, scenario, "paged"))
        for field, claim in (
            ("throughput", "max utilisation has 0.594 times the throughput"),
            ("tpot_p99", "max utilisation has 9.1 times the TPOT P99"),
            ("e2e_p99", "max utilisation has 3.75 times the end-to-end P99"),
            ("ttft_p50", "max utilisation has 0.76 times the TTFT P50"),
        ):
            ours = ratio([getattr(run, field) for run in free], [getattr(run, field) for run in reserved])
            findings.append(_finding(f"{claim} ({rule})", _ISSUE, ours, "times", _POOL))
        ours = mean([run.preemptions for run in free])
        findings.append(_finding(f"preemptions ({rule}), not published", _ISSUE, ours, "preemptions", _POOL))
    ours = mean([run.throughput for run in reserved])
    findings.append(_finding("guaranteed no-evict: 161 tokens/s", _ISSUE, ours, "tokens/s", _POOL))
    return findings


def _watermark() -> list[Finding]:
    """vLLM's table, and the two rules that reserve more."""
    findings, published = [], {0.0: (1065, 11582), 0.02: (400, 12134), 0.05: (187, 12167), 0.1: (168, 11835)}
    for watermark in WATERMARKS:
        runs = measured(partial(served, WATERMARK, "paged", cache__watermark=watermark))
        preempted, throughput = published[watermark]
        claim = f"watermark {watermark:g}: {preempted} preemptions"
        findings.append(_finding(claim, _PULL, mean([run.preemptions for run in runs]), "preemptions", _BOARD))
        claim = f"watermark {watermark:g}: {throughput:,} tokens/s"
        findings.append(_finding(claim, _PULL, mean([run.throughput for run in runs]), "tokens/s", _BOARD))
    for watermark, published_ms in ((0.0, 40.62), (0.02, 18.80)):
        seconds = measured(partial(itl_p99, watermark))
        claim = f"watermark {watermark:g}: ITL P99 of {published_ms} ms"
        differs = f"{_BOARD}; {HALF} requests; without the waits of preempted requests"
        findings.append(_finding(claim, _PULL, mean([1e3 * s for s in seconds]), "ms", differs))
    for policy in ("no-evict", "expected-length"):
        runs = measured(partial(served, WATERMARK, policy))
        for field, unit in (("preemptions", "preemptions"), ("throughput", "tokens/s")):
            ours = mean([getattr(run, field) for run in runs])
            findings.append(
                _finding(f"{policy} instead, not published", _PULL, ours, unit, "a limit of 6,000 is stated")
            )
    return findings


def _retraction() -> list[Finding]:
    """SGLang's new-token ratio."""
    findings = []
    for policy in ("paged", "expected-length"):
        runs = measured(partial(served, WATERMARK, policy, **SGLANG))
        for field, unit in (("preemptions", "preemptions"), ("throughput", "tokens/s")):
            claim = f"{policy} where SGLang's order of retraction holds, not published"
            ours = mean([getattr(run, field) for run in runs])
            findings.append(_finding(claim, "SGLang pull request 708", ours, unit, "the traffic of vLLM's table"))
    ours = mean(measured(steps_between_retractions))
    differs = f"the traffic of vLLM's table, {HALF} requests, Qwen2.5-7B on a B200"
    return [*findings, _finding("a retraction about every 600 decode steps", _SGLANG, ours, "steps", differs)]


def _finding(claim: str, source: str, ours: Interval, unit: str, differs: str) -> Finding:
    return Finding("Reservation against preemption", claim, source, ours, unit, differs)
