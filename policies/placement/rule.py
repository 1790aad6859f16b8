"""What the step loop and a layout share: rows that decode, the rule that places their tokens, and what is read.

A *row* is a sequence that holds a slot and only decodes: in every step it is given its next token. A *placement rule*
gives all rows their tokens and says what attention reads then. It stops before a step that needs a decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from policies.compiled import i64, mypyc_attr
from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, MicroBatch, Moves, Shift, Transfer, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable


@mypyc_attr(allow_interpreted_subclasses=True)
class Row:
    """A sequence; while it is a row of a placement rule it is given ``n`` tokens in every step."""

    def __init__(self, seq: int, length: int = 0):
        self.seq = seq
        self.length: i64 = length
        """Tokens placed."""
        self.n: i64 = 1
        """Tokens that it is given in each step (``PlacementRule.give``)."""
        self.left: i64 = 0
        """Tokens that it is to be given before it ends; the step in which this falls to 0 is its last."""
        self.given: i64 = 0
        """What ``left`` was when it joined the rule."""
        self.order = 0
        """Ascends in the order in which rows get their tokens within a step."""
        self.rule: PlacementRule | None = None
        """The rule that places its tokens, while it only decodes."""


@mypyc_attr(allow_interpreted_subclasses=True)  # A class that has no dictionary could not be copied.
class GroupReads:
    """What attention reads in one cache group in one forward pass, and what is done to the group before."""

    def __init__(self) -> None:
        self.single_scanned: i64 = 0
        """Cells scanned by all chunks of one token together."""
        self.single_useful: i64 = 0
        """Cells among them that the token's sequence can see."""
        self.single_most: i64 = 0
        """The most cells that one of these tokens scans."""
        self.single_most_useful: i64 = 0
        """The most cells that one of these tokens scans and can see."""
        self.runs: i64 = 0
        """Contiguous pieces (blocks, for a block table) that the cells scanned by all chunks lie in."""
        self.span: i64 = 0
        """Cells that the kernel reads at least once for the whole pass."""
        self.longer: list[tuple[int, int, int]] = []
        """For each chunk of several tokens: these, the cells that each of them scans, and those that it can see."""
        self.moves: Moves = NO_MOVES
        """Cells to copy before the pass."""
        self.shift: Shift = NO_SHIFT
        """Keys to rotate after the copies, before the pass."""
        self.transfers: Sequence[Transfer] = ()
        """Copies between the cache and the host tier to make before the pass."""
        self.mapped = 0
        """Pages of virtual memory to map before the pass."""
        self.prepares = False
        """Whether there may be something to do before the pass: copies, rotations, or pages to map."""

    def add_chunk(self, n: int, scanned: int, useful: int, runs: int) -> None:
        """Count a chunk of ``n`` tokens, each of which scans ``scanned`` cells in ``runs`` contiguous pieces."""
        self.runs += runs
        if n > 1:
            self.longer.append((n, scanned, useful))
            return
        self.single_scanned += scanned
        self.single_useful += useful
        self.single_most = max(self.single_most, scanned)
        self.single_most_useful = max(self.single_most_useful, useful)

    def note_preparation(self) -> None:
        """Set ``prepares`` by what has been filled in."""
        still = self.moves is NO_MOVES and self.shift is NO_SHIFT
        self.prepares = not still or len(self.transfers) > 0 or self.mapped > 0

    @property
    def scores(self) -> int:
        """Scores that attention computes."""
        total = self.single_scanned
        for n, scanned, _ in self.longer:
            total += n * scanned
        return total

    @property
    def useful_scores(self) -> int:
        """Scores against a cell that the token's sequence can see."""
        total = self.single_useful
        for n, _, useful in self.longer:
            total += n * useful
        return total


@mypyc_attr(allow_interpreted_subclasses=True)
class PassReads:
    """One forward pass: its tokens, and what they read in each cache group."""

    def __init__(self, groups: int):
        self.tokens: i64 = 0
        self.chunks: i64 = 0
        """Chunks of the pass, a row's tokens being one."""
        self.groups = [GroupReads() for _ in range(groups)]
        self.rows: Sequence[Row] = ()
        """The rows that have their tokens in it."""
        self.beside: Sequence[Chunk] = ()
        """The other chunks."""

    def prepares(self) -> bool:
        """Whether there is something to do before the pass."""
        return any(group.prepares for group in self.groups)

    @staticmethod
    def of(batch: MicroBatch) -> PassReads:
        """The reads of a micro-batch that was placed chunk by chunk."""
        found = PassReads(0)
        found.tokens, found.chunks, found.beside = batch.n_tokens, len(batch.chunks), batch.chunks
        for place in batch.places:
            group, reads = GroupReads(), place.reads
            columns = (reads.tokens.tolist(), reads.scanned.tolist(), reads.useful.tolist(), reads.runs.tolist())
            for n, scanned, useful, runs in zip(*columns, strict=True):
                group.add_chunk(n, scanned, useful, runs)
            group.span, group.mapped, group.transfers = reads.span, place.mapped, place.transfers
            if place.moves.n_runs:
                group.moves = place.moves
            if len(place.shift.cells):
                group.shift = place.shift
            group.note_preparation()
            found.groups.append(group)
        return found

    @staticmethod
    def counted(tokens: int, chunks: int, runs: int, scans: Sequence[tuple[int, int]]) -> PassReads:
        """A pass over one cache group of which only counts are known.

        ``scans``: pairs of tokens that scan the same cells together, and the number of these cells.
        """
        found = PassReads(1)
        found.tokens, found.chunks = tokens, chunks
        group = found.groups[0]
        for n, cells in scans:
            group.add_chunk(n, cells, cells, 0)
            group.span += cells
        group.runs = runs
        return found


