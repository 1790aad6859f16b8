"""Eviction by the kind of request that a cached block belongs to."""

from __future__ import annotations

from functools import partial

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _workload_aware(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.paged import PagedOptions, PagedPolicy
    from policies.paging.eviction import free_blocks

    options, free = config.read(PagedOptions), partial(free_blocks, "workload-aware")
    return PagedPolicy(name, config, block_size=options.block_size, free=free, prefix_cache=options.prefix_cache)


PRESETS = (
    Preset(
        "workload-aware",
        "paged; the cached block that is least likely to be used again soon, by its kind of request, goes first",
        "blocks from a queue for each kind of request (turn, part of a mix); full ones are shared as in `paged`",
        "gather",
        ("block_size", "prefix_cache", "watermark", "admission", "conservativeness", "host_cells"),
        "Wang et al., KVCache Cache in the Wild (USENIX ATC 2025, arXiv 2506.02634); vLLM pull request 22236",
        _workload_aware,
        group="papers",
        against="paged",
        measured="Qwen and Llama on A800s, two traces of Alibaba; ours: docs/reproduced.md#workload-aware-eviction",
    ),
)
"""One preset; its order is ``cache.eviction = "workload-aware"`` of the others."""
