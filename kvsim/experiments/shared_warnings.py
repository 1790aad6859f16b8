"""One line for the same warning from many runs, with the range of the numbers that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|[.,]\d)")
"""A number that stands alone; those in names such as q8_0 or llama-3.1-8b are part of the text."""
_ITEMS = re.compile(r", (?![^(]*\))")
"""What stands between items, but not within brackets."""
_UNDER = re.compile(r"assumed under (.*)(, as in .*)")
"""A policy, and the engine that it stands for."""


@dataclass(frozen=True)
class SharedWarning:
    """A warning that one or more runs gave."""

    text: str
    """In place of numbers that differ it has their range, such as ``512–640``."""
    sources: tuple[str, ...]
    """What gave it, each once, in the order in which they came."""
    runs: int
    """Number of runs that gave it."""

    def line(self, noun: str = "policies") -> str:
        """The warning with what gave it: ``paged: text``, or ``2 policies (paged, ring): text``."""
        if len(self.sources) == 1:
            return f"{self.sources[0]}: {self.text}"
        return f"{len(self.sources)} {noun} ({', '.join(self.sources)}): {self.text}"

    def line_of_runs(self, total: int) -> str:
        """The warning with the number of runs, of ``total``, that gave it, and what they were runs of."""
        return f"in {self.runs:,} of {total:,} runs: {self.text} ({', '.join(self.sources)})"


def share_warnings(runs: Iterable[tuple[str, Sequence[str]]]) -> list[SharedWarning]:
    """Merge the warnings of runs, given as (source, warnings), in order of their first appearance.

    Warnings that differ only in numbers become one, if no run gave two of them: such a run lists different things, as
    rows of a trace, and its warnings are merged with equal ones only.
    """
    runs = [(source, tuple(dict.fromkeys(lines))) for source, lines in runs]
    listed = set()
    for _, lines in runs:
        patterns = [_NUMBER.sub("0", line) for line in lines]
        listed |= {pattern for pattern in patterns if patterns.count(pattern) > 1}
    groups: dict[str, list[tuple[str, str]]] = {}
    for source, lines in runs:
        for line in lines:
            pattern = _NUMBER.sub("0", line)
            groups.setdefault(line if pattern in listed else pattern, []).append((source, line))
    return [
        SharedWarning(_merged([line for _, line in group]), tuple(dict.fromkeys(s for s, _ in group)), len(group))
        for group in groups.values()
    ]


def share_assumptions(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines of what runs assumed, with each item of an engine once, and a range where only its numbers differ."""
    found: dict[tuple[str, str], tuple[dict[str, None], list[str]]] = {}
    for line in lines:
        begin, _, items = line.partition(": ")
        policy, engine = under.groups() if (under := _UNDER.fullmatch(begin)) else ("", begin)
        for item in _ITEMS.split(items):
            policies, alike = found.setdefault((engine, _NUMBER.sub("0", item)), ({}, []))
            policies[policy] = None
            alike.append(item)
    said: dict[str, list[str]] = {}
    for (engine, _), (policies, alike) in found.items():
        begin = engine if "" in policies else f"assumed under {', '.join(policies)}{engine}"
        said.setdefault(begin, []).append(_merged(alike))
    return tuple(f"{begin}: {', '.join(items)}" for begin, items in said.items())


def _merged(lines: Sequence[str]) -> str:
    """Lines that differ only in numbers as one."""
    by_place = zip(*(_NUMBER.findall(line) for line in lines), strict=True)
    ranges = iter([_range(numbers) for numbers in by_place])
    return _NUMBER.sub(lambda _: next(ranges), lines[0])


def _range(numbers: Sequence[str]) -> str:
    low, high = (pick(numbers, key=lambda text: float(text.replace(",", ""))) for pick in (min, max))
    return low if float(low.replace(",", "")) == float(high.replace(",", "")) else f"{low}–{high}"
