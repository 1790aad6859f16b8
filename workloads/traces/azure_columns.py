"""A fast reader of Azure traces: many rows at once, by column, if they are formatted as in the published files."""

from __future__ import annotations

from datetime import date

import numpy as np
from numpy.typing import NDArray

from workloads.generators.lengths import MAX_TOKENS
from workloads.traces.clock import TIMESTAMP, Clock, parse_datetime
from workloads.traces.trace import RowBatch

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_COMMA, _CR, _LF, _ZERO = b",\r\n0"
_DIGITS = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18]
"""Indices of the digits in YYYY-MM-DD HH:MM:SS; those of a fraction begin at ``_FRACTION``."""
_MARKS = [4, 7, 10, 13, 16]
_FRACTION = 20
_MOST_SECONDS = 4 * 10**9
"""Seconds whose nanoseconds still fit into 64 bits, twice."""
_DAY = 86_400


class IrregularRowsError(Exception):
    """These rows are damaged or formatted in another way, so they must be read one by one."""


def read_columns(block: bytes, clock: Clock) -> RowBatch:
    """Read the rows of whole lines; only the last line may lack its line end.

    All times must have the same format and width. Raises ``IrregularRowsError`` for anything unexpected, and then
    does not change the clock.
    """
    data = np.frombuffer(block if block.endswith(b"\n") else block + b"\n", dtype=np.uint8)
    ends, commas = np.flatnonzero(data == _LF), np.flatnonzero(data == _COMMA)
    if len(commas) != 2 * len(ends):
        raise IrregularRowsError
    starts = np.concatenate(([0], ends[:-1] + 1))
    stops = ends - (data[ends - 1] == _CR)
    one, two = commas[0::2], commas[1::2]
    width = int(one[0])
    if not np.array_equal(starts + width, one):
        raise IrregularRowsError
    prompts, outputs = _numbers(data, one + 1, two), _numbers(data, two + 1, stops)
    for tokens in (prompts, outputs):
        if tokens.min() < 1 or tokens.max() > MAX_TOKENS:
            raise IrregularRowsError
    ticks = _ticks(data[starts[:, None] + np.arange(width)], clock)
    return RowBatch(ticks / 1e9, prompts.tolist(), outputs.tolist())


def _numbers(data: Bytes, starts: Ints, stops: Ints) -> Ints:
    """Parse the whole numbers in ``data[starts:stops]``; 0 for an empty field; shape (rows,)."""
    widths = stops - starts
    longest = int(widths.max())
    if longest > len(str(MAX_TOKENS)):
        raise IrregularRowsError
    numbers = np.zeros(len(widths), dtype=np.int64)
    for k in range(longest):
        # The time comes first in a line and is longer, so that this index is never negative.
        digits = np.where(widths > k, data[stops - 1 - k] - _ZERO, 0)
        if digits.max() > 9:
            raise IrregularRowsError
        numbers += digits * np.int64(10**k)
    return numbers


def _ticks(texts: Bytes, clock: Clock) -> Ints:
    """Nanoseconds from the first row to each time; ``texts``: shape (rows, characters). Advances the clock."""
    like = texts[0].tobytes().decode("latin-1")
    match = TIMESTAMP.fullmatch(like)
    if match is None:
        raise IrregularRowsError
    decimals = len(match[2] or ".") - 1
    fraction = range(_FRACTION, _FRACTION + decimals)
    rest = [*_MARKS, *range(19, _FRACTION if decimals else 19), *range(len(like) - len(match[3] or ""), len(like))]
    # Marks and offset are equal in all rows; ``parse_datetime`` below checks those of the first.
    if not (texts[:, rest] == texts[0, rest]).all():
        raise IrregularRowsError
    digits = texts[:, [*_DIGITS, *fraction]].T - _ZERO
    if digits.max() > 9:
        raise IrregularRowsError
    local = _days(_numbers_of(digits[:8])) * _DAY + _seconds(*(_numbers_of(digits[k : k + 2]) for k in (8, 10, 12)))
    nanoseconds = _numbers_of(digits[14:]) * np.int64(10 ** (9 - decimals))
    now = parse_datetime("TIMESTAMP", like)
    first = now if clock.first is None else clock.first
    seconds = local - local[0]
    if np.abs(seconds).max() >= _MOST_SECONDS or abs(now - first) >= _MOST_SECONDS * 10**9:
        raise IrregularRowsError
    ticks: Ints = seconds * np.int64(10**9) + (nanoseconds - nanoseconds[0]) + (now - first)
    if now < clock.last or (ticks[1:] < ticks[:-1]).any():
        raise IrregularRowsError
    clock.move(now)
    clock.move(first + int(ticks[-1]))
    return ticks


def _numbers_of(digits: Bytes) -> Ints:
    """Numbers from their digits; from shape (digits, rows) to (rows,)."""
    numbers = np.zeros(digits.shape[1], dtype=np.int64)
    for row in digits:
        numbers = numbers * 10 + row
    return numbers


def _days(written: Ints) -> Ints:
    """Proleptic ordinals of dates that are written as YYYYMMDD."""
    different, which = np.unique(written, return_inverse=True)
    # An offset may lead out of the range of years in Python.
    if different[0] < 2_0000 or different[-1] > 9998_9999:
        raise IrregularRowsError
    try:
        days = [date(n // 10_000, n // 100 % 100, n % 100).toordinal() for n in different.tolist()]
    except ValueError:
        raise IrregularRowsError from None
    found: Ints = np.array(days, dtype=np.int64)[which]
    return found


def _seconds(hours: Ints, minutes: Ints, seconds: Ints) -> Ints:
    """Seconds from midnight."""
    if hours.max() > 23 or minutes.max() > 59 or seconds.max() > 59:
        raise IrregularRowsError
    return (hours * 60 + minutes) * 60 + seconds
