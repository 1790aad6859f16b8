"""Files of recordings: JSON lines, plain or gzip, a header and then records by their kind."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from policies import Unsupported

Record = dict[str, Any]

NOT_A_RECORD = (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, ValueError, Unsupported)
"""What goes wrong where a record is not what it should be."""


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


def check_target(path: Path) -> None:
    """Raise ``UserError`` for a path that is not the name of a file to write."""
    if not path.name or path.is_dir():
        raise UserError(f"{path}: cannot write: the name of a file is expected, this is a folder")


def write_recording(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines, gzipped if the name ends with ``.gz``; equal records give equal bytes.

    The file is written atomically. Raises ``UserError`` if it cannot be.
    """
    data = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        new.replace(path)
    except OSError as e:
        with suppress(OSError):
            new.unlink()
        raise UserError(f"{path}: cannot write: {e.strerror}") from None


def whole_number(header: Record, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A count from a record. Raises ``ValueError`` unless it is a whole number from ``least`` to 2**31."""
    value = header[key] if default is None else header.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**31:
        raise ValueError(f"{key} is {value!r:.40}; a whole number from {least} to 2**31 is expected")
    return value
