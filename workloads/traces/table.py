"""Tables of requests in CSV, JSONL or Parquet, with columns that the scenario names.

A row has the arrival of a request, the tokens of its prompt and its answer, and perhaps its session and its priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from workloads.request import Prefixes, Request, Segment, WorkloadError
from workloads.traces.bad_rows import changed, quoted
from workloads.traces.columns import NAME, TOKENS, Column, read_csv, read_jsonl, time_in, whole
from workloads.traces.files import open_bytes, shown_path
from workloads.traces.parquet import PARQUET, read_parquet
from workloads.traces.table_order import OrderedRows, OutOfOrderError, SortedRows, Turns
from workloads.traces.table_row import Columns, TableRow, Time
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

Format = Literal["csv", "jsonl", "parquet"]

_SUFFIXES: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_PACKED = (".gz", ".bz2", ".xz")
_PLAIN = Columns()
_MAX_PRIORITY = 2**31 - 1
"""The largest priority; the smallest is its negative."""
_PRIORITY = whole(-_MAX_PRIORITY, _MAX_PRIORITY)
_MOST_SEGMENTS = 2000
"""A longer history is not quoted, since memory grows with its square."""

Used = TypeVar("Used")


@dataclass(frozen=True, slots=True)
class TableTrace(Trace):
    """The requests of a table, in order of arrival, each session together from its first row on.

    Rows may be in any order. A table in the order just described is read row by row, and holds the names of all
    sessions while it is checked; any other is held and sorted, which a note says. For Parquet, one page of each column
    is held.

    The think time of a later turn is the time between the arrivals of two rows, since a table does not have the time
    that answers took. Where at least half of all later turns have a prompt that is as long as the prompt before and its
    answer together, such turns are taken to begin with both, as in a chat; a note says so. A row with an empty session
    is a request of its own.
    """

    format: Format | None = None
    """None: Parquet if the file begins so, else by the suffix of its name."""
    columns: Columns = _PLAIN
    time: Time = "s"
    """The unit of arrivals."""
    delimiter: str = ","
    """The character between fields, in CSV."""
    _sorts: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether the rows must be sorted."""
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)
    _order: str = field(default="", init=False, repr=False, compare=False)
    """How the rows were sorted, for a note."""

    def __post_init__(self) -> None:
        try:
            Trace.__post_init__(self)
        except OutOfOrderError:
            object.__setattr__(self, "_sorts", True)
            object.__setattr__(self, "_turns", Turns())
            Trace.__post_init__(self)

    @property
    def prefixes(self) -> Prefixes:
        """All texts, where sessions look like conversations whose prompts repeat what was said; else unknown."""
        return "tokens" if self._turns.are_talks else "unknown"

    def __iter__(self) -> Iterator[Request]:
        requests = Trace.__iter__(self)
        return requests if self.prefixes == "unknown" else _with_history(requests)

    def _remarks(self) -> tuple[str, ...]:
        path = shown_path(self.path)
        return tuple(f"{path}: {note}" for note in (self._order, self._turns.note) if note)

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        if self._sorts:
            return self._sorted(check_all=check_all)
        ordered = OrderedRows(self._turns if check_all else None)
        return in_batches(self._unchanged(self._rows(ordered.row)))

    def _sorted(self, *, check_all: bool) -> Iterator[RowBatch]:
        rows = SortedRows(self.path, self._turns if check_all else Turns())
        rows.read(self._rows(lambda row: row))
        object.__setattr__(self, "_order", rows.note)
        yield from rows.batches()

    def _unchanged(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows, which are still in order if they were before."""
        try:
            yield from rows
        except OutOfOrderError:
            if not self._bad_rows.closed:
                raise
            raise changed(self.path, "its rows are no longer in order") from None

    def _rows(self, use: Callable[[TableRow], Used]) -> Iterator[Used]:
        """What ``use`` makes of each good row."""
        has_no_session = self.columns.session is None

        def read(number: int, values: list[Any]) -> Used:
            if has_no_session:
                values.insert(3, None)
            return use(TableRow(*values))

        columns = self._columns()
        match self._format():
            case "csv":
                return read_csv(self.path, columns, self._bad_rows, read, self.delimiter)
            case "jsonl":
                return read_jsonl(self.path, columns, self._bad_rows, read)
            case _:
                return read_parquet(self.path, columns, self._bad_rows, read)

    def _columns(self) -> dict[str, Column]:
        """What each column holds. Raises ``WorkloadError`` if one has two meanings."""
        held = (time_in(self.time), TOKENS, TOKENS, NAME, _PRIORITY)
        meanings: dict[str, str] = {}
        for meaning, name in self.columns._asdict().items():
            if name is not None and (other := meanings.setdefault(name, meaning)) != meaning:
                raise WorkloadError(
                    f"{shown_path(self.path)}: column {quoted(name)} is named twice, for {other} and {meaning}"
                )
        return {name: column for name, column in zip(self.columns, held, strict=True) if name is not None}

    def _has_header(self) -> bool:
        return self._format() == "csv"

    def _format(self) -> Format:
        if self.format is not None:
            return self.format
        with open_bytes(self.path) as raw:
            return "parquet" if raw.read(len(PARQUET)) == PARQUET else format_of(self.path)


def _with_history(requests: Iterable[Request]) -> Iterator[Request]:
    """Add the texts of sessions: a prompt that is long enough begins with the prompt before it and its answer."""
    before: Request | None = None
    for request in requests:
        if request.session is not None:
            history: tuple[Segment, ...] = ()
            starts: tuple[int, ...] = ()
            rest = request.prompt_tokens
            if before is not None and before.session == request.session and len(before.content) < _MOST_SEGMENTS:
                more = rest - before.prompt_tokens - before.output_tokens
                if more >= 0:
                    history, rest = (*before.content, before.answer), more
                    starts = (*before.user_starts, request.prompt_tokens - more)
            own = (Segment(request.id, 0, rest),) if rest else ()
            request = request._replace(content=history + own, user_starts=starts)
        before = request
        yield request


def format_of(path: Path) -> Format:
    """The format by the suffix of a file's name. Raises ``WorkloadError``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        raise WorkloadError(
            f'{shown_path(path)}: its name does not say what it is; give format = "csv", "jsonl" or "parquet"'
        )
    return _SUFFIXES[suffixes[-1]]
