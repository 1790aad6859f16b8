"""Token eviction over blocks: when tokens go, when sequences are compacted, and who is let in."""

import numpy as np
import pytest

from kvsim.simulation.set_up import build_policy
from policies import CacheConfig, Chunk, OutOfCells, SequencePlan, Unsupported, available
from tests.worlds import scenario

NAMES = [name for name in available() if name.startswith(("h2o", "snapkv", "streaming"))]


class Oldest:
    """Attention that grows with position, so that the oldest token is always the lightest."""

    def scores(self, group, seq, positions):
        return positions.astype(float)

    def forget(self, seq):
        pass


def cache(name, *, blocks=16, **keys):
    """A cache of that many blocks of 4 cells, beside block 0, whose sequences have 40 tokens at most."""
    settings = {"n_ubatch": 16, "max_tokens": 40, "block_size": 4, "budget": 8, "attention": Oldest()} | keys
    return available()[name](CacheConfig(cells=4 * (blocks + 1), **settings))


def start(policy, prompt, final=40, seq=0):
    policy.open(seq, SequencePlan(prompt, 40, final))
    return policy.allocate([Chunk(seq, 0, prompt)], views=True)


def positions(policy, group=0):
    held = policy.occupancy(group).position
    return sorted(held[held >= 0].tolist())


def test_tokens_go_once_their_pass_has_run():
    policy = cache("h2o")
    (batch,) = start(policy, 12)
    assert batch.views[0].positions.tolist() == list(range(12))
    assert positions(policy) == list(range(12))
    (batch,) = policy.allocate([Chunk(0, 12, 1)], views=True)
    assert batch.views[0].positions.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert policy.usage().stored == 9


def test_every_group_of_layers_evicts_by_itself():
    class ByGroup(Oldest):
        def scores(self, group, seq, positions):
            return positions * (1.0 if group else -1.0)

    policy = cache("h2o", budget_groups=2, attention=ByGroup())
    start(policy, 12)
    policy.allocate([Chunk(0, 12, 1)])
    assert positions(policy, 0) == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert positions(policy, 1) == list(range(4, 13))
    assert [group.share for group in policy.groups] == [0.5, 0.5]


def scattered(name, **keys):
    """A sequence of which one token is left in each of its first blocks: those that 4 divides are heavy."""

    class Scattered(Oldest):
        def scores(self, group, seq, positions):
            return np.where(positions % 4 == 0, 100.0, 1.0)

    policy = cache(name, attention=Scattered(), **keys)
    start(policy, 16)
    (batch,) = policy.allocate([Chunk(0, 16, 1)], views=True)
    assert batch.views[0].positions.tolist() == [0, 4, 8, 11, 12, 13, 14, 15, 16]
    return policy, batch


def test_holes_are_read_until_they_are_compacted():
    policy, batch = scattered("h2o")
    assert (batch.reads.scanned.tolist(), batch.reads.useful.tolist(), batch.reads.runs.tolist()) == ([17], [9], [5])
    assert policy.usage().internal_fragmentation == pytest.approx(1 - 9 / 20)
    policy, batch = scattered("h2o-compacted")
    assert (batch.reads.scanned.tolist(), batch.reads.runs.tolist()) == ([9], [3])
    assert batch.places[0].moves.n_cells == 2
    assert policy.usage().allocated == 12


def test_below_the_threshold_only_a_missing_block_has_holes_compacted():
    policy, batch = scattered("h2o-compacted", threshold=0.9, blocks=8)
    assert batch.places[0].moves.n_runs == 0
    policy.open(1, SequencePlan(16, 40, 40))
    assert policy.reserve(Chunk(1, 0, 16))
    (batch,) = policy.allocate([Chunk(1, 0, 16)])
    assert batch.places[0].moves.n_cells == 3  # Of eight tokens by now: another one was due.
    policy, _ = scattered("h2o", blocks=8)
    assert not policy.reserve(Chunk(1, 0, 16))
    with pytest.raises(OutOfCells, match="4 blocks of 4 cells, 3 are free"):
        policy.allocate([Chunk(1, 0, 16)])


