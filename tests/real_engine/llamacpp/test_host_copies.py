"""Sequences that go to host memory and come back: llama.cpp's cells and texts agree with the policy's."""

import numpy as np
import pytest

from kvsim.calibration.llamacpp import LlamaSubject
from kvsim.costs.fitting import HostCopySample
from real_engine.llama_library import Context, ContextSettings
from real_engine.llamacpp import POLICIES, Divergence
from tests.chats import chats
from tests.real_engine.llamacpp.conftest import FOLDER, WINDOW
from tests.real_engine.llamacpp.runs import backend_of, run
from workloads import named_rng

pytestmark = pytest.mark.llama

ERA_OF = {policy: era for era, names in POLICIES.items() for policy in names if policy != "sliding-window"}
KEYS = {
    "cache__pad": 256,
    "cache__kernel": "tiled",
    "server__slot_context": 512,
    "server__n_ubatch": 64,
    "server__n_batch": 64,
}


def worlds(policy):
    """One cache for all slots, or one for each, with room for both slots or hardly."""
    keys = KEYS | {"cache__unified": policy != "streams"}
    return [chats(**keys, cache__cells=cells) for cells in (1024, 2048)]


def different(model, backend):
    """Share of all answers' tokens that llama.cpp does not give to the same text in an empty cache, all at once."""
    wrong = tokens = 0
    settings = ContextSettings(cells=1024, n_batch=1024, n_ubatch=1024, sequences=1, flash_attention=True)
    with Context(model, settings) as context:
        for number, best in backend.best.items():
            text, n = backend.texts[number], len(best)
            prompt = len(text) - n
            context.clear()
            returned, _ = context.decode([(token, at, at >= prompt - 1, (0,)) for at, token in enumerate(text[:-1])])
            assert returned == 0
            wrong += sum(context.best(prompt - 1 + i) != token for i, token in enumerate(best))
            tokens += n
    assert tokens > 300
    return wrong / tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", ERA_OF)
def test_cells_and_texts_agree_where_sequences_come_back_from_the_host(model, only, policy):
    """Cells after every step, and answers with those to the whole text, but for what rounding may change."""
    only(ERA_OF[policy])
    for world in worlds(policy):
        backend = backend_of(model, world, policy)
        seen = run(backend)
        assert backend.compared.steps > 100
        assert min(seen.counts.host.saves, seen.counts.host.loads) > 10
        assert len(backend.texts) == 36
        assert different(model, backend) < 0.02


@pytest.mark.slow
def test_cells_of_both_caches_agree_where_half_of_the_layers_have_a_window(windowed):
    for unified in (True, False):
        world = chats(**KEYS, cache__cells=2048, cache__unified=unified, cache__window=WINDOW)
        backend = backend_of(windowed, world, "sliding-window")
        seen = run(backend)
        assert min(seen.counts.host.saves, seen.counts.host.loads) > 10
        assert min(seen.counts.checkpoints.made, seen.counts.checkpoints.restored) > 10
        assert backend.compared.steps > 100


@pytest.mark.slow
def test_states_that_come_back_empty_change_the_texts(model, only, monkeypatch):
    """The control."""
    only("B")
    put = Context.put

    def of_another(self, seq, state):
        """A sequence that is as long, but most of whose values in the last layer are 0."""
        spoilt = state.copy()
        spoilt[-len(state) // 5 :] = 0
        return put(self, seq, spoilt)

    monkeypatch.setattr(Context, "put", of_another)
    backend = backend_of(model, worlds("llama.cpp-b6975")[1], "llama.cpp-b6975")
    run(backend)
    assert different(model, backend) > 0.02


def test_a_policy_that_forgets_what_came_back_diverges(model, only):
    """The control."""
    only("B")

    def spoil(policy):
        bring = policy.import_

        def elsewhere(seq, exported):
            policy.free(seq)
            policy.arenas[0][0].head += 8
            return bring(seq, exported)

        policy.import_ = elsewhere

    with pytest.raises(Divergence):
        run(backend_of(model, worlds("llama.cpp-b6975")[0], "llama.cpp-b6975", spoil))


def test_copies_are_calibrated(library, tiny):
    """As many each way, of sequences of different length; what was filled before stays."""
    subject = LlamaSubject(str(tiny), library=FOLDER)
    try:
        drawn = subject.draw(2, named_rng(3, "test"))
        trials = [trial for trial in drawn if isinstance(trial.sample, HostCopySample)]
        assert sum(trial.sample.out for trial in trials) * 2 == len(trials) >= 8
        assert len({trial.sample.cells for trial in trials}) * 2 == len(trials)
        seconds = [trial.measure() for trial in trials]
        assert all(len(each) == 1 and each[0] > 0 for each in seconds)
        assert np.isfinite(seconds).all()
    finally:
        subject.close()
