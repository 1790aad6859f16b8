"""Where single tokens are evicted, the text is what full memory gives when it looks at the survivors alone.

The reference keeps K and V of every token by layer, sequence and position, and never evicts any; it knows no cells. It
is told only which positions each pass may see, and whoever computes them from the wrong cells parts from it.
"""

import numpy as np
import pytest

from kvsim.model.engine_shapes import SHAPES
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies.presets.papers.token_eviction import PRESETS
from real_engine import Engine, Transformer
from tests.worlds import scenario

SHAPE = SHAPES["tiny"]
MODEL = Transformer.random(SHAPE, seed=8)
NAMES = [preset.name for preset in PRESETS]
WORLD = scenario(
    seed=8,
    workload={
        "kind": "batch",
        "requests": 6,
        "prompt_tokens": {"kind": "lognormal", "mu": 3.2, "sigma": 0.3, "max": 48},
        "output_tokens": {"kind": "fixed", "value": 24},
    },
    server__scheduler="vllm",
    server__slots=3,
    server__n_batch=16,
    cache={"cells": 400, "block_size": 4, "budget": 16, "budget_groups": 2, "sinks": 2},
)


class Compared(Engine):
    """The engine, and beside it the reference; counts how many rows agree and how many part."""

    def __init__(self, policy, seed):
        super().__init__(MODEL, policy.groups, policy.kernel, seed)
        self.known = {}
        self.agree = self.part = self.holes = self.moved = 0

    def begin(self, seq, request, *, again=False):
        super().begin(seq, request, again=again)
        self.known[seq] = [{} for _ in range(SHAPE.n_layers)]

    def run(self, tokens, batch):
        logits, expected, at = super().run(tokens, batch), [], 0
        for chunk_at, chunk in enumerate(batch.chunks):
            seen = [place.views[chunk_at].positions for place in batch.places]
            expected.append(self.reference(tokens[at : at + chunk.n], chunk, seen))
            at += chunk.n
            self.holes += sum(chunk.start + chunk.n - len(positions) for positions in seen)
        self.moved += sum(place.moves.n_cells for place in batch.places)
        for row, other in zip(logits, expected, strict=True):
            alike = np.allclose(row, other, atol=2e-3)
            self.agree += alike
            self.part += not alike
        return logits

    def reference(self, tokens, chunk, seen):
        """Logits behind a chunk; ``seen``: for each group the positions that it may see."""
        own = np.arange(chunk.start, chunk.start + chunk.n)

        def attend(layer, q, k, v):
            known = self.known[chunk.seq][layer]
            known.update(zip(own.tolist(), zip(k, v, strict=True), strict=True))
            positions, rows = seen[self.group_of[layer]].tolist(), []
            for i, row in zip(own.tolist(), q, strict=True):
                pairs = [known[j] for j in positions if j <= i]
                keys, values = np.array([key for key, _ in pairs]), np.array([value for _, value in pairs])
                each = SHAPE.n_heads // SHAPE.n_kv_heads
                scores = np.einsum("hd,shd->hs", row, np.repeat(keys, each, axis=1)) / np.sqrt(SHAPE.d_head)
                share = np.exp(scores - scores.max(axis=1, keepdims=True))
                share /= share.sum(axis=1, keepdims=True)
                rows.append(np.einsum("hs,shd->hd", share, np.repeat(values, each, axis=1)))
            return np.array(rows, dtype=np.float32)

        return MODEL.forward(tokens, own, np.array([chunk.n - 1]), attend)[0]


def compare(name, engine_type=Compared, **keys):
    world = load_scenario(WORLD, **keys)
    policy = build_policy(world, name)
    engine, recorder = engine_type(policy, world.seed), Recorder()
    drive(world, policy, engine, recorder, None)
    assert [job.status for job in recorder.requests.jobs] == ["completed"] * 6
    assert engine.agree + engine.part > 120
    assert engine.holes > 500, "nothing was put to the test"
    assert (engine.moved > 0) == name.endswith(("-compacted", "-packed"))
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_attention_sees_just_the_survivors(name):
    assert compare(name).part == 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["masked", "tiled", "sliced"])
@pytest.mark.parametrize("name", ["h2o", "h2o-compacted", "h2o-refilled"])
def test_every_kernel_sees_just_the_survivors(name, kernel):
    assert compare(name, cache__kernel=kernel).part == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_in_a_cache_too_small_for_all(name):
    """Sequences are preempted and run again, or all of them are compacted."""
    assert compare(name, cache__cells=200).part == 0


def test_a_move_that_is_not_carried_out_shows():
    """The control."""

    class Forgets(Compared):
        def _apply(self, moves, group):
            pass

    assert compare("h2o-compacted", Forgets).part > 20
