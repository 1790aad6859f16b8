"""Layers of several kinds in one memory: Jenga, and what it is compared with."""

from __future__ import annotations

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


_PARAMETERS = ("block_size", "window", "full_layers", "window_layers", "prefix_cache", "watermark")
_MEASURED = (
    "Gemma 3, Llama 3.2 Vision, Ministral and others on one H100 or L4, vLLM before it had groups of layers; "
    "ours: docs/reproduced.md"
)

PRESETS = (
    Preset(
        "two-level-pages",
        "layers with full attention and with a window each in pages of their own, cut from large pages that they share",
        "large pages of the least common multiple, each of one kind of layer at a time; pages that a window has left "
        "are given up at once; a prefix is found up to where both kinds have what the next token sees",
        "gather",
        _PARAMETERS,
        "Zhang et al., Jenga (SOSP 2025, arXiv 2503.18292)",
        _two_level,
        group="papers",
        against="uniform-pages",
        measured=_MEASURED,
    ),
    Preset(
        "layer-groups",
        "layers in groups of equal size, whose equal blocks come from one pool",
        "like two-level-pages, but a block of every group has the size of the smallest kind of layer's",
        "gather",
        _PARAMETERS,
        "vLLM 0.33.0, HybridKVCacheCoordinator and _get_kv_cache_groups_uniform_page_size (pull request 17996)",
        _equal,
        group="papers",
        against="uniform-pages",
        measured=_MEASURED,
    ),
    Preset(
        "uniform-pages",
        "all layers keep all tokens in the same blocks, though those with a window read no more than that",
        "like paged, with the reads of two-level-pages: what both are compared with",
        "gather",
        _PARAMETERS,
        "vLLM issue 11382, and vLLM with --disable-hybrid-kv-cache-manager",
        _uniform,
        group="papers",
        against="paged",
        measured=_MEASURED,
    ),
)
"""In the order of docs/reproduced.md."""
