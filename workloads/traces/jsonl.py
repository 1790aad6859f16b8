"""Strict JSONL for all readers: one object in each line, and the length of a line is bounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from workloads.generators.lengths import MAX_TOKENS
from workloads.request import WorkloadError
from workloads.traces.bad_rows import FlawError, check_text
from workloads.traces.files import shown_path

MAX_LINE = 1 << 22
"""The most characters in a line, unless a reader sets its own limit."""
MAX_ID = 2**48 - 1
"""The last source number of a text; larger ones are answers."""

_ARRAY = "an array; one JSON object a line is expected"

Object = dict[str, Any]


def json_lines(path: Path, text: TextIO, longest: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1.

    Raises ``WorkloadError`` for a line of more than ``longest`` characters.
    """
    number = row = 0
    while line := text.readline(longest + 1):
        number += 1
        if len(line) > longest:
            where = f"row {row + 1}, line {number}"
            raise WorkloadError(f"{shown_path(path)}: {where}: longer than {longest} characters; JSONL is expected")
        if not line.isspace():
            row += 1
            yield row, line.rstrip("\r\n")


def parse(line: str, keys: Sequence[str]) -> Object:
    """Parse a line as an object that has at least these keys. Raises ``FlawError``."""
    check_text(line)
    try:
        # Only ``loads`` has a message for a byte order mark within a file.
        row = json.loads(line) if line.startswith("\ufeff") else _DECODER.decode(line)
    except RecursionError:
        raise FlawError("not JSON that can be read: nested too deeply") from None
    except json.JSONDecodeError as e:
        if line.lstrip().startswith("["):
            raise FlawError(_ARRAY) from None
        raise FlawError(f"not JSON ({e.msg}, column {e.colno})") from None
    except ValueError as e:  # ours below, or an integer beyond Python's limit
        raise FlawError(f"not JSON ({str(e).partition(';')[0]})") from None
    if isinstance(row, list):
        raise FlawError(_ARRAY)
    return check_keys("", row, keys)


def check_keys(where: str, value: Any, keys: Sequence[str]) -> Object:
    """Return the value. Raises ``FlawError`` unless it is an object with at least these keys.

    ``where``: the name of the value for messages, with a colon and a blank; empty for a whole row.
    """
    if not isinstance(value, dict):
        raise FlawError(f"{where}{shown(value)} is not an object; expected the keys {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise FlawError(f"{where}no key {key!r}; expected {', '.join(keys)}")
    return value


def whole(row: Object, key: str, low: int, high: int, where: str = "") -> int:
    """Return the value of a key. Raises ``FlawError`` unless it is a whole number from ``low`` to ``high``."""
    value = row[key]
    if type(value) is not int:  # bool is a kind of int
        raise FlawError(f"{where}{key} {shown(value)} is not a whole number")
    if not low <= value <= high:
        raise FlawError(f"{where}{key} {shown(value)} is out of range; expected {low} to {high}")
    return value


def tokens(row: Object, key: str, where: str = "") -> int:
    """Return the value of a key. Raises ``FlawError`` unless it is a number of tokens."""
    return whole(row, key, 1, MAX_TOKENS, where)


def seconds(row: Object, key: str, where: str = "", most: float = 1e12) -> float:
    """Return the value of a key. Raises ``FlawError`` unless it is a finite number from 0 to ``most``."""
    value = row[key]
    if type(value) is not int and type(value) is not float:
        raise FlawError(f"{where}{key} {shown(value)} is not a number of seconds")
    if not (0 <= value <= most and math.isfinite(value)):
        raise FlawError(f"{where}{key} {shown(value)} is out of range; expected 0 to {most:.0f}")
    return float(value)


def ids(what: str, value: Any, high: int = MAX_ID) -> list[int]:
    """Return the value. Raises ``FlawError`` unless it is a list of whole numbers from 0 to ``high``."""
    if not isinstance(value, list):
        raise FlawError(f"{what} {shown(value)} is not a list")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > high):
        wrong = next(i for i in value if type(i) is not int or not 0 <= i <= high)
        raise FlawError(f"{what}: {shown(wrong)} is not a whole number from 0 to {high}")
    return value


def check_chain(ids: list[int], parents: dict[int, int | None], where: str = "") -> None:
    """Check that each id follows the same one as in earlier lists, and add new ids to ``parents``.

    The id of a block stands for all text up to its end, so it has one predecessor. Raises ``FlawError``, and then
    leaves ``parents`` as it was.
    """
    before = len(parents)
    here = [None, *ids[:-1]]
    there = list(map(parents.setdefault, ids, here))
    if here != there:
        i, *both = next(row for row in zip(ids, here, there, strict=True) if row[1] != row[2])
        this, other = ("comes first" if p is None else f"follows {p}" for p in both)
        while len(parents) > before:
            parents.popitem()
        raise FlawError(f"{where}hash_ids: {i} {this} but {other} elsewhere; an id has one predecessor")


def shown(value: object) -> str:
    """A value of a row as one short line, for messages."""
    if isinstance(value, list | dict):
        return "[...]" if isinstance(value, list) else "{...}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's decoder accepts and JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> Object:
    """Refuse a key that is there twice; Python's decoder would silently keep the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} twice")
            seen.add(key)
    return row


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_each_key_once)
