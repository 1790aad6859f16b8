"""What has been measured so far, in a file, so that a calibration that was cut short can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.costs.fitting import Sample
from kvsim.costs.profile import NUMPY
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JournalHeader(_Line):
    """What must be the same for measurements to belong together."""

    format: Literal[1] = 1
    model: str
    type_k: Storage
    type_v: Storage
    each: Annotated[int, Field(ge=1, le=10_000)]
    """Forward passes for each kernel."""
    runs: Annotated[int, Field(ge=1, le=100)]
    """Server runs in a round, for each kernel."""
    processor: str
    blas: str
    numpy: str
    engine: str = NUMPY
    threads: int = 1


class MeasuredRound(_Line):
    """All trials once, and as many runs of a server."""

    trials: tuple[tuple[float, ...], ...]
    """Seconds of each trial, in the order in which they were drawn."""
    reference_passes: tuple[tuple[float, ...], ...]
    """The same of the reference passes's passes."""
    mixed: tuple[Sample, ...]
    wall_s: float
    """Spent by all threads together ..."""
    cpu_s: float
    """... and what they got of their processors."""


class Journal:
    """A file of lines in JSON: the header, then a line for each round."""

    def __init__(self, path: Path | None):
        """``path`` None: nothing is kept."""
        self._path = path

    def header(self) -> JournalHeader | None:
        """Of what is there; None where there is nothing, or nothing that is understood."""
        lines = self._lines()
        return _parsed(JournalHeader, lines[0]) if lines else None

    def rounds(self) -> list[MeasuredRound]:
        """All whole rounds; a last line that was cut short does not count."""
        found = [_parsed(MeasuredRound, line) for line in self._lines()[1:]]
        return [each for each in found if each is not None]

    def begin(self, header: JournalHeader) -> None:
        """A new file, in place of what is there. Raises ``UserError`` where it cannot be written."""
        self._write([], header)

    def add(self, done: MeasuredRound) -> None:
        """One round more."""
        self._write(self._lines(), done)

    def remove(self) -> None:
        """It has served."""
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

    def _write(self, before: list[str], line: _Line) -> None:
        """Whole lines, then one more; in one move, so that whoever is cut short here leaves the file as it was."""
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text("".join(f"{each}\n" for each in [*before, line.model_dump_json()]), encoding="utf-8")
            new.replace(self._path)
        except OSError as e:
            raise UserError(f"{self._path}: cannot write: {e.strerror}") from None


def _parsed(kind: Any, line: str) -> Any:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None
