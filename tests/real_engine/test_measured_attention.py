"""The attention that tokens received, and texts read under eviction: one dense pass, masked alike, gives the same."""

from functools import cache

import numpy as np
import pytest

from kvsim.model.engine_shapes import SHAPES
from policies import CacheConfig, Chunk, Group, SequencePlan, View, available
from policies.presets.papers.token_eviction import PRESETS
from real_engine import Engine, Transformer, kernels
from real_engine.engine import layer_groups
from real_engine.measured_attention import MeasuredAttention, measured_for

MODEL = Transformer.random(SHAPES["tiny"], seed=5)
N_LAYERS = MODEL.shape.n_layers
PROMPT, TOKENS, BUDGET = 112, 132, 60
EVICTING = [preset.name for preset in PRESETS]
TEXTS = np.random.default_rng(7).integers(0, MODEL.shape.vocabulary, (2, TOKENS))


class Reading:
    """Two texts read side by side under a policy; what each token was let see is written down."""

    def __init__(self, name, groups=1, observed=None, kernel=None):
        config = CacheConfig(
            cells=600, n_ubatch=112, sequences=2, block_size=4, budget=BUDGET, budget_groups=groups, kernel=kernel
        )
        self.policy = available()[name](config)
        self.attention = measured_for(self.policy)
        if observed is not None:
            self.attention = MeasuredAttention(observed)
        self.engine = Engine(MODEL, self.policy.groups, self.policy.kernel, 0, attention=self.attention)
        self.visible = np.zeros((2, groups, TOKENS, TOKENS), dtype=bool)
        """By text and group: which positions each token attends to."""
        self.logits = np.zeros((2, TOKENS, MODEL.shape.vocabulary))
        """After each token, but for those inside of the prompts."""
        self.moved = 0

    def read(self):
        for seq in (0, 1):
            self.policy.open(seq, SequencePlan(PROMPT, TOKENS, TOKENS))
        self._run([Chunk(0, 0, PROMPT)])
        self._run([Chunk(1, 0, PROMPT)])
        for at in range(PROMPT, TOKENS):
            self._run([Chunk(0, at, 1), Chunk(1, at, 1)])
        return self

    def _run(self, chunks):
        (batch,) = self.policy.allocate(chunks, views=True)
        self.moved += sum(place.moves.n_cells for place in batch.places)
        self.engine.prepare(batch)
        logits = self.engine.run(np.concatenate([TEXTS[c.seq, c.start : c.start + c.n] for c in chunks]), batch)
        for row, chunk in enumerate(chunks):
            queries = np.arange(chunk.start, chunk.start + chunk.n)
            self.logits[chunk.seq, queries[-1]] = logits[row]
            for group, place in enumerate(batch.places):
                held = place.views[row].positions
                self.visible[chunk.seq, group][np.ix_(queries, held)] = held <= queries[:, None]


@cache
def read(name, groups=1):
    """Most tests look at the same texts."""
    return Reading(name, groups).read()


def dense(text, visible):
    """One pass over the whole text: logits of shape (n, vocabulary), and by layer the weights of each query, (n, n)."""
    everything = np.arange(len(text))
    of = layer_groups(N_LAYERS, [Group(0, share=1 / len(visible))] * len(visible))
    paid = []

    def attend(layer, q, k, v):
        shared = q.shape[1] // k.shape[1]
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(shared, axis=1)) / np.sqrt(q.shape[2])
        scores[:, ~visible[of[layer]]] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        paid.append(weights.sum(axis=0))
        return np.einsum("hqk,khd->qhd", weights, v.repeat(shared, axis=1)).astype(np.float32)

    logits = MODEL.forward(np.array(text), everything, everything, attend)
    return logits, [np.sum([w for w, g in zip(paid, of, strict=True) if g == group], axis=0) for group in set(of)]


