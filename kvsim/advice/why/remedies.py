"""Remedies for each cause of slow requests, and for requests that fail.

Builds of llama.cpp: ``--defrag-thold`` up to b6244 (pull request 15473), ``--kv-unified`` since b5913 (14363),
``--context-shift`` since b6206 (before, ``--no-context-shift``), a value for ``--flash-attn`` since pull request 15434,
``--cache-ram`` since 16391 (October 2025), ``--no-cache-idle-slots`` since 2026 (20993, first as ``--no-clear-idle``).
"""

from __future__ import annotations

from typing import NamedTuple

from kvsim.advice.memory.engine_flags import COMMANDS
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.model.engine_versions import (
    KV_UNIFIED_SINCE,
    LLAMACPP_B6975,
    PRESENT,
    VLLM_0_33_0,
    EngineName,
    EngineVersion,
)
from kvsim.scenario.scenario import engine_version
from kvsim.simulation.job import FailureKind
from policies import Preset, available


class Option(NamedTuple):
    """Options of an engine that carry out a remedy, and the builds of llama.cpp that have all of them."""

    engine: EngineName
    text: str
    since: int = 0
    until: int | None = None
    year: int = 0
    """The year of the first builds that have them, where these are newer than the version that presets stand for."""
    cpu_only: bool = False
    """Whether they change nothing where a device computes."""

    @property
    def printed(self) -> str:
        """The options, and which builds have them where that must be said."""
        return f"{self.text} (builds since {self.year})" if self.year else self.text

    def exists_in(self, version: EngineVersion) -> bool:
        """Whether the version, or a newer one that is simulated in its name, has these options."""
        if self.engine != version.engine:
            return False
        if self.year:
            return version == PRESENT[self.engine]
        return self.since <= version.build and (self.until is None or version.build <= self.until)


class Remedy(NamedTuple):
    """One remedy to try."""

    what: str
    kvsim: str
    """A kvsim command, where ``{scenario}`` stands for the scenario in question, or scenario keys to change."""
    options: tuple[Option, ...] = ()
    versions: tuple[EngineVersion, ...] = ()
    """Versions of engines that have it without any option."""
    other: str = ""
    """What to do outside of kvsim, whatever the engine."""
    parameter: str = ""
    """The key of ``[cache]`` that the policy must use for the remedy to have an effect."""
    host_cache: bool | None = None
    """Whether it is one for llama-server's host cache, or for a layout's host tier; None where it is for neither."""
    states: bool | None = None
    """Whether it is one for blocks that mostly hold states, or for others; None where it is for both."""

    def suits(self, policy: str, host_cache: bool | None = None, *, states: bool = False) -> bool:
        """Whether it can change anything for a policy: the policy lacks it, and uses the key that it sets.

        ``host_cache``: whether the server used a host cache; None if that is not known. ``states``: whether requests
        mostly hold blocks of states.
        """
        if self.states not in (None, states):
            return False
        if self.host_cache is not None and host_cache is not None and self.host_cache != host_cache:
            return False
        preset = available().get(policy)
        if self.parameter and not (isinstance(preset, Preset) and self.parameter in preset.parameters):
            return False
        return engine_version(policy) not in self.versions

    def engine(self, policy: str) -> str:
        """The corresponding options of the engine that the policy stands for, of all present ones if it is of none.

        Followed by other versions that have it. Empty if there is neither.
        """
        own = engine_version(policy)
        versions = PRESENT.values() if own is None else (own,)
        texts = [
            f"{_COMMANDS[option.engine]} {option.printed}"
            for version in versions
            for option in self.options
            if option.exists_in(version)
        ]
        texts += [f"llama.cpp since {v.version}" if v.build else f"{v.engine} by default" for v in self.versions]
        return "; ".join([*texts, self.other] if self.other else texts)


_COMMANDS = {ENGINE_TITLES[engine]: command for engine, command in COMMANDS.items()}


