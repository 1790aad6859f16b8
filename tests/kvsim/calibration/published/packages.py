"""A package that prices passes, made up for tests: its costs are linear, and it keeps what it was asked."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

BASE_MS, TOKEN_MS, CELL_MS, HEAD_MS, CHUNK_MS, MIXED = 20.0, 0.03, 1e-4, 0.5, 0.002, 1.5


class LinearModel:
    """Prices a pass with the sums of its tokens and of the cells that its tokens read."""

    asked: ClassVar[list[dict]] = []
    configs: ClassVar[list[dict]] = []
    answer = None
    """Milliseconds of every pass, unless None."""
    error = None

    @classmethod
    def from_native(cls, text):
        asked = json.loads(text)
        config = json.loads((Path(asked["model_name"]) / "config.json").read_text())
        cls.asked.append(asked)
        cls.configs.append(config)
        if cls.error is not None:
            raise cls.error
        return cls()

    def estimate_forward_pass_time_ms(self, text):
        if self.answer is not None:
            return self.answer
        asked = json.loads(text)["scheduled_requests"]
        prompts, tokens = asked["num_prefill_requests"], asked["sum_prefill_tokens"]
        decodes, cells = asked["num_decode_requests"], asked["sum_decode_kv_tokens"]
        if prompts:
            each, cached = tokens / prompts, asked["sum_prefill_kv_tokens"] / prompts
            cells += prompts * each * (cached + (each + 1) / 2)
        work = (BASE_MS + TOKEN_MS * (tokens + decodes)) * (MIXED if prompts else 1)
        return work + CELL_MS * cells + HEAD_MS + CHUNK_MS * (prompts + decodes)


class LinearHandle:
    """The parts of the same passes, one by one."""

    @classmethod
    def compile(cls, folder, system, engine, **settings):
        assert (Path(folder) / "config.json").is_file()
        if LinearModel.error is not None:
            raise LinearModel.error
        return cls()

    def decode_step_per_op(self, sequences, context, osl):
        return [
            ("generation_qkv_gemm", BASE_MS + TOKEN_MS * sequences, 0.0, "silicon"),
            ("generation_attention", CELL_MS * sequences * context, 0.0, "silicon"),
            ("generation_logits_gemm", HEAD_MS + CHUNK_MS * sequences, 0.0, "silicon"),
        ]

    def run_static_per_op(self, *, batch_size, isl, osl, prefix, mode):
        tokens = isl - prefix
        assert (batch_size, osl, mode) == (1, 1, "static_ctx")
        context = [
            ("context_qkv_gemm", MIXED * (BASE_MS + TOKEN_MS * tokens), 0.0, "silicon"),
            ("context_attention", CELL_MS * tokens * (prefix + (tokens + 1) / 2), 0.0, "silicon"),
            ("context_logits_gemm", HEAD_MS, 0.0, "silicon"),
        ]
        return context, []


def install(monkeypatch):
    """Put the made-up package where ``aiconfigurator-core`` would be."""
    LinearModel.asked, LinearModel.configs, LinearModel.answer, LinearModel.error = [], [], None, None
    core, database = ModuleType("aiconfigurator_core"), ModuleType("aiconfigurator_core.sdk.perf_database")
    engine = ModuleType("aiconfigurator_core.sdk.engine")
    engine.EngineHandle = LinearHandle
    core.RustForwardPassPerfModel = LinearModel
    database.get_version_slots = lambda system, engine: (
        {"current": "0.24.0", "next": "0.27.0"} if engine != "trtllm" else None
    )
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", core)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.perf_database", database)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", engine)
    monkeypatch.setattr("kvsim.calibration.published.package.version", lambda name: "9.9")
    return LinearModel
