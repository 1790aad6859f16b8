"""A package that prices passes, made up for tests: its costs are linear, and it keeps what it was asked."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

BASE_MS, TOKEN_MS, CELL_MS, CHUNK_MS, MIXED = 5.0, 0.01, 1e-5, 0.002, 1.5


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
        found = BASE_MS + TOKEN_MS * (tokens + decodes) + CELL_MS * cells + CHUNK_MS * (prompts + decodes)
        return found * (MIXED if prompts else 1)


def install(monkeypatch):
    """Put the made-up package where ``aiconfigurator-core`` would be."""
    LinearModel.asked, LinearModel.configs, LinearModel.answer, LinearModel.error = [], [], None, None
    core, database = ModuleType("aiconfigurator_core"), ModuleType("aiconfigurator_core.sdk.perf_database")
    core.RustForwardPassPerfModel = LinearModel
    database.get_version_slots = lambda system, engine: (
        {"current": "0.24.0", "next": "0.27.0"} if engine != "trtllm" else None
    )
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", core)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.perf_database", database)
    monkeypatch.setattr("kvsim.calibration.published.package.version", lambda name: "9.9")
    return LinearModel
