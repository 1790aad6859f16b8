"""Sequences contiguous in virtual memory: what pages waste, what mapping them costs, and what reading one run saves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kvsim
from benchmarks.reproduced import mapped_pages
from benchmarks.reproduced.finding import SEEDS, Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from kvsim.model.memory_shapes import memory_shape
from policies import CacheConfig
from policies.layouts.virtually_contiguous import VirtuallyContiguousPolicy

FOLDER = Path(__file__).parents[2] / "examples" / "reproduced"
KIB = 1024
PAGES = (64 * KIB, 128 * KIB, 256 * KIB, 2048 * KIB)
"""Bytes of the pages that vAttention supports; all but the last with a driver of its own."""
OUTPUTS = {500: 8, 100: 38, 50: 76}
"""Tokens of an answer by the tokens of a prompt for each of them, with prompts of 3,800 on the mean."""
SHARED: dict[str, Any] = {
    "workload": {
        "kind": "sessions",
        "sessions": 1500,
        "rate": 1e6,
        "turns": {"kind": "fixed", "value": 1},
        "system_prompts": 15,
        "system_tokens": {"kind": "empirical", "quantiles": [256, 768]},
        "popularity": 0.0,
        "user_tokens": {"kind": "empirical", "quantiles": [974, 1074]},
        "output_tokens": {"kind": "empirical", "quantiles": [974, 1074]},
    },
    "cache__prefix_cache": True,
}
"""Prompts behind one of 15 shared texts of 512 tokens on the mean."""


class Mapped(NamedTuple):
    """What a run mapped, and how far it came."""

    internal: float
    """Internal fragmentation."""
    throughput: float
    """Generated tokens per second."""
    waited: float
    """Share of the time in which passes waited for pages."""
    at_once: float
    """What that share would be if passes waited for every page that is mapped."""
    found: float
    """Share of the pages needed that were still mapped in the slot."""


def page_tokens(model: str, page_bytes: int, tensor_parallel: int = 1) -> int:
    """Tokens whose K, in 16 bits, of one layer fills a page on each device."""
    (group,) = memory_shape(model).groups
    return page_bytes * tensor_parallel // (2 * group.k_row)


def served(file: str, seed: int, **keys: Any) -> Mapped:
    """One run of a scenario under ``vattention``; ``keys``: what differs from the file."""
    scenario, built = kvsim.load(FOLDER / file, seed=seed, **keys), list[VirtuallyContiguousPolicy]()

    def factory(config: CacheConfig) -> VirtuallyContiguousPolicy:
        built.append(VirtuallyContiguousPolicy("vattention", config))
        return built[0]

    summary, pages = kvsim.run(scenario, factory).summary, built[0].blocks.pages
    assert pages is not None
    page_s = scenario.machine.map_page_us * 1e-6 * 2 * scenario.model.shape.n_layers
    waited_s, makespan_s = page_s * summary["cache"]["mapped_pages"], summary["makespan_s"]
    at_once_s = page_s * pages.n_mapped
    return Mapped(
        summary["cache"]["internal_fragmentation_mean"],
        summary["throughput_tokens_per_s"],
        waited_s / makespan_s,
        at_once_s / (makespan_s - waited_s + at_once_s),
        pages.n_found / (pages.n_found + pages.n_mapped),
    )


def paged(file: str, seed: int, **keys: Any) -> float:
    """Generated tokens per second of the same scenario under ``paged``."""
    found: float = kvsim.run(kvsim.load(FOLDER / file, seed=seed, **keys), "paged", detail="requests").summary[
        "throughput_tokens_per_s"
    ]
    return found


def faster(file: str, seeds: Sequence[int] = SEEDS, **keys: Any) -> Interval:
    """Tokens per second over those of ``paged``."""
    ours = [each.throughput for each in measured(partial(served, file, **keys), seeds)]
    return ratio(ours, measured(partial(paged, file, **keys), seeds))


def find() -> list[Finding]:
    """Fragmentation by size of pages, time that mapping takes, and throughput beside that of paged."""
    return [*_fragmentation(), *_mapping(), *_throughput(), *_for_real()]


_IDEA = "Virtually contiguous"
_PAPER = "vAttention (ASPLOS 2025, arXiv 2405.04437)"
_PULL = "TensorRT-LLM pull request 15931, 5,000 requests"
_ONE_KERNEL = "attention is priced alike on both sides, since GPU profiles have one kernel"


def _fragmentation() -> list[Finding]:
    """Mapping takes no time here, so that pages differ in size alone."""
    findings = []
    for page in PAGES:
        tokens = page_tokens("llama-3.1-8b", page)
        runs = measured(partial(served, "virtual-memory.toml", cache__page_tokens=tokens, machine__map_page_us=0.0))
        claim = (
            f"small pages waste little: internal fragmentation with pages of {page // KIB:,} KiB ({tokens:,} tokens)"
        )
        findings.append(
            Finding(_IDEA, claim, _PAPER, mean([each.internal for each in runs]), "share", "conversations of Azure's")
        )
    return findings


def _mapping() -> list[Finding]:
    findings = []
    for file in ("virtual-memory.toml", "virtual-memory-overlap.toml"):
        runs = measured(partial(served, file))
        for field, claim in (
            ("at_once", "mapping without overlap makes steps longer: share of time if passes waited for all pages"),
            ("waited", "overlap hides mapping: share of time in which passes wait for pages of prompts"),
            ("found", "deferred reclamation saves mapping: pages found mapped in their slot"),
        ):
            values = mean([getattr(each, field) for each in runs])
            differs = f"{file}; one A100 instead of two, 40 us for each page by the paper's Table 3"
            findings.append(Finding(_IDEA, claim, _PAPER, values, "share", differs))
        claim = "tokens/s over paged, of which only pages and mapping can tell"
        findings.append(Finding(_IDEA, claim, _PAPER, faster(file), "times", f"{file}; {_ONE_KERNEL}"))
    return findings


def _throughput() -> list[Finding]:
    findings = []
    for prompt, output in OUTPUTS.items():
        keys = {"workload__output_tokens": {"kind": "fixed", "value": output}}
        claim = f"up to 1.23 times the throughput of paged kernels: {prompt} prompt tokens for one of the answer"
        differs = "NumPy kernels on a CPU, 3,600 to 4,000 tokens of context, not 16,384 and more on A100s"
        findings.append(Finding(_IDEA, claim, _PAPER, faster("virtual-memory-cpu.toml", **keys), "times", differs))
    file, runs = "virtual-memory-parked.toml", measured(partial(served, "virtual-memory-parked.toml"))
    parked = mean([each.found for each in runs])
    findings.append(
        Finding(_IDEA, "no page is mapped in the steady state: pages found mapped", _PULL, parked, "share", _ONE_KERNEL)
    )
    findings.append(Finding(_IDEA, "unique prompts: -0.4 % tokens/s", _PULL, faster(file), "times", _ONE_KERNEL))
    differs = f"nothing is shared here, while there the host tier gives prefixes back; {_ONE_KERNEL}"
    shared = faster(file, **SHARED)
    findings.append(Finding(_IDEA, "shared system prompts: -5.6 % tokens/s", _PULL, shared, "times", differs))
    return findings


def _for_real() -> list[Finding]:
    """What the machine does on which this runs: intervals are over repeats, not over seeds."""
    findings, differs = [], "the NumPy engine on this machine, Linux's mmap"
    for length, new in ((3800, 1), (3800, 128)):
        claim = f"passes are shorter over one run than through a table: {new} new tokens for each of 4 x {length:,}"
        table, ranges = mapped_pages.passes(length, new)
        findings.append(Finding(_IDEA, claim, _PAPER, ratio(table, ranges), "times", differs))
    for tokens in (32, 512, 16384):
        claim = f"mapping a page takes 40 us (2 MiB, CUDA): {tokens // 8:,} KiB"
        findings.append(Finding(_IDEA, claim, _PAPER, mean(mapped_pages.mapping_us(tokens)), "us", differs))
    return findings
