"""Token eviction: H2O, SnapKV and StreamingLLM over blocks, and what becomes of the holes that they leave."""

from __future__ import annotations

from functools import partial

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _h2o(name: str, config: CacheConfig, *, compacts: bool = False, refill: bool = False) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import HeavyHitters
    from policies.layouts.token_eviction import TokenEvictionPolicy

    attention = config.attention or DrawnAttention.by_all_queries(config.seed)
    above = config.threshold if compacts else None
    return TokenEvictionPolicy(name, config, HeavyHitters(config.budget), attention, compact_above=above, refill=refill)


def _h2o_blocks(name: str, config: CacheConfig) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import HeavyBlocks
    from policies.layouts.token_eviction import TokenEvictionPolicy

    attention = config.attention or DrawnAttention.by_all_queries(config.seed)
    return TokenEvictionPolicy(name, config, HeavyBlocks(config.budget, config.block_size), attention)


def _snapkv(name: str, config: CacheConfig, *, compacts: bool = False) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import PromptHeavy
    from policies.layouts.token_eviction import TokenEvictionPolicy

    attention = config.attention or DrawnAttention.by_last_queries(config.seed)
    above = config.threshold if compacts else None
    return TokenEvictionPolicy(name, config, PromptHeavy(config.budget), attention, compact_above=above)


def _streaming(name: str, config: CacheConfig) -> Policy:
    from policies.cells.token_ranks import DrawnAttention
    from policies.cells.token_rules import SinksAndRecent
    from policies.layouts.token_eviction import TokenEvictionPolicy

    rule = SinksAndRecent(config.budget, min(config.sinks, config.budget - 1))
    return TokenEvictionPolicy(name, config, rule, config.attention or DrawnAttention.by_all_queries(config.seed))


_LAYOUT = "blocks of single tokens' cells; an evicted token leaves a hole, an empty block is free"
_NONE, _NEVER = "none", "never"
_HOLES = "fill-holes: tokens of a sequence's emptiest blocks fill the holes of its fullest"
_WHEN = "threshold on a sequence's 1 - tokens / cells read; and on failed allocation"
_KEYS = ("block_size", "budget", "budget_groups")
_H2O = "Zhang et al., H2O (arXiv 2306.14048)"
_H2O_MEASURED = "OPT-6.7B and OPT-30B under FlexGen, on a T4 and an A100; ours: docs/reproduced.md"
_SNAPKV = "Li et al., SnapKV (arXiv 2404.14469)"
_SNAPKV_MEASURED = "LWM-Text-Chat-1M (7B) under transformers, on an A100 with 80 GB; ours: docs/reproduced.md"

PRESETS = (
    Preset(
        "h2o",
        "keeps recent tokens and those with the most attention; holes stay",
        _LAYOUT,
        _NONE,
        _NEVER,
        "gather",
        _KEYS,
        _H2O,
        _h2o,
        group="papers",
        against="paged",
        measured=_H2O_MEASURED,
    ),
    Preset(
        "h2o-compacted",
        "h2o, with the tokens of sparse blocks copied together",
        _LAYOUT,
        _HOLES,
        _WHEN,
        "gather",
        (*_KEYS, "threshold"),
        f"{_H2O}; the moves are ours, much as KV-Compress's (arXiv 2410.00161)",
        partial(_h2o, compacts=True),
        group="papers",
        against="h2o",
        measured=_H2O_MEASURED,
    ),
    Preset(
        "h2o-refilled",
        "h2o, with new tokens in the holes of evicted ones, the fullest block first",
        _LAYOUT,
        _NONE,
        _NEVER,
        "gather",
        _KEYS,
        f"{_H2O}; holes filled with new tokens as vLLM issue 12254 proposes",
        partial(_h2o, refill=True),
        group="papers",
        against="h2o",
        measured=_H2O_MEASURED,
    ),
    Preset(
        "h2o-packed",
        "h2o, compacted behind the prompt, and then with new tokens in the holes of evicted ones",
        _LAYOUT,
        _HOLES,
        _WHEN,
        "gather",
        (*_KEYS, "threshold"),
        f"{_H2O}; both of the above together are ours",
        partial(_h2o, compacts=True, refill=True),
        group="papers",
        against="h2o",
        measured=_H2O_MEASURED,
    ),
    Preset(
        "h2o-blocks",
        "h2o by whole blocks, by their mean attention: no holes",
        "blocks from a free queue; whole blocks are evicted",
        _NONE,
        _NEVER,
        "gather",
        _KEYS,
        "OpenVINO GenAI's cache eviction (CacheEvictionConfig); PagedEviction (arXiv 2509.04377)",
        _h2o_blocks,
        group="papers",
        against="h2o",
        measured="PagedEviction: Llama 3.1 8B, 3.2 3B and 1B under vLLM; ours: docs/reproduced.md",
    ),
    Preset(
        "snapkv",
        "thins the prompt out once it is complete, in clusters; keeps the whole answer; holes stay",
        _LAYOUT,
        _NONE,
        _NEVER,
        "gather",
        _KEYS,
        _SNAPKV,
        _snapkv,
        group="papers",
        against="paged",
        measured=_SNAPKV_MEASURED,
    ),
    Preset(
        "snapkv-compacted",
        "snapkv, with the tokens of sparse blocks copied together",
        _LAYOUT,
        _HOLES,
        _WHEN,
        "gather",
        (*_KEYS, "threshold"),
        f"{_SNAPKV}; the moves are ours",
        partial(_snapkv, compacts=True),
        group="papers",
        against="snapkv",
        measured=_SNAPKV_MEASURED,
    ),
    Preset(
        "streaming-llm",
        "keeps the first tokens and the most recent ones, in blocks",
        _LAYOUT,
        _NONE,
        _NEVER,
        "gather",
        (*_KEYS, "sinks"),
        "Xiao et al., StreamingLLM (arXiv 2309.17453), without renumbering; `ring` renumbers",
        _streaming,
        group="papers",
        against="paged",
        measured="Llama 2 7B and 13B under transformers, on an A6000; ours: docs/reproduced.md",
    ),
)
"""In the order of tables."""
