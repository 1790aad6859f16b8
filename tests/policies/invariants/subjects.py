"""The policies that the machine runs, what is expected of each, and the settings and texts that are drawn."""

from dataclasses import replace
from functools import partial

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from policies import EVICTIONS, CacheConfig, Content, available
from policies.cells.region_search import SEARCHES
from policies.layouts.llamacpp import mid_2025, today
from policies.layouts.multi_stream import CacheSpec, StreamOptions
from policies.layouts.paged import PagedOptions, PagedPolicy
from policies.layouts.unified import ArenaOptions
from policies.paging.cache_groups import GroupSpec
from policies.paging.eviction import free_blocks
from policies.presets.papers.token_eviction import PRESETS as TOKEN_EVICTION

SETTINGS = settings(
    derandomize=True,
    deadline=None,
    stateful_step_count=30,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
KEEP_WHAT_WAS_PLACED = {"llama.cpp-b4666"}
"""Where a step that finds no room keeps the micro-batches that had found theirs, as the original did."""
RESERVE_AHEAD = {"hf-reserved", "oracle", "ring", "first-fit", "next-fit", "buddy", "slab"}
"""Where an admitted sequence always finds room."""
TAKE_ANY_ROOM = {"contiguous", "llama.cpp-b4666", "prompt-decode-regions"}
"""Where one micro-batch finds room exactly if ``usage().placeable`` says so."""
PACK_EVERYTHING = {"full-compaction", "adaptive", "threshold-compaction", "idle-compaction"}


def mid_2025_with_defragmentation(config):
    cache = [CacheSpec(config.cells, 32)]
    return mid_2025("mid-2025", config, cache, threshold=config.read(ArenaOptions).threshold, max_nodes=1024)


def tight_sliding_window(config):
    """A window cache with hardly more cells than one window, so that they are used again and again."""
    options = config.read(StreamOptions)
    streams = 1 if options.unified else config.sequences
    size = config.cells // streams
    window = min(size, options.window * (config.sequences if options.unified else 1) + config.n_ubatch)
    caches = [CacheSpec(size, 32, share=0.5), CacheSpec(window, 32, window=options.window, share=0.5)]
    return today("tight sliding-window", config, caches, n_streams=streams)


def window_with_tails_only(config):
    """A paged window in which only the end of each prompt is found again."""
    lru = partial(free_blocks, "lru")
    return PagedPolicy(
        "tails only",
        config,
        block_size=4,
        free=lru,
        prefix_cache=True,
        window=config.read(PagedOptions).window,
        tail_only=True,
    )


def paged_over_a_host_tier(config):
    """So few blocks that the tier is much in use."""
    host_cells = config.read(PagedOptions).host_cells or 64
    config = replace(config.with_options(host_cells=host_cells, prefix_cache=True), cells=min(config.cells, 48))
    return available()["paged"](config)


def grouped(*groups, retention=-1, drafts=0):
    """vLLM with these groups of layers, and so many tokens that MTP drafts."""

    def build(config):
        options = {"groups": groups, "retention": retention, "host_cells": 0}
        options |= {"draft_tokens": drafts, "lookahead": drafts, "key_lookahead": int(drafts > 0)}
        config = replace(config.with_options(**options), cells=max(config.cells, 64))
        return available()["vllm"](config)

    return build


_FULL, _STATE = GroupSpec("full", 4), GroupSpec("state", 4)
GROUPED = {
    "vllm full, window": grouped(_FULL, GroupSpec("window", 4, 10), GroupSpec("window", 4, 10), retention=0),
    "vllm uneven": grouped(GroupSpec("window", 8, 12), GroupSpec("latent", 4)),
    "vllm full, state": grouped(_FULL, _STATE),
    "vllm checkpoints": grouped(_FULL, GroupSpec("state", 4, checkpoint_grid=1), GroupSpec("window", 4, 9)),
    "vllm full, chunked": grouped(_FULL, GroupSpec("chunked", 4, 16)),
    "vllm drafts": grouped(_FULL, _STATE, GroupSpec("window", 4, 9), drafts=2),
}
POLICIES = (
    available()
    | GROUPED
    | {
        "mid-2025": mid_2025_with_defragmentation,
        "tight sliding-window": tight_sliding_window,
        "tails only": window_with_tails_only,
        "host tier": paged_over_a_host_tier,
    }
)
_MANY = {"no room", "preempted before written"}
MUST_BE_SEEN = {name: _MANY | {"hit", "copied on write"} for name in ("paged", "vllm", "paged-window", "tails only")}
MUST_BE_SEEN |= {name: _MANY | {"hit", "drafts rejected"} for name in GROUPED}
MUST_BE_SEEN["radix-tree"] = _MANY | {"hit"}
MUST_BE_SEEN |= {name: _MANY | {"hit"} for name in ("two-level-pages", "layer-groups", "uniform-pages")}
MUST_BE_SEEN["expected-length"] = MUST_BE_SEEN["no-evict"] = {"hit"}
MUST_BE_SEEN["chunked"] = _MANY | {"copied on write"}
MUST_BE_SEEN["vattention"] = _MANY
MUST_BE_SEEN |= {preset.name: {"no room", "evicted"} for preset in TOKEN_EVICTION}
MUST_BE_SEEN |= {
    name: {"no room", "evicted", "compacted"} for name in ("h2o-compacted", "h2o-packed", "snapkv-compacted")
}
MUST_BE_SEEN["host tier"] = _MANY | {"hit", "hit in the host tier", "imported", "reserve refused"}
"""Situations that the machine must have met with a policy."""

VARIANTS = {"no-evict", "expected-length", "layer-groups", "uniform-pages", *list(GROUPED)[1:]} | {
    preset.name for preset in TOKEN_EVICTION if preset.name not in ("h2o", "h2o-packed")
}
"""Those that differ from another one in a parameter or two; they are tried less often."""

TEXTS = (
    ((0, 0, 64),),
    ((0, 0, 12), (1, 0, 52)),
    ((0, 0, 12), (2, 0, 52)),
    ((0, 0, 10), (1, 0, 54)),
    ((0, 0, 24), (2, 12, 40)),
    ((1, 0, 64),),
    ((3, 0, 8), (0, 8, 56)),
)
"""Prompts: segments of texts 0 to 3. The last has the first one's tokens behind another beginning."""
PROMPTS = st.sampled_from([*TEXTS, ()])


def expected_requests():
    """The future that a clairvoyant cache is told, which does not come true in every detail."""
    texts = [(Content(text), prompt) for prompt in (13, 34, 21) for text in TEXTS]
    return [(number, *each) for number, each in enumerate(texts)]


CONFIGS = st.builds(
    CacheConfig,
    cells=st.integers(32, 160),
    n_ubatch=st.integers(4, 32),
    sequences=st.integers(2, 6),
    max_tokens=st.integers(16, 64),
    block_size=st.just(4),
    chunk_size=st.just(8),
    page_tokens=st.sampled_from([4, 8]),
    pad=st.sampled_from([1, 8, 32]),
    kernel=st.sampled_from([None, "masked", "tiled", "gather", "sliced"]),
    threshold=st.sampled_from([0.0, 0.1, 0.5]),
    window=st.integers(8, 24),
    full_layers=st.sampled_from([1, 2]),
    window_layers=st.sampled_from([5, 1, 3]),
    sinks=st.integers(0, 3),
    budget=st.sampled_from([6, 12, 20]),
    budget_groups=st.sampled_from([1, 1, 3]),
    unified=st.booleans(),
    search=st.sampled_from([None, None, *SEARCHES]),
    sort_batch=st.booleans(),
    prefix_cache=st.sampled_from([True, True, True, False]),
    eviction=st.sampled_from(EVICTIONS),
    free_order=st.sampled_from(["0.33.0", "0.22.1"]),
    watermark=st.sampled_from([0.0, 0.1]),
    host_cells=st.sampled_from([0, 16, 64]),
    future=st.just(expected_requests),
    for_any_layout=st.just(True),
)
SEQUENCES = st.integers(0, 5)
SHARES = st.sampled_from([0.5, 0.0, 0.2, 0.8, 0.99])
"""Where in a sequence to cut, as a share of its length."""
TOKENS = st.sampled_from([13, 1, 2, 5, 8, 21, 34, 48])


class FakeEntryPoint:
    """What an installed package would register."""

    module, dist = __name__, None

    def __init__(self, name, factory):
        self.name, self.load = name, lambda: factory
