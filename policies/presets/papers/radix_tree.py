"""The radix tree of SGLang: prefixes are found token by token, and leaves are evicted first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


@dataclass(frozen=True, slots=True)
class NoOptions:
    """All is as the paper has it."""


def _radix_tree(name: str, config: CacheConfig) -> Policy:
    """Blocks of one cell, each found by a key that is chained to the one before it: a tree, token by token.

    What it finds and evicts is what SGLang's ``RadixCache`` does with pages of one token: a sequence gives its blocks
    back last first, so that a block is never older than those behind it, and the oldest one is always the end of a
    leaf. Three things differ: that tree evicts a leaf as a whole, even if fewer cells are needed; it finds what a
    prompt computes only when that has been computed, so that prompts of the same step do not share; and looking up a
    request that waits counts as a use.
    """
    from policies.layouts.paged import PagedPolicy
    from policies.paging.eviction import free_blocks

    config.read(NoOptions)
    return PagedPolicy(
        name,
        config.without_options(),
        block_size=1,
        free=partial(free_blocks, "lru"),
        prefix_cache=True,
    )


PRESETS = (
    Preset(
        "radix-tree",
        "prefixes found token by token, in blocks of one cell; the least recently used leaf is evicted first",
        "blocks of one cell from a free queue, cell 0 never handed out; shared by sequences that begin alike",
        "gather",
        (),
        "Zheng et al., SGLang (arXiv 2312.07104): RadixAttention; RadixCache of SGLang, page of one token",
        _radix_tree,
        group="papers",
        against="vllm",
        measured="Llama 2 7B on an A10G: MMLU, HellaSwag, agents, tree of thought, chat; ours: docs/reproduced.md",
    ),
)
"""For the section "Radix tree" of docs/reproduced.md."""