SAID = slice(PROMPT - 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", EVICTING)
def test_what_is_read_under_eviction_is_a_dense_pass_that_masks_what_was_evicted(name, groups):
    reading = read(name, groups)
    assert (reading.moved > 0) == name.endswith(("-compacted", "-packed")), "compaction must be tried"
    for seq in (0, 1):
        assert not reading.visible[seq, :, -1].all(), "nothing was evicted"
        logits, paid = dense(TEXTS[seq], reading.visible[seq])
        assert np.allclose(reading.logits[seq, SAID], logits[SAID], atol=1e-3)
        for group in range(groups):
            received = reading.attention.scores(group, seq, np.arange(TOKENS))
            queries = paid[group][-(reading.policy.rule.queries or TOKENS) :]
            assert np.allclose(received, queries.sum(axis=0), rtol=1e-3, atol=1e-5)


def test_a_position_that_was_not_seen_is_noticed():
    """The control."""
    reading = read("h2o")
    changed = reading.visible[0].copy()
    changed[:, -1, np.flatnonzero(~changed[0, -1])[0]] = True
    logits, _ = dense(TEXTS[0], changed)
    assert not np.allclose(reading.logits[0, -1], logits[-1], atol=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_h2o_keeps_the_latest_and_those_with_the_most_attention_so_far(groups):
    """Decided anew from the weights of the dense pass."""
    reading = read("h2o", groups)
    _, paid = dense(TEXTS[0], reading.visible[0])
    for group in range(groups):
        held = list(range(PROMPT))
        for at in range(PROMPT, TOKENS):
            received = paid[group][:at].sum(axis=0)
            older = sorted(held[: -(BUDGET // 2)], key=lambda position: received[position])
            for position in older[: len(held) - BUDGET]:
                held.remove(position)
            held.append(at)
            assert np.flatnonzero(reading.visible[0, group, at]).tolist() == held


@pytest.mark.parametrize("kernel", ["masked", "tiled", "sliced"])
def test_every_kernel_gives_the_same_attention(kernel):
    gather, other = read("h2o"), Reading("h2o", kernel=kernel).read()
    assert other.engine.kernel == kernel
    assert (gather.visible == other.visible).all()
    everything = np.arange(TOKENS)
    for seq in (0, 1):
        ours, theirs = (reading.attention.scores(0, seq, everything) for reading in (gather, other))
        assert np.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_only_the_latest_queries_count_where_that_is_asked_for():
    reading = Reading("h2o", observed=5).read()
    _, (paid,) = dense(TEXTS[1], reading.visible[1])
    received = reading.attention.scores(0, 1, np.arange(TOKENS))
    assert np.allclose(received, paid[-5:].sum(axis=0), rtol=1e-3, atol=1e-5)


def test_every_query_and_head_gives_a_weight_of_one():
    scores = read("streaming-llm").attention.scores(0, 0, np.arange(TOKENS))
    assert scores.sum() == pytest.approx(TOKENS * N_LAYERS * MODEL.shape.n_heads, rel=1e-5)


def test_it_is_measured_for_policies_that_rank_by_it():
    reading = read("snapkv")
    assert reading.policy.attention is reading.attention
    assert measured_for(available()["paged"](CacheConfig(cells=64))) is None


def test_what_is_unknown_or_forgotten_has_received_nothing():
    reading = Reading("h2o").read()
    beyond = np.array([0, TOKENS, 10_000])
    assert (reading.attention.scores(0, 0, beyond) > 0).tolist() == [True, False, False]
    reading.policy.free(0)
    assert not reading.attention.scores(0, 0, beyond).any()
    assert reading.attention.scores(0, 1, beyond).any()
    assert not reading.attention.scores(0, 7, beyond).any()


@pytest.mark.parametrize("n", [1, 20])
def test_collecting_changes_no_result(n):
    """Also where the softmax would otherwise go block by block."""
    rng, cells = np.random.default_rng(3), 600
    q = rng.standard_normal((n, 4, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, cells, 32), dtype=np.float32)
    everything = np.arange(cells)
    selections = kernels.select(
        "gather", (Chunk(0, cells - n, n),), (View(everything, everything),), cells, Group(cells)
    )
    reads = (lambda at: k[:, at]), (lambda at: v[:, at])
    received = np.zeros((n, cells), dtype=np.float32)
    alone = kernels.attend(q, *reads, 2, selections)
    assert np.allclose(kernels.attend(q, *reads, 2, selections, received), alone, atol=1e-5)
    assert np.allclose(received.sum(axis=1), 4, rtol=1e-5)
    assert (received[0] > 0).sum() == cells - n + 1
