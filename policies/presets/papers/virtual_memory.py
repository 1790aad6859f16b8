"""Sequences that are contiguous in virtual memory."""

from __future__ import annotations

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _vattention(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.virtually_contiguous import VirtuallyContiguousPolicy

    return VirtuallyContiguousPolicy(name, config)


PRESETS = (
    Preset(
        "vattention",
        "contiguous in virtual memory, on pages that are mapped when they are needed and stay mapped in their slot",
        "pages of `page_tokens` cells, none shared; a sequence takes first what is still mapped in its slot",
        "sliced",
        ("page_tokens",),
        "Prabhu et al., vAttention (ASPLOS 2025, arXiv 2405.04437); TensorRT-LLM pull request 15931",
        _vattention,
        group="papers",
        against="paged",
        measured="one or two A100 80GB, Yi-6B, Llama-3-8B and Yi-34B, long prompts; ours: docs/reproduced.md",
    ),
)
