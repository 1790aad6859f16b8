"""Reservation against preemption: who may start, while others still grow."""

from __future__ import annotations

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset
from policies.presets.standard import paged


def _no_evict(name: str, config: CacheConfig) -> Policy:
    return paged(name, config.with_options(admission="no-evict"))


def _expected_length(name: str, config: CacheConfig) -> Policy:
    return paged(name, config.with_options(admission="expected"))


_BLOCKS = "blocks of `block_size` cells from a free queue; freed blocks stay findable until they are taken"
_KEYS = ("block_size", "prefix_cache", "eviction", "free_order", "watermark", "host_cells")

PRESETS = (
    Preset(
        "no-evict",
        "paged; a sequence starts only if all that it and the others may ever hold fits, and none is preempted",
        _BLOCKS,
        "gather",
        _KEYS,
        "TensorRT-LLM's GUARANTEED_NO_EVICT (issue 16827 compares it with MAX_UTILIZATION, which `paged` is like)",
        _no_evict,
        group="papers",
        against="paged",
        measured="Llama-3.3-70B-FP8 on an H200, TensorRT-LLM 1.2.1, prompts of 16,384 tokens (issue 16827); "
        "ours: docs/reproduced.md",
    ),
    Preset(
        "expected-length",
        "paged; a sequence starts if what it and the others are expected to hold fits, learning from preemptions",
        _BLOCKS,
        "gather",
        (*_KEYS, "conservativeness"),
        "SGLang's PrefillAdder and new-token ratio (pull request 708, issue 26248)",
        _expected_length,
        group="papers",
        against="paged",
        measured="8 H100, DeepSeek-V4 under SGLang 0.5.12 (issue 26248); ours: docs/reproduced.md",
    ),
)
"""The presets of this idea."""
