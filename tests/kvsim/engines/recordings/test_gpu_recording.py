"""A llama-server that ran on a GPU decides as ours, although its steps are as long as those of a GPU.

Recorded by ``benchmarks.gpu.llamacpp``, random weights in Q4_K_M, eight slots, 64 requests: Llama 3.1 8B on an H100,
and on an H200 Qwen3-Next 80B-A3B, of whose states checkpoints are made.
"""

import pytest

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from tests.paths import ROOT

FILES = {"h100/llama-3.1-8b": 553, "h200/qwen3-next-80b-a3b": 562}


@pytest.mark.parametrize("file", FILES)
def test_every_step_and_decision_agrees(file):
    agreement = conform(LlamaServerReplay, ROOT / "tests" / "data" / f"llama-server-{file}-q4_k_m.jsonl.gz")
    assert agreement.first is None
    assert agreement.agree == agreement.total == FILES[file]
