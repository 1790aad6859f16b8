"""Replay recorded runs of real engines on our policies, and compare the states after every operation."""

from __future__ import annotations

from pathlib import Path

from kvsim.engines.conformance.llama_server import LlamaServerReplay
from kvsim.engines.conformance.llamacpp import LlamaCppReplay
from kvsim.engines.conformance.recordings import Agreement, Disagreement, conform
from kvsim.engines.conformance.vllm import vllm_replay

__all__ = ["ENGINES", "Agreement", "Disagreement", "conform_llama_server", "conform_llamacpp", "conform_vllm"]


def conform_llamacpp(path: str | Path) -> Agreement:
    """Replay one recording of llama.cpp. Raises ``UserError`` if the file is not one."""
    return conform(path, LlamaCppReplay)


def conform_llama_server(path: str | Path) -> Agreement:
    """Replay one recording of llama-server. Raises ``UserError`` if the file is not one."""
    return conform(path, LlamaServerReplay)


def conform_vllm(path: str | Path) -> Agreement:
    """Replay one recording of vLLM (its cache manager, scheduler or server). Raises ``UserError`` if it is not one."""
    return conform(path, vllm_replay)


ENGINES = {"llamacpp": conform_llamacpp, "llama-server": conform_llama_server, "vllm": conform_vllm}
"""Functions that replay a recording, by engine."""
