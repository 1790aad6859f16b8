"""Read recordings of real engines, and compare our states with them record by record."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvsim.errors import UserError
from policies import Unsupported

State = dict[str, Any]
"""State compared field by field, as in the recording."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first record whose state is not ours."""

    record: int
    """Number of the record, 0 for the first after the header."""
    operation: dict[str, Any]
    fields: tuple[str, ...]
    recorded: State
    ours: State


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far our policy agrees with a recording."""

    file: str
    era: str
    """Version of the engine, or a range of versions that behave alike."""
    agree: int
    """Records that agree in every compared field; a first disagreement may cause later ones."""
    total: int
    """Records with at least one field to compare."""
    first: Disagreement | None
    excused: tuple[str, ...] = ()
    """What was decided by the recording because its clock cannot tell, in words."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        found: dict[str, Any] = {"file": self.file, "era": self.era, "agree": self.agree, "total": self.total}
        if self.excused:
            found["excused"] = list(self.excused)
        if self.first is not None:
            found["first_disagreement"] = {
                "record": self.first.record,
                "operation": self.first.operation,
                "fields": list(self.first.fields),
                "recorded": self.first.recorded,
                "ours": self.first.ours,
            }
        return found


class Replay(Protocol):
    """Performs a recording's operations on one of our policies."""

    era: str

    @property
    def excused(self) -> Sequence[str]:
        """What was decided by the recording because its clock cannot tell, in words."""
        ...

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one operation; return the recorded state after it and ours, in the same fields."""
        ...

    def operation(self, record: Record) -> dict[str, Any]:
        """The part of a record that describes the operation."""
        ...


_NOT_A_RECORD = (KeyError, TypeError, IndexError, AttributeError, ArithmeticError)


def conform(path: str | Path, start: Callable[[Record], Replay]) -> Agreement:
    """Replay one recording; ``start`` builds the replay from the header. Raises ``UserError`` if it is not a recording.

    After a disagreement, later operations may be impossible on our state; such records count as disagreements.
    """
    source = Path(path)
    lines = read_lines(source)
    number, header = next(lines, (1, {}))
    agree = total = 0
    number_of_record = -1
    first: Disagreement | None = None
    try:
        replay = start(header)
        for number, record in lines:  # noqa: B007  (used where the loop fails)
            if record.get("type") == "footer":
                continue
            number_of_record += 1
            try:
                recorded, ours = replay.perform(record)
            except (*_NOT_A_RECORD, ValueError, Unsupported):
                if first is None:
                    raise
                total += 1
                continue
            if not recorded:  # Nothing to compare.
                continue
            total += 1
            differ = tuple(key for key in recorded if recorded[key] != ours.get(key))
            agree += not differ
            if differ and first is None:
                first = Disagreement(number_of_record, replay.operation(record), differ, recorded, ours)
    except _NOT_A_RECORD as e:
        raise UserError(f"{source}: line {number}: not a record of such a run ({type(e).__name__}: {e})") from None
    except (ValueError, Unsupported) as e:
        if isinstance(e, UserError) and str(e).startswith(f"{source}: "):
            raise
        raise UserError(f"{source}: line {number}: {str(e).splitlines()[0]}") from None
    if number_of_record < 0:
        raise UserError(f"{source}: no record behind its header")
    if not total:
        raise UserError(f"{source}: nothing that can be compared: no record says what it found, or shows a cell")
    return Agreement(source.name, replay.era, agree, total, first, tuple(replay.excused))


def whole_number(header: Record, key: str, default: int | None = None) -> int:
    """A count from a header. Raises ``ValueError`` unless it is a whole number from 1 to 2**31."""
    value = header[key] if default is None else header.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
        raise ValueError(f"{key} is {value!r:.40}; a whole number from 1 to 2**31 is expected")
    return value


def read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """The JSON objects of a file with their line numbers. Raises ``UserError`` if it cannot be read or parsed."""
    number = 0
    try:
        try:
            with path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
        except ValueError as e:
            raise UserError(f"{path}: cannot be read: {e}") from None
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as text:
            for line in text:
                number += 1
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise UserError(f"{path}: line {number}: a JSON object is expected")
                    yield number, value
    except UserError:
        raise
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; a recording (JSONL, plain or gzip) is expected") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path}: damaged gzip data ({e})") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except json.JSONDecodeError as e:
        raise UserError(f"{path}: line {number}: not JSON: {e.msg}") from None
    except (ValueError, RecursionError) as e:
        # A number of thousands of digits, or too deeply nested brackets.
        raise UserError(f"{path}: line {number}: not JSON: {e}") from None
