"""A file of the measurements so far, from which an interrupted calibration can resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.calibration.pace import Tick
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import NUMPY
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage


class Line(BaseModel):
    """A line of a journal: immutable, every key checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JournalHeader(Line):
    """Conditions under which measurements belong to the same calibration."""

    format: Literal[2] = 2
    model: str
    type_k: Storage
    type_v: Storage
    each: Annotated[int, Field(ge=1, le=10_000)]
    """Forward passes for each kernel."""
    runs: Annotated[int, Field(ge=1, le=100)]
    """Server runs in a round, for each kernel."""
    trials: int
    """Trials that were drawn."""
    processor: str
    blas: str
    numpy: str
    engine: str = NUMPY
    threads: int = 1


class TrialMeasurement(NamedTuple):
    """One measurement of a trial."""

    trial: int
    """Its number, in the order in which the trials were drawn."""
    at_s: float
    """When, on the clock of the piece."""
    seconds: float


class ServedPass(NamedTuple):
    """A sampled pass of a server run."""

    at_s: float
    """When, on the clock of the piece."""
    sample: Sample


class MeasuredPiece(Line):
    """What was measured without interruption between two entries of the journal."""

    items: int
    """Trials and server runs that ended."""
    trials: tuple[TrialMeasurement, ...]
    mixed: tuple[ServedPass, ...]
    ticks: tuple[Tick, ...]
    """Measurements of the reference passes."""
    disturbed: int
    """Measurements that do not count, since other work had the processor."""
    wall_s: float
    """Seconds by the clock, times the threads at work."""
    cpu_s: float
    """Processor seconds in that time."""


HeaderT = TypeVar("HeaderT", bound=Line)
PieceT = TypeVar("PieceT", bound=Line)
LineT = TypeVar("LineT", bound=Line)


class JournalOf(Generic[HeaderT, PieceT]):
    """A file of lines in JSON: a header of one kind, then a line for each piece of another."""

    def __init__(self, path: Path | None, header: type[HeaderT], piece: type[PieceT]):
        """With ``path`` None, nothing is stored."""
        self._path, self._header, self._piece = path, header, piece

    def header(self) -> HeaderT | None:
        """The header in the file; None if there is no file or it is not a journal."""
        lines = self._lines()
        return _parsed(self._header, lines[0]) if lines else None

    def pieces(self) -> list[PieceT]:
        """All complete pieces; an incomplete last line is ignored."""
        found = [_parsed(self._piece, line) for line in self._lines()[1:]]
        return [each for each in found if each is not None]

    def begin(self, header: HeaderT) -> None:
        """Start a new file, replacing any other. Raises ``UserError`` if it cannot be written."""
        self._write([], header)

    def add(self, done: PieceT) -> None:
        """Append a piece."""
        self._write(self._lines(), done)

    def remove(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _lines(self) -> list[str]:
        if self._path is None:
            return []
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{self._path}: cannot go on from it: {e}; remove it to begin anew") from None
        whole, _, _ = text.rpartition("\n")
        return whole.split("\n") if whole else []

    def _write(self, before: list[str], line: Line) -> None:
        """Replace the file atomically, so that an interruption leaves the old one intact."""
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text("".join(f"{each}\n" for each in [*before, line.model_dump_json()]), encoding="utf-8")
            new.replace(self._path)
        except OSError as e:
            raise UserError(f"{self._path}: cannot write: {e.strerror}") from None


class Journal(JournalOf[JournalHeader, MeasuredPiece]):
    """The journal of an engine that is measured on this machine."""

    def __init__(self, path: Path | None):
        super().__init__(path, JournalHeader, MeasuredPiece)


def _parsed(kind: type[LineT], line: str) -> LineT | None:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None
