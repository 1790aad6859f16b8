"""The Mooncake traces: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Qin et al., "Mooncake: Trading more storage for less computation - a KVCache-centric architecture for serving LLM
chatbot" (FAST 2025); public at github.com/kvcache-ai/Mooncake, folder FAST25-release, under Apache-2.0. Timestamps
are in milliseconds, but quantised to 3 s: burstiness below that cannot be read off. ``hash_ids`` name the prompt's
blocks of 512 tokens, the last one perhaps not full; an id speaks for all that precedes it as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any, TextIO

from workloads.files import open_text
from workloads.lengths import MAX_TOKENS
from workloads.request import Segment, WorkloadError
from workloads.traces import Page, Row, Trace, paged

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_MS = 2**53 - 1
"""The last millisecond that a float still tells from the next one."""
_MAX_ID = 2**48 - 1
"""The sources of texts end here; beyond are answers."""
_MAX_LINE = 1 << 22
"""Characters in a line; the longest request that is accepted has 19,532 ids and fits many times over."""

_block = partial(tuple.__new__, Segment)
"""A segment from its fields; a trace has hundreds for each request."""


class MooncakeTrace(Trace):
    """The requests of one of these files; equal ids are equal blocks of content.

    While the file is checked, at the start, every id that was seen is held with the one before it (about 100 bytes
    for each): only so is an id found that follows another one elsewhere. Nothing of it is kept for the reading.
    """

    __slots__ = ()

    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        return paged(self._checked() if check_all else self._rows())

    def _checked(self) -> Iterator[Row]:
        """The rows without their content, of which nothing but the order of the blocks is left to check."""
        parents: dict[int, int | None] = {}
        for number, row, ids in self._read():
            _check_chain(f"{self.path}: row {number}", ids, parents)
            yield row

    def _rows(self) -> Iterator[Row]:
        """The rows with their content."""
        for _, (seconds, prompt, output, _), ids in self._read():
            yield Row(seconds, prompt, output, tuple(map(_block, zip(ids, repeat(0), repeat(BLOCK_TOKENS)))))

    def _read(self) -> Iterator[tuple[int, Row, list[int]]]:
        """Number of each row from 1, the row without its content, and the ids of that; each row checked alone."""
        first = before = 0
        with open_text(self.path) as text:
            for number, line in enumerate(_lines(f"{self.path}", text), 1):
                where = f"{self.path}: row {number}"
                row = _parse(where, line)
                now = _whole(where, row, "timestamp", 0, _MAX_MS)
                if number == 1:
                    first = before = now
                if now < before:
                    raise WorkloadError(f"{where}: timestamp {now} is earlier than the row before")
                before = now
                prompt = _whole(where, row, "input_length", 1, MAX_TOKENS)
                output = _whole(where, row, "output_length", 1, MAX_TOKENS)
                ids = _hash_ids(where, row["hash_ids"], prompt)
                yield number, Row((now - first) / 1e3, prompt, output), ids


def _lines(path: str, text: TextIO) -> Iterator[str]:
    """The lines that are not blank; one without end is refused before it fills the memory."""
    number = 0
    while line := text.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise WorkloadError(f"{path}: line {number}: longer than {_MAX_LINE} characters; JSONL is expected")
        if not line.isspace():
            yield line.rstrip("\r\n")


def _no_constant(name: str) -> None:
    """Python's reader takes NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's reader keeps the last of several values for one key, and says nothing."""
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {_shown(key)} twice")
            seen.add(key)
    return row


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_each_key_once)


def _parse(where: str, line: str) -> dict[str, Any]:
    try:
        # Only ``loads`` says what a byte order mark in the midst of a file is.
        row = json.loads(line) if line.startswith("\ufeff") else _DECODER.decode(line)
    except RecursionError:
        raise WorkloadError(f"{where}: not JSON that can be read: nested too deeply") from None
    except json.JSONDecodeError as e:
        raise WorkloadError(f"{where}: not JSON ({e.msg}, column {e.colno})") from None
    except ValueError as e:  # ours below, or an integer beyond Python's limit
        raise WorkloadError(f"{where}: not JSON ({str(e).partition(';')[0]})") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: {_shown(row)} is not an object; expected the keys {', '.join(_KEYS)}")
    for key in _KEYS:
        if key not in row:
            raise WorkloadError(f"{where}: no key {key!r}; expected {', '.join(_KEYS)}")
    return row


def _whole(where: str, row: dict[str, Any], key: str, low: int, high: int) -> int:
    value = row[key]
    if type(value) is not int:  # bool is a kind of int
        raise WorkloadError(f"{where}: {key} {_shown(value)} is not a whole number")
    if not low <= value <= high:
        raise WorkloadError(f"{where}: {key} {_shown(value)} is out of range; expected {low} to {high}")
    return value


def _hash_ids(where: str, ids: Any, prompt: int) -> list[int]:
    if not isinstance(ids, list):
        raise WorkloadError(f"{where}: hash_ids {_shown(ids)} is not a list")
    blocks = -(-prompt // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise WorkloadError(
            f"{where}: {len(ids)} hash_ids for input_length {prompt}; expected {blocks}, one for {BLOCK_TOKENS} tokens"
        )
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > _MAX_ID:
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i <= _MAX_ID)
        raise WorkloadError(f"{where}: hash_ids: {_shown(wrong)} is not a whole number from 0 to {_MAX_ID}")
    return ids


def _check_chain(where: str, ids: list[int], parents: dict[int, int | None]) -> None:
    """An id speaks for all that precedes it, so it always follows the same one; ``parents`` remembers which."""
    here = [None, *ids[:-1]]
    there = list(map(parents.setdefault, ids, here))
    if here != there:
        i, *both = next(row for row in zip(ids, here, there, strict=True) if row[1] != row[2])
        this, other = ("comes first" if p is None else f"follows {p}" for p in both)
        raise WorkloadError(f"{where}: hash_ids: {i} {this} but {other} elsewhere; an id has one predecessor")


def _shown(value: object) -> str:
    """A value of a row, in one short line."""
    if isinstance(value, list | dict):
        return "[...]" if isinstance(value, list) else "{...}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
