"""Layers of several kinds in one memory: Jenga, and what it is compared with."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset

if TYPE_CHECKING:
    from policies.layouts.two_level import LayerGroup, PageKind


def _layers(config: CacheConfig) -> tuple[LayerGroup, LayerGroup]:
    """Layers with full attention, and those with a window, in the smallest numbers of this ratio."""
    from policies.layouts.two_level import LayerGroup, TwoLevelOptions

    options = config.read(TwoLevelOptions)
    common = gcd(options.full_layers, options.window_layers)
    return LayerGroup(options.full_layers // common), LayerGroup(options.window_layers // common, options.window)


def _two_level(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.two_level import PageKind, TwoLevelPolicy

    return TwoLevelPolicy(name, config, [PageKind((group,)) for group in _layers(config)])


def _uniform(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.two_level import PageKind, TwoLevelPolicy

    return TwoLevelPolicy(name, config, [PageKind(_layers(config))])


def _equal(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.two_level import TwoLevelPolicy

    few, many = sorted(group.layers for group in _layers(config))
    size = many if 2 * many < 3 * few else few
    return TwoLevelPolicy(name, config, [kind for group in _layers(config) for kind in _split(group, size)])


def _split(group: LayerGroup, size: int) -> list[PageKind]:
    """Kinds of page with room for ``size`` layers each, the last perhaps with padding."""
    from policies.layouts.two_level import PageKind

    whole, rest = divmod(group.layers, size)
    kinds = [PageKind((group._replace(layers=size),))] * whole
    return [*kinds, PageKind((group._replace(layers=rest),), size - rest)] if rest else kinds


_TWO_LEVEL = Preset(
    "two-level-pages",
    "layers with full attention and with a window each in pages of their own, cut from large pages that they share",
    "large pages of the least common multiple, each of one kind of layer at a time; pages that a window has left "
    "are given up at once; a prefix is found up to where both kinds have what the next token sees",
    "gather",
    ("block_size", "window", "full_layers", "window_layers", "prefix_cache", "watermark"),
    "Zhang et al., Jenga (SOSP 2025, arXiv 2503.18292)",
    _two_level,
    group="papers",
    against="uniform-pages",
    measured="Gemma 3, Llama 3.2 Vision, Ministral and others on one H100 or L4, vLLM before it had groups of layers; "
    "ours: docs/reproduced.md",
)

PRESETS = (
    _TWO_LEVEL,
    replace(
        _TWO_LEVEL,
        name="layer-groups",
        summary="layers in groups of equal size, whose equal blocks come from one pool",
        layout="like two-level-pages, but a block of every group has the size of the smallest kind of layer's",
        source="vLLM 0.33.0, HybridKVCacheCoordinator and _get_kv_cache_groups_uniform_page_size (pull request 17996)",
        build=_equal,
    ),
    replace(
        _TWO_LEVEL,
        name="uniform-pages",
        summary="all layers keep all tokens in the same blocks, though those with a window read no more than that",
        layout="like paged, with the reads of two-level-pages: what both are compared with",
        source="vLLM issue 11382, and vLLM with --disable-hybrid-kv-cache-manager",
        build=_uniform,
        against="paged",
    ),
)
"""In the order of docs/reproduced.md."""
