"""What to type into llama.cpp and vLLM so that they are set as a scenario is.

Sources: llama.cpp, ``common/arg.cpp`` (``--defrag-thold`` is still read, but ignored with a warning that it is
deprecated; nothing has been defragmented since b6975) and ``tools/server`` (until 2025 each slot had an equal share of
the context although all shared one cache); vLLM 0.33, ``vllm serve --help``.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.scenario.scenario import Scenario

LLAMACPP_2024 = "llama.cpp-2024"
DEFRAG_NOTE = (
    "--defrag-thold is left out: today's llama.cpp reads it and ignores it with a warning that it is deprecated; "
    "nothing is defragmented since b6975"
)
OLD_NOTE = (
    "needs llama.cpp b4666 to b4880, the last that defragmented by threshold; later versions ignore --defrag-thold"
)

Flags = tuple[tuple[str, str], ...]
"""Options with their values; empty for a switch."""


def llamacpp_flags(scenario: Scenario, type_k: str, type_v: str, *, windows: bool = False) -> Flags:
    """llama-server's. ``windows``: the model has sliding windows, which a cache of full size is to keep whole unless
    the policy is that of windows."""
    server, cache = scenario.server, scenario.cache
    flags = [("--ctx-size", str(cache.cells)), ("--parallel", str(server.slots))]
    old = cache.policy == LLAMACPP_2024
    if cache.unified and not old:
        # Without it, and with --parallel given, each slot has a cache of its own.
        flags.append(("--kv-unified", ""))
    flags += [("--batch-size", str(server.n_batch)), ("--ubatch-size", str(server.n_ubatch))]
    flags += [("--cache-type-k", type_k), ("--cache-type-v", type_v)]
    if type_v not in ("f32", "f16"):
        flags.append(("--flash-attn", "" if old else "on"))  # Without it V cannot be quantised.
    if windows and cache.policy != "sliding-window" and not old:
        flags.append(("--swa-full", ""))
    if old:
        flags.append(("--defrag-thold", f"{cache.threshold:g}"))
    return tuple(flags)


def vllm_flags(scenario: Scenario) -> Flags:
    """``vllm serve``'s. The number of blocks is given too, so that the cache is as large as it was tried, and no
    larger; K and V are kept in the model's own type."""
    server, cache = scenario.server, scenario.cache
    prefix = cache.policy == "vllm" or cache.prefix_cache
    return (
        ("--max-model-len", str(scenario.slot_context)),
        ("--max-num-seqs", str(server.slots)),
        ("--max-num-batched-tokens", str(server.n_batch)),
        ("--block-size", str(cache.block_size)),
        ("--num-gpu-blocks-override", str(cache.cells // cache.block_size)),
        ("--enable-prefix-caching" if prefix else "--no-enable-prefix-caching", ""),
        ("--enable-chunked-prefill" if server.chunked_prefill else "--no-enable-chunked-prefill", ""),
    )


def typed(flags: Flags) -> str:
    """On one line."""
    return " ".join(f"{name} {value}".strip() for name, value in flags)


def flags_dict(flags: Flags) -> Mapping[str, str | bool]:
    """By option, True for a switch."""
    return {name: value or True for name, value in flags}
