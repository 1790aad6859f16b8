"""Token eviction: H2O, SnapKV and StreamingLLM over blocks, and what becomes of the holes that they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _h2o(name: str, config: CacheConfig, *, compacts: bool = False, refill: bool = False) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import HeavyHitters
    from policies.layouts.token_eviction import TokenEvictionOptions, TokenEvictionPolicy

    options = config.read(TokenEvictionOptions)
    attention = options.attention or DrawnAttention.by_all_queries(options.seed)
    above = options.threshold if compacts else None
    return TokenEvictionPolicy(
        name, config, HeavyHitters(options.budget), attention, compact_above=above, refill=refill
    )


def _h2o_blocks(name: str, config: CacheConfig) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import HeavyBlocks
    from policies.layouts.token_eviction import TokenEvictionOptions, TokenEvictionPolicy

    options = config.read(TokenEvictionOptions)
    attention = options.attention or DrawnAttention.by_all_queries(options.seed)
    return TokenEvictionPolicy(name, config, HeavyBlocks(options.budget, options.block_size), attention)


def _snapkv(name: str, config: CacheConfig, *, compacts: bool = False) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import PromptHeavy
    from policies.layouts.token_eviction import TokenEvictionOptions, TokenEvictionPolicy

    options = config.read(TokenEvictionOptions)
    attention = options.attention or DrawnAttention.by_last_queries(options.seed)
    above = options.threshold if compacts else None
    return TokenEvictionPolicy(name, config, PromptHeavy(options.budget), attention, compact_above=above)


def _streaming(name: str, config: CacheConfig) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import SinksAndRecent
    from policies.layouts.token_eviction import TokenEvictionOptions, TokenEvictionPolicy

    options = config.read(TokenEvictionOptions)
    rule = SinksAndRecent(options.budget, min(options.sinks, options.budget - 1))
    return TokenEvictionPolicy(name, config, rule, options.attention or DrawnAttention.by_all_queries(options.seed))


_LAYOUT = "blocks of single tokens' cells; an evicted token leaves a hole, an empty block is free"
_HOLES = "fill-holes: tokens of a sequence's emptiest blocks fill the holes of its fullest"
_WHEN = "threshold on a sequence's 1 - tokens / cells read; and on failed allocation"
_KEYS = ("block_size", "budget", "budget_groups")
_H2O = "Zhang et al., H2O (arXiv 2306.14048)"

_H2O_PRESET = Preset(
    "h2o",
    "keeps recent tokens and those with the most attention; holes stay",
    _LAYOUT,
    "gather",
    _KEYS,
    _H2O,
    _h2o,
    group="papers",
    against="paged",
    measured="OPT-6.7B and OPT-30B under FlexGen, on a T4 and an A100; ours: docs/reproduced.md",
)
_SNAPKV_PRESET = replace(
    _H2O_PRESET,
    name="snapkv",
    summary="thins the prompt out once it is complete, in clusters; keeps the whole answer; holes stay",
    source="Li et al., SnapKV (arXiv 2404.14469)",
    build=_snapkv,
    measured="LWM-Text-Chat-1M (7B) under transformers, on an A100 with 80 GB; ours: docs/reproduced.md",
)


def _compacted(preset: Preset, name: str, summary: str, source: str, build: Callable[..., Policy]) -> Preset:
    """A preset with compaction, compared with what it is without."""
    return replace(
        preset,
        name=name,
        summary=summary,
        compactor=_HOLES,
        trigger=_WHEN,
        parameters=(*_KEYS, "threshold"),
        source=f"{preset.source}; {source}",
        build=build,
        against=preset.name,
    )


PRESETS = (
    _H2O_PRESET,
    _compacted(
        _H2O_PRESET,
        "h2o-compacted",
        "h2o, with the tokens of sparse blocks copied together",
        "the moves are ours, much as KV-Compress's (arXiv 2410.00161)",
        partial(_h2o, compacts=True),
    ),
    replace(
        _H2O_PRESET,
        name="h2o-refilled",
        summary="h2o, with new tokens in the holes of evicted ones, the fullest block first",
        source=f"{_H2O}; holes filled with new tokens as vLLM issue 12254 proposes",
        build=partial(_h2o, refill=True),
        against="h2o",
    ),
    _compacted(
        _H2O_PRESET,
        "h2o-packed",
        "h2o, compacted behind the prompt, and then with new tokens in the holes of evicted ones",
        "both of the above together are ours",
        partial(_h2o, compacts=True, refill=True),
    ),
    replace(
        _H2O_PRESET,
        name="h2o-blocks",
        summary="h2o by whole blocks, by their mean attention: no holes",
        layout="blocks from a free queue; whole blocks are evicted",
        source="OpenVINO GenAI's cache eviction (CacheEvictionConfig); PagedEviction (arXiv 2509.04377)",
        build=_h2o_blocks,
        against="h2o",
        measured="PagedEviction: Llama 3.1 8B, 3.2 3B and 1B under vLLM; ours: docs/reproduced.md",
    ),
    _SNAPKV_PRESET,
    _compacted(
        _SNAPKV_PRESET,
        "snapkv-compacted",
        "snapkv, with the tokens of sparse blocks copied together",
        "the moves are ours",
        partial(_snapkv, compacts=True),
    ),
    replace(
        _H2O_PRESET,
        name="streaming-llm",
        summary="keeps the first tokens and the most recent ones, in blocks",
        parameters=(*_KEYS, "sinks"),
        source="Xiao et al., StreamingLLM (arXiv 2309.17453), without renumbering; `ring` renumbers",
        build=_streaming,
        measured="Llama 2 7B and 13B under transformers, on an A6000; ours: docs/reproduced.md",
    ),
)
"""In the order of tables."""
