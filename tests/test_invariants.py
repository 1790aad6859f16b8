"""What every policy owes its engine, whatever is asked of it in whatever order.

A shadow of the cache, two arrays by cell, stands in for the engine: which token was written where, and by which
position its key is rotated. It is changed by what the policy reports and by nothing else; so a move or a rotation that
was forgotten, or told in the wrong order, shows as a cell that does not hold what the policy says it holds.
"""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from policies import CacheConfig, Chunk, NoSlot, SequencePlan, Unsupported, available, presets
from policies.compactors import pack
from policies.eviction import free_blocks
from policies.llamacpp import mid_2025, today
from policies.paged import PagedPolicy
from policies.split import CacheSpec, Rejected
from policies.unified import UnifiedPolicy

SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
KEEP_WHAT_WAS_PLACED = {"llama.cpp-2024"}
"""Where a step that finds no room keeps the micro-batches that had found theirs, as the original did."""
RESERVE_AHEAD = {"hf-reserved", "oracle", "ring"}
"""Whoever is let in ends well."""
TAKE_ANY_ROOM = {"contiguous", "llama.cpp-2024", "split-regions"}
"""One micro-batch finds room exactly where ``usage().placeable`` says so."""
COPY_ON_WRITE = {"paged", "vllm", "paged-window", "chunked"}
"""Where two sequences that share a block each get a cell for the same token once one of them goes on."""
PACK_EVERYTHING = {"full-compaction", "adaptive", "threshold-compaction", "idle-compaction"}


def mid_2025_with_defragmentation(config):
    cache = [CacheSpec(config.cells, 32)]
    return mid_2025("mid-2025", config, cache, threshold=config.threshold, max_nodes=1024)


def tight_sliding_window(config):
    """A window cache with hardly more cells than one window, so that they are used again and again."""
    streams = 1 if config.unified else config.sequences
    size = config.cells // streams
    window = min(size, config.window * (config.sequences if config.unified else 1) + config.n_ubatch)
    caches = [CacheSpec(size, 32, share=0.5), CacheSpec(window, 32, window=config.window, share=0.5)]
    return today("tight sliding-window", config, caches, n_streams=streams)


POLICIES = available() | {"mid-2025": mid_2025_with_defragmentation, "tight sliding-window": tight_sliding_window}

CONFIGS = st.builds(
    CacheConfig,
    cells=st.integers(32, 160),
    n_ubatch=st.integers(4, 32),
    sequences=st.integers(2, 6),
    max_tokens=st.integers(16, 64),
    block_size=st.just(4),
    chunk_size=st.just(8),
    pad=st.sampled_from([1, 8, 32]),
    kernel=st.sampled_from([None, "masked", "tiled", "gather", "sliced"]),
    threshold=st.sampled_from([0.0, 0.1, 0.5]),
    window=st.integers(8, 24),
    sinks=st.integers(0, 3),
    unified=st.booleans(),
    sort_batch=st.booleans(),
)
SEQUENCES = st.integers(0, 5)
SHARES = st.sampled_from([0.5, 0.0, 0.2, 0.8, 0.99])
"""Where in a sequence to cut, as a share of its length."""
TOKENS = st.sampled_from([13, 1, 2, 5, 8, 21, 34, 48])


