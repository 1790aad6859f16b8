"""Whole sequences copied to host memory and back, in random histories: each position keeps its host cell.

A pretended engine keeps what is in each cell of every group, and what each key was rotated by; it does exactly what
the policy reports. What a sequence reads after all of that must be its own tokens.
"""

import random
from collections import Counter

import numpy as np
import pytest

from policies import CacheConfig, Chunk, NoSlot, Unsupported, available
from policies.cells.host_copies import transfers_of
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy

CELLS, SEQUENCES, WINDOW = 48, 4, 7


def unified(name, **config):
    return available()[name](CacheConfig(cells=CELLS, n_ubatch=6, sequences=SEQUENCES, pad=8, **config))


def streams(*specs, n_streams, contiguous=False):
    config = CacheConfig(cells=specs[0].size, n_ubatch=6, sequences=SEQUENCES)
    return MultiStreamPolicy("streams", config, specs, n_streams=n_streams, contiguous=contiguous)


POLICIES = {
    "contiguous": lambda: unified("contiguous"),
    "fill-holes": lambda: unified("fill-holes", threshold=0.05),
    "full-compaction": lambda: unified("full-compaction", threshold=0.05),
    "tiled": lambda: unified("contiguous", kernel="tiled"),
    "one stream": lambda: streams(CacheSpec(CELLS), n_streams=1),
    "in a row": lambda: streams(CacheSpec(CELLS), n_streams=1, contiguous=True),
    "a stream each": lambda: streams(CacheSpec(CELLS // 2), n_streams=SEQUENCES),
    "a window": lambda: streams(CacheSpec(CELLS, share=0.5), CacheSpec(28, window=WINDOW, share=0.5), n_streams=1),
    "a narrow window": lambda: streams(
        CacheSpec(CELLS, share=0.5), CacheSpec(16, window=WINDOW, share=0.5), n_streams=1
    ),
    "windows": lambda: streams(
        CacheSpec(CELLS // 2, share=0.5), CacheSpec(16, window=WINDOW, share=0.5), n_streams=SEQUENCES
    ),
}


def first_needed(n, window):
    """The first position that the next token of a sequence of ``n`` tokens sees."""
    return 0 if window is None else max(n - window + 1, 0)


class PretendedEngine:
    """A token and a position for each cell of every group; the position is what its key was rotated to."""

    def __init__(self, policy):
        self.groups = [np.full((group.cells, 2), -1) for group in policy.groups]
        self.host = [{} for _ in policy.groups]

    def before(self, group, moves, shift):
        """Carry out moves, all at once, and then rotations."""
        cells = self.groups[group]
        for src, dst, n in zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True):
            cells[dst : dst + n] = cells[src : src + n].copy()
        cells[shift.cells, 1] += shift.deltas

    def forward(self, batch, texts):
        """A pass: each token's number and position go into its cell."""
        for group, place in enumerate(batch.places):
            self.before(group, place.moves, place.shift)
            at = 0
            for chunk in batch.chunks:
                for i in range(chunk.start, chunk.start + chunk.n):
                    self.groups[group][place.cells[at]] = texts[chunk.seq][i], i
                    at += 1

    def copy(self, copies):
        """Copies between cells and host cells."""
        for group, copy in enumerate(copies):
            self.before(group, copy.moves, copy.shift)
            for to_host, cell, host, n in copy.transfers:
                for i in range(n):
                    if to_host:
                        self.host[group][host + i] = tuple(self.groups[group][cell + i])
                    else:
                        # Of a window, also a position that was not copied out, since nothing will see it.
                        self.groups[group][cell + i] = self.host[group].get(host + i, (-1, -1))


class HostCopies:
    """Sequences grow, are truncated, lose tokens from their middle, are copied out and come back, in any place."""

    def __init__(self, name, seed):
        self.policy, self.rng = POLICIES[name](), random.Random(seed)
        self.windowed = any(group.window for group in self.policy.groups)
        self.moves = self.policy.moves_cells
        self.engine = PretendedEngine(self.policy)
        self.texts = {seq: [] for seq in range(SEQUENCES)}
        self.saved = []
        self.tokens = self.cells = 0
        self.seen = Counter()
        """What has happened."""

    def run(self, steps):
        """Random operations, each followed by a look at what every sequence holds."""
        operations = [self.grow_one] * 4 + [self.copy_out] * 3 + [self.copy_in] * 3
        operations += [self.truncate, self.shift_context, self.shift_context, self.compact]
        for _ in range(steps):
            self.rng.choice(operations)(self.rng.randrange(SEQUENCES))
            self.check_positions()
        self.check_cells()

    def grow(self, seq, n):
        """Place new tokens, and run what was placed."""
        text = self.texts[seq]
        before, start = text[:], len(text)
        text += range(self.tokens, self.tokens + n)
        self.tokens += n
        try:
            batches = self.policy.allocate([Chunk(seq, start, n)])
        except NoSlot:
            self.texts[seq] = before
            return
        for batch in batches:
            self.engine.forward(batch, self.texts)

    def grow_one(self, seq):
        self.grow(seq, self.rng.randint(1, 12))

    def truncate(self, seq):
        n = self.policy.can_truncate(seq, self.rng.randint(0, len(self.texts[seq])))
        self.policy.free(seq, n)
        del self.texts[seq][n:]

    def shift_context(self, seq):
        """Forget some tokens; those behind move up, and their keys are still to be rotated."""
        text, start, n = self.texts[seq], self.rng.randint(0, 5), self.rng.randint(1, 5)
        if start + n < len(text) and not self.windowed:
            self.policy.free(seq, start, start + n)
            self.policy.shift(seq, start + n, None, -n)
            del text[start : start + n]

    def compact(self, _):
        self.policy.compact()

    def copy_out(self, seq):
        """To host cells in any order; the sequence stays where it is."""
        text = self.texts[seq]
        if not text or len(self.saved) > 12:
            return
        host = list(range(self.cells, self.cells + len(text)))
        if self.rng.random() < 0.5:
            self.rng.shuffle(host)
        self.cells += len(text)
        host = np.array(host)
        state = self.state()
        copies = self.policy.copy_out(seq, host)
        assert self.state() == state
        self.check_pending_is_reported(copies)
        self.engine.copy(copies)
        self.saved.append((text[:], host))
        for group, (spec, copy) in enumerate(zip(self.policy.groups, copies, strict=True)):
            first = first_needed(len(text), spec.window)
            copied = sum(transfer.n for transfer in copy.transfers)
            # A window may still hold the position that the next token does not see any more.
            assert copied - (len(text) - first) in ((0,) if spec.window is None else (0, 1))
            last = [self.engine.host[group][cell] for cell in host[first:].tolist()]
            assert last == list(zip(text, range(len(text)), strict=True))[first:]

    def copy_in(self, seq):
        """Instead of what a sequence holds; or it ends up empty, and all others as they were."""
        if not self.saved:
            return
        text, host = self.rng.choice(self.saved)
        before = self.state(without=seq)
        try:
            copies = self.policy.copy_in(seq, host)
        except NoSlot:
            self.seen["no room"] += 1
            self.texts[seq] = []
            assert seq not in self.policy.sequences()
            if not self.windowed and not self.moves:
                assert self.state(without=seq) == before
            return
        self.seen["back"] += 1
        self.check_pending_is_reported(copies)
        self.engine.copy(copies)
        self.texts[seq] = text[:]
        if not self.windowed and not self.moves:
            assert self.state(without=seq) == before

    def check_pending_is_reported(self, copies):
        """Nothing is owed once the copies are made."""
        assert self.owes_nothing()
        self.seen["rotated"] += any(copy.shift.cells.size > 0 for copy in copies)
        self.seen["moved"] += any(copy.moves.n_runs > 0 for copy in copies)

    def owes_nothing(self):
        arenas = [self.policy.arena] if hasattr(self.policy, "arena") else [a for g in self.policy.arenas for a in g]
        return all(arena.pending.is_empty for arena in arenas)

    def state(self, without=None):
        """Position and sequences of each cell, by group, all but one sequence."""
        found = []
        for group in range(len(self.policy.groups)):
            cells = self.policy.occupancy(group)
            owners = [owner - {without} for owner in cells.owners]
            found.append([(at, own) if own else None for at, own in zip(cells.position.tolist(), owners, strict=True)])
        return found

    def check_positions(self):
        """Each sequence holds all its positions; of a window, those that may still be seen."""
        for group, spec in enumerate(self.policy.groups):
            held = {seq: [] for seq in self.texts}
            for position, owner in filter(None, self.state()[group]):
                for seq in owner:
                    held[seq].append(position)
            for seq, text in self.texts.items():
                first = first_needed(len(text), spec.window)
                assert sorted(p for p in held[seq] if p >= first) == list(range(first, len(text)))

    def check_cells(self):
        """Once all that is owed has been done, each cell has the token that its sequence has there, rotated to it."""
        for seq in self.texts:
            self.grow(seq, 1)
        if not self.owes_nothing():
            return
        for group, spec in enumerate(self.policy.groups):
            for cell, (position, owner) in ((c, held) for c, held in enumerate(self.state()[group]) if held):
                for seq in owner:
                    if position >= first_needed(len(self.texts[seq]), spec.window):
                        assert tuple(self.engine.groups[group][cell]) == (self.texts[seq][position], position)
                        self.seen["cells"] += 1


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_sequence_that_comes_back_is_as_it_was(name):
    seen = Counter()
    for seed in range(25):
        world = HostCopies(name, seed)
        world.run(40)
        seen += world.seen
    assert seen["back"] > 10
    assert seen["no room"] > 10 or "each" in name or name == "windows", "of a stream of its own, it never asks for more"
    assert seen["cells"] > 100
    assert world.windowed or seen["rotated"] > 10
    assert seen["moved"] > 5 or not world.moves


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_reads_after_a_sequence_came_back_are_those_of_one_that_never_left(name):
    """What attention reads is counted from the cells that it has now."""
    policy = POLICIES[name]()
    host = np.arange(15)
    policy.allocate([Chunk(0, 0, 15)])
    policy.copy_out(0, host)
    policy.free(0)
    policy.allocate([Chunk(1, 0, 4)])
    policy.copy_in(0, host)
    (batch,) = policy.allocate([Chunk(0, 15, 1)], views=True)
    for place, group in zip(batch.places, policy.groups, strict=True):
        seen = 16 if group.window is None else min(group.window, 16)
        assert int(place.reads.useful[0]) == seen
        assert sorted(place.views[0].positions.tolist())[-seen:] == list(range(16 - seen, 16))


def test_a_policy_that_cannot_copies_nothing():
    paged = available()["paged"](CacheConfig(cells=64, block_size=16, n_ubatch=32, sequences=2))
    assert not paged.can_copy_out
    with pytest.raises(Unsupported):
        paged.copy_out(0, np.arange(3))
    with pytest.raises(Unsupported):
        paged.copy_in(0, np.arange(3))


def test_runs_rise_in_both_and_are_as_few_as_they_can_be():
    cells, host = np.array([4, 5, 6, 9, 10, 3]), np.array([0, 1, 2, 3, 5, 6])
    runs = transfers_of(cells, host, to_host=True)
    assert [(run.cell, run.host, run.n) for run in runs] == [(4, 0, 3), (9, 3, 1), (10, 5, 1), (3, 6, 1)]
    assert len(transfers_of(cells[:0], host[:0], to_host=False)) == 0
    assert runs.cells == 6
    assert list(runs[1:3]) == [runs[1], runs[2]]
