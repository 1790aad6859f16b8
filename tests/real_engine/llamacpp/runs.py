"""Repeatable runs of scenarios on the real llama.cpp, with given step times."""

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import DelegatingBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from real_engine.llama_library import ContextSettings
from real_engine.llamacpp import mirrored_backend


class GivenClock(DelegatingBackend):
    """A real backend that reports a fixed time for each pass plus a time for each token."""

    def __init__(self, inner, base_s=0.02, token_s=1e-4):
        super().__init__(inner)
        self._base_s, self._token_s = base_s, token_s

    def step(self, step, batches):
        super().step(step, batches)
        return [self._base_s + self._token_s * batch.n_tokens for batch in batches]


def backend_of(model, scenario, policy, spoil=None):
    """A backend for a scenario on a model, with cells shown; ``spoil`` may change the policy beforehand."""
    if model.library.era == "A":
        # Defragmentation ends at a number of moves that depends on the model's layers.
        scenario = load_scenario(scenario, model__name=str(model.path))
    built = build_policy(scenario, policy)
    if spoil is not None:
        spoil(built)
    server, cache = scenario.server, scenario.cache
    settings = ContextSettings(
        cells=built.capacity,
        n_batch=server.n_batch,
        n_ubatch=server.n_batch if server.scheduler == "vllm" else server.n_ubatch,
        sequences=server.slots,
        type_k="f16",
        type_v="f16",
        defrag_threshold=cache.threshold if cache.threshold > 0 else -1.0,
        show_cells=True,
    )
    backend = mirrored_backend(model, built, settings, scenario.seed)
    backend.scenario = scenario
    return backend


def run(backend, clock=GivenClock):
    """Run to the end, comparing cells at every step; return the recorder."""
    recorder = Recorder(None, detail="requests")
    with backend.context:
        drive(backend.scenario, backend.policy, clock(backend), recorder, None)
        backend.finish()
    return recorder
