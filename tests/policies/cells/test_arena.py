"""The arena against a plain model: for each cell a position, a set of sequences, and a rotation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.arena import FOREVER, Arena
from policies.compaction.compactors import fill_holes, min_cells_to_move, pack
from policies.layouts.stream_plans import SavedCells
from policies.vocabulary import Chunk, Moves

SIZE = 24
DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=125)


class PlainArena:
    """What an arena should hold, as dictionaries by cell."""

    def __init__(self):
        self.position, self.seqs, self.rotation = {}, {}, {}

    def put(self, cells, seqs, start):
        for i, cell in enumerate(cells):
            self.position[cell], self.seqs[cell], self.rotation[cell] = start + i, set(seqs), 0

    def inside(self, seq, start, stop):
        return [
            cell
            for cell in sorted(self.seqs)
            if (seq < 0 or seq in self.seqs[cell]) and start <= self.position[cell] < stop
        ]

    def drop(self, cells):
        for cell in cells:
            del self.position[cell], self.seqs[cell], self.rotation[cell]
        return cells

    def remove(self, seq, start, stop):
        gone = self.inside(seq, start, stop)
        for cell in gone:
            self.seqs[cell] = set() if seq < 0 else self.seqs[cell] - {seq}
        return self.drop([cell for cell in gone if not self.seqs[cell]])

    def keep(self, seq):
        for cell in self.seqs:
            self.seqs[cell] &= {seq}
        return self.drop([cell for cell in sorted(self.seqs) if not self.seqs[cell]])

    def share(self, src, dst, start, stop):
        for cell in self.inside(src, start, stop):
            self.seqs[cell].add(dst)

    def shift(self, seq, start, stop, delta):
        changed = self.inside(seq, start, stop)
        for cell in changed:
            self.position[cell] += delta
            self.rotation[cell] += delta
        return changed, self.drop([cell for cell in changed if self.position[cell] < 0])

    def divide(self, seq, start, stop, divisor):
        changed = self.inside(seq, start, stop)
        for cell in changed:
            self.rotation[cell] += self.position[cell] // divisor - self.position[cell]
            self.position[cell] //= divisor
        return changed

    def compact(self, plan):
        for src, dst, n in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
            for table in (self.position, self.seqs, self.rotation):
                for cell, value in [(dst + i, table.pop(src + i)) for i in range(n)]:
                    table[cell] = value

    def settle(self):
        owed = {cell: by for cell, by in self.rotation.items() if by}
        self.rotation = dict.fromkeys(self.rotation, 0)
        return owed


SEQ = st.integers(0, 3)
RANGE = st.tuples(st.integers(0, 12), st.integers(0, 14) | st.just(FOREVER))
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sets(st.integers(0, SIZE - 1), max_size=9), st.sets(SEQ, min_size=1), RANGE),
    st.tuples(st.just("remove"), st.integers(-1, 3), RANGE),
    st.tuples(st.just("keep"), SEQ),
    st.tuples(st.just("share"), SEQ, SEQ, RANGE),
    st.tuples(st.just("shift"), SEQ, RANGE, st.integers(-6, 6)),
    st.tuples(st.just("divide"), SEQ, RANGE, st.integers(1, 4)),
    st.tuples(st.just("compact"), st.sampled_from([pack, lambda arena: fill_holes(arena, 2)])),
    st.tuples(st.just("settle")),
)
EDITS = OPERATIONS.filter(lambda operation: operation[0] not in ("put", "settle"))


def perform(arena, plain, operation):
    """Carry an operation out on both, and compare what they return."""
    match operation:
        case ("put", cells, seqs, (start, _)):
            free = np.array(sorted(cells - set(plain.seqs)), dtype=np.int64)
            if len(free):
                arena.free.take_each(free.tolist())
                arena.put(free, seqs, start)
                plain.put(free.tolist(), seqs, start)
        case ("remove", seq, between):
            assert arena.remove(seq, *between).tolist() == plain.remove(seq, *between)
        case ("keep", seq):
            assert arena.keep(seq).tolist() == plain.keep(seq)
        case ("share", src, dst, between):
            arena.share(src, dst, *between)
            plain.share(src, dst, *between)
        case ("shift", seq, between, delta):
            changed, gone = arena.shift(seq, *between, delta)
            assert (changed.tolist(), gone.tolist()) == plain.shift(seq, *between, delta)
        case ("divide", seq, between, divisor):
            assert arena.divide(seq, *between, divisor).tolist() == plain.divide(seq, *between, divisor)
        case ("compact", compactor):
            plan = compactor(arena)
            arena.compact(plan)
            plain.compact(plan)
        case ("settle",):
            _, shift = arena.pending.settle(arena.owner)
            assert dict(zip(shift.cells.tolist(), shift.deltas.tolist(), strict=True)) == plain.settle()
            assert arena.pending.settle_moves().n_runs == 0


def compare(arena, plain):
    cells = arena.cell_map()
    assert [set(seqs) for seqs in cells.owners] == [plain.seqs.get(cell, set()) for cell in range(SIZE)]
    assert cells.position.tolist() == [plain.position.get(cell, -1) for cell in range(SIZE)]
    assert arena.used == len(plain.seqs) == SIZE - arena.free.total
    assert arena.top == max(plain.seqs, default=-1) + 1
    assert min_cells_to_move(arena) == sum(cell >= arena.used for cell in plain.seqs)
    assert [cell for start, end in arena.free for cell in range(start, end)] == sorted(
        set(range(SIZE)) - set(plain.seqs)
    )
    assert arena.sequences() == sorted(set().union(*plain.seqs.values()))
    for seq in range(4):
        mine = sorted(plain.inside(seq, 0, FOREVER), key=lambda cell: (plain.position[cell], cell))
        found, positions = arena.cells_of(seq)
        assert found.tolist() == mine
        assert positions.tolist() == [plain.position[cell] for cell in mine]
        assert arena.first_position(seq) == (positions[0] if mine else -1)
        assert arena.last_position(seq) == (positions[-1] if mine else -1)


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(OPERATIONS, min_size=5, max_size=25))
def test_every_operation_agrees_with_the_plain_model(operations):
    arena, plain = Arena(SIZE), PlainArena()
    for operation in operations:
        perform(arena, plain, operation)
        compare(arena, plain)


@pytest.mark.slow
@DERANDOMIZED
@given(
    st.lists(OPERATIONS, max_size=15),
    st.lists(st.tuples(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=9), SEQ), min_size=1, max_size=3),
)
def test_a_placement_undone_leaves_no_trace(operations, plan):
    """Cells are saved, overwritten even if used, and restored in reverse: the same rotations are pending as before."""
    arena, plain = Arena(SIZE), PlainArena()
    for operation in operations:
        perform(arena, plain, operation)
    undo = []
    for cells, seq in plan:
        chosen = np.array(sorted(cells), dtype=np.int64)
        undo.append(SavedCells.of(arena, chosen))
        arena.vacate(chosen[arena.owner[chosen] > 0])
        arena.free.take_each(chosen.tolist())
        arena.put(chosen, {seq}, 50)
    for saved in reversed(undo):
        saved.restore()
    compare(arena, plain)
    perform(arena, plain, ("settle",))


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(OPERATIONS, min_size=4, max_size=15), st.lists(st.lists(EDITS, max_size=4), min_size=2, max_size=4))
def test_updates_put_back_are_given_out_again(operations, rounds):
    """After each round but the last, updates were given out and not carried out: now all of them are."""
    arena, plain = Arena(SIZE), PlainArena()
    for operation in operations:
        perform(arena, plain, operation)
    arena.pending.settle(arena.owner)
    token, rotary = np.arange(SIZE), arena.position.copy()
    token_in = {cell: cell for cell in plain.seqs}
    given_out = []
    for n, edits in enumerate(rounds):
        for operation in edits:
            if operation[0] == "compact":
                move_tokens(token_in, operation[1](arena))
            perform(arena, plain, operation)
        if n < len(rounds) - 1:
            given_out.append(arena.pending.settle(arena.owner))
    arena.pending.put_back(given_out)
    moves, shift = arena.pending.settle(arena.owner)
    moves.apply(token)
    moves.apply(rotary)
    rotary[shift.cells] += shift.deltas
    for cell in plain.seqs:
        assert (token[cell], rotary[cell]) == (token_in[cell], plain.position[cell])


def move_tokens(token_in, plan):
    for src, dst, n in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
        token_in.update([(dst + i, token_in.pop(src + i)) for i in range(n)])


def test_moves_that_overlap_are_copied_as_memmove_would():
    array = np.arange(8)
    Moves.from_runs([(2, 0, 5), (7, 5, 1)]).apply(array)
    assert array.tolist() == [2, 3, 4, 5, 6, 7, 6, 7]
    grid = np.arange(12).reshape(2, 6)
    Moves.from_runs([(0, 2, 3)]).apply(grid, axis=1)
    assert grid.tolist() == [[0, 1, 0, 1, 2, 5], [6, 7, 6, 7, 8, 11]]


def test_joined_moves_are_applied_in_order():
    first, second = Moves.from_runs([(4, 0, 2)]), Moves.from_runs([(0, 6, 1), (6, 1, 1)])
    joined = Moves.join([first, second])
    assert (joined.n_runs, joined.n_cells) == (3, 4)
    array = np.arange(8)
    joined.apply(array)
    assert array.tolist() == [4, 4, 2, 3, 4, 5, 4, 7]
    assert Moves.join([]).n_runs == Moves.join([Moves.from_runs([])]).n_cells == 0


def test_cells_with_the_same_sequences_share_one_set():
    arena = Arena(1000)
    arena.free.take(0, 1000)
    arena.put(np.arange(1000), {0}, 0)
    for dst in range(1, 9):
        arena.share(0, dst)
    assert len(set(arena.owner.tolist())) == 1
    assert arena.sets[arena.owner[0]] == set(range(9))
    assert len(arena.remove(3)) == 0
    assert len(arena.keep(5)) == 0
    assert len(arena.remove(5)) == 1000


def take_steps(arena, cells, step, n):
    """Write ``n`` steps, each of which continues the sequences of ``step`` by a token."""
    for i in range(n):
        chunks = [chunk._replace(start=chunk.start + i) for chunk in step]
        arena.take(cells[i * len(step) : (i + 1) * len(step)], chunks)


@pytest.mark.slow
@DERANDOMIZED
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 9), st.booleans()), max_size=25))
def test_emptying_a_sequence_equals_removing_all_of_it(turns):
    """Whether the sequence's extents are known or searched for, the same cells become empty."""
    size, quick, slow = 300, Arena(300), Arena(300)
    ends = dict.fromkeys(range(4), 0)
    for first, n_seqs, n, down in turns:
        seqs = sorted({(first + i) % 4 for i in range(n_seqs)})
        step = [Chunk(seq, ends[seq], 1) for seq in seqs]
        wide = [extent for extent in quick.free if extent[1] - extent[0] >= n * len(seqs)]
        if not wide or n == 9:
            expected = slow.remove(first)
            assert quick.empty(first) == (int(expected[0]) if len(expected) else None)
            ends[first] = 0
        elif down:
            start = wide[-1][1] - n * len(seqs)
            for arena in (quick, slow):
                take_steps(arena, np.arange(start, wide[-1][1])[::-1], step, n)
            ends |= {seq: ends[seq] + n for seq in seqs}
        elif len(seqs) == 1:
            chunk = Chunk(seqs[0], ends[seqs[0]], n)
            for arena in (quick, slow):
                arena.take(range(wide[0][0], wide[0][0] + n), [chunk])
            ends[seqs[0]] += n
        else:
            for arena in (quick, slow):
                take_steps(arena, range(wide[0][0], wide[0][0] + n * len(seqs)), step, n)
            ends |= {seq: ends[seq] + n for seq in seqs}
        assert quick.cell_map().owners == slow.cell_map().owners
        assert quick.position.tolist() == slow.position.tolist()
        assert list(quick.free) == list(slow.free)
        assert quick.free.total == slow.free.total == size - quick.used
