"""Makes the tables of a device from parts of passes that were measured, and carries them on by physics.

Servers reach further than measurements do: more sequences, longer contexts, larger passes. Beyond the last entry that
was measured, a part takes as many times longer as its bytes or operations grow. No entry is below what physics allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvsim.costs.pass_layout import Sample
from kvsim.costs.pass_tables import Grid, Line, PassTables, Together
from kvsim.costs.physics import PassPhysics
from kvsim.costs.tables import FloatArray

TOKENS = 65_536
"""Tokens in a pass up to which tables are carried on."""
SEQUENCES = 4_096
CONTEXT = 1 << 20
"""Cells of one sequence up to which tables are carried on."""
LOSS = 0.003
"""Relative error that tables may have for being small, in each direction."""
SEEN = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, CONTEXT)
"""Cells that a token of a prompt sees on the mean, in tables of the attention of prompts."""


@dataclass(frozen=True)
class MeasuredParts:
    """What parts of passes take in all layers, in seconds."""

    work: Mapping[int, float]
    """All but attention and head, by tokens."""
    prompt_work: Mapping[int, float] | None
    """All but attention and head with a prompt in the pass; None: as without."""
    head: Mapping[int, float]
    """By sequences."""
    decode: Mapping[tuple[int, int], float]
    """Attention by sequences and the cells of each."""
    prompt: Mapping[tuple[int, int], float]
    """Attention of one prompt by its tokens and those that were computed before."""
    together: Together | None = None

    def tables(self, physics: PassPhysics) -> PassTables:
        """The tables, carried on and bounded by what physics says of the model on the device.

        Entries that the others tell within ``LOSS`` are left out.
        """
        return PassTables(
            work=_work(self.work, physics),
            prompt_work=None if self.prompt_work is None else _work(self.prompt_work, physics),
            head=_line(self.head, np.array(_doubled(self.head, SEQUENCES)), lambda n: physics.head(n).least_s),
            decode=self._decode(physics),
            prompt=self._prompt(physics),
            together=self.together,
        )

    def _decode(self, physics: PassPhysics) -> Grid:
        rows = _doubled({r for r, _ in self.decode}, SEQUENCES)
        columns = _doubled({c for _, c in self.decode}, CONTEXT)
        seconds = np.full((len(rows), len(columns)), np.nan)
        for (row, column), value in self.decode.items():
            seconds[rows.index(row), columns.index(column)] = value
        needs = physics.decode(np.array(rows)[:, None], np.array(columns)[None, :]).least_s
        for i in range(len(rows)):
            known = not np.isnan(seconds[i]).all()
            for j in range(len(columns)):
                if np.isnan(seconds[i, j]):
                    before = (i, j - 1) if known and j else (i - 1, j)
                    seconds[i, j] = seconds[before] * needs[i, j] / needs[before]
        return _grid(rows, columns, np.maximum(seconds, needs))

    def _prompt(self, physics: PassPhysics) -> Grid:
        rows = _doubled({n for n, _ in self.prompt}, TOKENS)
        floor = min(self.prompt.values())
        needs = physics.prompt(np.array(rows)[:, None], np.array(SEEN)[None, :]).least_s
        seconds = np.empty_like(needs)
        for i, n in enumerate(rows):
            own = sorted(
                (cached + (n + 1) / 2, value) for (tokens, cached), value in self.prompt.items() if tokens == n
            )
            if own:
                seconds[i] = _by_seen(own, floor)
            else:
                seconds[i] = seconds[i - 1] * needs[i] / needs[i - 1]
        return _grid(rows, SEEN, np.maximum(seconds, needs))


@dataclass(frozen=True)
class TestedParts:
    """Passes that tell how well tables predict, and the parts that they are predicted from.

    These are all parts, or fewer of them where none of the passes would otherwise be new to them.
    """

    parts: MeasuredParts
    passes: Sequence[Sample]


def _by_seen(own: Sequence[tuple[float, float]], floor: float) -> FloatArray:
    """Seconds at ``SEEN`` of what was measured at other numbers of cells; several short prompts see fewer than one."""
    seen, values = np.array(own).T
    wanted = np.array(SEEN, dtype=float)
    found = np.interp(wanted, seen, values)
    found = np.where(wanted < seen[0], np.maximum(values[0] * wanted / seen[0], floor), found)
    behind: FloatArray = np.where(wanted > seen[-1], values[-1] * wanted / seen[-1], found)
    return behind


def _work(measured: Mapping[int, float], physics: PassPhysics) -> Line:
    def need(tokens: FloatArray) -> FloatArray:
        least: FloatArray = physics.matrices(tokens).least_s + physics.experts(tokens).least_s
        return least

    return _line(measured, np.array(_doubled(measured, TOKENS)), need)


def _line(measured: Mapping[int, float], at: FloatArray, need: Callable[[FloatArray], FloatArray]) -> Line:
    last = max(measured)
    needs, anchor = need(at), float(need(np.array([last]))[0])
    values = np.interp(at, sorted(measured), [measured[n] for n in sorted(measured)])
    values = np.where(at > last, measured[last] * needs / anchor, values)
    seconds = np.maximum(values, needs)
    kept = _telling(at, seconds[:, None])
    return Line(at=tuple(int(n) for n in at[kept]), seconds=rounded(seconds[kept]))


def _doubled(measured: Mapping[int, float] | set[int], most: int) -> list[int]:
    """The numbers that were measured, and on from the last one by powers of two."""
    numbers = sorted(measured)
    behind = 1 << numbers[-1].bit_length()
    while behind <= most:
        numbers.append(behind)
        behind *= 2
    return numbers


def _grid(rows: Sequence[int], columns: Sequence[int], seconds: FloatArray) -> Grid:
    down, across = _telling(rows, seconds), _telling(columns, seconds.T)
    kept = seconds[np.ix_(down, across)]
    return Grid(
        rows=tuple(rows[i] for i in down),
        columns=tuple(columns[i] for i in across),
        seconds=tuple(rounded(row) for row in kept),
    )


def _telling(at: ArrayLike, seconds: FloatArray) -> list[int]:
    """The entries between which those left out are linear within ``LOSS``; ``seconds``: a row for each entry of ``at``.

    The last two are kept, since times go on as between them.
    """
    numbers, last = np.asarray(at, dtype=float), len(seconds) - 2
    kept = [0]
    while kept[-1] < last:
        first = kept[-1]
        fine = [first + 1]
        for end in range(first + 2, last + 1):
            part = ((numbers[first : end + 1] - numbers[first]) / (numbers[end] - numbers[first]))[:, None]
            between = seconds[first] + part * (seconds[end] - seconds[first])
            if np.all(np.abs(between - seconds[first : end + 1]) <= LOSS * seconds[first : end + 1]):
                fine.append(end)
        kept.append(fine[-1])
    return [*kept, last + 1]


def rounded(values: FloatArray) -> tuple[float, ...]:
    """The values to four digits, rounded up so that none falls below a bound; they keep files small."""
    scale = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-12))) - 3)
    return tuple(float(f"{value:.4g}") for value in np.ceil(values / scale - 1e-9) * scale)