class CacheMachine(RuleBasedStateMachine):
    """A policy, what its sequences should hold, and the shadow of the cache."""

    def __init__(self, factory):
        super().__init__()
        self.factory = factory
        self.fresh = count()
        self.plans = {}
        """Of each open sequence."""
        self.text = {}
        """Of each open sequence: its tokens, each a number of its own, in order."""
        self.window = {}
        """Of each group with a window and each open sequence: the tokens that must still be there."""
        self.moves_owed = self.turns_owed = False
        """Whether the shadow waits for moves or rotations that the policy will report later."""

    @initialize(config=CONFIGS)
    def build(self, config):
        self.config = config
        self.policy = self.factory(config)
        self.ids = [np.full(group.cells, -1) for group in self.policy.groups]
        self.rotary = [np.full(group.cells, -(10**6)) for group in self.policy.groups]
        self.window = {g: {} for g, group in enumerate(self.policy.groups) if group.window is not None}
        self.ring = min(config.window, config.max_tokens, config.cells) if self.policy.endless else None
        self.streams = self.policy.capacity // self.policy.longest
        self.gives_up_blocks = self.policy.name == "paged-window"

    # What is asked of the policy

    @rule(seq=SEQUENCES, prompt=TOKENS, more=TOKENS)
    def open(self, seq, prompt, more):
        seq %= self.config.sequences
        most = self.config.max_tokens
        plan = SequencePlan(min(prompt, most), most, min(prompt + more, most))
        if seq not in self.plans and self.policy.admits(plan):
            self.begin(seq, plan)

    @rule(prompts=st.lists(st.tuples(SEQUENCES, TOKENS, TOKENS), min_size=2, max_size=4))
    def run_prompts(self, prompts):
        """New sequences start, or old ones take more in; whoever else is there generates a token."""
        for seq, n, more in prompts:
            self.open(seq, n, more)
        self.run_a_step([(seq % self.config.sequences, n) for seq, n, _ in prompts] + self.everyone())

    @precondition(lambda self: self.plans)
    @rule(rounds=st.integers(1, 4), others=st.lists(st.tuples(SEQUENCES, TOKENS), max_size=3))
    def generate(self, rounds, others):
        """A token for everyone, now and then more for some."""
        for _ in range(rounds):
            self.run_a_step(others + self.everyone())
            others = []

    def everyone(self):
        return [(seq, 1) for seq in self.plans]

    def run_a_step(self, wants):
        step = []
        for seq, n in wants:
            n = min(n, self.room_of(seq)) if seq in self.plans else 0
            if n and seq not in {chunk.seq for chunk in step}:
                step.append(Chunk(seq, len(self.text[seq]), n))
        if step:
            self.allocate(step)

    @precondition(lambda self: self.plans)
    @rule(which=SEQUENCES, what=st.sampled_from(["tail", "tail", "all", "nothing"]), cut=SHARES)
    def free(self, which, what, cut):
        seq = sorted(self.plans)[which % len(self.plans)]
        start = 0 if what == "all" else int(cut * len(self.text[seq]))
        with self.unless_unsupported():
            if what == "nothing":
                before = self.state()
                self.policy.free(seq, len(self.text[seq]) + 1)
                self.policy.free(seq, start, start)
                assert self.state() == before
            else:
                self.policy.free(seq, start)
                self.forget(seq, self.text[seq][start:])
                if start == 0:
                    self.end(seq)

    @precondition(lambda self: self.plans)
    @rule(which=SEQUENCES, keep=SHARES, discard=SHARES)
    def shift_the_context(self, which, keep, discard):
        """Forget a range in the middle; what follows moves up."""
        seq = sorted(self.plans)[which % len(self.plans)]
        text = self.text[seq]
        keep = int(keep * len(text))
        discard = 1 + int(discard * (len(text) - keep - 1))
        behind = text[keep + discard :]
        if not behind or any(set(behind) & set(other) for s, other in self.text.items() if s != seq):
            return
        with self.unless_unsupported():
            self.policy.free(seq, keep, keep + discard)
            self.forget(seq, text[keep : keep + discard])
            self.policy.shift(seq, keep + discard, None, -discard)
            self.turns_owed = True

    @precondition(lambda self: self.plans)
    @rule(which=SEQUENCES, to=SEQUENCES, cut=st.none() | SHARES)
    def copy(self, which, to, cut):
        src, dst = sorted(self.plans)[which % len(self.plans)], to % self.config.sequences
        text = self.text[src]
        if not text or self.text.get(dst) or src == dst:
            return
        if dst not in self.plans:
            if not self.policy.admits(self.plans[src]):
                return
            self.begin(dst, self.plans[src])
        stop = None if cut is None else 1 + int(cut * len(text))
        with self.unless_unsupported():
            self.policy.copy(src, dst, 0, stop)
            self.text[dst] = text[:stop]
            for kept in self.window.values():
                kept[dst] = kept[src] & set(text[:stop])
            self.moves_owed |= self.streams > 1

    @precondition(lambda self: len(self.plans) > 3)
    @rule(which=SEQUENCES)
    def keep_one(self, which):
        seq = sorted(self.plans)[which % len(self.plans)]
        self.policy.keep(seq)
        for other in set(self.plans) - {seq}:
            if self.streams == 1:  # With streams the others lie in caches of their own, which stay as they are.
                self.end(other)

    @precondition(lambda self: self.plans)
    @rule()
    def compact(self):
        before = self.policy.usage().external_fragmentation
        self.moves_owed |= self.policy.compact().n_runs > 0
        assert self.policy.usage().external_fragmentation <= before + 1e-12
        if self.policy.name in PACK_EVERYTHING:
            assert self.policy.usage().free_runs <= 1

    @precondition(lambda self: self.plans)
    @rule()
    def idle(self):
        moves = self.policy.idle()
        moves.apply(self.ids[0])
        moves.apply(self.rotary[0])
        self.moves_owed &= moves.n_runs == 0

    def empty_the_cache(self):
        for seq in list(self.plans):
            self.policy.free(seq)
            self.end(seq)
        assert self.policy.sequences() == []
        usage = self.policy.usage()
        assert (usage.stored, usage.allocated, usage.span) == (0, 0, 0)
        assert (usage.free, usage.free_runs) == (self.policy.capacity, self.streams)

    def teardown(self):
        if hasattr(self, "policy"):
            self.empty_the_cache()

    # What must be true after each

    @invariant()
    def cells_hold_what_sequences_remember(self):
        for group in range(len(self.policy.groups)):
            cells_of = self.cells_by_owner(group)
            assert set(cells_of) <= set(self.plans)
            for seq in self.plans:
                cells, positions = cells_of.get(seq, ([], []))
                tokens = self.tokens_at(group, seq, positions)
                if not self.moves_owed:
                    assert self.ids[group][cells].tolist() == tokens
                    if not self.turns_owed:
                        assert self.rotary[group][cells].tolist() == positions

    @invariant()
    def a_cell_has_two_owners_only_for_a_copied_token(self):
        for group in range(len(self.policy.groups)):
            owners = self.policy.occupancy(group).owners
            token_in = {}
            for seq, (cells, positions) in self.cells_by_owner(group).items():
                for cell, token in zip(cells, self.tokens_at(group, seq, positions), strict=True):
                    assert token_in.setdefault(cell, token) == token
            assert set(token_in) == {cell for cell, of in enumerate(owners) if of}
            if self.streams == 1 and self.policy.name not in COPY_ON_WRITE:
                assert len(set(token_in.values())) == len(token_in)

    @invariant()
    def usage_counts_the_cells(self):
        policy, usage = self.policy, self.policy.usage()
        used = np.array([bool(of) for of in policy.occupancy().owners])
        assert usage.capacity == policy.capacity <= policy.groups[0].cells
        assert usage.stored == used.sum() <= usage.allocated
        assert usage.free + usage.allocated == usage.capacity
        assert 0 <= usage.external_fragmentation <= 1
        assert 0 <= usage.largest_free_run <= usage.free
        top = int(np.flatnonzero(used).max(initial=-1)) + 1
        assert usage.span == top
        if usage.stored == usage.allocated and policy.capacity == policy.groups[0].cells:
            free_runs = [run for stream in np.split(used, self.streams) for run in lengths_of_runs(~stream)]
            assert (usage.free_runs, usage.largest_free_run) == (len(free_runs), max(free_runs, default=0))

    @invariant()
    def sequences_are_those_that_hold_cells(self):
        holding = [seq for seq in sorted(self.plans) if self.text[seq]]
        named = self.policy.sequences()
        assert named == sorted(set(named))
        assert set(holding) <= set(named) <= set(self.plans)

    # How it is told

    def begin(self, seq, plan):
        self.policy.open(seq, plan)
        self.plans[seq], self.text[seq] = plan, []
        for kept in self.window.values():
            kept[seq] = set()

    def end(self, seq):
        del self.plans[seq], self.text[seq]
        for kept in self.window.values():
            del kept[seq]

    def forget(self, seq, tokens):
        gone = set(tokens)
        self.text[seq] = [token for token in self.text[seq] if token not in gone]
        for kept in self.window.values():
            kept[seq] -= gone

    def room_of(self, seq):
        final = 4 * self.config.max_tokens if self.policy.endless else self.plans[seq].final_tokens
        return max(final - len(self.text[seq]), 0)

    @contextmanager
    def unless_unsupported(self):
        before = self.state()
        try:
            yield
        except Unsupported:
            assert self.state() == before

    def state(self):
        groups = range(len(self.policy.groups))
        maps = [self.policy.occupancy(group) for group in groups]
        return [(m.position.tolist(), m.owners) for m in maps], self.policy.usage(), self.policy.sequences()

    def allocate(self, step):
        before, usage = self.state(), self.policy.usage()
        n = sum(chunk.n for chunk in step)
        try:
            batches = self.policy.allocate(step, views=True)
            if self.policy.name in TAKE_ANY_ROOM and n <= self.config.n_ubatch:
                assert n <= usage.placeable
            full = False
        except NoSlot as reason:
            batches, full = reason.done, True
            assert self.policy.name not in RESERVE_AHEAD
            assert not (self.policy.name in TAKE_ANY_ROOM and n <= min(usage.placeable, self.config.n_ubatch))
            assert not batches or self.policy.name in KEEP_WHAT_WAS_PLACED
        done = Counter()
        for batch in batches:
            for chunk in batch.chunks:
                done[chunk.seq] += chunk.n
        if full:
            self.no_room(step, before, untouched=not batches)
        else:
            assert done == {chunk.seq: chunk.n for chunk in step}
        self.final = {seq: len(self.text[seq]) + n for seq, n in done.items()}
        for seq, end in self.final.items():
            self.window_moves_on(seq, end)
        for batch in batches:
            self.forward(batch, last=batch is batches[-1])
        if batches:
            self.moves_owed = self.turns_owed = False
        if full:
            self.moves_owed = self.turns_owed = True

    def no_room(self, step, before, untouched):
        """Nothing has changed but for compaction; and, as in the original, for what a window gave up."""
        for chunk in step:
            self.window_moves_on(chunk.seq, chunk.start + chunk.n)
        if untouched and not self.gives_up_blocks:
            (maps, usage, sequences), (old_maps, old_usage, old_sequences) = self.state(), before
            assert sequences == old_sequences
            assert (usage.stored, usage.allocated) == (old_usage.stored, old_usage.allocated)
            if maps[0] == old_maps[0]:
                assert usage == old_usage
            for group in range(len(maps)):
                if group not in self.window:
                    assert tokens_of(maps[group]) == tokens_of(old_maps[group])

    def window_moves_on(self, seq, end):
        """Once a sequence ends at ``end``, cells outside of the window of its next token may be used again."""
        for group, kept in self.window.items():
            kept[seq] -= set(self.text[seq][: max(end + 1 - self.policy.groups[group].window, 0)])

    def forward(self, batch, last):
        """One forward pass of the engine: move, rotate, write; then look at what attention may see."""
        assert batch.n_tokens == sum(chunk.n for chunk in batch.chunks) <= self.config.n_ubatch
        written = {}
        for chunk in batch.chunks:
            text = self.text[chunk.seq]
            assert (chunk.start, chunk.also) == (len(text), ())
            written[chunk.seq] = [next(self.fresh) for _ in range(chunk.n)]
            text += written[chunk.seq]
            for group, kept in self.window.items():
                lowest = self.final[chunk.seq] + 1 - self.policy.groups[group].window
                kept[chunk.seq] |= set(text[max(lowest, chunk.start) :])
        for group, place in enumerate(batch.places):
            ids, rotary = self.ids[group], self.rotary[group]
            for array in (ids, rotary):
                place.moves.apply(array)
            assert len(set(place.shift.cells.tolist())) == len(place.shift.cells)
            rotary[place.shift.cells] += place.shift.deltas
            assert len(set(place.cells.tolist())) == batch.n_tokens
            ends = np.cumsum([chunk.n for chunk in batch.chunks])[:-1]
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, ends), strict=True):
                ids[own], rotary[own] = written[chunk.seq], view.positions[-chunk.n :]
                if self.ring is None:
                    assert rotary[own].tolist() == list(range(chunk.start, chunk.start + chunk.n))
            cells_of = self.cells_by_owner(group)
            for chunk, view, own in zip(batch.chunks, place.views, np.split(place.cells, ends), strict=True):
                cells, positions = view.cells.tolist(), view.positions.tolist()
                assert cells[-chunk.n :] == own.tolist()
                assert ids[cells].tolist() == self.tokens_at(group, chunk.seq, positions)
                assert rotary[cells].tolist() == positions
                if last:
                    assert (cells, positions) == cells_of[chunk.seq]
            self.check_reads(group, batch, place)

    def check_reads(self, group, batch, place):
        reads = place.reads
        assert reads.tokens.tolist() == [chunk.n for chunk in batch.chunks]
        if group not in self.window:
            assert reads.useful.tolist() == [len(view.cells) for view in place.views]
            assert (reads.useful <= reads.scanned).all()

    def cells_by_owner(self, group):
        """Of each sequence in a group: its cells in order of position, and those positions."""
        table = self.policy.occupancy(group)
        found = {}
        for cell, (position, owners) in enumerate(zip(table.position.tolist(), table.owners, strict=True)):
            assert (position >= 0) == bool(owners)
            for seq in owners:
                found.setdefault(seq, []).append((position, cell))
        return {
            seq: ([cell for _, cell in sorted(pairs)], [position for position, _ in sorted(pairs)])
            for seq, pairs in found.items()
        }

    def tokens_at(self, group, seq, positions):
        """The tokens that a sequence should hold, given at which ascending positions the policy holds some.

        Fails unless these are all that its layout promises to keep, each once.
        """
        text = self.text[seq]
        if group in self.window:
            assert positions == sorted(set(positions))
            tokens = [text[position] for position in positions]
            assert self.window[group][seq] <= set(tokens)
            return tokens
        if self.ring is None or len(text) <= self.ring:
            assert positions == list(range(len(text)))
            return text
        sinks = min(self.config.sinks, self.ring - 1)
        newest = self.ring - sinks
        assert positions[:sinks] == list(range(sinks))
        first = positions[sinks]
        assert positions[sinks:] == list(range(first, first + newest))
        assert sinks <= first <= max(self.config.max_tokens, self.ring) - newest
        return text[:sinks] + text[len(text) - newest :]


