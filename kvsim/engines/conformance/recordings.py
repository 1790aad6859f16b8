"""Recordings of real engines: reading them, and holding ours against them record by record."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvsim.errors import UserError
from policies import Unsupported

State = dict[str, Any]
"""What is compared: field by field, as in the recording."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first record whose state is not ours."""

    record: int
    """Its number in the file, the first after the header being 0."""
    operation: dict[str, Any]
    fields: tuple[str, ...]
    recorded: State
    ours: State


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one recording and our policy agree."""

    file: str
    era: str
    """Of the engine: its version, or a span of versions that behave alike."""
    agree: int
    """Records whose every compared field is ours. After the first that is not, those that follow may suffer."""
    total: int
    """Records after which anything was recorded that can be compared."""
    first: Disagreement | None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        found: dict[str, Any] = {"file": self.file, "era": self.era, "agree": self.agree, "total": self.total}
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
    """Carries out a recording's operations on ours."""

    era: str

    def perform(self, record: Record) -> tuple[State, State]:
        """Carry out one operation; the recorded state after it, and ours in the same fields."""
        ...

    def operation(self, record: Record) -> dict[str, Any]:
        """The part of a record that says what was done."""
        ...


_NOT_A_RECORD = (KeyError, TypeError, IndexError, AttributeError, ArithmeticError)


def conform(path: str | Path, start: Callable[[Record], Replay]) -> Agreement:
    """Replay one recording, begun from its header line. Raises ``UserError`` where the file is not one.

    Once ours has parted from the recording, what is asked of it may make no sense there; such records disagree too.
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
            if not recorded:  # Nothing was seen after it.
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
    if number_of_record >= 0 and not total:
        raise UserError(f"{source}: nothing that can be compared: no record says what it found, or shows a cell")
    return Agreement(source.name, replay.era, agree, total, first)


def whole_number(header: Record, key: str, default: int | None = None) -> int:
    """A count from a header. Raises ``ValueError`` where it is none, or absurd."""
    value = header[key] if default is None else header.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
        raise ValueError(f"{key} is {value!r:.40}; a whole number from 1 to 2**31 is expected")
    return value


def read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """The JSON objects of a file with their line numbers. Raises ``UserError`` for whatever is wrong with it."""
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
        # A number of thousands of digits, or brackets without end.
        raise UserError(f"{path}: line {number}: not JSON: {e}") from None
