"""The presets of what engines do, and of our own ideas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset

if TYPE_CHECKING:
    from policies.layouts.paged import PagedOptions
    from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
    from policies.paging.host_chunks import HostChunks

_B6975_PAD = 256
"""Multiple of cells to which llama.cpp pads the attended span since b6975."""


def _plain(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.unified import UnifiedPolicy

    return UnifiedPolicy(name, config)


def _fill_holes(name: str, config: CacheConfig) -> Policy:
    from policies.compaction.triggers import OnFailure
    from policies.layouts import llamacpp
    from policies.layouts.unified import ArenaOptions, UnifiedPolicy

    compactor = llamacpp.limited_fill_holes(8192, config.read(ArenaOptions).n_layers)
    return UnifiedPolicy(name, config, compactor=compactor, trigger=OnFailure())


def _packed(name: str, config: CacheConfig) -> Policy:
    from policies.compaction.compactors import pack
    from policies.compaction.triggers import OnFailure
    from policies.layouts.unified import UnifiedPolicy

    return UnifiedPolicy(name, config, compactor=pack, trigger=OnFailure())


def _adaptive(name: str, config: CacheConfig) -> Policy:
    from policies.compaction.compactors import pack
    from policies.compaction.triggers import Adaptive
    from policies.layouts.unified import ArenaOptions, UnifiedPolicy

    return UnifiedPolicy(name, config, compactor=pack, trigger=Adaptive(config.read(ArenaOptions).costs))


def _idle(name: str, config: CacheConfig) -> Policy:
    from policies.compaction.compactors import pack
    from policies.compaction.triggers import Idle
    from policies.layouts.unified import UnifiedPolicy

    return UnifiedPolicy(name, config, compactor=pack, trigger=Idle())


def _threshold(name: str, config: CacheConfig) -> Policy:
    from policies.compaction.compactors import pack
    from policies.compaction.triggers import Threshold
    from policies.layouts.unified import ArenaOptions, UnifiedPolicy

    trigger = Threshold(config.read(ArenaOptions).threshold, on_failure=True)
    return UnifiedPolicy(name, config, compactor=pack, trigger=trigger)


def _llamacpp_b4666(name: str, config: CacheConfig) -> Policy:
    from policies.layouts import llamacpp
    from policies.layouts.unified import ArenaOptions

    return llamacpp.early_2025(name, config, threshold=config.read(ArenaOptions).threshold)


def _streams(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy, StreamOptions

    config.read(StreamOptions)
    size = config.cells // config.sequences
    if size < 1:
        raise ValueError(f"{config.cells} cells cannot be shared out over {config.sequences} streams")
    return MultiStreamPolicy(
        name, config, [CacheSpec(size, min(_B6975_PAD, size))], n_streams=config.sequences, kernel="tiled"
    )


def _llamacpp_b6975(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy, StreamOptions

    if not config.read(StreamOptions).unified:
        return _streams(name, config)
    return MultiStreamPolicy(name, config, [CacheSpec(config.cells, _B6975_PAD)], kernel="tiled")


def _sliding_window(name: str, config: CacheConfig) -> Policy:
    from policies.layouts import llamacpp
    from policies.layouts.multi_stream import StreamOptions

    return llamacpp.with_windows(name, config, config.read(StreamOptions))


def _hybrid(name: str, config: CacheConfig) -> Policy:
    from policies.layouts import llamacpp
    from policies.layouts.multi_stream import StreamOptions

    return llamacpp.with_states(name, config, config.read(StreamOptions))


def paged(name: str, config: CacheConfig, *, window: bool = False, offloads: bool = False) -> Policy:
    """Blocks with the free list, prefix cache and admission rule that options name, and perhaps their window.

    ``offloads``: what host memory there is holds chunks that are copied beside the steps.
    """
    from policies.layouts.paged import PagedOptions, PagedPolicy
    from policies.paging.eviction import free_blocks
    from policies.paging.free_lists.belady import Future

    options, future = config.read(PagedOptions), None
    if options.eviction == "belady" and options.future is not None:
        size = options.block_size
        future = Future(
            (number, content.keys(size, (prompt - 1) // size)) for number, content, prompt in options.future()
        )
    plain = not options.prefix_cache and options.eviction == "lru" and options.free_order == "0.33.0"
    return PagedPolicy(
        name,
        config,
        block_size=options.block_size,
        free=_stack if plain else partial(free_blocks, options.eviction, order=options.free_order, future=future),
        prefix_cache=options.prefix_cache,
        window=options.window if window else None,
        future=future,
        chunks=_chunks(options) if offloads else None,
    )


def _chunks(options: PagedOptions) -> HostChunks | None:
    from policies.paging.disk_chunks import TieredChunks
    from policies.paging.host_chunks import HostChunks

    per_chunk, order, threshold = options.offload_blocks, options.offload_order, options.offload_store_threshold
    sizes = {"host": options.host_cells, "disk": options.disk_cells}
    n, files = (cells // (options.block_size * per_chunk) for cells in sizes.values())
    for tier, cells in sizes.items():
        if 0 < cells < options.block_size * per_chunk:
            raise ValueError(f"{cells} {tier} cells hold no chunk of {per_chunk} blocks")
    if files and threshold >= 2:
        raise ValueError("cache.offload_store_threshold: before a disk vLLM takes none; leave out one of them")
    if files and n:
        return TieredChunks(n, per_chunk, order, answers=options.offload_answers, most_files=files)
    return HostChunks(n, per_chunk, order, threshold, answers=options.offload_answers) if n else None


def _stack(blocks: Iterable[int], keys: BlockKeys) -> FreeBlocks:
    """The free blocks of ``lru`` where nothing is ever cached."""
    from policies.paging.free_lists.uncached import FreeStack

    return FreeStack(blocks)


def _paged_window(name: str, config: CacheConfig) -> Policy:
    return paged(name, config.with_options(host_cells=0), window=True)


def _vllm(name: str, config: CacheConfig) -> Policy:
    if config.options.get("groups"):
        from policies.layouts.hybrid_paged import HybridPagedPolicy

        return HybridPagedPolicy(name, config)
    return paged(name, config.with_options(eviction="lru", free_order="0.33.0", admission="as-it-fits"), offloads=True)


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Options of the chunked layout."""

    chunk_size: int = 64
    """Cells in a chunk."""


