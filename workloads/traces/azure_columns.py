"""Many rows of an Azure trace at once, by column: for rows that are written as the published files write them."""

from __future__ import annotations

from datetime import date, datetime

import numpy as np
from numpy.typing import NDArray

from workloads.generators.lengths import MAX_TOKENS
from workloads.traces.azure_rows import AzureClock
from workloads.traces.clock import TIMESTAMP, parse_time
from workloads.traces.trace import Page

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_COMMA, _CR, _LF, _ZERO = b",\r\n0"
_DIGITS = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18]
"""Where YYYY-MM-DD HH:MM:SS has digits; a fraction's stand from _FRACTION on."""
_MARKS = [4, 7, 10, 13, 16]
_FRACTION = 20
_MOST_SECONDS = 9 * 10**9
"""So many seconds, in nanoseconds, still fit into 64 bits."""
_DAY = 86_400


class OddError(Exception):
    """These rows are written in another way or wrong: they must be read one by one."""


def read_columns(block: bytes, clock: AzureClock) -> Page:
    """The rows of whole lines, each with its line end, the last perhaps without.

    All times must be written alike, in fields of the same width. Raises ``OddError`` for whatever is not exactly as
    expected, and then leaves the clock alone.
    """
    data = np.frombuffer(block if block.endswith(b"\n") else block + b"\n", dtype=np.uint8)
    ends, commas = np.flatnonzero(data == _LF), np.flatnonzero(data == _COMMA)
    if len(commas) != 2 * len(ends):
        raise OddError
    starts = np.concatenate(([0], ends[:-1] + 1))
    stops = ends - (data[ends - 1] == _CR)
    one, two = commas[0::2], commas[1::2]
    width = int(one[0])
    if not np.array_equal(starts + width, one):
        raise OddError
    prompts, outputs = _numbers(data, one + 1, two), _numbers(data, two + 1, stops)
    for tokens in (prompts, outputs):
        if tokens.min() < 1 or tokens.max() > MAX_TOKENS:
            raise OddError
    ticks = _ticks(data[starts[:, None] + np.arange(width)], clock)
    return Page(ticks / 1e9, prompts.tolist(), outputs.tolist())


def _numbers(data: Bytes, starts: Ints, stops: Ints) -> Ints:
    """Whole numbers, written in these stretches of the data; 0 where there is nothing; shape (rows,)."""
    widths = stops - starts
    longest = int(widths.max())
    if longest > len(str(MAX_TOKENS)):
        raise OddError
    numbers = np.zeros(len(widths), dtype=np.int64)
    for k in range(longest):
        # Times come first in a line, so that so many characters before its end are still within the data.
        digits = np.where(widths > k, data[stops - 1 - k] - _ZERO, 0)
        if digits.max() > 9:
            raise OddError
        numbers += digits * np.int64(10**k)
    return numbers


def _ticks(texts: Bytes, clock: AzureClock) -> Ints:
    """Nanoseconds from the trace's first row to each of these times, shape (rows, characters); moves the clock on."""
    like = texts[0].tobytes().decode("latin-1")
    match = TIMESTAMP.fullmatch(like)
    if match is None:
        raise OddError
    decimals = len(match[2] or ".") - 1
    fraction = range(_FRACTION, _FRACTION + decimals)
    rest = [*_MARKS, *range(19, _FRACTION if decimals else 19), *range(len(like) - len(match[3] or ""), len(like))]
    # Each row's marks and offset are the first one's, which is checked by those who read one by one.
    if not (texts[:, rest] == texts[0, rest]).all():
        raise OddError
    digits = texts[:, [*_DIGITS, *fraction]].T - _ZERO
    if digits.max() > 9:
        raise OddError
    local = _days(_written(digits[:8])) * _DAY + _seconds(*(_written(digits[k : k + 2]) for k in (8, 10, 12)))
    nanoseconds = _written(digits[14:]) * np.int64(10 ** (9 - decimals))
    moment, beyond = parse_time("TIMESTAMP", like)
    first, before = (moment, beyond) if clock.first is None else (clock.first, clock.nanoseconds)
    seconds = local - (local[0] - _second(moment)) - _second(first)
    if np.abs(seconds).max() >= _MOST_SECONDS:
        raise OddError
    ticks: Ints = seconds * np.int64(10**9) + (nanoseconds - before)
    if ticks[0] < clock.last or (ticks[1:] < ticks[:-1]).any():
        raise OddError
    clock.first, clock.nanoseconds, clock.last = first, before, int(ticks[-1])
    return ticks


def _written(digits: Bytes) -> Ints:
    """The numbers that digits make; from shape (digits, rows) to (rows,)."""
    numbers = np.zeros(digits.shape[1], dtype=np.int64)
    for row in digits:
        numbers = numbers * 10 + row
    return numbers


def _days(written: Ints) -> Ints:
    """Days from the first of January of year 1, for dates as YYYYMMDD."""
    different, which = np.unique(written, return_inverse=True)
    # An offset may lead out of the first year or the last that Python knows.
    if different[0] < 2_0000 or different[-1] > 9998_9999:
        raise OddError
    try:
        days = [date(n // 10_000, n // 100 % 100, n % 100).toordinal() for n in different.tolist()]
    except ValueError:
        raise OddError from None
    found: Ints = np.array(days, dtype=np.int64)[which]
    return found


def _seconds(hours: Ints, minutes: Ints, seconds: Ints) -> Ints:
    """Seconds from midnight."""
    if hours.max() > 23 or minutes.max() > 59 or seconds.max() > 59:
        raise OddError
    return (hours * 60 + minutes) * 60 + seconds


def _second(moment: datetime) -> int:
    """Seconds from the midnight on which ``_days`` counts 0."""
    return moment.toordinal() * _DAY + (moment.hour * 60 + moment.minute) * 60 + moment.second
