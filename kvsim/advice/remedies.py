"""Remedies for each cause of slow requests, and for requests that fail."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.simulation.job import FailureKind


class Remedy(NamedTuple):
    """One remedy to try."""

    what: str
    kvsim: str
    """A kvsim command, where ``{scenario}`` stands for the scenario in question, or scenario keys to change."""
    engine: str
    """The corresponding options of llama-server and vLLM."""


REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "queueing": (
        Remedy(
            "serve more requests at once, if the cache has room for their tokens",
            "server.slots and cache.cells, twice as many",
            "llama-server --parallel N --ctx-size N; vLLM --max-num-seqs N",
        ),
        Remedy(
            "choose a policy whose passes take less time, so that slots become free sooner",
            "kvsim compare {scenario}",
            "an engine with the layout that the comparison favours",
        ),
        Remedy("add a second server, which halves the arrivals", "workload.rate, halved", "a second instance"),
    ),
    "cells": (
        Remedy(
            "add cells: slots were free, but the cache was full",
            "cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --gpu-memory-utilization X or --num-gpu-blocks-override N",
        ),
        Remedy(
            "store K and V in narrower types, so that the same memory holds more cells (measure the effect)",
            'cache.type_k = "q8_0" and cache.type_v = "q8_0", with more cache.cells',
            "llama-server --cache-type-k q8_0 --cache-type-v q8_0; vLLM --kv-cache-dtype fp8",
        ),
        Remedy(
            "lower the context limit of a request, so that less memory is reserved for it",
            "server.slot_context, halved",
            "llama-server --ctx-size N --parallel M (N / M each); vLLM --max-model-len N",
        ),
        Remedy(
            "use paging, which reserves only what is used",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            "vLLM by default; llama-server --kv-unified",
        ),
    ),
    "own": (
        Remedy(
            "limit the length of prompts and outputs: the slow requests are longer",
            "workload.output_tokens, workload.prompt_tokens",
            "llama-server --n-predict N; vLLM max_tokens in the request",
        ),
        Remedy("use a faster machine or a smaller model", "kvsim compare {scenario} --profile FILE", "more --threads"),
    ),
    "batch": (
        Remedy(
            "serve fewer requests at once",
            "server.slots, half as many",
            "llama-server --parallel N; vLLM --max-num-seqs N",
        ),
        Remedy(
            "use smaller prefill chunks, which delay decoding requests less",
            "server.n_batch, halved; server.long_prefill_threshold under vllm",
            "llama-server --batch-size N --ubatch-size N; vLLM --max-num-batched-tokens N "
            "--long-prefill-token-threshold N",
        ),
    ),
    "context": (
        Remedy(
            "shorten contexts by a lower limit or a sliding window",
            "kvsim compare {scenario} -p ring -p sliding-window",
            "llama-server --ctx-size N, --context-shift; vLLM --max-model-len N",
        ),
        Remedy(
            "store K and V in narrower types, which are faster to read (measure the effect)",
            "kvsim calibrate --cache-type-k q8_0 --cache-type-v q8_0",
            "llama-server --cache-type-k q8_0 --cache-type-v q8_0; vLLM --kv-cache-dtype fp8",
        ),
    ),
    "holes": (
        Remedy(
            "use a layout whose attention skips the cells of other sequences",
            "kvsim compare {scenario} -p paged -p streams -p prompt-decode-regions",
            "llama-server --flash-attn on, --no-kv-unified; vLLM by default",
        ),
        Remedy(
            "reduce the span of used cells: compact them, or empty idle slots",
            "kvsim compare {scenario} -p full-compaction -p adaptive; server.keep_idle_slots = false",
            "llama.cpp up to b6244: --defrag-thold 0.1; a smaller --ctx-size",
        ),
    ),
    "compaction": (
        Remedy(
            "compact less often, or only when it saves more than it costs",
            "cache.threshold, twice as high; kvsim compare {scenario} -p adaptive -p idle-compaction",
            "llama.cpp up to b6244: a higher --defrag-thold, or -1",
        ),
        Remedy(
            "use a layout that needs no compaction",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            "llama.cpp since b6975; vLLM",
        ),
    ),
    "failures": (
        Remedy(
            "use a layout that can use any free cell",
            "kvsim compare {scenario} -p llama.cpp-b6975 -p paged",
            "llama.cpp since b6975; vLLM",
        ),
        Remedy(
            "add cells, or serve fewer requests at once",
            "cache.cells, twice as many; server.slots, half as many",
            "llama-server --ctx-size N --parallel N; vLLM --gpu-memory-utilization X --max-num-seqs N",
        ),
    ),
    "prefix": (
        Remedy(
            "use a prefix cache that is large enough",
            "kvsim prefix-cache {scenario}; kvsim compare {scenario} -p paged",
            "vLLM --enable-prefix-caching; llama-server --cache-reuse N --slot-prompt-similarity X",
        ),
        Remedy(
            "add cells, so that prefixes stay cached until they are needed again",
            "cache.prefix_cache = true; cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --gpu-memory-utilization X",
        ),
        Remedy(
            "let idle slots keep their cells, and choose slots by their common prefix with the prompt",
            "server.keep_idle_slots = true; server.slot_similarity, halved",
            "llama-server --cache-prompt --slot-prompt-similarity X --cache-reuse N",
        ),
    ),
    "transfers": (
        Remedy(
            "prefetch blocks from the host tier before they are needed, or keep more of them in the cache",
            'server.prefetch = "on-resume"; cache.cells, twice as many',
            "a larger cache: llama-server --ctx-size N; vLLM --gpu-memory-utilization X",
        ),
    ),
    "machine": (
        Remedy(
            "find out what else runs on these cores, stop it, and measure again",
            "kvsim validate {scenario} --repeat 5",
            "no more --threads than there are free cores; taskset, nice",
        ),
    ),
}
"""Remedies by cause, the most promising first."""

_MORE_ROOM = (
    Remedy(
        "add cells: requests failed because the cache was full",
        "cache.cells, twice as many",
        "llama-server --ctx-size N; vLLM --gpu-memory-utilization X or --num-gpu-blocks-override N",
    ),
    Remedy(
        "use fewer or shorter slots, so that all of them fit into the cache",
        "server.slots, half as many; server.slot_context, halved",
        "llama-server --parallel N --ctx-size N; vLLM --max-num-seqs N --max-model-len N",
    ),
    Remedy(
        "use a policy with paging or compaction, so that every free cell can be used",
        "kvsim compare {scenario} -p paged -p llama.cpp-b6975 -p full-compaction",
        "llama.cpp since b6975; vLLM, where requests wait instead of failing",
    ),
)

FAILURES: dict[FailureKind, tuple[Remedy, ...]] = {
    FailureKind.NO_SLOT: _MORE_ROOM,
    FailureKind.CACHE: _MORE_ROOM,
    FailureKind.CONTEXT: (
        Remedy(
            "raise the context limit of a slot: longer prompts were refused",
            "server.slot_context, doubled; cache.cells, twice as many",
            "llama-server --ctx-size N; vLLM --max-model-len N",
        ),
        Remedy(
            "use fewer slots, each with more of the cache",
            "server.slots, half as many",
            "llama-server --parallel N; vLLM --max-num-seqs N",
        ),
    ),
    FailureKind.BATCH: (
        Remedy(
            "use chunked prefill, or a larger batch",
            "server.chunked_prefill = true; server.n_batch, doubled",
            "vLLM --enable-chunked-prefill or --max-num-batched-tokens N",
        ),
    ),
}
"""Remedies for failed requests by the kind of failure, the most promising first."""
