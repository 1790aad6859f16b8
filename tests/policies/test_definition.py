"""Where tokens are forgotten, the text is what the layout's own definition gives, recomputed token by token.

A context shift and an overwriting ring change what later tokens see and where it stands, so that no recomputation from
the remaining text alone could agree: each token's K and V were made from what was there at its time. The definition
here keeps them by token, unrotated, knows no cells, and rotates anew for every look.
"""

import numpy as np
import pytest

from kvsim.model.engine_shapes import SHAPES
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from real_engine import Engine, Transformer
from real_engine.model import rotary_table, rotate
from tests.worlds import scenario

SHAPE = SHAPES["tiny"]
MODEL = Transformer.random(SHAPE, seed=8)
WORLD = scenario(
    seed=8,
    workload={
        "kind": "batch",
        "requests": 6,
        "prompt_tokens": {"kind": "lognormal", "mu": 2.6, "sigma": 0.4, "max": 24},
        "output_tokens": {"kind": "fixed", "value": 40},
    },
    server__slots=3,
    server__n_batch=16,
    server__n_ubatch=8,
    cache__cells=200,
)


class Text:
    """One sequence by definition: K and V of every token it ever had, as they were made."""

    def __init__(self):
        self.keys = [[] for _ in range(SHAPE.n_layers)]
        self.values = [[] for _ in range(SHAPE.n_layers)]
        self.alive = []
        """Tokens that can still be seen, by when they came."""

    def look(self, tokens, positions, keep):
        """Take in tokens; ``keep`` says which of the visible tokens remain. Logits behind the last of them."""
        first = len(self.keys[0])
        came = list(range(first, first + len(tokens)))
        self.alive = keep([*self.alive, *came])
        assert len(self.alive) == len(positions)
        at = dict(zip(self.alive, positions.tolist(), strict=True))

        def attend(layer, q, k, v):
            # Turned back to position 0: what was rotated for this pass must not be kept so.
            own = np.array([at[i] for i in came])
            self.keys[layer] += list(rotate(k, *rotary_table(-own, SHAPE.d_head, SHAPE.rope_base)))
            self.values[layer] += list(v)
            rows = []
            for i, row in zip(came, q, strict=True):
                seen = [j for j in self.alive if j <= i]
                cos, sin = rotary_table(np.array([at[j] for j in seen]), SHAPE.d_head, SHAPE.rope_base)
                keys = rotate(np.array([self.keys[layer][j] for j in seen]), cos, sin)
                values = np.array([self.values[layer][j] for j in seen])
                each = SHAPE.n_heads // SHAPE.n_kv_heads
                scores = np.einsum("hd,shd->hs", row, np.repeat(keys, each, axis=1)) / np.sqrt(SHAPE.d_head)
                share = np.exp(scores - scores.max(axis=1, keepdims=True))
                share /= share.sum(axis=1, keepdims=True)
                rows.append(np.einsum("hs,shd->hd", share, np.repeat(values, each, axis=1)))
            return np.array(rows, dtype=np.float32)

        own = np.array([at[i] for i in came])
        return MODEL.forward(np.array(tokens), own, np.array([len(tokens) - 1]), attend)[0]


class Compared(Engine):
    """The engine, and beside it each sequence by definition; counts where they part and where they agree."""

    def __init__(self, policy, keep, seed):
        super().__init__(MODEL, policy.groups, policy.kernel, seed)
        self.by_definition, self.keep = {}, keep
        self.agree = self.part = self.forgotten = 0

    def begin(self, seq, request, *, again=False):
        super().begin(seq, request, again=again)
        self.by_definition[seq] = Text()

    def discard(self, seq, start, stop):
        super().discard(seq, start, stop)
        del self.by_definition[seq].alive[start:stop]
        self.forgotten += stop - start

    def run(self, tokens, batch):
        logits = super().run(tokens, batch)
        at = 0
        for row, chunk, view in zip(logits, batch.chunks, batch.views, strict=True):
            text = self.by_definition[chunk.seq]
            before = len(text.alive)
            expected = text.look(tokens[at : at + chunk.n].tolist(), view.positions, self.keep)
            self.forgotten += before + chunk.n - len(text.alive)
            at += chunk.n
            if np.allclose(row, expected, atol=2e-3):
                self.agree += 1
            else:
                self.part += 1
        return logits


def compare(name, keep, **keys):
    world = load_scenario(WORLD, **keys)
    policy = build_policy(world, name)
    engine = Compared(policy, keep, world.seed)
    recorder = Recorder()
    drive(world, policy, engine, recorder, None)
    assert [job.status for job in recorder.requests.jobs] == ["completed"] * 6
    assert engine.agree + engine.part > 200
    assert engine.forgotten > 50, "nothing was put to the test"
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["masked", "tiled", "gather", "sliced"])
def test_an_overwriting_ring_is_what_its_definition_says(kernel):
    def sinks_and_newest(alive):
        return alive if len(alive) <= 24 else alive[:3] + alive[-21:]

    engine = compare("ring", sinks_and_newest, cache__window=24, cache__sinks=3, cache__kernel=kernel)
    assert engine.part == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["contiguous", "full-compaction", "llama.cpp-b6975", "streams", "prompt-decode-regions"]
)
def test_a_context_shift_is_what_its_definition_says(policy):
    keys = {"server__slot_context": 40, "server__context_shift": True, "server__n_keep": 4}
    assert compare(policy, list, **keys).part == 0


@pytest.mark.slow
def test_a_rotation_that_is_not_made_shows():
    """The control."""

    class Forgets(Compared):
        def _rotate(self, shift, group):
            pass

    world = load_scenario(WORLD, server__slot_context=40, server__context_shift=True, server__n_keep=4)
    policy = build_policy(world, "contiguous")
    engine = Forgets(policy, list, world.seed)
    drive(world, policy, engine, Recorder(), None)
    assert engine.part > 20