def _llama(text: str, *, since: int = 0, until: int | None = None, year: int = 0) -> Option:
    return Option("llama.cpp", text, since, until, year)


def _vllm(text: str) -> Option:
    return Option("vLLM", text)


_NARROWER = (
    _llama("--cache-type-k q8_0 --cache-type-v q8_0", since=6975),
    _llama("--flash-attn --cache-type-k q8_0 --cache-type-v q8_0", until=6244),
    _vllm("--kv-cache-dtype fp8"),
)

REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "queueing": (
        Remedy(
            "serve more requests at once, if the cache has room for their tokens",
            "server.slots and cache.cells, twice as many",
            (_llama("--parallel N --ctx-size N"), _vllm("--max-num-seqs N")),
        ),
        Remedy(
            "choose a policy whose passes take less time, so that slots become free sooner",
            "kvsim compare {scenario}",
            other="an engine with the layout that the comparison favours",
        ),
        Remedy("add a second server, which halves the arrivals", "workload.rate, halved", other="a second instance"),
    ),
    "cells": (
        Remedy(
            "add cells: slots were free, but the cache was full",
            "cache.cells, twice as many",
            (_llama("--ctx-size N"), _vllm("--gpu-memory-utilization X or --num-gpu-blocks-override N")),
        ),
        Remedy(
            "store K and V in narrower types, so that the same memory holds more cells (measure the effect)",
            'cache.type_k = "q8_0" and cache.type_v = "q8_0", with more cache.cells',
            _NARROWER,
            states=False,
        ),
        Remedy(
            "store states in 16 bits where the model has them in 32: a request holds a block in each table, and blocks "
            "are then about half as large (measure the effect)",
            "kvsim plan --model MODEL --device DEVICE --engine vllm --mamba-ssm-cache-dtype float16",
            (_vllm("--mamba-ssm-cache-dtype float16"),),
            states=True,
        ),
        Remedy(
            "use no prefix cache if few prefixes are shared: requests longer than a block then hold fewer states",
            "cache.prefix_cache = false",
            (_vllm("--no-enable-prefix-caching"),),
            states=True,
        ),
        Remedy(
            "lower the context limit of a request, so that less memory is reserved for it",
            "server.slot_context, halved",
            (_llama("--ctx-size N --parallel M (N / M each)"), _vllm("--max-model-len N")),
            states=False,
        ),
        Remedy(
            "use paging, which reserves only what is used",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            (_llama("--kv-unified", since=KV_UNIFIED_SINCE),),
            versions=(VLLM_0_33_0,),
        ),
    ),
    "steps": (
        Remedy(
            "let a step have more tokens, so that prompts that wait fit into it",
            "server.n_batch, doubled",
            (_llama("--batch-size N --ubatch-size N"), _vllm("--max-num-batched-tokens N")),
        ),
        Remedy("add a second server, which halves the arrivals", "workload.rate, halved", other="a second instance"),
    ),
    "own": (
        Remedy(
            "limit the length of prompts and outputs: the slow requests are longer",
            "workload.output_tokens, workload.prompt_tokens",
            (_llama("--n-predict N"),),
            other="max_tokens in each request",
        ),
        Remedy(
            "use a faster machine or a smaller model",
            "kvsim compare {scenario} --profile FILE, or with --device and --model",
            (Option("llama.cpp", "--threads N", cpu_only=True),),
        ),
    ),
    "batch": (
        Remedy(
            "serve fewer requests at once",
            "server.slots, half as many",
            (_llama("--parallel N"), _vllm("--max-num-seqs N")),
        ),
        Remedy(
            "use smaller prefill chunks, which delay decoding requests less",
            "server.n_batch, halved; server.long_prefill_threshold under vllm",
            (
                _llama("--batch-size N --ubatch-size N"),
                _vllm("--max-num-batched-tokens N --long-prefill-token-threshold N"),
            ),
        ),
    ),
    "context": (
        Remedy(
            "shorten contexts by a lower limit or a sliding window",
            "kvsim compare {scenario} -p ring -p sliding-window",
            (
                _llama("--ctx-size N", until=6205),
                _llama("--ctx-size N, --context-shift", since=6206),
                _vllm("--max-model-len N"),
            ),
        ),
        Remedy(
            "store K and V in narrower types, which are faster to read (measure the effect)",
            "kvsim calibrate --cache-type-k q8_0 --cache-type-v q8_0",
            _NARROWER,
        ),
    ),
    "holes": (
        Remedy(
            "use a layout whose attention skips the cells of other sequences",
            "kvsim compare {scenario} -p paged -p streams -p prompt-decode-regions",
            (_llama("--flash-attn", until=6244), _llama("--flash-attn on, without --kv-unified", since=6975)),
            versions=(VLLM_0_33_0,),
        ),
        Remedy(
            "reduce the span of used cells: compact them, or empty idle slots",
            "kvsim compare {scenario} -p full-compaction -p adaptive; server.keep_idle_slots = false",
            (
                _llama("--defrag-thold X, lower; a smaller --ctx-size", until=6244),
                _llama("--ctx-size N, smaller", since=6245),
            ),
        ),
    ),
    "compaction": (
        Remedy(
            "compact less often, or only when it saves more than it costs",
            "cache.threshold, twice as high; kvsim compare {scenario} -p adaptive -p idle-compaction",
            (_llama("--defrag-thold X, higher, or -1", until=6244),),
        ),
        Remedy(
            "use a layout that needs no compaction",
            "kvsim compare {scenario} -p paged -p llama.cpp-b6975",
            versions=(LLAMACPP_B6975, VLLM_0_33_0),
        ),
    ),
    "failures": (
        Remedy(
            "use a layout that can use any free cell",
            "kvsim compare {scenario} -p llama.cpp-b6975 -p paged",
            versions=(LLAMACPP_B6975, VLLM_0_33_0),
        ),
        Remedy(
            "add cells, or serve fewer requests at once",
            "cache.cells, twice as many; server.slots, half as many",
            (_llama("--ctx-size N --parallel N"), _vllm("--gpu-memory-utilization X --max-num-seqs N")),
        ),
    ),
    "prefix": (
        Remedy(
            "use a prefix cache that is large enough",
            "kvsim prefix-cache {scenario}; kvsim compare {scenario} -p paged",
            (_llama("--cache-reuse N --slot-prompt-similarity X"), _vllm("--enable-prefix-caching")),
        ),
        Remedy(
            "add cells, so that prefixes stay cached until they are needed again",
            "cache.prefix_cache = true; cache.cells, twice as many",
            (_llama("--ctx-size N"), _vllm("--gpu-memory-utilization X")),
        ),
        Remedy(
            "keep what the cache evicts in host memory",
            "cache.host_cells, several times cache.cells",
            (_vllm("--kv-offloading-size GIB"),),
            parameter="host_cells",
        ),
        Remedy(
            "let idle slots keep what they hold, and give a slot away only for a prompt that goes on from it",
            "server.keep_idle_slots = true; server.slot_prompt_similarity = 0.9",
            (_llama("--slot-prompt-similarity X, higher"),),
        ),
    ),
    "transfers": (
        Remedy(
            "use no host cache, if computing prompts again takes less time than copying",
            "server.cache_ram = 0",
            (_llama("--cache-ram 0", since=6975),),
            host_cache=True,
        ),
        Remedy(
            "do not copy what idle slots hold whenever another request starts",
            "server.cache_idle_slots = false",
            (_llama("--no-cache-idle-slots", year=2026),),
            host_cache=True,
        ),
        Remedy(
            "ask for more similarity, so that a shared system prompt does not draw all users into one slot",
            "server.slot_prompt_similarity = 0.5",
            (_llama("--slot-prompt-similarity X, higher"),),
            host_cache=True,
        ),
        Remedy(
            "prefetch blocks from the host tier before they are needed, or keep more of them in the cache",
            'server.prefetch = "on-resume"; cache.cells, twice as many',
            (_llama("--ctx-size N"), _vllm("--gpu-memory-utilization X")),
            parameter="eviction",
            host_cache=False,
        ),
        Remedy(
            "keep more blocks in the cache, or no chunks in host memory, if computing them again takes less time",
            "cache.cells, twice as many; cache.host_cells = 0",
            (_vllm("--gpu-memory-utilization X, or without --kv-offloading-size"),),
            parameter="offload_order",
            host_cache=False,
        ),
    ),
    "mapping": (
        Remedy(
            "map fewer, larger pages, or use a block table, which maps none",
            "cache.page_tokens, four times as many; kvsim compare {scenario} -p paged",
            parameter="page_tokens",
        ),
    ),
    "drafting": (
        Remedy(
            "draft fewer tokens, or none while so many requests run",
            "kvsim compare {scenario} --draft-tokens 0,1,2,4",
            (
                _llama("--spec-draft-n-max N, lower", year=2026),
                _vllm("--speculative-config with a lower num_speculative_tokens"),
            ),
        ),
    ),
    "machine": (
        Remedy(
            "find out what else runs on these cores, stop it, and measure again",
            "kvsim validate {scenario} --repeat 5",
            other="no more threads than there are free cores; taskset, nice",
        ),
    ),
}
"""Remedies by cause, the most promising first."""

