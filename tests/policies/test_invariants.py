"""What every policy owes its engine, whatever is asked of it in whatever order; and controls that must fail.

What sequences say is drawn from a few texts, so that they often begin alike. ``invariants/shadow.py`` says how a policy
is compared with what it should hold.
"""

from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from policies import CacheConfig, Chunk, OutOfCells, SequencePlan, Unsupported, available, plugins
from policies.compaction.compactors import pack
from policies.layouts.multi_stream import Rejected
from policies.layouts.paged import PagedPolicy
from policies.layouts.unified import UnifiedPolicy
from policies.paging.eviction import free_blocks
from tests.policies.invariants.rules import CacheMachine
from tests.policies.invariants.subjects import (
    KEEP_WHAT_WAS_PLACED,
    MUST_BE_SEEN,
    POLICIES,
    SETTINGS,
    VARIANTS,
    FakeEntryPoint,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_its_word(name):
    CacheMachine.seen.clear()
    examples = 60 if name in MUST_BE_SEEN and name not in VARIANTS else 10
    run_state_machine_as_test(partial(CacheMachine, POLICIES[name]), settings=settings(SETTINGS, max_examples=examples))
    assert MUST_BE_SEEN.get(name, set()) <= CacheMachine.seen


class ForgetsAMove(UnifiedPolicy):
    """Compacts, and does not say so."""

    def compact(self):
        moves = super().compact()
        self.arena.pending.settle_moves()
        return moves


class SharesBlocks(PagedPolicy):
    """Hands out the lowest block again and again."""

    def __init__(self, name, config, **options):
        super().__init__(name, config, **options)
        place = self._passes.place

        def place_in_the_lowest(chunks, *rest):
            for chunk in chunks:
                self.tables[chunk.seq].blocks[0] = 1
            return place(chunks, *rest)

        self._passes.place = place_in_the_lowest


class SkipsAReference(PagedPolicy):
    """One block of each sequence that goes is never given back."""

    def free(self, seq, *span):
        if seq in self.tables and self.tables[seq].blocks:
            self.pool.share(self.tables[seq].blocks[:1])
        super().free(seq, *span)


class LeavesAKey(PagedPolicy):
    """Writes into a cached block, which is still found as what it was."""

    def reserve(self, chunk, **options):
        return self._keeping_keys((chunk,), lambda: super(LeavesAKey, self).reserve(chunk, **options))

    def allocate(self, step, **options):
        return self._keeping_keys(step, lambda: super(LeavesAKey, self).allocate(step, **options))

    def _keeping_keys(self, step, write):
        held = [
            (self.tables[chunk.seq].blocks, chunk.start // self.block_size)
            for chunk in step
            if chunk.seq in self.tables
        ]
        keys = {blocks[at]: self.pool.keys[blocks[at]] for blocks, at in held if at < len(blocks)}
        written = write()
        for block, key in keys.items():
            if key is not None and self.pool.keys[block] is None:
                self.pool.store(block, key)
        return written


class LetsTheUnwrittenBeFound(PagedPolicy):
    """A block that was scheduled keeps its key when its sequence ends before it has run."""

    def free(self, seq, *span):
        if seq in self.tables:
            table = self.tables[seq]
            table.n_keyed = min(table.n_keyed, table.length // self.block_size)
        super().free(seq, *span)


class ForgetsATransfer(PagedPolicy):
    """Brings blocks back from the host tier, and does not say so."""

    def __init__(self, name, config, **options):
        super().__init__(name, config.with_options(host_cells=64), **options)

    def settle_transfers(self):
        return tuple(transfer for transfer in super().settle_transfers() if transfer.to_host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [
        lambda config: ForgetsAMove("mine", config, compactor=pack),
        *[
            partial(wrong, "mine", block_size=4, free=partial(free_blocks, "lru"), prefix_cache=True)
            for wrong in (SharesBlocks, SkipsAReference, LeavesAKey, LetsTheUnwrittenBeFound, ForgetsATransfer)
        ],
    ],
    ids=[
        "forgets a move",
        "shares blocks",
        "skips a reference",
        "leaves a key",
        "lets the unwritten be found",
        "forgets a transfer",
    ],
)
def test_a_plug_in_is_held_to_its_word_too(factory, monkeypatch, capsys):
    """The control: what is registered from elsewhere is found, and if it is wrong it does not pass."""
    mine = FakeEntryPoint("mine", factory)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [mine] if group == "kvsim.policies" else [])
    assert list(available())[-1] == "mine"
    quick = settings(SETTINGS, max_examples=100, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(partial(CacheMachine, available()["mine"]), settings=quick)


@pytest.mark.parametrize("name", POLICIES)
def test_a_token_for_two_sequences_is_seen_by_both_or_refused(name):
    policy = POLICIES[name](CacheConfig(64, 8, 2, 16, for_any_layout=True, block_size=4, chunk_size=8))
    for seq in range(2):
        policy.open(seq, SequencePlan(4, 16, 8))
    before = policy.occupancy().owners
    try:
        policy.allocate([Chunk(0, 0, 4, (1,))])
    except (Unsupported, OutOfCells, Rejected):
        assert policy.occupancy().owners == before
    else:
        assert sum(owners == {0, 1} for owners in policy.occupancy().owners) == 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in KEEP_WHAT_WAS_PLACED])
def test_what_finds_no_room_is_taken_back_from_every_sequence_that_would_have_seen_it(name):
    """Two micro-batches for sequences 0 and 1 together: the first fits, the second does not."""
    policy = POLICIES[name](CacheConfig(32, 20, 2, 64, for_any_layout=True, block_size=4, chunk_size=8))
    with pytest.raises((Unsupported, OutOfCells, Rejected)):
        policy.allocate([Chunk(0, 0, 40, (1,))])
    assert policy.sequences() == []
    assert policy.usage().allocated == 0