_JOIN_BITS: Final = 40
"""More joins than a run can have, counted in the lower bits of a row's ``order``; above them is its place."""


def _order(row: Row) -> int:
    return row.order


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacementRule(ABC):
    """Gives the tokens of all rows their cells, one step after another."""

    takes_from_pool: ClassVar[bool] = True
    """Whether rows take from a pool that other sequences use as well, so that the order within a step matters."""

    def __init__(self, max_pass_tokens: int, groups: int):
        """``groups``: cache groups of the policy."""
        self.max_pass_tokens = max_pass_tokens
        """The most tokens in one forward pass."""
        self.rows: list[Row] = []
        """In the order in which they get their tokens."""
        self.by_seq: dict[int, Row] = {}
        self.passes: list[PassReads] = [PassReads(groups)]
        """The forward passes of the step that ``take_step`` took last. They are used again for the next."""
        self.ended = False
        """Whether a row had its last token in the step taken last."""
        self.released = False
        """Whether a row has given room back to others since this was last set to False."""
        self.places_whole_steps = False
        """Whether the scheduler has a step placed as a whole, rather than room reserved for one sequence after another:
        then all sequences give up what a step leaves behind before any takes what it needs."""
        self.stored: i64 = 0
        """After ``look``: as the fields of ``Usage``, for the first group; so are the next ones."""
        self.allocated: i64 = 0
        self.placeable: i64 = 0
        self.free_extents: i64 = 0
        self.largest_free_extent: i64 = 0
        self.span: i64 = 0
        self._joins = 0

    def __len__(self) -> int:
        return len(self.rows)

    # Membership

    def join(self, seq: int, left: int, place: int = 0) -> bool:
        """Make a sequence a row that ends with its ``left``-th token from now; False where it cannot be one.

        ``place``: rows with a lower one get their tokens before it in each step, among equals those that joined
        earlier.
        """
        row = self._row_for(seq)
        if row is None:
            return False
        self._joins += 1
        row.rule, row.order = self, (place << _JOIN_BITS) + self._joins
        row.given = row.left = left
        rows = self.rows
        if rows and rows[-1].order > row.order:
            insort(rows, row, key=_order)
        else:
            rows.append(row)
        self.by_seq[seq] = row
        self._changed()
        return True

    def leave(self, seq: int) -> Row:
        """End a sequence's being a row; it keeps its cells."""
        row = self.by_seq.pop(seq)
        self.rows.remove(row)
        row.rule = None
        self._drop(row)
        self._changed()
        return row

    def give(self, seq: int, n: int) -> None:
        """Give a row ``n`` tokens in each step from now on, as a draft of that many asks for."""
        self.by_seq[seq].n = n
        self._changed()

    @abstractmethod
    def _row_for(self, seq: int) -> Row | None:
        """The row for a sequence that holds something, with its length; None where it cannot be one."""

    def _drop(self, row: Row) -> None:  # noqa: B027  (most rules keep nothing of a row)
        """A row has left."""

    def _changed(self) -> None:  # noqa: B027  (most rules keep nothing of all rows)
        """A row has joined or left, or is given another number of tokens."""

    # Steps

    def blocked(self) -> list[int]:
        """Rows whose next token needs a decision of their own, such as a new region."""
        return []

    def reserve(self) -> bool:
        """Set aside what the next step takes; False, without effect, where there is no room for all rows."""
        return True

    def reserve_with(self, chunks: Sequence[Chunk]) -> bool:
        """Set aside what the next step and the chunks of sequences beside it take; False, without effect, if it is not
        certain that there is room. Where ``place`` takes all or nothing, only the rows' part."""
        return self.reserve()

    @abstractmethod
    def take_step(self) -> bool:
        """Give each row its tokens, and say in ``passes`` what is read; False, without effect, where it cannot.

        Then something must be decided first: there is no room, a row is blocked, or cells are to be moved.
        """

    def repeat_step(self) -> bool:
        """Give each row another token, if that changes nothing but the number of cells read; False, without effect,
        where it does. Until ``settle``, rows do not count these tokens, but ``passes``, ``ended`` and ``look`` do.
        """
        return False

    def settle(self) -> None:  # noqa: B027  (most rules have nothing to settle)
        """Have rows count the tokens of repeated steps."""

    @abstractmethod
    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks beside the rows, as the policy's ``allocate`` would; its forward passes.

        Raises ``OutOfCells``. Then no row has been given a token; what ``OutOfCells.done`` lists the scheduler counts.
        """

    @abstractmethod
    def look(self) -> None:
        """Note how full the cache is now, in ``stored`` and the fields behind it."""

    # For subclasses

    def _give_tokens(self) -> None:
        """Count a step's tokens for each row."""
        ended = False
        for row in self.rows:
            row.length += row.n
            row.left -= row.n
            if row.left <= 0:
                ended = True
        self.ended = ended

    def _note_usage(self, usage: Usage) -> None:
        """Note how full the cache is, as the policy itself says."""
        self.stored, self.allocated, self.placeable = usage.stored, usage.allocated, usage.placeable
        self.free_extents, self.largest_free_extent = usage.free_extents, usage.largest_free_extent
        self.span = usage.span

    def ended_rows(self) -> list[Row]:
        """The rows that have been given all their tokens, in order."""
        return [row for row in self.rows if row.left <= 0]


def leave_rule(rows: Iterable[Row]) -> None:
    """Let rows leave their rule, if they have one: their sequences are about to change in another way."""
    for row in rows:
        if row.rule is not None:
            row.rule.leave(row.seq)
