"""The rule by which rows take single cells, of one cache for all sequences or each of its own, in several groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, cast

from policies.cells.search import find_contiguous
from policies.cells.split_batch import consecutive, split_by_stream
from policies.cells.stream_arenas import StreamArenas
from policies.cells.tile_counts import HeldTiles
from policies.compiled import i64, mypyc_attr
from policies.placement.repeats import CellStepRule
from policies.placement.rule import GroupReads, PassReads, Row
from policies.placement.stream_cells import Held, StreamCells, StreamRow
from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, MicroBatch

_TILE: Final[i64] = 64
_ENDLESS: Final = 1 << 62


class StreamHost(Protocol):
    """What the rule asks of the policy whose rows it has."""

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the chunks of a step."""
        ...

    def is_due(self, tokens: int) -> bool:
        """Whether cells are to be moved before a step of that many tokens."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamRule(CellStepRule):
    """Each step takes cells as ``allocate`` does for single tokens.

    With one stream, the rows take the next usable cells in turn. With several, each row has one to itself, and a
    pass has consecutive sequences only.
    """

    def __init__(self, host: StreamHost, streams: StreamArenas, n_ubatch: int, *, contiguous: bool, compacts: bool):
        """``contiguous``: the cells of a pass lie in a row. ``compacts``: cells may be moved."""
        # Where there are several streams, a step makes as many passes as it takes.
        most, arena = n_ubatch if streams.n_streams == 1 else _ENDLESS, streams.arenas[0][0]
        super().__init__(most, len(streams.specs), arena.free, arena.rows)
        self._host = host
        self._streams = streams
        self._n_ubatch = n_ubatch
        self._contiguous = contiguous
        self._compacts = compacts
        self._unreported = streams.unreported
        self._apart = streams.n_streams > 1
        self._tiled = bool(streams.tiles)
        self._is_plain = not (self._apart or contiguous) and [spec.window for spec in streams.specs] == [None]
        """Whether there is a single cache, which keeps all tokens, and any free cells will do."""
        self._has_window = any(spec.window is not None for spec in streams.specs)
        self._by_group: list[list[StreamCells]] = []
        """The streams of each group."""
        for group, spec in enumerate(streams.specs):
            windows, own = streams.windows[group], list[StreamCells]()
            for i, arena in enumerate(streams.arenas[group]):
                tiles = streams.tiles[group][i] if self._tiled else None
                own.append(StreamCells(arena, tiles, None if windows is None else windows[i], spec))
            self._by_group.append(own)
        self._changes: i64 = -1
        """``StreamArenas.changes`` when what rows hold was looked up last."""
        self._stream_rows: list[StreamRow] = []
        """The rows, by their own type."""
        self._by_pass: list[list[StreamRow]] = []
        """With several streams, the rows of each pass of a step; empty where that must be found anew."""
        self._tokens: i64 = 0
        """Tokens that all rows are given in a step."""

    # Membership

    def _row_for(self, seq: int) -> Row | None:
        held = self._held(seq)
        return StreamRow(seq, held) if held else None

    def _held(self, seq: int) -> list[Held]:
        """What a sequence holds in each group; empty where it cannot be a row, because it holds nothing, shares cells
        or has a gap."""
        streams, stream, held = self._streams, self._streams.stream_of(seq), list[Held]()
        for group, own in enumerate(self._by_group):
            cells = own[stream].arena.row_of(seq)
            if cells is None or cells.begin == cells.end or (group > 0 and cells.end != held[0].cells.end):
                return []
            held.append(Held(own[stream], cells, streams.tiles[group][stream].of(seq) if self._tiled else None))
        return held

    def _changed(self) -> None:
        super()._changed()
        self._by_pass, self._tokens = [], 0
        self._stream_rows = cast(list[StreamRow], self.cell_rows)
        for row in self._stream_rows:
            self._tokens += row.n

    def _is_ready(self, tokens: int) -> bool:
        """Whether a step of so many tokens can be taken: no cells are to be moved, and all rows can go on."""
        return not (self._compacts and self._host.is_due(tokens)) and self._is_current()

    def _is_current(self) -> bool:
        """Look up what rows hold, if that may have changed; False where a sequence cannot be a row any more."""
        changes: i64 = self._streams.changes
        if self._changes != changes:
            for row in self._stream_rows:
                held = self._held(row.seq)
                if not held:
                    return False
                row.renew(held)
            self._changes = changes
        return True

    # Steps

    def take_step(self) -> bool:
        """Give each row its tokens; False where there is no room."""
        tokens = self._tokens
        if tokens == 0 or not self._is_ready(tokens):
            return False
        if self._apart:
            if tokens > len(self.rows) or not self._step_apart():
                return False
        elif self._is_plain and tokens == len(self._stream_rows) <= self._n_ubatch and not self._unreported:
            return self._step_plainly(tokens)
        elif tokens > self._n_ubatch or not self._step_together(tokens):
            return False
        self._give_tokens()
        return True

    def _step_plainly(self, tokens: i64) -> bool:
        """``_step_together`` of one token for each row in a single cache without a window, in which most steps are."""
        stream, work = self._by_group[0][0], self.passes[0]
        free = stream.free
        if free.total < tokens:
            return False
        cell: i64 = free.take_run(stream.start_of_search(tokens), tokens)
        cells = list[int]()
        if cell < 0:
            cells = free.take_next(stream.start_of_search(tokens), tokens)
        group, tiled, first = work.groups[0], self._tiled, cell
        least_left: i64 = _ENDLESS
        scanned: i64 = 0
        useful: i64 = 0
        most: i64 = 0
        most_useful: i64 = 0
        runs: i64 = 0
        at: i64 = 0
        if group.prepares or group.longer:
            _begin(work, tokens, self._stream_rows, ())
        for row in self._stream_rows:
            own = row.cells
            if cells:
                cell = cells[at]
                at += 1
            stream.sequences.append_run(own, cell, 1, 1)
            row.length += 1
            row.left -= 1
            if row.left < least_left:
                least_left = row.left
            tiles = row.tiles
            cell += 1
            if tiles is None:
                continue
            tiles.add_one(cell - 1)
            held = tiles.tiles
            scanned += held
            runs += tiles.runs
            if held > most:
                most = held
            held = tiles.cells
            useful += held
            if held > most_useful:
                most_useful = held
        stream.free.head = cells[-1] + 1 if cells else cell
        work.tokens, work.chunks, work.rows, work.beside = tokens, tokens, self._stream_rows, ()
        self.ended = least_left <= 0
        limit = (first // _TILE + 1) * _TILE
        if not tiled:
            group.runs = group.single_scanned = group.single_useful = 0
            group.single_most = group.single_most_useful = 0
            limit = free.span(stream.pad)
            self._count_masked_rows(group, limit)
        if not (cells or self._compacts):
            self.begin_repeats(first, limit, least_left)
        if not tiled:
            return True
        group.single_scanned, group.single_useful, group.runs = _TILE * scanned, useful, runs
        group.single_most, group.single_most_useful, group.span = _TILE * most, most_useful, _TILE * scanned
        return True

    def _count_masked_rows(self, group: GroupReads, span: i64) -> None:
        """What a token of each row reads under ``masked``, when it has been placed."""
        for row in self._stream_rows:
            group.add_chunk(1, int(span), int(row.length), 1)
        group.span = span

    def _step_together(self, tokens: i64) -> bool:
        """Take cells of the only stream for all rows."""
        found: list[list[int]] = []
        for own in self._by_group:
            cells = self._find(own[0], tokens)
            if cells is None:
                return False
            found.append(cells)
        work = self.passes[0]
        _begin(work, tokens, self._stream_rows, ())
        for group, own in enumerate(self._by_group):
            stream, cells = own[0], found[group]
            if not cells:
                cells = stream.free.take_next(stream.start_of_search(tokens), tokens)
            elif stream.window is not None:
                stream.window.take_each(cells)
            else:
                stream.free.take(cells[0], tokens)
            stream.free.head = cells[-1] + 1
            stream.give(group, self._stream_rows, cells)
            if self._unreported:
                stream.clear_rotations(cells)
                self._settle(work, group)
            self._count(work, group)
        return True

    def _find(self, stream: StreamCells, n: i64) -> list[int] | None:
        """Cells for a step in a stream; none where the next free ones are to be taken; None where there are too few."""
        if stream.window is not None:
            return stream.window.find_next(stream.start_of_search(n), n)
        if self._contiguous:
            first, _ = find_contiguous(stream.free, stream.start_of_search(n), n)
            return None if first is None else list(range(first, first + n))
        return [] if stream.free.total >= n else None

    def _step_apart(self) -> bool:
        """Take a cell for each row in its own stream."""
        if not self._by_pass:
            self._find_passes()
        for row in self._stream_rows:
            for held in row.held:
                if not held.stream.has_room(1, 1):
                    return False
        for i, rows in enumerate(self._by_pass):
            work = self.passes[i]
            _begin(work, len(rows), rows, ())
            for group in range(len(self._by_group)):
                self._take_apart(group, rows)
                self._settle(work, group)
                self._count(work, group)
        return True

    def _take_apart(self, group: int, rows: list[StreamRow]) -> None:
        """Take a cell in a group for each row in its own stream."""
        for row in rows:
            held = row.held[group]
            stream, own, tiles = held.stream, held.cells, held.tiles
            cell = stream.take_one()
            if stream.window is not None:
                stream.window.note_one(own, own.end, cell)
            stream.sequences.append_run(own, cell, 1, 1)
            if tiles is not None:
                tiles.add_one(cell)
            if self._unreported:
                stream.clear_rotations([cell])

    def _find_passes(self) -> None:
        """Find the rows of each pass of a step."""
        for seqs in consecutive([row.seq for row in self.rows], self._n_ubatch + 1):
            self._by_pass.append([cast(StreamRow, self.by_seq[seq]) for seq in seqs])
        self.passes = [PassReads(len(self._by_group)) for _ in self._by_pass]

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks beside the rows; its passes."""
        if not self._is_certain(chunks):
            step = [Chunk(row.seq, row.length, row.n) for row in self.rows]
            found = [PassReads.of(batch) for batch in self._host.allocate([*step, *chunks])]
            self._give_tokens()
            return found
        found = self._passes_apart(chunks) if self._apart else self._passes_together(chunks)
        for group, streams in enumerate(self._by_group):
            if len(found) > 1 and self._tiled and streams[0].window is not None:
                self._place_in_window(found, group)
                continue
            for work in found:
                self._place_in(work, group)
                self._count(work, group)
        self._give_tokens()
        return found

    def _is_certain(self, chunks: Sequence[Chunk]) -> bool:
        """Whether all rows and chunks go on, and find room whatever is placed before them: certain if True."""
        own, seqs = self._tokens, set[int]()
        tokens = own
        for seq, start, n, also in chunks:
            tokens += n
            seqs.add(seq)
            if also or n < 1 or seq in self.by_seq:
                return False
            for arenas in self._streams.arenas:
                cells = arenas[seq if self._apart else 0].row_of(seq)
                if cells is None or cells.end != start:
                    return False
        most = self._n_ubatch
        if len(seqs) < len(chunks) or self._contiguous or own > (len(self.rows) if self._apart else most):
            return False
        if (self._has_window and not self._tiled and tokens > most) or not self._is_ready(tokens):
            return False
        for streams in self._by_group:
            if not self._apart:
                if not streams[0].has_room(tokens, most):
                    return False
                continue
            for row in self.rows:
                if not streams[row.seq].has_room(1, 1):
                    return False
            for chunk in chunks:
                if not streams[chunk.seq].has_room(chunk.n, most):
                    return False
        return True

    def _passes_together(self, chunks: Sequence[Chunk]) -> list[PassReads]:
        """The passes of a step in a single stream, with nothing placed: all rows are in the first."""
        found, part, tokens = list[PassReads](), list[Chunk](), self._tokens
        rows = self._stream_rows
        for seq, start, n, _ in chunks:
            while n > 0:
                taken = min(n, self._n_ubatch - tokens)
                if taken:
                    part.append(Chunk(seq, start, taken))
                start, n, tokens = start + taken, n - taken, tokens + taken
                if tokens == self._n_ubatch:
                    found.append(self._pass_of(tokens, rows, part))
                    rows, part, tokens = [], [], 0
        if tokens:
            found.append(self._pass_of(tokens, rows, part))
        return found

    def _passes_apart(self, chunks: Sequence[Chunk]) -> list[PassReads]:
        """The passes of a step in several streams, with nothing placed, as ``split_by_stream`` finds them."""
        if not self._by_pass:
            self._find_passes()
        found, left = list[PassReads](), {chunk.seq: chunk for chunk in chunks}
        places = {chunk.seq: i for i, chunk in enumerate(chunks)}
        for rows in self._by_pass:
            # A chunk whose sequence follows has one token beside the rows.
            part, seq, place = list[Chunk](), rows[-1].seq + 1, -1
            while len(rows) + len(part) <= self._n_ubatch and seq in left and places[seq] > place:
                _, start, n, _ = left.pop(seq)
                part.append(Chunk(seq, start, 1))
                if n > 1:
                    left[seq] = Chunk(seq, start + 1, n - 1)
                place = places[seq]
                seq += 1
            found.append(self._pass_of(len(rows) + len(part), rows, part))
        rest = [left[chunk.seq] for chunk in chunks if chunk.seq in left]
        for batch in split_by_stream(rest, self._n_ubatch, sequential=True):
            found.append(self._pass_of(sum([chunk.n for chunk in batch]), [], batch))
        return found

    def _pass_of(self, tokens: int, rows: list[StreamRow], chunks: Sequence[Chunk]) -> PassReads:
        """A pass of which nothing is read so far."""
        work = PassReads(len(self._by_group))
        _begin(work, tokens, rows, chunks)
        return work

    def _place_in(self, work: PassReads, group: int) -> None:
        """Give the tokens of a pass their cells in a group."""
        streams, rows = self._by_group[group], cast(list[StreamRow], work.rows)
        if self._apart:
            self._take_apart(group, rows)
            for chunk in work.beside:
                streams[chunk.seq].put(group, [], [chunk])
        else:
            streams[0].put(group, rows, work.beside)
        self._settle(work, group)

    def _place_in_window(self, found: Sequence[PassReads], group: int) -> None:
        """Give the tokens of several passes their cells in a group with a window, and say what they read.

        ``allocate`` tries all passes first, and undoes that, but for what sequences lose beside the cells taken: an
        earlier pass reads no tokens that are lost so in a later one.
        """
        tiles_of, read = self._streams.tiles[group], list[dict[int, HeldTiles]]()
        for work in found:
            self._place_in(work, group)
            for stream in self._by_group[group]:
                window = stream.window
                assert window is not None
                for seq, cells in window.lost_beside:
                    for earlier in read:
                        if seq in earlier:
                            earlier[seq].lose(cells)
                window.lost_beside.clear()
            seqs = [row.seq for row in work.rows] + [chunk.seq for chunk in work.beside]
            read.append({seq: tiles_of[self._streams.stream_of(seq)].of(seq).copy() for seq in seqs})
        for work, tiles in zip(found, read, strict=True):
            self._count(work, group, tiles)

    def _settle(self, work: PassReads, group: int) -> None:
        """Say what must be done to a group before a pass."""
        if group in self._unreported:
            moves, shift = self._streams.settle(group)
            reads = work.groups[group]
            if moves.n_runs:
                reads.moves = moves
            if len(shift.cells):
                reads.shift = shift
            reads.note_preparation()

    def _count(self, work: PassReads, group: int, tiles_of: dict[int, HeldTiles] | None = None) -> None:
        """Say what a pass that has its cells in a group reads there; ``tiles_of``: by tiles other than those now."""
        reads, streams = work.groups[group], self._by_group[group]
        most_seen = streams[0].most_seen
        if not self._tiled:
            self._count_masked(work, streams, reads, most_seen)
            return
        scanned: i64 = 0
        useful: i64 = 0
        most: i64 = 0
        most_useful: i64 = 0
        runs: i64 = 0
        for row in cast(list[StreamRow], work.rows):
            tiles = row.held[group].tiles if tiles_of is None else tiles_of[row.seq]
            assert tiles is not None
            seen = min(tiles.cells, most_seen + row.n - 1)
            if row.n > 1:
                reads.add_chunk(row.n, _TILE * tiles.tiles, seen, tiles.runs)
                reads.span += _TILE * tiles.tiles
                continue
            scanned += tiles.tiles
            useful += seen
            runs += tiles.runs
            most = max(most, tiles.tiles)
            most_useful = max(most_useful, seen)
        reads.single_scanned, reads.single_useful = _TILE * scanned, useful
        reads.single_most, reads.single_most_useful = _TILE * most, most_useful
        reads.runs += runs
        reads.span += _TILE * scanned
        for chunk in work.beside:
            if tiles_of is None:
                tiles = self._streams.tiles[group][self._streams.stream_of(chunk.seq)].of(chunk.seq)
            else:
                tiles = tiles_of[chunk.seq]
            reads.add_chunk(chunk.n, _TILE * tiles.tiles, min(tiles.cells, most_seen + chunk.n - 1), tiles.runs)
            reads.span += _TILE * tiles.tiles

    def _count_masked(self, work: PassReads, streams: Sequence[StreamCells], reads: GroupReads, most_seen: i64) -> None:
        """What the kernel ``masked`` reads: all cells of a stream up to the highest used one of any in the pass."""
        pad = streams[0].pad
        span: i64 = streams[0].free.span(pad)
        if self._apart:
            span = 0
            for row in work.rows:
                span = max(span, streams[row.seq].free.span(pad))
            for chunk in work.beside:
                span = max(span, streams[chunk.seq].free.span(pad))
        for row in work.rows:
            reads.add_chunk(row.n, span, min(row.length + row.n, most_seen + row.n - 1), 1)
        for chunk in work.beside:
            reads.add_chunk(chunk.n, span, min(chunk.start + chunk.n, most_seen + chunk.n - 1), 1)
        reads.span = span * (work.chunks if self._apart else 1)

    # Looking in

    def look(self) -> None:
        """Note how full the first group is."""
        stored: i64 = 0
        extents: i64 = 0
        largest: i64 = 0
        room: i64 = 0
        top: i64 = 0
        start: i64 = 0
        for stream in self._by_group[0]:
            stream.look()
            stored += stream.used
            extents += stream.extents
            if stream.largest > largest:
                largest = stream.largest
            left = stream.size - stream.used
            if left > room:
                room = left
            if stream.used:
                top = start + stream.top
            start += stream.size
        self.stored = self.allocated = stored
        self.placeable = largest if self._contiguous else room
        self.free_extents, self.largest_free_extent, self.span = extents, largest, top


def _begin(work: PassReads, tokens: i64, rows: list[StreamRow], chunks: Sequence[Chunk]) -> None:
    """Begin a pass, of which nothing is read so far."""
    work.tokens, work.chunks = tokens, len(rows) + len(chunks)
    work.rows, work.beside = rows, chunks
    for reads in work.groups:
        reads.single_scanned = reads.single_useful = reads.single_most = reads.single_most_useful = 0
        reads.runs = reads.span = 0
        if reads.prepares:
            reads.moves, reads.shift, reads.prepares = NO_MOVES, NO_SHIFT, False
        if reads.longer:
            reads.longer = []
