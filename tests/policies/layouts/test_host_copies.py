"""Whole sequences copied to host memory and back, in random histories: each position keeps its host cell."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from policies import CacheConfig, Chunk, OutOfCells, Unsupported, available
from policies.cells.host_copies import transfers_of
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy
from tests.policies.invariants.rules import CacheMachine
from tests.policies.invariants.subjects import POLICIES

CONFIG = CacheConfig(
    cells=48, n_ubatch=6, sequences=4, max_tokens=40, pad=8, window=7, threshold=0.05, for_any_layout=True
)
COPYING = {
    **{name: POLICIES[name] for name in ("contiguous", "fill-holes", "full-compaction")},
    "in a row": lambda config: MultiStreamPolicy("in a row", config, [CacheSpec(config.cells)], contiguous=True),
    "a stream each": lambda config: MultiStreamPolicy("streams", config, [CacheSpec(24)], n_streams=4),
    "a narrow window": lambda config: MultiStreamPolicy(
        "window", config, [CacheSpec(48, share=0.5), CacheSpec(16, window=7, share=0.5)]
    ),
    "windows": lambda config: MultiStreamPolicy(
        "windows", config, [CacheSpec(24, share=0.5), CacheSpec(16, window=7, share=0.5)], n_streams=4
    ),
}


class Copies(CacheMachine):
    """The machine of all policies, driven at random; its sequences are also copied out and come back, in any place."""

    def __init__(self, factory, seed):
        super().__init__(factory)
        self.build(CONFIG, True)
        self.rng, self.met = random.Random(seed), Counter()
        self.host = defaultdict(dict)
        """By group: token and rotation in each host cell."""
        self.saved, self.n_host = [], 0

    def run(self, steps):
        """Random operations, each followed by a look at what every sequence holds."""
        operations = [self.grow] * 4 + [self.export] * 3 + [self.import_] * 3
        operations += [self.truncate, self.forget_some, self.forget_some, lambda _: self.compact()]
        for _ in range(steps):
            self.rng.choice(operations)(self.rng.randrange(CONFIG.sequences))
            self.all_checks_hold()

    def grow(self, seq):
        self.open(seq, 1, 39, (), False, False)
        self.run_a_step([(seq, self.rng.randint(1, 12))])

    def truncate(self, seq):
        text = self.shadow.text.get(seq)
        if text:
            n = self.policy.can_truncate(seq, self.rng.randint(0, len(text)))
            self.policy.free(seq, n)
            self.shadow.truncate(seq, n, kept=True)

    def forget_some(self, seq):
        """Tokens behind them move up, and their keys are still to be rotated."""
        if self.shadow.plans and not self.shadow.window:
            self.shift_the_context(seq, self.rng.random(), 0.1)

    def export(self, seq):
        """To host cells in any order; the sequence stays where it is."""
        text = self.shadow.text.get(seq)
        if not text:
            return
        host = np.arange(self.n_host, self.n_host + len(text))
        if self.rng.random() < 0.5:
            self.rng.shuffle(host)
        self.n_host += len(text)
        before = self.state()
        exported = self.policy.export(seq, host)
        assert self.state() == before
        self.carry_out(exported.copies)
        for group, (spec, copy) in enumerate(zip(self.policy.groups, exported.copies, strict=True)):
            first = 0 if spec.window is None else max(len(text) - spec.window + 1, 0)
            # A window may still hold the position that the next token does not see any more.
            extra = sum(transfer.n for transfer in copy.transfers) - (len(text) - first)
            assert extra in ((0,) if spec.window is None else (0, 1))
            assert all(self.host[group][host[at]] == (text[at], at) for at in range(first, len(text)))
        self.saved.append((self.shadow.plans[seq], text[:], exported))

    def import_(self, seq):
        """Instead of what a sequence holds; or it ends up empty, and all others as they were."""
        if not self.saved:
            return
        plan, text, exported = self.rng.choice(self.saved)
        if seq in self.shadow.plans:
            self.shadow.end(seq)
        before = self.others(seq)
        try:
            copies = self.policy.import_(seq, exported)
        except OutOfCells:
            self.met["no room"] += 1
            assert seq not in self.policy.sequences()
            self.shadow.moves_unreported |= self.policy.moves_cells
        else:
            self.met["back"] += 1
            # Numbers of their own, so that no other sequence's cell can pass for one of these.
            own = self.shadow.words.spell([self.shadow.words.place_of[token] for token in text])
            self.shadow.begin(seq, plan)
            self.shadow.text[seq] = own
            self.shadow.hold_window(seq)
            self.carry_out(copies, dict(zip(text, own, strict=True)))
        if not self.policy.moves_cells and not self.shadow.window:
            assert self.others(seq) == before

    def carry_out(self, copies, numbers=None):
        """Make copies, and all that is due before them; then nothing is owed.

        ``numbers``: by that of each token in the host tier.
        """
        for group, copy in enumerate(copies):
            ids, rotary = self.shadow.ids[group], self.shadow.rotary[group]
            for array in (ids, rotary):
                copy.moves.apply(array)
            rotary[copy.shift.cells] += copy.shift.deltas
            self.met["moved"] += copy.moves.n_runs > 0
            self.met["rotated"] += copy.shift.cells.size > 0
            for to_host, cell, host, n in copy.transfers:
                for i in range(n):
                    if to_host:
                        self.host[group][host + i] = int(ids[cell + i]), int(rotary[cell + i])
                    else:
                        # Of a window, also a position that was not copied out, since nothing will see it.
                        token, rotary[cell + i] = self.host[group].get(host + i, (-1, -1))
                        ids[cell + i] = numbers.get(token, -1)
        self.shadow.moves_unreported = self.shadow.rotations_unreported = False
        self.all_checks_hold()

    def others(self, seq):
        """Position and sequences of each cell, but for one sequence."""
        found = []
        for group in range(len(self.policy.groups)):
            cells = self.policy.occupancy(group)
            owners = [of - {seq} for of in cells.owners]
            found += [(at, of) if of else None for at, of in zip(cells.position.tolist(), owners, strict=True)]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", COPYING)
def test_a_sequence_that_comes_back_is_as_it_was(name):
    met = Counter()
    for seed in range(25):
        world = Copies(COPYING[name], seed)
        world.run(40)
        world.teardown()
        met += world.met
    assert met["back"] > 10
    assert met["no room"] > 10 or world.shadow.streams > 1, "of a stream of its own, it never asks for more"
    assert world.shadow.window or met["rotated"] > 10
    assert met["moved"] > 5 or name not in ("fill-holes", "full-compaction")


@pytest.mark.parametrize("name", COPYING)
def test_reads_after_a_sequence_came_back_are_those_of_one_that_never_left(name):
    """What attention reads is counted from the cells that it has now."""
    policy = COPYING[name](CONFIG)
    host = np.arange(15)
    policy.allocate([Chunk(0, 0, 15)])
    exported = policy.export(0, host)
    policy.free(0)
    policy.allocate([Chunk(1, 0, 4)])
    policy.import_(0, exported)
    (batch,) = policy.allocate([Chunk(0, 15, 1)], views=True)
    for place, group in zip(batch.places, policy.groups, strict=True):
        seen = 16 if group.window is None else min(group.window, 16)
        assert int(place.reads.useful[0]) == seen
        assert sorted(place.views[0].positions.tolist())[-seen:] == list(range(16 - seen, 16))


def test_a_policy_that_cannot_copies_nothing():
    paged = available()["paged"](CacheConfig(cells=64, block_size=16, n_ubatch=32, sequences=2))
    assert not paged.can_export
    with pytest.raises(Unsupported):
        paged.export(0, np.arange(3))


def test_what_has_no_tier_of_its_own_exports_only_to_cells_that_are_named():
    for make in COPYING.values():
        policy = make(CONFIG)
        policy.allocate([Chunk(0, 0, 3)])
        assert policy.can_export
        assert policy.export(0) is None


def test_runs_rise_in_both_and_are_as_few_as_they_can_be():
    cells, host = np.array([4, 5, 6, 9, 10, 3]), np.array([0, 1, 2, 3, 5, 6])
    runs = transfers_of(cells, host, to_host=True)
    assert [(run.cell, run.host, run.n) for run in runs] == [(4, 0, 3), (9, 3, 1), (10, 5, 1), (3, 6, 1)]
    assert len(transfers_of(cells[:0], host[:0], to_host=False)) == 0
    assert runs.cells == 6
    assert list(runs[1:3]) == [runs[1], runs[2]]
