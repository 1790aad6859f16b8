"""Texts whose cells went to host memory and came back go on as if they had never left."""

import numpy as np
import pytest

from kvsim.model.engine_shapes import SHAPES
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies import Group, HostCopy, Transfer
from real_engine import Engine, Transformer
from tests.chats import chats
from tests.real_engine.recomputed import FixedTimeEngine, best_without_cache

MODEL = Transformer.random(SHAPES["tiny"], seed=5)
POLICIES = ("contiguous", "fill-holes", "streams", "sliding-window")
SMALL = {
    "workload__sessions": 5,
    "workload__turns": {"kind": "fixed", "value": 3},
    "workload__user_tokens": {"kind": "lognormal", "mu": 2.0, "sigma": 0.5, "min": 2, "max": 16},
    "workload__output_tokens": {"kind": "lognormal", "mu": 1.5, "sigma": 0.5, "min": 1, "max": 8},
    "workload__system_tokens": {"kind": "fixed", "value": 12},
    "server__slot_context": 160,
    "cache__window": 20,
}


class Forgetful(FixedTimeEngine):
    """Brings nothing back."""

    def copy(self, copies):
        return super().copy([copy._replace(transfers=[t for t in copy.transfers if t.to_host]) for copy in copies])


def served(name, engine_type=FixedTimeEngine, type_k="f32", **changes):
    """What was recorded of a run on the engine, and how many answers differ from those without a cache."""
    world = chats(**(SMALL | changes))
    policy, recorder = build_policy(world, name), Recorder()
    engine = engine_type(MODEL, policy.groups, policy.kernel, world.seed, type_k=type_k)
    drive(world, policy, engine, recorder, None)
    wrong = 0
    for job in recorder.requests.jobs:
        assert job.status == "completed", job.error
        prompt = engine.prompt(job.request)
        text = prompt + engine.texts[job.request.id][len(prompt) :]
        wrong += engine.best[job.request.id] != best_without_cache(MODEL, text, len(prompt), policy.groups)
    assert len(recorder.requests.jobs) == 15
    assert min(recorder.counts.host.cells_out, recorder.counts.host.cells_in) > 30, "nothing was tested"
    return recorder, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_sequence_that_comes_back_goes_on_as_if_it_had_never_left(name):
    recorder, wrong = served(name)
    assert wrong == 0
    assert recorder.counts.prefix.found > 100


@pytest.mark.parametrize("name", ["streams", "sliding-window"])
def test_in_divided_caches_too(name):
    assert served(name, cache__unified=False)[1] == 0


def test_a_window_that_a_checkpoint_puts_back_is_as_it_was():
    """Nothing else is brought back from the host here."""
    recorder, wrong = served("sliding-window", server__cache_ram=0)
    assert recorder.counts.checkpoints.restored > 3
    assert wrong == 0


@pytest.mark.parametrize(("name", "cache_ram"), [("contiguous", -1), ("sliding-window", 0)])
def test_what_comes_back_empty_garbles_the_text(name, cache_ram):
    """The control."""
    assert served(name, Forgetful, server__cache_ram=cache_ram)[1] > 1


def test_copies_of_quantised_keys_are_exact():
    """And the host tier grows as it is asked for more cells, without losing what it holds."""
    engine = Engine(MODEL, (Group(64),), "sliced", seed=0, type_k="q8_0", type_v="f16")
    engine.fill()
    kept = [[a.copy() for a in store.arrays] for store in (*engine.keys, *engine.values)]
    for start in (0, 20, 40):
        engine.copy([HostCopy((Transfer(True, start, 100 * start, 20),))])
    engine.copy([HostCopy((Transfer(True, 60, 90, 4),))])
    for store in (*engine.keys, *engine.values):
        for each in store.arrays:
            each[:] = 0
    back = [Transfer(False, start, 100 * start, 20) for start in (0, 20, 40)]
    engine.copy([HostCopy((*back, Transfer(False, 60, 90, 4)))])
    for store, arrays in zip((*engine.keys, *engine.values), kept, strict=True):
        for now, before in zip(store.arrays, arrays, strict=True):
            np.testing.assert_array_equal(now, before)
