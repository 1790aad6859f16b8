"""The caches of llama.cpp as its builds have them, era by era."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from policies.compaction.compactors import FillHoles
from policies.compaction.triggers import Threshold
from policies.layouts.hybrid import HybridPolicy
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy, StreamOptions
from policies.layouts.unified import ArenaOptions, UnifiedPolicy
from policies.policy import CacheConfig

_PAD = 256
"""Multiple of cells to which llama.cpp pads the attended span since b6975."""


def run_limit(max_nodes: int, n_layers: int) -> int:
    """Runs that one defragmentation may move: what fits into a graph of ``max_nodes`` nodes."""
    return (max_nodes - 2 * n_layers) // (6 * n_layers)


def limited_fill_holes(max_nodes: int, n_layers: int) -> FillHoles:
    """llama.cpp's defragmentation with its limit of runs."""
    return FillHoles(run_limit(max_nodes, n_layers))


def early_2025(name: str, config: CacheConfig, *, threshold: float, max_nodes: int = 8192) -> UnifiedPolicy:
    """The cache of b4666 to b4880: contiguous slots, fill-holes by threshold; partly placed steps stay placed."""
    return UnifiedPolicy(
        name,
        config,
        compactor=limited_fill_holes(max_nodes, config.read(ArenaOptions).n_layers),
        trigger=Threshold(threshold, "b4875"),
        keeps_partial=True,
    )


def mid_2025(
    name: str,
    config: CacheConfig,
    caches: Sequence[CacheSpec],
    *,
    threshold: float,
    max_nodes: int,
    n_streams: int = 1,
    contiguous: bool = True,
) -> MultiStreamPolicy:
    """The cache of b5589 to b6244: micro-batches planned ahead, fill-holes by threshold and when a step fails."""
    return MultiStreamPolicy(
        name,
        config,
        caches,
        n_streams=n_streams,
        contiguous=contiguous,
        compactor=limited_fill_holes(max_nodes, config.read(StreamOptions).n_layers),
        trigger=Threshold(threshold, "b6170", on_failure=True),
    )


today = partial(MultiStreamPolicy, contiguous=False)
"""The cache since b6975: scattered slots, streams, sliding windows; cells are never moved."""


def with_windows(name: str, config: CacheConfig, options: StreamOptions) -> HybridPolicy:
    """The cache of a model half of whose layers look back ``options.window`` tokens."""
    streams = 1 if options.unified else config.sequences
    size = config.cells // streams
    window = window_size(size, options.window, config.n_ubatch, config.sequences, unified=options.unified)
    caches = [
        CacheSpec(size, _PAD, share=0.5),
        CacheSpec(window, _PAD, window=options.window, share=0.5),
    ]
    return HybridPolicy(name, config, caches, n_streams=streams)


def with_states(name: str, config: CacheConfig, options: StreamOptions) -> HybridPolicy:
    """The cache of a model of which some layers have states."""
    streams = 1 if options.unified else config.sequences
    cache = CacheSpec(config.cells // streams, _PAD)
    return HybridPolicy(name, config, [cache], n_streams=streams, snapshots=options.snapshots)


def window_size(cells: int, window: int, n_ubatch: int, sequences: int, *, unified: bool) -> int:
    """Cells of one stream of the window cache beside a full one of ``cells`` (``llama_kv_cache_iswa``)."""
    need = min(cells, window * (sequences if unified else 1) + n_ubatch)
    return -(-need // 256) * 256