_MORE_ROOM = (
    Remedy(
        "add cells: requests failed because the cache was full",
        "cache.cells, twice as many",
        (_llama("--ctx-size N"), _vllm("--gpu-memory-utilization X or --num-gpu-blocks-override N")),
    ),
    Remedy(
        "use fewer or shorter slots, so that all of them fit into the cache",
        "server.slots, half as many; server.slot_context, halved",
        (_llama("--parallel N --ctx-size N"), _vllm("--max-num-seqs N --max-model-len N")),
    ),
    Remedy(
        "use a policy with paging or compaction, so that every free cell can be used",
        "kvsim compare {scenario} -p paged -p llama.cpp-b6975 -p full-compaction",
        versions=(LLAMACPP_B6975, VLLM_0_33_0),
    ),
)

FAILURES: dict[FailureKind, tuple[Remedy, ...]] = {
    FailureKind.OUT_OF_CELLS: _MORE_ROOM,
    FailureKind.CACHE: _MORE_ROOM,
    FailureKind.CONTEXT: (
        Remedy(
            "raise the context limit of a slot: longer prompts were refused",
            "server.slot_context, doubled; cache.cells, twice as many",
            (_llama("--ctx-size N"), _vllm("--max-model-len N")),
        ),
        Remedy(
            "use fewer slots, each with more of the cache",
            "server.slots, half as many",
            (_llama("--parallel N"), _vllm("--max-num-seqs N")),
        ),
        Remedy(
            "let all slots share one cache, so that a long request can use what short ones leave free",
            "cache.unified = true",
            (_llama("--kv-unified", since=KV_UNIFIED_SINCE),),
            parameter="unified",
        ),
    ),
    FailureKind.FULL: (
        Remedy(
            "let a full slot shift its context",
            "server.context_shift = true",
            (_llama("--context-shift", since=6206),),
        ),
        Remedy(
            "raise the context limit of a slot: answers did not fit",
            "server.slot_context, doubled; cache.cells, twice as many",
            (_llama("--ctx-size N"),),
        ),
    ),
    FailureKind.BATCH: (
        Remedy(
            "use chunked prefill, or a larger batch",
            "server.chunked_prefill = true; server.n_batch, doubled",
            (_vllm("--enable-chunked-prefill or --max-num-batched-tokens N"),),
        ),
    ),
}
"""Remedies for failed requests by the kind of failure, the most promising first."""