def lengths_of_runs(free):
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(int)))
    return (edges[1::2] - edges[::2]).tolist()


def tokens_of(cell_map):
    position, owners = cell_map
    return Counter(zip(position, owners, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_its_word(name):
    run_state_machine_as_test(partial(CacheMachine, POLICIES[name]), settings=SETTINGS)


class ForgetsAMove(UnifiedPolicy):
    """Compacts, and does not say so."""

    def compact(self):
        moves = super().compact()
        self.arena.settle_moves()
        return moves


class SharesBlocks(PagedPolicy):
    """Hands out the lowest block again and again."""

    def _place(self, chunks, *rest):
        for chunk in chunks:
            self.tables[chunk.seq].table[0] = 1
        return super()._place(chunks, *rest)


class FakeEntryPoint:
    def __init__(self, name, factory):
        self.name, self.load = name, lambda: factory


@pytest.mark.parametrize(
    "factory",
    [
        lambda config: ForgetsAMove("mine", config, compactor=pack),
        lambda config: SharesBlocks("mine", config, block_size=4, free=partial(free_blocks, "lru")),
    ],
    ids=["forgets a move", "shares blocks"],
)
def test_a_plug_in_is_held_to_its_word_too(factory, monkeypatch, capsys):
    """The control: what is registered from elsewhere is found, and if it is wrong it does not pass."""
    mine = FakeEntryPoint("mine", factory)
    monkeypatch.setattr(presets, "entry_points", lambda group: [mine] if group == "kvsim.policies" else [])
    assert list(available())[-1] == "mine"
    quick = settings(SETTINGS, max_examples=100, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(partial(CacheMachine, available()["mine"]), settings=quick)


@pytest.mark.parametrize("name", POLICIES)
def test_a_token_for_two_sequences_is_seen_by_both_or_refused(name):
    policy = POLICIES[name](CacheConfig(cells=64, n_ubatch=8, sequences=2, max_tokens=16, block_size=4, chunk_size=8))
    for seq in range(2):
        policy.open(seq, SequencePlan(4, 16, 8))
    before = policy.occupancy().owners
    try:
        policy.allocate([Chunk(0, 0, 4, (1,))])
    except (Unsupported, NoSlot, Rejected):
        assert policy.occupancy().owners == before
    else:
        assert sum(owners == {0, 1} for owners in policy.occupancy().owners) == 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in KEEP_WHAT_WAS_PLACED])
def test_what_finds_no_room_is_taken_back_from_every_sequence_that_would_have_seen_it(name):
    """Two micro-batches for sequences 0 and 1 together: the first fits, the second does not."""
    policy = POLICIES[name](CacheConfig(cells=32, n_ubatch=20, sequences=2, max_tokens=64, block_size=4, chunk_size=8))
    with pytest.raises((Unsupported, NoSlot, Rejected)):
        policy.allocate([Chunk(0, 0, 40, (1,))])
    assert policy.sequences() == []
    assert policy.usage().allocated == 0
