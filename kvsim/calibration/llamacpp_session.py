"""Scenarios on the real llama.cpp: the scenario as llama.cpp can serve it, and the backend that runs it.

Calibration needs it as much as recording and validation do, so it lives in the lowest room that may import the engine.
"""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any, Self

from kvsim.costs.profile import USUAL_MODEL
from kvsim.errors import UserError
from kvsim.model.engine_shapes import SHAPES, gguf_path
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.set_up import build_policy
from policies import Policy, PolicyFactory
from real_engine.llama_cells import Era
from real_engine.llama_library import Closeable, ContextSettings, Library, LlamaModel, refusal
from real_engine.llamacpp import POLICIES, LlamaCpp, context_settings, mirrored_backend

_WITHOUT_WINDOW = {era: tuple(name for name in names if name != "sliding-window") for era, names in POLICIES.items()}
"""Policies that describe each era of llama.cpp, for models without a sliding window."""


class LlamaCppSession(Closeable):
    """One loaded llama.cpp with a model, for runs of one scenario; a context manager that closes the model."""

    def __init__(
        self,
        scenario: Scenario | str | Path,
        *,
        model: str | None = None,
        library: Path | str | None = None,
        threads: int = 1,
    ):
        """``model``: a GGUF file in place of the scenario's model; ``library``: a folder with another llama-cpp-python.

        Raises ``UserError`` if llama.cpp is missing or cannot serve the scenario.
        """
        cores = os.cpu_count() or 1
        if not 1 <= threads <= cores:
            raise UserError(f"threads: {threads}; from 1 to {cores} are accepted, as many as there are cores")
        self.library = Library(library)
        self.scenario = adapt_scenario(scenario, self.library.era, model)
        self.threads = threads
        path = gguf_path(self.scenario.model.name)
        assert path is not None, "a scenario for llama.cpp has a model from a file"
        self.model = LlamaModel(self.library, path)

    def for_scenario(self, scenario: Scenario) -> Self:
        """A session for another scenario that shares the loaded model."""
        other = copy(self)
        other.scenario = adapt_scenario(scenario, self.library.era)
        return other

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that describe this version of llama.cpp."""
        return _WITHOUT_WINDOW[self.library.era]

    def choose_policy(self, policy: str | None) -> str:
        """``policy`` if given, else the scenario's if it describes this version, else the first that does."""
        if policy is not None:
            return policy
        own = self.scenario.cache.policy
        return own if own in self.policies else self.policies[0]

    def check(self, policy: str | PolicyFactory) -> None:
        """Raise ``UserError`` unless llama.cpp can serve the scenario as the policy describes."""
        built, settings = self._settings(policy, show_cells=True)
        try:
            _, settings, _ = context_settings(built, settings, self.library.era)
            why = refusal(self.library.era, settings)
        except UserError as e:
            why = str(e)
        if why is not None:
            raise UserError(f"{self.scenario.name}: {built.name}: {why}")

    def backend(self, policy: str | PolicyFactory, *, show_cells: bool = False) -> LlamaCpp:
        """A backend for the scenario under that policy, to be driven with the backend's own ``policy``.

        ``show_cells`` compares the cells at every step, which in era B adds to the measured times. Raises
        ``UserError``.
        """
        built, settings = self._settings(policy, show_cells)
        try:
            return mirrored_backend(self.model, built, settings, self.scenario.seed)
        except UserError as e:
            raise UserError(f"{self.scenario.name}: {e}") from None

    def _settings(self, policy: str | PolicyFactory, show_cells: bool) -> tuple[Policy, ContextSettings]:
        built = build_policy(self.scenario, policy)
        server, cache = self.scenario.server, self.scenario.cache
        return built, ContextSettings(
            cells=built.capacity,
            n_batch=self.scenario.n_batch,
            n_ubatch=self.scenario.n_ubatch,
            sequences=server.slots,
            threads=self.threads,
            type_k=cache.type_k,
            type_v=cache.type_v,
            defrag_threshold=cache.threshold if cache.threshold > 0 else -1.0,
            show_cells=show_cells,
        )

    def close(self) -> None:
        """Free the model; every context on it must be closed before."""
        self.model.close()


def adapt_scenario(scenario: Scenario | str | Path, era: Era, model: str | None = None) -> Scenario:
    """The scenario with llama.cpp's defaults for what it leaves open.

    These are a model from a file (``model``, the scenario's own, or smollm2), K and V in f16, batches of at most as
    many tokens as there are cells, and era A's padding. Raises ``UserError``.
    """
    scenario = load_scenario(scenario)
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model__name"] = absolute_model_path(model)
    elif scenario.model.name in SHAPES:
        changes["model__name"] = USUAL_MODEL["llamacpp"]
    if changes.get("model__name") in SHAPES:
        raise UserError(f"model {model}: llama.cpp needs a GGUF file (FILE.gguf, or smollm2)")
    for key in ("type_k", "type_v"):
        if key not in scenario.cache.model_fields_set:
            changes[f"cache__{key}"] = "f16"
    if scenario.n_batch > scenario.cache.cells:
        changes["server__n_batch"] = scenario.cache.cells
    if era == "A":
        # The presets of era B set their own padding.
        changes["cache__pad"] = 256 if scenario.cache.kernel == "tiled" else 32
    return load_scenario(scenario, **changes)


def absolute_model_path(model: str) -> str:
    """A built-in model's name, or a GGUF file's absolute path. Raises ``UserError``.

    A path given outside of a scenario file is relative to the working directory, not to the scenario's folder.
    """
    path = gguf_path(model)
    return model if path is None or not model.endswith(".gguf") else str(path.resolve())
