"""Sequences that go to host memory and come back: llama.cpp's cells and texts agree with the policy's."""

import numpy as np
import pytest

from kvsim.calibration.llamacpp import LlamaSubject
from real_engine.llamacpp import POLICIES, Divergence
from tests.chats import chats
from tests.real_engine.llamacpp.conftest import FOLDER
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


@pytest.mark.parametrize("policy", ERA_OF)
def test_cells_agree_where_sequences_come_back_from_the_host(model, only, policy):
    """And each answer is the one that llama.cpp gives to the whole text at once: the states came back whole."""
    only(ERA_OF[policy])
    for world in worlds(policy):
        backend = backend_of(model, world, policy)
        seen = run(backend)
        assert backend.compared.steps > 100
        assert min(seen.host_saves, seen.host_loads) > 10
        assert len(backend.texts) == 36


def test_a_policy_that_forgets_what_came_back_diverges(model, only):
    """The control."""
    only("B")

    def spoil(policy):
        bring = policy.copy_in

        def elsewhere(seq, host):
            policy.free(seq)
            policy.arenas[0][0].head += 8
            return bring(seq, host)

        policy.copy_in = elsewhere

    with pytest.raises(Divergence):
        run(backend_of(model, worlds("llama.cpp-b6975")[0], "llama.cpp-b6975", spoil))


def test_copies_are_calibrated(library, tiny):
    """As many each way, of sequences of different length; what was filled before stays."""
    subject = LlamaSubject(str(tiny), library=FOLDER)
    try:
        trials = subject.draw(2, named_rng(3, "test")).host_copies
        assert sum(work.out for work, _ in trials) * 2 == len(trials) >= 8
        assert len({work.cells for work, _ in trials}) * 2 == len(trials)
        seconds = [trial.measure() for _, trial in trials]
        assert all(len(each) == 1 and each[0] > 0 for each in seconds)
        assert np.isfinite(seconds).all()
    finally:
        subject.close()