def _chunked(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.paged import PagedPolicy
    from policies.paging.free_lists.uncached import LowestFirst

    return PagedPolicy(
        name,
        config.without_options(),
        block_size=config.read(ChunkOptions).chunk_size,
        free=lambda blocks, _: LowestFirst(blocks),
        null_block=False,
    )


def _ring(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.ring import RingPolicy

    return RingPolicy(name, config)


def _reserved(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import ReservedPolicy

    return ReservedPolicy(name, config)


def _growing(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import GrowingPolicy

    return GrowingPolicy(name, config)


def _oracle(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config)


def _regions(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.prompt_decode_regions import PromptDecodeRegionsPolicy

    return PromptDecodeRegionsPolicy(name, config)


_BLOCKS = "blocks from a free queue, block 0 never handed out; full ones are shared by sequences that begin alike"
_RUN = "one run of cells for each micro-batch, first fit from a moving head"
_PAGED_KEYS = ("block_size", "prefix_cache", "eviction", "free_order", "watermark", "admission", "conservativeness")
_OFFLOAD_KEYS = (
    *("host_cells", "offload_order", "offload_blocks", "offload_store_threshold", "offload_answers", "disk_cells"),
)
_FULL = "full: everything packed to the low end, each sequence contiguous and in order"
_HOLES = "fill-holes: the last cells fill the holes below, a limited number of runs at a time"

STANDARD = (
    Preset(
        "contiguous",
        "one free extent for each micro-batch; nothing is ever moved",
        _RUN,
        "masked",
        ("pad",),
        "llama.cpp b4666 to b4880, llama_kv_cache_find_slot",
        _plain,
    ),
    Preset(
        "fill-holes",
        "contiguous; when a step finds no room, the last cells fill the holes below",
        _RUN,
        "masked",
        ("pad",),
        "llama.cpp's defragmentation (pull request 3228, rewritten in b2278)",
        _fill_holes,
        compactor=_HOLES,
        trigger="on failed allocation",
    ),
    Preset(
        "full-compaction",
        "contiguous; when a step finds no room, everything is packed to one end",
        _RUN,
        "masked",
        ("pad",),
        "llama.cpp issue 13497",
        _packed,
        compactor=_FULL,
        trigger="on failed allocation",
    ),
    Preset(
        "paged",
        "fixed blocks, a block table for each sequence, and a prefix cache of full blocks",
        _BLOCKS,
        "gather",
        (*_PAGED_KEYS, "host_cells"),
        "Kwon et al., PagedAttention (SOSP 2023); vLLM 0.33.0's KVCacheManager and BlockPool",
        paged,
    ),
    Preset(
        "ring",
        "a window of cells for each sequence, the oldest overwritten, the first tokens kept",
        "one region of `window` cells for each sequence, overwritten cyclically behind its `sinks`",
        "sliced",
        ("window", "sinks", "search"),
        "Xiao et al., attention sinks (arXiv 2309.17453)",
        _ring,
    ),
    Preset(
        "adaptive",
        "contiguous; packed whenever the attention saved should outweigh the moves",
        _RUN,
        "masked",
        ("pad",),
        "ours; the rule is in policies/compaction/triggers.py",
        _adaptive,
        compactor=_FULL,
        trigger="adaptive: predicted saving over a learned horizon against predicted cost; and on failed allocation",
    ),
    Preset(
        "llama.cpp-b4666",
        "llama.cpp b4666 to b4880, with defragmentation by threshold",
        _RUN + "; micro-batches that were placed stay placed when a later one finds no room",
        "masked",
        ("pad", "threshold"),
        "llama.cpp b4666 to b4880; defrag_thold 0.1 is its tools' default since b4065",
        _llamacpp_b4666,
        compactor=_HOLES,
        trigger="threshold on 1 - (used + pad) / span, for spans of 2,048 cells and more",
        engine="llama.cpp b4666",
    ),
    Preset(
        "llama.cpp-b6975",
        "llama.cpp since b6975: any free cells, nothing is ever moved",
        "scattered: any free cells, once round from a moving head; one cache, or one for each slot (`unified`)",
        "tiled",
        ("unified",),
        "llama.cpp since b6975, llama_kv_cache::find_slot",
        _llamacpp_b6975,
        engine="llama.cpp b6975",
    ),
    Preset(
        "streams",
        "an equal share of the cells for each slot, scattered within it",
        "like llama.cpp-b6975 without a unified cache",
        "tiled",
        (),
        "llama.cpp pull request 14363 (split KV cache, high-throughput mode)",
        _streams,
        engine="llama.cpp b6975",
    ),
    Preset(
        "sliding-window",
        "half of the layers see a window only, and keep it in a cache of their own",
        "scattered, in a full and a window cache side by side; cells that left the window are used again",
        "tiled",
        ("window", "unified"),
        "llama.cpp since b5554, llama_kv_cache_iswa (pull request 13194)",
        _sliding_window,
        engine="llama.cpp b6975",
    ),
    Preset(
        "hybrid",
        "a state of a fixed size in some layers, which cannot be rolled back, beside the attention of the others",
        "like llama.cpp-b6975 beside a state for each sequence; micro-batches of equally many tokens of each sequence",
        "tiled",
        ("unified",),
        "llama.cpp since b5756, llama_memory_hybrid and llama_memory_recurrent (pull request 13979)",
        _hybrid,
        engine="llama.cpp b6975",
    ),
    Preset(
        "hf-reserved",
        "room for the longest possible sequence, up front",
        "one region for each sequence, first fit: its slot's whole context, or its prompt and its client's limit",
        "sliced",
        ("search",),
        "Hugging Face transformers, StaticCache",
        _reserved,
    ),
    Preset(
        "growing",
        "one buffer for each sequence, doubled and copied when it is full",
        "one region for each sequence, a power of two, first fit",
        "sliced",
        ("search",),
        "dynamic caches that concatenate, with capacity doubled",
        _growing,
        compactor="none (growth copies)",
    ),
    Preset(
        "vllm",
        "paged as vLLM 0.33.0 has it, prefix cache and all",
        _BLOCKS,
        "gather",
        ("block_size", "prefix_cache", "watermark", "groups", "retention", *_OFFLOAD_KEYS),
        "vLLM 0.33.0, vllm/v1/core; recorded runs agree block by block",
        _vllm,
        engine="vLLM 0.33.0",
    ),
    Preset(
        "paged-window",
        "paged, for models whose layers all look back `window` tokens only",
        "blocks from a free queue; blocks that the window has left are given up at once",
        "gather",
        (*_PAGED_KEYS, "window"),
        "vLLM 0.33.0, SlidingWindowManager",
        _paged_window,
    ),
    Preset(
        "chunked",
        "a list of chunks for each sequence, none shared",
        "chunks of `chunk_size` cells, the lowest free one first",
        "gather",
        ("chunk_size",),
        "MLC-LLM's and TGI's per-sequence lists of chunks",
        _chunked,
    ),
    Preset(
        "prompt-decode-regions",
        "prompts from the low end, generated tokens from the high end",
        "prompts: the first run that fits, else the lowest free cells; generated tokens: the highest free cells",
        "tiled",
        ("sort_batch",),
        "ours",
        _regions,
    ),
    Preset(
        "threshold-compaction",
        "contiguous; packed whenever the fragmentation ratio exceeds a threshold",
        _RUN,
        "masked",
        ("pad", "threshold"),
        "llama.cpp b2422's ratio, issue 13497's target",
        _threshold,
        compactor=_FULL,
        trigger="threshold on 1 - used / span; and on failed allocation",
    ),
    Preset(
        "idle-compaction",
        "contiguous; packed while nothing waits or runs, a slice at a time",
        _RUN,
        "masked",
        ("pad",),
        "ours",
        _idle,
        compactor=_FULL,
        trigger="idle: an arrival cuts it short between two slices",
    ),
    Preset(
        "oracle",
        "knows every length in advance; never moves, never wastes: the bound for the others",
        "one region of just the sequence's final length, best fit",
        "sliced",
        ("search",),
        "ours, after Belady's idea of an offline optimum",
        _oracle,
    ),
)
"""In the order of tables; the six core ones come first."""
