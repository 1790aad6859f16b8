"""What readers of JSONL share: one object in a line, strict JSON, and no line that could fill the memory."""

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
"""Characters in a line, where a reader does not say otherwise."""
MAX_ID = 2**48 - 1
"""The sources of texts end here; beyond are answers."""

_ARRAY = "an array; one JSON object a line is expected"

Object = dict[str, Any]


def json_lines(path: Path, text: TextIO, longest: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1; one without end is refused before it fills the memory.

    ``longest``: characters in a line at most. Raises ``WorkloadError``.
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
    """The object that a line is, which has at least these keys. Raises ``FlawError``."""
    check_text(line)
    try:
        # Only ``loads`` says what a byte order mark in the midst of a file is.
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
    """The value, which must be an object with at least these keys. Raises ``FlawError``.

    ``where``: what the value is called, with a colon and a blank; nothing for a whole row.
    """
    if not isinstance(value, dict):
        raise FlawError(f"{where}{shown(value)} is not an object; expected the keys {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise FlawError(f"{where}no key {key!r}; expected {', '.join(keys)}")
    return value


def whole(row: Object, key: str, low: int, high: int, where: str = "") -> int:
    """The row's whole number of that key, from ``low`` to ``high``. Raises ``FlawError``."""
    value = row[key]
    if type(value) is not int:  # bool is a kind of int
        raise FlawError(f"{where}{key} {shown(value)} is not a whole number")
    if not low <= value <= high:
        raise FlawError(f"{where}{key} {shown(value)} is out of range; expected {low} to {high}")
    return value


def tokens(row: Object, key: str, where: str = "") -> int:
    """The row's number of tokens of that key. Raises ``FlawError``."""
    return whole(row, key, 1, MAX_TOKENS, where)


def seconds(row: Object, key: str, where: str = "", most: float = 1e12) -> float:
    """The row's finite number of that key, from 0 to ``most``. Raises ``FlawError``."""
    value = row[key]
    if type(value) is not int and type(value) is not float:
        raise FlawError(f"{where}{key} {shown(value)} is not a number of seconds")
    if not (0 <= value <= most and math.isfinite(value)):
        raise FlawError(f"{where}{key} {shown(value)} is out of range; expected 0 to {most:.0f}")
    return float(value)


def ids(what: str, value: Any, high: int = MAX_ID) -> list[int]:
    """The value, which must be a list of whole numbers from 0 to ``high``. Raises ``FlawError``."""
    if not isinstance(value, list):
        raise FlawError(f"{what} {shown(value)} is not a list")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > high):
        wrong = next(i for i in value if type(i) is not int or not 0 <= i <= high)
        raise FlawError(f"{what}: {shown(wrong)} is not a whole number from 0 to {high}")
    return value


def check_chain(ids: list[int], parents: dict[int, int | None], where: str = "") -> None:
    """An id speaks for all that precedes it, so it always follows the same one; ``parents`` remembers which.

    Raises ``FlawError``, and then remembers nothing of these ids.
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
    """A value of a row, in one short line."""
    if isinstance(value, list | dict):
        return "[...]" if isinstance(value, list) else "{...}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _no_constant(name: str) -> None:
    """Python's reader takes NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> Object:
    """Python's reader keeps the last of several values for one key, and says nothing."""
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} twice")
            seen.add(key)
    return row


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_each_key_once)
