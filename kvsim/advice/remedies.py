"""What to try against each cause of slowness."""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """One thing to try."""

    what: str
    kvsim: str
    """A command, in which ``{scenario}`` stands for what was asked about, or keys of the scenario to change."""
    engine: str
    """The same in llama-server and vLLM."""


REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "queueing": (
        Remedy(
            "more requests at once, if there is room for their tokens",
            "server.slots, twice as many, and cache.cells",
            "llama-server --parallel N --ctx-size N; vLLM --max-num-seqs N",
        ),
        Remedy(
            "a policy whose passes take less time, so that slots are free sooner",
            "kvsim compare {scenario}",
            "see the layouts that the comparison favours",
        ),
        Remedy("fewer arrivals at one server: another one beside it", "workload.rate, half of it", "a second instance"),
    ),
    "cells": (
        Remedy(
            "more cells: a slot was free, but the cache had no room",
            "cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --gpu-memory-utilization X or --num-gpu-blocks-override N",
        ),
        Remedy(
            "narrower K and V, so that the same memory has more cells (measure it)",
            'cache.type_k = "q8_0" and cache.type_v = "q8_0", with cache.cells accordingly',
            "llama-server --cache-type-k q8_0 --cache-type-v q8_0; vLLM --kv-cache-dtype fp8",
        ),
        Remedy(
            "a smaller limit for each request, so that less room is set aside for it",
            "server.slot_context, half of it",
            "llama-server --ctx-size N --parallel M (N / M each); vLLM --max-model-len N",
        ),
        Remedy(
            "paging, which sets aside only what is used",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            "vLLM as it is; llama-server --kv-unified",
        ),
    ),
    "own": (
        Remedy(
            "these requests are longer: limit what they may ask for and be answered",
            "workload.output_tokens, workload.prompt_tokens",
            "llama-server --n-predict N; vLLM max_tokens in the request",
        ),
        Remedy("a faster machine or a smaller model", "kvsim compare {scenario} --profile FILE", "more --threads"),
    ),
    "batch": (
        Remedy(
            "fewer requests at once",
            "server.slots, half as many",
            "llama-server --parallel N; vLLM --max-num-seqs N",
        ),
        Remedy(
            "smaller pieces of prompts beside those who generate",
            "server.n_batch, half of it; server.long_prefill_threshold under vllm",
            "llama-server --batch-size N --ubatch-size N; vLLM --max-num-batched-tokens N "
            "--long-prefill-token-threshold N",
        ),
    ),
    "context": (
        Remedy(
            "shorter contexts: a smaller limit, or a window",
            "kvsim compare {scenario} -p ring -p sliding-window",
            "llama-server --ctx-size N, --context-shift; vLLM --max-model-len N",
        ),
        Remedy(
            "narrower K and V, so that reading them takes less time (measure it)",
            "kvsim calibrate --cache-type-k q8_0 --cache-type-v q8_0",
            "llama-server --cache-type-k q8_0 --cache-type-v q8_0; vLLM --kv-cache-dtype fp8",
        ),
    ),
    "holes": (
        Remedy(
            "attention that skips what is not the sequence's own",
            "kvsim compare {scenario} -p paged -p streams -p prompt-decode-regions",
            "llama-server --flash-attn on, --no-kv-unified; vLLM as it is",
        ),
        Remedy(
            "a smaller span: pack the cells, or empty the slots that have ended",
            "kvsim compare {scenario} -p full-compaction -p adaptive; server.keep_idle_slots = false",
            "llama.cpp up to b6244: --defrag-thold 0.1; a smaller --ctx-size",
        ),
    ),
    "compaction": (
        Remedy(
            "compact less often, or weigh each compaction against what it saves",
            "cache.threshold, twice as high; kvsim compare {scenario} -p adaptive -p idle-compaction",
            "llama.cpp up to b6244: a higher --defrag-thold, or -1",
        ),
        Remedy(
            "a layout that never moves",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            "llama.cpp since b6975; vLLM",
        ),
    ),
    "failures": (
        Remedy(
            "a layout that uses any free cell",
            "kvsim compare {scenario} -p llama.cpp-b6975 -p paged",
            "llama.cpp since b6975 instead of an earlier one; vLLM",
        ),
        Remedy(
            "more room, or fewer requests at once",
            "cache.cells, twice as many; server.slots, half as many",
            "llama-server --ctx-size N --parallel N; vLLM --gpu-memory-utilization X --max-num-seqs N",
        ),
    ),
    "prefix": (
        Remedy(
            "a prefix cache, and one that is large enough",
            "kvsim prefix-cache {scenario}; kvsim compare {scenario} -p paged",
            "vLLM --enable-prefix-caching; llama-server --cache-reuse N --slot-prompt-similarity X",
        ),
        Remedy(
            "more cells, so that prefixes stay until they are asked for again",
            "cache.prefix_cache = true; cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --gpu-memory-utilization X",
        ),
        Remedy(
            "slots that keep what they held, and are chosen by what they share with the prompt",
            "server.keep_idle_slots = true; server.slot_similarity, half of it",
            "llama-server --cache-prompt --slot-prompt-similarity X --cache-reuse N",
        ),
    ),
    "transfers": (
        Remedy(
            "bring back ahead of use what was put on the host, or keep more of it in the cache",
            'server.prefetch = "on-resume"; cache.cells, twice as many',
            "more memory for the cache: --ctx-size N; vLLM --gpu-memory-utilization X",
        ),
    ),
    "machine": (
        Remedy(
            "see what else runs on these cores, and measure again without it",
            "kvsim validate {scenario} --repeat 5",
            "no more --threads than there are free cores; taskset, nice",
        ),
    ),
}
"""By cause; the first is the first to try."""

FAILURES: dict[str, tuple[Remedy, ...]] = {
    "room": (
        Remedy(
            "more cells: requests failed because the cache was full",
            "cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --gpu-memory-utilization X or --num-gpu-blocks-override N",
        ),
        Remedy(
            "fewer or shorter slots, so that all of them fit into the cache",
            "server.slots, half as many; server.slot_context, half of it",
            "llama-server --parallel N --ctx-size N; vLLM --max-num-seqs N --max-model-len N",
        ),
        Remedy(
            "a policy that pages or compacts, so that no free cell is out of reach",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975 -p full-compaction",
            "llama.cpp since b6975; vLLM, which lets requests wait instead",
        ),
    ),
    "context": (
        Remedy(
            "longer slots: prompts were refused that exceed them",
            "server.slot_context, twice as many; cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --max-model-len N",
        ),
        Remedy(
            "fewer slots, each with more of the cache",
            "server.slots, half as many",
            "llama-server --parallel N; vLLM --max-num-seqs N",
        ),
    ),
    "batch": (
        Remedy(
            "prompts in pieces, or a larger batch",
            "server.chunked_prefill = true; server.n_batch, twice as many",
            "vLLM --enable-chunked-prefill or --max-num-batched-tokens N",
        ),
    ),
}
"""Against requests that fail; the first is the first to try."""


def failure_kind(error: str) -> str:
    """Which of ``FAILURES`` an error's text speaks of."""
    if "available context size" in error or "longest sequence" in error:
        return "context"
    return "batch" if "exceed n_batch" in error else "room"