def test_compaction_leaves_the_step_that_asks_for_it_its_room():
    """Five blocks hold 14 tokens, so that compacting frees one, if no more than two tokens are to go to the others."""
    policy = cache("snapkv-compacted", budget=13, blocks=8, threshold=0.9, n_ubatch=32)
    start(policy, 16)
    policy.allocate([Chunk(0, 16, 1)])
    policy.open(1, SequencePlan(16, 40, 40))
    with pytest.raises(OutOfCells):
        policy.allocate([Chunk(0, 17, 3), Chunk(1, 0, 16)])
    (batch,) = policy.allocate([Chunk(0, 17, 2), Chunk(1, 0, 16)])
    assert len(set(batch.places[0].cells.tolist())) == 18
    assert batch.places[0].moves.n_runs > 0


def test_nothing_is_copied_where_all_that_could_be_freed_is_too_little():
    policy, _ = scattered("h2o-compacted", threshold=0.9, blocks=8)
    with pytest.raises(OutOfCells):
        policy.allocate([Chunk(1, 0, 28)])
    (batch,) = policy.allocate([Chunk(0, 17, 1)])
    assert batch.places[0].moves.n_runs == 0


@pytest.mark.parametrize("name", ["snapkv", "snapkv-compacted"])
def test_a_prompt_is_let_in_only_if_all_of_it_fits(name):
    policy = cache(name, blocks=8, budget=4, n_ubatch=8)
    assert policy.refusal(SequencePlan(36, 40, 40)) is not None
    assert policy.refusal(SequencePlan(32, 40, 32)) is None
    assert not policy.reserve(Chunk(0, 0, 8), whole=36)
    assert policy.reserve(Chunk(0, 0, 8), whole=32)


def test_of_a_prompt_that_is_thinned_out_on_the_way_a_pass_must_fit_beside_the_budget():
    policy = cache("h2o", blocks=4, n_ubatch=8)
    assert policy.refusal(SequencePlan(36, 40, 40)) is None
    assert policy.reserve(Chunk(0, 0, 8), whole=36)
    assert "24 cells at once" in cache("h2o", blocks=4, n_ubatch=16).refusal(SequencePlan(36, 40, 40))


def test_a_tail_can_go_until_a_token_is_evicted():
    policy = cache("h2o")
    start(policy, 12)
    assert policy.can_truncate(0, 6) == 6
    policy.free(0, 6)
    assert positions(policy) == list(range(6))
    policy.allocate([Chunk(0, 6, 6)])
    policy.allocate([Chunk(0, 12, 1)])
    assert policy.can_truncate(0, 6) == 0
    assert policy.can_truncate(0, 13) == 13
    with pytest.raises(Unsupported, match="tokens have been evicted"):
        policy.free(0, 6)
    policy.free(0)
    assert policy.usage().allocated == 0


def test_a_chunk_must_begin_where_its_sequence_ends():
    policy = cache("h2o")
    start(policy, 12)
    with pytest.raises(ValueError, match="does not end at position 11"):
        policy.allocate([Chunk(0, 11, 1)])


@pytest.mark.parametrize("name", NAMES)
def test_what_evicts_declares_that_it_forgets(name):
    policy = build_policy(scenario(), name)
    assert policy.forgets
    assert not policy.unbounded
    assert policy.has_placement_rule
    assert policy.moves_cells == name.endswith(("-compacted", "-packed"))


def test_the_seed_of_a_scenario_is_that_of_what_is_drawn():
    kept = []
    for seed in (1, 1, 2):
        policy = build_policy(scenario(seed=seed, cache__budget=16), "h2o")
        start(policy, 40)
        policy.allocate([Chunk(0, 40, 1)])
        kept.append(positions(policy))
    assert kept[0] == kept[1] != kept[2]
