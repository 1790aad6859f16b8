"""A llama-server that ran on a GPU decides as ours, although its steps are as long as those of a GPU.

Recorded by ``benchmarks.gpu.llamacpp`` on an H100: Llama 3.1 8B in Q4_K_M, random weights, eight slots, 64 requests.
"""

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from tests.paths import ROOT

FILE = ROOT / "tests" / "data" / "llama-server-h100" / "llama-3.1-8b-q4_k_m.jsonl.gz"


def test_every_step_and_decision_agrees():
    agreement = conform(LlamaServerReplay, FILE)
    assert agreement.first is None
    assert agreement.agree == agreement.total == 553
